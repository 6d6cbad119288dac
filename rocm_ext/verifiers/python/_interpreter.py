"""An interpreter for a model: it runs pieces of code that share their names. Their output goes to stdout."""

import ast
import builtins
import linecache
import os
import signal
import sys
import traceback

LINES = 20  # the lines at the end of a traceback that are shown
PACKET = 1 << 17  # bytes; the most that a packet may have
PR_SET_PDEATHSIG = 1


def main(task):
    """Run the packets of the socket argv[1] as code, and answer with a byte; the first byte says "ready"."""
    link = int(sys.argv[1])
    pid = os.getpid()
    if task["alone"]:  # outside a PID namespace, which would end it
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
    before = sys.modules["__main__"]  # it must live: it holds what started this
    fresh = type(sys)("__main__")
    sys.modules["__main__"] = fresh
    os.write(link, b".")
    calls = 0
    while before:
        code = os.read(link, PACKET)
        if not code:
            return
        calls += 1
        run(code.decode(), f"<call {calls}>", vars(fresh))
        if os.getpid() != pid:  # a fork that the code did not end
            os._exit(0)
        sys.stdout, sys.stderr = streams
        sys.stdout.flush()
        os.write(link, b".")


def run(code, name, names):
    """Run code, and print the value of its last expression, or the end of the traceback."""
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    try:
        tree = ast.parse(code, name)
        last = []
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last.append(tree.body.pop())
        exec(compile(tree, name, "exec", dont_inherit=True), names)
        exec(compile(ast.Interactive(last), name, "single", dont_inherit=True), names)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename != name:  # skip our frames
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace))
        print("\n".join(text.splitlines()[-LINES:]))
