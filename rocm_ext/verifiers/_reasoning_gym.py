"""Makes entries of reasoning-gym and scores answers to them; a script that imports nothing of this library.

Some of the package's judges evaluate an answer as Python, with ``eval`` or with sympy. The sandbox around this process
protects the machine; :func:`checked` protects the score, since it lets only values and formulas be evaluated.
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
# Sympy's parser wraps numbers and names in the first four; the others are functions of formulas. Python's builtins and
# all other functions of sympy are in the parser's reach, too, and stay forbidden.
CALLS = {"Symbol", "Integer", "Float", "Rational", "Abs", "sqrt", "exp", "log", "ln", "factorial"}
for name in ("sin", "cos", "tan", "cot", "sec", "csc"):
    CALLS |= {name, f"a{name}", f"{name}h", f"a{name}h"}


def checked(source):
    """Return ``source`` if it is a value or a formula; else raise ValueError."""
    for node in ast.walk(ast.parse(source.strip(), mode="eval")):
        function = getattr(node, "func", None)
        known = isinstance(function, ast.Name) and function.id in CALLS
        if not isinstance(node, NODES) or (isinstance(node, ast.Call) and not known):
            raise ValueError(f"{type(node).__name__} is no part of a value or a formula")
    return source


def guard():
    """Restrict ``eval`` and sympy's parser to values and formulas."""
    from sympy.parsing import sympy_parser

    evaluate = builtins.eval
    stringify = sympy_parser.stringify_expr

    def restricted(source, *names):
        # a call that passes namespaces comes from a library: namedtuple, or sympy's parser
        return evaluate(source, *names) if names else evaluate(checked(source), {})

    builtins.eval = restricted
    sympy_parser.stringify_expr = lambda *args, **kwargs: checked(stringify(*args, **kwargs))


def score(datasets, row, answer):
    """Score an answer: the judge's score, or an error under the key of its cause: ``row`` or ``answer``."""
    try:
        dataset = datasets[key(row)]
        entry = dataset[row["index"]]
    except BaseException as problem:
        return {"row": described(problem)}
    if entry["question"] != row["question"]:
        reason = "reasoning-gym makes another question of this row"
        return {"row": f"{reason}; was it made by another version?"}
    try:
        return {"score": float(dataset.score_answer(answer, entry))}
    except BaseException as problem:
        return {"answer": described(problem)}


def described(problem):
    """The class and the text of an exception."""
    return f"{type(problem).__name__}: {problem}"


def apart(seconds, function, *args):
    """Call a function in a child process; ``{"late": ...}`` if it takes longer (True) or dies (False)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = json.dumps(function(*args)).encode()
            os.write(writer, said[:4000])
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
    """What a row's dataset is made from, as text."""
    arguments = [row[name] for name in ("task", "options", "seed", "size")]
    return json.dumps(arguments, sort_keys=True)


def main():
    """Read a task from stdin and write the answer to stdout; all other prints are discarded."""
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    task = json.load(sys.stdin)
    sys.path[:1] = task["path"]  # not this file's folder, which has another reasoning_gym
    try:
        import reasoning_gym
    except ImportError as problem:
        said = {"missing": str(problem)}
    else:
        said = run(reasoning_gym, task)
    with open(out, "w") as file:
        json.dump(said, file)


def run(gym, task):
    """The entries of a dataset, or the scores of answers."""
    rows = task["rows"]
    datasets = {}
    for row in rows:
        if row["task"] not in gym.factory.DATASETS:
            return {"unknown": row["task"], "tasks": sorted(gym.factory.DATASETS)}
        try:
            if key(row) not in datasets:
                options = {"size": row["size"], "seed": row["seed"], **row["options"]}
                datasets[key(row)] = gym.create_dataset(row["task"], **options)
        except Exception as problem:
            return {"problem": described(problem)}
    if "answers" not in task:
        dataset = datasets[key(rows[0])]
        entries = (dataset[index] for index in range(rows[0]["size"]))
        return {"entries": [[entry["question"], entry["answer"]] for entry in entries]}
    guard()
    scores = []
    for row, answer in zip(rows, task["answers"], strict=True):
        scores.append(apart(task["seconds"], score, datasets, row, answer))
    return {"scores": scores}


if __name__ == "__main__":
    main()
