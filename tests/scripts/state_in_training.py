# Rows of a table, a program each, are as long as they are:
# ruff: noqa: E501
"""Programs whose module changes, computes or is used in unusual ways in the training."""

from stateful_program import EITHER, WHOLE, Program, changing

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
    changing("frozen", "out", "net.inner.requires_grad_(False)\nnet.zero_grad(set_to_none=True)"),
    changing("unfrozen", "out", "net.inner.requires_grad_(True)\noptimizer = sgd(net)", after="net.inner.requires_grad_(False)\noptimizer = sgd(net)"),
    changing("data replaced", "out", "net.inner.weight.data = net.inner.weight.data * 3.0"),
    changing("data changed in place", "out", "net.inner.weight.data.mul_(3.0)"),
    changing("parameter changed by NumPy", "out", "net.inner.weight.detach().numpy()[:] *= 3.0"),
    changing("parameter replaced", "out", "net.inner.weight = nn.Parameter(torch.ones(8, 6))\noptimizer = sgd(net)"),
    changing("state assigned", "out", "net.load_state_dict(Base().state_dict(), assign=True)\noptimizer = sgd(net)"),
    changing("copy trained", "out * self.gain", "net = copy.deepcopy(net)\nnet.gain = 3.0\nmodel, optimizer = wrap(net), sgd(net)", before="import copy", init="self.gain = 1.0"),
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
    changing("tied in mid-run", "out + self.other(torch.tanh(self.inner(x)))", "net.other.weight = net.head.weight\noptimizer = sgd(net)", init="self.other = nn.Linear(8, 2)"),
    changing("layer shared by two names", "self.again(torch.tanh(out))", "", init="self.head = nn.Linear(8, 8)\nself.last = nn.Linear(8, 2)\nself.again = nn.Sequential(self.head, self.last)"),
]  # fmt: skip
COMPUTING = [
    changing("compiled function inside", "act(out)", "gain = 3.0", before="gain = 1.0\n@torch.compile(backend='eager')\ndef act(h):\n    return h * gain", expect=EITHER),
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
            ("an object", "SimpleNamespace(k=1.0)", "gain.k", "gain.k = 3.0"),
            ("a function", "lambda k=[1.0]: k[0]", "gain()", "gain.__defaults__[0][0] = 3.0"),
            ("a module", "nn.Linear(2, 2).requires_grad_(False)", "gain(x[:, :2])", "gain.weight.data.mul_(3)"),
        )
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
    changing("BatchNorm without momentum", "self.norm(out)", "net.norm.momentum = 0.5", init="self.norm = nn.BatchNorm1d(2, momentum=None)", python=False),
    changing("BatchNorm in eval", "self.norm(out)", "net.norm.eval()", init="self.norm = nn.BatchNorm1d(2)", python=False),
    changing("rate of dropout", "self.drop(out)", "net.drop.p = 0.8", init="self.drop = nn.Dropout(0.2)", python=False),
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
CHECKPOINT = "from torch.utils.checkpoint import checkpoint\ngain = 1.0\n"
USES = [
    changing("reentrant checkpoint of a layer, used outside of it too", "checkpoint(self.head, torch.tanh(self.inner(x)), use_reentrant=True) * gain + self.head(self.inner(x))", "gain = 3.0", before=CHECKPOINT),
    changing("reentrant checkpoint in a reentrant one", "checkpoint(lambda h: self.head(checkpoint(lambda h: torch.tanh(self.last(h)) * gain, h.relu(), use_reentrant=True)), self.inner(x), use_reentrant=True)", "gain = 3.0", before=CHECKPOINT, init="self.last = nn.Linear(8, 8)"),
    changing("reentrant checkpoint with dropout", "checkpoint(lambda h: self.head(F.dropout(torch.tanh(self.last(h)), rate)), self.inner(x), use_reentrant=True)", "rate = 0.5", before=CHECKPOINT + "rate = 0.2", init="self.last = nn.Linear(8, 8)", python=False),
    changing("reentrant checkpoint with BatchNorm", "checkpoint(lambda h: self.head(self.norm(h)) * gain, self.inner(x), use_reentrant=True)", "gain = 3.0", before=CHECKPOINT, init="self.norm = nn.BatchNorm1d(8)", python=False),
    changing("reentrant checkpoint around the module", "out * gain", "gain = 3.0", before=CHECKPOINT, learn="learn(lambda x: checkpoint(model, x.clone().requires_grad_(), use_reentrant=True), optimizer)"),
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
            (" module", "nn.Linear(2, 2)", "model = torch.compile(model, backend='eager', fullgraph=True)"),
        )
    ),
    *(
        changing(f"nn.DataParallel as a child of {of}", "self.part(out) * gain", "gain = 3.0", before="gain = 1.0", init="self.part = nn.DataParallel(nn.Linear(2, 2))", after=after, data_parallel=True)
        for of, after in (("a plain module", "model = net.to(device)"), ("another", ""))
    ),
    changing("pre-hook with keywords on a child", "self.head(torch.tanh(self.inner(input=x)))", "net.inner.register_forward_pre_hook(lambda m, args, kwargs: (args, {k: v * 3 for k, v in kwargs.items()}), with_kwargs=True)", expect=WHOLE),
    changing("hook with keywords on a child", "self.head(torch.tanh(self.inner(input=x)))", "net.inner.register_forward_hook(lambda m, args, kwargs, h: h + sum(v.mean(1, True) for v in kwargs.values()), with_kwargs=True)", expect=WHOLE),
    changing("modules in a plain dict, trained beside", "self.parts['one'](out)", "self_gain = 3.0", init="self.parts = {'one': nn.Linear(2, 2)}", after="optimizer.add_param_group({'params': net.parts['one'].parameters()})", expect=EITHER),
    Program(
        "GAN with a shared encoder",
        """
        class Encoder(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear(6, 8)
            def forward(self, x):
                return torch.tanh(self.inner(x)) * gain
        class Made(nn.Module):
            def __init__(self, encoder, size):
                super().__init__()
                self.encoder, self.head = encoder, nn.Linear(8, size)
            def forward(self, x):
                return self.head(self.encoder(x))
        encoder, gain = Encoder(), 1.0
        one, other = Made(encoder, 6), Made(encoder, 2)
        first, second = wrap(one), wrap(other)
        optimizers = [sgd(one), torch.optim.Adam(other.parameters(), 0.01)]
        for step in range(6):
            if step == 4:
                gain = 3.0  # change
            learn(lambda x: second(first(x)), optimizers[step % 2])
            learn(lambda x: second(first(x).detach()), optimizers[1])
        finish(one, other)
        """,
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
]  # fmt: skip
