"""Fixes for the kind of program that was seen: the option of the framework that takes the steps, or of its ranks."""

import sys
from types import FrameType

from samestep.verify.causes.evidence import Cause, Evidence, Facts
from samestep.verify.wraps import Wrap

PACKAGES = {  # whose code calls the optimizer, by the beginning of its modules' names
    "transformers.trainer.": "transformers",
    "trl.": "transformers",
    "lightning.pytorch.": "Lightning",
    "pytorch_lightning.": "Lightning",
    "lightning.fabric.": "Fabric",
    "lightning_fabric.": "Fabric",
    "accelerate.": "Accelerate",
}
_PADS = (
    "Make the dataset's length a multiple of the number of devices: {} repeats samples to give every device as many. "
    "drop_last=True in the DataLoader leaves them out, unless they fill its last batch up."
)
_ONE_DRAW = (
    "Draw alike on every device, and let each take its share: sampler=list(SAMPLER(…, generator=torch.Generator()"
    ".manual_seed(epoch)))[rank::world_size]."
)
FIXES = {
    "Accelerate": {
        "global_batch": "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True)): the "
        "DataLoader's batch_size then counts the samples of all devices together.",
        "learning_rate": "Do not multiply the rate by num_processes: gradients are averaged. "
        "A prepared scheduler steps once for every device: let batches be split, Accelerator(dataloader_config="
        "DataLoaderConfiguration(split_batches=True)), or give Accelerator step_scheduler_with_optimizer=False.",
        "order": "DataLoaderConfiguration(use_seedable_sampler=True): without it one device shuffles by "
        "torch's global generator, and several by one of Accelerate's.",
        "sampler": "Give the DataLoader drop_last=True, or make the dataset's length a multiple of the "
        "global batch: even_batches repeats samples to give every device as many.",
        "metrics": "accelerator.gather_for_metrics((predictions, references)), which leaves out "
        "repeated samples, and one division of sums at the end.",
        "local_clip": "accelerator.clip_grad_norm_(model.parameters(), max_norm) after accelerator.backward.",
        "mean_of_means": "Divide the sum of the loss by the count of all devices: "
        "accelerator.gather(count).sum(), times accelerator.num_processes.",
        "unseeded": "accelerate.utils.set_seed(42), before the model is made.",
    },
    "Lightning": {
        "global_batch": "Give the DataLoader batch_size // trainer.world_size: Lightning's batch_size is "
        "that of each device.",
        "batchnorm": "Trainer(sync_batchnorm=True), or GroupNorm or LayerNorm.",
        "sampler": _PADS.format("the DistributedSampler that the Trainer puts in"),
        "order": "L.seed_everything(42, workers=True), and strategy='ddp' on one device too, so that the "
        "Trainer puts in a DistributedSampler on any number of them.",
        "metrics": "Log a torchmetrics object, which adds up sums and counts over the devices, instead of a "
        "mean with self.log(…, sync_dist=True).",
        "unseeded": "L.seed_everything(42, workers=True), before the model is made.",
    },
    "Fabric": {
        "global_batch": "Give the DataLoader batch_size // fabric.world_size: in fabric.setup_dataloaders "
        "batch_size is that of each device.",
        "sampler": _PADS.format("the DistributedSampler of fabric.setup_dataloaders"),
        "order": "fabric.seed_everything(42), and strategy='ddp' on one device too, so that "
        "fabric.setup_dataloaders puts in a DistributedSampler on any number of them.",
        "metrics": "fabric.all_reduce(…, reduce_op='sum') of the sum and of the count, and one division.",
        "local_clip": "fabric.clip_gradients(model, optimizer, max_norm=…) after fabric.backward.",
        "unseeded": "fabric.seed_everything(42), before the model is made.",
    },
    "transformers": {
        "global_batch": "TrainingArguments(per_device_train_batch_size=BATCH // world_size), or as many "
        "times fewer gradient_accumulation_steps as there are more devices.",
        "sampler": "TrainingArguments(dataloader_drop_last=True): else samples are repeated to give "
        "every device as many.",
        "dropout": "Set the config's dropout probabilities (hidden_dropout_prob, "
        "attention_probs_dropout_prob, resid_pdrop, …) to 0; or run it by samestep run --logical-devices V, whose V "
        "ranks draw the same masks on any devices.",
        "mean_of_means": "TrainingArguments(average_tokens_across_devices=True), for a loss that divides "
        "by num_items_in_batch: that of a causal language model, or a compute_loss_func.",
        "loss_factor": "The loss takes no num_items_in_batch, and is multiplied by the number of devices all the "
        "same: model.accepts_loss_kwargs = False, before the Trainer is made; or, if a compute_loss_func has it, "
        "TrainingArguments(average_tokens_across_devices=False).",
        "unseeded": "transformers.set_seed(42), before the model is made.",
    },
    "Accelerate drawn": {
        "order": "Give the sampler a generator=torch.Generator().manual_seed(42): without it one "
        "device draws by torch's global generator, and several by one of Accelerate's.",
    },
    "ranks drawn": {
        "order": _ONE_DRAW,
        "unshared": _ONE_DRAW,
    },
    "ranks": {
        "stream": "Give each device its share of one stream, since DataLoader takes no sampler for it: in "
        "__iter__ itertools.islice(samples, rank, None, world_size), or datasets.distributed.split_dataset_by_node of "
        "a dataset of one shard: of several each device takes whole ones.",
    },
}
"""By framework, or "ranks", and by key of the cause; "drawn": if a sampler draws by weights, or from a subset."""


def fact_wraps(facts: Facts) -> list[Wrap]:
    """Records which framework takes the steps: the outermost one on the stack of the optimizer's step."""

    def observe_framework() -> None:
        found = ""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            module = f"{frame.f_globals.get('__name__', '')}."
            found = next((name for prefix, name in PACKAGES.items() if module.startswith(prefix)), found)
            frame = frame.f_back
        if found:
            facts.add_once("framework", of=found)

    facts.at_step.append(observe_framework)
    return []


def advice_on(cause: Cause, evidence: Evidence) -> str:
    """The fix of a cause for the kind of program that was seen, if that has one of its own."""
    kinds = [str(fact["of"]) for _, _, fact in evidence.facts("framework")][:1] + ["ranks"] * evidence.is_ddp
    samplers = {str(fact["type"]) for _, _, fact in evidence.facts("sampler")}
    if samplers & {"WeightedRandomSampler", "SubsetRandomSampler"}:
        kinds = [*(f"{kind} drawn" for kind in kinds[:1]), *kinds]
    return next((FIXES[kind][cause.key] for kind in kinds if cause.key in FIXES.get(kind, ())), cause.advice)
