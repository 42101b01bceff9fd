"""`samestep run` and `train` on several nodes: the bits of one process, one communicator, and mistakes that are sentences."""

import socket
import sys

import pytest
from node_scripts import PARALLEL, SMALL, TRAINER, WAITING

QUICK = ("--rdzv-conf", "join_timeout=20")


def alone(nodes, script, *arguments):
    """What a script prints in one process."""
    process = nodes.start_program([sys.executable, str(script), *arguments])
    return nodes.end_of(process)


def test_two_nodes_of_two_ranks_give_the_bits_of_one_process_and_sum_by_nodes(nodes):
    script = nodes.script(SMALL)
    one = alone(nodes, script)
    first, second = nodes.run_all(2, ["run"], ["--devices", "cpu:2", script])
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert first.digest == one.digest
    assert "by nodes True" in first.stdout
    assert second.stdout == ""
    assert first.stdout.count("digest") == 1


def test_nodes_that_differ_all_say_how_and_end(nodes):
    script = nodes.script(SMALL)
    meeting = ["--rdzv-endpoint", nodes.endpoint, *QUICK]
    first = nodes.start("run", "--nnodes", "2", "--node-rank", "0", *meeting, "--devices", "cpu:1", script)
    second = nodes.start("run", "--nnodes", "2", "--node-rank", "1", *meeting, "--devices", "cpu:2", script)
    for process in (first, second):
        ended = nodes.end_of(process)
        assert ended.code == 2
        assert "the nodes differ in devices" in ended.stderr
        assert "1 CPU worker on" in ended.stderr
        assert "2 CPU workers on" in ended.stderr
        assert "--nproc-per-node" in ended.stderr
        assert "Traceback" not in ended.stderr


def test_an_endpoint_where_nobody_answers_is_a_sentence_within_the_time(nodes):
    script = nodes.script(SMALL)
    meeting = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", nodes.endpoint]
    ended = nodes.run("run", *meeting, "--rdzv-conf", "join_timeout=1", "--devices", "cpu:1", script)
    assert ended.code == 2
    assert f"nobody answers at {nodes.endpoint} within 1 s" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_that_is_taken_is_a_sentence(nodes):
    script = nodes.script(SMALL)
    with socket.create_server(("", 0)) as other:
        endpoint = f"localhost:{other.getsockname()[1]}"
        ended = nodes.run(
            "run", "--nnodes=2", "--node-rank=0", f"--rdzv-endpoint={endpoint}", "--devices=cpu:1", script
        )
    assert ended.code == 2
    assert "cannot host the rendezvous" in ended.stderr
    assert "choose another port" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("count", "size"), [(2, 1), (3, 1), (2, 2)])
def test_a_recipe_on_any_nodes_ends_in_the_digest_of_one_process(nodes, count, size):
    recipe = ["train", "lenet", "--data", "digits", "--epochs", "1", "--devices"]
    one = nodes.run(*recipe, "cpu:1", "--run-dir", "one")
    first, *others = nodes.run_all(count, [*recipe, f"cpu:{size}"], ["--run-dir", "many"])
    assert [ended.code for ended in (one, first, *others)] == [0] * (count + 1), first.stderr
    assert first.digest == one.digest
    assert all(other.stdout == "" for other in others)
    assert (nodes.folder / "many" / "logs" / f"rank-{count * size - 1}.log").exists()


@pytest.mark.slow
def test_an_adopted_script_is_shared_out_over_nodes_with_the_same_bits(nodes):
    script = nodes.script(PARALLEL)
    options = ["--num-microbatches", "4", "--seed", "0"]
    one = nodes.run("run", "--devices", "cpu:1", *options, script)
    first, second = nodes.run_all(2, ["run"], ["--devices", "cpu:2", *options, "--log-dir", "logs", script])
    assert (one.code, first.code, second.code) == (0, 0, 0), first.stderr + second.stderr
    assert first.digest == one.digest
    assert second.stdout == ""
    assert sorted(path.name for path in (nodes.folder / "logs").iterdir()) == [f"rank-{n}.log" for n in (1, 2, 3)]


@pytest.mark.slow
def test_a_rank_that_fails_ends_all_nodes_with_its_code_and_its_name(nodes):
    script = nodes.script(WAITING)
    ended = nodes.run_all(2, ["run"], ["--devices", "cpu:2", script, "3"])
    assert [node.code for node in ended] == [7, 7]
    for node in ended:
        assert "node 1" in node.stderr
        assert "rank 3 on CPU worker 1 of node 1" in node.stderr
        assert "exited with code 7" in node.stderr


@pytest.mark.slow
def test_different_scripts_and_numbers_of_nodes_are_sentences(nodes):
    one, other = nodes.script(SMALL, "one.py"), nodes.script(SMALL + "\n# other\n", "other.py")
    meeting = ["--rdzv-endpoint", nodes.endpoint, *QUICK, "--devices", "cpu:1"]
    for first, second, words in (
        (["--nnodes", "2", *meeting, one], ["--nnodes", "3", *meeting, one], "the nodes differ in --nnodes"),
        (["--nnodes", "2", *meeting, one], ["--nnodes", "2", *meeting, other], "the nodes differ in the command"),
    ):
        started = [nodes.start("run", "--node-rank", str(rank), *node) for rank, node in enumerate((first, second))]
        for ended in map(nodes.end_of, started):
            assert ended.code == 2
            assert words in ended.stderr


@pytest.mark.slow
def test_a_script_with_a_profile_and_without_node_ranks_runs_as_on_one_node(nodes):
    script = nodes.script(TRAINER)
    options = [
        "run",
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        nodes.endpoint,
        "--devices",
        "cpu:1",
        "--profile",
        script,
        "1",
    ]
    ended = [nodes.end_of(process) for process in [nodes.start(*options), nodes.start(*options)]]
    assert [node.code for node in ended] == [0, 0], ended[0].stderr + ended[1].stderr
    assert sum("digest" in node.stdout for node in ended) == 1
    assert sum("exchange" in node.stderr for node in ended) == 1
