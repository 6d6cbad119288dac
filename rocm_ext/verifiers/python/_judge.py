"""The tests' side: runs the user's tests against values that the tested program returns.

The model's code never runs in this process. A name that the tests take from the solution is a handle: calling it sends
the arguments to the program and gets plain data back, as exact library types. The comparison with the expected value
happens here, so the program never sees that value and can only return its own. Objects of the code's own classes stay
in the program; the tests use them through handles, if they take a name for a class. What cannot be judged so stops the
tests with its reason.
"""

import ast
import builtins
import contextlib
import sys
import weakref
from _thread import RLock

import _live as live
from _channel import Closed, Malformed, TooMuch, Unsendable, judge_channel
from _handles import HINT, Function, Handle, Method, Remote, State, Unjudged, is_handle, set_slots
from _raised import Errors
from _reach import doubt, unreached
from _roles import Roles
from _special import Record, remote_class
from _tests import run
from _wire import SLOT, Codec, deque, integer, state, text


class Gone(BaseException):
    """The program has ended or sent a malformed message. Not an Exception, so that no test catches it and passes."""


READS = {  # operations that change no object
    "len", "bool", "str", "repr", "int", "float", "complex", "index", "abs", "round", "trunc", "floor", "ceil", "neg",
    "pos", "invert", "bytes", "hash", "plain", "fields", "eq", "lt", "le", "gt", "ge", "contains", "isinstance",
    "issubclass", "is_tuple", "getattr", "dir", "format", "signature", "copy", "deepcopy", "pickle",
}  # fmt: skip
STEPS, STOPS = ("next", "send", "throw", "step"), (StopIteration, StopAsyncIteration)
FUNCTIONS: tuple = (type(integer), type(len), type([].append), type(Codec().encode))
METHOD = FUNCTIONS[2:]
LIVE = {"y": live.generator, "w": live.coroutine, "ay": live.async_generator}


class Judge(Codec):
    """The connection to the program.

    Attributes:
        gone: why the program can no longer be asked.
        unjudged: why the tests cannot be judged across the boundary.
        epoch: counts the operations that may have changed objects.
        roles: what the tests take each name for.
    """

    def __init__(self, channel, task):
        super().__init__()
        self.channel = channel
        self.handles, self.iterators = {}, weakref.WeakValueDictionary()
        self.live = weakref.WeakKeyDictionary()  # generators and coroutines here -> numbers
        self.callbacks, self.callback_numbers = [], {}
        self.thrown = []  # exceptions of the tests' functions in the exchange under way
        self.errors = Errors(self, task["tests"])
        self.shared_exceptions = {}
        self.lock = RLock()
        self.comparing, self.closing, self._trusted_methods = set(), [], None
        self.open, self.demote, self.epoch = False, False, 0
        self.gone = self.unjudged = ""
        Handle._judge = Function._judge = self
        try:
            self.roles = Roles(ast.parse(task["tests"]).body, task["entry_point"])
        except (SyntaxError, ValueError):
            self.roles = Roles([])  # the tests do not even parse

    def refuse(self, reason):
        """Stop the tests, because they cannot be judged."""
        self.unjudged = self.unjudged or reason
        raise Unjudged(self.unjudged)

    @property
    def trusted_methods(self):
        """The names of the methods of the set-up's classes: objects of the code have no say in what they return."""
        if self._trusted_methods is None:
            found = [pair for kind in self.shared.values() for pair in vars(kind).items() if pair[0][:2] != "__"]
            self._trusted_methods = {n for n, value in found if hasattr(value, "__get__") and type(value) is not SLOT}
        return self._trusted_methods

    # values

    def opaque(self, value):
        kind = type(value)
        if isinstance(kind, Remote) or kind is Function or kind is Remote:
            return ["h", value._wire.number]
        if kind is live.Ref:
            return ["h", value.number]
        if kind is Method:
            return ["m", value.__self__._wire.number, value.__name__]
        if isinstance(value, type) and issubclass(value, BaseException):
            return ["x", self.errors.lineage(value)]
        if isinstance(value, BaseException):
            return self.errors.encode(value)
        name = getattr(value, "__name__", None)
        if isinstance(name, str) and getattr(builtins, name, None) is value:
            return ["B", name]
        try:
            if value in self.live:
                return ["h", self.live[value]]
        except TypeError:
            pass
        if callable(value) or (hasattr(kind, "__next__") and kind.__module__ in ("builtins", "itertools")):
            doc = getattr(value, "__doc__", None)
            return ["f", self.callback(value), str(name), live.is_async(value), not callable(value),
                    kind in FUNCTIONS, doc if type(doc) is str else None]  # fmt: skip
        return super().opaque(value)

    def callback(self, value):
        """The number of a function or iterator of the tests."""
        key = id(value)
        if type(value) in METHOD:  # Python makes a new one for each look
            key = id(value.__self__), getattr(value, "__func__", value.__name__)
        if key not in self.callback_numbers:
            self.callback_numbers[key] = len(self.callbacks)
            self.callbacks.append(value)
        return self.callback_numbers[key]

    def revive(self, tag, parts):
        if tag == "f":
            return self.callbacks[integer(parts[0])]
        if tag == "x":
            return self.errors.kind(parts[0])
        if tag == "ex":
            return self.errors.decode(parts)
        if tag == "ej":
            number = integer(parts[0])
            return self.thrown[number] if number < len(self.thrown) else self.revive(parts[1][0], parts[1][1:])
        number = integer(parts[0])
        if tag in LIVE or (tag == "h" and not self.open and "__next__" in self.remote(parts[1:])._record.special):
            if (found := self.iterators.get(number)) is None:
                found = self.iterators[number] = LIVE.get(tag, live.generator)(self, number, self.open)
                self.live[found] = number
            return found
        if tag == "k":
            kind = self.remote(parts)
            if self.open:
                kind._wire.open = True
            return kind
        found = self.handles.get(number)
        if found is None:
            if tag == "u":
                found = Function(number, text(parts[1])[:100], text(parts[2]))
                found._wire.open = self.open
            elif tag == "h":
                found = object.__new__(self.remote(parts[1:]))
                set_slots(found, _wire=State(number, self.open))
            else:
                raise ValueError(f"tag {tag!r}")
            self.handles[number] = found
        elif self.demote and tag == "h":
            found._wire.built = False
            found._wire.open = found._wire.open and self.open
        return found

    def remote(self, parts):
        """The class for a class of the program, which describes each class once."""
        number = integer(parts[0])
        if number not in self.handles:
            self.handles[number] = remote_class(Record(parts[1]), number, False)
        if not isinstance(self.handles[number], Remote):
            raise ValueError("no class")
        return self.handles[number]

    def inspect(self, value):
        """Refuse objects of the code inside one of a shared class, whose methods would run the code."""
        found, seen = list(state(value).values()), set()
        while found:
            item = found.pop()
            kind = type(item)
            if isinstance(kind, Remote) or kind in (Function, Method, Remote) or kind in live.KINDS:
                self.refuse(f"the answer put an object of its own into an object of a class of the set-up{HINT}")
            if isinstance(item, (list, tuple, set, frozenset, dict, deque)) and id(item) not in seen:
                seen.add(id(item))
                found += [*item, *item.values()] if isinstance(item, dict) else item

    # messages

    def ask(self, op, names):
        """The operation ``names``: the values of those names that the code defines."""
        found = self.request(False, op, (names,))
        return {name: self.named(name, value) for name, value in found.items()} if type(found) is dict else found

    def request(self, is_open, op, args, keywords=None):
        """Have the program do an operation.

        Args:
            is_open: the tests may use the objects in the result.
            op: the operation.
            args, keywords: of the operation.

        Returns:
            what it returns; or raises what it raises.
        """
        with self.lock:  # the tests may have threads
            if self.gone:
                raise Gone(self.gone)
            if not self.depth:
                self.settle()
                self.thrown.clear()
                if self.closing and op != "close":
                    self.close_generators()
            return self._exchange(is_open, op, args, keywords or {})

    def _exchange(self, is_open, op, args, keywords):
        """Send a request and serve the program until it answers."""
        if op not in READS:
            self.epoch += 1
        self.depth += 1
        before, failed = (self.open, self.demote), None
        try:
            encoded, nodes = self.encode([*args, *keywords.values()], self.depth > 1)
            message = {"op": op, "a": encoded, "n": nodes, "d": is_open}
            if keywords:
                message["k"] = list(keywords)
            self.channel.send(message)
            while "op" in (reply := self.channel.receive()):
                self.show(reply)
                self.open, self.demote = False, False
                answer, error = self.call_back(reply)
                failed = failed or error
                self.channel.send(answer)
            self.show(reply)
            self.open, self.demote = is_open, op not in ("eq", "fields", "plain")
            if failed is not None:  # whatever the code made of it
                raise failed
            if "exc" in reply:
                raise self.raised(reply, op)
            return self.decode([reply["ok"]], reply["n"])[0]
        except Closed:
            self.gone = "the program ended during the tests"
        except (Malformed, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            if getattr(error, "from_program", False):
                raise
            self.gone = f"the program sent nonsense: {error}"
        finally:
            self.depth -= 1
            self.open, self.demote = before
        raise Gone(self.gone)

    def check_failure(self, tests):
        """Have the tests unjudged if their failure may come from the boundary."""
        if self.gone or self.unjudged:
            return
        with contextlib.suppress(Exception, Gone, Unjudged):
            late, modules = self.request(False, "circumstances", ())
            if late:
                self.refuse(f"the code calls a function of the tests after its own call has ended{HINT}")
            if lost := unreached(self.roles.nodes):
                self.refuse(f"`{lost}` does not reach the code{HINT}")
            if why := doubt(tests, modules):
                self.refuse(why + HINT)

    def close_generators(self):
        """Close the program's generators that the tests have dropped."""
        while self.closing:
            try:
                self.request(False, "close", (self.closing.pop(),))
            except Exception:
                continue

    def show(self, reply):
        """Print what the program has printed, where the tests may have redirected it."""
        for name in ("stdout", "stderr"):
            if name in reply:
                getattr(sys, name).write(text(reply[name]))

    def call_back(self, request):
        """Do for the program what it asks of the tests; the answer to send, and the assertion that has failed."""
        try:
            args = self.decode(request["a"], request["n"])
            value = self.serve(request, args)
            encoded, nodes = self.encode([value], True)
            return {"ok": encoded[0], "n": nodes}, None
        except Exception as error:
            if isinstance(error, Malformed):
                raise
            if isinstance(error, Unsendable) and not isinstance(error, TooMuch):
                self.refuse(f"{error} of the tests goes to the code{HINT}")
            failed = error if isinstance(error, AssertionError) else None  # its text may hold what the tests expect
            encoded, nodes = self.encode([error if failed is None else AssertionError()], True)
            self.thrown.append(error)
            return {"exc": encoded[0], "n": nodes, "j": len(self.thrown) - 1}, failed

    def serve(self, request, args):
        """Call a function of the tests, advance one of their iterators, or read from their input."""
        op = request["op"]
        if op == "input":
            return builtins.input(*args)
        if op in ("read", "readline"):
            return getattr(sys.stdin, op)(*args)
        target = self.callbacks[integer(request["f"])]
        if op == "attribute":
            self.refuse(f"the code reads .{text(args[0])[:100]} of an object of the tests{HINT}")
        if op == "next":
            return next(target)
        keywords = request.get("k", [])
        cut = len(args) - len(keywords)
        named = zip(map(text, keywords), args[cut:])  # noqa: B905 - Python 3.9 has no strict
        return live.run(target(*args[:cut], **dict(named)), self.lock)

    def raised(self, reply, op):
        """The exception that the program raised in an operation."""
        names = reply["exc"]
        if type(names) is not list or not names or not all(type(name) is str for name in names):
            raise Malformed("an exception without a name")
        if (why := reply.get("unjudged")) is not None:
            self.refuse(text(why)[:300] + HINT)
        says = str(reply.get("text", ""))[:1000]
        try:
            error = self.decode([reply["e"]], reply["n"])[0]
        except Unjudged:
            raise
        except Exception:
            error = RuntimeError(says)
        if not isinstance(error, Exception) and not self.errors.expected(error):  # such as SystemExit
            self.gone = f"the program raised {names[0]}: {says}"
            return Gone(self.gone)
        if isinstance(error, STOPS) and op not in STEPS and not self.errors.expected(error):
            error = RuntimeError(f"the code raised {names[0]}")  # a loop over map(f, ...) would end, and pass
        error.from_program = True
        return error

    # what libraries ask of classes and functions

    def named(self, name, value):
        """Let the tests use what a name of the code stands for as they take the name."""
        if isinstance(value, (Remote, Function)) or is_handle(value):
            value._wire.open = self.roles.is_class(name)
            value._wire.bare = name in self.roles.bare
        return value

    def coroutine_of(self, number, is_open):
        """A coroutine that awaits an object of the program."""
        return live.coroutine(self, number, is_open)

    def signature(self, function):
        """The ``inspect.Signature`` of a function of the program."""
        import inspect

        found = self.request(False, "signature", (function,))
        return inspect.Signature([
            inspect.Parameter(name, inspect._ParameterKind(kind), default=value if has else inspect.Parameter.empty)
            for name, kind, has, value in found
        ])  # fmt: skip

    def dataclass_fields(self, kind):
        """The ``__dataclass_fields__`` of a class of the program."""
        import dataclasses

        names = self.request(False, "fields_of", (kind,))
        if names is None:
            raise AttributeError("__dataclass_fields__")
        return dataclasses.make_dataclass(kind.__name__, names).__dataclass_fields__


def judge(task, hears, asks, report):
    """Judge one task.

    Args:
        task: what the verifier sent.
        hears, asks: the ends of the pipes from and to the program.
        report: writes a line for the verifier.
    """
    program = Judge(judge_channel(hears, asks), task)
    try:
        found = run(task, program, report)
        if found["kind"] in ("done", "failed") and found.get("failed", True):
            program.check_failure(task["tests"])
        if program.unjudged and not program.gone:
            found = {"kind": "broken", "detail": f"cannot be judged: {program.unjudged}"}
        report(found)
    except (Closed, Malformed, Gone) as error:
        report({"kind": "gone", "detail": program.gone or f"the program ended while it was loaded {error}"})
