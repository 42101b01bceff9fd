"""Analysis of a script without running it: does it start its own process group, or only wrap a model in DataParallel?

And will it import modules that are better imported before the workers are forked?

The script and the modules beside it that it imports are parsed; installed libraries are not: the tables here
name the ones that start ranks. Nothing is imported, torch least of all.

A name counts by what it means, with the file's imports resolved (`ParsedFile.aliases`). That a script deals with ranks
is the stronger reading: run as a single-process one it would be refused at its process group. The sentence that is
printed (`Reading.reason`) names the option for the other way, where there is one.
"""

import ast
import importlib.util
import re
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from samestep.errors import UsageError
from samestep.launcher.job import TRAINING, stated_microbatches
from samestep.patch import DYNAMO

MAX_FILES = 200
RANK_VARIABLES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE"})
STARTERS = frozenset({"init_process_group", "init_device_mesh"})
PROCESS_STARTERS = frozenset({"torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"})
FRAMEWORKS = frozenset(
    {
        *("accelerate", "colossalai", "composer", "deepspeed", "horovod", "lightning", "lightning_fabric"),
        *("pytorch_lightning", "ray", "trl"),
    }
)
TRAINERS = {
    "samestep": ("Run", "Trainer", "launch"),
    "transformers": ("Trainer", "Seq2SeqTrainer"),
    "sentence_transformers": ("SentenceTransformerTrainer",),
    "ignite.distributed": ("Parallel", "initialize", "spawn"),
    "timm.utils": ("init_distributed_device",),
}
"""By module, what starts ranks of all that the module has."""
NOT_FOLLOWED = frozenset({"samestep", "torch"})
OWN_HOMES = ("samestep.run", "samestep.engine", "samestep.launcher")
OWN_SIGNS = ("uses samestep.", "imports samestep.")
WRAPPERS = frozenset({"DataParallel", "data_parallel"})
GPU = re.compile(r"(\S*[.:])?(cuda|nccl|gpu|fp16|16-mixed|current_accelerator|set_device_index)([.:]\S*)?")
"""Names and texts of a script that is written for GPUs: `model.cuda`, "cpu:gloo,cuda:nccl", `accelerator="gpu"`."""
NEEDS_DYNAMO = re.compile("optim|compile|dynamo|DistributedDataParallel|fully_shard", re.IGNORECASE)
"""Names of what imports torch._dynamo when it is first used; the names of `re` and Python's own `compile` apart."""
WITHOUT_DYNAMO = frozenset({"__main__", "numpy", "samestep", "torch"})
"""Installed packages whose import alone is no sign of an optimizer."""


@dataclass(frozen=True)
class Reading:
    """How `samestep run` runs a script."""

    # "multi-process" scripts deal with ranks themselves and find torchrun's environment; "single-process" ones are
    # written for one process, and their wrapped forwards are shared out
    kind: Literal["single-process", "multi-process"]
    reason: str  # the sign by which it was recognised
    is_both: bool = False  # whether a multi-process script may also be one of a single process; the reason says why
    own: str = ""  # the sign of a script that uses samestep's own Run, Trainer or launch
    starts: tuple[str, ...] = ()  # where a multi-process script starts its ranks itself
    reads_ranks: bool = False  # whether it also reads torchrun's variables
    num_microbatches: int | None = None  # of its own runs, if that is written out
    names_gpus: bool = False  # whether it names GPUs: ranks on CPU workers then find simulated ones
    preload: tuple[str, ...] = ()  # modules that it will most likely import; a wrong guess costs time and nothing else

    def check_logical_devices(self, count: int | None) -> None:
        """Raises for `--logical-devices` of a script whose run has microbatches of its own."""
        if count is not None and self.own:
            raise UsageError(
                f"got --logical-devices {count} for a script that uses samestep itself ({self.own}): its microbatches "
                f"already give the same bits on any number of devices. Leave the option out, and set "
                f"samestep.Run(num_microbatches={count}) in the script if you mean their number"
            )

    def refuse_own_ranks(self, single_process: bool | None) -> None:
        """Raises for a script that starts its ranks itself, and does not read torchrun's variables, where it cannot."""
        if self.starts and single_process is None and not (self.reads_ranks or self.own):
            raise UsageError(
                f"{self.starts[0]}: the script starts its ranks itself, which needs samestep run --logical-devices V "
                "on one machine, V being their number; then they have the same bits on any number of devices. verify "
                "does not follow such ranks: compare what runs save. --multi-process runs the script once a device"
            )


@dataclass(frozen=True)
class Folder:
    """Where a script's own modules are."""

    root: Path  # the folder that imports are looked up in
    top: str = ""  # the only package in it that is the script's own, in a folder of installed libraries; empty for all

    def files_of(self, name: str) -> list[Path]:
        """The files that importing a module runs; none for modules from elsewhere."""
        parts = name.split(".")
        if parts[0] in NOT_FOLLOWED or self.top not in ("", parts[0]):
            return []
        files = [self.root.joinpath(*parts[:depth], "__init__.py") for depth in range(1, len(parts) + 1)]
        files.append(self.root.joinpath(*parts[:-1], f"{parts[-1]}.py"))
        return [path for path in files if path.is_file()]


@dataclass(frozen=True)
class ParsedFile:
    """A parsed file."""

    path: Path  # where it is
    package: str  # the dotted name of the package that it is in; empty for a file of the top folder
    nodes: tuple[ast.AST, ...]  # nodes that may run, outer ones first

    @property
    def name(self) -> str:
        """The dotted name of the module."""
        own = [] if self.path.stem == "__init__" else [self.path.stem]
        return ".".join([*filter(None, [self.package]), *own])

    @cached_property
    def aliases(self) -> dict[str, str]:
        """The full names of what is imported or defined: `from torch import nn as layers`."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.update({alias.asname: alias.name for alias in node.names if alias.asname})
                found.update({name: name for alias in node.names if (name := alias.name.partition(".")[0])})
            elif isinstance(node, ast.ImportFrom):
                base = _base_of(node, self)
                found.update({alias.asname or alias.name: f"{base}.{alias.name}".lstrip(".") for alias in node.names})
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, f"{self.name}.{node.name}")
        return found


@dataclass
class Signs:
    """The first sign of each kind in the files read so far, in words."""

    ranks: str = ""
    wrapper: str = ""
    own: str = ""
    names_gpus: bool = False
    calls: list[ast.Call] = field(default_factory=list)
    starters: list[tuple[str, str]] = field(default_factory=list)  # places of calls, and the functions of processes
    called: dict[str, set[str]] = field(default_factory=dict)  # by the name of a function or class, what it calls
    reads_ranks: bool = False
    preload: set[str] = field(default_factory=set)

    @property
    def starts(self) -> tuple[str, ...]:
        """The places that start a process whose function makes a process group, itself or by what it calls."""
        found = []
        for place, name in self.starters:
            reached = [name.rpartition(".")[2]] if "." in name else [*self.called]  # only full names are certain
            for each in reached:  # which grows meanwhile
                reached += self.called.get(each, set()).difference(reached)
            found += [] if STARTERS.isdisjoint(reached) else [place]
        return tuple(found)


def reads_as(target: str | Path, *, is_module: bool = False) -> Reading:
    """Reads a script and the modules beside it that it imports, at most 200 files."""
    main, folder = _module(str(target)) if is_module else (Path(target), Folder(Path(target).resolve().parent))
    first = None if main is None else _parse(main, folder, is_main=True)
    if first is None:
        return Reading("single-process", f"{target} cannot be parsed; Python will say why")
    signs, num_files = Signs(), 0
    for source in _sources(first, folder):
        num_files += 1
        _scan(source, folder, signs)
    preload = tuple(name for name in TRAINING if name in signs.preload)
    found: dict[str, Any] = {"preload": preload, "names_gpus": signs.names_gpus}
    if signs.ranks:
        reason = f"{signs.ranks}, so it is written for several processes"
        if signs.wrapper:
            reason += f"; it also has {signs.wrapper}, which samestep run --single-process shares out instead"
        elif is_one := re.search(r", (imports|uses) (?!samestep)[\w.]+$", signs.ranks):
            reason += "; python has one rank: --single-process shares that one out, --devices cpu:1 runs it whole"
        facts = (bool(signs.wrapper or is_one), signs.own, signs.starts, signs.reads_ranks)
        return Reading("multi-process", reason, *facts, stated_microbatches(signs.calls), **found)
    if signs.wrapper:
        return Reading("single-process", f"it has {signs.wrapper}, and starts no process group", **found)
    files = "its file" if num_files == 1 else f"any of its {num_files} files"
    return Reading("single-process", f"nothing in {files} deals with ranks", **found)


def _sources(first: ParsedFile, folder: Folder) -> Iterator[ParsedFile]:
    """The script and its imports from its own folder, nearest first."""
    waiting, known = deque([first]), {first.path.resolve()}
    while waiting:
        source = waiting.popleft()
        yield source
        for name in _imported_modules(source):
            for path in folder.files_of(name):
                if len(known) < MAX_FILES and path.resolve() not in known:
                    known.add(path.resolve())
                    found = _parse(path, folder, is_main=False)
                    waiting.extend([] if found is None else [found])


def _parse(path: Path, folder: Folder, is_main: bool) -> ParsedFile | None:
    """A parsed file; None if that cannot be done."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python will give them when it runs the file
            tree = ast.parse(path.read_bytes())
    # The last two of sources that are nested too deeply, the ValueError of NUL characters.
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    home, root = path.resolve().parent, folder.root.resolve()
    inside = home.relative_to(root).parts if home.is_relative_to(root) else ()
    return ParsedFile(path, ".".join(inside), tuple(_executed(tree, is_main)))


def _module(name: str) -> tuple[Path | None, Folder]:
    """The file that `python -m NAME` runs, None if there is none, and where its modules are; imports nothing."""
    parts = name.split(".")
    for entry in (".", *sys.path):
        root = Path(entry or ".")
        stem = root.joinpath(*parts)
        for path in (stem / "__main__.py", stem.with_name(f"{stem.name}.py")):
            if path.is_file():
                return path, Folder(root, "" if root.resolve() == Path.cwd() else parts[0])
    return None, Folder(Path())


def _imported_modules(source: ParsedFile) -> Iterator[str]:
    """The dotted names that a file imports; of `from a import b` both a and a.b, since b may be a module."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base_of(node, source)
            if base:
                yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")


def _base_of(node: ast.ImportFrom, source: ParsedFile) -> str:
    """The module that a `from … import` names, with a relative one resolved."""
    if not node.level:
        return node.module or ""
    package = source.package.split(".") if source.package else []
    above = package[: len(package) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def _executed(tree: ast.Module, is_main: bool) -> Iterator[ast.AST]:
    """The nodes of a file that may run: not the nodes for type checkers, nor, in an import, a main script's own."""
    waiting = deque[ast.AST]([tree])
    skipped = {"TYPE_CHECKING"} if is_main else {"TYPE_CHECKING", "__name__"}
    while waiting:
        node = waiting.popleft()
        if isinstance(node, ast.If) and not skipped.isdisjoint(map(_last_name, ast.walk(node.test))):
            waiting.extend(node.orelse)
            continue
        yield node
        waiting.extend(ast.iter_child_nodes(node))


def _scan(source: ParsedFile, folder: Folder, signs: Signs) -> None:
    """Adds the signs in a file to the signs; the first of each kind counts."""
    aliases, optional = source.aliases, _optional_imports(source)
    for node in source.nodes:
        used = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        meant = [_meaning(part, aliases) for part in used]
        variable = _environment_variable(node, aliases)
        signs.reads_ranks |= variable in RANK_VARIABLES
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            calls = (part for part in ast.walk(node) if isinstance(part, ast.Call))
            signs.called.setdefault(node.name, set()).update(_meaning(call.func, aliases) for call in calls)
        if isinstance(node, ast.Call):
            signs.calls.append(node)
        if not signs.names_gpus:
            words = (getattr(node, name, None) for name in ("attr", "id", "arg", "name", "module", "value"))
            signs.names_gpus = any(isinstance(word, str) and GPU.fullmatch(word) is not None for word in words)
        if not signs.wrapper and not WRAPPERS.isdisjoint(meant):
            signs.wrapper = f"{next(name for name in meant if name in WRAPPERS)} ({_place(source, node)})"
        signs.preload.update(_preloads(node, aliases, folder))
        if (function := _process_function(node, meant, aliases)) is not None:
            signs.starters.append((_place(source, node), function))
        if signs.ranks and signs.own:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            sign = _import_sign(node, folder, node in optional)
        elif isinstance(node, ast.Call) and meant[0] in STARTERS:
            sign = f"calls {meant[0]}"
        else:
            sign = _attribute_sign(node, aliases)
            sign = sign or (f"reads {variable} from the environment" if variable in RANK_VARIABLES else "")
        if sign:
            signs.ranks = signs.ranks or f"{_place(source, node)}, {sign}"
        if sign.startswith(OWN_SIGNS):
            signs.own = signs.own or f"{_place(source, node)}, {sign}"


def _process_function(node: ast.AST, meant: Sequence[str], aliases: dict[str, str]) -> str | None:
    """The name of the function that a new process runs, where a node starts one or derives its class; None elsewhere.

    A class of the script's own has a dot before its name: it is certain, as full names are.
    """
    if isinstance(node, ast.ClassDef) and "Process" in meant:
        return f".{node.name}"
    if not isinstance(node, ast.Call):
        return None
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    if _full_name(node.func, aliases) in PROCESS_STARTERS:
        function = given.get("fn", next(iter(node.args), None))
    else:
        function = given.get("target") if meant == ["Process"] else None
    return None if function is None else _full_name(function, aliases)


def _attribute_sign(node: ast.AST, aliases: dict[str, str]) -> str:
    """How an attribute of a module, such as `transformers.Trainer`, shows that a script deals with ranks."""
    if isinstance(node, ast.Attribute):
        module = _full_name(node.value, aliases)
        return f"uses {module}.{node.attr}" if node.attr in TRAINERS.get(module, ()) else ""
    return ""


def _import_sign(node: ast.Import | ast.ImportFrom, folder: Folder, is_optional: bool) -> str:
    """How an import shows it."""
    base = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    if isinstance(node, ast.ImportFrom) and node.level:
        return ""
    for name in (alias.name for alias in node.names):
        module = base or name
        top, full = module.partition(".")[0], f"{base}.{name}".lstrip(".")
        if folder.files_of(top):  # the script's own module of that name
            continue
        # A library that the script can do without, and that is not there, is not what starts its ranks.
        if top in FRAMEWORKS and not (is_optional and importlib.util.find_spec(top) is None):
            return f"imports {top}"
        if module.startswith(OWN_HOMES):
            return f"imports {module}"
        if name in TRAINERS.get(base, ()) or full.startswith(OWN_HOMES):
            return f"imports {full}"
    return ""


def _preloads(node: ast.AST, aliases: dict[str, str], folder: Folder) -> Iterator[str]:
    """The modules of `TRAINING` that a node is a sign of."""
    if not isinstance(node, ast.Import | ast.ImportFrom):
        name = _last_name(node)
        owner = node.value if isinstance(node, ast.Attribute) else None
        is_text = name == "compile" and (owner is None or _meaning(owner, aliases) in ("re", "regex"))
        if NEEDS_DYNAMO.search(name) and not is_text:
            yield DYNAMO
        return
    imported = [alias.name for alias in node.names]
    base = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    if base != "re" and any(map(NEEDS_DYNAMO.search, (base, *imported))):
        yield DYNAMO
    is_relative = isinstance(node, ast.ImportFrom) and node.level
    for top in () if is_relative else {name.partition(".")[0] for name in ([base] if base else imported)}:
        if top == "samestep":
            yield TRAINING[-1]
        if top not in WITHOUT_DYNAMO and not folder.files_of(top) and _is_library(top):
            yield DYNAMO


def _is_library(top: str) -> bool:
    """Whether a package is installed, and not a part of Python."""
    try:
        return top not in sys.stdlib_module_names and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        return False


def _optional_imports(source: ParsedFile) -> set[ast.AST]:
    """The imports that the script can do without: those in a `try` that catches something."""
    return {
        node
        for block in source.nodes
        if isinstance(block, ast.Try) and block.handlers
        for statement in block.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }


def _environment_variable(node: ast.AST, aliases: dict[str, str]) -> str:
    """The variable that a node reads: `os.environ["X"]`, `.get("X")`, `os.getenv("X")`, `"X" in os.environ`."""

    def is_environment(value: ast.expr) -> bool:
        return _meaning(value, aliases) == "environ"

    asked: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and is_environment(node.value):
        asked = node.slice
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        asked = node.left if is_environment(node.comparators[0]) else None
    elif isinstance(node, ast.Call) and node.args:
        owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
        is_getter = _last_name(node.func) in ("get", "pop", "setdefault") and is_environment(owner)
        if is_getter or _meaning(node.func, aliases) == "getenv":
            asked = node.args[0]
    return asked.value if isinstance(asked, ast.Constant) and isinstance(asked.value, str) else ""


def _last_name(node: ast.AST) -> str:
    """The last name of a dotted expression; empty for any other."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _full_name(node: ast.expr, aliases: dict[str, str]) -> str:
    """A dotted expression as the full name of what was imported or defined; empty for any other."""
    if isinstance(node, ast.Attribute):
        owner = _full_name(node.value, aliases)
        return f"{owner}.{node.attr}" if owner else ""
    return aliases.get(node.id, "") if isinstance(node, ast.Name) else ""


def _meaning(node: ast.expr, aliases: dict[str, str]) -> str:
    """The last name of a dotted expression, with import aliases resolved."""
    name = _last_name(node)
    return aliases.get(name, name).rpartition(".")[2]


def _place(source: ParsedFile, node: ast.AST) -> str:
    """A node's place: "train.py, line 12"."""
    return f"{source.path.name}, line {getattr(node, 'lineno', 0)}"
