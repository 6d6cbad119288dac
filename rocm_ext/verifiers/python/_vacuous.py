"""Make comparisons fail that hold because nothing is compared. This runs in the tests' process."""

import inspect
import operator
import sys
from collections import deque
from functools import partial

# The functions of the module operator, which compute with values of any kind
OPERATORS = {pow, divmod, *filter(inspect.isbuiltin, vars(operator).values())}
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.values()), type({}.items()))
SIZED = (list, tuple, str, bytes, bytearray, range, dict, set, frozenset, deque, *VIEWS)


def zipped(longer, *values):
    """The tuples of ``zip``; raises AssertionError at their end if it leaves something of a value out.

    Args:
        longer: for each value, whether it may be longer than the others.
        values: what to zip. What has no length, such as a generator, may be longer.
    """
    numpy = sys.modules.get("numpy")
    kinds = (*SIZED, numpy.ndarray) if numpy else SIZED
    whole = []
    for value, may in zip(values, longer, strict=True):
        if not may and isinstance(value, kinds):
            whole.append(value)
    return _tuples(zip(*values, strict=False), whole)


def _tuples(tuples, whole):
    count = 0
    for item in tuples:
        count += 1
        yield item
    longest = max(map(len, whole), default=0)
    if longest > count:
        raise AssertionError(f"zip ends after {count} of {longest}")


def guarded(array):
    """An empty array that refuses to compute with values or to be compared with them.

    numpy broadcasts empty arrays against anything, and ``all`` of nothing is True: ``(f(x) == 3).all()`` would hold.
    """
    import numpy

    class Empty(numpy.ndarray):
        def __array_ufunc__(self, ufunc, method, *inputs, **options):
            same_emptiness(*inputs)
            if options.get("out"):
                options["out"] = tuple(map(plain, options["out"]))
            result = getattr(ufunc, method)(*map(plain, inputs), **options)
            if isinstance(result, numpy.ndarray) and not result.size:
                return result.view(Empty)
            return result

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
    pytest = sys.modules.get("pytest")
    if pytest is None:
        return
    number = type(pytest.approx(1.0))
    equal = number.__eq__

    def compare(self, other):
        shape = getattr(other, "shape", ()) or ()
        return 0 not in shape and equal(self, other)

    number.__eq__ = compare


def full(function, /, *args, **keywords):
    """Call a function, or an operator by its name, for the tests. A bool wraps a function of numpy in ``args[0]``.

    Empty and non-empty values together are a failure where numpy would broadcast them, or calls the two equal. An
    empty array that comes out is guarded.
    """
    numpy = sys.modules.get("numpy")
    if isinstance(function, bool):
        return wrapped(args[0], called=function)
    in_place = isinstance(function, str) and function[0] == "i"
    if isinstance(function, str):
        function = getattr(operator, function)
    inputs = operands(numpy, function, args) if numpy else ()
    # a[a > 5] may be empty
    if not all(type(value) is numpy.ndarray or numpy.size(value) for value in inputs):
        same_emptiness(*inputs)
    if in_place:  # the statement computes
        return args[1]
    result = function(*args, **keywords)
    if not inputs:
        if is_operator(function):
            return result
        check_compared(function, args, keywords, result)
    if type(result) is numpy.ndarray and not result.size:
        return guarded(result)
    return result


def wrapped(value, called):
    """A function of numpy, or an operator, that goes through :func:`full`; any other value as it is.

    The tests call it, or mention it: then a type may be there to be compared.
    """
    is_mentioned_type = isinstance(value, type) and not called
    if is_mentioned_type or not callable(value):
        return value
    kinds = (value, type(value), type(owner(value)))
    modules = [str(getattr(kind, "__module__", "")) for kind in kinds]
    of_numpy = any(module.startswith("numpy") for module in modules)
    return partial(full, value) if of_numpy or is_operator(value) else value


def check_compared(function, args, keywords, result):
    """Raise AssertionError if a function of numpy calls two values equal of which one has no elements."""
    numpy = sys.modules["numpy"]
    empty = isinstance(result, numpy.ndarray) and not result.size
    holds = result is None or (isinstance(result, (bool, numpy.bool_)) and result)
    if not (holds or empty):
        return
    values = compared(function, args, keywords)
    arrays = (list, numpy.ndarray)
    against_array = bool(values) and isinstance(values[-1], arrays)
    if holds or result.dtype == bool or against_array:
        same_emptiness(*values)


def is_operator(function):
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
    values = []
    for parameter in given.signature.parameters.values():
        if parameter.default is parameter.empty and parameter.kind not in VARIABLE:
            values.append(parameter.name)
    return [given.arguments[name] for name in values] if len(values) == 2 else ()
