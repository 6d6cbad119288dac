"""Data sets' own tests, after their conversion."""

import pytest

from rocm_ext.data.formats import FORMATS

np = pytest.importorskip("numpy")

HELPERS = """import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    return False

def assertion(out, exp, atol):
    exact_match = out == exp
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        {close}
    else:
        assert exact_match
"""
LOOP = """
{indent}inputs, results = [[1], [2], [3]], {results}
{indent}for i, (inp, exp) in enumerate(zip(inputs, results)):
{indent}    assertion({name}(*inp), exp, 0)
"""


@pytest.mark.parametrize(
    "close",
    [
        "assert np.allclose(out, exp, rtol=1e-07, atol=atol)",
        "np.testing.assert_allclose(out, exp, atol=atol)",
    ],
)
@pytest.mark.parametrize("format", ["mbppplus", "humaneval"])
def test_numbers_that_are_close_have_the_same_shape(format: str, close: str):
    def passes(answer: object, results: list) -> bool:
        task = {
            "prompt": "def f(x):\n",
            "entry_point": "f",
            "test_list": ["f(1)"],
            "code": "def f(x): return 1",
        }
        helpers = HELPERS.format(close=close)
        if format == "humaneval":
            body = "def check(candidate):" + LOOP.format(
                indent="    ", results=results, name="candidate"
            )
        else:
            body = LOOP.format(indent="", results=results, name="f")
        row = FORMATS[format](task | {"test": helpers + body})
        space = {"f": lambda x: answer(x) if callable(answer) else answer}
        try:
            exec(row["tests"] + ("\ncheck(f)" if format == "humaneval" else ""), space)
        except (AssertionError, ValueError, TypeError):
            return False
        return True

    halves = [0.5, 1.0, 1.5]
    assert passes(lambda x: x / 2 + 1e-9, halves)
    assert passes(lambda x: np.float64(x / 2 + 1e-9), halves)
    assert passes(lambda x: [x / 2, x + 1e-9], [[x / 2, x] for x in (1.0, 2.0, 3.0)])
    assert passes(
        lambda x: (x / 2, x), [[x / 2, x] for x in (1.0, 2.0, 3.0)]
    )  # a tuple for a list, as before
    assert passes([], [[], [], []])
    for lie in (
        [],
        (),
        np.empty(0),
        np.empty((0, 1)),
        [[]],
        [lambda x: x / 2],
        None,
        lambda x: [x / 2],
        "",
        {},
    ):
        assert not passes(lie, halves), lie
        assert not passes(lie, [[0.5, 0.5]] * 3), lie
    assert not passes(0.5, [[0.5, 0.5]] * 3)
    assert not passes([1.0], [[], [], []])
