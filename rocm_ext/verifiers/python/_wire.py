"""How values cross between the judge of the tests and the tested program: as JSON of plain data.

This runs inside the sandboxes with the standard library alone. A message holds a graph. Its nodes are mutable
containers with numbers that both sides keep for a while: shared containers stay shared, cycles work, a container that
crosses twice is the same object, and changes on one side reach the other with the next message. Decoding makes exact
library types and nothing else: a value cannot carry code or fake equality.
"""

import builtins
import sys
from _collections import OrderedDict, defaultdict, deque
from _operator import is_

from _channel import Malformed, TooMuch, Unsendable

MAX_DEPTH = 100  # of tuples in tuples; lists and dicts are nodes and may nest as they like
BIG = 1 << 53
KEPT, LARGE = 64, 1000  # containers whose changes cross by themselves: how many, and their size
SWEPT = 1000  # other containers that are kept before the first search for those that nobody refers to
WATCHED = 256  # with more containers, changes cross with the end of an exchange only, unless a message refers to them

DICTS = {"d": dict, "OD": OrderedDict, "DD": defaultdict}  # and "CT": collections.Counter, once it is there
TAGS = {kind: tag for tag, kind in DICTS.items()} | {list: "l", set: "s", bytearray: "ba", deque: "q"}
KINDS = {tag: kind for kind, tag in TAGS.items()}
TYPES = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
LEAVES, INNER, HASHED = {"ba", "ar", "na", "si", "bi"}, {"l", "q", "o", "sn"}, {"d", "OD", "DD", "CT", "s"}
STREAMS = {("array", "array"), ("numpy", "ndarray"), ("_io", "StringIO"), ("_io", "BytesIO")}
OWN = {"h", "k", "u", "m", "f", "y", "w", "ay", "x", "ex", "ej", "B"}  # tags of :meth:`Codec.opaque`
KEYS: type = type({}.keys())
ITEMS: type = type({}.items())
PAIRS: type = type({}.values())


class Codec:
    """Values to JSON and back.

    ``shared``: name -> class that both sides define from the same trusted source; their instances cross as
    attributes. Subclasses encode and decode all other objects in ``opaque`` and ``revive``.
    """

    parity = 0  # the two sides number their containers apart

    def __init__(self):
        self.shared = {}
        self.known = {}  # number -> [container, its content when both sides last agreed]
        self.unwatched = {}  # like ``known``; their changes cross only when a message refers to them
        self.sweep = SWEPT
        self.ids = {}  # id(container) -> number
        self.count = self.parity
        self.current = set()  # numbers that crossed in the exchange under way, so that both sides have them
        self.depth = 0  # exchanges under way, one in the other
        self._queue = None

    def opaque(self, value):
        """The JSON of an object that is not plain data: a list of a tag and its parts."""
        raise Unsendable(f"an object of type {type(value).__name__}")

    def revive(self, tag, parts):
        """The object that :meth:`opaque` of the other side encoded."""
        raise Malformed(f"tag {tag!r}")

    def inspect(self, value):
        """Look at an object of a shared class that has come from the other side."""

    # to JSON

    def encode(self, roots, nested=False):
        """Values to JSON.

        Args:
            roots: the values.
            nested: the message is in the midst of an exchange.

        Returns:
            the JSON of the roots, and the nodes: those that they reach, and known ones that have changed.
        """
        queue, sent = [], set()
        before, self._queue = self._queue, (queue, sent)
        try:
            encoded = [self._encode(root, 0) for root in roots]
            for number, entry in () if nested and len(self.known) > WATCHED else list(self.known.items()):
                if number not in sent and changed(entry):
                    sent.add(number)
                    queue.append((number, entry[0]))
            nodes = []
            for number, value in queue:  # it grows meanwhile
                nodes.append([number, *self._content(value)])
        finally:
            self._queue = before
        for number, value in queue:
            self.known[number][1] = snapshot(value)
        self.current |= sent
        return encoded, nodes

    def _number(self, value):
        """The number of a container, which is sent unless the other side has it as it is."""
        queue, sent = self._queue
        number = self.ids.get(id(value))
        if number is None:
            self.count += 2
            number = self.ids[id(value)] = self.count
            self.known[number] = [value, None]
        elif number in self.unwatched:
            self.known[number] = self.unwatched.pop(number)
        elif number in self.current and number not in sent and not changed(self.known[number]):
            return number
        if number not in sent:
            sent.add(number)
            queue.append((number, value))
        return number

    def _content(self, value):
        """The JSON of a node's content."""
        encode = self._encode
        kind = type(value)
        tag = TAGS.get(kind)
        if tag == "l" or tag == "s":
            return [tag, [encode(v, 0) for v in list(value)]]
        if tag in DICTS:
            return [tag, [[encode(k, 0), encode(v, 0)] for k, v in list(value.items())]]
        if tag == "q":
            return [tag, [encode(v, 0) for v in value], value.maxlen]
        if tag == "ba":
            return [tag, value.hex()]
        if self.shared.get(kind.__name__) is kind:
            return ["o", kind.__name__, [[name, encode(v, 0)] for name, v in state(value).items()]]
        tag, header, content = types().content(value)
        return [tag, encode(content, 0), header]

    def _encode(self, value, depth):
        kind = type(value)
        if value is None or kind is bool or kind is str or kind is float:
            return value
        if kind is int:
            return value if -BIG < value < BIG else ["i", hex(value)]
        if kind in TAGS or self.shared.get(kind.__name__) is kind:
            return ["r", self._number(value)]
        if depth > MAX_DEPTH:
            raise TooMuch("tuples nested too deeply")

        def each(values):
            return [self._encode(v, depth + 1) for v in values]

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
        if kind is slice:
            return ["sl", each((value.start, value.stop, value.step))]
        if value is Ellipsis:
            return ["e"]
        if value is NotImplemented:
            return ["ni"]
        if kind is type and TYPES.get(value.__name__) is value:
            return ["T", value.__name__]
        if kind is KEYS:
            return ["dk", each(list(value))]
        if kind is ITEMS:
            return ["di", [each(pair) for pair in list(value)]]
        if kind is PAIRS:
            return ["dv", each(list(value))]
        if issubclass(kind, tuple) and plain_tuple(kind):
            return ["nt", kind.__name__, list(kind._fields), each(tuple.__iter__(value))]
        if kind.__name__ == "Counter" and "CT" not in DICTS and "collections" in sys.modules and know_counter() is kind:
            return self._encode(value, depth)
        found = types().encode(value, kind)
        if found is None:
            return self.opaque(value)
        if found[0] == "node":
            return ["r", self._number(value)]
        return [found[0], *each(found[1:])]

    # from JSON

    def decode(self, roots, nodes):
        """JSON to values.

        Raises:
            Malformed: the message is invalid.
        """
        try:
            for node in nodes:
                self._place(node)
            # arrays first, since tables are made of them; then objects: the hashes in sets and dicts may depend on
            # their attributes
            for tags in (LEAVES, INNER, HASHED):
                for node in nodes:
                    if node[1] in tags:
                        self.fill(self.known[node[0]][0], node[1:])
            found = [self._decode(root, 0) for root in roots]
            for node in nodes:
                entry = self.known[node[0]]
                entry[1] = snapshot(entry[0])
                if node[1] == "o":
                    self.inspect(entry[0])
                self.current.add(node[0])
            return found
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

    def _place(self, node):
        """Have a container for a node: the known one, or a new one of the node's type."""
        number, tag = integer(node[0]), node[1]
        if tag == "CT" and tag not in DICTS:
            know_counter()
        kind = self.shared[node[2]] if tag == "o" else KINDS.get(tag)
        if entry := self.known.pop(number, None) or self.unwatched.pop(number, None):
            value = entry[0]
            if type(value) is kind if kind else types().fits(value, tag, node[3]):
                self.known[number] = [value, None]
                return
            raise ValueError(f"a {type(value).__name__} became a node {tag!r}")
        if kind is None:
            value = types().empty(tag, node[3])
        elif tag == "o":
            value = object.__new__(kind)
        else:
            value = deque(maxlen=node[3]) if tag == "q" else kind()
        self.known[number] = [value, None]
        self.ids[id(value)] = number

    def fill(self, value, node):
        """Replace a node's content with that in the message."""
        tag, items = node[0], node[1]
        decode = self._decode
        if tag == "o":
            self._fill_object(value, node[2])
        elif tag in DICTS:
            pairs = [[decode(item, 0) for item in pair] for pair in items]
            value.clear()
            for key, item in pairs:
                value[key] = item
        elif tag == "ba":
            value[:] = bytes.fromhex(items)
        elif tag in KINDS:
            items = [decode(item, 0) for item in items]
            value.clear()
            if tag == "s":
                value.update(items)
            else:
                value.extend(items)
        else:
            types().fill(value, tag, decode(items, 0))

    def _fill_object(self, value, pairs):
        """Set the attributes of an object of a shared class; none that would replace a method of the class."""
        kind = type(value)
        for name in state(value):
            object.__delattr__(value, name)
        for name, item in pairs:
            of_class = getattr(kind, text(name), None)
            if not name.isidentifier() or (name[:2] == "__" and name[-2:] == "__") or callable(of_class):
                raise ValueError(f"an attribute {name!r}")
            if hasattr(type(of_class), "__get__") and type(of_class) is not SLOT:
                continue  # a property: the class computes it
            object.__setattr__(value, name, self._decode(item, 0))

    def _decode(self, item, depth):
        if type(item) is not list:
            if type(item) is dict:
                raise ValueError("an object as a value")
            return item
        if depth > MAX_DEPTH + 2:
            raise ValueError("nested too deeply")

        def each(items):
            return [self._decode(i, depth + 1) for i in items]

        tag = item[0]
        if tag == "r":
            return self.known[integer(item[1])][0]
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
        if tag == "sl":
            return slice(*each(item[1]))
        if tag == "e":
            return Ellipsis
        if tag == "ni":
            return NotImplemented
        if tag == "T":
            return TYPES[item[1]]
        if tag == "dk":
            return dict.fromkeys(each(item[1])).keys()
        if tag == "di":
            return dict(each(pair) for pair in item[1]).items()
        if tag == "dv":
            return dict(enumerate(each(item[1]))).values()
        if tag == "nt":
            return named(text(item[1]), tuple(map(text, item[2])))._make(each(item[3]))
        if tag in OWN:
            return self.revive(tag, item[1:])
        if (make := types().DECODE.get(tag)) is None:
            raise ValueError(f"tag {tag!r}")
        return make(*each(item[1:]))

    # containers that outlive an exchange

    def settle(self):
        """Before an exchange: forget containers that nobody else refers to, and watch no large and no old ones.

        Containers that have changed cross first.
        """
        self.current.clear()
        for number in list(self.known):
            entry = self.known[number]
            if (alone(entry) or size(entry[1]) > LARGE) and not changed(entry):
                self._drop(number)
        for number in list(self.known)[: max(0, len(self.known) - KEPT)]:
            if not changed(self.known[number]):
                self._drop(number)
        if len(self.unwatched) > self.sweep:
            for number in list(self.unwatched):
                if alone(self.unwatched[number]):
                    self._drop(number)
            self.sweep = SWEPT + 2 * len(self.unwatched)

    def _drop(self, number):
        """Forget a container, or stop watching it if somebody refers to it."""
        entry = self.known.pop(number, None) or self.unwatched.pop(number)
        if alone(entry):
            del self.ids[id(entry[0])]
        else:
            self.unwatched[number] = [entry[0], None]


def know_counter():
    """Let counters cross, too; their module takes long to import."""
    from collections import Counter

    DICTS["CT"] = KINDS["CT"] = Counter
    TAGS[Counter] = "CT"
    return Counter


def types():
    """The module of library types, loaded when the first is needed."""
    import _types

    return _types


def snapshot(value):
    """The present content of a container: a list of what it holds; for arrays and streams a tuple."""
    kind = type(value)
    if kind is list or kind is set or kind is deque or kind is bytearray:
        return list(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    if (kind.__module__, kind.__name__) in STREAMS:
        return types().snapshot(value)
    pairs = state(value)
    return [*pairs, *pairs.values()]


def changed(entry):
    """Whether a known container has changed since both sides agreed."""
    now, before = snapshot(entry[0]), entry[1]
    if type(now) is tuple or before is None or len(now) != len(before):
        return now != before
    return not all(map(is_, now, before))


def size(content):
    """The size of a snapshot."""
    return 0 if content is None else len(content[-1] if type(content) is tuple else content)


def alone(entry):
    """Whether nothing but the table of known containers refers to this one."""
    return sys.getrefcount(entry[0]) <= ALONE


_entry: list = [[]]
ALONE = sys.getrefcount(_entry[0])
SLOT = type(vars(type("S", (), {"__slots__": ("x",)}))["x"])


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
        from collections import namedtuple

        NAMED[name, fields] = namedtuple(name, fields)
    return NAMED[name, fields]


MADE = {"__doc__", "__slots__", "_fields", "_field_defaults", "__new__", "_make", "_replace", "__repr__", "_asdict",
        "__getnewargs__", "__match_args__", "__module__", "__annotations__", "__orig_bases__", "__replace__",
        "__annotate__", "__annotate_func__", "__annotations_cache__", "__firstlineno__",
        "__static_attributes__"}  # fmt: skip


def plain_tuple(kind):
    """Whether a class is a named tuple without methods of its own."""
    fields = vars(kind).get("_fields")
    return type(fields) is tuple and kind.__bases__ == (tuple,) and vars(kind).keys() - MADE <= set(fields)


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
