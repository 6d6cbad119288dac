"""The tests' side: runs the user's tests against values that the tested program returns.

The model's code never runs in this process. A name that the tests take from the solution is a handle: calling it sends
the arguments to the program and gets plain data back, as exact builtin types. The comparison with the expected value
happens here, so the program never sees that value and can only return its own. Other objects stay in the program and
are handles here. A handle never judges the tests' values: ``==``, ``in`` and arithmetic with plain data ask the program
for the handle's value, if it has one, and decide here.
"""

import builtins

from _channel import Closed, Malformed, judge_channel
from _tests import run
from _wire import Codec

VISIBLE = ("__name__", "__qualname__", "__module__", "__doc__", "__dict__", "__annotations__", "__enter__", "__exit__")


class Gone(BaseException):
    """The program has ended or sent a malformed message. Not an Exception, so that no test catches it and passes."""


class Judge(Codec):
    """The connection to the program."""

    def __init__(self, channel):
        super().__init__()
        self.channel = channel
        self.handles, self.exceptions, self.callbacks = {}, {}, []
        self.shared_exceptions = {}
        self.gone = ""

    def opaque(self, value):
        kind = type(value)
        if kind is Handle:
            return ["h", number_of(value)]
        if isinstance(value, type) and "_handle" in vars(value):
            return ["h", vars(value)["_handle"]]
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return ["B", name]
        if callable(value):
            self.callbacks.append(value)
            return ["f", len(self.callbacks) - 1]
        return super().opaque(value)

    def revive(self, tag, parts):
        if tag == "f":
            return self.callbacks[parts[0]]
        if tag != "h" or type(parts[0]) is not int:
            return super().revive(tag, parts)
        number, name, lineage = parts[0], str(parts[1])[:100], parts[2]
        if lineage:
            return self.exception(lineage, number)
        if number not in self.handles:
            self.handles[number] = Handle(self, number, name)
        return self.handles[number]

    def exception(self, lineage, number=None):
        """The class for an exception of the program: a builtin, one of the set-up's, or a new class of that name."""
        name = lineage[0]
        found = getattr(builtins, name, None) or self.shared_exceptions.get(name)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
        key = tuple(map(str, lineage[:20]))
        if key not in self.exceptions:
            base = self.exception(lineage[1:]) if len(lineage) > 1 else Exception
            self.exceptions[key] = type(name, (base,), {})
        if number is not None and "_handle" not in vars(self.exceptions[key]):
            self.exceptions[key]._handle = number
        return self.exceptions[key]

    def ask(self, op, *args, **keywords):
        """Have the program do an operation; returns or raises what it returns or raises."""
        if self.gone:
            raise Gone(self.gone)
        table = []
        encoded, nodes, _ = self.encode([*args, *keywords.values()], table)
        try:
            self.channel.send({"op": op, "a": encoded, "k": list(keywords), "n": nodes})
            while "op" in (reply := self.channel.receive()):
                self.channel.send(self.call_back(reply))
            if "exc" in reply:
                raise self.raised(reply)
            known = len(table)
            [value] = self.decode([reply["ok"]], reply["n"], table)
            for index, node in reply["u"]:
                if type(index) is not int or not 0 <= index < known:
                    raise Malformed("an update of nothing")
                self.fill(table[index], node, table)
            return value
        except Closed:
            self.gone = "the program ended during the tests"
        except (Malformed, KeyError, TypeError, ValueError, IndexError) as error:
            if getattr(error, "from_program", False):
                raise
            self.gone = f"the program sent nonsense: {error}"
        raise Gone(self.gone)

    def call_back(self, request):
        """Call a function of the tests for the program, and return the answer to send."""
        table = []
        args = self.decode(request["a"], request["n"], table)
        try:
            [value], nodes, _ = self.encode([self.callbacks[request["f"]](*args)], table)
            return {"ok": value, "n": nodes}
        except Exception as error:
            return {"exc": [kind.__name__ for kind in type(error).__mro__], "text": str(error)[:1000]}

    def raised(self, reply):
        """The exception that the program raised."""
        names = reply["exc"]
        if type(names) is not list or not names or not all(type(name) is str for name in names):
            raise Malformed("an exception without a name")
        says = str(reply.get("text", ""))[:1000]
        kind = self.exception(names)
        if not issubclass(kind, Exception):  # such as SystemExit: the program wants to end
            self.gone = f"the program raised {names[0]}: {says}"
            return Gone(self.gone)
        try:
            args = self.decode(reply["args"], reply["n"], [])
            error = kind(*args)
        except Exception:
            error = RuntimeError(says)
        error.from_program = True
        return error


class Handle:
    """An object in the program: a function, class, instance or iterator."""

    __slots__ = ("_judge", "_name", "_number")

    def __init__(self, judge, number, name):
        for slot, value in (("_judge", judge), ("_number", number), ("_name", name)):
            object.__setattr__(self, slot, value)

    def __getattr__(self, name):
        if name[:2] == name[-2:] == "__" and name not in VISIBLE:  # numpy would read any address: __array_interface__
            raise AttributeError(name)
        return ask(self, "getattr", name)

    def __setattr__(self, name, value):
        ask(self, "setattr", name, value)

    def __call__(self, *args, **keywords):
        return ask(self, "call", *args, **keywords)

    def __iter__(self):
        iterator = ask(self, "iter")
        if type(iterator) is not Handle:
            return iter(iterator)
        return iterator if iterator is self else iter_handle(iterator)

    def __contains__(self, item):
        return any(item is each or item == each for each in self)

    def __eq__(self, other):
        if self is other:
            return True
        if type(other) is Handle:
            mine, others = ask(self, "fields"), ask(other, "fields")
            return mine[0] is others[0] and bool(mine[1]) and mine[1] == others[1]
        value = ask(self, "plain")
        return NotImplemented if value is None or type(value) is Handle else value == other

    def __hash__(self):
        return hash(number_of(self))

    def __instancecheck__(self, value):
        return type(value) is Handle and bool(ask(value, "isinstance", self))

    def __subclasscheck__(self, kind):
        return type(kind) is Handle and bool(ask(kind, "issubclass", self))

    def __enter__(self):
        return self.__getattr__("__enter__")()

    def __exit__(self, *error):
        return self.__getattr__("__exit__")(None, None, None)

    def __format__(self, spec):
        return format(str(self), spec)

    def __dir__(self):
        return ask(self, "dir")


def number_of(handle):
    """The program's number of the object, read without asking the program."""
    return object.__getattribute__(handle, "_number")


def ask(handle, op, *args, **keywords):
    """Have the program do an operation on a handle's object; see :meth:`Judge.ask`."""
    return object.__getattribute__(handle, "_judge").ask(op, handle, *args, **keywords)


def iter_handle(iterator):
    """The values of an iterator in the program."""
    while True:
        try:
            value = ask(iterator, "next")
        except StopIteration:
            return
        yield value


def _operator(op):
    # with plain data as the other operand, the program would see what the tests expect
    def method(self, other):
        return ask(self, op, other) if type(other) is Handle else NotImplemented

    return method


for _name in ("len", "next", "str", "repr", "bool", "int", "float", "complex", "abs", "round", "reversed", "index",
              "neg", "pos", "invert", "getitem", "setitem", "delitem"):  # fmt: skip
    setattr(Handle, f"__{_name}__", lambda self, *args, op=_name: ask(self, op, *args))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "matmul",
              "lt", "le", "gt", "ge"):  # fmt: skip
    setattr(Handle, f"__{_name.strip('_')}__", _operator(_name))


def judge(task, hears, asks, report):
    """Judge one task.

    Args:
        task: what the verifier sent.
        hears, asks: the ends of the pipes from and to the program.
        report: writes a line for the verifier.
    """
    program = Judge(judge_channel(hears, asks))
    try:
        report(run(task, program, report))
    except (Closed, Malformed, Gone) as error:
        report({"kind": "gone", "detail": program.gone or f"the program ended while it was loaded {error}"})
