# Rows of a table, a program each, are as long as they are:
# ruff: noqa: E501
"""Programs whose module changes, computes or is used in unusual ways in the training."""

from textwrap import dedent

from stateful_program import EITHER, EQUAL, WHOLE, Program, changing

STRUCTURE = [
    changing(
        "adapter added",
        "out",
        "net.head = LoRA(net.head)\noptimizer = sgd(net)",
        before="""
        class LoRA(nn.Module):
            def __init__(self, linear):
                super().__init__()
                self.linear = linear.requires_grad_(False)
                self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 2, bias=False)
            def forward(self, h):
                return self.linear(h) + self.up(self.down(h))
        """,
    ),
    changing("layer replaced", "out", "net.inner = nn.Linear(6, 8)\noptimizer = sgd(net)"),
    changing("activation replaced", "self.act(out)", "net.act = nn.Softplus()", init="self.act = nn.Tanh()"),
    changing(
        "layer appended",
        "self.rest(out)",
        "net.rest.append(nn.Linear(2, 2))\noptimizer = sgd(net)",
        init="self.rest = nn.Sequential()",
    ),
    changing("frozen", "out", "net.inner.requires_grad_(False)\nnet.zero_grad(set_to_none=True)"),
    changing("unfrozen", "out", "net.inner.requires_grad_(True)\noptimizer = sgd(net)", after="net.inner.requires_grad_(False)\noptimizer = sgd(net)"),
    changing("initialised again", "out", "net.apply(lambda m: isinstance(m, nn.Linear) and nn.init.normal_(m.weight))"),
    changing("data replaced", "out", "net.inner.weight.data = net.inner.weight.data * 3.0"),
    changing("data changed in place", "out", "net.inner.weight.data.mul_(3.0)"),
    changing("parameter changed by NumPy", "out", "net.inner.weight.detach().numpy()[:] *= 3.0"),
    changing("parameter replaced", "out", "net.inner.weight = nn.Parameter(torch.ones(8, 6))\noptimizer = sgd(net)"),
    changing("state loaded", "out", "net.load_state_dict(Base().state_dict())"),
    changing("state assigned", "out", "net.load_state_dict(Base().state_dict(), assign=True)\noptimizer = sgd(net)"),
    changing("copy trained", "out * self.gain", "net = copy.deepcopy(net)\nnet.gain = 3.0\nmodel, optimizer = wrap(net), sgd(net)", before="import copy", init="self.gain = 1.0"),
    changing("made anew", "out", "del model, optimizer\nnet = Net()\nmodel, optimizer = wrap(net), sgd(net)"),
    changing("dtype of the module", "out.float()", "net.double()\nx = x.double()"),
    changing("pruned", "out", "prune.l1_unstructured(net.inner, 'weight', 0.5)\noptimizer = sgd(net)", before="from torch.nn.utils import prune", expect=EITHER),
    changing("parametrized", "out", "nn.utils.parametrize.register_parametrization(net.inner, 'weight', nn.Tanh())\noptimizer = sgd(net)"),
    changing(
        "state of a parametrization",
        "out",
        "net.inner.parametrizations.weight[0].gain = 3.0",
        before="class Scaled(nn.Module):\n    gain = 1.0\n    def forward(self, w):\n        return w * self.gain",
        init="nn.utils.parametrize.register_parametrization(self.inner, 'weight', Scaled())",
    ),
    changing("weight norm", "out", "", init="self.inner = nn.utils.parametrizations.weight_norm(self.inner)"),
    changing("weight norm by hooks", "out", "", init="self.inner = nn.utils.weight_norm(self.inner)", before="import warnings\nwarnings.simplefilter('ignore')", expect=EITHER),
    changing("spectral norm", "out", "", init="self.inner = nn.utils.parametrizations.spectral_norm(self.inner)", expect=EITHER, python=False),
    changing("orthogonal", "out", "", init="nn.utils.parametrizations.orthogonal(self.head)"),
    changing("tied weights", "F.linear(out @ self.head.weight, self.other.weight)", "", init="self.other = nn.Linear(8, 2)\nself.other.weight = self.head.weight"),
    changing("tied in mid-run", "out + self.other(torch.tanh(self.inner(x)))", "net.other.weight = net.head.weight\noptimizer = sgd(net)", init="self.other = nn.Linear(8, 2)"),
    changing("layer shared by two names", "self.again(torch.tanh(out))", "", init="self.head = nn.Linear(8, 8)\nself.last = nn.Linear(8, 2)\nself.again = nn.Sequential(self.head, self.last)"),
]  # fmt: skip
COMPUTING = [
    changing("checkpointing", "checkpoint(lambda h: torch.tanh(self.inner(h)) * gain, x, use_reentrant=False).mean(1, True) + out", "gain = 3.0", before="from torch.utils.checkpoint import checkpoint\ngain = 1.0"),
    changing("reentrant checkpointing", "checkpoint(lambda h: torch.tanh(self.inner(h)) * gain, x.clone().requires_grad_(), use_reentrant=True).mean(1, True) + out", "gain = 3.0", before="from torch.utils.checkpoint import checkpoint\ngain = 1.0", expect=EITHER),
    *(
        changing(f"compiled by {backend}", "out * gain * self.gain", "gain = net.gain = 3.0", before="gain = 1.0", init="self.gain = 1.0", after=f"model = torch.compile(net, backend='{backend}')", expect=EITHER)
        for backend in ("eager", "inductor")
    ),
    changing("compiled in place", "out * gain", "gain = 3.0", before="gain = 1.0", after="net.compile(backend='eager')", expect=EITHER),
    changing("compiled function inside", "act(out)", "gain = 3.0", before="gain = 1.0\n@torch.compile(backend='eager')\ndef act(h):\n    return h * gain", expect=EITHER),
    Program(
        "recurrent state kept on the module",
        """
        class Net(Base):
            def __init__(self):
                super().__init__()
                self.cell, self.h = nn.GRUCell(6, 8), None
            def forward(self, x):
                self.h = self.cell(x, None if self.h is None else self.h.detach())
                return self.head(self.h)

        net = Net()
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            if step == 4:
                net.h = None  # change
            learn(model, optimizer)
        finish(net, h=net.h)
        """,
        EITHER,
    ),
    Program(
        "recurrent state as an argument",
        """
        class Net(Base):
            def __init__(self):
                super().__init__()
                self.cell = nn.GRUCell(6, 8)
            def forward(self, x, h):
                h = self.cell(x, h)
                return self.head(h), h

        net, h = Net(), torch.zeros(12, 8).to(device)
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            optimizer.zero_grad()
            out, h = model(x, h.detach())
            loss = F.mse_loss(out, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        finish(net, h=h)
        """,
    ),
    Program(
        "hidden state of layers as an argument",
        """
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.rnn, self.head = nn.GRU(3, 8, 2, batch_first=True), nn.Linear(8, 2)
            def forward(self, x, h):
                out, h = self.rnn(x.view(-1, 2, 3), h)
                return self.head(out[:, -1]), h

        net, h = Net(), torch.zeros(2, 12, 8)
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            out, h = model(x, h.detach())
            learn(lambda x: out, optimizer)
        finish(net, h=h)
        """,
        EITHER,
    ),
    *(
        Program(
            f"argument that is {name}",
            f"""
            from types import SimpleNamespace
            class Net(Base):
                def forward(self, x, gain):
                    return super().forward(x) * {use}

            net = Net()
            model, optimizer = wrap(net), sgd(net)
            gain = {start}
            for step in range(6):
                if step == 4:
                    {change}  # change
                learn(lambda x: model(x, gain=gain), optimizer)
            finish(net)
            """,
            EITHER,
        )
        for name, start, use, change in (
            ("a float", "1.0", "gain", "gain = 3.0"),
            ("a list", "[1.0]", "gain[0]", "gain[0] = 3.0"),
            ("an object", "SimpleNamespace(k=1.0)", "gain.k", "gain.k = 3.0"),
            ("a function", "lambda k=[1.0]: k[0]", "gain()", "gain.__defaults__[0][0] = 3.0"),
            ("a module", "nn.Linear(2, 2).requires_grad_(False)", "gain(x[:, :2])", "gain.weight.data.mul_(3)"),
            ("the optimizer", "SimpleNamespace(groups=optimizer.param_groups)", "gain.groups[0]['lr'] * 10", "optimizer.param_groups[0]['lr'] = 0.3"),
        )
    ),
    Program(
        "teacher in the loss",
        """
        import copy
        net = Base()
        teacher = copy.deepcopy(net).requires_grad_(False)
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            with torch.no_grad():
                target = teacher(x.to("cpu") if device == "cpu" else x)
            learn(model, optimizer, lambda out, y: F.mse_loss(out, y) + F.mse_loss(out, target + 1))
            for mine, its in zip(teacher.parameters(), net.parameters()):
                mine.data.lerp_(its.data, 0.5)  # change
        finish(net, teacher)
        """,
    ),
    Program(
        "teacher in the forward",
        """
        import copy
        class Net(Base):
            def __init__(self):
                super().__init__()
                self.teacher = Base().requires_grad_(False)
            def forward(self, x):
                return super().forward(x) + self.teacher(x).detach()

        net = Net()
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            learn(model, optimizer)
            for mine, its in zip(net.teacher.parameters(), net.parameters()):
                mine.data.lerp_(its.data, 0.5)  # change
        finish(net)
        """,
    ),
    Program(
        "teacher in a global",
        """
        class Net(Base):
            def forward(self, x):
                with torch.no_grad():
                    target = teacher(x)
                return super().forward(x) + target

        net, teacher = Net(), Base().requires_grad_(False)
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            learn(model, optimizer)
            for mine, its in zip(teacher.parameters(), net.parameters()):
                mine.data.lerp_(its.data, 0.5)  # change
        finish(net, teacher)
        """,
        EITHER,
    ),
    Program(
        "averaged model",
        """
        from torch.optim.swa_utils import AveragedModel
        net = Base()
        model, optimizer = wrap(net), sgd(net)
        averaged = AveragedModel(net)
        for step in range(6):
            learn(model, optimizer)
            averaged.update_parameters(net)
        finish(net, averaged, out=averaged(x))
        """,
    ),
    Program(
        "GAN",
        """
        made, judge = Base(), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        both = [wrap(made), wrap(judge)]
        optimizers = [sgd(made), sgd(judge)]
        ones = torch.ones(12, 1).to(device)
        for step in range(6):
            fake = both[0](x)
            optimizers[1].zero_grad()
            loss = F.mse_loss(both[1](y), ones) + both[1](fake.detach()).square().mean()
            loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            other = F.mse_loss(both[1](fake), ones)
            other.backward()
            optimizers[0].step()
            losses += [loss.item(), other.item()]
        finish(made, judge)
        """,
    ),
    Program(
        "penalty on the gradient of the inputs",
        """
        net, gain = Base(), 1.0
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            points = x.clone().requires_grad_()
            out = model(points)
            (slope,) = torch.autograd.grad(out.sum(), points, create_graph=True)
            learn(lambda x: out, optimizer, lambda out, y: F.mse_loss(out, y) + slope.norm(dim=1).sub(1).square().mean())
        finish(net)
        """,
    ),
    Program(
        "penalty on the gradient of the parameters",
        """
        net = Base()
        model, optimizer = wrap(net), sgd(net)
        def criterion(out, y):
            loss = F.mse_loss(out, y)
            slopes = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
            return loss + sum(slope.square().sum() for slope in slopes)
        for step in range(6):
            learn(model, optimizer, criterion)
        finish(net)
        """,
    ),
    Program(
        "MAML",
        """
        from torch.func import functional_call
        net = Base()
        optimizer = sgd(net)
        for step in range(6):
            fast = dict(net.named_parameters())
            loss = F.mse_loss(functional_call(net, fast, (x,)), y)
            slopes = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * slope for (name, p), slope in zip(fast.items(), slopes)}
            learn(lambda x: functional_call(net, fast, (x + 1,)), optimizer)
        finish(net)
        """,
        EITHER,
    ),
    Program(
        "per-sample gradients",
        """
        from torch.func import functional_call, grad, vmap
        net = Base()
        optimizer = sgd(net)
        def loss_of(p, a, b):
            return F.mse_loss(functional_call(net, p, (a[None],)), b[None])
        for step in range(6):
            learn(net, optimizer)
            found = vmap(grad(loss_of), (None, 0, 0))({k: p.detach() for k, p in net.named_parameters()}, x, y)
        finish(net, norms=[g.flatten(1).norm(dim=1) for g in found.values()])
        """,
        EITHER,
    ),
    Program(
        "LBFGS",
        """
        net = Base()
        model, optimizer = wrap(net), torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss
        for step in range(4):
            losses.append(optimizer.step(closure).item())
        finish(net)
        """,
        tolerance=1e-2,  # its search goes on from the sums of earlier gradients
    ),
    Program(
        "accumulated gradients",
        """
        net = Base()
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            for rows in (slice(0, 8), slice(8, 12)):
                F.mse_loss(model(x[rows]), y[rows]).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        finish(net)
        """,
    ),
    changing("BatchNorm without momentum", "self.norm(out)", "net.norm.momentum = 0.5", init="self.norm = nn.BatchNorm1d(2, momentum=None)", python=False),
    changing("BatchNorm in eval", "self.norm(out)", "net.norm.eval()", init="self.norm = nn.BatchNorm1d(2)", python=False),
    changing("rate of dropout", "self.drop(out)", "net.drop.p = 0.8", init="self.drop = nn.Dropout(0.2)", python=False),
    changing("stochastic depth", "out if random.random() < keep else out * 3.0", "keep = 0.1", before="import random\nrandom.seed(1)\nkeep = 0.9", python=False),
    Program(
        "seeded anew each step",
        """
        import random
        import numpy as np
        class Net(Base):
            def forward(self, x):
                return super().forward(F.dropout(x, 0.5)) * (1 + random.random() + np.random.rand())

        net = Net()
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            torch.manual_seed(7 + step), random.seed(7 + step), np.random.seed(7 + step)  # change
            learn(model, optimizer)
        finish(net, after=[random.random(), np.random.rand(), torch.rand(3)])
        """,
        python=False,
    ),
    *(
        Program(
            f"output that is {name}",
            f"""
            import collections, dataclasses
            {before}
            class Net(Base):
                def forward(self, x):
                    h = torch.tanh(self.inner(x))
                    return {made}

            net, kinds = Net(), set()
            model, optimizer = wrap(net), sgd(net)
            for step in range(6):
                result = model(x)
                kinds.add(f"{{type(result).__name__}} {{type(result) is {kind}}}")
                learn(lambda x: {out}, optimizer, lambda out, y: F.mse_loss(out, y) + {h}.square().mean())
            finish(net, kinds=sorted(kinds), h={h})
            """,
            expect,
        )
        for name, before, made, kind, out, h, expect in (
            ("a dict", "", "{'out': self.head(h), 'h': h, 'name': 'net'}", "dict", "result['out']", "result['h']", EQUAL),
            ("a dataclass", "@dataclasses.dataclass\n            class Out:\n                out: object\n                h: object\n", "Out(self.head(h), h)", "Out", "result.out", "result.h", EQUAL),
            ("a namedtuple", "Out = collections.namedtuple('Out', 'out h')", "Out(self.head(h), h)", "Out", "result.out", "result.h", EQUAL),
            ("a nested list", "", "[self.head(h), [h, (h, None)]]", "list", "result[0]", "result[1][1][0]", EQUAL),
            ("an object of the script", "class Out:\n                def __init__(self, *both):\n                    self.out, self.h = both\n", "Out(self.head(h), h)", "Out", "result.out", "result.h", EITHER),
            ("a subclass of dict", "class Out(dict):\n                pass\n", "Out(out=self.head(h), h=h)", "Out", "result['out']", "result['h']", EITHER),
        )
    ),
    Program(
        "exception of the script in a backward",
        """
        class Picky(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.is_refused = bool((x > 50).any())
                return x.clone()
            @staticmethod
            def backward(ctx, gradient):
                if ctx.is_refused:
                    raise ValueError("refused")
                return gradient
        class Net(Base):
            def forward(self, x):
                return super().forward(Picky.apply(x))

        net, seen = Net(), []
        model, optimizer = wrap(net), sgd(net)
        x.requires_grad_()
        for step in range(6):
            kept = x.detach().clone()
            if step in (1, 3):
                x.data[0 if step == 1 else -1] = 99.0  # of the first chunk, then of the last
            try:
                learn(model, optimizer)
            except ValueError as error:
                seen.append(str(error))
            x.data.copy_(kept)
        finish(net, seen=seen)
        """,
    ),
    Program(
        "exception of the script",
        """
        class Odd(Exception):
            def __init__(self, value):
                super().__init__(f"odd: {value}")
                self.value = value
        class Net(Base):
            def forward(self, x):
                if limit < 1:
                    raise Odd(limit)
                return super().forward(x)

        net, seen, limit = Net(), [], 1.0
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            limit = 0.5 if step == 4 else 1.0  # change
            try:
                learn(model, optimizer)
            except Odd as error:
                seen.append([str(error), error.value, type(error) is Odd])
        finish(net, seen=seen)
        """,
        EITHER,
    ),
    Program(
        "warnings that the script collects",
        """
        import warnings
        class Net(Base):
            def forward(self, x):
                warnings.warn("often")
                return super().forward(x)

        net = Net()
        model, optimizer = wrap(net), sgd(net)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(6):
                learn(model, optimizer)
        finish(net, warned=sum(str(one.message) == "often" for one in caught))
        """,
        EITHER,
        python=False,
    ),
    Program(
        "output that the script redirects",
        """
        import contextlib, io
        class Net(Base):
            def forward(self, x):
                print("rows", x.shape[0])
                return super().forward(x)

        net, text = Net(), io.StringIO()
        model, optimizer = wrap(net), sgd(net)
        with contextlib.redirect_stdout(text):
            for step in range(6):
                learn(model, optimizer)
        finish(net, text=text.getvalue())
        """,
        EITHER,
        python=False,
    ),
]  # fmt: skip
CHECKPOINT = "from torch.utils.checkpoint import checkpoint, checkpoint_sequential\ngain = 1.0\n"
HOLDER = """
class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 8)
    def forward(self, x):
        return torch.tanh(self.inner(x)) * gain

"""


def returning(name, before, made, out, kind="Out", expect=EQUAL):
    """A module that takes and returns an instance of a class of containers."""
    return Program(
        f"container: {name}",
        dedent(before)
        + f"""
class Net(Base):
    def forward(self, x, more=None):
        assert more is None or type(more) is {kind}, type(more)
        h = torch.tanh(self.inner(x))
        out = self.head(h)
        return {made}

net, kinds = Net(), set()
model, optimizer = wrap(net), sgd(net)
for step in range(6):
    result = model(x)
    kinds.add((type(result).__name__, type(result) is {kind}))
    learn(lambda x: (lambda result: {out})(model(x, more=result)), optimizer)
finish(net, kinds=sorted(kinds))
""",
        expect,
    )


USES = [
    changing("reentrant checkpoint of layers", "checkpoint(lambda h: self.head(torch.tanh(self.last(h)) * gain), self.inner(x), use_reentrant=True)", "gain = 3.0", before=CHECKPOINT, init="self.last = nn.Linear(8, 8)"),
    changing("reentrant checkpoint of a layer, used outside of it too", "checkpoint(self.head, torch.tanh(self.inner(x)), use_reentrant=True) * gain + self.head(self.inner(x))", "gain = 3.0", before=CHECKPOINT),
    changing("reentrant checkpoint in a reentrant one", "checkpoint(lambda h: self.head(checkpoint(lambda h: torch.tanh(self.last(h)) * gain, h.relu(), use_reentrant=True)), self.inner(x), use_reentrant=True)", "gain = 3.0", before=CHECKPOINT, init="self.last = nn.Linear(8, 8)"),
    changing("reentrant checkpoint with dropout", "checkpoint(lambda h: self.head(F.dropout(torch.tanh(self.last(h)), rate)), self.inner(x), use_reentrant=True)", "rate = 0.5", before=CHECKPOINT + "rate = 0.2", init="self.last = nn.Linear(8, 8)", python=False),
    changing("reentrant checkpoint with BatchNorm", "checkpoint(lambda h: self.head(self.norm(h)) * gain, self.inner(x), use_reentrant=True)", "gain = 3.0", before=CHECKPOINT, init="self.norm = nn.BatchNorm1d(8)", python=False),
    changing("checkpoint_sequential", "checkpoint_sequential(self.layers, 2, self.inner(x), use_reentrant=False) * gain", "gain = 3.0", before=CHECKPOINT, init="self.layers = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))"),
    changing("reentrant checkpoint_sequential", "checkpoint_sequential(self.layers, 2, self.inner(x), use_reentrant=True) * gain", "gain = 3.0", before=CHECKPOINT, init="self.layers = nn.Sequential(nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))"),
    changing("checkpoint around the module", "out * gain", "gain = 3.0", before=CHECKPOINT, learn="learn(lambda x: checkpoint(model, x, use_reentrant=False), optimizer)"),
    changing("reentrant checkpoint around the module", "out * gain", "gain = 3.0", before=CHECKPOINT, learn="learn(lambda x: checkpoint(model, x.clone().requires_grad_(), use_reentrant=True), optimizer)"),
    changing("reentrant checkpoint, accumulated gradients", "checkpoint(self.head, torch.tanh(self.inner(x)), use_reentrant=True) * gain", "gain = 3.0", before=CHECKPOINT, each="(model(x).square().mean()).backward()"),
    changing("reentrant checkpoint, and a gradient of the inputs", "checkpoint(self.head, torch.tanh(self.inner(x)), use_reentrant=True) * gain", "gain = 3.0", before=CHECKPOINT, each="leaf = x.clone().requires_grad_()\nmodel(leaf).sum().backward()\nlosses.append(leaf.grad.norm().item())"),
    changing(
        "Function whose backward calls backward",
        "Again.apply(lambda h: self.head(torch.tanh(h)) * gain, self.inner(x)) + self.head(self.inner(x))",
        "gain = 3.0",
        before="""
        gain = 1.0
        class Again(torch.autograd.Function):
            @staticmethod
            def forward(ctx, function, h):
                ctx.function = function
                ctx.save_for_backward(h)
                with torch.no_grad():
                    return function(h)
            @staticmethod
            def backward(ctx, gradient):
                h = ctx.saved_tensors[0].detach().requires_grad_()
                with torch.enable_grad():
                    torch.autograd.backward(ctx.function(h), gradient)
                return None, h.grad
        """,
    ),
    *(
        changing(f"compiled{name}", "self.part(out) * gain * self.gain", "gain = net.gain = 3.0", before="gain = 1.0", init=f"self.gain = 1.0\nself.part = {part}", after=after)
        for name, part, after in (
            (" child", "torch.compile(nn.Linear(2, 2), backend='aot_eager', dynamic=False)", ""),
            (" child in place", "nn.Linear(2, 2)", "net.part.compile(backend='aot_eager')"),
            (" module", "nn.Linear(2, 2)", "model = torch.compile(model, backend='eager', fullgraph=True)"),
        )
    ),
    returning("namedtuple with its own __new__", """
        import collections
        class Out(collections.namedtuple('Out', 'out h')):
            def __new__(cls, out, h):
                assert out.shape[1] == 2 and h.shape[1] == 8
                return super().__new__(cls, out, h)
        """, "Out(out, h)", "result.out + result.h.mean()"),
    returning("namedtuple whose __new__ takes others", """
        import collections
        class Out(collections.namedtuple('Out', 'out h')):
            __slots__ = ()
            def __new__(cls, h):
                return super().__new__(cls, h[:, :2] * 3, h)
        """, "Out(h + out.mean(1, True))", "result.out + result.h.mean()"),
    returning("typing.NamedTuple with defaults and methods", """
        import typing
        class Out(typing.NamedTuple):
            out: torch.Tensor
            h: torch.Tensor
            name: str = 'net'
            def both(self):
                return self.out + self.h.mean()
        """, "Out(out, h)", "result.both()"),
    returning("tuple with checks", """
        class Out(tuple):
            def __new__(cls, *entries):
                assert len(entries) == 2 and all(isinstance(each, torch.Tensor) for each in entries)
                return super().__new__(cls, entries)
        """, "Out(out, h)", "result[0] + result[1].mean()"),
    returning("list with checks", """
        class Out(list):
            def __init__(self, out, h):
                assert isinstance(out, torch.Tensor)
                super().__init__([out, h])
        """, "Out(out, h)", "result[0] + result[1].mean()"),
    returning("dict with checks", """
        class Out(dict):
            def __init__(self, out, h):
                assert isinstance(out, torch.Tensor)
                super().__init__(out=out, h=h)
            def __setitem__(self, name, value):
                raise TypeError('fixed')
        """, "Out(out, h)", "result['out'] + result['h'].mean()"),
    returning("dict with attributes", """
        class Out(dict):
            def __getattr__(self, name):
                try:
                    return self[name]
                except KeyError:
                    raise AttributeError(name) from None
            def __setattr__(self, name, value):
                self[name] = value
        """, "Out(out=out, h=h)", "result.out + result.h.mean()"),
    returning("OrderedDict and defaultdict", "import collections", "collections.OrderedDict(out=out, more=collections.defaultdict(list, h=h))", "result['out'] + result['more']['h'].mean()", "collections.OrderedDict"),
    returning("dataclass with __post_init__", """
        import dataclasses
        @dataclasses.dataclass
        class Out:
            out: torch.Tensor
            h: torch.Tensor
            total: torch.Tensor = dataclasses.field(init=False)
            def __post_init__(self):
                assert self.out.shape[1] == 2
                self.total = self.out + self.h.mean()
        """, "Out(out, h)", "result.total + result.out"),
    returning("frozen dataclass", """
        import dataclasses
        @dataclasses.dataclass(frozen=True)
        class Out:
            out: torch.Tensor
            h: torch.Tensor
            extra: dataclasses.InitVar[int] = 1
            def __post_init__(self, extra):
                object.__setattr__(self, 'total', self.out * extra)
        """, "Out(out, h)", "result.out + result.h.mean()"),
    returning("dataclass with slots", """
        import dataclasses
        @dataclasses.dataclass(frozen=True, slots=True)
        class Out:
            out: torch.Tensor
            h: torch.Tensor
        """, "Out(out, h)", "result.out + result.h.mean()"),
    returning("torch.return_types", "", "out.sort(dim=1)", "result.values + result.indices", "torch.return_types.sort"),
    *(
        changing(f"nn.DataParallel as a child of {of}", "self.part(out) * gain", "gain = 3.0", before="gain = 1.0", init="self.part = nn.DataParallel(nn.Linear(2, 2))", after=after, data_parallel=True)
        for of, after in (("a plain module", "model = net.to(device)"), ("another", ""))
    ),
    changing("pre-hook with keywords on a child", "self.head(torch.tanh(self.inner(input=x)))", "net.inner.register_forward_pre_hook(lambda m, args, kwargs: (args, {k: v * 3 for k, v in kwargs.items()}), with_kwargs=True)", expect=WHOLE),
    changing("hook with keywords on a child", "self.head(torch.tanh(self.inner(input=x)))", "net.inner.register_forward_hook(lambda m, args, kwargs, h: h + sum(v.mean(1, True) for v in kwargs.values()), with_kwargs=True)", expect=WHOLE),
    changing("modules in a plain dict, trained beside", "self.parts['one'](out)", "self_gain = 3.0", init="self.parts = {'one': nn.Linear(2, 2)}", after="optimizer.add_param_group({'params': net.parts['one'].parameters()})", expect=EITHER),
    Program(
        "pruned step by step",
        """
        from torch.nn.utils import prune
        net = Base()
        model, optimizer = wrap(net), sgd(net)
        prune.l1_unstructured(net.inner, 'weight', amount=0.3)
        optimizer = sgd(net)
        for step in range(6):
            if step == 3:
                prune.random_unstructured(net.inner, 'weight', amount=0.2)
            if step == 5:
                prune.remove(net.inner, 'weight')
                optimizer = sgd(net)
            learn(model, optimizer)
        finish(net)
        """,
        EITHER,
    ),
    Program(
        "GAN with a shared encoder",
        "gain = 1.0" + HOLDER + """
        class Made(nn.Module):
            def __init__(self, encoder, size):
                super().__init__()
                self.encoder, self.head = encoder, nn.Linear(8, size)
            def forward(self, x):
                return self.head(self.encoder(x))
        encoder = Encoder()
        one, other = Made(encoder, 6), Made(encoder, 2)
        first, second = wrap(one), wrap(other)
        optimizers = [sgd(one), torch.optim.Adam(other.parameters(), 0.01)]
        for step in range(6):
            if step == 4:
                gain = 3.0  # change
            learn(lambda x: second(first(x)), optimizers[step % 2])
            learn(lambda x: second(first(x).detach()), optimizers[1])
        finish(one, other)
        """.replace("\n        ", "\n"),
    ),
    Program(
        "made anew in a loop",
        """
        for step in range(12):
            torch.manual_seed(step)
            net = Base()
            model, optimizer = wrap(net), sgd(net)
            learn(model, optimizer)
            learn(model, optimizer)
        finish(net)
        """,
    ),
    changing("annotations read in mid-run", "out * gain", "gain = 3.0\ntyping.get_type_hints(Net), Net.__annotations__, Other.__annotations__", before="import typing\ngain = 1.0\nclass Other:\n    gain = 1.0"),
    changing("annotations read in the forward", "out * (gain if gain < 2 else gain + len(Other.__annotations__))", "gain = 3.0", before="gain = 1.0\nclass Other:\n    gain = 1.0"),
]  # fmt: skip
