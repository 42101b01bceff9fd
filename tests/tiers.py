"""Tiers: the tests of `make test` are those that start no process, and the smoke tests, which do.

Whether a test starts processes is read from its code and that of its fixtures: the names that it uses, followed through
the functions and classes of the tests. Data workers, which torch forks, do not count. A program that a test of
`make test` starts all the same is an error of that test (`watch`).
"""

import inspect
import sys
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

from worlds import DEVICE

TESTS = Path(__file__).parent
PYTHON = sys.executable  # tests may change it
OWN_FOLDERS = {TESTS, TESTS.parent / "benchmarks"}
STARTING_MODULES = {"subprocess", "multiprocessing", "samestep.launcher.supervisor", "samestep.verify.program_runner"}
STARTING_NAMES = {*STARTING_MODULES, "fork", "ask_torch", "check_ranks"}
STARTING_TESTS = {  # the command that starts processes is only named by a string, or is a question to a child process
    "cli/test_help.py::test_what_follows_a_script_keeps_its_underscores",
    "devices/test_inventory.py::test_an_order_that_only_cuda_knows_is_noted_where_cuda_does_not_tell",
    "devices/test_inventory.py::test_a_probe_that_fails_finds_nothing",
    "doctor/test_doctor_ranks.py::test_a_rank_that_gets_one_wrong_element_is_named",
    "doctor/test_proof.py::test_a_proof_for_which_the_time_was_too_short_is_none",
    "launcher/test_preloading.py::test_an_early_server_is_taken_once_and_only_with_its_variables_and_else_killed",
    "simulation/test_simulation.py::test_what_a_seed_draws_holds[scripts]",
    "verify/test_verify.py::test_the_command_prints_the_verdict_as_json_and_fails_on_a_difference",
    "verify/test_verify.py::test_a_script_for_gpus_finds_one_for_each_worker_where_there_is_none",
}

SMOKE = {
    # The same bits on 1, 2, 3 and 4 processes, over each transport.
    "engine/test_invariance.py::test_real_processes_end_in_the_bits_of_one_device_over_every_transport[shared memory]",
    "engine/test_invariance.py::test_real_processes_end_in_the_bits_of_one_device_over_every_transport[gloo]",
    "comm/test_reduction.py::test_real_processes_give_the_bits_of_the_plain_tree_sum[3-scatter and gather]",
    "comm/test_shared.py::test_all_that_ranks_say_to_each_other_is_the_same_over_gloo",
    # A SIGKILL is healed; a run goes on from a checkpoint on other devices.
    "healing/test_loops.py::test_a_loop_of_ones_own_goes_on_with_the_same_bits[gan]",
    "checkpoint/test_resume.py::test_real_processes_resume_in_the_run_s_own_folder[3-2-5]",
    # An existing script; a breaker that verify names.
    "scripts/test_patterns.py::test_processes_do_not_change_the_bits_or_the_prints[draws]",
    "verify/test_verify.py::test_batch_norm_is_found_named_confirmed_and_told",
    # `samestep train`, torchrun, the README's example; the cost of an import.
    "cli/test_train_command.py::test_the_command_is_samestep_run_of_the_script_whatever_starts_it",
    "docs/test_documentation.py::test_a_program_prints_the_same_on_one_device_and_on_three[README.md:train.py]",
    "launcher/test_run.py::test_the_parent_never_imports_torch",
    "test_layers.py::test_importing_samestep_imports_nothing_heavy",
}

SMOKE_ON_GPUS = {  # on fake GPUs these too: the sums over NCCL, and each strategy over processes
    "comm/test_reduction.py::test_real_processes_give_the_bits_of_the_plain_tree_sum[2-scatter and gather]",
    "comm/test_reduction.py::test_real_processes_give_the_bits_of_the_plain_tree_sum[4-scatter and gather]",
    "comm/test_hierarchy.py::test_training_on_two_nodes_ends_in_the_digest_of_one_process[many]",
    "sharding/test_sharded_bits.py::test_a_sharded_state_has_the_bits_of_one_device[sharded-3-{}]",
    "sharding/test_sharded_bits.py::test_a_sharded_state_has_the_bits_of_one_device[sharded-4-{}]",
    "sharding/test_sharded_bits.py::test_a_sharded_state_has_the_bits_of_one_device[zero1-3-{}]",
    "sharding/test_state_checkpoints.py::"
    "test_a_run_resumed_in_mid_epoch_ends_as_the_one_that_was_not[sharded 2 - sharded 3]",
}
LONG_FILES = {  # whose tests take ten times as long as others: they come first, so that none of them is waited for
    "cli/test_commands_on_gpus.py",
    "cli/test_frameworks.py",
    "cli/test_run_logical.py",
    "cli/test_run_spawning.py",
    "docs/test_documentation.py",
    "doctor/test_proof.py",
    "engine/test_compiled.py",
    "engine/test_gpu_memory.py",
    "simulation/test_simulated_processes.py",
    "verify/test_verify.py",
}
SLOW = {  # more than ten seconds each, of a kind that a shorter one of the gate shows: for `make test-all` alone
    "benchmarks/test_benchmark_suite.py::test_the_benchmark_runs_and_its_page_shows_the_numbers_of_its_json",
    "benchmarks/test_invariance_benchmark.py::"
    "test_two_processes_change_the_samples_and_parameters_of_ddp_and_no_bit_of_samestep",
    "cli/test_commands_on_gpus.py::test_a_run_goes_on_on_other_gpus_from_its_checkpoint[cuda:3]",
    "cli/test_commands_on_gpus.py::test_a_step_is_replayed_on_any_device[cuda:3]",
    "cli/test_commands_on_gpus.py::test_an_unchanged_script_prints_the_same_on_gpus_as_on_simulated_ones_of_the_cpu",
    "cli/test_commands_on_gpus.py::test_ranks_of_another_launcher_find_their_gpus[torchrun]",
    "cli/test_commands_on_gpus.py::test_the_doctor_finds_nothing_bad[cuda:3-one, on cuda: there is no other]",
    "cli/test_commands_on_gpus.py::test_training_ends_in_the_same_bits_on_any_devices[one]",
    "cli/test_frameworks.py::test_a_real_device_in_a_seed_and_sums_device_by_device_are_found_out",
    "cli/test_frameworks.py::test_as_scripts_for_one_process_they_are_shared_out_with_the_same_bits[accelerate]",
    "cli/test_frameworks.py::test_four_ranks_print_and_save_the_same_on_any_number_of_devices[ddp-2]",
    "cli/test_frameworks.py::test_four_ranks_print_and_save_the_same_on_any_number_of_devices[fsdp-2]",
    "cli/test_frameworks.py::test_four_ranks_print_and_save_the_same_on_any_number_of_devices[lightning-2]",
    "cli/test_frameworks.py::test_sync_batch_norm_sees_the_batches_of_all_ranks",
    "cli/test_layouts.py::test_layouts_on_cpus_have_the_same_bits_on_any_number_of_devices_and_torchrun_s_numbers",
    "cli/test_run_logical.py::test_a_rank_that_polls_for_another_of_its_device_does_not_hang",
    "cli/test_run_logical.py::test_a_script_for_four_gpus_runs_on_one_and_on_two",
    "cli/test_run_logical.py::"
    "test_a_script_for_several_ranks_prints_and_saves_the_same_bits_on_any_number_of_devices"
    "[a group that was destroyed is made again]",
    "cli/test_run_logical.py::test_a_script_that_insists_on_gpus_is_told_what_gives_it_simulated_ones_and_that_does",
    "cli/test_run_logical.py::test_what_a_script_leaves_unseeded_has_a_seed_by_rank_on_any_devices",
    "cli/test_run_spawning.py::test_exact_sums_end_in_the_bits_of_python[fork]",
    "comm/test_nccl_errors.py::"
    "test_an_error_in_the_first_exchange_is_found_before_the_model_and_raised_on_every_rank"
    "[memory, while others connect]",
    "devices/test_host_memory.py::test_twin_malloc_as_the_environment_sets_it_up_is_left_alone",
    "docs/test_documentation.py::test_a_program_prints_the_same_on_one_device_and_on_three[programs.md:gan.py]",
    "docs/test_documentation.py::test_a_program_prints_the_same_on_one_device_and_on_three[programs.md:vision.py]",
    "engine/test_gpu_memory.py::"
    "test_a_step_holds_the_sums_of_the_tree_and_its_update_one_gradient[2-{'overlap': False}-3.2-1.1-1.3]",
    "engine/test_gpu_memory.py::test_a_step_holds_the_sums_of_the_tree_and_its_update_one_gradient[2-{}-2.4-1.1-1.3]",
    "engine/test_gpu_steps.py::test_a_run_that_may_not_heal_asks_no_event_whether_the_exchange_is_there",
    "launcher/test_hangs.py::"
    "test_a_process_that_stops_or_hangs_is_found_from_its_start_on"
    "[restarted-134-rank 1 on CPU worker 1 showed no sign of life for]",
    "launcher/test_hangs.py::"
    "test_a_process_that_stops_or_hangs_is_found_from_its_start_on"
    "[starter-1-the starter of the workers was stopped by a signal]",
    "launcher/test_hangs.py::test_rank_0_may_use_files_for_longer_than_the_timeouts[samestep-own loop]",
    "launcher/test_hangs.py::test_rank_0_may_use_files_for_longer_than_the_timeouts[samestep-sharded]",
    "launcher/test_hangs.py::test_rank_0_may_use_files_for_longer_than_the_timeouts[torchrun-end of fit]",
    "launcher/test_notebook.py::test_a_function_of_the_main_program_is_called_with_its_arguments[spawn]",
    "launcher/test_portable.py::test_a_recipe_is_portable_by_its_option_and_stays_so",
    "launcher/test_portable.py::test_a_run_is_not_resumed_in_the_other_mode_and_is_replayed_in_its_own",
    "launcher/test_preloading.py::"
    "test_a_single_process_script_has_the_same_bits_whenever_torch_dynamo_is_imported[cpu:2]",
    "launcher/test_run.py::test_a_script_sees_what_python_would_show_it[spawn]",
    "launcher/test_run.py::test_garbage_at_the_port_of_the_store_is_survived_without_a_word[spawn]",
    "nodes/test_machines.py::test_a_script_of_its_own_ranks_that_fails_on_one_machine_ends_both_with_its_code[follows]",
    "replay/test_auditing.py::test_a_run_on_several_devices_is_audited_by_several_workers",
    "replay/test_script_audit.py::test_a_plain_script_is_audited_too_and_names_what_was_there_before",
    "replay/test_script_audit.py::test_a_script_that_went_on_is_audited_from_its_beginning_by_the_code_of_each_start",
    "run/test_evaluation.py::test_a_loader_with_workers_is_measured_so_too[False]",
    "run/test_stopping_alone.py::"
    "test_of_several_ranks_one_that_is_asked_is_enough_and_one_speaks_and_all_stop_after_the_same_step[asked1]",
    "runs/test_mirrors.py::test_a_resume_under_another_contract_is_a_run_of_its_own_from_that_step_on",
    "runs/test_mirrors.py::test_a_run_that_raises_and_then_is_killed_is_resumed_under_its_id",
    "runs/test_mirrors.py::test_the_programs_of_the_page_run",
    "runs/test_mirrors.py::test_tools_that_fail_leave_the_training_as_it_is_and_the_run_can_be_mirrored_later",
    "sharding/test_sharded_memory.py::test_a_model_that_does_not_fit_a_workers_memory_trains_if_it_is_sharded",
    "simulation/test_simulated_processes.py::"
    "test_a_defect_over_processes_fails_the_program_that_shows_it[a step after a loss counts twice]",
    "simulation/test_simulated_processes.py::"
    "test_a_defect_over_processes_fails_the_program_that_shows_it"
    "[going on after a loss draws from the generators of the program]",
    "simulation/test_simulated_processes.py::"
    "test_a_defect_over_processes_fails_the_program_that_shows_it[hooks are called twice after a loss]",
    "verify/test_golden_files.py::test_the_bits_of_a_script_of_ranks_are_those_of_its_devices_or_of_its_logical_ones",
    "verify/test_golden_files.py::"
    "test_the_step_of_the_workflow_passes_with_its_golden_file_and_fails_with_that_of_another_seed",
}
SLOW_ON_GPUS = {  # seconds each on fake ones: on GPUs the gate has others of their kind, and on CPUs all of them
    "run/test_trainer.py::test_mlp_learns_the_prices_of_houses",
    "checkpoint/test_adapters.py::test_adapters_end_in_the_same_bits_and_are_saved_and_gone_on_from[zero1-3]",
    "comm/test_process_group.py::"
    "test_every_reduction_of_every_dtype_is_the_fold_along_the_tree_on_host_and_device_alike[7]",
    *(
        f"engine/test_nested_backward.py::test_hidden_layers_are_trained_as_visible_ones_are[{net}-zero1-reversible]"
        for net in ("hidden", "tied")
    ),
}
HOST_FILES = {  # about what the host alone does, in memory of its own: on GPUs their tests would be the same ones again
    f"{room}/test_{name}.py"
    for room, names in {
        "checkpoint": "checkpoint contract contract_diff digest folder lock saving state_packing",
        "comm": "buckets environment exceptions heartbeat_page nccl_errors sequential",
        "data": "embedded fetch idx named randomness tables tensors text transfer",
        "run": "metrics stopping_alone",
        "runs": "ledger ledger_proof loggers loss_plot runs",
        "scripts": "output patch script_analysis",
    }.items()
    for name in names.split()
}
OF_GPUS = {  # in those files
    "checkpoint/test_digest.py::test_the_kind_of_device_does_not_count",
    "checkpoint/test_folder.py::test_tied_weights_are_written_once_and_load_again",
    "checkpoint/test_folder.py::test_weights_come_back_with_buffers_and_plain_names",
    "checkpoint/test_saving.py::test_a_copy_from_a_cuda_device_is_complete_used_again_and_holds_no_pinned_memory",
    "data/test_transfer.py::test_a_copy_to_cuda_that_does_not_block_arrives_whole_and_comes_back",
}
if DEVICE == "cuda":
    SMOKE |= SMOKE_ON_GPUS


def name_of(item):
    """The id of a test without the folder of all tests."""
    return item.nodeid.removeprefix("tests/")


def is_of_the_other_run(item):
    """Whether a test is of the run on CPUs alone: it is about the host, or starts programs on fake GPUs by itself."""
    is_host = name_of(item).partition("::")[0] in HOST_FILES and name_of(item) not in OF_GPUS
    return is_host or item.get_closest_marker("fake_gpus") is not None


def starts_processes(item):
    """Whether a collected test, or one of its fixtures, names something that starts processes."""
    fixtures = [made[-1].func for made in item._fixtureinfo.name2fixturedefs.values()]
    return name_of(item) in STARTING_TESTS or any(map(_starts, (item.function, *fixtures)))


_known = {}


def _starts(value):
    """Whether a function, a class or a module of the tests does so, or something else that does."""
    if id(value) not in _known:
        _known[id(value)] = False  # while it is looked at: functions may call each other
        _known[id(value)] = _look(value)
    return _known[id(value)]


def _look(value):
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in STARTING_MODULES or value.__name__ in STARTING_MODULES
    module = getattr(value, "__module__", None) or ""
    if module.partition(".")[0] in STARTING_MODULES or module in STARTING_MODULES:
        return True
    if not _is_ours(value):
        return False
    if isinstance(value, type):
        return any(_starts(member) for member in vars(value).values() if callable(member))
    tested = getattr(value, "hypothesis", None)
    function = inspect.unwrap(value if tested is None else tested.inner_test)
    if not isinstance(function, FunctionType):
        return False
    for name in _names(function.__code__):
        if name in STARTING_NAMES:
            return True
        used = function.__globals__.get(name)
        if isinstance(used, ModuleType) and _is_ours(used):
            if any(_starts(getattr(used, other)) for other in _names(function.__code__) if hasattr(used, other)):
                return True
        elif used is not None and _starts(used):
            return True
    return False


def _names(code: CodeType):
    """The names in a function's code, that of the functions within it included."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return {*code.co_names, *inner}


def _is_ours(value):
    """Whether something is defined in the folder of tests."""
    module = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    return file is not None and not OWN_FOLDERS.isdisjoint(Path(file).parents)


_watched = []


@contextmanager
def watch(item):
    """Watches a test: a quick one that starts a program without being a smoke test fails."""
    if item.get_closest_marker("quick") is None or name_of(item) in SMOKE:
        yield
        return
    _watched.append(item)
    try:
        yield
    finally:
        _watched.clear()


def _hook(event, args):
    if _watched and event == "subprocess.Popen" and args[0] == PYTHON:
        raise RuntimeError("a test of `make test` starts a program: add it to STARTING_TESTS in tests/tiers.py")


sys.addaudithook(_hook)
