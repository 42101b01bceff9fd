"""Checks of arguments: one sentence a kind of fault, and nothing for what is allowed."""

import math

import numpy as np
import pytest

from samestep.checks import check_choice, check_number
from samestep.errors import UsageError


@pytest.mark.parametrize(
    ("value", "limits", "message"),
    [
        (0, {"low": 1}, "it must be 1 or more (--keep-all)"),
        (1.5, {"low": 1}, "it must be a whole number, 1 or more (--keep-all)"),
        (True, {"low": 1}, "it must be a whole number, 1 or more (--keep-all)"),
        ("3", {"low": 1}, "it must be a whole number, 1 or more (--keep-all)"),
        (0, {"low": 1, "high": 8}, "it must be from 1 to 8 (--keep-all)"),
        (9, {"low": 1, "high": 8}, "it must be from 1 to 8 (--keep-all)"),
        (0.0, {"above": 0, "whole": False}, "it must be above 0 (--keep-all)"),
        (math.nan, {"above": 0, "whole": False}, "it must be a finite number, above 0 (--keep-all)"),
        (math.inf, {"above": 0, "whole": False}, "it must be a finite number, above 0 (--keep-all)"),
        (1.0, {"above": 0, "below": 1, "whole": False}, "it must be above 0 and below 1 (--keep-all)"),
        (None, {"whole": False}, "it must be a finite number (--keep-all)"),
        (0, {"low": 1, "option": "-o keep"}, "it must be 1 or more (-o keep)"),
        (0, {"low": 1, "option": ""}, "it must be 1 or more"),
    ],
)
def test_a_number_outside_its_limits_is_refused_with_them(value, limits, message):
    with pytest.raises(UsageError) as caught:
        check_number("keep_all", value, **limits)
    assert str(caught.value) == f"got keep_all={value!r}; {message}"


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (1, {"low": 1}),
        (8, {"low": 1, "high": 8}),
        (1, {"above": 0, "whole": False}),
        (np.float32(0.5), {"above": 0, "below": 1, "whole": False}),
        (-3, {}),
        (10**400, {"low": 1}),
    ],
)
def test_a_number_within_its_limits_passes(value, limits):
    check_number("keep", value, **limits)


def test_a_value_that_is_none_of_the_choices_is_refused_with_them():
    check_choice("tier", "bitwise", ("bitwise", "exact"))
    answers = {
        "bit": "did you mean 'bitwise'? It is",
        "Exakt": "did you mean 'exact'? It is",
        "x": "it is",
        None: "it is",
    }
    for value, answer in answers.items():
        with pytest.raises(UsageError) as caught:
            check_choice("--tier", value, ("bitwise", "exact"))
        assert str(caught.value) == f"got --tier {value!r}; {answer} one of bitwise, exact"
