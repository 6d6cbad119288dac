"""What the program's side tells of the code's objects, and the operations on them that the judge may ask for."""

import _operator
import builtins
import sys

from _wire import Codec, state

BASES = (bool, int, float, complex, str, bytes, bytearray, list, dict, set, tuple, frozenset)
FUNCTION = type(lambda: 0)
FUNCTIONS = {FUNCTION, type(len), type([].append), type({}.__len__), type(int.__add__), type(str.join),
             type(vars(dict)["fromkeys"]), type(Codec().encode)}  # fmt: skip
CALLABLES = {("functools", "partial"), ("functools", "_lru_cache_wrapper"), ("functools", "partialmethod"),
             ("operator", "itemgetter"), ("operator", "attrgetter"), ("operator", "methodcaller"),
             ("numpy", "ufunc")}  # fmt: skip
LIBRARIES = ("builtins", "itertools", "collections", "_collections", "re", "_csv")
HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made the class
FLAGS = ((0x80, "async"), (0x200, "asyncgen"), (0x20, "gen"))


def is_iterator(kind):
    """Whether a class is one of Python's own iterators."""
    return hasattr(kind, "__next__") and kind.__module__ in LIBRARIES


def flag(function):
    """What calling a function gives: a coroutine, a generator or a value."""
    flags = getattr(getattr(function, "__code__", None), "co_flags", 0)
    return next((name for bit, name in FLAGS if flags & bit), "")


def of_builtin(kind):
    """Whether a class is one of Python's own, written in C."""
    return not kind.__flags__ & HEAP


def definer(kind, name):
    """The class in whose body a special method of a class is."""
    return next((base for base in kind.__mro__ if name in vars(base)), object)


def describe(kind):
    """The description of a class for the judge; see the class Record there."""
    own = [base for base in kind.__mro__ if not of_builtin(base)]
    special = {name for base in own for name, value in vars(base).items()
               if name[:2] == "__" == name[-2:] and value is not None and callable(value)}  # fmt: skip
    methods = {name for base in own for name, value in vars(base).items()
               if type(value) is FUNCTION and name[:2] != "__"}  # fmt: skip
    if "__getattribute__" in special:
        methods = set()
    base = next((base.__name__ for base in kind.__mro__ if base in BASES), "")
    texts = definer(kind, "__str__") is not object or definer(kind, "__repr__") is not object
    doc = kind.__doc__ if type(kind.__doc__) is str else None
    return [kind.__name__, kind.__qualname__, doc and doc[:5000], sorted(methods)[:500], sorted(special),
            equality(kind), base, texts, family(kind), kind.__hash__ is not None]  # fmt: skip


def equality(kind):
    """How a class compares its objects."""
    where = definer(kind, "__eq__")
    if where is object:
        return "object"
    if of_builtin(where) and issubclass(kind, BASES):
        return "builtin"
    code = getattr(vars(where)["__eq__"], "__code__", None)
    made = "__dataclass_fields__" in vars(where) and code is not None and code.co_filename == "<string>"
    if "dataclasses" in sys.modules and made:
        return "dataclass"
    return "own"


def family(kind):
    """The kind of enumeration that a class is, or ""."""
    if "enum" not in sys.modules:
        return ""
    enum = sys.modules["enum"]
    for name in ("IntFlag", "Flag", "IntEnum", "StrEnum", "Enum"):
        if issubclass(kind, getattr(enum, name, ())):
            return name
    return ""


def downcast(value, kind, for_objects):
    """The builtin value of an instance of a builtin type's subclass; any other object, and one that is needed as
    an object of the code's class, as it is."""  # fmt: skip
    if for_objects and kind.__module__ == "solution":
        return value
    return as_builtin(value)


def as_builtin(value):
    """The builtin value of an instance of a builtin type's subclass; any other object as it is."""
    for base in BASES:
        if isinstance(value, base):
            if base is dict:
                return dict(dict.items(value))
            if base in (int, float, complex):
                return base.__pos__(value)
            if base in (str, bytes):
                return base.__add__(value, base())
            return base(base.__iter__(value))
    return value


def fields(value):
    """The names and values of the attributes with which an object is compared."""
    specs = getattr(type(value), "__dataclass_fields__", None)
    if type(specs) is dict and equality(type(value)) == "dataclass":
        found = {name: getattr(value, name) for name, spec in specs.items() if spec.compare}
    else:
        found = state(value)
    base = as_builtin(value)
    return (*sorted(found.items()), *([base] if base is not value else []))


def call(function, *args, **keywords):
    """The operation ``call``."""
    return function(*args, **keywords)


def method(value, name, *args, **keywords):
    """The operation ``method``."""
    return getattr(value, name)(*args, **keywords)


def equal(a, b):
    """Whether the code calls two objects equal."""
    return bool(a == b)


def aiter_next(name):
    """The operation of that name on a generator."""
    return lambda value, *args: getattr(value, name)(*args)


def copied(name):
    """The operation ``copy`` or ``deepcopy``."""

    def do(value):
        import copy

        return getattr(copy, name)(value)

    return do


def pickled(value):
    """The operation ``pickle``."""
    import pickle

    return pickle.dumps(value)


def unpickled(data):
    """The operation ``unpickle``, on what this process pickled."""
    import pickle

    return pickle.loads(data)


def signature(function):
    """The parameters of a function: name, kind, whether there is a default, and the default."""
    import inspect

    return [(p.name, int(p.kind), p.default is not p.empty, None if p.default is p.empty else p.default)
            for p in inspect.signature(function).parameters.values()]  # fmt: skip


def fields_of(kind):
    """The names of a dataclass's fields; None for another class."""
    specs = getattr(kind, "__dataclass_fields__", None)
    return list(specs) if type(specs) is dict else None


def is_tuple(kind, value):
    """Whether a class is the named tuple type of a value."""
    fields = getattr(type(value), "_fields", None)
    return fields is not None and getattr(kind, "_fields", None) == fields and kind.__name__ == type(value).__name__


OPERATIONS = {
    "call": call, "method": method, "plain": as_builtin, "fields": fields, "eq": equal, "pickle": pickled,
    "unpickle": unpickled, "signature": signature, "fields_of": fields_of, "is_tuple": is_tuple,
    "copy": copied("copy"), "deepcopy": copied("deepcopy"), "send": aiter_next("send"), "throw": aiter_next("throw"),
    "and": _operator.and_, "or": _operator.or_, "iand": _operator.iand, "ior": _operator.ior,
}  # fmt: skip
OPERATIONS |= {name: lambda value, name=f"__{name}__": getattr(type(value), name)(value)
               for name in ("trunc", "floor", "ceil")}  # fmt: skip
for _module, _names in (
    (builtins, "isinstance issubclass dir getattr setattr delattr iter next str repr bool int float complex bytes abs "
               "round reversed hash format divmod len"),
    (_operator, "getitem setitem delitem add sub mul truediv floordiv mod pow xor matmul lshift rshift lt le gt ge neg "
               "pos invert index contains iadd isub imul itruediv ifloordiv imod ipow ixor imatmul ilshift irshift"),
):  # fmt: skip
    OPERATIONS |= {name: getattr(_module, name) for name in _names.split()}
