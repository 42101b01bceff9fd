"""The layers: who may import whom, and what an import may cost."""

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache
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
    "checkpoint",
    "runs",
    "run",
    "launcher",
    "scripts",
    "logical",
    "tutorial",
    "verify",
    "recipes",
    "replay",
    "report",
    "doctor",
    "cli",
)
RECIPES = {f"samestep.recipes.{name}" for name in ("lenet", "mlp", "simplenet", "vgg", "gpt")}
BOTTOM = {"callsite", "checks", "errors", "extras", "files", "patch", "text", "version"}
HEAVY = ("torch", "numpy", "matplotlib", "tensorboard", "sklearn")
FILES = {"errors", "metrics", "tutorial"}  # layers of one module
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem in FILES)
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.rglob("*.py"))
}
PROGRAMS = {name for name, source in SOURCES.items() if '__name__ == "__main__"' in source}  # for `python -m`
NAMED = re.compile(r"(samestep(?:\.\w+)+)(?::[\w.]+)?")  # a module in a string, alone or with a function of it

# Modules that what must be trusted imports, and the reason why no bit depends on them.
UNTRUSTED = {
    "checks": "refuses arguments",
    "devices.device": "has malloc keep freed memory",
    "devices.inventory": "finds devices",
    "devices.selection": "prints a hint on cores that are not used",
    "engine.diagnosis": "explains failures",
    "engine.side_effects": "reads attributes in the first steps, and prints notices",
    "errors": "exceptions",
    "comm.wire": "makes the socket at which ranks meet, and messages between supervisors",
    "text": "messages",
    "run.arguments": "answers unknown arguments",
    "files": "writes and reads files, whose bytes the manifest verifies",
    "checkpoint.contract": "says what decides the bits; nothing is computed by it",
    "checkpoint.contract_diff": "refuses another contract",
    "run.evaluation": "measures, and restores what it changed",
    "comm.exceptions": "raises an error of one rank on all",
    "comm.nccl_errors": "the errors of NCCL and what helps",
    "runs.recorder": "says which program runs, and writes what is read again by no run",
    "run.replay_protocol": "tells a program that is run again what to do with its checkpoints",
    "run.signals": "ends a run between two steps",
}


def layer_of(module: str) -> int:
    """The number of a module's layer: `samestep.comm.group` is 3."""
    name = module.split(".")[1]
    return 0 if name in BOTTOM else LAYERS.index(name)


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def imports(source: str, with_types: bool = False) -> list[tuple[int, str]]:
    """The line of every import, wherever it stands, and the module, or the name in a module, that it asks for.

    A string asks for the module of ours that it names, as for `import_module` and the jobs of workers, but not for a
    program, which runs in a process of its own. An f-string that begins with a package asks for those of its modules
    which other strings of the source name.
    """
    found, waiting = [], list(ast.parse(source).body)
    texts, packages = [], []
    while waiting:
        node = waiting.pop()
        if is_type_checking(node) and not with_types:
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append((node.lineno, node.value))
        elif isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
            packages.append((node.lineno, str(node.values[0].value)))
        waiting += list(ast.iter_child_nodes(node))
    texts += [(line, package + text) for line, package in packages if package.endswith(".") for _, text in texts]
    named = [(line, match[1]) for line, text in texts if (match := NAMED.fullmatch(text))]
    return sorted(found + [each for each in named if each[1].removeprefix("samestep.") in SOURCES.keys() - PROGRAMS])


def module_of(name: str) -> str | None:
    """The module of ours, without "samestep.", that has a name; the package's own, "__init__", if no other has."""
    if name.split(".")[0] != "samestep":
        return None
    module = name.removeprefix("samestep").removeprefix(".")
    while module and module not in SOURCES:
        module = module.rpartition(".")[0]
    return module or "__init__"


def violations(own: str, source: str) -> list[str]:
    """Imports of later layers; the package itself, which offers names of all of them, is for recipes, as for users."""
    found = [(line, name, module_of(name)) for line, name in imports(source)]
    return [
        f"line {line}: {name}"
        for line, name, module in found
        if module and (own not in RECIPES if module == "__init__" else layer_of(f"samestep.{module}") > layer_of(own))
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_its_own_and_earlier_layers(path):
    own = ".".join(("samestep", *path.relative_to(ROOT).with_suffix("").parts))
    assert violations(own, path.read_text(encoding="utf-8")) == []


def test_every_folder_is_a_layer():
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders | FILES == set(LAYERS)


def table_below(heading: str) -> list[list[str]]:
    """The cells of a table of CONTRIBUTING.md, without its head."""
    text = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8").partition(f"{heading}\n")[2]
    lines = re.search(r"(?m)^(\|.*\n)+", text)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_layers_has_every_layer_in_its_order():
    named = [name for cells in table_below("## The layers") for name in re.findall(r"`(\w+)(?:/|\.py)`", cells[0])]
    assert sorted(named[: len(BOTTOM)]) == sorted(BOTTOM)
    assert named[len(BOTTOM) :] == [name for name in LAYERS if name not in BOTTOM]
    row = re.search(r"`errors, .*?\n\n", (ROOT.parents[1] / "AGENTS.md").read_text(encoding="utf-8"), re.DOTALL)[0]
    assert re.findall(r"\w+", row) == named


def neighbours(edges: dict[str, set[str]], modules: set[str]) -> set[str]:
    """The other modules that some modules import."""
    return set().union(*(edges[name] for name in modules)) - modules


def trusted() -> list[tuple[int, list[str]]]:
    """The lines and modules of each row of the table of what must be trusted."""
    rows = []
    for _, lines, files in table_below("### What must be trusted"):
        found = re.findall(r"`([\w/]+)/\{([^}]+)\}`", files)
        modules = [f"{folder.replace('/', '.')}.{name}" for folder, names in found for name in names.split(", ")]
        rows.append((int(lines.replace(",", "")), modules))
    return rows


def test_what_must_be_trusted_imports_nothing_else_that_could_decide_a_bit():
    modules = [name for _, names in trusted() for name in names]
    assert len(set(modules)) == len(modules)
    assert {"engine.step", "data.loader", "run.run", "checkpoint.state"} <= set(modules)
    assert neighbours(graph(SOURCES, with_types=False), set(modules)) == UNTRUSTED.keys()


def test_twin_an_import_into_what_must_be_trusted_is_noticed():
    modules = {name for _, names in trusted() for name in names}
    for more in ("def late():\n    from samestep.metrics import Accuracy", 'import_module("samestep.metrics")'):
        sources = SOURCES | {"core.tree": f"{SOURCES['core.tree']}\n{more}\n"}
        found = neighbours(graph(sources, with_types=False), modules)
        assert found - UNTRUSTED.keys() == {"metrics"}
    unlisted = neighbours(graph(SOURCES, with_types=False), modules - {"core.tree"})
    assert unlisted - UNTRUSTED.keys() == {"core.tree"}


def test_the_lines_of_what_must_be_trusted_are_about_those_that_the_table_says():
    # A twentieth, so that only a change of size changes the table.
    rows = trusted()
    counts = [sum(len(SOURCES[name].splitlines()) for name in names) for _, names in rows]
    text = (ROOT.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    total = re.search(r"depend on these files, ([\d,]+) lines in all", text)[1]
    for said, count in (
        *zip([said for said, _ in rows], counts, strict=True),
        (int(total.replace(",", "")), sum(counts)),
    ):
        assert abs(said - count) <= count / 20, (said, count)


def test_a_wrong_import_is_noticed_wherever_it_stands():
    wrong = "def late():\n    if True:\n        from samestep.run.run import Run\n"
    assert violations("samestep.data.loader", wrong) == ["line 3: samestep.run.run.Run"]
    typing_only = "if TYPE_CHECKING:\n    from samestep.run.run import Run\nelse:\n    import samestep.cli.main\n"
    assert violations("samestep.data.loader", typing_only) == ["line 4: samestep.cli.main"]
    assert violations("samestep.cli.main", wrong) == []


def test_a_wrong_import_by_a_string_is_noticed():
    for wrong in (
        'import_module("samestep.run.run")',
        '__import__("samestep.run.run")',
        'Job("function", "samestep.run.run:Run.loader")',
        'NAMES = ("run", "loader")\nimport_module(f"samestep.run.{name}")',
    ):
        assert [name for _, name in imports(wrong)] == ["samestep.run.run"], wrong
        assert len(violations("samestep.data.loader", wrong)) == 1, wrong
    assert imports('"samestep.Run makes it"; f"samestep.{name}"; f"{package}.run"; "samestep.Run"') == []
    assert violations("samestep.cli.main", "import samestep\nfrom samestep import Run, text") == [
        "line 1: samestep",
        "line 2: samestep.Run",
    ]
    sources = SOURCES | {"run.arguments": SOURCES["run.arguments"] + '\nimport_module("samestep.run.trainer")'}
    assert any({"run.arguments", "run.trainer"} <= cycle for cycle in cycles(graph(sources)))


def test_the_plan_is_pure_arithmetic_without_torch():
    for path in (ROOT / "core").glob("*.py"):
        names = {name.split(".")[0] for _, name in imports(path.read_text(encoding="utf-8"))}
        assert not names & {"torch", "os", "subprocess", "threading", "socket", "pathlib"}, path.name


def graph(sources: dict[str, str], with_types: bool = True) -> dict[str, set[str]]:
    """By module the others that it imports anywhere; by default for type checking too."""
    return {
        name: {module for _, asked in imports(source, with_types) if (module := module_of(asked))} - {name}
        for name, source in sources.items()
    }


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
    assert [sorted(cycle) for cycle in cycles(graph(SOURCES))] == []


def test_a_cycle_through_other_modules_is_noticed():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == {frozenset("abc")}
    assert cycles({"a": {"b"}, "b": set()}) == set()


def test_no_two_files_have_the_same_name():
    files = [path for path in ROOT.rglob("*.py") if path.name != "__init__.py" and path.parent.name != "cli"]
    names = Counter(path.name for path in files)
    assert [name for name, count in names.items() if count > 1] == []


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


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("CUBLAS_WORKSPACE_CONFIG", None, ":4096:8"),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", ":16:8"),
        ("TORCHINDUCTOR_DETERMINISTIC", None, "1"),
        ("TORCHINDUCTOR_DETERMINISTIC", "0", "0"),
    ],
)
def test_importing_samestep_sets_a_variable_that_torch_reads_once_unless_the_user_has(name, before, after):
    variables = {key: value for key, value in os.environ.items() if key != name}
    own = {} if before is None else {name: before}
    code = f"import os, samestep; print(os.environ[{name!r}])"
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
