"""The tests' side of the boundary: handles on the code's objects, and what they may do.

The rule: from the code come plain data of exact library types, and handles. No class or module of the code is a value,
and no function is one inside of data. A handle stands for an object in the code's process; every operation on it runs
there and gives plain data or a handle again. Four things follow, which this file keeps:

- A handle that the tests did not make, by calling a class, may stand in the place of data. It never answers yes or no
  by a name that data has too: whether it starts with, contains or equals something. One whose class the tests do not
  know by name has no such name at all, no length, no items and no arithmetic, and none inside of data can be called.
- A handle is never compared with the tests' data, nor computed with it: its class would get the expected value.
- Two handles are equal if the code says so and their attributes are equal.
- An assert of the tests that fails stays a failure, whatever code it passes through.

What does not fit is ``Unjudged``; PythonTests turns that into a verdict. Exceptions arrive as the library's, or as
classes of this file with the name of the code's class.
"""

import builtins
import contextlib
import operator
import re
import sys
import weakref
from _thread import RLock

from _wire import BINARY, FUNCTIONS, IN_PLACE, Closed, Malformed, Unsendable, Wire, mutable, number, text

VISIBLE = {"__name__", "__qualname__", "__dict__", "__members__"}
LIBRARIES = {*sys.stdlib_module_names, "numpy", "pandas", "__main__"} - {"unittest", "doctest"}  # exceptions cross
STOPS = {"StopIteration", "StopAsyncIteration"}
STEPS = ("next", "send", "throw", "await", "anext")
OF_DATA = {  # types whose names data has, in modules that may not be loaded
    "builtins": "str bytes bytearray list tuple dict set frozenset int float complex range",
    **{"collections": "deque", "datetime": "date datetime timedelta", "decimal": "Decimal", "fractions": "Fraction"},
    **{"pathlib": "PurePath", "numpy": "ndarray", "pandas": "DataFrame Series"},
}
OF_TABLES = {"all", "any", "equals", "isin", "isna", "isnull", "notna", "notnull", "between"}
ASKS = ("is", "startswith", "endswith", "any", "all", "equals", "not", "match", "between", "exists")
FORWARDED = ("bool", "delattr", "delitem", "dir", "format", "next", "repr", "setattr", "setitem", "str")
METHOD = object()  # an attribute that is a method
JUDGE = None  # the connection of this process


class Unjudged(BaseException):
    """The tests or the answer do what cannot be judged. Not an Exception, so that tests do not catch it."""


class Gone(BaseException):
    """The code's process has ended or sent nonsense. Not an Exception, so that tests do not catch it."""


class CodeClass(type):
    """The type of the stand-ins for the code's classes; their instances are handles.

    ``__open__``: what the class is to tests that know its name: it makes ``objects``, or only holds ``functions``.
    """

    __built__ = __known__ = property(lambda cls: bool(cls.__open__))
    __number__ = property(lambda cls: cls.__class_number__)

    def __new__(meta, name, bases, namespace):
        JUDGE.refuse(f"a class of the tests inherits from the code's {bases[-1].__name__}")

    def __call__(cls, *args, **keywords):
        value = JUDGE.request("call", cls, *args, **keywords)
        if cls.__open__ and isinstance(value, Handle):
            set_slot(value, "__built__", True)
            JUDGE.made.setdefault(value.__number__, set()).add(repr((args, keywords)))
        return value

    def __instancecheck__(cls, value):
        kind = type(value)
        if type(kind) is CodeClass:
            return cls.__class_number__ in kind.__lineage__
        return isinstance(value, tuple) and hasattr(kind, "_fields") and kind.__name__ == cls.__name__

    def __subclasscheck__(cls, kind):
        return type(kind) is CodeClass and cls.__class_number__ in kind.__lineage__

    def __contains__(cls, item):
        return item in list(cls)

    def __bool__(cls):
        return True


class ErrorClass(type):
    """The type of the stand-ins for the code's exception classes."""

    __number__ = property(lambda cls: cls.__class_number__)

    def __call__(cls, *args, **keywords):
        return JUDGE.request("call", cls, *args, **keywords)


class Handle:
    """An object in the code's process; ``__built__``: the tests made it by calling its class."""

    __slots__ = ("__built__", "__number__", "__weakref__")
    __known__ = property(lambda self: self.__built__ or type(self).__open__ == "objects")
    __doc__ = property(lambda self: JUDGE.request("get", self, "__doc__"))  # type: ignore[assignment,attr-defined]

    def __eq__(self, other):
        kind = type(self)
        if self is other:
            if len(JUDGE.made.get(self.__number__, ())) > 1:
                JUDGE.refuse(f"the code gives one object of {kind.__name__} for different arguments")
            return True
        if isinstance(other, Handle):
            return same(self, other)
        if kind.__compares__ == "data":
            return plain(self) == other
        if kind.__compares__ == "own" and other is not None:
            plain(self)
        return NotImplemented

    def __hash__(self):
        return hash(self.__number__) if type(self).__compares__ == "object" else JUDGE.request("hash", self)

    def __contains__(self, item):
        if isinstance(item, Handle) or self.__built__:
            return JUDGE.request("contains", self, item)
        return item in plain(self)

    def __getitem__(self, key):
        if not self.__known__:
            value = plain(self)
            if type(value) is not dict or key in value:  # others are __missing__'s
                return value[key]
        return JUDGE.request("getitem", self, key)

    def __enter__(self):
        built, found = self.__built__, JUDGE.request("method", self, "__enter__")
        set_slot(self, "__built__", built)  # also if it gives itself
        return found

    def __exit__(self, kind, error, trace):
        if not failed_here(error, trace):
            return JUDGE.request("method", self, "__exit__", kind, error, None)
        with contextlib.suppress(Exception):
            JUDGE.request("method", self, "__exit__", AssertionError, AssertionError(), None)
        return False

    async def __aenter__(self):
        return await JUDGE.request("method", self, "__aenter__")

    async def __aexit__(self, kind, error, trace):
        sent = (AssertionError, AssertionError()) if failed_here(error, trace) else (kind, error)
        return await JUDGE.request("method", self, "__aexit__", *sent, None) and sent[1] is error

    def __deepcopy__(self, memo):
        return JUDGE.request("copy", self, True)

    def __reduce_ex__(self, protocol):
        JUDGE.refuse("the tests pickle an object of the code")


def set_slot(value, name, content):
    """Set what this side knows of a handle."""
    object.__setattr__(value, name, content)


def _forwarded(op, *more):
    return lambda self, *args: JUDGE.request(op, self, *more, *args)


def _of_data(op, convert):
    """An operation of data; of an object whose class the tests do not know, on its value as a builtin alone."""
    return lambda self, *args: JUDGE.request(op, self, *args) if self.__known__ else convert(plain(self), *args)


def _ordered(op):
    def compare(self, other):
        if both_known(self, other):
            return JUDGE.request(op, self, other)
        return getattr(operator, op)(plain(self), value_of(other))

    return compare


def _binary(op, reflected=False):
    def compute(self, other):
        if not (self.__built__ or both_known(self, other)):
            pair = (plain(self), value_of(other))
            return getattr(operator, op, divmod)(*(reversed(pair) if reflected else pair))
        found = JUDGE.request(op, *((other, self) if reflected else (self, other)))
        if type(found) is type(self) and self.__built__:
            set_slot(found, "__built__", True)
        elif not (isinstance(found, Handle) or isinstance(other, Handle) or type(self).__compares__ == "data"):
            JUDGE.refuse(f"an object of the code's class {type(self).__name__} computes data with the tests' data")
        return found

    return compute


def both_known(a, b):
    """Whether two values are objects of classes that the tests know."""
    return isinstance(b, Handle) and a.__known__ and b.__known__


def value_of(other):
    """A value as data."""
    return plain(other) if isinstance(other, Handle) else other


def _called(self, *args, **keywords):
    value = JUDGE.request("call", self, *args, **keywords)
    if type(value) is bool and args and type(self).__class_number__ and not self.__built__:
        JUDGE.refuse("an object of the code answers a call in the place of data")
    return value


def _attribute(target, name):
    if name[:2] == "__" and name[-2:] == "__" and name not in VISIBLE:
        raise AttributeError(name)  # numpy would read any address from __array_interface__
    of_data = not target.__built__ and name in JUDGE.of_data
    if of_data and (name.startswith(ASKS) or not target.__known__):
        JUDGE.refuse(f"an object of the code is asked .{name} in the place of data")
    value = JUDGE.request("get", target, name)
    return Method(target, name, of_data) if value is METHOD else value


def _install():
    """Give handles and stand-ins for classes their operators."""
    methods = {"__getattr__": _attribute, "__copy__": _forwarded("copy", False), "__anext__": _forwarded("anext")}
    methods |= {"__aiter__": _forwarded("method", "__aiter__"), "__index__": _of_data("index", operator.index)}
    for op in FORWARDED:
        methods[f"__{op}__"] = _forwarded(op)
    for op in ("abs", "complex", "float", "int", "iter", "len", "reversed", "round", "neg", "pos", "invert"):
        methods[f"__{op}__"] = _of_data(op, getattr(operator, op, None) or getattr(builtins, op))
    for op in ("lt", "le", "gt", "ge"):
        methods[f"__{op}__"] = _ordered(op)
    for op in (*BINARY, *IN_PLACE, "divmod"):
        methods[f"__{op.strip('_')}__"] = _binary(op)
        if op not in IN_PLACE:
            methods[f"__r{op.strip('_')}__"] = _binary(op, True)
    for name, method in methods.items():
        setattr(Handle, name, method)
    for name in ("__getattr__", "__setattr__", "__delattr__"):
        setattr(CodeClass, name, methods[name])
    for op in ("iter", "len", "getitem"):
        setattr(CodeClass, f"__{op}__", _forwarded(op))


_install()


class Method:
    """A method of an object in the code's process; ``of_data``: the object may stand for data that has it, too."""

    def __init__(self, target, name, of_data):
        self.__self__, self.__name__, self._of_data = target, name, of_data

    def __call__(self, *args, **keywords):
        value = JUDGE.request("method", self.__self__, self.__name__, *args, **keywords)
        if self._of_data and type(value) is bool and (args or keywords):
            JUDGE.refuse(f"an object of the code answers .{self.__name__}() in the place of data")
        return value


def failed_here(error, trace):
    """Whether an exception is a failure of the tests: an AssertionError of theirs, or one inside of an assert."""
    if (isinstance(error, AssertionError) or type(error).__name__ == "Failed") and not hasattr(error, "__number__"):
        return True  # Failed is pytest's
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "tests" and trace.tb_lineno in JUDGE.asserts:
            return True
        trace = trace.tb_next
    return False


def plain(handle):
    """The value of an object whose class derives from a builtin type."""
    kind = type(handle)
    if kind.__compares__ != "data":
        JUDGE.refuse(f"an object of the code's class {kind.__name__} is taken for data")
    if handle.__known__:
        return JUDGE.request("plain", handle)
    if handle.__number__ not in JUDGE.plain:  # one value, however often the tests look
        JUDGE.plain[handle.__number__] = JUDGE.request("plain", handle)
    return JUDGE.plain[handle.__number__]


def same(a, b):
    """Whether two objects of the code are equal: the code says so, and their attributes are equal."""
    if type(a).__compares__ == type(b).__compares__ == "data":
        return plain(a) == plain(b)
    if JUDGE.request("eq", a, b) is not True:
        return False
    pair = a.__number__, b.__number__
    if pair in JUDGE.comparing:  # parts that refer to each other
        return True
    JUDGE.comparing.append(pair)
    try:
        mine, other = JUDGE.request("state", a), JUDGE.request("state", b)
        if type(a) is not type(b) or not mine or mine != other:
            JUDGE.refuse(f"the code calls two objects of {type(a).__name__} equal whose attributes do not say so")
    finally:
        JUDGE.comparing.pop()
    return True


class Judge(Wire):
    """The connection to the code's process.

    Args:
        channel: to the code.
        task: what the verifier sent.
        namespace: of the tests.

    Attributes:
        gone: why the code can no longer be asked.
        unjudged: why there is no verdict.
        asserts: the lines of the tests' asserts.
    """

    def __init__(self, channel, task, namespace):
        global JUDGE
        JUDGE = self
        self.channel, self.namespace = channel, namespace
        self.source = "\n".join([task["tests"], *task["trusted"]])
        self.of_setup, self.bare = task["methods"], {"Solution", *task["functions"]}
        self.entry = task["entry_point"]
        self.handles, self.kinds, self.errors = {}, {}, {}
        self.things, self.thing_numbers = [], {}  # of the tests, that the code knows by number
        self.live, self.dropped = weakref.WeakKeyDictionary(), []  # generators and coroutines
        self.comparing, self.failed, self.named = [], None, set()
        self.made, self.plain, self.asserts = {}, {}, set()  # made: objects -> arguments of the calls that gave them
        self.level, self.allowed = 0, ""  # of the value that is decoded: in how many others, and the tags it may have
        self.gone = self.unjudged = ""
        self.lock = RLock()  # the tests may have threads
        self.kind(0, "function", "object", True, [])

    def refuse(self, reason):
        """Stop the tests, because they cannot be judged."""
        self.unjudged = self.unjudged or reason
        raise Unjudged(self.unjudged)

    @property
    def of_data(self):
        """The names that data has, and the methods of the set-up's classes, whose objects live with the code."""
        if not hasattr(self, "_of_data"):
            used = [m for m in OF_DATA if m == "builtins" or (m in self.source and m in sys.modules)]
            kinds = [getattr(sys.modules[module], name) for module in used for name in OF_DATA[module].split()]
            self._of_data = OF_TABLES.union(self.of_setup, *map(dir, kinds))
        return self._of_data

    # values

    def opaque(self, value, depth):
        kind = type(value)
        if kind is Method:
            return ["m", value.__self__.__number__, value.__name__]
        if isinstance(value, Handle) or kind in (CodeClass, ErrorClass):
            return ["h", value.__number__]
        if isinstance(value, BaseException):
            return self.thrown(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["X", lineage(value)]
        name = getattr(value, "__name__", None)
        if type(name) is str and getattr(builtins, name, None) is value:
            return ["B", name]
        if kind is type(sys):
            raise Unsendable(f"the module {name} of the tests")
        if kind.__name__ in ("generator", "coroutine", "async_generator") and value in self.live:
            return ["h", self.live[value]]
        how = "object"
        if hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools"):
            how = "iterator"
        elif kind in FUNCTIONS or kind.__name__ in ("method", "partial"):
            how = "coroutine" if getattr(getattr(value, "__code__", 0), "co_flags", 0) & 0x80 else "function"
        key = (id(value.__self__), name) if kind.__name__ == "method" else id(value)  # made anew for each look
        if key not in self.thing_numbers:
            self.things.append(value)
            self.thing_numbers[key] = len(self.things)
        return ["f", self.thing_numbers[key], str(name), how]

    def thrown(self, error):
        """The JSON of an exception for the code."""
        if hasattr(error, "__number__"):
            return ["h", error.__number__]
        try:
            args = self.encode(list(error.args), 1)
        except Unsendable:
            args = ["l", [str(error)]]
        self.things.append(error)
        return ["x", lineage(type(error)), args, len(self.things)]

    def decode(self, item, allowed=""):
        """JSON as a value; ``allowed``: tags that it may have itself: a class's, an exception class's, a method's."""
        before, self.level, self.allowed = (self.level, self.allowed), 0, allowed
        try:
            return super().decode(item)
        finally:
            self.level, self.allowed = before

    def _decode(self, item):
        self.level += 1
        try:
            return super()._decode(item)
        finally:
            self.level -= 1

    def revive(self, tag, parts):
        if tag in ("k", "X", "m") and (self.level > 1 or tag not in self.allowed):
            self.refuse("the code gives a class")
        if tag == "m":
            return METHOD
        if tag == "X":
            return self.exception_class(parts[0])
        at = number(parts[0]) if tag != "x" else 0
        if tag == "f":
            found = self.things[at - 1]
            if type(found).__module__ == "unittest.mock":
                self.refuse("the code gives back a mock of the tests, which agrees with everything")
            return found
        if tag in ("x", "k"):
            return (self.exception if tag == "x" else self.kind)(*parts)
        if tag in LIVE:
            found = next((each for each, n in self.live.items() if n == at), None) or LIVE[tag](at)
            self.live[found] = at
            return found
        if tag != "h":
            raise Malformed(f"tag {tag!r}")
        if at not in self.handles:
            self.handles[at] = made_handle(self.kind(*parts[1:]), at)
        if self.level > 1 and "__call__" in vars(type(self.handles[at])):
            self.refuse("the code gives a container with what can be called")
        set_slot(self.handles[at], "__built__", False)  # what comes back may stand in the place of data
        return self.handles[at]

    def kind(self, at, name, compares, calls, bases):
        """The stand-in for a class of the code."""
        if number(at) not in self.kinds:
            self.kinds[at] = type.__new__(CodeClass, text(name), (Handle,), {
                "__slots__": (), "__doc__": vars(Handle)["__doc__"], "__module__": "solution", "__class_number__": at,
                "__open__": "", "__compares__": text(compares), "__lineage__": {at, *map(number, bases)},
                **({"__call__": _called} if calls else {})})  # fmt: skip
        return self.kinds[at]

    def exception_class(self, names):
        """The library's exception class of that lineage, or a stand-in for the code's."""
        module, name, at = text(names[0][0]), text(names[0][1]), number(names[0][2])
        if module.split(".")[0] in LIBRARIES:
            found = vars(sys.modules.get(module, builtins)).get(name)
            if isinstance(found, type) and issubclass(found, BaseException) and found.__module__ == module:
                return found
        if at not in self.errors:
            base = self.exception_class(names[1:]) if names[1:] else Exception
            self.errors[at] = type.__new__(ErrorClass, name, (base,), {
                "__module__": "solution", "__class_number__": at, "__built__": False, "__known__": False,
                "__getattr__": _attribute, "__str__": lambda error: error.__dict__.get("__says__", "")})  # fmt: skip
        return self.errors[at]

    def exception(self, names, at, says, args, attributes, cause):
        """An exception of the code."""
        kind, args = self.exception_class(names), self._decode(args)
        try:
            error = type.__call__(kind, *args)
        except Exception:
            error = kind.__new__(kind, text(says))
            error.args = tuple(args)
        error.__dict__.update({text(n): self._decode(v) for n, v in attributes if n[:2] != "__"})
        error.__dict__.update(__says__=text(says), __number__=number(at))
        error.__cause__ = None if cause is None else self._decode(cause)
        return error

    def arrived(self, array):
        """An array of the code; one without elements does not compare with values."""
        return array if array.size else sys.modules["_tables"].guarded(array)

    # messages

    def names(self, names):
        """The values of those names that the code defines; a class with a capital letter is known by its name."""
        try:
            found = self.request("names", *names)
        except Exception as error:
            self.gone = f"the program does not tell its names: {error!r:.100}"
            raise Gone(self.gone) from None
        found = {name: found[name] for name in names if name in found}
        for name, value in found.items():
            named = type(value) is CodeClass and name.lstrip("_")[:1].isupper()
            if named and (name in self.bare or self.is_class(name)):
                type.__setattr__(value, "__open__", "functions" if name in self.bare else "objects")
        return found

    def is_class(self, name):
        """Whether the tests take a name for a class: they keep, name or combine what it makes."""
        name = f"(?:{name}|candidate)" if name == self.entry else name
        patterns = (
            r"= *{0}\(",
            r"\b{0}\.",
            r"with {0}\(",
            r", *{0}\b",
            r"raises\({0}\b",
            r"\b{0}\(\)",
            r"\b{0}\([^()]*\) *\W+ *{0}\(",
        )
        made = re.findall(rf"\b{name}\([^()]*\)\.(\w+)", self.source)
        return any(re.search(p.format(name), self.source) for p in patterns) or not self.of_data.issuperset(made)

    def request(self, op, *args, **keywords):
        """Have the code's process do an operation: what it returns, or raises what it raises."""
        with self.lock:
            if self.gone:
                raise Gone(self.gone)
            while self.dropped and op != "close":
                with contextlib.suppress(Exception):
                    self.request("close", self.dropped.pop())
            both = [*args, *keywords.values()]
            try:
                encoded = [self.encode(value) for value in both]
                named = [[name, encoded[len(args) + place]] for place, name in enumerate(keywords)]
                self.channel.send({"op": op, "a": encoded[: len(args)], "k": named, "w": any(map(mutable, both))})
                while "op" in (reply := self.channel.receive()):
                    self.show(reply)
                    self.channel.send(self.serve(reply))
                self.show(reply)
                found, error = self.result(op, reply, both)
            except Unsendable as problem:
                self.refuse(f"the tests give the code {problem}")
            except (Closed, Malformed, LookupError, TypeError, ValueError, AttributeError, RecursionError) as problem:
                ended = isinstance(problem, Closed)
                self.gone = "the program ended during the tests" if ended else f"the program sent nonsense: {problem!r}"
                raise Gone(self.gone) from None
            failed, self.failed = self.failed, None
            if failed is not None:
                raise failed  # a failed assert, whatever the code made of it
            if error is not None:
                raise error
            return found

    def result(self, op, reply, both):
        """What a reply says: a value, and the exception to raise if the code raised one."""
        if "unjudged" in reply:
            self.refuse(text(reply["unjudged"])[:300])
        for place, now in reply["changed"]:
            rewrite(both[number(place)], self.decode(now))
        for name, now in reply["globals"]:
            if name in self.named and not isinstance(value := self.decode(now), Handle):
                self.namespace[name] = value
        if "x" in reply:
            return None, self.raised(op, self.decode(reply["x"]))
        found = reply["ok"]
        if op == "names":
            return {text(name): self.decode(value, "kX") for name, value in found}, None
        if type(found) is list and found[0] == "a":  # a container of the tests
            if not mutable(both[number(found[1])]):
                raise Malformed("no container")
            return both[found[1]], None
        return self.decode(found, "m" if op == "get" else ""), None

    def raised(self, op, error):
        """The exception to raise for one of the code."""
        if not isinstance(error, BaseException):
            raise Malformed("no exception")
        names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__ in ("builtins", "asyncio.exceptions")}
        expected = any(name in self.source for name in names - {"object", "BaseException", "Exception"})
        if not isinstance(error, Exception) and not expected:
            self.gone = f"the code raised {type(error).__name__}: {str(error)[:300]}"
            return Gone(self.gone)
        if op not in STEPS and names & STOPS and not expected:  # it would end a loop of the tests, which passes
            return RuntimeError(f"the code raised {type(error).__name__}")
        return error

    def show(self, reply):
        """Print what the code has printed, where the tests may have redirected it."""
        for name in {"stdout", "stderr"} & reply.keys():
            getattr(sys, name).write(text(reply[name]))

    def serve(self, request):
        """Use for the code what the tests have; what to answer."""
        try:
            args = [self.decode(arg) for arg in request["a"]]
            keywords = {text(name): self.decode(value) for name, value in request["k"]}
            return {"ok": self.encode(self.serving(request["op"], request["f"], args, keywords))}
        except Unsendable as error:
            self.refuse(f"the tests give the code {error}")
        except Malformed:
            raise
        except Exception as error:
            if not failed_here(error, None):
                return {"x": self.thrown(error)}
            self.failed = self.failed or error
            return {"x": self.thrown(AssertionError())}  # its text may hold what the tests expect

    def serving(self, op, at, args, keywords):
        """Call a function or method of the tests, advance one of their iterators, or read their input."""
        if op in ("input", "read", "readline"):
            return builtins.input(*args) if op == "input" else getattr(sys.stdin, op)(*args)
        thing = self.things[number(at) - 1]
        if op == "next":
            return next(thing)
        if op in ("attribute", "method"):
            name, of_mocks = text(args[0]), getattr(sys.modules.get("unittest.mock"), "Mock", object)
            if (
                name[:1] == "_"
                or type(thing).__module__ not in ("__main__", "unittest.mock")
                or hasattr(of_mocks, name)
            ):
                self.refuse(f"the code reads .{name[:100]} of an object of the tests")
            found = getattr(thing, name)
            if op == "attribute":
                return (True, None) if callable(found) else (False, found)
            thing, args = found, args[1:]
        return finished(thing(*args, **keywords), self.lock)


def lineage(kind):
    """Module and name of an exception class of the tests and of its bases, up to the first builtin."""
    names = [(base.__module__, base.__name__) for base in kind.__mro__ if issubclass(base, BaseException)]
    return names[: 1 + [module for module, _ in names].index("builtins")]


def made_handle(kind, at):
    """A new handle on the object of that number."""
    handle = object.__new__(kind)
    set_slot(handle, "__number__", at)
    return handle


def rewrite(old, new):
    """Give a container of the tests the content that the code left in it; inner containers stay the same objects."""
    if type(old) is not type(new):
        return
    if hasattr(old, "dtype"):
        old[...] = new
    elif isinstance(old, (dict, set)):
        found = {key: inner(old.get(key), new[key]) for key in new} if isinstance(old, dict) else new
        old.clear()
        old.update(found)
    else:
        found = [inner(before, value) for before, value in zip([*old, *[None] * len(new)], new)]  # noqa: B905
        while len(old):
            old.pop()
        old.extend(found)


def inner(before, value):
    """The container ``before`` with the content of ``value``, or ``value``."""
    if type(before) is not type(value) or not mutable(value):
        return value
    rewrite(before, value)
    return before


# generators and coroutines of the code: real ones here, which ask for each step


def generator(at):
    """The values of an iterator of the code."""
    op, ref = "next", made_handle(Handle, at)
    args = (ref,)
    while True:
        try:
            item = JUDGE.request(op, *args)
        except StopIteration as stop:
            return stop.args[0] if stop.args else None
        try:
            sent = yield item
        except GeneratorExit:  # it may come while the code is being asked, so it waits
            JUDGE.dropped.append(ref)
            raise
        except BaseException as error:
            op, args = "throw", (ref, error)
        else:
            op, args = ("next", (ref,)) if sent is None else ("send", (ref, sent))


async def coroutine(at):
    """The result of an awaitable of the code, which runs to its end when the tests await it."""
    return JUDGE.request("await", made_handle(Handle, at))


async def async_generator(at):
    """The values of an asynchronous iterator of the code."""
    while True:
        try:
            item = JUDGE.request("anext", made_handle(Handle, at))
        except StopAsyncIteration:
            return
        yield item


LIVE = {"y": generator, "w": coroutine, "ay": async_generator}


def finished(value, lock):
    """``value``; of a coroutine of the tests its result, which another thread computes while the code waits."""
    if type(value).__name__ != "coroutine":
        return value
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    held = lock._release_save()
    try:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, value).result()
    finally:
        lock._acquire_restore(held)
