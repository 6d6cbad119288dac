"""Make comparisons fail that hold because nothing is compared. This runs in the tests' process."""

import inspect
import operator
import sys
from collections import deque
from functools import partial

OPERATORS = {value for value in vars(operator).values() if type(value) is type(len)} | {pow, divmod}
VARIABLE = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


VIEWS: tuple[type, ...] = type({}.keys()), type({}.values()), type({}.items())
SIZED = list, tuple, str, bytes, bytearray, range, dict, set, frozenset, deque, *VIEWS


def zipped(longer, *values):
    """The tuples of ``zip``; raises AssertionError at their end if it leaves something of a value out.

    Args:
        longer: for each value, whether it may be longer than the others.
        values: what to zip. What has no length, such as a generator, may be longer.
    """
    numpy = sys.modules.get("numpy")
    kinds = (*SIZED, numpy.ndarray) if numpy else SIZED
    whole = [
        value
        for value, may in zip(values, longer, strict=True)
        if not may and isinstance(value, kinds)
    ]
    return _tuples(zip(*values, strict=False), whole)


def _tuples(tuples, whole):
    count = 0
    for item in tuples:
        count += 1
        yield item
    if any(len(value) > count for value in whole):
        raise AssertionError(f"zip ends after {count} of {max(map(len, whole))}")


def guarded(array):
    """An empty array that refuses to compute with values or to be compared with them.

    numpy broadcasts empty arrays against anything, and ``all`` of nothing is True: ``(f(x) == 3).all()`` would hold.
    """
    import numpy

    class Empty(numpy.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **options):
            same_emptiness(*inputs)
            options["out"] = tuple(map(plain, options["out"])) if options.get("out") else None
            result = getattr(ufunc, method)(*map(plain, inputs), **options)
            return (
                result.view(Empty)
                if isinstance(result, numpy.ndarray) and not result.size
                else result
            )

    def plain(value):
        return value.view(numpy.ndarray) if isinstance(value, Empty) else value

    return array.view(Empty)


def same_emptiness(*values):
    """Raise AssertionError if some of the values have elements and some have none."""
    sizes = [sys.modules["numpy"].size(value) for value in values]
    if any(sizes) and not all(sizes):
        raise AssertionError("nothing is compared with values")


def guard():
    """Make pytest's comparison of a number fail for an empty array."""
    if pytest := sys.modules.get("pytest"):
        scalar = type(pytest.approx(1.0))
        equal = scalar.__eq__
        scalar.__eq__ = lambda self, other: (
            0 not in (getattr(other, "shape", ()) or ()) and equal(self, other)
        )


def full(function, /, *args, **keywords):
    """Call a function, or an operator by its name, for the tests. A bool wraps a function of numpy in ``args[0]``.

    Empty and non-empty values together are a failure where numpy would broadcast them, or calls the two equal. An
    empty array that comes out is guarded.
    """
    if isinstance(
        function, bool
    ):  # True: args[0] is called; False: it is mentioned, and as a type may be compared
        value = args[0]
        if not callable(value) or not (function or not isinstance(value, type)):
            return value
        kinds = value, type(value), type(owner(value))
        computes = any(str(getattr(kind, "__module__", "")).startswith("numpy") for kind in kinds)
        return partial(full, value) if computes or is_operator(value) else value
    in_place, numpy = False, sys.modules.get("numpy")
    if isinstance(function, str):
        in_place, function = function[0] == "i", getattr(operator, function)
    inputs = operands(numpy, function, args) if numpy else ()
    if not all(
        type(value) is numpy.ndarray or numpy.size(value) for value in inputs
    ):  # a[a > 5] may be empty
        same_emptiness(*inputs)
    if in_place:  # the statement computes
        return args[1]
    result = function(*args, **keywords)
    if is_operator(function) and not inputs:
        return result
    empty = isinstance(result, numpy.ndarray) and not result.size
    if not inputs and (
        result is None or empty or (isinstance(result, (bool, numpy.bool_)) and result)
    ):
        pair = compared(function, args, keywords)
        if (
            not empty
            or result.dtype == bool
            or isinstance(pair[-1] if pair else 0, (list, numpy.ndarray))
        ):
            same_emptiness(*pair)
    return guarded(result) if empty and type(result) is numpy.ndarray else result


def is_operator(function):
    """Whether a function computes with values of any kind, like the functions of the module operator."""
    return type(function) is type(len) and function in OPERATORS


def owner(function):
    return getattr(function, "__self__", None)


def operands(numpy, function, args):
    """The arguments that numpy broadcasts together."""
    arrays = numpy.ndarray, numpy.generic
    if isinstance(owner(function), arrays) and function.__name__.startswith("__"):
        return owner(function), *args
    if is_operator(function):
        return args if any(isinstance(value, arrays) for value in args) else ()
    return args[: getattr(function, "nin", 0)]


def compared(function, args, keywords):
    """The two values that a function of numpy compares; empty if it does not take two."""
    try:
        given = inspect.signature(function).bind(*args, **keywords)
    except (ValueError, TypeError):  # a method of a builtin type has no signature
        return args[:2]
    values = [
        p.name
        for p in given.signature.parameters.values()
        if p.default is p.empty and p.kind not in VARIABLE
    ]
    return [given.arguments[name] for name in values] if len(values) == 2 else ()
