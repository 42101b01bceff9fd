"""Two contracts: what breaks the bits, what is only told, and what nobody needs to know."""

import ast
import copy
import json
from pathlib import Path

import pytest
from train_programs import make_trainer, points
from worlds import in_turns

from samestep.checkpoint import contract_diff
from samestep.checkpoint.contract_diff import ABSENT, BREAKING, UNMENTIONED, ContractChange, differences, explain

CONTRACT = {
    "global_batch_size": 256,
    "num_microbatches": 8,
    "seed": 0,
    "device_kind": "cpu",
    "num_threads": 1,
    "versions": {
        "samestep": "0.3",
        "torch": "2.13.0",
        "numpy": "2.1",
        "python": "3.11.9",
        "platform": "linux-x86_64",
        "cpu_capability": "AVX2",
        "cuda": "13.0",
        "cudnn": "9",
    },
    "flags": {"cudnn_allow_tf32": True, "float32_matmul_precision": "highest"},
    "precision": "32-true",
    "data": "digits",
    "max_grad_norm": None,
    "optimizer": "sgd",
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 0.0,
    "model": {"parameters": 61_706, "fingerprint": "00ff"},
    "loss_code": "ab",
    "shuffle": True,
    "drop_last": False,
    "options": {"width": 1.0},
    "epochs": 10,
    "devices": ["cpu", "cpu"],
    "shares": None,
    "num_workers": 0,
    "processor": "EPYC",
    "command": ["python", "train.py"],
}
OTHER_VALUES = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 0.5, str: lambda v: v + "x"}


def leaves(value, path=()):
    for key, item in value.items():
        if isinstance(item, dict):
            yield from leaves(item, (*path, key))
        else:
            yield (*path, key), item


def changed(path, value):
    contract = copy.deepcopy(CONTRACT)
    place = contract
    for key in path[:-1]:
        place = place[key]
    if value is ABSENT:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return contract


WARNED = {"versions.samestep", "versions.python", "versions.numpy", "processor"}
UNSAID = {"epochs", "devices", "shares", "num_workers", "command"}


def test_equal_contracts_agree_and_are_explained_by_nothing():
    assert differences(CONTRACT, json.loads(json.dumps(CONTRACT))) == []
    assert explain([]) == ""


@pytest.mark.parametrize(
    ("path", "value"), list(leaves(CONTRACT)), ids=lambda v: ".".join(v) if isinstance(v, tuple) else ""
)
def test_each_field_breaks_is_told_or_is_left_unsaid(path, value):
    name, other = ".".join(path), OTHER_VALUES.get(type(value), lambda v: ["something"])(value)
    expected = [] if name in UNSAID else [ContractChange(name, value, other, name not in WARNED)]
    assert differences(CONTRACT, changed(path, other)) == expected


@pytest.mark.parametrize("path", [("loss_code",), ("options", "width"), ("versions", "cuda"), ("drop_last",)])
def test_a_field_that_one_side_lacks_breaks_unless_another_version_wrote_it(path):
    value, lacking = dict(leaves(CONTRACT))[path], changed(path, ABSENT)
    assert differences(lacking, CONTRACT) == [ContractChange(".".join(path), ABSENT, value, True)]
    assert differences(CONTRACT, lacking) == [ContractChange(".".join(path), value, ABSENT, True)]
    lacking["versions"]["samestep"] = "0.2"
    found = {change.field: change.breaks for change in differences(lacking, CONTRACT)}
    assert found == {".".join(path): False, "versions.samestep": False}


def test_none_that_one_side_does_not_record_is_no_difference():
    assert differences(changed(("max_grad_norm",), ABSENT), CONTRACT) == []
    assert differences({"options": {"sizes": [1, 2]}}, {}) == [ContractChange("options.sizes", [1, 2], ABSENT, True)]


def test_unknown_fields_are_told_where_both_have_them_and_never_break():
    assert differences({"later": 1}, {"later": 2}) == [ContractChange("later", 1, 2, False)]
    assert differences({"later": 1}, {}) == differences({}, {"later": {"deep": 1}}) == []
    assert differences({"later": {"deep": 1}}, {"later": {"deep": 2}}) == [ContractChange("later.deep", 1, 2, False)]


def test_values_are_compared_as_what_they_are():
    assert differences({"seed": 1}, {"seed": True}) == [ContractChange("seed", 1, True, True)]
    assert differences({"lr": float("nan")}, {"lr": float("nan")}) == []
    assert differences({"options": {"a": (1, 2)}}, {"options": {"a": [1, 2]}}) == []
    assert differences({"seed": 1}, {"seed": 1.0}) == []
    assert differences({"model": "00ff"}, {"model": {"fingerprint": "00ff"}}) != []


def test_what_breaks_comes_first_in_the_order_of_the_table():
    other = copy.deepcopy(CONTRACT) | {"processor": "Xeon", "seed": 5, "precision": "x", "lr": 0.2}
    assert [change.field for change in differences(CONTRACT, other)] == ["seed", "lr", "precision", "processor"]


def test_the_explanation_names_every_field_with_both_values():
    other = copy.deepcopy(CONTRACT) | {"processor": "Xeon", "seed": 5, "max_grad_norm": 1.0}
    assert explain(differences(CONTRACT, other)).splitlines() == [
        "these decide the bits:",
        "  seed: 0 before, 5 now (decides the order of the samples, first weights, dropout and augmentation)",
        "  max_grad_norm: none before, 1.0 now (decides the update)",
        "these should not:",
        "  processor: EPYC before, Xeon now",
    ]


def test_a_field_is_in_one_list_only():
    assert not set(BREAKING) & UNMENTIONED


def test_the_contract_of_a_run_holds_the_fields_that_the_table_speaks_of(tmp_path):
    def program(communicator):
        with make_trainer(communicator, run_dir=tmp_path / "run") as trainer:
            trainer.fit(points(), 1)

    in_turns(1, program)
    contract = json.loads((tmp_path / "run" / "run.json").read_text())
    names = {".".join(path) for path, _ in leaves(contract)}
    wanted = {"global_batch_size", "num_microbatches", "seed", "device_kind", "num_threads", "precision"}
    assert wanted | {"versions.torch", "versions.platform", "versions.cpu_capability"} <= names
    assert {"loss_code", "shuffle", "drop_last", "max_grad_norm"} <= names
    for part in ("flags", "optimizer", "model"):
        assert any(name.startswith(f"{part}.") for name in names), part


def test_it_can_be_had_without_torch():
    source = Path(contract_diff.__file__).read_text(encoding="utf-8")
    names = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert names == {"collections.abc", "dataclasses", "typing", "samestep.errors"}
