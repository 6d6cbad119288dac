"""Runs a row's checker of outputs, in a separate sandbox with only the standard library."""

import json
import os
import sys

# A checker that parses wrong output raises these
WRONG = (ValueError, LookupError, ArithmeticError, AssertionError)


def scores(task):
    """The checker's score for each case, or a message that says how the checker failed."""
    namespace = {"__name__": "checker"}
    try:
        exec(compile(task["checker"], "checker", "exec"), namespace)
    except BaseException as error:
        return f"the checker does not work: {type(error).__name__}: {error}"
    results = []
    for index, case in enumerate(task["cases"]):
        try:
            score = namespace["check"](*case)
        except WRONG:
            score = 0
        except BaseException as error:
            return f"the checker failed in case {index}: {type(error).__name__}: {error}"
        try:
            score = float(score)
        except (TypeError, ValueError):
            return f"the checker returned {score!r} in case {index}; expected a bool or a number from 0 to 1"
        if not 0 <= score <= 1:
            return f"the checker returned {score} in case {index}; expected a number from 0 to 1"
        results.append(score)
    return results


def main():
    """Read the task from stdin and write the scores to stdout; the checker's prints are discarded."""
    answer = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    task = json.load(sys.stdin)
    sys.path += task["path"]
    os.write(answer, json.dumps(scores(task)).encode())


main()
