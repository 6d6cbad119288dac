"""The tests' side of the boundary: handles on the code's objects, and the operations that handles allow.

The code's process sends plain data of exact library types, and handles. It sends no modules, and data has no callable
attribute, such as a field of a named tuple. A handle stands for an object in the code's process; operations on it run
there and return plain data or a handle. The danger is an answer whose objects lie: an object instead of data whose
``__eq__`` is always true, or whose methods read the expected value. So this file keeps six rules:

- A handle that the tests did not make, by calling a class, may stand for data. Such a handle never answers yes or no
  by a name that data has, too (``startswith``, ``isin``, ``equals``), and neither does a function inside data. If the
  tests do not know its class by name, it has no such name, no length, no items and no arithmetic; its values can be
  read once, like a generator's; and inside data it cannot be called. A class that the tests do not know by name only
  makes objects.
- A handle is never compared or computed with the tests' data: its class would see the expected value.
- An object whose class derives from a builtin type, such as dict or int, comes with its value, which is plain data.
  Operations that the class inherits from that type are done here, with the value. A ``__missing__`` gets the keys that
  a dict lacks.
- A handle has the special methods that its class defines, such as ``__len__``, and no others.
- Two handles are equal if the code says so and their attributes are equal.
- A failed assert of the tests stays a failure, through whatever code it passes.

A test or an answer that breaks a rule is ``Unjudged``; PythonTests turns that into a verdict. Exceptions arrive as the
library's, or as classes of this file with the name of the code's class.
"""

import _operator
import builtins
import contextlib
import re
import sys
from threading import RLock

import _messages
import _vacuous
from _messages import (
    BINARY,
    FUNCTIONS,
    MUTABLE,
    Closed,
    Malformed,
    Unsendable,
    Wire,
    expect,
    mutable,
    number,
    text,
)

VISIBLE = {"__name__", "__qualname__", "__dict__", "__members__", "__match_args__"}
# Modules whose exceptions cross
LIBRARIES = {*sys.stdlib_module_names, "numpy"} - {"unittest", "doctest", "__main__"}
STOPS = {"StopIteration", "StopAsyncIteration"}
STEPS = {"next", "send", "throw", "await", "anext"}
OF_DATA = {  # module -> types of data; their attributes are the names that data has
    "builtins": "str bytes bytearray list tuple dict set frozenset int float complex range",
    "collections": "deque",
    "datetime": "date datetime timedelta",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "pathlib": "PurePath",
    "numpy": "ndarray",
}
OF_TABLES = {"all", "any", "equals", "isin", "isna", "isnull", "notna", "notnull", "between"}
# Beginnings of names that ask a yes or no question
ASKS = ("is", "startswith", "endswith", "any", "all", "equals", "not", "match", "between", "exists")
VALUES = (int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
GENERATOR = type(_ for _ in ())
COROUTINE = 0x80  # the flag of an async function's code
# Tags of values with attributes, which must not be callable
FIELDS = {"nt", "x", "slice", *_messages.LIBRARY}
# What decoding raises for messages that an honest program does not send
NONSENSE = (Malformed, LookupError, TypeError, ValueError, AttributeError, RecursionError)
METHOD = object()  # stands for an attribute that is a method
NONE = object()  # stands for no value
JUDGE = None  # this process's Judge


class Unjudged(BaseException):
    """The tests or the answer break a rule of this file. Not an Exception, so that tests do not catch it."""


class CodeEnded(BaseException):
    """The code's process has ended or sent nonsense. Not an Exception, so that tests do not catch it."""


class CodeClass(type):
    """The type of the stand-ins for the code's classes; their instances are handles.

    ``__open__`` says what the tests do with the class: "objects" if they make its objects, "functions" if they only
    call its functions, empty if they mention it otherwise, and None if they do not mention it.
    """

    __built__ = __known__ = property(lambda cls: bool(cls.__open__))
    __number__ = property(lambda cls: cls.__class_number__)

    def __new__(meta, name, bases, namespace):
        JUDGE.refuse(f"a class of the tests inherits from the code's {bases[-1].__name__}")

    def __call__(cls, /, *args, **keywords):
        JUDGE.fresh = None
        value = JUDGE.request("call", cls, *args, **keywords)
        if type(value) is bool and cls.__open__ is None:
            JUDGE.refuse(f"the code's class {cls.__name__} answers a call as data would")
        if not (cls.__open__ and isinstance(value, Handle)):
            return value
        at = value.__number__
        if at in JUDGE.made or at == JUDGE.fresh:  # an object that stood for data before stays that
            set_slot(value, "__built__", True)
            calls = JUDGE.made.setdefault(at, set())
            calls.add(repr((args, keywords)))
        return value

    def __instancecheck__(cls, value):
        kind = type(value)
        if isinstance(kind, CodeClass):
            return cls.__class_number__ in kind.__lineage__
        is_named_tuple = isinstance(value, tuple) and hasattr(kind, "_fields")
        return is_named_tuple and kind.__name__ == cls.__name__

    def __subclasscheck__(cls, kind):
        return isinstance(kind, CodeClass) and cls.__class_number__ in kind.__lineage__


class CodeCollection(CodeClass):
    """The type of the stand-ins for the code's classes that have items, such as enumerations."""

    def __bool__(cls):
        return True


class ErrorClass(type):
    """The type of the stand-ins for the code's exception classes."""

    __number__ = property(lambda cls: cls.__class_number__)
    __getitem__ = lambda cls, key: taken_for_data(cls)  # noqa: E731 - an ExceptionGroup["any"] is true

    def __call__(cls, /, *args, **keywords):
        return JUDGE.request("call", cls, *args, **keywords)


class Handle:
    """An object in the code's process.

    ``__built__``: whether the tests made it, by calling its class. ``__value__``: its plain value when it last came.
    """

    __slots__ = ("__built__", "__number__", "__value__", "__weakref__")
    __known__ = property(lambda self: self.__built__ or type(self).__open__ == "objects")
    __doc__ = property(lambda self: JUDGE.request("get", self, "__doc__"))  # type: ignore[assignment,attr-defined]

    def __eq__(self, other):
        kind = type(self)
        if self is other:
            if len(JUDGE.made.get(self.__number__, ())) > 1:
                JUDGE.refuse(
                    f"the code gives one object of {kind.__name__} for different arguments"
                )
            return True
        mine = value_of(self, "eq")
        theirs = value_of(other, "eq")
        if mine is not NONE and theirs is not NONE:
            return mine == theirs
        if isinstance(other, Handle):
            return same(self, other)
        if kind.__compares__ and other is not None:
            taken_for_data(self)
        return NotImplemented

    def __hash__(self):
        value = value_of(self, "hash")
        if value is not NONE:
            return hash(value)
        if type(self).__compares__:
            return JUDGE.request("hash", self)
        return hash(self.__number__)

    def __copy__(self, op="copy"):
        built = self.__built__  # the reply may reset it
        copied = JUDGE.request(op, self)
        if type(copied) is type(self):
            set_slot(copied, "__built__", built)
        return copied

    def __deepcopy__(self, memo):
        return self.__copy__("deepcopy")


def set_slot(value, name, content):
    """Set a slot of a handle, past the handle's ``__setattr__``."""
    object.__setattr__(value, name, content)


def value_of(value, *operations):
    """The plain value of a handle whose class inherits these operations from a builtin type, else NONE; data itself."""
    if not isinstance(value, Handle):
        return value
    kind = type(value)
    methods = [f"__{op}__" for op in operations]
    if kind.__data__ is None or not kind.__defined__.isdisjoint(methods):
        return NONE
    if not (value.__known__ and kind.__data__ in MUTABLE):
        return getattr(value, "__value__", NONE)
    latest = JUDGE.request("value", value)  # the code may have changed it since
    if type(latest) is not kind.__data__:
        taken_for_data(value)
    return latest


def contains(self, item):
    """``item in self``."""
    value = value_of(self, "contains")
    if value is not NONE:
        return item in value
    if not (isinstance(item, Handle) or self.__built__):
        taken_for_data(self)
    return JUDGE.request("contains", self, item)


def get_item(self, key):
    """``self[key]``; with a ``__missing__``, the code gives what its dict lacks, and may keep it."""
    if self.__known__:
        return JUDGE.request("getitem", self, key)
    value = value_of(self, "getitem")
    if value is NONE:
        taken_for_data(self)
    if "__missing__" not in type(self).__defined__ or key in value:
        return value[key]
    item = JUDGE.request("getitem", self, key)
    if type(item) is bool:
        JUDGE.refuse("an object of the code answers for a key as data would")
    if JUDGE.request("contains", self, key) is True:  # the class keeps it
        value[key] = item
    return item


def enter(self):
    """``with self:`` begins."""
    built = self.__built__
    given = JUDGE.request("method", self, "__enter__")
    set_slot(self, "__built__", built)  # the object may have given itself
    return given


def leave(self, kind, error, trace):
    """``with self:`` ends; a failure of the tests stays one, whatever the code says."""
    if not is_failure(error):
        return JUDGE.request("method", self, "__exit__", kind, error, None)
    with contextlib.suppress(Exception):
        JUDGE.request("method", self, "__exit__", AssertionError, AssertionError(), None)
    return False


async def leave_async(self, kind, error, trace):
    """``async with self:`` ends."""
    handled = await JUDGE.request("method", self, "__aexit__", kind, error, None)
    return handled and not is_failure(error)


def forwarded(name):
    """A special method that does what the code's class says, without arguments."""
    return lambda self: JUDGE.request("method", self, name)


def compute(op, *values):
    return (getattr(builtins, op, None) or getattr(_operator, op))(*values)


def taken_for_data(handle):
    """Stop the tests, because they take an object or a class of the code for data."""
    if isinstance(handle, type):
        name = f"class {handle.__name__}"
    else:
        name = f"object of class {type(handle).__name__}"
    JUDGE.refuse(f"the code's {name} is taken for data")


def always(op):
    """An operation of all handles."""
    return lambda self, *args: JUDGE.request(op, self, *args)


def known(op):
    """An operation of data; a handle of an unknown class has it only through its plain value."""

    def run(self, *args):
        if self.__known__:
            return JUDGE.request(op, self, *args)
        value = value_of(self, op)
        if value is not NONE:
            return compute(op, value, *args)
        # the request comes before the refusal, since an error that data would raise counts
        given = JUDGE.request(op, self, *args)
        if op != "iter":
            taken_for_data(self)
        if given is self:
            given = JUDGE.revive("y", [self.__number__])
        if type(given) is not GENERATOR:
            taken_for_data(self)
        # a later loop gets the same generator, which gives its values once
        return JUDGE.iterated.setdefault(self.__number__, given)

    return run


def named(op):
    """An operation of the classes that the tests name, such as enumerations."""

    def run(cls, *args):
        if cls.__open__ is None:
            taken_for_data(cls)
        return JUDGE.request(op, cls, *args)

    return run


def ordered(op):
    """A comparison by size, of values or of objects whose classes the tests know."""

    def compare(self, other):
        mine = value_of(self, op)
        theirs = value_of(other, op)
        if mine is not NONE and theirs is not NONE:
            return compute(op, mine, theirs)
        if not (self.__known__ and isinstance(other, Handle) and other.__known__):
            taken_for_data(self)
        return JUDGE.request(op, self, other)

    return compare


def binary(op, how=""):
    """An operation with another value, perhaps reflected ("r") or in place ("i"). With data it must not give data."""
    name = op.strip("_")
    operation = f"i{name}" if how == "i" else op

    def run(self, other):
        built = self.__built__  # a reply to value_of may reset it
        kind = type(self)
        operations = (name, f"r{name}", f"i{name}")
        mine = value_of(self, *operations)
        theirs = value_of(other, *operations)
        changes = how == "i" and hasattr(kind.__data__, f"__i{name}__")  # the object itself
        if mine is not NONE and theirs is not NONE and not changes:
            values = (theirs, mine) if how == "r" else (mine, theirs)
            return compute(operation, *values)
        fits = changes or (isinstance(other, Handle) and other.__known__)
        if not (built or (self.__known__ and fits)):
            taken_for_data(self)
        values = (other, self) if how == "r" else (self, other)
        result = JUDGE.request(operation, *values)
        if type(result) is kind and built:
            set_slot(result, "__built__", True)
        elif not (isinstance(result, Handle) or isinstance(other, Handle)):
            JUDGE.refuse(
                f"an object of the code's class {kind.__name__} computes data with the tests' data"
            )
        return result

    return run


def called(self, /, *args, **keywords):
    """A call of an object of the code."""
    value = JUDGE.request("call", self, *args, **keywords)
    of_data = type(self).__class_number__ or self.__number__ in JUDGE.inside
    if type(value) is bool and args and of_data and not self.__built__:
        JUDGE.refuse("an object of the code answers a call as data would")
    return value


def attribute(target, name):
    """An attribute of an object or a class of the code: data, a handle or a method."""
    if name[:2] == "__" and name[-2:] == "__" and name not in VISIBLE:
        raise AttributeError(name)  # numpy would read any address from __array_interface__
    of_data = not target.__built__ and name in JUDGE.of_data
    answers = name.startswith(ASKS) or not target.__known__
    if of_data and isinstance(target, Handle) and name not in type(target).__defined__:
        value = value_of(target)
        if answers and value is not NONE and hasattr(value, name):
            return getattr(value, name)
    if of_data and answers:
        JUDGE.refuse(f"an object of the code is asked .{name} as if it were data")
    value = JUDGE.request("get", target, name)
    if value is METHOD:
        return Method(target, name, of_data)
    return value


OPERATIONS = {  # special method -> what it does for a handle, if the code's class defines it
    "__contains__": contains,
    "__getitem__": get_item,
    "__enter__": enter,
    "__exit__": leave,
    "__aenter__": forwarded("__aenter__"),
    "__aexit__": leave_async,
    "__aiter__": forwarded("__aiter__"),
    "__anext__": forwarded("__anext__"),
    "__call__": called,
}
for op in ("bool", "delitem", "next", "setitem"):
    OPERATIONS[f"__{op}__"] = always(op)
for op in "abs complex float index int invert iter len neg pos reversed round".split():  # noqa: SIM905
    OPERATIONS[f"__{op}__"] = known(op)
for op in ("lt", "le", "gt", "ge"):
    OPERATIONS[f"__{op}__"] = ordered(op)
for op in (*BINARY, "divmod"):
    name = op.strip("_")
    OPERATIONS[f"__{name}__"] = binary(op)
    OPERATIONS[f"__r{name}__"] = binary(op, "r")
    OPERATIONS[f"__i{name}__"] = binary(op, "i")
ATTRIBUTES = {
    "__getattr__": attribute,
    "__setattr__": always("setattr"),
    "__delattr__": always("delattr"),
}
for name, operation in ATTRIBUTES.items():
    setattr(Handle, name, operation)
    setattr(CodeClass, name, operation)
for op in ("dir", "format", "repr", "str"):  # all objects have these
    setattr(Handle, f"__{op}__", always(op))
for op in ("iter", "len", "getitem"):
    setattr(CodeCollection, f"__{op}__", named(op))


def special_methods(defined, hashes, data):
    """The special methods of the stand-in for a class.

    Args:
        defined: names that the class of the code defines, beyond those of ``data``.
        hashes: whether its objects may be hashed.
        data: the builtin type that it derives from; None if it derives from none.
    """
    names = {*defined} if data is None else {*defined, *dir(data)}
    methods = {name: run for name, run in OPERATIONS.items() if name in names}
    if "__len__" in methods:  # an object with a length of 0 is false
        methods["__bool__"] = OPERATIONS["__bool__"]
    if not hashes:
        methods["__hash__"] = None
    return methods


class TypeInData:
    """A builtin type inside data of the code, such as ``[int, str]``: it equals the type, and cannot be called."""

    __slots__ = ("kind",)

    def __init__(self, kind):
        self.kind = kind

    def __eq__(self, other):
        return other is self.kind or (isinstance(other, TypeInData) and other.kind is self.kind)

    def __hash__(self):
        return hash(self.kind)

    def __repr__(self):
        return repr(self.kind)


class Method:
    """A method of an object in the code's process; ``of_data``: the object may stand for data that has it, too."""

    def __init__(self, target, name, of_data):
        self.__self__ = target
        self.__name__ = name
        self._of_data = of_data

    def __call__(self, /, *args, **keywords):
        value = JUDGE.request("method", self.__self__, self.__name__, *args, **keywords)
        if self._of_data and type(value) is bool and (args or keywords):
            JUDGE.refuse(f"an object of the code answers .{self.__name__}() as data would")
        return value


def is_failure(error):
    """Whether an exception is a failure of the tests: their AssertionError, or any exception in an assert."""
    asserts = isinstance(error, AssertionError) or type(error).__name__ == "Failed"  # pytest's
    return hasattr(error, "__in_assert__") or (asserts and not hasattr(error, "__number__"))


def same(a, b):
    """Whether two objects of the code are equal: the code says so, and their attributes are equal."""
    if JUDGE.request("eq", a, b) is not True:
        return False
    pair = (a.__number__, b.__number__)
    if pair in JUDGE.comparing:  # a cycle
        return True
    JUDGE.comparing.append(pair)
    try:
        attributes = JUDGE.request("state", a)
        others = JUDGE.request("state", b)
        if type(a) is not type(b) or not attributes or attributes != others:
            JUDGE.refuse(
                f"the code calls two objects of {type(a).__name__} equal whose attributes do not say so"
            )
    finally:
        JUDGE.comparing.pop()
    return True


class Judge(Wire):
    """The connection to the code's process.

    Attributes:
        gone: why the code no longer answers. Empty if it does.
        unjudged: why there is no verdict. Empty if there is one.
        live: names of the answer whose changing values the tests see.
    """

    def __init__(self, channel, task, namespace):
        global JUDGE
        JUDGE = self
        self.channel = channel
        self.namespace = namespace
        self.source = "\n".join([task["tests"], *task["trusted"]])
        self.entry = task["entry_point"]
        self.bare = {"Solution", *task["functions"]}  # classes that only hold the entry point
        # the code's numbers are the keys
        self.handles = {}
        self.kinds = {}
        self.errors = {}
        self.streams = {}  # generators and coroutines
        self.steps = {}  # id of a stream -> its number
        # the tests' functions, iterators and exceptions; the code has their numbers, which begin with 1
        self.things = []
        self.thing_numbers = {}
        self.comparing = []  # pairs of objects whose attributes are being compared
        self.failed = None  # a failure of the tests inside a call of the code
        self.live = set()
        self.inside = set()  # numbers of functions that came inside data
        self.iterated = {}  # object of an unknown class -> the generator of its values
        self.made = {}  # object -> the arguments of the calls that gave it
        self.level = 0  # number of values around the decoded one
        self.fields = False  # whether one of them has attributes
        self.gone = self.unjudged = ""
        self.lock = RLock()  # the tests may have threads
        self.of_data = OF_TABLES.union(task["methods"])
        for module, names in OF_DATA.items():
            if module == "builtins" or module in self.source:
                for name in names.split():
                    self.of_data.update(dir(getattr(__import__(module), name)))
        self.kind(0, "function", False, True, False, [], "", ["__call__"])

    def refuse(self, reason):
        """Stop the tests, because they cannot be judged."""
        self.unjudged = self.unjudged or reason
        raise Unjudged(self.unjudged)

    def opaque(self, value, depth):
        kind = type(value)
        if kind is TypeInData:
            return ["B", value.kind.__name__]
        if kind is Method:
            return ["m", value.__self__.__number__, value.__name__]
        classes = (CodeClass, ErrorClass)
        if isinstance(value, Handle) or issubclass(kind, classes) or hasattr(value, "__number__"):
            return ["h", value.__number__]
        if isinstance(value, BaseException):
            return self.thrown(value)
        name = getattr(value, "__name__", None)
        if type(name) is str and getattr(builtins, name, None) is value:
            return ["B", name]
        if id(value) in self.steps:
            return ["h", self.steps[id(value)]]
        steps = hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")
        is_function = kind in FUNCTIONS or kind.__name__ in ("method", "partial")
        waits = getattr(getattr(value, "__code__", 0), "co_flags", 0) & COROUTINE
        if waits or not (steps or is_function):
            raise Unsendable(f"a {kind.__name__} of the tests")
        # bound methods are new objects each time
        key = (id(value.__self__), name) if kind.__name__ == "method" else id(value)
        if key not in self.thing_numbers:
            self.things.append(value)
            self.thing_numbers[key] = len(self.things)
        return ["f", self.thing_numbers[key], str(name), steps]

    def thrown(self, error):
        """The JSON of an exception of the tests: its first builtin class, and its arguments if they are plain data."""
        bases = type(error).__mro__
        builtin = next(base for base in bases if vars(builtins).get(base.__name__) is base)
        # the arguments of a failed assert may hold expected values
        args = () if isinstance(error, AssertionError) else error.args
        try:
            args = self.encode(args, 1)
        except Unsendable:
            args = self.encode((str(error),))
        self.things.append(error)
        return ["x", len(self.things), builtin.__name__, args]

    def _decode(self, item):
        fields = self.fields
        self.fields = fields or (type(item) is list and item[0] in FIELDS)
        self.level += 1
        try:
            value = super()._decode(item)
        finally:
            self.level -= 1
            self.fields = fields
        empty = type(value).__name__ == "ndarray" and not value.size
        return _vacuous.guarded(value) if empty else value

    def revive(self, tag, parts):
        if tag == "x":
            return self.exception(*parts)
        if tag in CLASSES:
            kind = CLASSES[tag](self, *parts)
            of_builtin = type(kind) is type and hasattr(kind, "__class_getitem__")
            if self.fields or of_builtin:  # list["any"] is true, and set.union(x) is x
                self.refuse(f"the code gives the class {kind.__name__} instead of data")
            if tag == "T" and self.level > 1:
                return TypeInData(kind)
            return kind
        at = number(parts[0])
        if tag == "f":
            return self.things[at - 1]
        if tag in STREAMS:
            if at not in self.streams:
                self.streams[at] = STREAMS[tag](made_handle(Handle, at))
                self.steps[id(self.streams[at])] = at
            return self.streams[at]
        expect(tag == "h", f"tag {tag!r}")
        if at not in self.handles:
            kind = self.kind(*parts[1:9])
            self.handles[at] = made_handle(kind, at)
            self.fresh = at
        handle = self.handles[at]
        kind = type(handle)
        if "__call__" in vars(kind):
            inside = self.level > 1
            if self.fields or (inside and kind.__class_number__):
                self.refuse("the code gives a container with what can be called")
            if inside:
                self.inside.add(at)
        set_slot(handle, "__built__", False)  # an object that the code sends may stand for data
        if parts[9:]:
            set_slot(handle, "__value__", self._decode(parts[9]))
            expect(type(handle.__value__) is kind.__data__, "no value")
        return handle

    def kind(self, at, name, compares, hashes, has_items, bases, data, defined):
        """The stand-in for a class of the code."""
        if number(at) not in self.kinds:
            data = next((kind for kind in VALUES if kind.__name__ == data), None)
            defined = frozenset(map(text, defined))
            namespace = {
                "__slots__": (),
                "__doc__": vars(Handle)["__doc__"],
                "__module__": "solution",
                "__class_number__": at,
                "__open__": None,
                "__compares__": compares,
                "__lineage__": {at, *map(number, bases)},
                "__data__": data,
                "__defined__": defined,
                **special_methods(defined, hashes, data),
            }
            if data is not None:
                namespace["__class__"] = property(lambda self: data)
            meta = CodeCollection if has_items else CodeClass
            self.kinds[at] = type.__new__(meta, text(name), (Handle,), namespace)
        return self.kinds[at]

    def exception_class(self, names):
        """The library's exception class in a lineage, or a stand-in for the code's class."""
        module = text(names[0][0])
        name = text(names[0][1])
        at = number(names[0][2])
        if module.split(".")[0] in LIBRARIES:
            kind = vars(sys.modules.get(module, builtins)).get(name)
            is_error = isinstance(kind, type) and issubclass(kind, BaseException)
            if is_error and kind.__module__ == module:
                return kind
        if at not in self.errors:
            base = self.exception_class(names[1:]) if names[1:] else Exception
            namespace = {
                "__module__": "solution",
                "__class_number__": at,
                "__built__": False,
                "__known__": False,
                "__getattr__": attribute,
                "__str__": lambda error: error.__dict__.get("__says__", ""),
            }
            self.errors[at] = type.__new__(ErrorClass, name, (base,), namespace)
        return self.errors[at]

    def exception(self, names, at, says, args, attributes, cause):
        """An exception of the code."""
        kind = self.exception_class(names)
        args = self._decode(args)
        try:
            error = type.__call__(kind, *args)
        except Exception:
            error = kind.__new__(kind, text(says))
            error.args = tuple(args)
        for attribute_name, value in self._decode(attributes).items():
            if text(attribute_name)[:2] != "__":
                error.__dict__[attribute_name] = value
        error.__dict__.update(__says__=text(says), __number__=number(at))
        error.__cause__ = self._decode(cause)
        return error

    def greeted(self):
        """Wait until the program has started."""
        expect("hello" in self.channel.receive(), "no greeting")

    def loaded(self):
        """Wait until the code is loaded; the exception that it raised, or None."""
        reply = self.channel.receive()
        if reply.get("ready") is True:
            return None
        return self.decode(reply.get("x"))

    def names(self, names):
        """name -> value, for the names that the code defines; opens classes that the tests mention."""
        given = self.request("names", *names)
        defined = {name: given[name] for name in names if name in given}
        for name, value in defined.items():
            if not isinstance(value, CodeClass):
                continue
            opened = value.__open__ or ""
            if name.lstrip("_")[:1].isupper():
                if name in self.bare:
                    opened = "functions"
                elif self.is_class(name):
                    opened = "objects"
            type.__setattr__(value, "__open__", opened)
        return defined

    def is_class(self, name):
        """Whether the tests use a name as a class: they keep, combine or iterate over its objects, or use its names."""
        name = f"(?:{name}|candidate)" if name == self.entry else name
        uses = (rf"= *{name}\(|\b{name}\.|with {name}\(|, *{name}\b|raises\({name}\b|\b{name}\(\)|"
                rf"\b{name}\([^()]*\) *\W+ *{name}\(|\bfor [\w, ()]+ in {name}\(|"
                rf"\b(?:list|tuple|set|sorted|sum|max|min|iter|next|enumerate|zip)\({name}\(")  # fmt: skip
        made = re.findall(rf"\b{name}\([^()]*\)\.(\w+)", self.source)
        return re.search(uses, self.source) or not self.of_data.issuperset(made)

    def request(self, op, /, *args, **keywords):
        """Have the code's process do an operation; returns or raises what that does.

        Its own parameters are positional only, since the code's functions may have keywords of these names.
        """
        with self.lock:
            if self.gone:
                raise CodeEnded(self.gone)
            both = [*args, *keywords.values()]
            try:
                writable = any(map(mutable, both))
                message = {"op": op, **self.encode_call(args, keywords), "w": writable}
                returned, error = self.result(op, self.exchange(message), both)
            except Unsendable as problem:
                self.refuse(f"the tests give the code {problem}")
            except Closed:
                self.end("the program ended during the tests")
            except NONSENSE as problem:
                self.end(f"the program sent nonsense: {problem!r}")
            failed, self.failed = self.failed, None
            if failed or error:  # a failed assert takes precedence over the code's reaction to it
                raise failed or error
            return returned

    def exchange(self, message):
        """Send a request and return its reply; meanwhile the code may call functions of the tests."""
        self.channel.send(message)
        while True:
            reply = self.channel.receive()
            self.show(reply)
            if "op" not in reply:
                return reply
            self.channel.send(self.serve(reply))

    def end(self, reason):
        """Stop the tests, because the code no longer answers."""
        self.gone = reason
        raise CodeEnded(reason) from None

    def result(self, op, reply, both):
        """The value and the exception in a reply; None for the one that it lacks."""
        if "unjudged" in reply:
            self.refuse(text(reply["unjudged"])[:300])
        for index, now in reply["changed"]:
            rewrite(both[number(index)], self.decode(now))
        for name, now in reply["globals"]:
            if name in self.live:
                value = self.decode(now)
                if not (callable(value) or isinstance(value, Handle)):
                    self.namespace[name] = value
        if "x" in reply:
            return None, self.raised(op, self.decode(reply["x"]))
        answer = reply["ok"]
        if op == "names":
            return {text(name): self.decode(value) for name, value in answer}, None
        if op == "get" and answer == ["m"]:
            return METHOD, None
        if type(answer) is list and answer[0] == "a":  # a container of the tests
            expect(mutable(both[number(answer[1])]), "no container")
            return both[answer[1]], None
        return self.decode(answer), None

    def raised(self, op, error):
        """The exception to raise for one of the code."""
        expect(isinstance(error, BaseException), "no exception")
        names = set()
        for kind in type(error).__mro__:
            if kind.__module__ in ("builtins", "asyncio.exceptions"):
                names.add(kind.__name__)
        general = {"object", "BaseException", "Exception"}
        expected = any(name in self.source for name in names - general)
        if not isinstance(error, Exception) and not expected:
            self.gone = f"the code raised {type(error).__name__}: {str(error)[:300]}"
            return CodeEnded(self.gone)
        if op not in STEPS and names & STOPS and not expected:  # it would end a loop of the tests
            failure = RuntimeError(f"the code raised {type(error).__name__}")
            failure.__number__ = getattr(error, "__number__", 0)
            return failure
        return error

    def show(self, reply):
        """Print the code's output here, where the tests may have redirected stdout."""
        for name in {"stdout", "stderr"} & reply.keys():
            getattr(sys, name).write(text(reply[name]))

    def serve(self, request):
        """Call a function of the tests for the code, or advance an iterator; the answer."""
        try:
            args, keywords = self.decode_call(request)
            thing = self.things[number(request["f"]) - 1]
            value = next(thing) if request["op"] == "next" else thing(*args, **keywords)
            return {"ok": self.encode(value)}
        except Unsendable as error:
            self.refuse(f"the tests give the code {error}")
        except Malformed:
            raise
        except Exception as error:
            if is_failure(error):
                self.failed = self.failed or error
            return {"x": self.encode(error)}


def made_handle(kind, at):
    handle = object.__new__(kind)
    set_slot(handle, "__number__", at)
    return handle


def rewrite(old, new):
    """Replace the content of a container of the tests by the content of the code's copy."""
    if type(old) is not type(new):
        return
    if hasattr(old, "dtype"):
        old[...] = new
    elif hasattr(old, "clear"):
        old.clear()
        if hasattr(old, "update"):
            old.update(new)
        else:
            old.extend(new)
    else:
        old[:] = new  # an array.array


def generator(handle):
    """The values of an iterator of the code, which runs on demand."""
    step = ["next", handle]
    while True:
        try:
            item = JUDGE.request(*step)
        except StopIteration as stop:
            return stop.args[0] if stop.args else None
        try:
            sent = yield item
            step = ["next", handle] if sent is None else ["send", handle, sent]
        except Exception as error:  # the tests' throw() gave it
            step = ["throw", handle, error]


async def coroutine(handle):
    """The result of an awaitable of the code, which runs when the tests await it."""
    return JUDGE.request("await", handle)


async def asynchronous(handle):
    """The values of an asynchronous generator of the code, which runs on demand."""
    while True:
        try:
            item = JUDGE.request("anext", handle)
        except StopAsyncIteration:
            return
        yield item


CLASSES = {
    "k": Judge.kind,
    "X": Judge.exception_class,
    "T": lambda judge, name: _messages.FACTORIES[name],
}
STREAMS = {"y": generator, "w": coroutine, "g": asynchronous}
