"""The hash of code is the same under every version of Python, and changes with whatever the code does."""

import ast
import functools

import pytest

from samestep.checkpoint.contract import code_hash, normal_form, versions


def loss(model, batch, *, scale=1e-3, name=None, **rest):
    """Says something."""
    x, y = batch
    if x is None:
        raise ValueError(f"batch {name!r}{'' if rest else scale:>{len(rest)}} is empty")
    return [*(y - model(x)) ** 2 * scale], {**rest, "name": ..., 1: None}


class Model:
    """Says something."""

    size: int = 3

    @functools.cached_property
    def forward(self):
        """Says something."""
        return f"{self.size=:}"

    async def later(self):
        """Says something."""
        return b"x", -1j


def test_the_hash_of_code_is_the_same_under_every_version_of_python():
    assert code_hash(loss) == "d66c5db129482132"
    assert code_hash(Model) == "e3d00ca38a7976fd"


def test_the_version_of_python_is_a_field_of_its_own():
    assert versions()["python"].count(".") == 2


def form(code):
    return normal_form(ast.parse(code))


class FunctionDef(ast.FunctionDef):
    """A function as a later Python may parse it: with fields that are not there yet."""

    _fields = ("type_params", *ast.FunctionDef._fields, "later")


def test_fields_that_hold_nothing_do_not_count():
    parsed = ast.parse("def f(x, *, y=None):\n    return x").body[0]
    later = FunctionDef(**{name: getattr(parsed, name) for name in parsed._fields})
    later.type_params, later.later = [], None
    assert normal_form(later) == normal_form(parsed)
    later.type_params = [ast.Name("T", ast.Load())]
    assert normal_form(later) != normal_form(parsed)


def test_it_does_not_count_how_an_f_string_is_cut():
    parsed = ast.parse('f"ab{x:>3}c"', mode="eval").body
    _, value, last = parsed.values
    empty = ast.Constant("")
    cut = ast.JoinedStr([empty, ast.Constant("a"), ast.Constant("b"), empty, value, last, empty])
    assert normal_form(cut) == normal_form(parsed)
    for other in ("f'ab{x:>3}d'", "f'ab{x:>4}c'", "f'ab{y:>3}c'", "f'a{x:>3}bc'", "f'ab{x!r:>3}c'"):
        assert normal_form(ast.parse(other, mode="eval").body) != normal_form(parsed), other


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("x = 1", "x = 1.0"),
        ("x = 1", "x = True"),
        ("x = 'a'", "x = b'a'"),
        ("x = a", "x = 'a'"),
        ("return_ = None", "return_ = ..."),
        ("def f():\n    return", "def f():\n    return None"),
        ("f(a, b)", "f(b, a)"),
        ("f(a=b)", "f(a, b)"),
        ("{**a, b: c}", "{b: c, **a}"),
        ("a - b", "a + b"),
        ("a < b < c", "a < b <= c"),
        ("def f(a, *, b=1): pass", "def f(a, b=1): pass"),
        ("def f(a, *, b, c=1): pass", "def f(a, *, b=1, c): pass"),
        ("def f(a, /): pass", "def f(a): pass"),
        ("[a for b in c if d]", "[a for b in c]"),
        ("x = []", "x = None"),
        ("x[a:]", "x[:a]"),
        ("async def f(): pass", "def f(): pass"),
    ],
)
def test_code_that_does_another_thing_has_another_form(one, other):
    assert form(one) != form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [("x = (1)", "x = 1  # one"), ("x = 'ab'", "x = u'a' 'b'"), ("f(\n    a,\n)", "f(a)"), ("x = 0x10", "x = 16")],
)
def test_layout_does_not_count(one, other):
    assert form(one) == form(other)
