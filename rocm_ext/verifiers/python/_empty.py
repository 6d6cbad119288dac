"""Comparisons of numpy and pytest that hold for nothing at all: here they fail. This runs in the tests' process."""

import operator
import sys
from functools import partial


def guarded(array):
    """An array without elements that does not compute or compare with values.

    numpy broadcasts it against anything, and ``all`` of nothing is True: ``(f(x) == 3).all()`` would hold.
    """
    import numpy

    class Empty(numpy.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **options):
            same_emptiness(*inputs)
            options["out"] = tuple(map(plain, options["out"])) if options.get("out") else None
            result = getattr(ufunc, method)(*map(plain, inputs), **options)
            return result.view(Empty) if isinstance(result, numpy.ndarray) and not result.size else result

    def plain(value):
        return value.view(numpy.ndarray) if isinstance(value, Empty) else value

    return array.view(Empty)


def same_emptiness(*values):
    """Raise AssertionError if some of the values have elements and some have none."""
    sizes = [sys.modules["numpy"].size(value) for value in values]
    if any(sizes) and not all(sizes):
        raise AssertionError("nothing is compared with values")


def guard():
    """Have the comparisons fail, as far as the libraries are loaded."""
    if numpy := sys.modules.get("numpy"):
        for name in ("allclose", "isclose", "array_equiv", "isin", "setdiff1d"):
            setattr(numpy, name, guarding(getattr(numpy, name)))
        for name in "allclose equal almost_equal array_equal array_almost_equal approx_equal array_less".split():  # noqa: SIM905
            setattr(numpy.testing, f"assert_{name}", guarding(getattr(numpy.testing, f"assert_{name}")))
    if pytest := sys.modules.get("pytest"):
        scalar = type(pytest.approx(1.0))
        equal = scalar.__eq__
        scalar.__eq__ = lambda self, other: 0 not in (getattr(other, "shape", ()) or ()) and equal(self, other)


def guarding(compare):
    """A comparison that fails where one side has elements and the other has none."""

    def checked(result, expected, *args, **keywords):
        same_emptiness(result, expected)
        return compare(result, expected, *args, **keywords)

    return checked


def full(function, *args, **keywords):
    """Call a function of numpy, or an operator by its name, for the tests. A bool gives what makes such calls.

    An empty list beside values of numpy's is a failure, and an array without elements that comes out is guarded.
    """
    if isinstance(function, bool):  # whether args[0] is called here; types are also compared
        return partial(full, *args) if callable(args[0]) and (function or not isinstance(args[0], type)) else args[0]
    numpy, named = sys.modules.get("numpy"), isinstance(function, str)
    function, inputs = (getattr(operator, function), args) if named else (function, args[: getattr(function, "nin", 0)])
    if numpy is None or (named and not any(isinstance(value, (numpy.ndarray, numpy.generic)) for value in args)):
        return function(*args, **keywords)
    if not all(isinstance(value, (numpy.ndarray, str)) or numpy.size(value) for value in inputs):
        same_emptiness(*inputs)
    result = function(*args, **keywords)
    return guarded(result) if type(result) is numpy.ndarray and not result.size else result
