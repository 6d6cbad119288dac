"""The tested program's side: runs the model's code and answers the judge's calls with values.

It holds no secrets: neither the tests nor the expected values reach this process.
"""

import builtins
import posix  # os is not loaded yet, and takes a millisecond
import sys
from _thread import RLock

import _errors
from _channel import Closed, Malformed, Unsendable, program_channel
from _objects import CALLABLES, FUNCTIONS, OPERATIONS, describe, downcast, flag, is_iterator
from _streams import Capture, Input
from _wire import Codec, plain_classes

MODULE = type(sys)


class Program(Codec):
    """The model's namespace, and those of its objects that the judge has handles for."""

    parity = 1

    def __init__(self, channel):
        super().__init__()
        self.channel = channel
        self.objects, self.numbers, self.described = [], {}, set()
        self.callbacks, self.callback_numbers = {}, {}
        self.thrown = {}  # id -> (number, exception) of those that the tests' functions raised in this exchange
        self.exceptions = {}  # (module, name) -> class that stands for one of the tests
        self.for_objects = False  # the judge takes the results as objects of the code's classes
        self.serving = self.late = False
        self.turn = RLock()  # of the code's threads; held but while the code does what the judge has asked for
        self.module = sys.modules["solution"] = MODULE("solution")
        self.namespace = self.module.__dict__
        self.namespace["__builtins__"] = builtins
        self.operations = {**OPERATIONS, "names": self.names, "step": self.step, "close": self.close,
                           "circumstances": self.circumstances, "define": self.define}  # fmt: skip
        self.loop, self.tasks = None, {}

    # values

    def opaque(self, value):
        kind = type(value)
        if id(value) in self.callback_numbers:
            return ["f", self.callback_numbers[id(value)]]
        if isinstance(value, BaseException):
            number = None if kind.__module__ != "solution" else self.number(value)
            encoded = _errors.encode(value, self, self.class_number, number)
            thrown = self.thrown.get(id(value))
            return encoded if thrown is None or encoded is None else ["ej", thrown[0], encoded]
        if isinstance(value, type):
            if issubclass(value, BaseException):
                return ["x", _errors.lineage(value, self.class_number)]
            return ["k", *self.class_parts(value)]
        if is_iterator(kind):
            return ["y", self.number(value)]
        if kind.__name__ in ("coroutine", "async_generator") and kind.__module__ == "builtins":
            return ["w" if kind.__name__ == "coroutine" else "ay", self.number(value)]
        if kind in FUNCTIONS or (kind.__module__, kind.__name__) in CALLABLES:
            name = getattr(value, "__name__", kind.__name__)
            return ["u", self.number(value), str(name), flag(value)]
        found = downcast(value, kind, self.for_objects)
        if found is not value:
            return self._encode(found, 0)
        return ["h", self.number(value), *self.class_parts(kind)]

    def number(self, value):
        """The number by which the judge knows an object."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)  # keeps it alive, so that no other object gets its id
        return self.numbers[id(value)]

    def class_number(self, kind):
        """The number of an exception class of the code; None for a library's."""
        return self.number(kind) if kind.__module__ == "solution" else None

    def class_parts(self, kind):
        """The number of a class, and its description when it crosses for the first time."""
        number = self.number(kind)
        if number in self.described:
            return [number]
        self.described.add(number)
        return [number, describe(kind)]

    def revive(self, tag, parts):
        if tag == "h":
            return self.objects[parts[0]]
        if tag == "m":
            return getattr(self.objects[parts[0]], parts[1])
        if tag == "f":
            return self.callback(*parts)
        if tag == "B":
            return getattr(builtins, parts[0])
        if tag == "x":
            return self.exception_class(parts[0])
        if tag == "ex":
            names, args = parts[:2]
            error = self.exception_class(names)(*(self._decode(arg, 0) for arg in args))
            error.__dict__.update((name, self._decode(value, 0)) for name, value in parts[2])
            return error
        return super().revive(tag, parts)

    def exception_class(self, names):
        """The class that the judge named: one of the code's, a builtin or a library's."""
        (module, name, number), rest = names[0], names[1:]
        if number is not None:
            return self.objects[number]
        found = self.exceptions.get((module, name))
        found = found or (self.namespace.get(name) if module in ("__main__", "solution") else None)
        found = found or getattr(sys.modules.get(module), name, None)
        if not (isinstance(found, type) and issubclass(found, BaseException)):
            base = self.exception_class(rest) if rest else Exception
            found = self.exceptions[module, name] = type(name, (base,), {"__module__": module})
        return found

    def callback(self, number, name, is_async, is_iterator, is_function, doc):
        """A function here that stands for a function, iterator or callable object of the tests."""
        if number in self.callbacks:
            return self.callbacks[number]
        if is_iterator:

            def stream():
                while True:
                    try:
                        item = self.request({"op": "next", "f": number}, [])
                    except StopIteration as stop:
                        return stop.value
                    yield item

            found = stream()
        elif is_async:

            async def found(*args, **keywords):
                await Pause()  # the code may start others beside it
                return self.request({"op": "callback", "f": number}, args, keywords)
        elif not is_function:
            found = Callable(self, number)
        else:

            def found(*args, **keywords):
                return self.request({"op": "callback", "f": number}, args, keywords)

        if not is_iterator:
            found.__name__ = found.__qualname__ = name
            found.__doc__ = doc
        self.callbacks[number], self.callback_numbers[id(found)] = found, number
        return found

    # messages

    def request(self, message, args, keywords=None):
        """Have the judge call a function of the tests, or read from their input."""
        if not self.serving:
            raise EOFError("EOF when reading a line")
        self.late |= not self.depth
        with self.turn:
            return self._request(message, args, keywords or {})

    def _request(self, message, args, keywords):
        before, self.for_objects = self.for_objects, False
        try:
            encoded, nodes = self.encode([*args, *keywords.values()], True)
            self.channel.send({**message, "a": encoded, "n": nodes, "k": list(keywords), **self.printed()})
            while "op" in (reply := self.channel.receive()):  # the function calls the program again
                self.channel.send(self.answer(reply))
            if "exc" in reply:
                error = self.decode([reply["exc"]], reply["n"])[0]
                self.thrown[id(error)] = reply["j"], error
                raise error
            return self.decode([reply["ok"]], reply["n"])[0]
        finally:
            self.for_objects = before

    def load(self, task):
        """Run the trusted set-up and the model's code."""
        self.stdout, self.stderr = sys.stdout, sys.stderr = Capture(), Capture()
        sys.stdin = Input(self)
        builtins.input = self.input
        exec(compile(task["setup"], "setup", "exec", dont_inherit=True), self.namespace)
        exec(compile(task["code"], "solution", "exec", dont_inherit=True), self.namespace)
        # after the model's code, which may have redefined them
        self.shared = {n: k for n, k in plain_classes(self.namespace).items() if n in task["shared"]}
        self.printed()

    def input(self, prompt=""):
        """The builtin ``input``: the tests may have patched theirs."""
        return self.request({"op": "input"}, [str(prompt)])

    def printed(self):
        """Return the text that the code has printed since the last message, by stream."""
        return {name: said for name, stream in (("stdout", self.stdout), ("stderr", self.stderr))
                if (said := stream.take())}  # fmt: skip

    def names(self, names):
        """The values of those names that the code defines."""
        return {name: self.namespace[name] for name in names if name in self.namespace}

    def define(self, name, *value):
        """Set a name of the code, or remove it."""
        self.namespace.pop(name, None)
        self.namespace.update((name, each) for each in value)

    def circumstances(self):
        """Whether a call came too late, and which modules of random numbers the code has loaded."""
        return self.late, [name for name in ("random", "numpy") if name in sys.modules]

    def serve(self):
        """Answer until the judge ends."""
        self.serving = True
        self.turn.acquire()
        while True:
            request = self.channel.receive()
            try:
                answer = self.answer(request)
                self.channel.send(answer)
            except (Unsendable, RecursionError, MemoryError) as error:
                self.described.clear()
                self.channel.send(self.failure(Unsendable(f"the program returned {error}")))

    def answer(self, request):
        """Do the judge's operation and return the answer to send."""
        if not self.depth:
            self.settle()
            self.thrown.clear()
        self.depth += 1
        nested, problem = self.depth > 1, None
        before, self.for_objects = self.for_objects, request.get("d", False)
        try:
            args = self.decode(request["a"], request["n"])
            names = request.get("k", [])
            cut = len(args) - len(names)
            args, keywords = args[:cut], dict(zip(names, args[cut:]))  # noqa: B905 - Python 3.9 has no strict
            if not nested:
                self.turn.release()
            try:
                value = self.operations[request["op"]](*args, **keywords)
            except BaseException as error:
                problem = error
            if not nested:
                self.turn.acquire()
            if problem is not None:
                return self.failure(problem)
            [root], nodes = self.encode([value], nested)
            return {"ok": root, "n": nodes, **self.printed()}
        except Malformed as error:
            return self.failure(error)
        finally:
            self.depth -= 1
            self.for_objects = before

    def failure(self, error):
        """The answer that reports an exception."""
        try:
            says = str(error)[:1000]
        except BaseException:
            says = ""
        reply = {"exc": [kind.__name__ for kind in type(error).__mro__], "text": says, "n": [], "e": None}
        try:
            [reply["e"]], reply["n"] = self.encode([error], self.depth > 1)
        except BaseException:
            reply |= {"e": ["ex", [["builtins", "RuntimeError", None]], [says], [], says, None, None], "n": []}
        return {**reply, **self.printed()}

    # coroutines

    def step(self, value, op):
        """Go on with an awaitable for a moment; whether it is done, and its result."""
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
        task = self.tasks.get(id(value))
        if task is None:
            task = self.tasks[id(value)] = self.loop.create_task(wait_for(value, op))
            for _ in range(2):  # the tests may start others beside it
                self.loop.run_until_complete(asyncio.sleep(0))
        else:
            self.loop.run_until_complete(asyncio.wait([task], timeout=0.01))
        if not task.done():
            return False, None
        del self.tasks[id(value)]
        return True, task.result()

    def close(self, value):
        """Close a generator or cancel a task that the tests have dropped."""
        task = self.tasks.pop(id(value), None)
        if task is not None:
            import asyncio

            task.cancel()
            self.loop.run_until_complete(asyncio.wait([task], timeout=0.01))
        elif hasattr(value, "close"):
            value.close()


class Pause:
    """Lets other coroutines go on, also those that the tests start a moment later."""

    def __await__(self):
        for _ in range(100):
            yield


class Callable:
    """A callable object of the tests, such as a mock or a class."""

    def __init__(self, program, number):
        self._program, self._number = program, number

    def __call__(self, *args, **keywords):
        return self._program.request({"op": "callback", "f": self._number}, args, keywords)

    def __getattr__(self, name):
        if name[:1] == "_":
            raise AttributeError(name)
        return self._program.request({"op": "attribute", "f": self._number}, [name])


async def wait_for(value, op):
    """The result of an awaitable, or the next value of an asynchronous iterator."""
    return await (value.__anext__() if op == "anext" else value)


def main(task):
    """Load the task and serve the judge over the pipes argv[1] and argv[2]."""
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
        channel.send(program.failure(error))
        return
    channel.send({"ready": True})
    try:  # noqa: SIM105 - importing contextlib takes as long as starting half the interpreter
        program.serve()
    except Closed:
        pass
