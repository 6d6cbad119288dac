"""The tests' side of the program's generators and coroutines. This runs inside the judge's sandbox.

They are real generators and coroutines here, which ask the program for each step. What they give is used once, so it
cannot differ between two looks.
"""


class Ref:
    """An object of the program, by its number."""

    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


def generator(judge, number, is_open):
    """The values of an iterator of the program."""
    ref = Ref(number)
    op, args = "next", (ref,)
    while True:
        try:
            item = judge.request(is_open, op, args)
        except StopIteration as stop:
            return stop.value
        try:
            sent = yield item
        except GeneratorExit:  # it may come while the program is being asked, so it waits
            judge.closing.append(ref)
            raise
        except BaseException as error:
            op, args = "throw", (ref, error)
        else:
            op, args = ("next", (ref,)) if sent is None else ("send", (ref, sent))


class _Pause:
    def __await__(self):
        yield


async def coroutine(judge, number, is_open, op="await"):
    """The result of an awaitable of the program, which runs in the program's own event loop.

    The program gets some milliseconds at a time, so that the tests' timers and the program's other coroutines go on.
    """
    ref = Ref(number)
    try:
        while True:
            done, value = judge.request(is_open, "step", (ref, op))
            if done:
                return value
            await _Pause()
    except Exception:
        raise
    except BaseException:  # cancelled
        judge.closing.append(ref)
        raise


async def async_generator(judge, number, is_open):
    """The values of an asynchronous iterator of the program."""
    while True:
        try:
            item = await coroutine(judge, number, is_open, "anext")
        except StopAsyncIteration:
            return
        yield item


def is_async(function):
    """Whether a function of the tests is a coroutine function."""
    return bool(getattr(getattr(function, "__code__", None), "co_flags", 0) & 0x80)


def run(value, lock):
    """``value``, or the result of the tests' coroutine ``value``, for which the program waits.

    Args:
        value: what a function of the tests returned.
        lock: of the connection to the program, which this thread holds; the coroutine runs in another.
    """
    if type(value) is not COROUTINE:
        return value
    import asyncio
    import threading

    found = []

    def work():
        try:
            found.append((asyncio.run(value), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=work)  # this thread may have an event loop that runs
    held = lock._release_save()
    thread.start()
    thread.join()
    lock._acquire_restore(held)
    result, error = found[0]
    if error is not None:
        raise error
    return result


async def _coroutine():
    pass


_made = _coroutine()
COROUTINE = type(_made)
_made.close()
KINDS = {type(_ for _ in ()), COROUTINE}
