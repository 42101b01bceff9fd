"""The cluster: what torchrun's options say, and the sentences about what cannot be."""

import pytest

from samestep.cli.nodes import chosen_cluster, chosen_devices
from samestep.comm.environment import torchrun_defaults
from samestep.errors import UsageError
from samestep.launcher.cluster import SETTINGS, ClusterOptions, cluster_of, parse_endpoint, parse_nodes, parse_settings

PET = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


def options(**given):
    return list(vars(ClusterOptions(**given)).values())


@pytest.mark.parametrize(("text", "nodes"), [("1", (1, 1)), ("2", (2, 2)), ("1:4", (1, 4))])
def test_nnodes_is_a_number_or_two(text, nodes):
    assert parse_nodes(text) == nodes


@pytest.mark.parametrize("text", ["0", "3:2", "two", "1:2:3", "", "-1"])
def test_nnodes_that_cannot_be_is_a_sentence(text):
    with pytest.raises(UsageError, match="--nnodes"):
        parse_nodes(text)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("node1:29500", ("node1", 29500)),
        ("node1", ("node1", 29400)),
        ("[::1]:29500", ("::1", 29500)),
        ("::1", ("::1", 29400)),
    ],
)
def test_an_endpoint_is_a_host_and_a_port_with_torchruns_default(text, place):
    assert parse_endpoint(text) == place


@pytest.mark.parametrize("text", ["", ":29400", "node1:port", "node1:0", "node1:70000"])
def test_an_endpoint_that_cannot_be_is_a_sentence(text):
    with pytest.raises(UsageError, match="host:port"):
        parse_endpoint(text)


def test_settings_are_those_of_torchrun_and_others_are_named():
    assert parse_settings("timeout=60,last_call_timeout=5") == {**SETTINGS, "join_timeout": 60, "last_call_timeout": 5}
    for text in ("speed=3", "join_timeout=soon", "join_timeout=0"):
        with pytest.raises(UsageError, match="--rdzv-conf"):
            parse_settings(text)


def test_one_machine_is_no_cluster_unless_it_is_given_a_meeting_place():
    assert cluster_of(ClusterOptions()) is None
    assert cluster_of(ClusterOptions(nnodes="1", node_rank=0, master_addr="localhost")) is None
    cluster = cluster_of(ClusterOptions(nnodes="1", rdzv_endpoint="node1:29500"))
    assert (cluster.host, cluster.port, cluster.max_nodes) == ("node1", 29500, 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nnodes": "2"}, "no place to meet"),
        ({"nnodes": "2", "node_rank": 2, "rdzv_endpoint": "a:1"}, "--node-rank 2"),
        ({"nnodes": "2", "rdzv_backend": "etcd", "rdzv_endpoint": "a:1"}, "--rdzv-backend etcd"),
        ({"nnodes": "2", "master_addr": "a", "master_port": 0}, "--master-addr and --master-port"),
    ],
)
def test_options_that_cannot_be_are_a_sentence(given, words):
    with pytest.raises(UsageError, match=words):
        cluster_of(ClusterOptions(**given))


def test_the_variables_of_kubeflows_runtime_are_defaults_of_the_options(monkeypatch):
    for name, value in PET.items():
        monkeypatch.setenv(name, value)
    assert torchrun_defaults()["master_addr"] == "job-node-0-0.job"
    cluster = chosen_cluster(*options())
    assert (cluster.host, cluster.port, cluster.node_rank) == ("job-node-0-0.job", 29400, 1)
    assert chosen_devices(None, None) == "4"
    assert chosen_devices("cpu:2", None) == "cpu:2"
    own = chosen_cluster(*options(nnodes="3", rdzv_endpoint="other:1", node_rank=2))
    assert (own.host, own.max_nodes, own.node_rank) == ("other", 3, 2)


def test_a_variable_that_is_no_number_is_a_sentence(monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "first")
    with pytest.raises(UsageError, match="PET_NODE_RANK=first"):
        chosen_cluster(*options(rdzv_endpoint="a:1"))


def test_under_torchrun_the_options_are_refused_and_the_variables_left_alone(monkeypatch):
    for name, value in {**PET, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert chosen_cluster(*options()) is None
    with pytest.raises(UsageError, match="under torchrun"):
        chosen_cluster(*options(nnodes="2", rdzv_endpoint="a:1"))


def test_a_task_of_srun_can_be_an_agent(monkeypatch):
    for name, value in {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_JOB_ID": "9",
    }.items():
        monkeypatch.setenv(name, value)
    assert chosen_cluster(*options()) is None
    assert chosen_cluster(*options(nnodes="2", rdzv_endpoint="a:1")).max_nodes == 2


def test_devices_and_torchruns_spelling_together_are_refused():
    with pytest.raises(UsageError, match="one of the two"):
        chosen_devices("2", "2")
    assert chosen_devices(None, "gpu") == "cuda"
    assert chosen_devices(None, "cpu").startswith("cpu:")
