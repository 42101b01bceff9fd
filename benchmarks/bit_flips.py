"""Bits that flip on one rank of a training: in activations, gradients, the state, and what is sent or received."""

from dataclasses import dataclass

import torch

from samestep.engine.observer import StepObserver

COMPUTED = ("activation", "gradient")
KEPT = ("parameter", "optimizer")
MOVED = ("sent", "received")


@dataclass(frozen=True)
class Flip:
    """One bit of one tensor, on one rank; of what a microbatch computes, in that microbatch."""

    kind: str
    rank: int
    step: int
    microbatch: int
    draw: int  # chooses the tensor, its element and the bit
    call: int = 0  # of what is sent or received: the number of the exchange of gradients in the step


def flip_bit(tensor, draw):
    """Flips one bit of a tensor of 32-bit elements in place, behind autograd's back."""
    words = tensor.data.reshape(-1).view(torch.int32)
    assert words.data_ptr() == tensor.data_ptr(), "dense, and no copy"
    bit = draw % 32
    words[draw // 32 % len(words)] ^= -(2**31) if bit == 31 else 1 << bit


class Flipping(StepObserver):
    """Strikes once, on the rank of its flip; an observer of the training step there."""

    reads_gradients = False

    def __init__(self, flip, communicator, model, optimizer):
        self.flip, self.model, self.optimizer = flip, model, optimizer
        self.is_due = flip.rank == communicator.rank
        self.step = self.microbatch = -1
        self.calls = 0
        if not self.is_due:
            return
        if flip.kind == "activation":
            modules = [module for module in model.modules() if not list(module.children())]
            modules[flip.draw % len(modules)].register_forward_hook(self.on_output)
        if flip.kind == "gradient":
            parameters = list(model.parameters())
            parameters[flip.draw % len(parameters)].register_hook(self.on_gradient)
        if flip.kind in MOVED:
            self.exchange, communicator.transport.exchange = communicator.transport.exchange, self.on_exchange

    def strikes(self, microbatch=None):
        """Whether the flip is to happen now; true once."""
        flip = self.flip
        is_now = self.is_due and self.step == flip.step and (microbatch is None or microbatch == flip.microbatch)
        self.is_due = self.is_due and not is_now
        return is_now

    def on_step(self, step, batch):
        """Flips a bit of the state."""
        self.step, self.microbatch, self.calls = step.num_steps, -1, 0
        if self.flip.kind in KEPT and self.strikes():
            tensors = list(self.model.parameters())
            if self.flip.kind == "optimizer":
                states = [self.optimizer.state[parameter] for parameter in tensors]
                tensors = [one for state in states for one in state.values() if one.dim() > 0]
            flip_bit(tensors[self.flip.draw % len(tensors)], self.flip.draw // 64)

    def on_microbatch(self, step, index, value):
        """Notes which microbatch is under way."""
        self.microbatch = index  # not of what is computed for an audit

    def on_output(self, module, inputs, output):
        """A forward hook."""
        if self.strikes(self.microbatch):
            flip_bit(output, self.flip.draw // 64)

    def on_gradient(self, gradient):
        """A hook of a parameter."""
        if not self.strikes(self.microbatch):
            return None
        flipped = gradient.clone()
        flip_bit(flipped, self.flip.draw // 64)
        return flipped

    def on_exchange(self, parts, sizes, receive_sizes):
        """An exchange of the transport."""
        is_gradient = parts.dtype == torch.float32 and sum(sizes) > 0
        self.calls += is_gradient
        is_gradient = is_gradient and self.calls == self.flip.call + 1
        if is_gradient and self.flip.kind == "sent" and self.strikes():
            parts = parts.clone()
            flip_bit(parts, self.flip.draw // 64)
        pending = self.exchange(parts, sizes, receive_sizes)
        return Received(self, pending) if is_gradient and self.flip.kind == "received" else pending


class Received:
    """What arrives, with a flipped bit once."""

    def __init__(self, flipping, pending):
        self.flipping, self.pending = flipping, pending

    def wait(self):
        """The parts of all ranks."""
        received = self.pending.wait()
        if self.flipping.strikes():
            flip_bit(received, self.flipping.flip.draw // 64)
        return received
