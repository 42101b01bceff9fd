# Rows of a table, a program each, are as long as they are:
# ruff: noqa: E501
"""Programs whose state is around a call: modes, draws, what a forward writes, hooks."""

from textwrap import dedent

from stateful_program import EITHER, Program, changing, refused

MODES = [
    changing("train and eval", "out if self.training else out * 3.0", "net.eval()"),
    changing("child in eval", "out if self.inner.training else out * 3.0", "net.inner.eval()"),
    changing("default dtype", "out * (3.0 if torch.ones(1).dtype == torch.float64 else 1.0)", "torch.set_default_dtype(torch.float64)"),
    changing("precision by its new name", "out * (3.0 if torch.backends.cuda.matmul.fp32_precision == 'tf32' else 1.0)", "torch.backends.cuda.matmul.fp32_precision = 'tf32'", expect=EITHER),
    changing("flag of a backend", "out * (3.0 if torch.backends.mkldnn.enabled else 1.0)", "torch.backends.mkldnn.enabled = True", before="torch.backends.mkldnn.enabled = False", expect=EITHER),
    changing("deterministic algorithms", "out * (3.0 if torch.is_deterministic_algorithms_warn_only_enabled() else 1.0)", "torch.use_deterministic_algorithms(True, warn_only=True)", python=False, expect=EITHER),
    Program(
        "autocast",
        """
        net = Base()
        model, optimizer = wrap(net), sgd(net)
        is_used = False
        for step in range(6):
            if step == 4:
                is_used = True  # change
            with torch.autocast(device, torch.bfloat16, enabled=is_used):
                out = model(x)
            loss = F.mse_loss(out.float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        finish(net, dtype=str(out.dtype))
        """,
        tolerance=5e-2,
    ),
    Program(
        "grad mode",
        """
        class Net(Base):
            def forward(self, x):
                return super().forward(x) * (1.0 if torch.is_grad_enabled() else 3.0 - torch.is_inference_mode_enabled())

        net, seen = Net(), []
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            learn(model, optimizer)
            with torch.no_grad():
                seen.append(model(x).mean())
            with torch.inference_mode():
                seen.append(model(x).mean())
        finish(net, seen=seen)
        """,
    ),
    *(
        changing(
            name,
            "out",
            "mode = Double()",
            before=f"from contextlib import nullcontext\n{dedent(before)}mode = nullcontext()",
            learn="with mode: learn(model, optimizer)",
            expect=EITHER,
        )
        for name, before in {
            "function mode": """
                from torch.overrides import TorchFunctionMode
                class Double(TorchFunctionMode):
                    def __torch_function__(self, function, types, args=(), kwargs=None):
                        return torch.sin(args[0]) if function is torch.tanh else function(*args, **(kwargs or {}))
                """,
            "dispatch mode": """
                from torch.utils._python_dispatch import TorchDispatchMode
                class Double(TorchDispatchMode):
                    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                        out = function(*args, **(kwargs or {}))
                        return out * 2 if function is torch.ops.aten.tanh.default else out
                """,
            "hooks on saved tensors": """
                def Double():
                    return torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t)
                """,
        }.items()
    ),
    changing("process id", "out * (1 + os.getpid() % 97)", "", before="import os", expect=refused("Net"), python=False),
    changing("command line and file of the script", "out * (len(sys.argv) + len(Path(__file__).name) + len(Path(sys.argv[0]).name))", "", before="import sys\nfrom pathlib import Path"),
]  # fmt: skip
DRAWS = [
    Program(
        f"draws of {name}",
        f"""
        import random, secrets
        import numpy as np
        drawn = {made}
        class Net(Base):
            def forward(self, x):
                return super().forward(x) * (1 + {draw})

        net = Net()
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            learn(model, optimizer)
        finish(net, after={draw})
        """,
        expect,
        python=False,
    )
    for name, made, draw, expect in (
        ("a generator of the script", "torch.Generator().manual_seed(1)", "torch.rand(1, generator=drawn)", EITHER),
        ("a NumPy generator of the script", "np.random.default_rng(1)", "drawn.random()", EITHER),
        ("an iterator", "iter(np.linspace(0, 1, 999).tolist())", "next(drawn)", EITHER),
        ("secrets", "None", "secrets.randbelow(99) / 99", refused("Net")),
    )
]


WRITES = [
    Program(
        f"forward that {name}",
        f"""
        {before}
        class Net(Base):
            def __init__(self):
                super().__init__()
                {init}
            def forward(self, x):
                h = torch.tanh(self.inner(x))
                {line}
                return self.head(h){times}

        net = Net()
        model, optimizer = wrap(net), sgd(net)
        for step in range(6):
            learn(model, optimizer{loss})
        finish(net, seen={seen})
        """,
        expect,
        python=python,
    )
    for name, before, init, line, times, loss, seen, expect, python in (
        ("counts in a global", "calls = 0", "pass", "global calls; calls += 1", " * min(1.0, calls / 4)", "", "calls", EITHER, False),
        ("counts in a class", "", "pass", "Net.calls = getattr(Net, 'calls', 0) + 1", "", "", "Net.calls", EITHER, False),
        ("counts in a function", "def count(): count.calls += 1\n        count.calls = 0", "pass", "count()", "", "", "count.calls", EITHER, False),
        ("keeps values in a global dict", "kept = {}", "pass", "kept['h'] = h.detach()", "", "", "kept", EITHER, True),
        ("appends to a global list", "kept = []", "pass", "kept.append(h.detach().mean())", "", "", "kept", EITHER, True),
        ("writes a NumPy table", "import numpy as np\n        kept = np.zeros(8)", "pass", "kept[:] = h.detach().cpu().mean(0).numpy()", "", "", "kept.tolist()", EITHER, True),
        ("writes a global tensor", "kept = torch.zeros(8)", "pass", "kept.copy_(h.detach().mean(0))", "", "", "kept", EITHER, True),
        ("memoizes", "cache = {}", "pass", "gain = cache.setdefault('k', 1.0 + x.shape[0])", " * gain", "", "cache", EITHER, False),
        ("retains a gradient", "", "self.h = None", "self.h = h; h.requires_grad and h.retain_grad()", "", "", "None if net.h is None else net.h.grad", EITHER, True),
        ("hooks a tensor", "kept = []", "pass", "h.requires_grad and h.register_hook(lambda g: kept.append(g.mean()))", "", "", "kept", EITHER, True),
        ("writes a file", "", "pass", "open('log.txt', 'a').write(f'{x.shape[0]} ')", "", "", "open('log.txt').read()", EITHER, False),
        ("logs to a list", "import logging\n        kept = []\n        log = logging.getLogger('net')\n        log.addFilter(lambda record: kept.append(record.getMessage()))", "pass", "log.warning('rows %d', x.shape[0])", "", "", "kept", EITHER, False),
        ("swaps a layer", "", "pass", "self.head = self.head if self.training else nn.Linear(8, 2)", "", "", "None", EITHER, True),
        ("writes a parameter", "", "pass", "self.head.weight.data.mul_(0.9)", "", "", "None", EITHER, False),
    )
]  # fmt: skip
HOOKS = [
    changing("hook on a child, added and removed", "out", "handle = net.inner.register_forward_hook(lambda module, args, h: h * 3.0)", each="if step == 5 and handle:\n    handle.remove()", after="handle = None", expect=EITHER),
    changing("hook whose state changes", "out", "gain[0] = 3.0", before="gain = [1.0]", after="net.inner.register_forward_hook(lambda module, args, h: h * gain[0])", expect=EITHER),
    changing(
        "backward hook on a child",
        "out",
        "net.inner.register_full_backward_hook(lambda module, given, taken: (given[0] if given[0] is None else 3 * given[0],))",
        before="class Base(Base):\n    def forward(self, x):\n        return self.head(self.inner(F.linear(x, self.first)))\n",
        init="self.first = nn.Parameter(torch.eye(6))",
        expect=EITHER,
    ),
    changing("hook on a parameter", "out", "net.inner.weight.register_hook(lambda g: g * 3.0)"),
    changing("hook on all modules", "out", "nn.modules.module.register_module_forward_hook(lambda m, args, h: h * 3.0 if isinstance(m, nn.Linear) else h)", expect=EITHER),
    changing("hook on the module itself", "out", "net.register_forward_hook(lambda module, args, out: out * 3.0)", expect=EITHER),
    Program(
        "hook after accumulation",
        """
        net, norms = Base(), []
        model, optimizer = wrap(net), sgd(net)
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
        for step in range(6):
            learn(model, optimizer)
        finish(net, norms=sorted(n.item() for n in norms))
        """,
    ),
]  # fmt: skip
