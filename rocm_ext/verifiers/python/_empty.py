"""Comparisons of numpy and pytest that hold for nothing at all: here they fail. This runs in the tests' process."""

import sys


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
        for name in ("array", "asarray", "concatenate", "stack", "vstack", "hstack"):  # these drop the guard
            setattr(numpy, name, keeping(getattr(numpy, name)))
        for name in ("allclose", "isclose", "array_equiv"):
            setattr(numpy, name, guarding(getattr(numpy, name)))
        for name in ("allclose", "equal", "almost_equal", "array_equal", "array_almost_equal", "approx_equal"):
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


def keeping(make):
    """A function that makes arrays, whose empty ones are guarded."""

    def made(*args, **keywords):
        result = make(*args, **keywords)
        return result if result.size else guarded(result)

    return made
