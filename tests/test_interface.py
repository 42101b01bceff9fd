"""The public interface is that of tests/interface.txt: names, methods, arguments, commands and options.

python tests/test_interface.py > tests/interface.txt       after an intended change, which the changelog lists
"""

import importlib.util
import inspect
import json
from difflib import unified_diff
from pathlib import Path
from types import ModuleType

import pytest
from cli_commands import COMMANDS

import samestep
from samestep import errors

FILE = Path(__file__).parent / "interface.txt"


def called(name, thing):
    """A function or a class with its arguments; "=" is behind those that may be left out."""
    if not callable(thing) or (inspect.isclass(thing) and issubclass(thing, BaseException)):
        return name
    parameters = inspect.signature(thing).parameters.values()
    words = []
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and "*" not in words and not any(word[0] == "*" for word in words):
            words.append("*")
        star = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        words.append(star + each.name + "=" * (each.default is not each.empty))
    return f"{name}({', '.join(word for word in words if word != 'self')})"


def members(name, thing):
    """What an exported name offers: the public names of a module that are defined there, or the entries of a class."""
    own = {key: value for key, value in vars(thing).items() if not key.startswith("_")}
    for key, value in own.items():
        if isinstance(thing, ModuleType) and getattr(value, "__module__", "") != thing.__name__:
            continue
        value = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        yield called(f"{name}.{key}", value)


def interface(exported=samestep.__all__, commands=COMMANDS):
    """All that a change must not take away unnoticed, a line each."""
    found = {called(name, getattr(samestep, name)) for name in exported}
    modules_and_classes = {name: getattr(samestep, name) for name in exported} | {"errors": errors}
    for name, thing in modules_and_classes.items():
        found.update(members(name, thing) if inspect.ismodule(thing) or inspect.isclass(thing) else ())
    for words, command in commands.items():
        for each in command.params:
            spelled = each.metavar or each.name.upper() if each.param_type_name == "argument" else ""
            names = [spelled] if spelled else [*each.opts, *each.secondary_opts]
            found.add(f"$ samestep {' '.join(words)}: {', '.join(names)}")
    return sorted(found)


def test_the_interface_is_the_recorded_one():
    recorded = FILE.read_text("utf-8").splitlines()
    changed = [*unified_diff(recorded, interface(), "tests/interface.txt", "the code", lineterm="", n=0)]
    assert not changed, "\n".join([*changed, "if this is meant: python tests/test_interface.py > tests/interface.txt"])


def test_a_name_an_argument_or_an_option_less_is_noticed():
    whole, fewer = interface(), [name for name in samestep.__all__ if name != "EMA"]
    assert next(line for line in whole if line not in interface(fewer)).startswith("EMA(")
    others = {words: command for words, command in COMMANDS.items() if words != ("train",)}
    assert "$ samestep train: --devices" in {*whole} - {*interface(commands=others)}

    def narrower(model, *, shuffle=None):
        """One argument less."""

    def wider(model, data, *, shuffle=None):
        """The same with it."""

    assert called("f", narrower) == "f(model, *, shuffle=)"
    assert called("f", wider) == "f(model, data, *, shuffle=)"


def test_make_check_fails_for_a_count_above_its_limit_alone(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("count_lines", FILE.parents[1] / "tools" / "count_lines.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    counts = tool.what_grows()
    monkeypatch.setattr(tool, "LIMITS", tmp_path / "limits.json")
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "what_grows", lambda: counts)
    assert tool.LIMITS.write_text(json.dumps({name: number + 1 for name, number in counts.items()}))
    tool.hold_to_limits(lower=True)
    assert json.loads(tool.LIMITS.read_text()) == counts
    tool.LIMITS.write_text(json.dumps({**counts, "exported names": counts["exported names"] - 1}))
    with pytest.raises(SystemExit, match=r"^exported names: take something out"):
        tool.hold_to_limits(lower=True)
    assert tool.private_names_of_others(["a._mine = b._theirs\nfrom torch._own import thing"]) == {"_theirs", "_own"}
    assert tool.places_that_patch("[Patch(a, b, c) for b in names] + [Wrap(d, e, f)]") == 2


if __name__ == "__main__":
    print(*interface(), sep="\n")
