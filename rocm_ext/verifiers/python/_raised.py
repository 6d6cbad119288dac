"""The tests' view of the program's exceptions: real exception classes and exceptions, made from plain data.

This runs inside the judge's sandbox.
"""

import sys

from _errors import encode, lineage
from _roles import METHODS
from _wire import text

ENDS = ("SystemExit", "KeyboardInterrupt", "GeneratorExit", "CancelledError", "StopIteration", "StopAsyncIteration")
NOT_LIBRARIES = {
    "unittest",
    "_pytest",
    "pytest",
    "__main__",
    "solution",
}  # their exceptions mean something to test runners


class RemoteError(type):
    """The type of classes that stand for exceptions of the code."""

    errors = None

    def __new__(meta, name, bases, namespace):
        if "_number" not in namespace:
            RemoteError.errors.judge.refuse(f"a class of the tests inherits from the code's {bases[0].__name__}")
        return super().__new__(meta, name, bases, namespace)

    def __call__(cls, *args, **keywords):
        if cls.__dict__["_number"] is None:
            return super().__call__(*args)
        return RemoteError.errors.judge.request(False, "call", (cls, *args), keywords)

    def __getattr__(cls, name):
        if name[:2] == "__" or cls.__dict__["_number"] is None:
            raise AttributeError(name)
        return RemoteError.errors.judge.request(False, "getattr", (cls, name))


def _ask_program(self, name):
    number = self.__dict__.get("_wire_number")
    if name[:2] == "__" or number is None:
        raise AttributeError(name)
    judge = RemoteError.errors.judge
    if name in METHODS or name in judge.trusted_methods:
        judge.refuse(f"the tests take an exception of the code for data (.{name})")
    return judge.request(False, "getattr", (self, name))


class Errors:
    """The judge's classes for the program's exceptions."""

    def __init__(self, judge, tests):
        self.judge = judge
        self.classes = {}
        self.sent = {}  # (module, name) -> class of the tests that the program knows
        self.named = {name for name in ENDS if name in tests}  # that end a program or loop, and that the tests expect
        RemoteError.errors = self

    def expected(self, error):
        """Whether the tests name an exception that would else mean that the program wants to end."""
        return any(kind.__name__ in self.named for kind in type(error).__mro__)

    def encode(self, error):
        """The JSON of an exception of the tests."""
        if isinstance(type(error), RemoteError) and error.__dict__.get("_wire_number") is not None:
            return ["h", error._wire_number]
        self.lineage(type(error))
        return encode(error, self.judge, number_of)

    def lineage(self, kind):
        """The JSON of an exception class."""
        if not isinstance(kind, RemoteError):
            self.sent[kind.__module__, kind.__name__] = kind
        return lineage(kind, number_of)

    def kind(self, names):
        """The class for a class of the program: a library's, one of the set-up's, or a new class of that name."""
        module, name = text(names[0][0]), text(names[0][1])
        if module == "solution" and name in self.judge.shared_exceptions:
            return self.judge.shared_exceptions[name]
        found = self.sent.get((module, name)) if module == "__main__" else None
        if found is None and module.split(".")[0] not in NOT_LIBRARIES and library(module):
            found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and issubclass(found, BaseException) and not isinstance(found, RemoteError):
            return found
        key = tuple((text(m), text(n)) for m, n, _ in names[:20])
        if key not in self.classes:
            base = self.kind(names[1:]) if len(names) > 1 else Exception
            namespace = {"_number": names[0][2], "__module__": "solution", "__getattr__": _ask_program,
                         "__str__": lambda self: self.__dict__.get("_wire_text", "")}  # fmt: skip
            self.classes[key] = RemoteError(name[:100], (base,), namespace)
        return self.classes[key]

    def decode(self, parts):
        """The exception that the program encoded."""
        names, args, attributes, says, number, cause = parts
        kind = self.kind(names)
        args = [self.judge._decode(arg, 0) for arg in args]
        if isinstance(kind, RemoteError):
            error = _bare(kind, args, text(says))
        else:
            try:
                error = kind(*args)
            except Exception:
                error = kind.__new__(kind, *args)
        for name, value in attributes:
            if text(name) == "__notes__" or (name[:2] != "__" and not callable(getattr(kind, name, None))):
                error.__dict__[name] = self.judge._decode(value, 0)
        if isinstance(kind, RemoteError):
            error.__dict__.update(_wire_text=text(says), _wire_number=number)
        if cause is not None:
            error.__cause__ = self.judge._decode(cause, 0)
        return error


def number_of(kind):
    """The program's number of an exception class."""
    return kind.__dict__.get("_number")


def _bare(kind, args, says):
    """An exception of a remote class, made by the builtin class that it derives from."""
    for tried in (args, [says]):
        try:
            error = kind.__new__(kind, *tried)
            error.__init__(*tried)
            return error
        except (TypeError, ValueError):
            continue
    return kind.__new__(kind)


def library(module):
    """Whether a module is of the standard library, or numpy or pandas."""
    top = module.split(".")[0]
    if not hasattr(sys, "stdlib_module_names"):  # Python 3.9; the judge's own modules have no __spec__
        return getattr(sys.modules.get(top), "__spec__", None) is not None
    return top in ("numpy", "pandas") or top in sys.stdlib_module_names
