"""The code's process: runs the model's code and the operations that the tests' process requests.

It never sees the tests. Nobody trusts its answers: data, or numbers of objects in this process.
"""

import _operator
import builtins
import io
import posix  # os is not loaded yet, and takes a millisecond
import sys
from _thread import RLock

from _messages import FACTORIES, FUNCTIONS, Closed, Unsendable, Wire, mutable, program_channel

PRINTED = 1 << 20  # characters between two messages; the rest is dropped
CAUSES = 5  # length of an exception's chain of causes
WRAPPERS = {
    "method",
    "partial",
    "_lru_cache_wrapper",
    "singledispatch_wrapper",
    "builtin_function_or_method",
}
STREAMS = {"coroutine": "w", "async_generator": "g"}  # type -> tag
LEAVES = {int: int.__int__, float: float.__float__, complex: complex.__pos__, str: str.__str__}
ITEMS = {dict: lambda value: dict(dict.items(value))} | {
    kind: lambda value, kind=kind: kind(kind.__iter__(value))
    for kind in (list, tuple, set, frozenset, bytes, bytearray)
}
# Builtin type -> the plain value of an object of a class that derives from it
READ = LEAVES | ITEMS
# What the code may add to a class of the set-up, as well as methods
MAY_ADD = {"__lt__", "__le__", "__gt__", "__ge__", "__annotations__"}
FUNCTION = type(lambda: None)
FUNCTION_KIND = (0, "function", False, True, False, (), "", ())  # what `describe` would say


class Program(Wire):
    """The model's names, and the objects that the tests' process knows by number."""

    def __init__(self, channel):
        self.channel = channel
        self.objects = []
        self.numbers = {}
        self.theirs = {}  # stand-ins for the tests' functions and exceptions
        self.their_numbers = {}
        self.depth = 0  # number of nested operations under way
        self.reading = False  # while the value of a container is encoded
        self.plain = False  # while the content of an exception is encoded
        self.turn = RLock()  # lets one of the code's threads exchange messages at a time
        self.loop = None
        self.set_up = []  # classes of the set-up with their attributes before the code ran
        self.watched = {}  # the plain globals that the tests read, as they last crossed
        self.module = sys.modules["solution"] = type(sys)("solution")
        self.namespace = self.module.__dict__
        self.namespace["__builtins__"] = builtins
        self.operations = {
            **vars(builtins),
            **vars(_operator),
            "call": lambda function, /, *a, **k: function(*a, **k),
            "method": lambda value, name, /, *a, **k: getattr(value, name)(*a, **k),
            "send": lambda value, sent: value.send(sent),
            "throw": lambda value, error: value.throw(error),
            "anext": lambda value: self.finish(value.__anext__()),
            "await": self.finish,
            "value": lambda value: READ[base_of(type(value))](value),
            "state": state,
            "copy": lambda value: __import__("copy").copy(value),
            "deepcopy": lambda value: __import__("copy").deepcopy(value),
        }
        self.describing = {"names": self.names, "get": self.get}  # these give JSON

    def opaque(self, value, depth):
        kind = type(value)
        if id(value) in self.their_numbers:
            return ["f", self.their_numbers[id(value)]]
        if isinstance(value, BaseException):
            return self.exception(value, depth)
        is_class = isinstance(value, type)
        if self.plain and (is_class or kind in FUNCTIONS or kind.__name__ in WRAPPERS):
            raise Unsendable("what can be called")
        if is_class:
            return self.kind(value)
        if kind is type(sys):
            raise Unsendable(f"the module {value.__name__}")
        if kind.__module__ in ("builtins", "itertools"):
            if kind.__module__ == "itertools" or hasattr(kind, "__next__"):
                return ["y", self.number(value)]
            if kind.__name__ in STREAMS:
                return [STREAMS[kind.__name__], self.number(value)]
        if kind in FUNCTIONS or kind.__name__ in WRAPPERS:
            return ["h", self.number(value), *FUNCTION_KIND]
        data = self.value(value, base_of(kind))
        return ["h", self.number(value), *self.describe(kind), *data]

    def number(self, value):
        """The number of an object, from 1; the object stays alive, so that no other gets its id."""
        if id(value) not in self.numbers:
            self.objects.append(value)
            self.numbers[id(value)] = len(self.objects)
        return self.numbers[id(value)]

    def kind(self, kind):
        """The JSON of a class: a builtin type's name, an exception's lineage, another class's description."""
        if FACTORIES.get(kind.__name__) is kind and not hasattr(kind, "__class_getitem__"):
            return ["T", kind.__name__]
        if issubclass(kind, BaseException):
            return ["X", self.lineage(kind)]
        return ["k", *self.describe(kind)]

    def describe(self, kind):
        """A class, for ``Judge.kind``.

        Its number and name, whether it defines ``==``, can be hashed and has items as a class, its bases' numbers, the
        builtin type that it derives from, and the names that it has beyond that type or, without one, object's.
        """
        lineage = kind.__mro__
        equals = next(base for base in lineage if "__eq__" in vars(base))
        compares = equals is not object and equals.__module__ != "enum"
        hashes = kind.__hash__ is not None
        has_items = hasattr(type(kind), "__iter__") or hasattr(kind, "__class_getitem__")
        ours = [base for base in lineage[1:-1] if base.__module__ == "solution"]
        bases = list(map(self.number, ours))
        data = base_of(kind)
        end = lineage.index(data or object)
        defined = {}  # a dict keeps the order
        for base in lineage[:end]:
            for name, value in vars(base).items():
                if data or name[:2] == name[-2:] == "__":
                    defined.setdefault(name, value is not None)
        names = [name for name, usable in defined.items() if usable]
        name_of_data = data.__name__ if data else ""
        first = [self.number(kind), kind.__name__]
        return [*first, compares, hashes, has_items, bases, name_of_data, names]

    def value(self, value, base):
        """A list with the JSON of an object's plain value; empty if it has none, or is a container inside another."""
        if base is None or (base in ITEMS and self.reading):  # cycles of objects would take forever
            return []
        outer = self.reading
        self.reading = outer or base in ITEMS
        data = self.as_data(READ[base](value))
        self.reading = outer
        return [] if data is ... else [data]

    def lineage(self, kind):
        """Module, name and number of an exception class and its bases, up to the first builtin."""
        kinds = []
        for base in kind.__mro__:
            if issubclass(base, BaseException):
                library = getattr(sys.modules.get(base.__module__), base.__name__, None) is base
                module = base.__module__ if library else "solution"
                kinds.append([module, base.__name__, self.number(base)])
                if library and base.__module__ == "builtins":
                    break
        return kinds

    def exception(self, error, depth=0):
        """The JSON of an exception: lineage, number, text, plain arguments and attributes, and its cause."""
        try:
            says = str(error)[:10_000]
        except BaseException:
            says = ""
        args = error.args
        if isinstance(error, OSError) and len(args) == 2:
            args = (*args, error.filename)
        outer = self.plain
        self.plain = True
        args = self.as_data(args)
        attributes = []
        for name, value in list(vars(error).items())[:50]:
            data = self.as_data(value)
            if data is not ...:
                attributes += [name, data]
        cause = None
        if error.__cause__ is not None and depth <= CAUSES:
            cause = self.exception(error.__cause__, depth + 1)
        self.plain = outer
        if args is ...:
            args = self.as_data((says,))
        lineage = self.lineage(type(error))
        return ["x", lineage, self.number(error), says, args, ["d", *attributes], cause]

    def as_data(self, value):
        """The JSON of a value; ``...`` if it may not cross."""
        try:
            return self.encode(value, 1)
        except (Unsendable, RecursionError):
            return ...

    def revive(self, tag, parts):
        if tag == "h":
            return self.objects[parts[0] - 1]
        if tag == "m":
            return getattr(self.objects[parts[0] - 1], parts[1])
        if tag == "B":
            return getattr(builtins, parts[0])
        if tag not in ("f", "x"):
            return super().revive(tag, parts)
        number = parts[0]
        if tag == "x":
            kind = getattr(builtins, parts[1])
            self.keep(number, kind(*self.decode(parts[2])))
        elif number not in self.theirs:
            self.keep(number, self.stand_in(*parts))
        return self.theirs[number]

    def keep(self, number, value):
        """Let a value stand for the tests' object of that number; it stays alive, so that no other gets its id."""
        self.theirs[number] = value
        self.their_numbers[id(value)] = number

    def stand_in(self, number, name, steps):
        """A stand-in for a function of the tests, or for an iterator if it ``steps``."""

        def function(*args, **keywords):
            return self.request("callback", number, args, keywords)

        def iterator():
            while True:
                try:
                    item = self.request("next", number, [], {})
                except StopIteration:
                    return
                yield item

        function.__name__ = function.__qualname__ = name
        return iterator() if steps else function

    def request(self, op, number, args, keywords):
        """Ask the tests' process to call one of its functions, or to advance an iterator."""
        if not self.depth:
            raise RuntimeError("the tests are called outside of their calls")
        with self.turn:
            call = self.encode_call(args, keywords)
            self.channel.send({"op": op, "f": number, **call, **self.printed()})
            reply = self.channel.receive()
            while "op" in reply:  # the function calls the code
                self.channel.send(self.answer(reply))
                reply = self.channel.receive()
            if "x" in reply:
                raise self.decode(reply["x"])
            return self.decode(reply["ok"])

    def printed(self):
        """The text that the code has printed since the last message, by stream."""
        texts = {}
        for name, stream in (("stdout", self.stdout), ("stderr", self.stderr)):
            text = stream.getvalue()[:PRINTED]
            if text:
                texts[name] = text
            stream.seek(0)
            stream.truncate()
        return texts

    def serve(self):
        """Answer until the tests' process ends."""
        while True:
            answer = self.answer(self.channel.receive())
            with self.turn:
                try:
                    self.channel.send(answer)
                except Unsendable as error:
                    self.channel.send({"unjudged": f"the code gives {error}"})

    def answer(self, request):
        """Do an operation and return the answer."""
        self.depth += 1
        both = []
        before = {}
        try:
            args, keywords = self.decode_call(request)
            both = [*args, *keywords.values()]
            containers = [index for index, value in enumerate(both) if mutable(value)]
            if request["w"]:
                before = {index: self.as_data(both[index]) for index in containers}
            if request["op"] in self.describing:
                reply = {"ok": self.describing[request["op"]](*args)}
            else:
                value = self.operations[request["op"]](*args, **keywords)
                same = [index for index in containers if both[index] is value]
                reply = {"ok": ["a", same[0]] if same else self.encode(value)}
        except Closed:
            raise
        except Unsendable as error:
            return {"unjudged": f"the code gives {error}"}
        except BaseException as error:
            reply = {"x": self.encode(error)}
        finally:
            self.depth -= 1
        name = self.changed_class()
        if name:
            return {"unjudged": f"the code changes {name}, a class of the set-up"}
        changed = []
        for index, old in before.items():
            now = self.as_data(both[index])
            if now is ... and old is not ...:
                return {
                    "unjudged": "the code leaves what may not cross in a container of the tests"
                }
            if now != old:
                changed.append([index, now])
        return reply | {"changed": changed, "globals": self.changed_globals(), **self.printed()}

    def changed_globals(self):
        """The plain globals that have changed since they crossed. The tests' attacks override it."""
        changed = []
        for name, old in self.watched.items():
            now = self.as_data(self.namespace.get(name))
            if now is not ... and now != old:
                changed.append([name, now])
        self.watched.update(changed)
        return changed

    def names(self, *names):
        """[name, JSON of its value] for the names that the code defines."""
        defined = []
        for name in names:
            if name not in self.namespace:
                continue
            value = self.namespace[name]
            try:
                data = self.encode(value)
            except Unsendable:
                continue
            if not callable(value):
                self.watched[name] = data
            defined.append([name, data])
        return defined

    def get(self, value, name):
        """The JSON of an attribute; ``["m"]`` for a method."""
        attribute = getattr(value, name)
        if callable(attribute) and not isinstance(attribute, type):
            return ["m"]
        return self.encode(attribute)

    def finish(self, value):
        """The result of an awaitable."""
        import asyncio

        async def waited():
            return await value

        self.loop = self.loop or asyncio.new_event_loop()
        return self.loop.run_until_complete(waited())

    def load(self, task):
        """Run the trusted set-up and the model's code."""
        self.stdout = sys.stdout = io.StringIO()
        self.stderr = sys.stderr = io.StringIO()
        exec(compile(task["setup"], "setup", "exec", dont_inherit=True), self.namespace)
        here = self.namespace.get("__name__")
        shared = {}
        for name, value in self.namespace.items():
            if isinstance(value, type) and value.__module__ == here:
                shared[name] = value
                self.set_up.append((value, dict(vars(value))))
        exec(compile(task["code"], "solution", "exec", dont_inherit=True), self.namespace)
        self.namespace |= shared  # an answer may repeat them
        self.printed()

    def changed_class(self):
        """The name of a class of the set-up that the code has changed; "" if none.

        The tests build expected values from these classes. So the code may only add methods, and comparisons by size.
        """
        for kind, before in self.set_up:
            now = vars(kind)
            for name, value in now.items():
                is_method = type(value) is FUNCTION and not name.startswith("__")
                if name not in before and name not in MAY_ADD and not is_method:
                    return kind.__name__
            if any(now.get(name) is not value for name, value in before.items()):
                return kind.__name__
        return ""


def base_of(kind):
    """The builtin type that a class of the code derives from, if READ knows it; else None."""
    ours = ("solution", "enum")
    base = next((base for base in kind.__mro__ if base.__module__ not in ours), None)
    return base if base in READ else None


def state(value):
    """The attributes of an object, unless its class derives from a builtin type, so that it also has a value."""
    if isinstance(value, tuple(READ)):
        raise Unsendable(f"an object of {type(value).__name__}, which is data with code")
    attributes = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        slots = vars(base).get("__slots__", ())
        slots = (slots,) if isinstance(slots, str) else slots
        for slot in slots:
            stem = base.__name__.lstrip("_")
            private = stem and slot.startswith("__") and not slot.endswith("__")
            name = f"_{stem}{slot}" if private else slot  # as Python stores it
            if hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


def main(task):
    """Run the task's code and serve the tests' process over the pipes argv[1] and argv[2]."""
    sys.path += task["path"]
    builtins.exit = builtins.quit = sys.exit
    channel = program_channel(int(sys.argv[1]), int(sys.argv[2]))
    channel.send({"hello": posix.getpid()})
    silence = posix.open("/dev/null", posix.O_RDWR)
    for fd in range(3):
        posix.dup2(silence, fd)
    program = Program(channel)
    try:
        program.load(task)
    except BaseException as error:
        channel.send({"x": program.exception(error)})
        return
    channel.send({"ready": True})
    try:
        program.serve()
    except Closed:
        return
