"""CUDA graphs on a GPU, captured and replayed: the bits of steps without them, and captures that fail."""

import pytest
import torch
from engine_programs import bits, mean_squared, perceptron, table
from graph_programs import CASES

from samestep.engine import microbatches as microbatches_module
from samestep.errors import UsageError
from samestep.train.run import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")


def on_cuda(
    graphs, epochs=2, model_fn=perceptron, loss=mean_squared, num_microbatches=4, optimizer=torch.optim.SGD, **options
):
    """Some epochs on the GPU, the last batch of each being shorter."""
    run = Run(16, num_microbatches, device="cuda")
    torch.manual_seed(0)
    model = model_fn()
    chosen = optimizer(model.parameters(), lr=0.05)
    step = run.train_step(model, chosen, loss, cuda_graphs=graphs, **options)
    losses = [step(batch).loss for _ in range(epochs) for batch in run.loader(table(42), shuffle=True)]
    return bits(model, [chosen]), losses


CUDA_CASES = {name: case for name, case in CASES.items() if "data" not in case}


@pytest.mark.parametrize("case", CUDA_CASES)
def test_on_a_gpu_captured_steps_give_the_bits_of_steps_without_graphs(case):
    assert on_cuda(True, **CUDA_CASES[case]) == on_cuda(False, **CUDA_CASES[case])


def test_on_a_gpu_late_checked_steps_give_the_same_bits():
    def fused(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, fused=True)

    assert on_cuda(True, optimizer=fused) == on_cuda(False, optimizer=fused)


def test_twin_on_a_gpu_replays_that_are_not_seeded_are_noticed(monkeypatch):
    plain = on_cuda(True)
    monkeypatch.setattr(microbatches_module, "derive_seed", lambda *parts: 7)
    assert on_cuda(True) != plain


def test_on_a_gpu_a_loss_that_looks_at_values_is_refused_in_a_sentence():
    def looking(model, batch):
        value = mean_squared(model, batch)
        return value if value.item() > 0 else -value

    with pytest.raises(UsageError, match="cannot be captured as a CUDA graph"):
        on_cuda(True, loss=looking)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
