"""The layers: who may import whom, and what an import may cost."""

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1] / "src" / "samestep"
LAYERS = (
    "errors",
    "devices",
    "core",
    "comm",
    "data",
    "engine",
    "metrics",
    "train",
    "launcher",
    "scripts",
    "tutorial",
    "verify",
    "replay",
    "report",
    "estimate",
    "recipes",
    "doctor",
    "cli",
)
BOTTOM = {"errors", "extras", "text", "user_code", "version"}
HEAVY = ("torch", "numpy", "matplotlib", "tensorboard", "sklearn")
FILES = {"errors", "metrics", "tutorial"}  # layers of one module
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in FILES)

SMALL = 70
SMALL_FOR_A_REASON = {
    "data.text": "used by scripts too: docs/data.md names it",
    "devices.host_memory": "for workers, and for runs without a launcher",
    "devices.probe": "run as a file, by a child process",
    "engine.pipelining.strategy": "loaded if it is chosen, as the other strategies",
    "engine.sharding.strategy": "loaded if it is chosen, as the other strategies",
    "engine.whole_weights": "loaded for sharded state alone",
    "scripts.sync_batch_norm": "imports torch, which children of a script that import spawning may not need",
    "recipes.workload": "recipes import from estimate, which may not import recipes",
}


def layer_of(module: str) -> int:
    """The number of a module's layer: `samestep.comm.group` is 3."""
    name = module.split(".")[1]
    return 0 if name in BOTTOM else LAYERS.index(name)


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(source: str) -> list[tuple[int, str]]:
    """The line and name of every module that a source imports anywhere, but for type checking only."""
    found, waiting = [], list(ast.parse(source).body)
    while waiting:
        node = waiting.pop()
        if is_type_checking(node):
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            # "from samestep.devices import nvml" imports a module of that layer too
            found.append((node.lineno, f"{node.module}.{node.names[0].name}"))
        waiting += list(ast.iter_child_nodes(node))
    return sorted(found)


def violations(own: str, source: str) -> list[str]:
    """Imports of later layers."""
    return [
        f"line {line}: {name}"
        for line, name in imports(source)
        if name.startswith("samestep.") and layer_of(name) > layer_of(own)
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_its_own_and_earlier_layers(path):
    own = ".".join(("samestep", *path.relative_to(ROOT).with_suffix("").parts))
    assert violations(own, path.read_text(encoding="utf-8")) == []


def test_every_folder_is_a_layer():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders | FILES == set(LAYERS)


def test_a_wrong_import_is_noticed_wherever_it_stands():
    wrong = "def late():\n    if True:\n        from samestep.train.run import Run\n"
    assert violations("samestep.data.loader", wrong) == ["line 3: samestep.train.run.Run"]
    typing_only = "if TYPE_CHECKING:\n    from samestep.train.run import Run\nelse:\n    import samestep.cli.main\n"
    assert violations("samestep.data.loader", typing_only) == ["line 4: samestep.cli.main"]
    assert violations("samestep.cli.main", wrong) == []


def test_the_plan_is_pure_arithmetic_without_torch():
    for path in (ROOT / "core").glob("*.py"):
        names = {name.split(".")[0] for _, name in imports(path.read_text(encoding="utf-8"))}
        assert not names & {"torch", "os", "subprocess", "threading", "socket", "pathlib"}, path.name


def graph() -> dict[str, set[str]]:
    """By module, without "samestep.", the modules that it imports anywhere, for type checking too."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
    edges: dict[str, set[str]] = {}
    for name, path in names.items():
        asked = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                asked |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                asked |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
        edges[name] = {one.removeprefix("samestep.") for one in asked} & names.keys()
    return edges


def cycles(edges: dict[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules that import each other, directly or through others."""
    reached = {}
    for start in edges:
        seen: set[str] = set()
        waiting = [*edges[start]]
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += edges[name]
        reached[start] = seen
    found = {frozenset(b for b in edges if b in reached[a] and a in reached[b]) for a in edges}
    return {cycle for cycle in found if cycle}


def test_no_modules_import_each_other():
    assert [sorted(cycle) for cycle in cycles(graph())] == []


def test_a_cycle_through_other_modules_is_noticed():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}
    assert cycles({"a": {"b"}, "b": set()}) == set()


def test_a_small_module_has_more_than_one_importer_or_a_reason():
    importers = Counter(name for edges in graph().values() for name in edges)
    small = {
        name
        for name, times in importers.items()
        if times == 1 and len((ROOT / f"{name.replace('.', '/')}.py").read_text(encoding="utf-8").splitlines()) < SMALL
    }
    commands = {name for name in small if name.startswith("cli.")}  # a thin module a command
    assert sorted(small - commands - SMALL_FOR_A_REASON.keys()) == []


def test_packages_offer_no_names_of_their_own():
    for path in ROOT.rglob("__init__.py"):
        if path.parent != ROOT:
            (docstring,) = ast.parse(path.read_text(encoding="utf-8")).body
            assert isinstance(docstring, ast.Expr), path


def patched_engine(source: str) -> list[int]:
    """The lines in which a source patches something that it has imported from the engine."""
    nodes = list(ast.walk(ast.parse(source)))
    engine = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("samestep.engine")
        for alias in node.names
    }
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args]
    patches = [call for call in calls if call.func.id in ("Patch", "Wrap")]
    return [
        call.lineno
        for call in patches
        if any(isinstance(part, ast.Name) and part.id in engine for part in ast.walk(call.args[0]))
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_patches_the_engine_whose_steps_are_watched_by_observers(path):
    assert patched_engine(path.read_text(encoding="utf-8")) == []


def test_twin_a_patch_of_the_engine_is_noticed():
    imported = "from samestep.engine.step import TrainStep\nfrom samestep.engine import gradients as ours\n"
    assert patched_engine(imported + 'Patch(TrainStep, "__call__", other)\nWrap(ours.GradientSum, "push", more)') == [
        3,
        4,
    ]
    assert patched_engine(imported + 'Patch(Optimizer, "step", other)') == []


def test_no_two_modules_of_tests_have_the_same_name():
    names = Counter(path.name for path in Path(__file__).parent.glob("*/*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


def imported_by(code: str) -> set[str]:
    """Which heavy modules a fresh interpreter has imported after running some code."""
    report = f"import sys, json; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout.splitlines()[-1]))


def test_importing_samestep_imports_nothing_heavy():
    assert imported_by("import samestep; dir(samestep); samestep.__version__") == set()


@pytest.mark.parametrize(("before", "after"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_importing_samestep_sets_the_variable_that_cublas_reads_once_unless_the_user_has(before, after):
    variables = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    own = {} if before is None else {"CUBLAS_WORKSPACE_CONFIG": before}
    code = "import os, samestep; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    run = subprocess.run([sys.executable, "-c", code], env=variables | own, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == after


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["run", "--help"], ["--version"]])
def test_asking_for_help_does_not_import_torch(arguments):
    ask = f"""
import sys
from samestep.cli.main import main
sys.argv = ["samestep", *{arguments!r}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
"""
    assert imported_by(ask) == set()


def test_a_public_name_is_imported_when_it_is_first_used():
    assert "torch" in imported_by("import samestep; samestep.Run")
    assert imported_by("import samestep; samestep.SamestepError") == set()
    assert "matplotlib" not in imported_by("import samestep; samestep.Run, samestep.Trainer")
