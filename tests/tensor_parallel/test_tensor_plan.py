"""The plan as arithmetic: which modules are divided, how, and which cannot be."""

import pytest
import torch
from tensor_models import FED, MODELS, Encoder
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from samestep.engine.strategies import TensorParallel, as_strategy
from samestep.engine.tensor_parallel.plan import (
    Division,
    chain_plan,
    describe_plan,
    encoder_layer_plan,
    read_plan,
)
from samestep.engine.tensor_parallel.styles import dealt
from samestep.errors import UsageError


def planned(model, plan=None, size=2, sequence=False):
    """The divisions by name, as (style, number, sequence_dim)."""
    found = read_plan(model, TensorParallel(plan, sequence), size)
    return {name: (each.style, each.number, each.sequence_dim) for name, each in found.items()}


def styles(model, plan=None):
    return {name: style for name, (style, *_) in planned(model, plan).items()}


class GatedLayer(nn.TransformerEncoderLayer):
    """An encoder layer whose features go together two by two."""

    def _ff_block(self, x):
        gate, value = self.linear1(x).chunk(2, -1)
        return self.linear2(gate * value)


def with_adapter(linear):
    linear.low_rank = nn.Parameter(torch.zeros(8, 2))
    return linear


CHAINS = {
    "a pair": ([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)], {"0": "colwise", "2": "rowwise"}),
    "side by side": ([nn.Linear(8, 8), nn.Linear(8, 8)], {"0": "colwise", "1": "rowwise"}),
    "with dropout": (
        [nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1), nn.Identity(), nn.Linear(8, 8)],
        {"0": "colwise", "2": "dropout:-1", "4": "rowwise"},
    ),
    "dropout before": ([nn.Dropout(0.1), nn.Linear(8, 8), nn.Linear(8, 8)], {"1": "colwise", "2": "rowwise"}),
    "dropout behind": ([nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.1)], {"0": "colwise", "1": "rowwise"}),
    "three": ([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)], {"0": "colwise", "1": "rowwise"}),
    "four": (
        [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)],
        {"0": "colwise", "1": "rowwise", "2": "colwise", "3": "rowwise"},
    ),
    "one that mixes features between": ([nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)], {}),
    "softmax between": ([nn.Linear(8, 8), nn.Dropout(0.1), nn.Softmax(-1), nn.Linear(8, 8)], {}),
    "a pair behind one that mixes": (
        [nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)],
        {"2": "colwise", "4": "rowwise"},
    ),
    "none": ([nn.ReLU()], {}),
}


@pytest.mark.parametrize(
    "wrapped",
    [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm, with_adapter],
    ids=["weight_norm", "spectral_norm", "adapter"],
)
def test_layers_whose_weights_are_made_of_others_are_left_whole_and_refused_where_they_are_named(wrapped):
    chain = nn.Sequential(wrapped(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    assert chain_plan(chain) == {"2": "colwise", "3": "rowwise"}
    with pytest.raises(UsageError, match=r"0 \(.*Linear\) has more than a weight and a bias"):
        read_plan(chain, TensorParallel({"0": "colwise"}), 2)


def test_an_encoder_layer_that_computes_otherwise_is_left_alone():
    assert encoder_layer_plan(GatedLayer(8, 2, 16)) == {}


@pytest.mark.parametrize("case", CHAINS)
def test_linear_layers_of_a_chain_are_divided_two_by_two(case):
    layers, expected = CHAINS[case]
    assert chain_plan(nn.Sequential(*layers)) == expected


def test_a_chain_with_a_forward_of_its_own_is_left_alone():
    class Own(nn.Sequential):
        def forward(self, x):
            return self[1](x)

    assert chain_plan(Own(nn.Linear(8, 8), nn.Linear(8, 8))) == {}


@pytest.mark.parametrize(("batch_first", "places"), [(True, 1), (False, 0)])
def test_an_encoder_layer_is_divided_by_heads_and_features_and_by_its_positions(batch_first, places):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first)
    plan = encoder_layer_plan(layer)
    assert plan[""] == f"sequence_region:{places}"
    assert (plan["self_attn"], plan["linear1"], plan["linear2"]) == ("heads", "colwise", "rowwise")
    assert set(plan) - {""} <= {name for name, _ in layer.named_modules()}


@pytest.mark.parametrize("batch_first", [True, False])
def test_without_sequence_only_what_holds_or_drops_features_is_divided(batch_first):
    found = planned(Encoder(batch_first=batch_first))
    layer = {"self_attn": ("heads", 0, None), "linear1": ("colwise", 0, None)}
    layer |= {"dropout": ("dropout", -1, None), "linear2": ("rowwise", 0, None)}
    assert found == {f"encoder.layers.{k}.{name}": value for k in (0, 1) for name, value in layer.items()}


@pytest.mark.parametrize("batch_first", [True, False])
def test_with_sequence_what_is_between_is_divided_by_positions(batch_first):
    places = int(batch_first)
    found = planned(Encoder(batch_first=batch_first), sequence=True)
    for k in (0, 1):
        layer = f"encoder.layers.{k}"
        assert found[layer] == ("sequence_region", places, places)
        assert found[f"{layer}.linear1"] == ("colwise", 0, places)
        assert found[f"{layer}.dropout"] == ("dropout", -1, places)
        assert found[f"{layer}.norm1"] == ("sequence", 0, places)
        assert found[f"{layer}.dropout1"] == ("dropout", places, None)


def test_what_is_outside_a_region_has_all_positions():
    plan = {"tokens": "colwise_gathered", "region": "sequence_region", "region.1": "colwise", "region.3": "rowwise"}
    found = planned(MODELS["positioned"](), plan, sequence=True)
    assert found["tokens"] == ("colwise_gathered", 0, None)
    assert found["region.1"] == ("colwise", 0, 1)


def test_a_plan_of_the_models_own_is_read_and_its_chains_are_left_to_it():
    found = styles(MODELS["gpt"]())
    assert found["blocks.0.queries_keys_values"] == "packed_colwise"
    assert found["blocks.1.feed_out"] == "rowwise"
    assert not any(name.endswith("norm") for name in found)
    assert len(found) == 10
    assert set(styles(MODELS["fickle"]())) == {f"{name}.{k}" for name in ("chain", "extra", "unused") for k in "02"}


def test_the_first_pattern_that_names_a_module_counts():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert styles(model, {"0": "colwise", "*": "rowwise"}) == {"0": "colwise", "1": "rowwise"}
    assert styles(model, {"*": "rowwise", "0": "colwise"}) == {"0": "rowwise", "1": "rowwise"}


def test_a_star_stands_for_one_part_of_a_name_and_not_for_more():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    assert styles(model, {"*.0": "colwise"}) == {"0.0": "colwise"}
    with pytest.raises(UsageError, match="must be of class"):
        planned(model, {"*": "colwise"})


def test_divisions_are_in_the_order_of_the_model_whatever_that_of_the_plan():
    forward = read_plan(MODELS["embedded"](), TensorParallel(FED), 2)
    backward = read_plan(MODELS["embedded"](), TensorParallel(dict(reversed(FED.items()))), 2)
    assert list(forward) == list(backward) == ["feed_in", "feed_out"]
    assert describe_plan(forward) == describe_plan(backward)


def test_the_hash_of_a_plan_tells_styles_numbers_and_positions_apart():
    divisions = [
        Division("colwise"),
        Division("rowwise"),
        Division("packed_colwise", 2),
        Division("packed_colwise", 3),
        Division("packed_colwise", 3, 4),
        Division("colwise", sequence_dim=1),
        Division(ColwiseParallel()),
    ]
    assert len({describe_plan({"a": each}) for each in divisions}) == len(divisions)
    assert describe_plan({"a": divisions[0]}) != describe_plan({"b": divisions[0]})


REFUSED = {
    "no plan": ("pieced", None, r"cannot see how Pieced .* tensor_plan\(\)"),
    "unknown style": ("embedded", {"feed_in": "columns"}, "has 'columns' for 'feed_in'; it is one of 'colwise'"),
    "no style": ("embedded", {"feed_in": 3}, "has 3 for 'feed_in'"),
    "unknown module": ("embedded", {"feed_up": "colwise"}, "'feed_up', which is no module of Embedded: it has tokens"),
    "number too much": ("embedded", {"feed_out": "rowwise:2"}, "has 'rowwise:2'"),
    "divided heads": ("embedded", {"feed_in": "colwise:4"}, "has 4 heads, which 3 ranks .* use 1, 2, 4 of them"),
    "divided heads of several": ("embedded", {"feed_in": "packed_colwise:2x4"}, "has 4 heads, which 3 ranks"),
    "no such heads": ("embedded", {"feed_in": "colwise:5"}, "24 outputs are not those of 5 heads"),
    "number missing": ("embedded", {"feed_in": "packed_colwise"}, "how many matrices lie in one"),
    "number too small": ("embedded", {"feed_in": "packed_colwise:1"}, "how many matrices lie in one"),
    "no number": ("embedded", {"feed_in": "packed_colwise:x"}, "how many matrices lie in one"),
    "another class": ("embedded", {"norm": "colwise"}, r"norm \(LayerNorm\), which must be of class Linear or Embed"),
    "no attention": ("embedded", {"feed_in": "heads"}, "must be of class MultiheadAttention"),
    "outputs": ("embedded", {"gate": "colwise"}, "gate .Linear. has 16 outputs, which 3 ranks .* use 1, 2, 4, 8, 16"),
    "inputs": ("embedded", {"gate": "rowwise"}, "16 inputs, which 3 ranks"),
    "entries": ("embedded", {"places": "rowwise"}, "8 entries, which 3 ranks"),
    "features": ("embedded", {"tokens": "colwise"}, "16 features, which 3 ranks"),
    "packed unequally": ("embedded", {"feed_in": "packed_colwise:5"}, "24 outputs are not those of 5 equal matrices"),
    "packed indivisibly": ("embedded", {"feed_in": "packed_colwise:3"}, "has 8 outputs in each matrix, which 3 ranks"),
    "heads": ("encoder", None, r"encoder.layers.0.self_attn \(Multihead.* has 4 heads, which 3 ranks"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_cannot_be_is_refused_with_what_would_do(case):
    name, plan, message = REFUSED[case]
    with pytest.raises(UsageError, match=message):
        read_plan(MODELS[name](), TensorParallel(plan), 3)


def test_a_parameter_that_a_module_outside_the_plan_has_too_is_refused_by_name():
    model = MODELS["shared"]()
    with pytest.raises(UsageError, match=r"parameter first.weight is used in first and in again, and would be divided"):
        read_plan(model, TensorParallel({"first": "colwise"}), 2)
    tied = MODELS["gpt with a head"]()
    tied.head.weight = tied.byte_embedding.weight
    with pytest.raises(UsageError, match=r"byte_embedding\.weight is used in byte_embedding and in head"):
        read_plan(tied, TensorParallel({"byte_embedding": "rowwise", "head": "colwise"}), 2)


def two_norms():
    """A region with two norms in it."""
    model = MODELS["positioned"]()
    model.region.append(nn.LayerNorm(16))
    return model


NORMS = {"region": "sequence_region", "region.0": "sequence", "region.4": "sequence"}


@pytest.mark.parametrize("plan", [NORMS, {**NORMS, "region.4": "sequence_region"}], ids=["both", "one"])
def test_norms_with_one_weight_are_refused_by_name_where_positions_are_divided(plan):
    model = two_norms()
    planned(model, plan, sequence=True)
    model.region[4].weight = model.region[0].weight
    with pytest.raises(UsageError, match=r"parameter region\.0\.weight is used in region\.0 and in region\.4"):
        planned(model, plan, sequence=True)
    assert planned(model, plan) == {}


def test_one_norm_in_two_places_of_a_region_is_divided_once_and_outside_of_it_refused():
    model, plan = two_norms(), {"region": "sequence_region", "region.0": "sequence"}
    model.region[4] = model.region[0]
    assert set(planned(model, plan, sequence=True)) == {"region", "region.0"}
    model.norm = model.region[0]
    with pytest.raises(UsageError, match=r"weight is used in region\.0 and in region\.4 and in norm"):
        planned(model, plan, sequence=True)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 4, "vdim": 8}], ids=str)
def test_kinds_of_attention_that_are_not_divided_by_heads_are_refused(options):
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 4, **options)})
    with pytest.raises(UsageError, match="kdim, vdim"):
        read_plan(model, TensorParallel({"attention": "heads"}), 2)


def test_sequence_needs_modules_that_work_on_a_part_of_the_positions():
    with pytest.raises(UsageError, match="sequence=True needs modules in the plan"):
        planned(MODELS["embedded"](), FED, sequence=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"plan": {}}, "got plan={}"), ({"plan": "colwise"}, "got plan='colwise'"), ({"sequence": 1}, "got sequence=1")],
)
def test_options_that_cannot_be_are_refused_at_once(options, message):
    with pytest.raises(UsageError, match=message):
        TensorParallel(**options)


def test_the_strategy_goes_by_its_name_and_spreads_the_optimizer_by_itself():
    assert as_strategy("tensor") == TensorParallel()
    with pytest.raises(UsageError, match=r"keeps it by parts: leave .*shard_optimizer out"):
        as_strategy("tensor", shard_optimizer=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_slices_of_dealt_rows_have_an_equal_part_of_every_matrix(size):
    whole = torch.arange(4 * 6 * 2).view(24, 2)
    slices = dealt(whole, 4, size).chunk(size)
    for rank, part in enumerate(slices):
        matrices = [matrix.chunk(size)[rank] for matrix in whole.chunk(4)]
        assert torch.equal(part, torch.cat(matrices))
