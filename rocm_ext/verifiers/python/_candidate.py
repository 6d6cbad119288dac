"""The tested program's side: runs the model's code and answers the judge's calls with values.

It holds no secrets: neither the tests nor the expected values reach this process.
"""

import builtins
import posix  # os is not loaded yet, and takes a millisecond
import sys

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
        self.for_objects = False  # the judge takes the results as objects of the code's classes
        self.serving = False
        self.module = sys.modules["solution"] = MODULE("solution")
        self.namespace = self.module.__dict__
        self.namespace["__builtins__"] = builtins
        self.operations = {**OPERATIONS, "names": self.names, "step": self.step, "close": self.close}
        self.loop, self.tasks = None, {}

    # values

    def opaque(self, value):
        kind = type(value)
        if id(value) in self.callback_numbers:
            return ["f", self.callback_numbers[id(value)]]
        if isinstance(value, BaseException):
            number = None if kind.__module__ != "solution" else self.number(value)
            return _errors.encode(value, self, self.class_number, number)
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
            error = self.exception_class(names)
            return error(*(self._decode(arg, 0) for arg in args))
        return super().revive(tag, parts)

    def exception_class(self, names):
        """The class that the judge named: one of the code's, a builtin or a library's."""
        for module, name, number in names:
            if number is not None:
                return self.objects[number]
            found = self.namespace.get(name) if module in ("__main__", "solution") else None
            found = found or getattr(sys.modules.get(module), name, None)
            if isinstance(found, type) and issubclass(found, BaseException):
                return found
        return Exception

    def callback(self, number, name, is_async, is_iterator):
        """A function here that stands for a function or iterator of the tests."""
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
                return self.request({"op": "callback", "f": number}, args, keywords)
        else:

            def found(*args, **keywords):
                return self.request({"op": "callback", "f": number}, args, keywords)

        if not is_iterator:
            found.__name__ = found.__qualname__ = name
        self.callbacks[number], self.callback_numbers[id(found)] = found, number
        return found

    # messages

    def request(self, message, args, keywords=None):
        """Have the judge call a function of the tests, or read from their input."""
        if not self.serving:
            raise EOFError("EOF when reading a line")
        keywords = keywords or {}
        before, self.for_objects = self.for_objects, False
        try:
            encoded, nodes = self.encode([*args, *keywords.values()])
            self.channel.send({**message, "a": encoded, "n": nodes, "k": list(keywords), **self.printed()})
            while "op" in (reply := self.channel.receive()):  # the function calls the program again
                self.channel.send(self.answer(reply))
            if "exc" in reply:
                raise self.decode([reply["exc"]], reply["n"])[0]
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
        """What the code has printed since the last message."""
        return {name: said for name, stream in (("stdout", self.stdout), ("stderr", self.stderr))
                if (said := stream.take())}  # fmt: skip

    def names(self, names):
        """The values of those names that the code defines."""
        return {name: self.namespace[name] for name in names if name in self.namespace}

    def serve(self):
        """Answer until the judge ends."""
        self.serving = True
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
        self.depth += 1
        before, self.for_objects = self.for_objects, request.get("d", False)
        try:
            args = self.decode(request["a"], request["n"])
            names = request.get("k", [])
            cut = len(args) - len(names)
            args, keywords = args[:cut], dict(zip(names, args[cut:]))  # noqa: B905 - Python 3.9 has no strict
            try:
                value = self.operations[request["op"]](*args, **keywords)
            except BaseException as error:
                return self.failure(error)
            [root], nodes = self.encode([value])
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
            [reply["e"]], reply["n"] = self.encode([error])
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
