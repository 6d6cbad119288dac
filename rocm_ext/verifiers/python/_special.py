"""The special methods of handles, and the classes that stand for the program's. This runs in the judge's sandbox."""

import builtins

from _handles import HINT, Handle, Remote, State, cached, is_handle, opens, plain, refuse_data


def need_open(handle, op):
    """The state of a handle, which must be open."""
    state = handle._wire
    if not state.open:
        refuse_data(handle, op)
    return state


def _reader(op):
    def method(self, *args):
        state = need_open(self, op)
        value = cached(self, op, *args)
        if state.tainted:
            if not is_handle(value):
                refuse_data(self, f"{op} of a result")
            value._wire.tainted = True
        return value

    return method


def _native(name):
    """A method of the builtin type that a class derives from, on the object's plain value."""

    def method(self, *args):
        need_open(self, name)
        return getattr(plain(self), name)(*(plain(a) if is_handle(a) and type(a)._record.base else a for a in args))

    return method


def _binary(op, swapped=False):
    def method(self, other):
        state = need_open(self, op)
        with_data = not is_handle(other)
        value = self._judge.request(True, op, (other, self) if swapped else (self, other))
        if value is NotImplemented:
            return value
        if with_data or state.tainted or other._wire.tainted:
            if not is_handle(value):  # the program could compute what the tests want
                refuse_data(self, op)
            value._wire.tainted = True
        return value

    return method


def _in_place(op):
    def method(self, other):
        need_open(self, op)
        value = self._judge.request(True, op, (self, other))
        if not is_handle(value):
            refuse_data(self, op)
        return value

    return method


def _ordering(op):
    def method(self, other):
        need_open(self, op)
        if not is_handle(other):
            refuse_data(self, op)
        return self._judge.request(False, op, (self, other))

    return method


def _asking(op):
    def method(self, *args, **keywords):
        need_open(self, op)
        return self._judge.request(opens(self, op), op, (self, *args), keywords)

    return method


def _method(name):
    def method(self, *args):
        return self._judge.request(self._wire.open, "method", (self, name, *args))

    return method


def _call(self, *args, **keywords):
    return self._judge.request(opens(self), "call", (self, *args), keywords)


def _iter(self):
    need_open(self, "iter")
    iterator = self._judge.request(opens(self), "iter", (self,))
    return self if iterator is self else iter(iterator)


def _contains(self, item):
    state, record = need_open(self, "in"), type(self)._record
    if is_handle(item) or state.built:
        return bool(self._judge.request(False, "contains", (self, item)))
    if not {"__iter__", "__getitem__"} & record.special:
        refuse_data(self, "in")
    found = False
    for count, each in enumerate(self):  # before the program sees the item
        if found := (item is each or item == each):
            break
        if count > 100_000:
            refuse_data(self, "in")
    if bool(self._judge.request(False, "contains", (self, item))) is not found:
        self._judge.refuse(f"the code's class {record.name} contains other things than its iteration gives{HINT}")
    return found


def _exit(self, kind, error, trace):
    return self._judge.request(False, "method", (self, "__exit__", kind, error, None))


def _aexit(self, kind, error, trace):
    return self._judge.request(False, "method", (self, "__aexit__", kind, error, None))


def _await(self):
    return self._judge.coroutine_of(self._wire.number, self._wire.open).__await__()


OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul", "lshift", "rshift",
             "divmod")  # fmt: skip
VALUES = ("len", "bool", "int", "float", "complex", "index", "abs", "round", "trunc", "floor", "ceil", "neg", "pos",
          "invert", "bytes", "reversed")  # fmt: skip
SPECIAL = {f"__{op}__": _reader(op) for op in VALUES}
SPECIAL |= {f"__{op}__": _binary(op) for op in OPERATORS}
SPECIAL |= {f"__r{op}__": _binary(op, swapped=True) for op in OPERATORS}
SPECIAL |= {f"__i{op}__": _in_place(f"i{op}") for op in OPERATORS if op != "divmod"}
SPECIAL |= {f"__{op}__": _ordering(op) for op in ("lt", "le", "gt", "ge")}
SPECIAL |= {f"__{op}__": _asking(op) for op in ("getitem", "setitem", "delitem", "next")}
SPECIAL["__call__"] = _call
SPECIAL |= {f"__{op}__": _method(f"__{op}__") for op in ("enter", "aenter", "aiter", "anext")}
SPECIAL |= {"__iter__": _iter, "__contains__": _contains, "__exit__": _exit, "__aexit__": _aexit, "__await__": _await}
CHANGING = {"__setitem__", "__delitem__", *(f"__i{op}__" for op in OPERATORS)}


class Record:
    """What the program says of a class; it decides nothing that the tests do not ask of the class itself.

    Attributes:
        name, qualified, doc: as in Python.
        methods: names of its functions.
        special: names of special methods that the code defines.
        equality: ``object``, ``dataclass``, ``builtin`` or ``own``.
        base: the builtin type that it derives from, or "".
        texts: it defines ``__str__`` or ``__repr__``.
        family: ``Enum``, ``IntEnum`` and the like, or "".
    """

    def __init__(self, said):
        name, qualified, doc, methods, special, self.equality, self.base, self.texts, self.family, hashable = said
        self.name, self.qualified = str(name)[:100], str(qualified)[:200]
        self.doc = None if doc is None else str(doc)
        self.methods = {str(m) for m in methods if not m.startswith("__")}
        self.special = {str(m) for m in special}
        self.hashable = bool(hashable)
        if self.equality not in ("object", "dataclass", "builtin", "own"):
            raise ValueError("an equality")
        if self.base not in ("", "int", "float", "str", "complex", "bytes", "bytearray", "list", "tuple", "dict", "set",
                             "frozenset"):  # fmt: skip
            raise ValueError("a base")


def remote_class(record, number, is_open):
    """The class that stands for a class of the program."""
    namespace = {name: SPECIAL[name] for name in record.special if name in SPECIAL}
    if record.base:
        base = getattr(builtins, record.base)
        for name in SPECIAL.keys() & set(dir(base)) - record.special:
            namespace[name] = SPECIAL[name] if name in CHANGING else _native(name)
    if not record.hashable:
        namespace["__hash__"] = None
    marker = _marker(record)
    if marker is not None:
        namespace["__class__"] = property(lambda self: marker)
    namespace |= {"__slots__": (), "__module__": "solution", "__qualname__": record.qualified, "__doc__": record.doc,
                  "_record": record, "_state": State(number, is_open)}  # fmt: skip
    return Remote(record.name, (Handle,), namespace)


def _marker(record):
    """A class by which ``isinstance`` knows a member of an enumeration or an object of a builtin type's subclass."""
    if record.family in ("Enum", "IntEnum", "Flag", "IntFlag", "StrEnum"):
        import enum

        return getattr(enum, record.family)(record.name, [], module="solution")
    if record.base:
        return type(record.name, (getattr(builtins, record.base),), {"__module__": "solution"})
    return None
