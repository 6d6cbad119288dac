"""How values cross between the judge of the tests and the tested program: as JSON of plain data.

This runs inside the sandboxes with the standard library alone. A message holds a graph: mutable containers are
numbered nodes, so that shared ones stay shared, cycles work, and the judge learns how a call changed its arguments.
Decoding makes exact builtin types and nothing else: a value cannot carry code or fake equality.
"""

import builtins
import collections
import datetime
import decimal
import fractions
import sys

from _channel import Malformed, TooMuch, Unsendable

MAX_DEPTH = 100  # of tuples in tuples; lists and dicts are nodes and may nest as they like
BIG = 1 << 53

DICTS = {
    "d": dict,
    "OD": collections.OrderedDict,
    "DD": collections.defaultdict,
    "CT": collections.Counter,
}
TAGS = {kind: tag for tag, kind in DICTS.items()} | {list: "l", set: "s", bytearray: "ba", collections.deque: "q"}
DATES = {
    datetime.date: ("year", "month", "day"),
    datetime.datetime: ("year", "month", "day", "hour", "minute", "second", "microsecond"),
    datetime.time: ("hour", "minute", "second", "microsecond"),
    datetime.timedelta: ("days", "seconds", "microseconds"),
}
DATE_NAMES = {kind.__name__: kind for kind in DATES}
TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
NUMPY_KINDS = "biufcSU"


class Codec:
    """Values to JSON and back.

    ``shared``: name -> class that both sides define from the same trusted source; their instances cross as
    attributes. Subclasses encode and decode all other objects in ``opaque`` and ``revive``.
    """

    def __init__(self):
        self.shared = {}

    def opaque(self, value):
        """The JSON of an object that is not plain data: a list of a tag and its parts."""
        raise Unsendable(f"an object of type {type(value).__name__}")

    def revive(self, tag, parts):
        """The object that :meth:`opaque` of the other side encoded."""
        raise Malformed(f"tag {tag!r}")

    # to JSON

    def encode(self, roots, table, changed=()):
        """Values to JSON.

        Args:
            roots: the values.
            table: values of the nodes that the other side knows; those of new nodes are appended.
            changed: indices of known nodes to send again.

        Returns:
            the JSON of the roots, of the new nodes, and of the changed ones with their indices.
        """
        memo = {id(value): index for index, value in enumerate(table)}
        start = len(table)
        encoded = [self._encode(root, memo, table, 0) for root in roots]
        updates = [[index, self._content(table[index], memo, table)] for index in changed]
        nodes = []
        while start + len(nodes) < len(table):
            nodes.append(self._content(table[start + len(nodes)], memo, table))
        return encoded, nodes, updates

    def _content(self, value, memo, table):
        """The JSON of a node's content."""

        def each(values):
            return [self._encode(v, memo, table, 0) for v in values]

        kind = type(value)
        tag = TAGS.get(kind)
        if tag in DICTS:
            return [tag, [each(pair) for pair in list(value.items())]]
        if tag == "q":
            return [tag, each(value), value.maxlen]
        if tag == "ba":
            return [tag, value.hex()]
        if tag:
            return [tag, each(list(value))]
        return ["o", kind.__name__, [[name, self._encode(v, memo, table, 0)] for name, v in state(value).items()]]

    def _encode(self, value, memo, table, depth):
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int:
            return value if -BIG < value < BIG else ["i", hex(value)]
        if kind in TAGS or self.shared.get(kind.__name__) is kind:
            index = memo.get(id(value))
            if index is None:
                index = memo[id(value)] = len(table)
                table.append(value)
            return ["r", index]
        if depth > MAX_DEPTH:
            raise TooMuch("tuples nested too deeply")

        def each(values):
            return [self._encode(v, memo, table, depth + 1) for v in values]

        if kind is tuple:
            return ["t", each(value)]
        if kind is frozenset:
            return ["z", each(value)]
        if kind is bytes:
            return ["b", value.hex()]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind is range:
            return ["g", each((value.start, value.stop, value.step))]
        if kind is decimal.Decimal:
            return ["D", str(value)]
        if kind is fractions.Fraction:
            return ["F", each((value.numerator, value.denominator))]
        if kind in DATES and getattr(value, "tzinfo", None) is None:
            return ["dt", kind.__name__, [getattr(value, name) for name in DATES[kind]]]
        if value is Ellipsis:
            return ["e"]
        if kind is type and TYPES.get(value.__name__) is value:
            return ["T", value.__name__]
        if kind is type({}.keys()):
            return ["dk", each(list(value))]
        if kind is type({}.items()):
            return ["di", [each(pair) for pair in list(value)]]
        if issubclass(kind, tuple) and type(getattr(kind, "_fields", None)) is tuple:
            return ["nt", kind.__name__, list(kind._fields), each(tuple.__iter__(value))]
        if "numpy" in sys.modules:
            numpy = sys.modules["numpy"]
            if isinstance(value, numpy.ndarray) and value.dtype.kind in NUMPY_KINDS:
                return ["np", value.dtype.str, list(value.shape), value.tobytes().hex()]
            if isinstance(value, numpy.generic) and value.dtype.kind in NUMPY_KINDS:
                return self._encode(value.item(), memo, table, depth)
        for base in (int, float, str, complex):  # an instance of a subclass crosses as its number or text
            if issubclass(kind, base):
                return self._encode(base.__add__(value, base()), memo, table, depth)
        return self.opaque(value)

    # from JSON

    def decode(self, roots, nodes, table):
        """JSON to values; those of the new nodes are appended to ``table``.

        Raises:
            Malformed: the message is invalid.
        """
        try:
            start = len(table)
            table += [self._empty(node) for node in nodes]
            # fill objects first: their hash, which dicts and sets need, may depend on their attributes
            for late in (False, True):
                for index, node in enumerate(nodes):
                    if (node[0] in DICTS or node[0] == "s") is late:
                        self.fill(table[start + index], node, table)
            return [self._decode(root, table, 0) for root in roots]
        except (
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            ImportError,
        ) as error:
            raise Malformed(f"{type(error).__name__}: {error}") from None

    def _empty(self, node):
        tag = node[0]
        if tag in DICTS:
            return DICTS[tag]()
        if tag == "o":
            return object.__new__(self.shared[node[1]])
        if tag == "q":
            return collections.deque(maxlen=node[2])
        return {"l": list, "s": set, "ba": bytearray}[tag]()

    def fill(self, value, node, table):
        """Replace a node's content with that in the message."""
        tag = node[0]
        kind = self.shared[node[1]] if tag == "o" else {tag: kind for kind, tag in TAGS.items()}[tag]
        if type(value) is not kind:
            raise ValueError(f"a {type(value).__name__} became a {kind.__name__}")
        if tag == "o":
            for name in state(value):
                object.__delattr__(value, name)
            for name, item in node[2]:
                if type(name) is not str or callable(getattr(kind, name, None)):  # it would replace a method
                    raise ValueError(f"an attribute {name!r}")
                object.__setattr__(value, name, self._decode(item, table, 0))
            return
        items = bytes.fromhex(node[1]) if tag == "ba" else [self._decode(item, table, 0) for item in node[1]] \
            if tag not in DICTS else [[self._decode(item, table, 0) for item in pair] for pair in node[1]]  # fmt: skip
        value.clear()
        if tag in DICTS:
            for key, item in items:
                value[key] = item
        elif tag == "s":
            value.update(items)
        else:
            value.extend(items)

    def _decode(self, item, table, depth):
        if type(item) is not list:
            if type(item) is dict:
                raise ValueError("an object as a value")
            return item
        if depth > MAX_DEPTH + 2:
            raise ValueError("nested too deeply")

        def each(items):
            return [self._decode(i, table, depth + 1) for i in items]

        tag = item[0]
        if tag == "r":
            if type(item[1]) is not int or not 0 <= item[1] < len(table):
                raise ValueError("no such node")
            return table[item[1]]
        if tag == "i":
            return int(text(item[1]), 16)
        if tag == "t":
            return tuple(each(item[1]))
        if tag == "z":
            return frozenset(each(item[1]))
        if tag == "b":
            return bytes.fromhex(item[1])
        if tag == "c":
            return complex(float(item[1]), float(item[2]))
        if tag == "g":
            return range(*map(integer, each(item[1])))
        if tag == "D":
            return decimal.Decimal(text(item[1]))
        if tag == "F":
            return fractions.Fraction(*map(integer, each(item[1])))
        if tag == "dt":
            return DATE_NAMES[item[1]](*map(integer, item[2]))
        if tag == "e":
            return Ellipsis
        if tag == "T":
            return TYPES[item[1]]
        if tag == "dk":
            return dict.fromkeys(each(item[1])).keys()
        if tag == "di":
            return dict(each(pair) for pair in item[1]).items()
        if tag == "nt":
            return named(text(item[1]), tuple(map(text, item[2])))._make(each(item[3]))
        if tag == "np":
            import numpy

            dtype = numpy.dtype(text(item[1]))
            if dtype.kind not in NUMPY_KINDS:
                raise ValueError("an array of objects")
            return numpy.frombuffer(bytes.fromhex(item[3]), dtype).reshape(tuple(map(integer, item[2]))).copy()
        return self.revive(tag, item[1:])


def text(value):
    """``value``, which must be a str."""
    if type(value) is not str:
        raise ValueError("no text")
    return value


def integer(value):
    """``value``, which must be an int."""
    if type(value) is not int:
        raise ValueError("no integer")
    return value


NAMED: dict = {}


def named(name, fields):
    """The named tuple type of that name and fields, always the same object."""
    if (name, fields) not in NAMED:
        NAMED[name, fields] = collections.namedtuple(name, fields)
    return NAMED[name, fields]


def state(value):
    """The attributes of an object, including those in slots."""
    found = {}
    for kind in reversed(type(value).__mro__):
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if type(slots) is str else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                found[name] = object.__getattribute__(value, name)
    return found | vars(value) if hasattr(value, "__dict__") else found


def plain_classes(namespace):
    """The classes defined in a namespace whose instances consist of their attributes alone."""
    name = namespace["__name__"]

    def own(kind):
        return kind is object or (type(kind) is type and kind.__module__ == name)

    return {
        key: kind
        for key, kind in namespace.items()
        if isinstance(kind, type) and kind.__name__ == key and all(map(own, kind.__mro__)) and own(kind)
    }
