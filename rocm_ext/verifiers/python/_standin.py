"""The names of pytest that tests of code use; the interpreter in the sandbox need not have pytest.

Whatever else of it the tests use is refused by name. This runs in the judge's sandbox with the standard library alone.
"""

import collections
import contextlib
import decimal
import inspect
import io
import numbers
import os
import re
import sys
import types

from _units import PYTEST, Broken


class Failed(BaseException):
    """``pytest.fail``. As in pytest, ``except Exception`` does not catch it."""


class Skipped(BaseException):
    """``pytest.skip`` and ``pytest.xfail``."""


class Raises:
    """``pytest.raises`` as a context manager, and the ``excinfo`` that it gives."""

    def __init__(self, expected, match=None):
        self.expected, self.pattern, self.value = expected, match, None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error is None:
            raise Failed(f"did not raise {self.expected}")
        if not isinstance(error, self.expected):
            return False
        self.value, self.type, self.tb = error, type(error), trace
        if self.pattern is not None:
            self.match(self.pattern)
        return True

    @property
    def typename(self):
        return self.type.__name__

    def match(self, pattern):
        if not re.search(pattern, str(self.value)):
            raise AssertionError(f"{pattern!r} does not match {str(self.value)[:200]!r}")
        return True

    def exconly(self):
        return f"{self.typename}: {self.value}"

    def __str__(self):
        return self.exconly()


def raises(expected, *args, match=None, **keywords):
    """``pytest.raises``, also in the form ``raises(Error, function, *args)``."""
    context = Raises(expected, match)
    if not args:
        return context
    with context:
        args[0](*args[1:], **keywords)
    return context


class approx:
    """``pytest.approx`` for numbers, and for sequences, dicts and arrays of numbers."""

    __array_ufunc__ = None
    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expected, rel=None, abs=None, nan_ok=False):
        self.expected, self.rel, self.abs, self.nan_ok = expected, rel, abs, nan_ok
        parts = expected.values() if isinstance(expected, dict) else expected
        if isinstance(expected, (list, tuple, dict)) and any(isinstance(p, (list, tuple, dict, set)) for p in parts):
            raise TypeError(f"pytest.approx() does not support nested data structures: {expected!r}")
        if isinstance(expected, (set, frozenset)):
            raise TypeError(f"pytest.approx() only supports ordered sequences, but got: {expected!r}")

    def __eq__(self, actual):
        expected = self.expected
        if isinstance(expected, dict):
            same = isinstance(actual, dict) and set(actual) == set(expected)
            return same and all(self._close(actual[key], expected[key]) for key in expected)
        if type(expected).__module__.split(".")[0] == "numpy" and hasattr(expected, "shape"):
            import numpy

            actual = numpy.asarray(actual)
            same = expected.shape in ((), actual.shape)
            wanted = numpy.broadcast_to(expected, actual.shape) if same else actual
            return same and all(map(self._close, actual.ravel().tolist(), wanted.ravel().tolist()))
        if type(actual).__module__.split(".")[0] == "numpy" and getattr(actual, "shape", ()) and not isinstance(
                expected, (list, tuple)):  # fmt: skip
            return all(self._close(a.item(), expected) for a in actual.flat)
        if isinstance(expected, (list, tuple)):
            try:
                same = len(actual) == len(expected)
            except TypeError:
                return False
            return same and all(map(self._close, actual, expected))
        return self._close(actual, expected)

    def _close(self, actual, expected):
        if self.rel is not None and not hasattr(expected, "__abs__"):
            raise TypeError("the expected value must support abs(...) when a relative tolerance is used")
        if isinstance(expected, bool):
            return isinstance(actual, bool) and actual == expected
        if actual == expected:
            return True
        numeric = (numbers.Complex, decimal.Decimal)
        if not (isinstance(actual, numeric) and isinstance(expected, numeric)):
            return False
        if abs(expected) != abs(expected):
            return self.nan_ok and bool(abs(actual) != abs(actual))
        if abs(expected) == float("inf"):
            return False
        kind = decimal.Decimal if isinstance(expected, decimal.Decimal) else float
        wide = kind(1e-12 if self.abs is None else self.abs)
        if self.rel is not None or self.abs is None:
            wide = max(wide, kind(1e-6 if self.rel is None else self.rel) * abs(expected))
        return bool(abs(expected - actual) <= wide)

    def __repr__(self):
        return f"approx({self.expected!r})"


class Mark:
    """``pytest.mark.NAME``, with its arguments."""

    def __init__(self, name, args=(), keywords=None):
        self.name, self.args, self.keywords = name, args, keywords or {}
        self.kwargs = self.keywords

    def __call__(self, *args, **keywords):
        bare = len(args) == 1 and not keywords and not self.args
        if bare and (inspect.isfunction(args[0]) or inspect.isclass(args[0])):
            args[0]._marks = [*vars(args[0]).get("_marks", ()), self]
            return args[0]
        return Applied(self.name, (*self.args, *args), {**self.keywords, **keywords})


class Applied(Mark):
    """A mark with arguments, which can only decorate."""

    def __call__(self, target):
        target._marks = [*vars(target).get("_marks", ()), self]
        return target


class Marks:
    """``pytest.mark``."""

    def __getattr__(self, name):
        return Mark(name)


Param = collections.namedtuple("Param", "values marks id")


def param(*values, marks=(), id=None):
    """``pytest.param``."""
    return Param(values, marks if isinstance(marks, (list, tuple)) else (marks,), id)


def fixture(function=None, scope="function", params=None, autouse=False, ids=None, name=None):
    """``pytest.fixture``."""

    def decorate(function):
        function._fixture = {"scope": scope, "params": params, "autouse": autouse, "name": name or function.__name__}
        return function

    return decorate if function is None else decorate(function)


def fail(reason="", pytrace=True):
    """``pytest.fail``."""
    raise Failed(reason)


def skip(reason="", **_):
    """``pytest.skip`` and ``pytest.xfail``."""
    raise Skipped(reason)


def main(*_, **__):
    """``pytest.main``: the tests run anyway."""
    return 0


class MonkeyPatch:
    """The fixture ``monkeypatch``."""

    def __init__(self):
        self._undo = contextlib.ExitStack()

    @classmethod
    @contextlib.contextmanager
    def context(cls):
        patch = cls()
        try:
            yield patch
        finally:
            patch.undo()

    def setattr(self, target, name, value=Mark, raising=True):
        if value is Mark:  # setattr("module.name", value)
            value, (path, name) = name, target.rsplit(".", 1)
            target = __import__(path, fromlist=["_"])
        if raising and not hasattr(target, name):
            raise AttributeError(name)
        self._restore(target, name)
        setattr(target, name, value)

    def delattr(self, target, name, raising=True):
        if hasattr(target, name) or raising:
            self._restore(target, name)
            delattr(target, name)

    def _restore(self, target, name):
        if hasattr(target, name):
            self._undo.callback(setattr, target, name, inspect.getattr_static(target, name)
                                if inspect.isclass(target) else getattr(target, name))  # fmt: skip
        else:
            self._undo.callback(lambda: hasattr(target, name) and delattr(target, name))

    def setitem(self, mapping, name, value):
        self._keep(mapping, name)
        mapping[name] = value

    def delitem(self, mapping, name, raising=True):
        self._keep(mapping, name)
        if raising:
            del mapping[name]
        else:
            mapping.pop(name, None)

    def _keep(self, mapping, name):
        if name in mapping:
            self._undo.callback(mapping.__setitem__, name, mapping[name])
        else:
            self._undo.callback(mapping.pop, name, None)

    def setenv(self, name, value, prepend=None):
        old = os.environ.get(name)
        self.setitem(os.environ, name, f"{value}{prepend}{old}" if prepend and old else str(value))

    def delenv(self, name, raising=True):
        self.delitem(os.environ, name, raising)

    def undo(self):
        self._undo.close()


class Capsys:
    """The fixture ``capsys``."""

    Output = collections.namedtuple("Output", "out err")

    def __init__(self):
        self._old = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()

    def readouterr(self):
        found = []
        for stream in (sys.stdout, sys.stderr):
            found.append(stream.getvalue())
            stream.seek(0)
            stream.truncate()
        return self.Output(*found)

    @contextlib.contextmanager
    def disabled(self):
        with contextlib.redirect_stdout(self._old[0]), contextlib.redirect_stderr(self._old[1]):
            yield

    def close(self):
        sys.stdout, sys.stderr = self._old


def module():
    """The stand-in for the module ``pytest``."""
    found = types.ModuleType("pytest")
    vars(found).update(approx=approx, fail=fail, fixture=fixture, main=main, mark=Marks(), param=param, raises=raises,
                       skip=skip, xfail=skip, MonkeyPatch=MonkeyPatch, FixtureRequest=object)  # fmt: skip
    found.CaptureFixture = type("CaptureFixture", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})

    def missing(name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise Broken(f"pytest.{name} does not work here; these do: {', '.join(sorted(PYTEST))}")

    found.__getattr__ = missing
    return found
