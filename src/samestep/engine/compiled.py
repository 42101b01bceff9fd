"""torch.compile for the forward and the loss of a microbatch, by settings under which the ranks' code is the same."""

from samestep.engine.losses import LossFn


def compile_loss(loss_fn: LossFn) -> LossFn:
    """The loss function, compiled when it is first called with microbatches of a size.

    Tier `bitwise`, like any other loss function; the bits are not those of the function that is not compiled.
    """
    import torch._inductor.config

    if hasattr(torch._inductor.config, "deterministic"):  # torch 2.10 and later
        torch._inductor.config.deterministic = True
    fix_shapes()
    compiled: LossFn = torch.compile(loss_fn, dynamic=False)
    return compiled


def fix_shapes() -> None:
    """Keeps torch.compile from going over to dynamic shapes at the second size that it meets: a rank may meet one."""
    import torch._dynamo.config

    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.assume_static_by_default = True
