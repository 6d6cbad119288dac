"""The tests' view of the program's functions, classes and objects: handles, which the program fills with life.

A handle is *open* where the tests take a name for a class: then its operators and methods ask the program. A handle
that comes as the result of a function is closed: it can be passed on, compared with other handles and asked for
attributes that no data has; taking it for data refuses the judgement. No handle ever judges the tests' values. This
runs inside the judge's sandbox.
"""

from _roles import METHODS, PREDICATES

VISIBLE = {"__name__", "__qualname__", "__module__", "__doc__", "__dict__", "__annotations__", "__members__",
           "__dataclass_fields__", "__mro__", "__defaults__", "__wrapped__"}  # fmt: skip
SCALARS = (int, float, str, bool, bytes, type(None))
HINT = "; `isolation: same_process` can judge it"


class Unjudged(BaseException):
    """The tests do what cannot be judged across the boundary. Not an Exception, so that tests do not catch it."""


class State:
    """What the judge knows of an object of the program.

    Attributes:
        number: the program's number of the object.
        open: the tests may use it as an object.
        built: the tests made it by calling its class.
        bare: its class only holds functions; their results are data.
        tainted: the program computed it from data of the tests; its value as a number could be what they want.
        cache: answers of operations that change nothing, until the next one that may.
    """

    __slots__ = ("bare", "built", "cache", "epoch", "number", "open", "tainted")

    def __init__(self, number, is_open):
        self.number, self.open = number, is_open
        self.built = self.bare = self.tainted = False
        self.epoch, self.cache = -1, {}


class Remote(type):
    """The type of the program's classes. ``_record`` describes the class, ``_wire`` is its :class:`State`."""

    def __new__(meta, name, bases, namespace, **keywords):
        if "_record" not in namespace:
            Handle._judge.refuse(f"a class of the tests inherits from the code's {bases[-1].__name__}{HINT}")
        return super().__new__(meta, name, bases, namespace)

    def __init__(cls, name, bases, namespace, **keywords):
        super().__init__(name, bases, namespace)

    @property
    def _wire(cls):
        return cls.__dict__["_state"]

    @property
    def _judge(cls):
        return Handle.__dict__["_judge"]

    def __call__(cls, *args, **keywords):
        state = cls._wire
        value = cls._judge.request(state.open, "call", (cls, *args), keywords)
        if is_handle(value) and state.open:
            value._wire.built, value._wire.bare = not state.bare, state.bare
        return value

    def __getattr__(cls, name):
        if hidden(name):
            raise AttributeError(name)
        if name == "__dataclass_fields__":
            return cls._judge.dataclass_fields(cls)
        return cls._judge.request(opens(cls, name), "getattr", (cls, name))

    def __setattr__(cls, name, value):
        cls._judge.request(False, "setattr", (cls, name, value))

    def __delattr__(cls, name):
        cls._judge.request(False, "delattr", (cls, name))

    def __instancecheck__(cls, value):
        if is_handle(value):
            return type(value) is cls or bool(cls._judge.request(False, "isinstance", (value, cls)))
        return isinstance(value, tuple) and bool(cls._judge.request(False, "is_tuple", (cls, value)))

    def __subclasscheck__(cls, kind):
        return isinstance(kind, Remote) and bool(cls._judge.request(False, "issubclass", (kind, cls)))

    def __iter__(cls):
        return iter(cls._judge.request(opens(cls), "iter", (cls,)))

    def __len__(cls):
        return cls._judge.request(False, "len", (cls,))

    def __bool__(cls):
        return True

    def __getitem__(cls, key):
        return cls._judge.request(opens(cls), "getitem", (cls, key))

    def __contains__(cls, item):
        return item in list(cls)

    def __or__(cls, other):
        return (cls, other)

    def __dir__(cls):
        return cls._judge.request(False, "dir", (cls,))

    def __repr__(cls):
        return f"<class 'solution.{cls.__qualname__}'>"

    def __reduce_ex__(cls, protocol):
        return pickled, (cls._judge.request(False, "pickle", (cls,)),)


class Handle:
    """An object in the program; the base of the classes that stand for the program's."""

    __slots__ = ("__weakref__", "_wire")
    _judge = None

    def __getattr__(self, name):
        state, record = self._wire, type(self)._record
        if hidden(name):
            raise AttributeError(name)
        if (not state.open and name in METHODS) or (not state.built and name in self._judge.trusted_methods):
            refuse_data(self, f".{name}")
        if name in record.methods:
            return Method(self, name)
        if name == "__dataclass_fields__":
            return getattr(type(self), name)
        value = self._judge.request(opens(self, name), "getattr", (self, name))
        if not state.built:
            if type(value) is Function:
                set_slots(value, _to=name)
            elif name in METHODS and (isinstance(value, Remote) or (is_handle(value) and callable(value))):
                refuse_data(self, f".{name}")
            elif type(value) in SCALARS and seen(self, name, value) != value:
                self._judge.refuse(
                    f"an attribute of the code's class {record.name} changes with each look (.{name}){HINT}"
                )
        return value

    def __setattr__(self, name, value):
        self._judge.request(False, "setattr", (self, name, value))

    def __delattr__(self, name):
        self._judge.request(False, "delattr", (self, name))

    def __eq__(self, other):
        if self is other:
            return True
        record = type(self)._record
        if is_handle(other):
            return same_objects(self, other)
        if record.base and record.equality == "builtin":
            return plain(self) == other
        if record.equality == "own" and other is not None:
            self._judge.refuse(f"the tests compare data with an object of the code's class {record.name}, which "
                               f"defines __eq__{HINT}")  # fmt: skip
        return NotImplemented

    def __ne__(self, other):
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __hash__(self):
        record = type(self)._record
        if record.base and record.equality == "builtin":
            return hash(plain(self))
        return hash(self._wire.number) if record.equality == "object" else cached(self, "hash")

    def __str__(self):
        return cached(self, "str") if type(self)._record.texts else Handle.__repr__(self)

    def __repr__(self):
        record = type(self)._record
        return cached(self, "repr") if record.texts else f"<solution.{record.name} object at {id(self):#x}>"

    def __format__(self, spec):
        return (
            self._judge.request(False, "format", (self, spec)) if type(self)._record.texts else format(str(self), spec)
        )

    def __dir__(self):
        return self._judge.request(False, "dir", (self,))

    def __copy__(self):
        return self._judge.request(self._wire.open, "copy", (self,))

    def __deepcopy__(self, memo):
        return self._judge.request(self._wire.open, "deepcopy", (self,))

    def __reduce_ex__(self, protocol):
        return pickled, (self._judge.request(False, "pickle", (self,)),)


class Function:
    """A function in the program. ``opens``: the tests use its results as objects."""

    __slots__ = ("__dict__", "__weakref__", "_flag", "_name", "_to", "_wire")
    _judge = None

    def __init__(self, number, name, flag):
        set_slots(self, _wire=State(number, False), _name=name, _flag=flag, _to="")

    def __call__(self, *args, **keywords):
        value = self._judge.request(self._wire.open, "call", (self, *args), keywords)
        if answers(self._to, value, args or keywords):
            self._judge.refuse(f"an object of the code answers .{self._to}() in the place of data{HINT}")
        return value

    def __getattr__(self, name):
        if name == "__code__":
            return CODES.get(self._flag, CODES[""])
        if name == "__signature__":
            return self._judge.signature(self)
        if name == "__name__":
            return self._name
        if name in ("__kwdefaults__", "__defaults__"):
            return None
        if hidden(name):
            raise AttributeError(name)
        if name in METHODS:
            self._judge.refuse(f"the answer returned a function where the tests take data (.{name}){HINT}")
        return self._judge.request(False, "getattr", (self, name))

    def __setattr__(self, name, value):
        self._judge.request(False, "setattr", (self, name, value))

    def __delattr__(self, name):
        self._judge.request(False, "delattr", (self, name))

    def __repr__(self):
        return f"<function {self._name} at {id(self):#x}>"

    def __reduce_ex__(self, protocol):
        return pickled, (self._judge.request(False, "pickle", (self,)),)


class Method:
    """A method of an object in the program, that one message calls."""

    __slots__ = ("__name__", "__self__")

    def __init__(self, handle, name):
        self.__self__, self.__name__ = handle, name

    def __call__(self, *args, **keywords):
        handle, name = self.__self__, self.__name__
        state = handle._wire
        value = handle._judge.request(opens(handle, name), "method", (handle, name, *args), keywords)
        if not state.built and answers(name, value, args or keywords):
            handle._judge.refuse(f"an object of the code's class {type(handle).__name__} answers .{name}(){HINT}")
        return value

    def __getattr__(self, name):
        if hidden(name) and name != "__signature__":
            raise AttributeError(name)
        return getattr(self.__self__._judge.request(False, "getattr", (self.__self__, self.__name__)), name)

    def __eq__(self, other):
        return type(other) is Method and self.__self__ is other.__self__ and self.__name__ == other.__name__

    def __hash__(self):
        return hash((self.__self__._wire.number, self.__name__))


Function.__doc__ = property(lambda self: self._judge.request(False, "getattr", (self, "__doc__")))  # type: ignore[assignment]


async def _coroutine():
    pass


async def _async_generator():
    yield


CODES = {"async": _coroutine.__code__, "asyncgen": _async_generator.__code__, "": (lambda *a, **k: 0).__code__,
         "gen": (lambda: (yield)).__code__}  # fmt: skip


def is_handle(value):
    """Whether a value is an object of the program."""
    return isinstance(type(value), Remote)


def set_slots(value, **slots):
    """Set attributes of this side."""
    for name, content in slots.items():
        object.__setattr__(value, name, content)


def hidden(name):
    """Whether a name is never read from the program: numpy would read any address from ``__array_interface__``."""
    return name[:2] == "__" and name[-2:] == "__" and name not in VISIBLE


def opens(target, name=""):
    """Whether what an object or class gives under a name may be used as an object."""
    state = target._wire
    return state.open and (not state.bare or name in target._judge.roles.objects)


def answers(name, value, args):
    """Whether a method decides for itself what data would: the object may be there in the place of data."""
    return name in PREDICATES or (name in METHODS and bool(args) and type(value) is bool)


def refuse_data(handle, what):
    """Say that the tests take an object for data."""
    name = type(handle)._record.name
    handle._judge.refuse(f"the answer returned an object of class {name} where the tests take data ({what}){HINT}")


def cached(handle, op, *args):
    """The answer of an operation that changes nothing: the same until an operation that may change the object."""
    state, judge = handle._wire, handle._judge
    if state.epoch != judge.epoch:
        state.epoch, state.cache = judge.epoch, {}
    if (op, args) not in state.cache:
        state.cache[op, args] = judge.request(state.open or op == "fields", op, (handle, *args))
    return state.cache[op, args]


def seen(handle, name, value):
    """The value of an attribute when the tests looked last, if nothing has been called since; else ``value``."""
    state, judge = handle._wire, handle._judge
    if state.epoch != judge.epoch:
        state.epoch, state.cache = judge.epoch, {}
    return state.cache.setdefault(("getattr", name), value)


def plain(handle):
    """The value of an object whose class derives from a builtin type."""
    return cached(handle, "plain")


def fields(handle):
    """The names and values of an object's attributes, with which its class compares objects."""
    return cached(handle, "fields")


def same_objects(a, b):
    """Whether two objects of the program are equal."""
    mine, other, judge = type(a)._record, type(b)._record, a._judge
    if a._wire.number == b._wire.number:
        return True
    if mine.equality == other.equality == "builtin":
        return plain(a) == plain(b)
    if mine is other:
        if mine.equality == "object":
            return False
        if same_fields(a, b):
            return True
        if mine.equality == "dataclass":
            return False
    elif {mine.equality, other.equality} <= {"object", "dataclass"}:
        return False
    if judge.request(False, "eq", (a, b)):
        judge.refuse(f"the code's class {mine.name} calls two objects equal that differ in their attributes{HINT}")
    return False


def same_fields(a, b):
    """Whether the attributes of two objects are equal; those that refer to the objects themselves count as such."""
    comparing, pair = a._judge.comparing, (a._wire.number, b._wire.number)
    if pair in comparing:
        return True
    comparing.add(pair)
    try:
        return fields(a) == fields(b)
    except RecursionError:
        a._judge.refuse(f"objects of class {type(a).__name__} are nested too deeply to compare{HINT}")
    finally:
        comparing.discard(pair)


def pickled(data):
    """The object that the program pickled as ``data``."""
    return Handle._judge.request(True, "unpickle", (data,))
