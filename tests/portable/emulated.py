"""Portable digests on this CPU and on emulated ones, by qemu-user: one digest a program, and one a group of operations.

    python tests/portable/emulated.py                 README's example and a step of each benchmark, as the gate has it
    python tests/portable/emulated.py --all           the other programs of `PROGRAMS`, too, and one CPU more
    python tests/portable/emulated.py --twins         what moves if one cap, or one kernel of samestep's, is left out

Exit code 0: all equal, or there is no qemu, which a line says; 1: a digest differs, or for a twin none does. Debian's
package `qemu-user` is enough. It emulates each instruction by its definition, where a CPU may estimate.
"""

import argparse
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GATE_CPUS = ("Haswell", "EPYC")
CPUS = (*GATE_CPUS, "Skylake-Client")
EMULATOR = "qemu-x86_64"


def digest(*values):
    """A short hash of the bits of tensors and arrays."""
    import numpy as np

    parts = [np.ascontiguousarray(getattr(value, "detach", lambda value=value: value)()).tobytes() for value in values]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def readme():
    """The state after README's loop."""
    import samestep

    source = re.search(r'```python title="train.py"\n(.*?)```', (ROOT / "README.md").read_text(), re.S)[1]
    names = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()):
        exec(compile(source, "train.py", "exec"), names)
    return samestep.state_digest(names["model"], names["optimizer"])


def stepped(make_model, batch, loss_of, make_optimizer, steps=2):
    """The state after steps on one microbatch."""
    import samestep

    run = samestep.Run(len(batch[0]), 1)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    step = run.train_step(model, optimizer, loss_of)
    for _ in range(steps):
        step(batch)
    return samestep.state_digest(model, optimizer)


def benchmark(name):
    """One microbatch of 32 of a workload of the benchmarks, since an emulated CPU is slow."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from workloads import WORKLOADS

    work = WORKLOADS[name]
    batch = tuple(part[: max(1, work.global_batch_size // 32)] for part in work.data(1))
    return stepped(work.make_model, batch, work.loss_of, work.make_optimizer, 1)


def lenet():
    """Some steps of the recipe."""
    import torch

    import samestep
    from samestep.data.named import image_data
    from samestep.recipes import lenet

    run = samestep.Run(128)
    train, _, _ = image_data(transform=lenet.standardize)
    model = lenet.make_model()
    with samestep.Trainer(run, model, torch.optim.SGD(model.parameters(), 0.05, 0.9), lenet.loss_fn) as trainer:
        trainer.fit(train, max_steps=3)
        return trainer.digest


def small(kind):
    """Two steps of a small transformer, or of an LSTM, with Adam."""
    import torch
    from torch import nn

    def make():
        if kind == "lstm":
            return nn.LSTM(16, 24, 2, batch_first=True, dropout=0.1)
        return nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)

    def loss_of(model, batch):
        found = model(batch[0])
        return (found[0] if kind == "lstm" else found).square().mean()

    x = torch.arange(4 * 10 * (16 if kind == "lstm" else 32)).remainder(97).view(4, 10, -1) / 64 - 0.7
    return stepped(make, (x,), loss_of, torch.optim.Adam)


def operations():
    """Operations of each library, by the library's name."""
    import numpy as np
    import torch
    from torch.nn import functional

    x = torch.from_numpy(np.arange(1, 200 * 200 + 1).astype(np.float32).reshape(200, 200) % 8191 / 4096)
    array = x.double().numpy() + 0.1
    images, small = x[:, :192].reshape(2, 3, 80, 80), x[:40, :40].contiguous()
    return {
        "numpy": digest(np.exp(array), np.log(array), np.power(array, 1.1)),
        "openblas": digest(array @ array.T, array.astype(np.float32) @ array.T.astype(np.float32)),
        "mkl": digest(
            small @ small, small.double() @ small.double(), torch.linalg.solve(small + 9 * torch.eye(40), small)
        ),
        "onednn": digest(functional.conv2d(images, x[:4, :27].reshape(4, 3, 3, 3))),
        "products": digest(x @ x, functional.linear(x, x, x[0])),
        "aten": digest(
            x.exp(), x.log1p(), x.sum(0), x.softmax(1), functional.gelu(x), functional.layer_norm(x, (200,))
        ),
        "attention": digest(functional.scaled_dot_product_attention(*x[:192, :160].reshape(3, 2, 4, 32, 40))),
        "sqrt": digest(x.sqrt(), x**0.5, x.double().sqrt(), torch._foreach_sqrt([x])[0], torch.cdist(x, x)),
        "arcus": digest(*(function(x - 1) for function in (torch.asin, torch.acos, torch.atan))),
    }


GATE = {"readme": readme, **{name: (lambda name=name: benchmark(name)) for name in ("W1", "W2", "W3", "W4")}}
PROGRAMS = {**GATE, "lenet": lenet, "lstm": lambda: small("lstm"), "transformer": lambda: small("transformer")}
"""The programs; `operations` comes with each of them."""
KERNELS_OF = {"sqrt": "sqrt", "arcus": "asin"}  # the kernel without which a group of operations differs


def found(names, cpu=None, without=(), unset=()):
    """Digests by name, on this CPU or an emulated one, without some kernels of samestep's and some caps."""
    from samestep.devices.portable import portable_variables

    env = {**os.environ, **portable_variables("cpu", True), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    env = {name: value for name, value in env.items() if name not in unset}
    command = [sys.executable, __file__, "--print", ",".join(names), "--without", ",".join(without)]
    command += ["--uncapped", ",".join(unset)]
    emulator = [EMULATOR, "-cpu", cpu] if cpu else []
    done = subprocess.run([*emulator, *command], env=env, capture_output=True, text=True, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{cpu or 'this CPU'}: exit code {done.returncode}: {done.stderr[-2000:]}")
    return dict(line.split(" ") for line in done.stdout.splitlines())


def print_digests(names, without, uncapped):
    """Prints the digests of this process."""
    import torch

    from samestep.devices import portable
    from samestep.engine import portable_kernels

    for name in uncapped:
        portable_kernels.CAPS.pop(name)
    for name in without:
        portable_kernels.KERNELS.pop(name)
    if "ATEN_CPU_CAPABILITY" not in uncapped and "MKL_CBWR" not in uncapped:
        portable_kernels.make_portable("cpu")
    else:  # which would be refused
        os.environ.pop(portable.PORTABLE_VARIABLE)
        portable_kernels._libraries.append(portable_kernels._registered(portable_kernels.KERNELS))
    torch.set_num_threads(1)
    with redirect_stdout(sys.stderr):
        values = operations() | {name: PROGRAMS[name]() for name in names}
    print(*(f"{name} {value}" for name, value in values.items()), sep="\n")


def differing(one, other):
    return sorted(name for name in one if one[name] != other[name])


def check(names, cpus):
    """Compares this CPU with emulated ones; the exit code."""
    here, code = found(names), 0
    with ThreadPoolExecutor() as pool:  # each waits for a process
        for cpu, there in zip(cpus, pool.map(lambda cpu: found(names, cpu), cpus), strict=True):
            names_of_others = differing(here, there)
            code |= bool(names_of_others)
            print(f"{cpu:16} {', '.join(names_of_others) or 'equal'}{' differ' * bool(names_of_others)}", flush=True)
    print(*(f"{name:16} {value}" for name, value in here.items()), sep="\n")
    return code


def twins(cpu):
    """Leaves out one cap, then one kernel, and names what moves; the exit code."""
    from samestep.devices.portable import CAPS

    here, code = found(()), 0
    for name in CAPS:
        moved = differing(here, found((), unset=(name,)))
        code |= not moved
        print(f"{name:26} off, on this CPU: {', '.join(moved) or 'nothing'} moves", flush=True)
    for group, kernel in KERNELS_OF.items() if cpu else ():
        moved = differing(found((), without=(kernel,)), found((), cpu, without=(kernel,)))
        code |= group not in moved
        print(f"{kernel:26} by torch, {cpu}: {', '.join(moved) or 'nothing'} differs", flush=True)
    return code


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all programs")
    parser.add_argument("--twins", action="store_true", help="leave one thing out at a time")
    parser.add_argument("--cpus", help=f"CPUs of qemu: {','.join(GATE_CPUS)}, and with --all {CPUS[-1]} by default")
    for name in ("--print", "--without", "--uncapped"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.print is not None:
        given = (asked.print, asked.without, asked.uncapped)
        print_digests(*([word for word in (words or "").split(",") if word] for words in given))
        return 0
    chosen = (CPUS if asked.all else GATE_CPUS) if asked.cpus is None else [cpu for cpu in asked.cpus.split(",") if cpu]
    has_emulator = shutil.which(EMULATOR) is not None
    if chosen and not has_emulator:
        print(f"{EMULATOR} is not installed (Debian's package qemu-user): no CPU is emulated")
    cpus = chosen if has_emulator else ()
    if asked.twins:
        return twins(cpus[0] if cpus else None)
    return check(PROGRAMS if asked.all else GATE, cpus) if cpus else 0


if __name__ == "__main__":
    sys.exit(main())
