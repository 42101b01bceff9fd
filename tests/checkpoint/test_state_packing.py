"""Packing: every value comes back with its exact type and bits, or is refused by name."""

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from samestep.checkpoint import packing
from samestep.checkpoint.packing import as_bad_checkpoint, check_packed, pack, unpack
from samestep.errors import CheckpointError, UsageError

Point = namedtuple("Point", "x y")


def there_and_back(value, prefix="state"):
    """Packs, sends the facts through JSON text, and unpacks."""
    packed = pack(value, prefix)
    facts = json.loads(json.dumps(packed.facts, allow_nan=False))
    check_packed(facts, packed.tensors, prefix)
    return unpack(facts, packed.tensors)


def tensor_bits(tensor):
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return (torch.view_as_real(flat) if flat.is_complex() else flat).contiguous().view(torch.uint8).numpy().tobytes()


def is_same(one, other):
    """Whether two values are of the same types and bits, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        facts = [(t.dtype, t.shape, t.stride(), tensor_bits(t)) for t in (one, other)]
        return facts[0] == facts[1]
    if isinstance(one, np.ndarray | np.generic):
        facts = [(v.dtype, v.shape, v.strides, v.tobytes()) for v in (one, other)]
        return facts[0] == facts[1]
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, dict):
        extras = [vars(v) if hasattr(v, "__dict__") else None for v in (one, other)]
        return extras[0] == extras[1] and is_same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(is_same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


ORDERED = OrderedDict(b=1, a=2)
ORDERED_WITH_METADATA = nn.BatchNorm1d(2).state_dict()

VALUES = [
    None,
    True,
    0,
    -(2**63),
    2**1000,
    0.1,
    -0.0,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
    "",
    "$tensor",
    "größe ∂ 😀",
    (),
    (1, (2.0, [None])),
    [[], {}],
    {"$tensor": "model.weight", "": 1},
    {"$dict": [], "$tuple": 3},
    {1: "int", "1": "str", 1.5: "float", None: "none", (1, "a"): "tuple"},
    {True: "bool", "a.b": {"c": 1}, "a": {"b.c": 2}},
    ORDERED,
    ORDERED_WITH_METADATA,
    Counter({30: 2, 80: 1}),
    np.arange(6, dtype="i4").reshape(2, 3),
    np.array([], dtype=np.complex64),
    np.array([1j], dtype=np.complex128),
    np.zeros((0, 3)),
    np.array([True, False]),
    np.float32("nan"),
    np.float64(0.1),
    np.bool_(True),
    np.int64(-1),
]


@pytest.mark.parametrize("value", VALUES, ids=[f"{type(value).__name__}-{i}" for i, value in enumerate(VALUES)])
def test_a_value_comes_back_with_its_type_and_bits(value):
    assert is_same(there_and_back(value), value)
    assert is_same(there_and_back({"deep": [(value,)]}), {"deep": [(value,)]})


plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats().filter(lambda value: not math.isnan(value))
    | st.just(math.nan)
    | st.text(max_size=8)
)
keys = plain | st.tuples(plain, plain)
nested_values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text("$ab", max_size=3), inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=20,
)


@settings(max_examples=150)
@given(nested_values)
def test_any_nesting_comes_back(value):
    assert is_same(there_and_back(value), value)


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
DENSE = [
    dtype
    for dtype in DTYPES
    if not str(dtype).startswith(("torch.q", "torch.bits", "torch.int", "torch.uint"))
    or dtype
    in (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
]


def some_tensor(dtype, *shape):
    data = torch.from_numpy(
        np.random.default_rng(1).integers(0, 256, max(math.prod(shape), 1) * dtype.itemsize, np.uint8)
    )
    return (data % 2 if dtype is torch.bool else data).view(dtype)[: math.prod(shape)].reshape(shape).clone()


@pytest.mark.parametrize("dtype", DENSE, ids=str)
def test_a_tensor_of_every_dtype_comes_back_with_all_its_bits(dtype):
    for value in (some_tensor(dtype, 3, 4), some_tensor(dtype, 1).reshape(()), some_tensor(dtype, 0, 2)):
        assert is_same(there_and_back(value), value)
        assert {tensor.dtype for tensor in pack(value, "").tensors.values()} <= {*packing.DTYPES}, "as files have them"
    transposed = some_tensor(dtype, 2, 3).t()
    assert is_same(there_and_back(transposed), transposed)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 1, 1).to(memory_format=torch.channels_last),
        torch.randn(4, 1, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d),
        torch.randn(3, 4, 5).permute(2, 0, 1),
        torch.randn(4, 6, dtype=torch.complex128).t(),
        torch.empty_strided((0, 3), (1, 0)),
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_strides_of_dense_memory_come_back(tensor):
    back = there_and_back(tensor)
    assert is_same(back, tensor)
    assert back.is_contiguous(memory_format=torch.contiguous_format) == tensor.is_contiguous()


def test_memory_with_gaps_becomes_contiguous():
    for value in (torch.arange(10.0)[::2], torch.ones(1).expand(3, 4), torch.arange(12).reshape(3, 4)[:, 1:3]):
        back = there_and_back(value)
        assert back.is_contiguous()
        assert torch.equal(back, value)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugates_and_negatives_that_are_only_marked_are_resolved(dtype):
    value = torch.randn(3, dtype=dtype)
    assert torch.equal(there_and_back(value.conj()), value.conj())
    assert torch.equal(there_and_back(value.conj().imag), value.conj().imag)


def test_unpacked_tensors_are_in_memory_of_their_own():
    value = torch.randn(5)
    packed = pack({"a": value}, "")
    assert packed.tensors["a"].data_ptr() == value.data_ptr(), "packing copies nothing"
    back = unpack(packed.facts, packed.tensors)
    value.zero_()
    assert not torch.equal(back["a"], value)
    assert unpack(packed.facts, packed.tensors)["a"].data_ptr() != back["a"].data_ptr()
    assert back["a"].data_ptr() % 16 == 0


def test_parameters_come_back_as_tensors_without_a_graph():
    leaf = torch.ones(2, requires_grad=True)
    back = there_and_back([nn.Parameter(torch.ones(2)), (leaf * 2).sum()])
    assert [(type(tensor), tensor.requires_grad) for tensor in back] == [(torch.Tensor, False)] * 2
    assert back[1].item() == 4


def test_memory_seen_twice_is_stored_under_each_name():
    embedding = nn.Embedding(6, 4)
    head = nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    state = nn.ModuleDict({"embedding": embedding, "head": head}).state_dict()
    packed = pack(state, "model")
    assert list(packed.tensors) == ["model.embedding.weight", "model.head.weight"]
    assert is_same(unpack(packed.facts, packed.tensors), state)


def test_arrays_come_back_in_rows():
    back = there_and_back(np.asfortranarray(np.eye(3)))
    assert back.flags.c_contiguous
    assert np.array_equal(back, np.eye(3))


def test_names_tell_the_place_and_never_collide():
    value = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), 0: torch.ones(2), "0": torch.ones(3)}
    packed = pack(value, "p")
    assert list(packed.tensors) == ["p.a.b", "p.a.b#2", "p.0", "p.0#2"]
    assert is_same(unpack(packed.facts, packed.tensors), value)
    assert list(pack(torch.ones(1), "").tensors) == ["value"]
    assert list(pack({"__metadata__": torch.ones(1)}, "").tensors) == ["__metadata__#2"]


def test_the_states_of_all_generators_come_back():
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    random.gauss(0, 1), np.random.standard_normal()
    state = {
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "pcg": np.random.default_rng(1).bit_generator.state,
        "philox": np.random.Generator(np.random.Philox(1)).bit_generator.state,
    }
    drawn = random.gauss(0, 1), np.random.standard_normal(), torch.rand(1)
    back = there_and_back(state)
    assert is_same(back, state)
    random.setstate(back["random"]), np.random.set_state(back["numpy"]), torch.set_rng_state(back["torch"])
    assert (random.gauss(0, 1), np.random.standard_normal(), torch.rand(1)) == drawn


class OwnDict(dict):
    pass


REFUSED = [
    (
        object(),
        r"the state holds a object at s\.a\.0, which a checkpoint cannot hold; needed: tensors, NumPy arrays of",
    ),
    ({1, 2}, r"holds a set at s\.a\.0.*a sorted list for a set"),
    (frozenset(), "holds a frozenset at"),
    (deque([1]), r"holds a collections.deque at s\.a\.0.*a list for a deque"),
    (defaultdict(list), r"holds a collections.defaultdict at s\.a\.0"),
    (b"\0", r"holds a bytes at s\.a\.0"),
    (1j, r"holds a complex at s\.a\.0"),
    (torch.float16, r"holds a dtype at s\.a\.0"),
    (torch.Size([2]), r"holds a Size at s\.a\.0"),
    (2**5000, r"holds a int at s\.a\.0 that JSON cannot hold"),
    ("\ud83d\ude00", r"holds a str at s\.a\.0 that JSON cannot hold"),
    (np.array(["text"]), r"NumPy data of dtype <U4 at s\.a\.0.*keep texts as lists"),
    (np.arange(3, dtype=">i4"), r"NumPy data of dtype >i4 at s\.a\.0.*in the machine's byte order"),
    ({np.float32(1): 1}, r"holds a numpy.float32 at s\.a\.0 \(as a key\)"),
    (lambda: 0, "holds a function at"),
    (Point(1, 2), r"holds a \w*test_state_packing.Point at"),
    (OwnDict(), r"test_state_packing.OwnDict at s\.a\.0"),
    (torch.Generator(), "holds a torch._C.Generator at"),
    (torch.eye(2).to_sparse(), r"holds a Tensor \(torch.sparse_coo\) at s\.a\.0.*\.to_dense\(\)"),
    (torch.empty(2, device="meta"), r"Tensor \(meta\)"),
    (nn.UninitializedParameter(), "UninitializedParameter"),
    (np.array([object()]), r"NumPy data of dtype object at s\.a\.0"),
    (np.zeros(2, dtype=[("a", "i4")]), "NumPy data of dtype"),
    (np.ma.masked_array([1]), "MaskedArray"),
    ({torch.ones(1): 1}, r"holds a Tensor .* at s\.a\.0 \(as a key\)"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[message[:20] for _, message in REFUSED])
def test_what_cannot_be_kept_is_refused_by_its_place_and_type(value, message):
    with pytest.raises(UsageError, match=message):
        pack({"a": [value]}, "s")


def test_a_state_that_contains_itself_is_refused():
    state = {"a": []}
    state["a"].append(state)
    with pytest.raises(UsageError, match="s is nested too deeply for a checkpoint, or contains itself"):
        pack(state, "s")
    twice = []
    assert there_and_back([twice, twice]) == [[], []]


@pytest.mark.parametrize(
    "facts",
    [
        {"$tensor": "missing"},
        {"$tensor": "a", "stride": [1, 1, 1]},
        {"$tensor": "a", "dtype": "nn"},
        {"$tensor": "a", "dtype": "complex128"},
        {"$array": "a"},
        {"$array": {"$tuple": []}},
        {"$scalar": 1},
        {"$tuple": 3},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$counter": 1},
        {"$float": "x"},
        {"$tensor": "a", "stride": [10**12]},
        {"$tensor": "a", "stride": [0]},
        {"$tensor": "a", "dtype": "_dynamo"},
    ],
    ids=str,
)
def test_facts_that_do_not_fit_are_an_error_of_the_checkpoint(facts):
    with pytest.raises(CheckpointError, match="the packed state cannot be read"):
        unpack(facts, {"a": torch.ones(2), "bytes": torch.full((8,), 65, dtype=torch.uint8)})


@pytest.mark.parametrize(
    "facts",
    [
        {"$tuple": "ab"},
        {"$tuple": [], "more": 1},
        {"$dict": [[{"$tensor": "a"}, 1]]},
        {"$dict": [["a", 1]]},
        {"$float": "1.0"},
        {"$tensor": "a", "more": False},
        float("nan"),
        "\ud800",
    ],
    ids=lambda facts: str(facts)[:40].encode("ascii", "replace").decode(),
)
def test_facts_that_packing_does_not_give_fail_its_check(facts):
    tensors = {"a": torch.ones(2)}
    unpack(facts, tensors)
    with pytest.raises(CheckpointError, match="the packed state"):
        check_packed(facts, tensors, "a")


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("value", [nested(100), nested(100_000)], ids=["101 levels", "100,001 levels"])
def test_what_is_nested_too_deeply_is_refused_by_packing_and_unpacking(value):
    with pytest.raises(UsageError, match=r"state is nested too deeply for a checkpoint, .*: at most 100 levels"):
        pack(value, "state")
    assert there_and_back(nested(99)) == nested(99)
    with pytest.raises(CheckpointError):
        unpack(nested(100_000), {})


def test_a_word_of_a_newer_version_is_named():
    with pytest.raises(CheckpointError, match=r"holds '\$fraction', which a newer samestep wrote: upgrade"):
        unpack([{"$fraction": [1, 2]}], {})


@pytest.mark.parametrize("read", [lambda: None.get, lambda: {}["a"], lambda: [][0], lambda: "a" + 1], ids=range(4))
def test_a_checkpoint_of_another_form_is_told_without_the_words_of_python(read):
    with pytest.raises(CheckpointError) as caught, as_bad_checkpoint("it holds no state"):
        read()
    assert str(caught.value) == "it holds no state (something in it is missing, or of another kind)"
