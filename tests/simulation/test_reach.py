"""Programs reach the whole public interface, but for what is listed with a reason; nothing is left behind or silent."""

import ast
import inspect
import re
import sys
from typing import Literal

import grammar
import pytest
from checks import Case, run_script, script
from grammar import Program, allowed
from worlds import cpu_only

import samestep
from samestep.engine.side_effects import Traces
from samestep.metrics import Metric

pytestmark = cpu_only("the ranks of the simulator are threads with CPUs")
MADE_BY_SAMESTEP = {"Batch", "EpochRecord", "Loader", "StepResult", "TrainStep"}
CALLED_BY_SAMESTEP = {"Hook", "StepObserver"}
VARIABLES = {  # what a name in a program stands for
    "run": "Run",
    "trainer": "Trainer",
    "step": "TrainStep",
    "each": "TrainStep",
    "part": "TrainStep",
    "loader": "Loader",
    "batch": "Batch",
    "result": "StepResult",
    "record": "EpochRecord",
    "average": "EMA",
}
REASONS = {  # why no program has something, and what belongs to it
    "is for samestep itself": """
        Batch.bounds Batch.checksum Batch.describe_microbatch Batch.num_leaves Batch.renew Batch.sizes Batch.stand_in
        Batch.version Batch.without_samples EMA.contract EMA.on_fit_start EMA.on_step_end Loader.num_samples
        Loader.state_before Loader.whole_epoch
        StepObserver.reads_gradients StepResult.is_good StepResult.is_there StepResult.scalar_sums TensorData.gather
        TensorData.part TensorData.rows
        TrainStep.audit_findings TrainStep.communicator TrainStep.sharded_state metrics.StateMetric
        metrics.as_metric metrics.result metrics.sums metrics.target_of
    """,
    "is output alone": "__version__ metrics.Metric(name)",
    "is what the head of a program makes or expects": "Communicator SamestepError Run(device)",
    "is for scripts, which have a grammar of their own": "DataParallel register_backend tutorial",
    "looks at the machine before a run": "discover select",
    "needs processes": """
        Sharded Run.train_step(strategy=sharded) launch
    """,
    "takes a compiler seconds for each shape": "Run.train_step(compile) Trainer(compile)",
    "closes what ranks in turns do not have": "Run.close",
    "is called by the end of a with block": "Trainer.close",
    "is given by the checks of faults": "Trainer.fit(resume=auto)",
    "is the length of other data than the loader's": "Loader.ids(num_samples)",
}
UNREACHED = [name for names in REASONS.values() for name in names.split()]


def members(name, thing):
    """The public entries of an exported class or module."""
    if inspect.isclass(thing):
        return {f"{name}.{own}": value for own, value in vars(thing).items() if not own.startswith("_")}
    if name == "metrics":
        own = {key: value for key, value in vars(thing).items() if not key.startswith("_")}
        ours = {key for key, value in own.items() if getattr(value, "__module__", "") == thing.__name__}
        return {f"metrics.{key}": own[key] for key in ours}
    return {}


def arguments(name, function):
    """The arguments of a function, and the values that its annotations and its docstring list."""
    for argument, parameter in inspect.signature(function).parameters.items():
        if argument != "self" and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield f"{name}({argument})"
            said = re.search(rf"\n +{argument}: (.*?)(?=\n +\w+: |\n\n|$)", inspect.getdoc(function) or "", re.DOTALL)
            kind = str(parameter.annotation) if "Literal" in str(parameter.annotation) else ""
            for value in {*re.findall(r"""(?<!\w)["']([\w-]+)["'](?!\w)""", f"{kind} {said and said[1]}")}:
                yield f"{name}({argument}={value})"


def interface():
    """All that `samestep` offers, as `Run`, `Run.loader`, `Run.loader(cache)`, `Run.loader(cache=device)`."""
    found = {*samestep.__all__}
    for name in samestep.__all__:
        for place, thing in ({name: getattr(samestep, name)} | members(name, getattr(samestep, name))).items():
            found.add(place)
            is_called = name not in CALLED_BY_SAMESTEP and (name not in MADE_BY_SAMESTEP or place != name)
            if is_called and callable(thing) and not isinstance(thing, Metric) and name != "SamestepError":
                found |= {*arguments(place, thing)}
    return found


def texts():
    """Programs that have each value of each table between them."""
    values = grammar.CHOICES | {name: [(value,) for value in known] for name, (known, _) in grammar.SEVERAL.items()}
    values |= {"shares": [(1, 2, 1, 2)], "data": [*values["data"], "streams"]}
    for loop in ("trainer", "own"):
        simplest = Program(loop=loop, epochs=2, samples=8)
        drawn = [{name: value} for name, known in values.items() for value in known if name != "loop"]
        needed = [{"data": "streams"}, {"files": True}]  # by some options
        drawn += [{"options": (option,), **more} for option in grammar.OPTIONS for more in needed]
        yield from {grammar.text(allowed(simplest.but(**each))): None for each in drawn}


def reached():
    """What programs use of the interface, by the names of their variables."""
    found = set()
    for part in {part for text in texts() for part in text.split("\n\n\n")}:
        for node in ast.walk(ast.parse(part)):
            if isinstance(node, ast.Attribute):
                found |= {named(node), named(node).partition(".")[0]}
            elif isinstance(node, ast.ClassDef):
                base = "".join(ast.unparse(base) for base in node.bases).removeprefix("samestep.")
                body = [target for each in ast.walk(node) for target in getattr(each, "targets", [])]
                names = [*(getattr(each, "name", "") for each in node.body), *map(ast.unparse, body)]
                found |= {f"{base}.{each}" for each in names}
            elif isinstance(node, ast.Call):
                found |= {*of_call(node)}
    return found


def named(node):
    """The name of an attribute in the interface."""
    place = ast.unparse(node).removeprefix("samestep.").removeprefix("trainer.run.")
    owner, _, own = place.rpartition(".")
    return f"{VARIABLES.get(owner.rpartition('.')[2], owner)}.{own}" if owner else own


def of_call(node):
    """The arguments of a call, and the texts in them."""
    name = named(node.func)
    function = samestep
    for part in name.split("."):
        function = getattr(function, part, None)
    if isinstance(function, type(samestep)) or not callable(function) or name in ("float", "int"):
        return
    names = [each for each in inspect.signature(function).parameters if each != "self"]
    given = dict(zip(names, node.args, strict=False)) | {each.arg: each.value for each in node.keywords}
    for argument, value in given.items():
        yield f"{name}({argument})"
        said = [each.value for each in ast.walk(value) if isinstance(each, ast.Constant)]
        yield from (f"{name}({argument}={each})" for each in said if isinstance(each, str))


def missing():
    """What no program reaches and no reason excuses; and reasons of what is reached, or is not there."""
    unreached = interface() - reached()
    keys = [rf"{re.escape(key.rstrip(')'))}($|[.()=])" for key in UNREACHED]
    excused = {each for each in unreached for key in keys if re.match(key, each)}
    return unreached - excused, {key for key in UNREACHED if key not in unreached}


def test_programs_reach_what_no_reason_excuses():
    assert missing() == (set(), set())


def test_an_argument_a_value_and_a_name_that_no_program_has_are_missing(monkeypatch):
    def loader(self, dataset=None, novel: Literal["one", "other"] = "one"):
        """Makes one."""

    monkeypatch.setattr(samestep.Run, "loader", loader)
    monkeypatch.setattr(samestep, "__all__", [*samestep.__all__, "errors"])
    found = {"Run.loader(novel)", "Run.loader(novel=one)", "Run.loader(novel=other)", "errors"}
    assert missing() == (found, set())


@pytest.mark.parametrize("name", grammar.NAMED)
def test_what_may_change_bits_is_named(name):
    run_script(script(Case(allowed(Program(named=name, samples=12)), ("named",))))


def test_what_is_not_named_fails(monkeypatch):
    monkeypatch.setattr(Traces, "compare", lambda _: None)
    with pytest.raises(AssertionError):
        run_script(script(Case(allowed(Program(named="remembering", samples=12)), ("named",))))


LEFT = {  # behind by a script, and what ends it
    "thread": "ends = threading.Event(); threading.Thread(target=ends.wait).start(); left.append(ends.set)",
    "process": "child = subprocess.Popen(['cat'], stdin=subprocess.PIPE); left.append(child.communicate)",
    "descriptor": "left.append(open(os.devnull).close)",
    "memory": "file = tempfile.TemporaryFile(dir='/dev/shm'); file.truncate(1); "
    "left += [mmap.mmap(file.fileno(), 1).close, file.close]",
    "file": "Path(tempfile.gettempdir(), f'left-{len(left)}').touch(); left.append(dict)",
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_a_script_leaves_behind_is_found(monkeypatch, kind):
    left = []
    monkeypatch.setattr(sys, "left", left, raising=False)
    try:
        with pytest.raises(AssertionError, match=f"left behind: .*{kind} "):
            run_script(
                "import mmap, os, subprocess, sys, tempfile, threading\nfrom pathlib import Path\n"
                f"left = sys.left\n{LEFT[kind]}\n"
            )
    finally:
        for end in left:
            end()
