"""Plain data between the tests' process and the code's: messages over two pipes.

What crosses is data of exact library types, and numbers that stand for objects of either side. Decoding makes such
data and nothing else: of what a message names it imports and calls only the classes in ``LIBRARY`` and the tables of
numpy and pandas, and it keeps no class of the sender.

The code's messages are JSON. Those to the code come from trusted code, so marshal carries them, which needs no import:
the code's process imports nothing at its start that the interpreter has not loaded, since that time counts for every
verdict. ``os`` is not loaded, ``posix`` is. This runs inside both sandboxes with the standard library alone.
"""

import marshal
import posix
import sys
from _collections import OrderedDict, defaultdict, deque

MAX_FRAME = 16 << 20  # bytes
MAX_DEPTH = 200
BIG = 1 << 53
FACTORIES = {kind.__name__: kind for kind in (int, float, str, bool, list, dict, set, tuple)}
VIEWS: dict = {type({}.keys()): "dk", type({}.items()): "di", type({}.values()): "dv"}
MUTABLE = {list, dict, set, bytearray, deque, OrderedDict, defaultdict}
FUNCTIONS = {type(lambda: 0), type(len), type([].append), type(str.join), type(object().__str__)}
BINARY = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift".split()  # noqa: SIM905
IN_PLACE = ["i" + name.strip("_") for name in BINARY]
OF_NAMEDTUPLES = {
    *("__new__", "__repr__", "__doc__", "__slots__", "__module__", "__match_args__", "__getnewargs__", "__replace__"),
    *("__annotations__", "__orig_bases__", "__static_attributes__", "__firstlineno__", "__annotations_cache__"),
    *("__annotate__", "__annotate_func__", "_fields", "_field_defaults", "_make", "_replace", "_asdict"),
}  # fmt: skip
LIBRARY = {  # module.class -> the arguments that make an equal object
    "decimal.Decimal": lambda v: (str(v),),
    "fractions.Fraction": lambda v: (v.numerator, v.denominator),
    "datetime.date": lambda v: (v.year, v.month, v.day),
    "datetime.time": lambda v: (v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
    "datetime.datetime": lambda v: (v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
    "datetime.timedelta": lambda v: (v.days, v.seconds, v.microseconds),
    "datetime.timezone": lambda v: v.__getinitargs__(),
    "zoneinfo.ZoneInfo": lambda v: (v.key,),
    "uuid.UUID": lambda v: (str(v),),
    "pathlib.PosixPath": lambda v: (str(v),),
    "pathlib.PurePosixPath": lambda v: (str(v),),
    "array.array": lambda v: (v.typecode, v.tolist()),
}


class Malformed(Exception):
    """An invalid message."""


class Unsendable(Exception):
    """A value that no message can hold."""


class Closed(Exception):
    """The other process has ended."""


class Channel:
    """Frames over two pipes: four bytes of length, then a message.

    Args:
        reader, writer: descriptors.
        dumps: makes bytes of a message.
        loads: makes a message of bytes.
    """

    def __init__(self, reader, writer, dumps, loads):
        self.reader, self.writer, self.dumps, self.loads = reader, writer, dumps, loads
        self.ahead = b""

    def send(self, message):
        """Send a dict.

        Raises:
            Unsendable: it is larger than MAX_FRAME, or nested too deeply.
            Closed: the other process has ended.
        """
        try:
            data = self.dumps(message)
        except ValueError as error:
            raise Unsendable(f"a value that no message can hold ({error})") from None
        if len(data) > MAX_FRAME:
            raise Unsendable(f"a value of {len(data)} bytes, more than {MAX_FRAME}")
        data = memoryview(len(data).to_bytes(4, "big") + data)
        while data:
            try:
                data = data[posix.write(self.writer, data) :]
            except OSError:
                raise Closed from None

    def receive(self):
        """The next dict.

        Raises:
            Malformed: the message is no object, or too large.
            Closed: the other process has ended.
        """
        size = int.from_bytes(self._exactly(4), "big")
        if size > MAX_FRAME:
            raise Malformed(f"a message of {size} bytes")
        try:
            message = self.loads(self._exactly(size))
        except (ValueError, RecursionError) as error:
            raise Malformed(str(error)) from None
        if type(message) is not dict:
            raise Malformed("no object")
        return message

    def _exactly(self, count):
        parts, have = [self.ahead], len(self.ahead)
        while have < count:
            data = posix.read(self.reader, 1 << 16)
            if not data:
                raise Closed
            parts.append(data)
            have += len(data)
        data = b"".join(parts)
        self.ahead = data[count:]
        return data[:count]


def program_channel(reader, writer):
    """The code's end."""
    return Channel(reader, writer, json_writer(), marshal.loads)


def judge_channel(reader, writer):
    """The tests' end. It never gives the code's bytes to marshal, which is unsafe for them."""
    import json

    return Channel(reader, writer, marshal.dumps, json.loads)


def json_writer():
    """A function from a value to its JSON in bytes: ``json.dumps`` without its module, which imports re and enum."""
    try:
        from _json import encode_basestring_ascii, make_encoder

        encode = make_encoder(None, refuse, encode_basestring_ascii, None, ":", ",", False, False, True)
        return lambda value: "".join(encode(value, 0)).encode()
    except (ImportError, TypeError):  # another implementation of Python
        import json

        return lambda value: json.dumps(value, separators=(",", ":")).encode()


def refuse(value):
    """What the encoder calls for a value that JSON does not have."""
    raise ValueError(f"a {type(value).__name__} is not JSON")


class Wire:
    """Values to JSON and back. Each side says in ``opaque`` and ``revive`` how its objects are numbered."""

    def opaque(self, value, depth):
        """The JSON of an object that is not plain data: a list of a tag and its parts."""
        raise Unsendable(f"an object of type {type(value).__name__}")

    def revive(self, tag, parts):
        """The object that :meth:`opaque` of the other side encoded."""
        raise Malformed(f"tag {tag!r}")

    def encode(self, value, depth=0):
        """A value as JSON; ``depth``: in how many containers it is.

        Raises:
            Unsendable: it holds what may not cross.
        """
        kind = type(value)
        if value is None or kind is bool or kind is float or (kind is str and value.isascii()):
            return value
        if kind is str:  # JSON would join surrogates
            data = value.encode("utf-8", "surrogatepass")
            return value if data.decode("utf-8", "ignore") == value else ["u", data.hex()]
        if kind is int:
            return value if -BIG < value < BIG else ["i", hex(value)]
        if depth > MAX_DEPTH:
            raise Unsendable("a value that is nested too deeply")
        deeper = depth + 1
        if kind is list or kind is tuple or kind is set or kind is frozenset:
            return [kind.__name__[0] if kind is not frozenset else "z", [self.encode(v, deeper) for v in list(value)]]
        if kind is dict or kind is OrderedDict or (kind.__name__ == "Counter" and kind.__module__ == "collections"):
            tag = {"dict": "d", "OrderedDict": "OD"}.get(kind.__name__, "CT")
            return [tag, [[self.encode(k, deeper), self.encode(v, deeper)] for k, v in list(value.items())]]
        if (
            kind is defaultdict
            and FACTORIES.get(getattr(value.default_factory, "__name__", "")) is value.default_factory
        ):
            return ["DD", value.default_factory and value.default_factory.__name__, self.encode(dict(value), depth)]
        if kind is deque:
            return ["q", value.maxlen, [self.encode(v, deeper) for v in list(value)]]
        if kind is bytes or kind is bytearray:
            return ["b" if kind is bytes else "ba", value.hex()]
        if kind is complex:
            return ["c", value.real, value.imag]
        if kind is range or kind is slice:
            return [kind.__name__, *(self.encode(v, deeper) for v in (value.start, value.stop, value.step))]
        if value is Ellipsis:
            return ["e"]
        if kind in VIEWS:
            return [VIEWS[kind], self.encode(list(value), depth)]
        fields = getattr(kind, "_fields", None) if kind.__bases__ == (tuple,) else None
        if type(fields) is tuple and vars(kind).keys() <= {*OF_NAMEDTUPLES, *fields}:
            return ["nt", kind.__name__, list(fields), self.encode(list(tuple.__iter__(value)), depth)]
        name = f"{kind.__module__}.{kind.__name__}".replace("pathlib._local", "pathlib")
        if name in LIBRARY and "." in name and name.split(".")[0] in sys.modules:
            return ["L", name, self.encode(list(LIBRARY[name](value)), deeper)]
        if name.startswith(("numpy.", "pandas.")) and (found := tables().encode(self, value, deeper)) is not None:
            return found
        return self.opaque(value, depth)

    def decode(self, item):
        """JSON as a value.

        Raises:
            Malformed: the JSON says nothing of this kind.
        """
        try:
            return self._decode(item)
        except Malformed:
            raise
        except Exception as error:  # whatever a library makes of nonsense
            raise Malformed(f"{type(error).__name__}: {error}") from None

    def _decode(self, item):
        if type(item) is not list:
            if item is None or type(item) in (bool, str, float, int):
                return item
            raise Malformed(f"a {type(item).__name__}")
        tag, *parts = item
        if tag in ("l", "t", "s", "z", "dk", "di", "dv"):
            values = list(map(self._decode, parts[0][1] if tag[0] == "d" else parts[0]))
            if tag in ("l", "t", "s", "z"):
                return {"l": list, "t": tuple, "s": set, "z": frozenset}[tag](values)
            return {"dk": lambda: dict.fromkeys(values).keys(), "di": lambda: dict(values).items(),
                    "dv": lambda: dict(enumerate(values)).values()}[tag]()  # fmt: skip
        if tag in ("d", "OD", "CT"):
            pairs = [(self._decode(k), self._decode(v)) for k, v in parts[0]]
            if tag == "CT":
                from collections import Counter

                return Counter(dict(pairs))
            return dict(pairs) if tag == "d" else OrderedDict(pairs)
        if tag == "u":
            return bytes.fromhex(parts[0]).decode("utf-8", "surrogatepass")
        if tag == "i":
            return int(text(parts[0]), 16)
        if tag == "DD":
            return defaultdict(None if parts[0] is None else FACTORIES[parts[0]], self._decode(parts[1]))
        if tag == "q":
            return deque(map(self._decode, parts[1]), parts[0])
        if tag in ("b", "ba"):
            return (bytes if tag == "b" else bytearray).fromhex(parts[0])
        if tag == "c":
            return complex(*map(float, parts))
        if tag in ("range", "slice"):
            return (range if tag == "range" else slice)(*map(self._decode, parts))
        if tag == "e":
            return Ellipsis
        if tag == "nt":
            from collections import namedtuple

            return namedtuple(text(parts[0]), list(map(text, parts[1])))(*self._decode(parts[2]))
        if tag == "L":
            return self._library(text(parts[0]), self._decode(parts[1]))
        if tag in ("na", "ns", "no", "df", "se", "ix", "ts", "td", "NA"):
            return tables().decode(self, tag, parts)
        return self.revive(tag, parts)

    @staticmethod
    def _library(name, args):
        """An object of a class in LIBRARY."""
        if name not in LIBRARY:
            raise Malformed(f"class {name!r}")
        module, kind = name.split(".")
        return getattr(__import__(module), kind)(*args)


def mutable(value):
    """Whether a value is a container that both sides may change."""
    return type(value) in MUTABLE or type(value).__name__ in ("Counter", "ndarray", "array")


def tables():
    """The module for numpy and pandas, which few values need."""
    import _tables

    return _tables


def text(value):
    """``value``, which must be a str."""
    if type(value) is not str:
        raise Malformed("no text")
    return value


def number(value):
    """``value``, which must be an int of at least 0."""
    if type(value) is not int or value < 0:
        raise Malformed("no number")
    return value
