"""The tested program's side: runs the model's code and answers the judge's calls with values.

It holds no secrets: neither the tests nor the expected values reach this process.
"""

import builtins
import operator
import os
import sys
from collections import deque

from _channel import Closed, Malformed, Unsendable, program_channel
from _wire import Codec, plain_classes, state

PLAIN = (list, dict, set, tuple, frozenset, str, bytes, bytearray)


class Program(Codec):
    """The model's namespace, and those of its objects that the judge has handles for."""

    def __init__(self, channel):
        super().__init__()
        self.channel = channel
        self.objects, self.numbers = [], {}
        self.namespace = {"__name__": "solution", "__builtins__": builtins}
        self.operations = {**OPERATIONS, "names": self.names}

    def opaque(self, value):
        kind = type(value)
        if kind is Callback:
            return ["f", value.number]
        names = []
        if isinstance(value, type) and issubclass(value, BaseException):
            names = lineage(value)
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)  # keeps it alive, so that no other object gets its id
        return ["h", self.numbers[id(value)], kind.__name__, names]

    def revive(self, tag, parts):
        if tag == "h":
            return self.objects[parts[0]]
        if tag == "f":
            return Callback(self, parts[0])
        if tag == "B":
            return getattr(builtins, parts[0])
        return super().revive(tag, parts)

    def load(self, task):
        """Run the trusted set-up and the model's code."""
        exec(compile(task["setup"], "setup", "exec", dont_inherit=True), self.namespace)
        exec(compile(task["code"], "solution", "exec", dont_inherit=True), self.namespace)
        # after the model's code, which may have redefined them
        self.shared = {n: k for n, k in plain_classes(self.namespace).items() if n in task["shared"]}

    def names(self, names):
        """The values of those names that the code defines."""
        return {name: self.namespace[name] for name in names if name in self.namespace}

    def serve(self):
        """Answer until the judge ends."""
        while True:
            request = self.channel.receive()
            try:
                self.channel.send(self.answer(request))
            except (Unsendable, RecursionError, MemoryError) as error:
                self.channel.send(failure(self, Unsendable(f"the program returned {error}")))

    def answer(self, request):
        """Do the judge's operation and return the answer to send."""
        table = []
        try:
            args = self.decode(request["a"], request["n"], table)
            names = request.get("k", [])
            cut = len(args) - len(names)
            args, keywords = args[:cut], dict(zip(names, args[cut:], strict=True))
            before = [snapshot(value) for value in table]
            try:
                value = self.operations[request["op"]](*args, **keywords)
            except BaseException as error:
                return failure(self, error)
            changed = [i for i, was in enumerate(before) if not same(was, snapshot(table[i]))]
            [root], nodes, updates = self.encode([value], table, changed)
            return {"ok": root, "n": nodes, "u": updates}
        except Malformed as error:
            return failure(self, error)


class Callback:
    """A function of the tests that the program got as an argument."""

    def __init__(self, program, number):
        self.program, self.number = program, number

    def __call__(self, *args):
        program = self.program
        table = []
        encoded, nodes, _ = program.encode(args, table)
        program.channel.send({"op": "callback", "f": self.number, "a": encoded, "n": nodes})
        while "op" in (reply := program.channel.receive()):  # the function calls the program again
            program.channel.send(program.answer(reply))
        if "exc" in reply:
            names = [name for name in reply["exc"] if isinstance(getattr(builtins, name, None), type)]
            raise getattr(builtins, names[0] if names else "Exception")(reply["text"])
        return program.decode([reply["ok"]], reply["n"], table)[0]


def lineage(kind):
    """The names of an exception class and of its bases, up to the first builtin."""
    names = []
    for base in kind.__mro__:
        names.append(base.__name__)
        if getattr(builtins, base.__name__, None) is base:
            break
    return names


def failure(program, error):
    """The answer that reports an exception."""
    try:
        says = str(error)[:1000]
    except BaseException:
        says = ""
    try:
        args, nodes, _ = program.encode(error.args, [])
    except BaseException:
        args, nodes = [says], []
    return {"exc": lineage(type(error)), "text": says, "args": args, "n": nodes}


def snapshot(value):
    """The present content of a mutable value; None if its type does not show it."""
    if isinstance(value, (list, set, bytearray, deque)):
        return list(value)
    pairs = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return None if pairs is None else [item for pair in pairs.items() for item in pair]


def same(before, after):
    """Whether two snapshots hold the same objects; False if either is None."""
    if before is None or after is None or len(before) != len(after):
        return False
    return all(a is b for a, b in zip(before, after, strict=True))


def downcast(value):
    """The builtin value of an instance of a builtin type's subclass; None for any other object."""
    for base in PLAIN:
        if isinstance(value, base):
            return dict(dict.items(value)) if base is dict else base(base.__iter__(value))
    return None


def fields(value):
    """An object's class and attributes."""
    return [type(value), state(value)]


def call(function, *args, **keywords):
    """The operation ``call``."""
    return function(*args, **keywords)


OPERATIONS = {"call": call, "plain": downcast, "fields": fields}
for module, names in (
    (builtins, "isinstance issubclass dir getattr setattr len iter next str repr bool int float complex abs round "
               "reversed"),
    (operator, "getitem setitem delitem add sub mul truediv floordiv mod pow and_ or_ xor matmul lt le gt ge neg pos "
               "invert index"),
):  # fmt: skip
    OPERATIONS |= {name: getattr(module, name) for name in names.split()}


def main(task):
    """Load the task and serve the judge over the pipes argv[1] and argv[2]."""
    sys.path += task["path"]
    builtins.exit = builtins.quit = sys.exit
    channel = program_channel(int(sys.argv[1]), int(sys.argv[2]))
    channel.send({"hello": os.getpid()})
    silence = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(silence, fd)
    program = Program(channel)
    try:
        program.load(task)
    except BaseException as error:
        channel.send(failure(program, error))
        return
    channel.send({"ready": True})
    try:  # noqa: SIM105 - importing contextlib takes as long as starting half the interpreter
        program.serve()
    except Closed:
        pass
