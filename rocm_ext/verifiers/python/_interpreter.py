"""An interpreter for a model: it runs one piece of code after the other, with the same names.

What the code prints goes to the process's own stdout, which is all that anybody reads of it.
"""

import ast
import builtins
import linecache
import os
import signal
import sys
import traceback

LINES = 20  # of a traceback, its last
PACKET = 1 << 17  # bytes
PR_SET_PDEATHSIG = 1


def main(task):
    """Run the packets of the socket argv[1] as code, and answer each with a byte; the first byte says "ready"."""
    link, own = int(sys.argv[1]), os.getpid()
    if task["alone"]:  # no PID namespace ends it
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.path += task["path"]
    builtins.exit = builtins.quit = sys.exit
    os.set_inheritable(link, False)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(1, 2)
    streams = sys.stdout, sys.stderr
    for stream in streams:
        stream.reconfigure(line_buffering=True, errors="backslashreplace")
    before, fresh = sys.modules["__main__"], type(sys)("__main__")  # `before` must live: it holds what started this
    sys.modules["__main__"] = fresh
    os.write(link, b".")
    calls = 0
    while before and (code := os.read(link, PACKET)):
        calls += 1
        run(code.decode(), f"<call {calls}>", vars(fresh))
        if os.getpid() != own:  # a fork that the code did not end
            os._exit(0)
        sys.stdout, sys.stderr = streams
        sys.stdout.flush()
        os.write(link, b".")


def run(code, name, names):
    """Run code, and print the value of its last expression, or the end of the traceback."""
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    try:
        tree = ast.parse(code, name)
        last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], ast.Expr) else []
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        exec(compile(ast.Interactive(last), name, "single", dont_inherit=True), names)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        place = error.__traceback__
        while place and place.tb_frame.f_code.co_filename != name:  # our own frames
            place = place.tb_next
        lines = "".join(traceback.format_exception(type(error), error, place)).splitlines()
        print("\n".join(lines[-LINES:]))
