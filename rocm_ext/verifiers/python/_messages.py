"""Plain data between the tests' process and the code's: messages over two pipes.

Messages hold data of exact library types, and numbers that stand for objects of either side. Such a value is written as
a list of a tag and its parts, which are values again. Decoding makes only the types of this file's two tables, named
tuples and numpy's arrays: it imports and calls no other class that a message names, and keeps no class of the sender.

The code's messages are JSON. The tests' messages are trusted, so they use marshal, which needs no import: at its start
the code's process imports only modules that the interpreter has loaded, since that time counts for every verdict. This
runs inside both sandboxes with only the standard library.
"""

import marshal
import sys
from _collections import OrderedDict, defaultdict, deque

MAX_FRAME = 16 << 20  # bytes
MAX_DEPTH = 200
BIG = 1 << 53
DTYPES = "?biufcSUmM"  # kinds of numpy's dtypes whose bytes are data, which excludes objects
FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}
FUNCTIONS = {type(lambda: 0), type(len), type([].append), type(str.join), type(object().__str__)}
BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()  # noqa: SIM905
MUTABLE = {list, dict, set, bytearray, deque, OrderedDict, defaultdict}


def flat(mapping):
    """A list of the keys and values of a mapping, alternating."""
    return [part for pair in list(mapping.items()) for part in pair]


def pairs(parts):
    """The inverse of :func:`flat`: pairs of key and value."""
    return zip(parts[::2], parts[1::2], strict=True)


def factory(value):
    """The name of a defaultdict's factory; None without a factory, or if it may not cross."""
    name = getattr(value.default_factory, "__name__", None)
    return name if FACTORIES.get(name) is value.default_factory else None


def attributes(*names):
    """A function that gives an object's attributes of these names as a list."""
    return lambda value: [getattr(value, name) for name in names]


def from_pairs(kind):
    """The inverse of :func:`flat` for a class of mappings."""
    return lambda parts: kind(pairs(parts))


DAY = ("year", "month", "day")
TIME = ("hour", "minute", "second", "microsecond", "tzinfo")
RANGE = attributes("start", "stop", "step")
MAPPING_PROXY = type(vars(type))
BUILTIN = {  # type -> its tag, a function from a value to its parts, and the inverse function
    list: ("l", list, list),
    tuple: ("t", list, tuple),
    set: ("s", list, set),
    frozenset: ("z", list, frozenset),
    dict: ("d", flat, from_pairs(dict)),
    OrderedDict: ("OD", flat, from_pairs(OrderedDict)),
    defaultdict: ("DD", lambda v: [factory(v), *flat(v)],
                  lambda parts: defaultdict(parts[0] and FACTORIES[parts[0]], pairs(parts[1:]))),
    deque: ("q", lambda v: [v.maxlen, *v], lambda parts: deque(parts[1:], parts[0])),
    bytes: ("b", lambda v: [v.hex()], lambda parts: bytes.fromhex(parts[0])),
    bytearray: ("ba", lambda v: [v.hex()], lambda parts: bytearray.fromhex(parts[0])),
    complex: ("c", attributes("real", "imag"), lambda parts: complex(*map(float, parts))),
    range: ("range", RANGE, lambda parts: range(*parts)),
    slice: ("slice", RANGE, lambda parts: slice(*parts)),
    type(...): ("e", lambda v: [], lambda parts: ...),
    type({}.keys()): ("dk", list, lambda parts: dict.fromkeys(parts).keys()),
    type({}.items()): ("di", list, lambda parts: dict(parts).items()),
    type({}.values()): ("dv", list, lambda parts: dict(enumerate(parts)).values()),
    MAPPING_PROXY: ("mp", flat, lambda parts: MAPPING_PROXY(dict(pairs(parts)))),
    memoryview: ("mv", lambda v: [v.tobytes(), v.format], lambda parts: memoryview(parts[0]).cast(parts[1])),
}  # fmt: skip
LIBRARY = {  # module.class -> the arguments that make an equal object
    "collections.Counter": lambda v: [dict(v)],
    "collections.ChainMap": lambda v: v.maps,
    "collections.UserList": attributes("data"),
    "collections.UserDict": attributes("data"),
    "collections.UserString": attributes("data"),
    "decimal.Decimal": lambda v: [str(v)],
    "fractions.Fraction": attributes("numerator", "denominator"),
    "datetime.date": attributes(*DAY),
    "datetime.time": attributes(*TIME),
    "datetime.datetime": attributes(*DAY, *TIME),
    "datetime.timedelta": attributes("days", "seconds", "microseconds"),
    "datetime.timezone": lambda v: v.__getinitargs__(),
    "zoneinfo.ZoneInfo": attributes("key"),
    "uuid.UUID": lambda v: [str(v)],
    "pathlib.PosixPath": lambda v: [str(v)],
    "pathlib.PurePosixPath": lambda v: [str(v)],
    "array.array": lambda v: [v.typecode, v.tolist()],
    "time.struct_time": lambda v: [tuple(v)],
    "urllib.parse.ParseResult": list,
    "urllib.parse.SplitResult": list,
    "re.Match": lambda v: [v.re.pattern, v.re.flags, v.string, v.start(), v.endpos, v.regs],
}
VIEWS = {  # module.class -> the tag of dict's
    "builtins.odict_keys": "dk", "builtins.odict_items": "di", "builtins.odict_values": "dv",
    "collections.abc.KeysView": "dk", "collections.abc.ItemsView": "di", "collections.abc.ValuesView": "dv",
}  # fmt: skip
MAKE = {tag: make for tag, _, make in BUILTIN.values()}
MAKE["i"] = lambda parts: int(text(parts[0]), 16)
MAKE["re.Match"] = lambda parts: match(*parts)
MAKE["u"] = lambda parts: bytes.fromhex(parts[0]).decode("utf-8", "surrogatepass")


class Malformed(Exception):
    """An invalid message."""


class Unsendable(Exception):
    """A value that no message can hold."""


class Closed(Exception):
    """The other process has ended."""


def expect(condition, problem):
    """Raise Malformed unless a condition holds."""
    if not condition:
        raise Malformed(problem)


class Channel:
    """Frames over two pipes: four bytes of length, then a message, which ``dumps`` and ``loads`` convert."""

    def __init__(self, reader, writer, dumps, loads):
        self.reader = open(reader, "rb", closefd=False)  # noqa: SIM115
        self.writer = open(writer, "wb", closefd=False)  # noqa: SIM115
        self.dumps = dumps
        self.loads = loads

    def send(self, message):
        """Send a dict; raises Unsendable if it is too large or too deep, and Closed if the other process has ended."""
        try:
            data = self.dumps(message)
        except ValueError as error:
            raise Unsendable(f"a value that no message can hold ({error})") from None
        if len(data) > MAX_FRAME:
            raise Unsendable(f"a value of {len(data)} bytes, more than {MAX_FRAME}")
        try:
            self.writer.write(len(data).to_bytes(4, "big") + data)
            self.writer.flush()
        except OSError:
            raise Closed from None

    def receive(self):
        """The next dict; raises Malformed if it is invalid or too large, and Closed if the other process has ended."""
        head = self.reader.read(4)
        size = int.from_bytes(head, "big")
        expect(size <= MAX_FRAME, f"a message of {size} bytes")
        data = self.reader.read(size)
        if len(head) < 4 or len(data) < size:
            raise Closed
        try:
            message = self.loads(data)
        except (ValueError, RecursionError, MemoryError) as error:
            raise Malformed(str(error)) from None
        expect(type(message) is dict, "no object")
        return message


def judge_channel(reader, writer):
    """The tests' end. It reads JSON: marshal is unsafe for bytes from the code."""
    import json

    return Channel(reader, writer, marshal.dumps, json.loads)


def program_channel(reader, writer):
    """The code's end: JSON without the module json, which imports re and enum."""
    from _json import encode_basestring_ascii, make_encoder

    def refuse(value):
        raise ValueError(f"a {type(value).__name__} is not JSON")

    encode = make_encoder(None, refuse, encode_basestring_ascii, None, ":", ",", False, False, True)

    def dumps(value):
        return "".join(encode(value, 0)).encode()

    return Channel(reader, writer, dumps, marshal.loads)


class Wire:
    """Values to JSON and back. The two sides define ``opaque`` and ``revive``, which number their objects."""

    def opaque(self, value, depth):
        """The JSON of an object that is not plain data: a tag and the parts for the other side's ``revive``."""
        raise Unsendable(f"an object of type {type(value).__name__}")

    def revive(self, tag, parts):
        """The object that the other side's :meth:`opaque` encoded."""
        raise Malformed(f"tag {tag!r}")

    def encode(self, value, depth=0):
        """A value as JSON; ``depth`` counts the containers around it. Raises Unsendable if it must not cross."""
        kind = type(value)
        if value is None or kind is bool or kind is float:
            return value
        if kind is int:
            return value if -BIG < value < BIG else ["i", hex(value)]
        if kind is str:
            try:
                value.encode()
            except UnicodeEncodeError:  # JSON would join surrogates
                return ["u", value.encode("utf-8", "surrogatepass").hex()]
            return value
        if depth > MAX_DEPTH:
            raise Unsendable("a value that is nested too deeply")
        if kind in BUILTIN:
            tag, parts_of, _ = BUILTIN[kind]
            parts = parts_of(value)
        else:
            tag, parts = library(value)
        if tag is None:
            return self.opaque(value, depth)
        return [tag, *[self.encode(part, depth + 1) for part in parts]]

    def decode(self, item):
        """The value of JSON; raises Malformed if the JSON stands for no value."""
        try:
            return self._decode(item)
        except Malformed:
            raise
        except Exception as error:  # a library may raise anything for nonsense
            raise Malformed(f"{type(error).__name__}: {error}") from None

    def encode_call(self, args, keywords):
        """The JSON of a call's arguments."""
        encoded = [self.encode(arg) for arg in args]
        named = {name: self.encode(value) for name, value in keywords.items()}
        return {"a": encoded, "k": named}

    def decode_call(self, message):
        """The arguments of a call, by position and by name."""
        args = [self.decode(arg) for arg in message["a"]]
        keywords = {}
        for name, item in message["k"].items():
            keywords[text(name)] = self.decode(item)
        return args, keywords

    def _decode(self, item):
        if type(item) is not list:
            if item is None or type(item) in (bool, str, float, int):
                return item
            raise Malformed(f"a {type(item).__name__}")
        tag, *parts = item
        if tag in MAKE:
            return MAKE[tag](list(map(self._decode, parts)))
        if tag in LIBRARY:
            module, _, kind = tag.rpartition(".")
            make = getattr(__import__(module, fromlist=[kind]), kind)
            return make(*map(self._decode, parts))
        if tag == "nt":
            from collections import namedtuple

            name, fields, *values = map(self._decode, parts)
            return namedtuple(text(name), list(map(text, fields)))(*values)
        if tag == "numpy":
            return array(*map(self._decode, parts))
        return self.revive(tag, parts)


def library(value):
    """The tag and the parts of a value of the standard library or numpy; (None, None) for others."""
    kind = type(value)
    if is_plain_named_tuple(kind):
        return "nt", [kind.__name__, kind._fields, *tuple.__iter__(value)]
    name = f"{kind.__module__}.{kind.__name__}".replace("pathlib._local", "pathlib")
    if name in LIBRARY and name.split(".")[0] in sys.modules:
        return name, LIBRARY[name](value)
    if name in VIEWS:
        return VIEWS[name], list(value)
    numpy = sys.modules.get("numpy") if name.startswith("numpy.") else None
    if numpy:
        is_array = kind is numpy.ndarray
        if (is_array or isinstance(value, numpy.generic)) and value.dtype.kind in DTYPES:
            return "numpy", [is_array, value.dtype.str, value.tobytes(), *value.shape]
    return None, None


def is_plain_named_tuple(kind):
    """Whether a class is a named tuple without methods of its own."""
    fields = getattr(kind, "_fields", None) if kind.__bases__ == (tuple,) else None
    if type(fields) is not tuple:
        return False
    return all(name in fields or name[0] == "_" for name in vars(kind))


def array(has_shape, dtype, data, *shape):
    """An array of numpy, or if not ``has_shape`` its only element."""
    import numpy

    dtype = numpy.dtype(dtype)
    expect(dtype.kind in DTYPES and dtype.itemsize, "an array of what is no data")
    values = numpy.frombuffer(data, dtype).reshape(shape).copy()
    return values if has_shape else values[()]


def match(pattern, flags, string, start, end, spans):
    """The match of a pattern at a position; both processes have the same ``re``."""
    import re

    expect({type(pattern), type(string)} <= {str, bytes}, "no pattern")
    pattern = re.compile(pattern, flags)
    for search in (pattern.match, pattern.fullmatch):
        found = search(string, start, end)
        if found and found.regs == spans:
            return found
    raise Malformed("no match")


def mutable(value):
    """Whether a value is a container that the code may change."""
    return type(value) in MUTABLE or type(value).__name__ in ("Counter", "ndarray", "array")


def text(value):
    """``value``, which must be a str."""
    expect(type(value) is str, "no text")
    return value


def number(value):
    """``value``, which must be an int of at least 0."""
    expect(type(value) is int and value >= 0, "no number")
    return value
