"""The state checksum changes with every bit of the state and its place, and with nothing else."""

import hashlib
import json

import numpy as np
import pytest
import state_changes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_changes import trained
from torch import nn

from samestep.checkpoint.digest import ROW_WORDS, as_hex, random_words, state_checksum

WIDE = 3 * ROW_WORDS + 17
MASK = 2**64 - 1
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.float8_e4m3fn),
]


def of(model, *optimizers):
    return int(state_checksum(model, optimizers))


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
    value = state_checksum(*_as_list(trained()))
    assert value.dtype == torch.int64
    assert value.shape == ()
    assert not value.requires_grad
    assert as_hex(int(value)) == as_hex(int(value) % 2**64)
    assert as_hex(-1) == "f" * 16
    assert as_hex(5) == "0000000000000005"


def _as_list(pair):
    return pair[0], [pair[1]]


def test_equal_states_have_equal_checksums_whoever_computes_them():
    assert of(*trained()) == of(*trained())
    model, optimizer = trained()
    assert int(state_checksum(model, [optimizer])) == int(state_checksum(model, [optimizer])) == of(model, optimizer)
    assert of(*trained(1)) != of(*trained(2))


def test_it_follows_state_that_comes_later_and_tensors_that_are_replaced():
    model, optimizer = trained(steps=0)
    empty = int(state_checksum(model, [optimizer]))
    model(torch.ones(4, 30)).sum().backward()
    optimizer.step()
    assert int(state_checksum(model, [optimizer])) == of(model, optimizer) != empty
    optimizer.load_state_dict(optimizer.state_dict())
    model[0].weight.data = model[0].weight.data.clone()
    assert int(state_checksum(model, [optimizer])) == of(model, optimizer)
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    assert int(state_checksum(model, [optimizer])) == of(model, optimizer)


def swap_a_number_and_its_negative(model, optimizer):
    row = model[2].weight.data[3]
    row[4], row[9] = 0.5, -0.5
    before = of(model, optimizer)
    row[[4, 9]] = row[[9, 4]]
    assert of(model, optimizer) != before


def swap_two_steps(model, optimizer):
    first, second = optimizer.state[model[0].weight], optimizer.state[model[0].bias]
    first["step"] += 5
    before = of(model, optimizer)
    first["step"], second["step"] = second["step"], first["step"]
    assert of(model, optimizer) != before


CHANGES = [*state_changes.CHANGES, swap_a_number_and_its_negative, swap_two_steps]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_any_change_of_the_state_changes_the_checksum(change):
    model, optimizer = trained()
    model[1].running_mean.zero_()
    before = of(model, optimizer)
    change(model, optimizer)
    assert of(model, optimizer) != before


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_counts_by_its_bytes_at_any_offset(dtype):
    data = torch.randint(0, 2, (2 * ROW_WORDS * 4 + 64,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    size = torch.empty(0, dtype=dtype).element_size()
    for count in (1, 3, 4 * ROW_WORDS // size, 4 * ROW_WORDS // size + 3):
        aligned = data[: count * size].clone().view(dtype)
        shifted = torch.zeros(count + 3, dtype=dtype)
        shifted[3:] = aligned
        assert of_tensors(shifted[3:]) == of_tensors(aligned)
        for place in {0, count - 1}:
            changed = aligned.clone()
            changed.view(torch.uint8)[place * size] ^= 1
            assert of_tensors(changed) != of_tensors(aligned)


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
