"""The digest and the checksum of a state change with whatever the state is made of, and with nothing else."""

import hashlib
import json
from textwrap import dedent

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from samestep.checkpoint.digest import ROW_WORDS, as_hex, random_words, state_checksum, state_digest

WIDE = 3 * ROW_WORDS + 17
MASK = 2**64 - 1
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float8_e4m3fn),
]


def of(model, *optimizers):
    return int(state_checksum(model, optimizers))


KINDS = {"digest": lambda model, *optimizers: state_digest(model, optimizers), "checksum": of}
BOTH = pytest.mark.parametrize("of", KINDS.values(), ids=KINDS)


def trained(steps=1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 300), nn.BatchNorm1d(300), nn.Linear(300, 30))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.arange(120.0).view(4, 30)).sum().backward()
        optimizer.step()
    return model, optimizer


CHANGES = {
    "a bit": "model[0].weight.data.view(torch.int32)[0, 0] ^= 1",
    "the last bit": "model[2].weight.data.view(torch.int32)[-1, -1] ^= 1",
    "a sign": "model[0].weight.data[7, 7] *= -1",
    "a buffer": "model[1].running_mean[0] += 1",
    "a count": "model[1].num_batches_tracked += 1",
    "the optimizer's state": 'state[model[0].weight]["exp_avg"].view(torch.int32)[0, 0] ^= 1',
    "the optimizer's step": 'state[model[0].bias]["step"] += 1',
    "the kind of the step": 'state[model[0].bias]["step"] = float(state[model[0].bias]["step"])',
    "a further number in the optimizer's state": 'state[model[0].bias]["extra"] = 1',
    "a further truth in the optimizer's state": 'state[model[0].bias]["extra"] = True',
    "the nesting of the optimizer's state": """
        own = state[model[0].weight]
        own["nested"] = [{"moments": (own["exp_avg"],)}]
    """,
    "a state that is forgotten": "del state[model[2].bias]",
    "a dtype": "model[1].num_batches_tracked = model[1].num_batches_tracked.int()",
    "a dtype of equal bytes": "model[1].running_mean = model[1].running_mean.view(torch.int32)",
    "a shape": "model[0].weight.data = model[0].weight.data.view(30, 300)",
    "a name": 'model.register_buffer("later", model[1]._buffers.pop("running_var"))',
    "the signs of zeros": "model[1].running_mean.neg_()",
    "two numbers swapped": """
        row = model[0].weight.data[3]
        row[[4, 9]] = row[[9, 4]]
    """,
    "a number and its negative swapped": """
        row = model[2].weight.data[3]
        row[[4, 9]] = row[[9, 4]]
    """,
    "two steps swapped": """
        first, second = state[model[0].weight], state[model[1].bias]
        first["step"], second["step"] = second["step"], first["step"]
    """,
    "two parameters of one shape swapped": """
        a, b = model[0].bias.data.clone(), model[1].weight.data.clone()
        model[0].bias.data, model[1].weight.data = b, a
    """,
    "a moment and its parameter swapped": """
        moment = state[model[0].weight]["exp_avg"]
        value = moment.clone()
        moment.copy_(model[0].weight.data)
        model[0].weight.data.copy_(value)
    """,
    "the two moments swapped": """
        own = state[model[2].weight]
        own["exp_avg"], own["exp_avg_sq"] = own["exp_avg_sq"], own["exp_avg"]
    """,
}


@BOTH
@pytest.mark.parametrize("change", CHANGES)
def test_any_change_of_the_state_is_seen(of, change):
    model, optimizer = trained()
    model[1].running_mean.zero_()
    model[2].weight.data[3, 4], model[2].weight.data[3, 9] = 0.5, -0.5
    optimizer.state[model[1].bias]["step"] += 5
    before = of(model, optimizer)
    exec(dedent(CHANGES[change]), {"torch": torch, "model": model, "state": optimizer.state})
    assert of(model, optimizer) != before


@BOTH
def test_equal_states_are_equal_and_layout_gradients_modes_and_settings_do_not_count(of):
    before = of(*trained())
    model, optimizer = trained()
    assert of(model, optimizer) == of(model, optimizer) == before
    assert of(*trained(2)) != before
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    assert not model[0].weight.is_contiguous()
    optimizer.zero_grad()
    model.eval()
    optimizer.param_groups[0]["lr"] = 7
    assert of(model, optimizer) == before


@BOTH
def test_state_that_comes_later_and_tensors_that_are_replaced_count(of):
    model, optimizer = trained(steps=0)
    empty = of(model, optimizer)
    model(torch.ones(4, 30)).sum().backward()
    optimizer.step()
    stepped = of(model, optimizer)
    assert stepped != empty
    optimizer.load_state_dict(optimizer.state_dict())
    model[0].weight.data = model[0].weight.data.clone()
    assert of(model, optimizer) == stepped
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert of(model, optimizer) != stepped


@BOTH
def test_several_optimizers_count_by_their_number(of):
    model, adam = trained()
    sgd = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert of(model, adam, sgd) == of(model, adam)
    assert of(model, sgd, adam) != of(model, adam)


def test_the_digest_is_what_its_docstring_says():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(2.0)
    expected = hashlib.sha256(b"weight torch.float32 [1, 1]\n" + b"\x00\x00\x00\x40").hexdigest()
    assert state_digest(model, torch.optim.SGD(model.parameters())) == expected


def holding(*tensors):
    """A module whose whole state is some buffers."""
    model = nn.Module()
    for number, tensor in enumerate(tensors):
        model.register_buffer(f"b{number}", tensor)
    return model


def of_tensors(*tensors):
    return of(holding(*tensors))


def scattered(word):
    """The finalizer of SplitMix64 on a Python integer."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def random_word(number):
    return scattered((number + 1) * 0x9E3779B97F4A7C15 & MASK)


def text_hash(value):
    return int.from_bytes(hashlib.blake2b(json.dumps(value).encode(), digest_size=8).digest(), "little")


def reference(names, tensors, plain=()):
    """The construction of the docstring in Python's integers."""
    full, rest = [], b""
    for tensor in tensors:
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        whole = len(data) // (4 * ROW_WORDS) * 4 * ROW_WORDS
        full.append(data[:whole])
        rest += data[whole:] + bytes(-(len(data) - whole) % 16)
    rest += bytes(-len(rest) % (4 * ROW_WORDS)) or bytes(0 if rest else 4 * ROW_WORDS)
    words = np.frombuffer(rest + b"".join(full), "<i4").reshape(-1, ROW_WORDS).tolist()
    weights = [random_word(k) for k in range(ROW_WORDS)]
    total = 0
    for number, row in enumerate(words):
        sum_of_row = sum(w * x for w, x in zip(weights, row, strict=True))
        total += scattered(sum_of_row + random_word(ROW_WORDS + number) & MASK)
    layout = [(name, str(t.dtype), list(t.shape)) for name, t in zip(names, tensors, strict=True)]
    return scattered(total + text_hash(layout) + text_hash(list(plain)) & MASK)


def test_the_checksum_is_what_its_docstring_says():
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(n, generator=generator) for n in (5, WIDE, 0, ROW_WORDS)]
    tensors += [
        torch.tensor(True),
        torch.randn(ROW_WORDS, generator=generator).double(),
        torch.arange(7).to(torch.int8),
    ]
    names = [f"b{number}" for number in range(len(tensors))]
    assert of_tensors(*tensors) % 2**64 == reference(names, tensors)


def test_a_state_of_nothing_has_a_checksum():
    assert of(nn.Module()) % 2**64 == reference([], [])


def test_plain_numbers_are_in_it_as_json():
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight].update({"step": 3, "nested": [0.5, None, "text"]})
    plain = [("optimizer 0: weight: nested", v) for v in (0.5, None, "text")] + [("optimizer 0: weight: step", 3)]
    assert of(model, optimizer) % 2**64 == reference(["weight"], [model.weight], plain)


def test_the_weights_and_keys_keep_the_promise_of_certain_detection():
    weights = random_words(0, ROW_WORDS)
    low = weights & 0xFFFFFFFF
    assert len(set(low.tolist())) == ROW_WORDS
    assert 0 not in low.tolist()
    assert [w % 2**64 for w in weights[:3].tolist()] == [random_word(k) for k in range(3)]


def test_the_checksum_is_a_word_on_the_device_that_hex_digits_show():
    model, optimizer = trained()
    value = state_checksum(model, [optimizer])
    assert value.dtype == torch.int64
    assert value.shape == ()
    assert not value.requires_grad
    assert as_hex(int(value)) == as_hex(int(value) % 2**64)
    assert as_hex(-1) == "f" * 16
    assert as_hex(5) == "0000000000000005"


places = st.integers(0, WIDE - 1)
words = st.one_of(st.integers(-(2**31), 2**31 - 1), st.sampled_from([0, 1, -1, -(2**31), 2**30]))


@settings(max_examples=150)
@given(places, places, words, words, st.integers(0, 3))
def test_two_swapped_words_change_it_however_far_apart(first, second, a, b, fill):
    base = torch.full((WIDE,), fill, dtype=torch.int32)
    one, other = base.clone(), base.clone()
    one[first], one[second] = a, b
    other[first], other[second] = b, a
    assert (of_tensors(one) == of_tensors(other)) == torch.equal(one, other)


@settings(max_examples=100)
@given(st.data())
def test_swaps_and_moves_between_tensors_are_seen(data):
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 4, 5, ROW_WORDS - 1, ROW_WORDS, ROW_WORDS + 1]), min_size=2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    tensors = [torch.randint(-2, 3, (n,), generator=generator) for n in sizes]
    before = of_tensors(*tensors)
    i, j = (data.draw(st.integers(0, len(sizes) - 1)) for _ in "ij")
    k, m = data.draw(st.integers(0, sizes[i] - 1)), data.draw(st.integers(0, sizes[j] - 1))
    changed = [tensor.clone() for tensor in tensors]
    changed[i][k], changed[j][m] = tensors[j][m], tensors[i][k]
    same = all(torch.equal(a, b) for a, b in zip(tensors, changed, strict=True))
    assert (of_tensors(*changed) == before) == same


@settings(max_examples=40)
@given(st.integers(1, 3 * ROW_WORDS), st.integers(1, 3 * ROW_WORDS))
def test_zeros_moved_over_the_border_of_two_tensors_are_seen(first, second):
    one = of_tensors(torch.zeros(first), torch.zeros(second))
    assert one != of_tensors(torch.zeros(first + 1), torch.zeros(second - 1))
    assert one != of_tensors(torch.zeros(first + second))


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_counts_by_its_bytes_at_any_offset(of, dtype):
    data = torch.randint(0, 2, (2 * ROW_WORDS * 4 + 64,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    size = torch.empty(0, dtype=dtype).element_size()
    for count in (1, 3, 4 * ROW_WORDS // size, 4 * ROW_WORDS // size + 3):
        aligned = data[: count * size].clone().view(dtype)
        shifted = torch.zeros(count + 3, dtype=dtype)
        shifted[3:] = aligned
        assert of(holding(shifted[3:])) == of(holding(aligned))
        for place in {0, count - 1}:
            changed = aligned.clone()
            changed.view(torch.uint8)[place * size] ^= 1
            assert of(holding(changed)) != of(holding(aligned))


def layouts(tensor):
    """The same values in other places of memory."""
    wider = torch.zeros(tensor.shape[0], tensor.shape[1] + 3)
    wider[:, 1:-2] = tensor
    yield "transposed", tensor.t().contiguous().t()
    yield "with gaps", wider[:, 1:-2]
    yield "backwards in memory", tensor.flip(0).contiguous().flip(0)
    yield "expanded", tensor[:1].expand(4, -1)


@pytest.mark.parametrize("columns", [1, 5, ROW_WORDS, 2 * ROW_WORDS + 9])
def test_strides_gaps_and_offsets_do_not_count(columns):
    tensor = torch.randn(1, columns, generator=torch.Generator().manual_seed(0)).repeat(4, 1)
    for name, other in layouts(tensor):
        assert of_tensors(other) == of_tensors(tensor), name


def test_conjugate_and_negative_views_count_by_what_they_show():
    values = torch.randn(2 * ROW_WORDS, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert of_tensors(values.conj()) == of_tensors(values.conj().resolve_conj()) != of_tensors(values)
    assert of_tensors(values.conj().imag) == of_tensors(-values.imag)


@pytest.mark.parametrize("threads", [2, 3])
def test_the_number_of_threads_does_not_count(threads):
    tensor = torch.randn(100 * ROW_WORDS, generator=torch.Generator().manual_seed(0))
    torch.set_num_threads(1)
    alone = of_tensors(tensor)
    torch.set_num_threads(threads)
    assert of_tensors(tensor) == alone


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here")
def test_the_kind_of_device_does_not_count():
    device = torch.accelerator.current_accelerator()
    model, optimizer = trained()
    on_cpu = of(model, optimizer)
    moved, other = trained()
    moved.to(device)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[moved[0].weight]["exp_avg"].device.type == device.type
    assert of(moved, other) == on_cpu
    for state in other.state.values():
        state["step"] = state["step"].to(device)
    assert of(moved, other) == on_cpu
