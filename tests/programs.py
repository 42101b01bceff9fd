"""Programs that tests run on every rank of a world: `program(communicator, …)`."""

import hashlib
import random
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from samestep.checkpoint.digest import named_state, state_digest
from samestep.checkpoint.local_shards import unsharded
from samestep.core.microbatches import microbatch_ranges
from samestep.core.tree import Block, TreeSum, rank_blocks
from samestep.data.named import image_data, text_data
from samestep.data.randomness import Generators
from samestep.engine.losses import Mean
from samestep.metrics import accuracy, cross_entropy
from samestep.recipes import gpt, lenet, mlp, simplenet, vgg
from samestep.run.run import Run


def reduce_leaves(communicator, leaves, numel, shares=None):
    """Sums one leaf a microbatch through the ordered reduction."""
    ranges = microbatch_ranges(len(leaves), communicator.world_size, shares)
    counter = TreeSum(torch.add)
    for microbatch in ranges[communicator.rank]:
        counter.push(Block(microbatch, 1), leaves[microbatch].to(communicator.device, copy=True))
    like = torch.zeros(numel, device=communicator.device)
    reduction = communicator.reduce(rank_blocks(ranges, len(leaves)), counter.sums, like)
    reduction.fold()
    return reduction.finish()


def small_images(num_samples=103):
    """Images of 8×8 with labels, drawn once and for all."""
    generator = torch.Generator().manual_seed(7)
    images = torch.randn(num_samples, 1, 8, 8, generator=generator)
    return images, torch.randint(0, 10, (num_samples,), generator=generator)


def small_model():
    """Convolution, BatchNorm, dropout, and a layer that is used twice."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(144, 10)
    )


def classify(model, batch):
    """Cross-entropy, a mean over the microbatch."""
    return functional.cross_entropy(model(batch[0]), batch[1])


def train_small(communicator, options):
    """Trains the small model.

    Returns:
        The digest, the losses and gradient norms as hex, the microbatches that this rank ran by step, the scores, and
        what the script's own generators drew afterwards.
    """
    defaults = {"num_microbatches": 8, "batch": 32, "epochs": 2, "optimizer": "sgd", "momentum": 0.9, "samples": 103}
    o = {**defaults, **options}
    run = Run(o["batch"], o["num_microbatches"], o.get("seed", 3), shares=o.get("shares"), communicator=communicator)
    model = small_model()
    optimizer = make_optimizer(model, o["optimizer"], 0.05, o["momentum"])
    ran = Counter()
    model.register_forward_pre_hook(lambda module, args: ran.update([step.num_steps]) if module.training else None)
    step_options = {k: o[k] for k in ("max_grad_norm", "precision", "bucket_bytes", "overlap") if k in o}
    step = run.train_step(model, optimizer, o.get("loss", classify), **step_options)
    loader = run.loader(small_images(o["samples"]), shuffle=True, num_workers=o.get("num_workers", 0))
    steps = []
    numpy_generator = np.random.get_bit_generator()  # a leak must not reach the next program of this process
    leak = mock.patch.object(Generators, "restore")
    with leak if o.get("leak_randomness") else nullcontext():
        for _ in range(o["epochs"]):
            for batch in loader:
                result = step(batch)
                steps.append((result.loss.hex(), result.grad_norm.hex(), result.num_samples))
    scores = run.evaluate(model, small_images(o["samples"]), {"accuracy": accuracy, "loss": cross_entropy})
    draws = [torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()]
    np.random.set_bit_generator(numpy_generator)
    return state_digest(model, optimizer), steps, dict(ran), scores, draws


def agree(reference, results):
    """All ranks give what one device gives, and together they ran each microbatch of each step once."""
    for result in results:
        assert result[0] == reference[0]
        assert result[1] == reference[1]
        assert result[3] == reference[3]
    ran = Counter()
    for result in results:
        ran.update(result[2])
    assert ran == Counter(reference[2])


RECIPES = {"lenet": lenet, "mlp": mlp, "simplenet": simplenet, "vgg": vgg, "gpt": gpt}
RECIPE_SAMPLES = {"lenet": 300, "mlp": 300, "simplenet": 300, "vgg": 40, "gpt": 60}
RECIPE_BATCH = {"lenet": 128, "mlp": 128, "simplenet": 64, "vgg": 16, "gpt": 16}
SMALL = {"vgg": {"width": 0.125}, "gpt": {"layers": 2, "width": 32, "heads": 2, "context": 32, "dropout": 0.1}}
LR = {"lenet": 0.05, "mlp": 0.01, "simplenet": 0.01, "vgg": 0.05, "gpt": 2e-3}
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def make_optimizer(model, name, lr, momentum=0.0):
    """An optimizer by its name; only that of "sgd" has momentum."""
    return OPTIMIZERS[name](model.parameters(), lr=lr, **({"momentum": momentum} if name == "sgd" else {}))


def recipe_data(name, source=None, seed=0, target=None, context=32):
    """The data of a recipe, to train and to test, and a description."""
    if name == "mlp":
        return mlp.read_table(source, target, seed)
    if name == "gpt":
        return text_data(source, context)
    if name == "vgg":
        return image_data(source, sides=range(1, vgg.SIDE + 1))
    return image_data(source, lenet.standardize, sides=range(28, 29))


def recipe_model(name, train, **options):
    """The model of a recipe for its data."""
    return mlp.make_model(train.tensors[0].shape[1]) if name == "mlp" else model_maker(name)(**options)


def model_maker(name):
    """What makes the model of a recipe."""
    return gpt.Gpt if name == "gpt" else RECIPES[name].make_model


class FirstSamples(torch.utils.data.Dataset):
    """The first samples of a dataset in memory, still in memory."""

    def __init__(self, dataset, count):
        self.dataset, self.count = dataset, min(count, len(dataset))
        self.transform = dataset.transform

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.dataset[index]

    def gather(self, ids):
        return self.dataset.gather(ids)


class OneByOne(torch.utils.data.Dataset):
    """The same samples without `gather`: fetched one at a time, with noise from the global generators."""

    def __init__(self, dataset, noise=True):
        self.dataset, self.noise = dataset, noise

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        x, y = self.dataset[index]
        if self.noise and x.is_floating_point():
            x = x + 0.01 * (torch.rand(()) + float(np.random.rand()) + random.random())
        return x, y


def train_recipe(communicator, name, options):
    """Trains a recipe on some of its embedded data; digest, losses, and the microbatches that each rank ran."""
    run = Run(RECIPE_BATCH[name], options.get("num_microbatches", 8), 0, communicator=communicator)
    train, test, _ = recipe_data(name)
    model, kind = recipe_model(name, train, **SMALL.get(name, {})), options.get("optimizer", "sgd")
    optimizer = make_optimizer(model, kind, options.get("lr", LR[name]), 0.9)
    step_options = {key: options[key] for key in ("max_grad_norm", "precision") if key in options}
    step = run.train_step(model, optimizer, RECIPES[name].loss_fn, **step_options)
    ran = Counter()
    model.register_forward_pre_hook(lambda module, args: ran.update([step.num_steps]) if module.training else None)
    samples = FirstSamples(train, RECIPE_SAMPLES[name])
    data = OneByOne(samples) if options.get("one_by_one") else samples
    loader = run.loader(data, shuffle=True, num_workers=options.get("num_workers", 0))
    losses = []
    for _ in range(options.get("epochs", 1)):
        losses += [step(batch).loss.hex() for batch in loader]
    scores = run.evaluate(model, FirstSamples(test, 50), RECIPES[name].METRICS)
    return state_digest(model, step.optimizers[0]), losses, dict(ran), scores


def masked_loss(model, batch):
    """A loss a token, of which most are masked; some microbatches have none left."""
    scores = model(batch[0])
    total = functional.cross_entropy(scores, batch[1], ignore_index=-100, reduction="sum")
    return Mean(total, (batch[1] != -100).sum())


def whole_state(step):
    """Parameters, buffers and optimizer state, unsharded, by name, in NumPy."""
    over = step.communicator
    return {name: torch.as_tensor(unsharded(value, over)).numpy(force=True).copy() for name, value in named_state(step)}


def bits(step):
    """SHA-256 of the whole state."""
    hasher = hashlib.sha256()
    for name, values in whole_state(step).items():
        hasher.update(f"{name} {values.dtype} {values.shape}".encode())
        hasher.update(values.tobytes())
    return hasher.hexdigest()


def own_calls(function, *names):
    """How often the functions of some of samestep's files are called while a function runs."""
    found = Counter()

    def count(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and file.endswith(names):
            found[Path(file).name] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found
