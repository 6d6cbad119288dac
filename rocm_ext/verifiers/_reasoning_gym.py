"""Makes entries of reasoning-gym and scores answers to them, in a process of its own with no import of ours.

Some of the package's judges evaluate an answer as Python, with ``eval`` or with sympy. The sandbox around this process
keeps that from the machine; :func:`checked` keeps it from the score, by evaluating no more than values and formulas.
"""

import ast
import builtins
import json
import os
import select
import signal
import sys

NODES = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.BinOp, ast.UnaryOp, ast.operator,
         ast.unaryop, ast.Call, ast.Name, ast.Load)  # fmt: skip
# What sympy's parser writes around numbers and names, and functions of formulas; all others of sympy, and Python's
# builtins, are names there, too.
CALLS = {"Symbol", "Integer", "Float", "Rational", "Abs", "sqrt", "exp", "log", "ln", "factorial"}
CALLS |= {before + name + after for name in ("sin", "cos", "tan", "cot", "sec", "csc") for before in ("", "a")
          for after in ("", "h")}  # fmt: skip


def checked(source):
    """Return ``source`` if it is a value or a formula; else raise ValueError."""
    for node in ast.walk(ast.parse(source.strip(), mode="eval")):
        called = isinstance(node, ast.Call) and not (isinstance(node.func, ast.Name) and node.func.id in CALLS)
        if called or not isinstance(node, NODES):
            raise ValueError(f"{type(node).__name__} is no part of a value or a formula")
    return source


def guard():
    """Let ``eval`` and sympy's parser evaluate values and formulas alone."""
    from sympy.parsing import sympy_parser

    evaluate, stringify = builtins.eval, sympy_parser.stringify_expr
    # a call with names of its own is a library's: sympy's parser, whose source comes through below, and namedtuple
    builtins.eval = lambda source, *names: evaluate(source, *names) if names else evaluate(checked(source), {})
    sympy_parser.stringify_expr = lambda *args, **kwargs: checked(stringify(*args, **kwargs))


def score(datasets, row, answer):
    """Score an answer: what the package's judge gives, or what went wrong and whose fault it is."""
    try:
        dataset = datasets[key(row)]
        entry = dataset[row["index"]]
    except BaseException as problem:
        return {"row": f"{type(problem).__name__}: {problem}"}
    if entry["question"] != row["question"]:
        return {"row": "reasoning-gym makes another question of this row; was it made by another version?"}
    try:
        return {"score": float(dataset.score_answer(answer, entry))}
    except BaseException as problem:
        return {"answer": f"{type(problem).__name__}: {problem}"}


def apart(seconds, function, *args):
    """Return what a function returns in a child process; {} if that takes longer or dies."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writer, json.dumps(function(*args)).encode()[:4000])
        finally:
            os._exit(0)
    os.close(writer)
    ready = select.select([reader], [], [], seconds)[0]
    said = os.read(reader, 4096) if ready else b""
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return json.loads(said) if said else {"late": not ready}


def key(row):
    """Return what says which dataset a row is of."""
    return json.dumps([row["task"], row["options"], row["seed"], row["size"]], sort_keys=True)


def main():
    """Read a task from stdin, and write to stdout, where nothing else can print."""
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    task = json.load(sys.stdin)
    sys.path[:1] = task["path"]  # in place of this file's folder, which has another reasoning_gym
    try:
        import reasoning_gym
    except ImportError as problem:
        said = {"missing": str(problem)}
    else:
        said = run(reasoning_gym, task)
    with open(out, "w") as file:
        json.dump(said, file)


def run(gym, task):
    """Return the entries of a dataset, or the scores of answers."""
    rows, datasets = task["rows"], {}
    for row in rows:
        if row["task"] not in gym.factory.DATASETS:
            return {"unknown": row["task"], "tasks": sorted(gym.factory.DATASETS)}
        try:
            if key(row) not in datasets:
                options = {"size": row["size"], "seed": row["seed"], **row["options"]}
                datasets[key(row)] = gym.create_dataset(row["task"], **options)
        except Exception as problem:
            return {"problem": f"{type(problem).__name__}: {problem}"}
    if "answers" not in task:
        dataset = datasets[key(rows[0])]
        entries = (dataset[index] for index in range(rows[0]["size"]))
        return {"entries": [[entry["question"], entry["answer"]] for entry in entries]}
    guard()
    pairs = zip(rows, task["answers"], strict=True)
    return {"scores": [apart(task["seconds"], score, datasets, row, answer) for row, answer in pairs]}


if __name__ == "__main__":
    main()
