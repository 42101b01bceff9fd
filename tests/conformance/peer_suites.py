"""The suites: which tests of which project, with how many ranks; and why some do not pass here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Suite:
    """Tests of one project.

    Attributes:
        kind: how in_rank.py runs them; "script": a program each, which passes if it exits with 0.
        sources: modules, or files and folders in the project's checkout.
        checkout: the folder of --sources that has them; "" if they are in an installed package.
        package: whose version the page has.
        ranks: the numbers of ranks they run with.
        least: how many pass under torchrun at the least, of a suite that the gate runs.
        on_gpus: they want GPUs: under torchrun the fake ones of tests/fake_cuda, under samestep simulated ones.
    """

    name: str
    kind: str
    sources: tuple[str, ...]
    package: str
    ranks: tuple[int, ...]
    least: int = 0
    checkout: str = ""
    on_gpus: bool = False


SUITES = (
    Suite(
        "torch: distributed_test",
        "torch",
        ("torch.testing._internal.distributed.distributed_test",),
        "torch",
        (3,),
        least=80,
    ),
    Suite(
        "Accelerate: test_utils/scripts",
        "script",
        tuple(f"accelerate.test_utils.scripts.{name}" for name in ("test_ops", "test_script", "test_sync")),
        "accelerate",
        (2,),
    ),
)

WITH_TRL = (
    "--model_name_or_path {made}/model --output_dir {output} --per_device_train_batch_size 2 --max_steps 2"
    " --report_to none --use_cpu True --bf16 False --logging_steps 1 --dataset_name {made}/"
)
GENERATING = "answers --reward_model_name_or_path {made}/judge --max_completion_length 8 --num_generations 2"
TRL = {"dpo": "pairs", "reward": "pairs", "kto": "pairs", "sft": "answers", "grpo": GENERATING, "rloo": GENERATING}
PROGRAMS = {f"trl.scripts.{name}": f"-m trl.scripts.{name} {WITH_TRL}{words}" for name, words in TRL.items()}

PYTORCH, TORCHMETRICS, IGNITE = "pytorch-v2.6.0", "torchmetrics-1.9.0", "ignite-0.5.5"
COLLECTIVES = (
    "test_c10d_gloo",
    "test_c10d_logger",
    "test_c10d_object_collectives",
    "test_c10d_pypg",
    "test_collective_utils",
    "test_device_mesh",
    "test_functional_api",
    "test_multi_threaded_pg",
    "test_pg_wrapper",
)
WRAPPERS = (
    "_composable/test_composability/test_2d_composability",
    "_composable/test_replicate",
    "algorithms/test_join",
    "optim/test_zero_redundancy_optimizer",
)


def of_pytorch(what: str, ranks: tuple[int, ...], *files: str, on_gpus: bool = False) -> Suite:
    """Test classes of PyTorch's repository."""
    sources = tuple(f"test/distributed/{file}.py" for file in files)
    return Suite(f"PyTorch: {what}", "torch", sources, "torch", ranks, checkout=PYTORCH, on_gpus=on_gpus)


def of_torchmetrics(what: str, *folders: str) -> Suite:
    """Tests of torchmetrics that share work out, all of them made for two ranks."""
    sources = tuple(f"tests/unittests/{folder}" for folder in folders)
    return Suite(f"torchmetrics: {what}", "pytest", sources, "torchmetrics", (2,), checkout=TORCHMETRICS)


SUITES += (
    Suite("TRL: scripts", "script", tuple(PROGRAMS), "trl", (2,)),
    of_pytorch("DTensor", (4,), "_tensor/*", "_tensor/*/*"),
    of_pytorch("tensor parallel", (2, 4), "tensor/parallel/*"),
    of_pytorch("collectives", (4,), *COLLECTIVES),
    of_pytorch("checkpoints", (4,), "checkpoint/*", "checkpoint/*/*"),
    of_pytorch("DDP, ZeRO, Join", (2,), *WRAPPERS),
    of_pytorch("FSDP2 on GPUs", (2,), "_composable/fsdp/*", on_gpus=True),
    of_pytorch("FSDP1 on GPUs", (2,), "fsdp/*", on_gpus=True),
    of_torchmetrics("sums and gathers", "bases", "wrappers"),
    of_torchmetrics("regression", "regression"),
    of_torchmetrics("clusters", "clustering", "nominal"),
    of_torchmetrics("segmentation", "segmentation"),
    of_torchmetrics("detection", "detection"),
    Suite("Ignite: metrics", "pytest", ("tests/ignite/metrics",), "pytorch-ignite", (2,), checkout=IGNITE),
)

GLOOS_OWN = "it asks the group for a device of gloo's own, `ProcessGroupGloo.create_device`"
EARLY = (
    "with `TORCH_DISTRIBUTED_DEBUG=DETAIL` gloo raises from an asynchronous call; here `wait` does, a DeterminismError"
)
EXTENSIONS = "test_fully_shard_extensions.TestFullyShardAllGatherExtensionsMultiProcess"
HOOKS = "test_fsdp_comm_hooks.TestCommunicationHooks.test_bf16_hook_has_wrapping"
OFFLOADED = "FSDP1's `CPUOffload` gives a parameter host memory by `.data`; it still names its simulated GPU"
FSDP1 = "test_fsdp_checkpoint.TestFSDPCheckpoint.test"
REASONS = {
    **{
        f"{FSDP1}_{name}_cpu_offload0_offload_activations_{offloads}_use_orig_params_{original}": OFFLOADED
        for name in ("basic_checkpoint_end_to_end", "checkpoint_fsdp_wrapping")
        for offloads in (False, True)
        for original in (False, True)
    },
    **{
        f"{HOOKS}_{wrapped}_sharding_strategy{number}": "it asks for `torch.version.cuda`, which simulated GPUs lack"
        for wrapped in (False, True)
        for number in range(3)
    },
    "accelerate.test_utils.scripts.test_ops": "it takes memory that nobody has written (`torch.empty`) for zeros",
    "test_fully_shard_comm.TestFullyShardCommunication.test_manual_reshard_with_reshard_after_forward_false": (
        "it counts collectives where torch dispatches them, which groups of Python pass from PyTorch 2.14 on"
    ),
    f"{EXTENSIONS}.test_all_gather_extensions_train_parity": (
        "it broadcasts a tensor that is two others, without memory of its own; samestep refuses that by name"
    ),
    "test_fully_shard_memory.TestFullyShardMemory.test_fully_shard_training_memory": (
        "simulated GPUs hold no memory that could be counted"
    ),
    "TestDistributed.test_ddp_logging_data_cpu": "DDP's log names the backend that carries the bytes: samestep's",
    "test_c10d_gloo.CommTest.test_broadcast_coalesced_gloo_cpu": GLOOS_OWN,
    "test_c10d_gloo.DistributedDataParallelTest.test_gloo_backend_cpu_module": GLOOS_OWN,
    "test_c10d_gloo.DistributedDataParallelTest.test_gloo_backend_cpu_module_grad_is_view": GLOOS_OWN,
    "test_c10d_gloo.GlooProcessGroupWithDispatchedCollectivesTests.test_all_to_all_single": (
        "gloo divides two rows among four ranks, by their elements; samestep refuses that, as NCCL does"
    ),
    "test_c10d_gloo.GlooProcessGroupWithDispatchedCollectivesTests.test_init_process_group_for_all_backends": (
        "the group's `name()`, by which C++ would take it for gloo's own, is samestep; `get_backend()` is gloo"
    ),
    "test_pg_wrapper.ProcessGroupGlooWrapperTest.test_collective_shape_mismatch_debug_mode": EARLY,
    "test_pg_wrapper.ProcessGroupGlooWrapperTest.test_collectives_op_mismatch_debug_mode": EARLY,
}
