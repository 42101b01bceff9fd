# Rows of a table, a program each, are as long as they are:
# ruff: noqa: E501
"""Programs whose state is in what the code of a module refers to: globals, functions, attributes."""

from stateful_program import EITHER, Program, changing, refused

CFG = {"cfg.py": "temperature = 1.0\n\ndef set_temperature(value):\n    global temperature\n    temperature = value\n"}
PACKAGE = {
    "parts/__init__.py": "",
    "parts/settings.py": "gain = 1.0\n",
    "parts/layers.py": (
        "from torch import nn\nfrom . import settings\n\nclass Gain(nn.Module):\n    def forward(self, x):\n"
        "        return x * settings.gain\n"
    ),
}
ACT = "def act(h):\n    return h * act.gain\n\nact.gain = 1.0\n"

GLOBALS = [
    changing("global float", "out * gain", "gain = 3.0", before="gain = 1.0"),
    changing("global set by a function of its file", "scaled(out)", "cfg.set_temperature(3.0)", before="import cfg\nfrom utils import scaled", files={**CFG, "utils.py": "import cfg\n\ndef scaled(x):\n    return x * cfg.temperature\n"}),
    changing("global of a package", "self.gain(out)", "settings.gain = 3.0", before="from parts import settings\nfrom parts.layers import Gain", init="self.gain = Gain()", files=PACKAGE),
    changing("dict", "out * config['gain']", "config['gain'] = 3.0", before="config = {'gain': 1.0}"),
    changing("nested list", "out * config[0][0]", "config[0][0] = 3.0", before="config = [[1.0]]"),
    changing("dataclass", "out * config.gain", "config.gain = 3.0", before="import dataclasses\n@dataclasses.dataclass\nclass Config:\n    gain: float = 1.0\n\nconfig = Config()"),
    changing("name made of parts", "out * globals()['ga' + 'in']", "gain = 3.0", before="gain = 1.0"),
    changing("module by sys.modules", "out * getattr(sys.modules['cf' + 'g'], 'tempera' + 'ture')", "cfg.temperature = 3.0", before="import sys\nimport cfg", files=CFG),
    changing("main by its name", "out * sys.modules['__main__'].gain * (2.0 if __name__ == '__main__' else 1.0)", "gain = 3.0", before="import sys\ngain = 1.0"),
    changing("name in builtins", "out * gain", "builtins.gain = 3.0", before="import builtins\nbuiltins.gain = 1.0"),
    changing("attribute of torch", "out * torch.own_gain", "torch.own_gain = 3.0", before="torch.own_gain = 1.0"),
    changing("sentinel", "out * (3.0 if mode is TUNE else 1.0)", "mode = TUNE", before="TRAIN, TUNE = object(), object()\nmode = TRAIN"),
    changing("module by its id", "out * gains.get(id(self), 1.0)", "gains[id(net)] = 3.0", before="gains = {}", expect=EITHER),
    changing("environment variable", "out * float(os.environ.get('GAIN', '1'))", "os.environ['GAIN'] = '3'", before="import os"),
    changing("file that is read", "out * float(Path('gain.txt').read_text())", "Path('gain.txt').write_text('3')", before="from pathlib import Path\nPath('gain.txt').write_text('1')", expect=EITHER),
    changing("current folder", "out * float(open('gain.txt').read())", "os.chdir('other')", before="import os", files={"gain.txt": "1", "other/gain.txt": "3"}, expect=EITHER),
]  # fmt: skip
FUNCTIONS = [
    changing(
        "closure cell",
        "act(out)",
        "set_gain(3.0)",
        before="""
        def made():
            gain = 1.0
            def act(h):
                return h * gain
            def set_gain(value):
                nonlocal gain
                gain = value
            return act, set_gain
        act, set_gain = made()
        """,
    ),
    Program(
        "everything in main",
        """
        def main():
            gain = 1.0
            class Net(Base):
                def forward(self, x):
                    return super().forward(x) * gain
            net = Net()
            model, optimizer = wrap(net), sgd(net)
            for step in range(6):
                if step == 4:
                    gain = 3.0  # change
                learn(model, optimizer)
            finish(net)

        if __name__ == "__main__":
            main()
        """,
    ),
    changing("function attribute", "act(out)", "act.gain = 3.0", before=ACT),
    changing("defaults", "act(out)", "act.__defaults__ = (3.0,)", before="def act(h, k=1.0):\n    return h * k"),
    changing("code of a function", "act(out)", "act.__code__ = other.__code__", before="def act(h):\n    return h\n\ndef other(h):\n    return h * 3.0"),
    changing("partial", "self.act(out)", "net.act.keywords['k'] = 3.0", before="import functools\ndef scaled(h, k):\n    return h * k", init="self.act = functools.partial(scaled, k=1.0)"),
    changing(
        "lru_cache",
        "out * factor()",
        "factor.cache_clear()",
        before="""
        import functools
        table = {"gain": 1.0}
        @functools.lru_cache
        def factor():
            return table["gain"]
        """,
        each="if step == 2:\n    table['gain'] = 3.0  # which the cache hides until it is cleared",
    ),
    changing("singledispatch", "out * factor(1)", "factor.register(int, lambda value: 3.0)", before="import functools\n@functools.singledispatch\ndef factor(value):\n    return 1.0"),
    changing("functional patched", "F.relu(out)", "F.relu = F.gelu"),
    changing("method of an instance", "self.act(out)", "net.act = types.MethodType(lambda self, h: h * 3.0, net)", before="import types", init="self.act = lambda h: h"),
    changing("forward of an instance", "out", "net.forward = lambda x, own=net.forward: own(x) * 3.0", expect=EITHER),
    changing("forward of a class", "out", "Net.forward = lambda self, x: Base.forward(self, x) * 3.0"),
    changing("forward of a base", "out", "Base.forward = lambda self, x: self.head(self.inner(x))"),
    changing("forward of torch's class", "out", "nn.Linear.forward = lambda self, x: 2 * F.linear(x, self.weight)"),
    changing(
        "autograd function",
        "Scaled.apply(out)",
        "Scaled.gain = 3.0",
        before="""
        class Scaled(torch.autograd.Function):
            gain = 1.0
            @staticmethod
            def forward(ctx, h):
                return h * Scaled.gain
            @staticmethod
            def backward(ctx, gradient):
                return gradient * Scaled.gain * 0.5
        """,
    ),
    changing(
        "custom operator",
        "torch.ops.own.scaled(out)",
        "gains[0] = 3.0",
        before="""
        gains = [1.0]
        @torch.library.custom_op("own::scaled", mutates_args=())
        def scaled(h: torch.Tensor) -> torch.Tensor:
            return h * gains[0]
        scaled.register_autograd(lambda ctx, gradient: gradient * gains[0])
        """,
        expect=refused("AttributeError on a worker"),
    ),
    changing(
        "bound method of a trainer with a file",
        "self.act(out)",
        "trainer.gain = 3.0",
        before="""
        class Trainer:
            def __init__(self):
                self.gain, self.log = 1.0, open("log.txt", "w")
            def act(self, h):
                return h * self.gain
        trainer = Trainer()
        """,
        init="self.act = trainer.act",
        expect=EITHER,
    ),
]  # fmt: skip
ATTRIBUTES = [
    changing("class attribute", "out * self.gain", "Net.gain = 3.0", after="Net.gain = 1.0"),
    changing("class of an instance", "out", "net.__class__ = Other", before="class Other(Base):\n    def forward(self, x):\n        return super().forward(x) * 3.0"),
    changing("float of the module", "out * self.gain", "net.gain = 3.0", init="self.gain = 1.0"),
    changing("float of a child", "out * self.inner.gain", "net.inner.gain = 3.0", init="self.inner.gain = 1.0"),
    changing("slots", "out * self.config.gain", "net.config.gain = 3.0", before="class Config:\n    __slots__ = ('gain',)", init="self.config = Config()\nself.config.gain = 1.0"),
    changing(
        "enum and nested object",
        "out * (3.0 if self.config.mode is Mode.TUNE else 1.0)",
        "net.config.mode = Mode.TUNE",
        before="import enum\nfrom types import SimpleNamespace\nclass Mode(enum.Enum):\n    TRAIN = 1\n    TUNE = 2",
        init="self.config = SimpleNamespace(mode=Mode.TRAIN)",
    ),
    changing("modules in a plain list", "out + self.parts[0](x)", "net.parts[0].weight.data.mul_(3.0)", init="self.parts = [nn.Linear(6, 2).requires_grad_(False)]", expect=EITHER),
    changing("NumPy table of the script", "out * torch.from_numpy(table).to(out)", "table[1] = 3.0", before="import numpy as np\ntable = np.ones(2)"),
    changing("plain tensor changed in place", "out * self.table", "net.table.mul_(3.0)", init="self.table = torch.ones(2)"),
    changing("plain tensor replaced", "out * self.table", "net.table = torch.full((2,), 3.0)", init="self.table = torch.ones(2)"),
    changing("global tensor", "out * table", "table.mul_(3.0)", before="table = torch.ones(2)"),
    changing(
        "tensor changed by its data",
        "out * self.table",
        "net.table.data.numpy()[:] = 3.0",  # no version counts this
        init="self.table = torch.ones(2)",
    ),
    changing("buffer replaced", "out * self.gain", "net.gain = torch.full((1,), 3.0)", init="self.register_buffer('gain', torch.ones(1))"),
    changing("alias of a parameter", "out + F.linear(x, self.alias) * self.gain", "net.gain = 3.0", init="self.gain, self.alias = 1.0, self.inner.weight.detach()[:2]", expect=EITHER),
    changing("NumPy view of a parameter", "out + float(self.view[0]) * self.gain", "net.gain = 3.0", init="self.gain, self.view = 1.0, self.inner.bias.detach().numpy()", expect=EITHER),
    changing(
        "lock",
        "self.locked(out)",
        "net.gain = 3.0",
        before="""
        import threading
        class Base(Base):
            def locked(self, h):
                with self.lock:
                    return h * self.gain
        """,
        init="self.lock, self.gain = threading.Lock(), 1.0",
        expect=refused("uses a _thread.lock, which cannot be sent"),
    ),
    changing("learning rate of the optimizer", "out * optimizer.param_groups[0]['lr'] * 10", "optimizer.param_groups[0]['lr'] = 0.3", expect=EITHER),
]  # fmt: skip
