"""Programs: running a script, a module or a function in this process, as the `python` command does."""

import ast
import importlib
import importlib.machinery
import importlib.util
import io
import mmap
import os
import pickle
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from samestep.core.microbatches import DEFAULT_NUM_MICROBATCHES
from samestep.errors import UsageError
from samestep.launcher.job import Job


def stated_microbatches(nodes: Iterable[ast.AST]) -> int | None:
    """The fewest microbatches of the calls of `samestep.Run` in a source; None without one, or if one computes them."""
    found = []
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "Run":
            given: dict[str, ast.expr] = dict(zip(("global_batch_size", "num_microbatches"), node.args, strict=False))
            given |= {keyword.arg or "**": keyword.value for keyword in node.keywords}
            stated = given.get("num_microbatches", ast.Constant(None))
            if "**" in given or any(isinstance(value, ast.Starred) for value in node.args):
                return None
            if not isinstance(stated, ast.Constant) or not isinstance(stated.value, int | None):
                return None
            batch = getattr(given.get("global_batch_size"), "value", None)
            found.append(stated.value or min(batch if isinstance(batch, int) else 2**31, DEFAULT_NUM_MICROBATCHES))
    return min(found, default=None)


def run_program(job: Job, fds: Mapping[str, int]) -> Any:
    """Runs a job and returns a function's result; the call is in the descriptor "payload", if there is one."""
    for name in job.preload:
        importlib.import_module(name)
    if job.kind == "script":
        run_script(job.target, job.argv)
        return None
    if job.kind == "module":
        run_module(job.target, job.argv)
        return None
    if "payload" not in fds:
        return _find_function(job.target)(**job.kwargs)
    search_path, call = _read_payload(fds["payload"])
    sys.path[:] = search_path
    return pickle.loads(call)()


def write_payload(file: io.BufferedRandom, call: bytes) -> None:
    """Writes a payload for workers: this process's module search path and a pickled call."""
    pickle.dump((sys.path, call), file)
    file.flush()


def _read_payload(fd: int) -> tuple[list[str], bytes]:
    """Reads a payload, without moving the file offset, which all workers share."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as content:
        search_path, call = pickle.loads(content)
    return search_path, call


def run_script(path: str, argv: tuple[str, ...]) -> None:
    """Runs a file as `python PATH ARGV` does."""
    loader = importlib.machinery.SourceFileLoader("__main__", os.path.abspath(path))
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        raise UsageError(f"cannot read the script {path}: {error.strerror}; give the path of a Python file") from error
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.argv = [path, *argv]
    code = compile(source, loader.path, "exec", dont_inherit=True)
    _execute(code, {"__file__": loader.path, "__loader__": loader, "__package__": None, "__spec__": None})


def run_module(name: str, argv: tuple[str, ...]) -> None:
    """Runs a module as `python -m NAME ARGV` does."""
    sys.path.insert(0, os.getcwd())
    sys.argv = ["-m", *argv]
    spec = _find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_spec(f"{name}.__main__")
        if spec is None:
            raise UsageError(f"the package {name} has no __main__ module; name one of its modules")
    if spec is None:
        raise UsageError(f"there is no module {name} in {os.getcwd()} or on the module search path")
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, importlib.abc.InspectLoader) else None
    if code is None:
        raise UsageError(f"the module {name} has no Python code to run; give a module that is a .py file")
    sys.argv[0] = spec.origin or name
    names = {"__file__": spec.origin, "__loader__": spec.loader, "__package__": spec.parent, "__spec__": spec}
    _execute(code, names)


def _find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """The spec of a module; None if it or its package is not found."""
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            return None
        raise


def _execute(code: types.CodeType, names: Mapping[str, Any]) -> None:
    """Executes code as the module `__main__`, so that pickle finds its classes by that name."""
    main = types.ModuleType("__main__")
    main.__dict__.update(names, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _find_function(target: str) -> Any:
    """The function of the name "package.module:function"."""
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise UsageError(f"there is no module {module_name}; it must be importable in the workers") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise UsageError(f"the module {module_name} has no function {path}")
        found = getattr(found, name)
    return found
