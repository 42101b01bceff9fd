"""Backward passes of many kinds through the wrapper, and changes of models between the steps."""

import copy
import gc
import weakref
from itertools import pairwise

import torch
from torch import nn
from torch.func import functional_call
from usual import Net, case, results, rows, train, wrap


def perceptron(*widths):
    """Wrapped linear layers with a tanh between them."""
    layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
    return wrap(*layers[:-1])


@case
def gradient_penalty_few_rows():
    """Third derivatives, where a batch has fewer rows than there are devices; backward goes through twice."""
    model, losses = perceptron(4, 8, 1), []
    for count in (1, 2, 3, 8):
        x, z = torch.randn(count, 4).cuda().requires_grad_(), torch.randn(count, 4).cuda()
        real, fake = model(x), model(z)
        (slope,) = torch.autograd.grad(real.sum(), x, create_graph=True)
        (bend,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        (weight,) = torch.autograd.grad(fake.square().mean(), [model.module[0].weight], create_graph=True)
        loss = (slope.norm(dim=1) - 1).square().mean() + bend.square().mean() + weight.square().sum() + fake.mean()
        loss.backward(retain_graph=True)
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad for p in model.parameters()]


@case
def backwards_apart():
    """Two outputs of one forward, each with a backward of its own, one of them into a part of the parameters only."""

    class Heads(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.body, self.left, self.right = nn.Linear(4, width), nn.Linear(4, 1), nn.Linear(4, 2)

        def forward(self, x):
            h = self.body(x).tanh() if self.body.out_features else x
            return self.left(h), self.right(h)

    model, apart = wrap(Heads(4)), wrap(Heads(0))
    left, right = model(torch.randn(10, 4).cuda())
    left.square().mean().backward(retain_graph=True)
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    (part,) = torch.autograd.grad(right.abs().mean(), model.module.body.weight, retain_graph=True)
    right.square().mean().backward(inputs=list(model.module.right.parameters()))
    for out in apart(torch.randn(12, 4).cuda()):  # nothing is retained between the two
        out.square().mean().backward()
    return grads, part, [p.grad for p in (*model.parameters(), *apart.parameters())]


@case
def nested_backward():
    """In a backward a hook runs one more, through the same graph; a weight is used twice, another in some chunks.

    Of whole numbers, whose sums are exact: the two backwards add up in another order than the reference's.
    """

    def forward(net, x):
        hidden = x @ net.weight
        result = hidden.square() @ net.weight
        if x[0, 0] > 0:
            result = result + net.sometimes

        def on_gradient(gradient):
            (slope,) = torch.autograd.grad(hidden, x, torch.ones_like(hidden), retain_graph=True)
            return gradient + slope

        result.register_hook(on_gradient)
        return result

    weight, sometimes, x = (torch.randint(-3, 4, shape).double() for shape in ((5, 5), (5,), (13, 5)))
    model, x = wrap(Net(forward, weight=nn.Parameter(weight), sometimes=nn.Parameter(sometimes))), x.cuda()
    result = model(x.requires_grad_())
    result.sum().backward(retain_graph=True)
    (result * 2).sum().backward()
    return result, x.grad, [p.grad for p in model.parameters()]


@case
def hooks():
    """On modules inside the wrapper, forward and backward, on the wrapper, on parameters and on outputs."""
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    model = nn.DataParallel(net).cuda()
    net[0].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    net[0].register_forward_hook(lambda module, args, out: print("hidden", tuple(out.shape)))
    net[1].register_forward_hook(lambda module, args, out: out + 1)
    net[2].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 3,))
    model.register_forward_hook(lambda module, args, out: print("all", tuple(out.shape)))
    net[0].weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def loss_of(out):
        out.register_hook(lambda grad: grad * 2)
        return out.square().mean()

    return train(model, rows(10, 4), 2, loss_of=loss_of), [p.grad for p in model.parameters()]


@case
def lbfgs():
    """The optimizer calls a closure as often as it likes."""
    model, x, calls = perceptron(3, 5, 1), torch.randn(10, 3).cuda(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=6, line_search_fn="strong_wolfe")

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss

    loss = [optimizer.step(closure) for _ in range(2)]
    print(len(calls), "calls")
    return loss, model.state_dict()


@case
def terms_outside():
    """Terms on the parameters outside the wrapper: L2, and elastic weights around old ones; two forwards a step."""
    model = perceptron(5, 6, 3)
    old = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss_of(out):
        distance = nn.functional.pairwise_distance(out, model(torch.randn(10, 5).cuda()))
        squares = sum(p.pow(2).sum() for p in model.parameters())
        elastic = sum((p - old[name]).square().sum() for name, p in model.named_parameters())
        return distance.mean() + 1e-2 * squares + 0.5 * elastic

    return train(model, rows(10, 5), loss_of=loss_of), [p.grad for p in model.parameters()]


@case
def functional_calls():
    """Meta-learning: the forward is called with other weights, which a gradient step has made of the module's own."""

    body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model = Net(lambda net, x: nn.parallel.data_parallel(net.body, x), body=body).cuda()
    for count in (10, 1, 7):
        weights = dict(model.named_parameters())
        inner = model(torch.randn(6, 4).cuda()).square().mean()
        steps = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: weight - 0.1 * step for (name, weight), step in zip(weights.items(), steps, strict=True)}
        functional_call(model, fast, (torch.randn(count, 4).cuda(),)).square().mean().backward()
    leaves = {name: (p * 2).detach().requires_grad_() for name, p in model.named_parameters()}
    functional_call(model, leaves, (torch.randn(10, 4).cuda(),)).square().mean().backward()
    return [leaf.grad for leaf in leaves.values()], [p.grad for p in model.parameters()]


@case
def moving_average():
    """A moving average of the weights in a deep copy of the wrapped model."""
    model = wrap(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(12, 4).cuda()
        loss = (model(x) - ema(x)).square().mean() + model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(ema.parameters(), model.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
    ema.eval()
    return loss, ema(x), ema.state_dict(), copy.deepcopy(model).state_dict()


@case
def parts_replaced():
    """Layers are added and replaced between the steps, parameters set, taken, frozen, loaded and given other data."""
    model, losses, grads = wrap(nn.Linear(4, 4), nn.Tanh()), [], []
    model.apply(lambda m: nn.init.xavier_uniform_(m.weight) if isinstance(m, nn.Linear) else None)
    for step in range(6):
        if step == 1:
            model.module.append(nn.Linear(4, 2).cuda())
        if step == 2:
            model.module[0].weight = nn.Parameter(model.module[0].weight * 2)
        if step == 3:
            model.module[0].weight.data = torch.randn(4, 4).cuda()
            model.module[0].bias.requires_grad_(False)
        if step == 4:
            model.module[2] = nn.Linear(4, 3).cuda()
        if step == 5:
            model.module[2].bias = None
            model.load_state_dict({key: value * 0.5 for key, value in model.state_dict().items()})
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=step < 4):
            loss = model(torch.randn(6, 4).cuda()).float().square().mean()
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        grads.append({name: p.grad for name, p in model.named_parameters()})
    return losses, grads


@case
def models_dropped():
    """A model for each fold of a cross-validation: those that are dropped must be freed."""
    dropped, losses = [], []
    for _ in range(4):
        model = wrap(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        losses.append(train(model, rows(8, 4), 2)["loss"].item())
        dropped += [weakref.ref(model), weakref.ref(model.module), weakref.ref(model.module[0].weight)]
        del model
        gc.collect()
    print(sum(ref() is not None for ref in dropped), "alive")
    return losses


RESULT = results()
