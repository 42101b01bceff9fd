"""Nodes that are lost, come back, or are asked to stop: the rest goes on from a checkpoint, same bits."""

import signal
import sys

import pytest
from node_scripts import TRAINER, WAITING

pytestmark = pytest.mark.slow

EPOCHS = "60"
MEETING = ("--rdzv-conf", "join_timeout=60,keep_alive_interval=1,last_call_timeout=2", "--devices", "cpu:1")
CHECKPOINT = "mine/checkpoints/step-00000010"


def undisturbed(nodes, script):
    """The digest that one process ends in, in a folder of its own."""
    folder = nodes.folder / "alone"
    folder.mkdir()
    process = nodes.start_program(
        [sys.executable, "-c", f"import os; os.chdir({str(folder)!r}); {RUN_IT.format(script)}"]
    )
    ended = nodes.end_of(process)
    assert ended.code == 0, ended.stderr
    return ended.digest


RUN_IT = "import runpy, sys; sys.argv = ['train.py', " + repr(EPOCHS) + "]; runpy.run_path({0!r}, run_name='__main__')"


def start_two(nodes, script, count="1:2", restarts="3", **variables):
    options = ["run", "--nnodes", count, "--rdzv-endpoint", nodes.endpoint, *MEETING, "--max-restarts", restarts]
    return [nodes.start(*options, "--node-rank", rank, script, EPOCHS, **variables) for rank in ("0", "1")], options


def test_a_node_killed_in_mid_run_is_left_behind_and_the_digest_is_that_of_an_undisturbed_run(nodes):
    script = nodes.script(TRAINER)
    expected = undisturbed(nodes, str(script))
    (first, second), _ = start_two(nodes, script)
    nodes.wait_for(CHECKPOINT)
    second.send_signal(signal.SIGKILL)
    ended = nodes.end_of(first)
    assert ended.code == 0, ended.stderr
    assert "node 1" in ended.stderr
    assert "is lost: no sign of life" in ended.stderr
    assert "resumed from step-" in ended.stdout
    assert ended.digest == expected


def test_a_node_that_comes_back_is_taken_in_and_the_digest_stays_the_same(nodes):
    script = nodes.script(TRAINER)
    expected = undisturbed(nodes, str(script))
    (first, second), options = start_two(nodes, script, PACE="0.01")
    nodes.wait_for(CHECKPOINT)
    second.send_signal(signal.SIGTERM)
    assert nodes.end_of(second).code == 143
    nodes.wait_for_words(first, "1 node in round 1")
    again = nodes.start(*options, "--node-rank", "1", script, EPOCHS)
    ended = nodes.end_of(first)
    assert (ended.code, nodes.end_of(again).code) == (0, 0), ended.stderr
    assert "node 1" in ended.stderr
    assert "was asked to stop (SIGTERM)" in ended.stderr
    assert "2 nodes in round 2" in ended.stderr
    assert ended.digest == expected


def test_without_a_node_that_is_needed_the_others_end_with_its_name_and_how_to_go_on(nodes):
    script = nodes.script(TRAINER)
    (first, second), _ = start_two(nodes, script, count="2")
    nodes.wait_for(CHECKPOINT)
    second.send_signal(signal.SIGKILL)
    ended = nodes.end_of(first)
    assert ended.code == 1
    assert "node 1" in ended.stderr
    assert "1 node is left, and --nnodes asks for 2" in ended.stderr
    assert "start the script again" in ended.stderr
    assert "Traceback" not in ended.stderr
    again, _ = start_two(nodes, script, count="2")
    resumed, other = map(nodes.end_of, again)
    assert (resumed.code, other.code) == (0, 0), resumed.stderr
    assert resumed.digest == undisturbed(nodes, str(script))


def test_without_the_node_that_hosts_the_meeting_the_others_end_with_a_sentence(nodes):
    script = nodes.script(TRAINER)
    (first, second), _ = start_two(nodes, script)
    nodes.wait_for(CHECKPOINT)
    first.send_signal(signal.SIGKILL)
    ended = nodes.end_of(second)
    assert ended.code == 1
    assert f"the node that hosts the rendezvous at {nodes.endpoint} does not answer" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "frame #" not in ended.stderr


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_signal_to_one_node_stops_all_of_a_run_of_fixed_size_after_a_checkpoint(nodes, stopped):
    script = nodes.script(TRAINER)
    started, _ = start_two(nodes, script, count="2")
    nodes.wait_for(CHECKPOINT)
    started[stopped].send_signal(signal.SIGTERM)
    first, second = map(nodes.end_of, started)
    assert (first.code, second.code) == (143, 143), first.stderr + second.stderr
    assert "stopped after step" in first.stdout
    assert f"node {stopped}" in (second if stopped == 0 else first).stderr
    again, _ = start_two(nodes, script, count="2")
    resumed, _ = map(nodes.end_of, again)
    assert resumed.digest == undisturbed(nodes, str(script))


def test_a_signal_ends_nodes_that_still_wait_for_others(nodes):
    script = nodes.script(TRAINER)
    options = ["run", "--rdzv-endpoint", nodes.endpoint, "--nnodes", "3", *MEETING]
    host = nodes.start(*options, "--node-rank", "0", script, EPOCHS)
    late = nodes.start(*options, "--node-rank", "1", script, EPOCHS)
    with pytest.raises(Exception, match="timed out"):
        host.wait(timeout=6)
    late.send_signal(signal.SIGTERM)
    assert nodes.end_of(late).code == 143
    host.send_signal(signal.SIGINT)
    assert nodes.end_of(host).code == 130


def test_a_failure_is_tried_again_as_often_as_allowed_on_the_same_nodes(nodes):
    script = nodes.script(WAITING)
    options = ["run", "--nnodes", "2", "--rdzv-endpoint", nodes.endpoint, *MEETING, "--max-restarts", "1"]
    started = [nodes.start(*options, "--node-rank", rank, script, "1") for rank in ("0", "1")]
    for ended in map(nodes.end_of, started):
        assert ended.code == 7
        assert "2 nodes in round 1" in ended.stderr
        assert "no restart is left" in ended.stderr
