"""The user's tests, split into units. This runs inside the judge's sandbox with the standard library alone."""

import ast


class Broken(Exception):
    """The tests themselves are wrong."""


class Tests:
    """The user's tests, split into units that pass or fail on their own.

    A unit is an assert statement, at top level or in a test function that consists of asserts; any other test
    function as a whole; or ``check(candidate)``.

    ``steps`` holds (statements, text of the unit) pairs; the text is None for statements that only prepare.
    """

    def __init__(self, source, entry_point):
        body = []
        self.imported = {}  # our name -> the solution's
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.ImportFrom) and statement.module == "solution":
                self.imported |= {a.asname or a.name: a.name for a in statement.names if a.name != "*"}
            else:
                body.append(statement)
        functions = {s.name for s in body if isinstance(s, ast.FunctionDef) and is_test(s.name)}
        called = {called_name(statement) for statement in body} & functions  # the tests may call `check(f)` themselves
        self.steps, calls = [], []
        for statement in body:
            if not isinstance(statement, ast.FunctionDef) or statement.name not in functions - called:
                unit = isinstance(statement, ast.Assert) or called_name(statement) in functions
                self.steps.append(([statement], ast.unparse(statement) if unit else None))
                continue
            needed = len(statement.args.args) - len(statement.args.defaults)
            if needed > (statement.name == "check" and bool(entry_point)):
                raise Broken(f"{statement.name}() takes {needed} arguments")
            asserts = statement.body[1:] if ast.get_docstring(statement) is not None else statement.body
            if not needed and asserts and all(isinstance(each, ast.Assert) for each in asserts):
                self.steps += [([each], ast.unparse(each)) for each in asserts]
            else:
                self.steps.append(([statement], None))
                calls.append(f"{statement.name}({entry_point if needed else ''})")
        self.steps += [(ast.parse(call).body, call) for call in calls]
        self.total = sum(reads is not None for _, reads in self.steps)
        if not self.total:
            raise Broken("the tests hold no assert, no test function and no check()")

    def names(self):
        """The names that the tests use; some may be the program's."""
        return {node.id for node in self._nodes() if isinstance(node, ast.Name)}

    def defined(self):
        """The names that the tests themselves import or define."""
        found = {n.name for n in self._nodes() if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
        imports = [alias for n in self._nodes() if isinstance(n, (ast.Import, ast.ImportFrom)) for alias in n.names]
        return found | {(alias.asname or alias.name).split(".")[0] for alias in imports}

    def _nodes(self):
        return [node for statements, _ in self.steps for tree in statements for node in ast.walk(tree)]


def is_test(name):
    """Whether a function of this name is a test."""
    return name == "check" or name.startswith("test")


def called_name(statement):
    """The name ``f`` if the statement is ``f(...)``; else None."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else None
