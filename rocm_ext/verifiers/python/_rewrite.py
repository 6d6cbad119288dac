"""Rewrite the tests before they run, so that checks count where they run, and comparisons of nothing fail.

The judge uses this in its sandbox, where there is only the standard library. The names in ``NAMES`` stand in the
rewritten tests for functions of ``_run_tests.py`` and ``_vacuous.py``.
"""

import ast

from _source import FUNCTIONS, calls_check, functions_that, is_test, last_name, module_of, walk

WATCH = "__watch__"
RAN = "__ran__"
FAILURE = "__failure__"
ZIP = "__zip__"
FULL = "__full__"
NAMES = (WATCH, RAN, FAILURE, ZIP, FULL)
OPERATORS = dict(
    zip("Add Sub Mult Div FloorDiv Mod Pow Eq NotEq Lt LtE Gt GtE".split(),  # noqa: SIM905
        "add sub mul truediv floordiv mod pow eq ne lt le gt ge".split(), strict=True))  # noqa: SIM905  # fmt: skip


class Rewriter(ast.NodeTransformer):
    """Visits all nodes but the constants in lists, which may be millions."""

    def visit_List(self, node):
        for i, item in enumerate(node.elts):
            if type(item) is not ast.Constant:
                node.elts[i] = self.visit(item)
        return node

    visit_Tuple = visit_Set = visit_List


class Checks(Rewriter):
    """Makes the tests count their checks where these run, and watches asserts.

    - ``assert x`` goes into ``with __watch__:``, and so does what a test function returns: False is a failure.
    - A call that may fail, such as ``self.assertEqual(a, b)``, becomes ``__ran__(...)``. A function of the tests counts
      by the checks inside it.
    - The condition of an ``if`` with a branch that fails (``if a != b: pytest.fail()``) becomes ``__ran__(...)``.
      What it raises inside a ``with`` goes through ``__failure__``, so that no ``__exit__`` of the code swallows it.
    - What handles an exception begins with ``__ran__()``: the tests expected it. So does a loop whose ``else`` fails.
    - ``zip`` becomes ``__zip__``, which fails where it leaves values out.

    Args:
        tests: the tests, whose functions and called names it needs.

    Attributes:
        functions: the definitions of functions that were rewritten.
    """

    def __init__(self, tests):
        self.called = tests.called
        self.own_zip = "zip" in tests.defined | tests.wanted | tests.imports.keys()
        self.functions = []
        self.handling = set()  # nodes that run only after an exception
        self.helpers = {function.name for function in tests.functions}
        self.returns = False  # whether a returned comparison is a check
        self.inside_with = False  # whether a `with` of the same function is around

    def counted(self, nodes):
        """Those of the rewritten nodes that hold a check which counts, perhaps in a function that they call."""
        counting = functions_that(self._counts, self.functions)
        found = []
        for node in nodes:
            if any(self._counts(part, counting) for part in _outside_methods(node)):
                found.append(node)
        return found

    def _counts(self, node, counting):
        """Whether a node counts as a check that must run; ``counting``: names of functions that hold one."""
        if node in self.handling:
            return False
        match node:
            case ast.Name(id=name):
                return name in (WATCH, RAN)
            case ast.Call():
                return last_name(node.func) in counting
        return False

    def visit_FunctionDef(self, node):
        self.functions.append(node)
        outer = (self.returns, self.inside_with)
        self.returns = is_test(node.name) and node.name not in self.called
        self.inside_with = False
        node = self.generic_visit(node)
        self.returns, self.inside_with = outer
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_With(self, node):
        outer = self.inside_with
        self.inside_with = True
        node = self.generic_visit(node)
        self.inside_with = outer
        return node

    visit_AsyncWith = visit_With

    def visit_Return(self, node):
        is_check = self.returns and isinstance(node.value, (ast.Compare, ast.BoolOp))
        node = self.generic_visit(node)
        if not is_check:
            return node
        returned = ast.copy_location(ast.Return(), node)
        return [_watched(ast.copy_location(ast.Assert(node.value), node)), returned]

    def visit_Assert(self, node):
        return _watched(self.generic_visit(node))

    def visit_Call(self, node):
        is_check = calls_check(node) and last_name(node.func) not in self.helpers
        is_zip = isinstance(node.func, ast.Name) and node.func.id == "zip" and not self.own_zip
        node = self.generic_visit(node)
        if is_zip and not node.keywords:
            return _zipped(node)
        return _ran(node) if is_check else node

    def visit_Expr(self, node):
        chooses = isinstance(node.value, (ast.BoolOp, ast.IfExp))  # `a == b or pytest.fail()`
        is_check = chooses and any(calls_check(part) for part in walk(node))
        node = self.generic_visit(node)
        if is_check:
            node.value = _ran(node.value)
        return node

    def visit_If(self, node):
        ends = [branch[-1] for branch in (node.body, node.orelse) if branch]
        failures = [end for end in ends if _fails(end)]
        node = self.generic_visit(node)
        for end in failures:
            if self.inside_with and isinstance(end, ast.Raise) and end.exc:
                end.exc = _call(FAILURE, end, end.exc)
        if failures:
            node.test = _ran(node.test)
        return node

    def visit_For(self, node):
        is_check = bool(node.orelse) and _fails(node.orelse[-1])
        node = self.generic_visit(node)
        return [_ran_here(node), node] if is_check else node

    visit_AsyncFor = visit_While = visit_For

    def visit_ExceptHandler(self, node):
        node = self.generic_visit(node)
        node.body.insert(0, _ran_here(node.body[0]))
        self.handling.update(walk(node))
        return node


class Full(Rewriter):
    """Routes calls and binary operators through ``__full__``; ``name`` is ``Tests.name`` of ``_source.py``."""

    def __init__(self, name):
        self.name = name
        self.called = set()

    def visit_Call(self, node):
        self.called.add(node.func)
        node = self.generic_visit(node)
        node.func = _full(node.func, True, node.func)
        return node

    def visit_Attribute(self, node):
        if module_of(self.name(node)) not in ("numpy", "np"):
            return self.generic_visit(node)
        if node in self.called or not isinstance(node.ctx, ast.Load):
            return node
        return _full(node, False, node)

    visit_Name = visit_Attribute

    def visit_match_case(self, node):
        if node.guard:
            node.guard = self.visit(node.guard)
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_AugAssign(self, node):
        operator = OPERATORS.get(type(node.op).__name__)
        calls = any(isinstance(part, ast.Call) for part in ast.walk(node.target))
        if operator and not calls:
            read = ast.parse(ast.unparse(node.target), mode="eval").body
            node.value = _full(node, f"i{operator}", read, node.value)
        return self.generic_visit(node)

    def visit_BinOp(self, node):
        node = self.generic_visit(node)
        operator = OPERATORS.get(type(node.op).__name__)
        if not operator:
            return node
        return _full(node, operator, node.left, node.right)

    def visit_Compare(self, node):
        node = self.generic_visit(node)
        operator = OPERATORS.get(type(node.ops[0]).__name__)
        if not operator or len(node.ops) > 1:
            return node
        return _full(node, operator, node.left, *node.comparators)


def _fails(statement):
    """Whether a statement always fails: ``raise``, ``assert False``, ``pytest.fail()``."""
    match statement:
        case ast.Raise():
            return True
        case ast.Assert(test=ast.Constant(value=value)):
            return not value
        case ast.Expr(value=ast.Call(func=function)):
            return last_name(function) in ("fail", "exit")
    return False


def _call(name, place, *args):
    """A call of one of the ``NAMES`` at the place of another node."""
    function = ast.copy_location(ast.Name(name, ast.Load()), place)
    return ast.copy_location(ast.Call(function, list(args), []), place)


def _ran(value):
    return _call(RAN, value, value)


def _ran_here(place):
    return ast.copy_location(ast.Expr(_call(RAN, place)), place)


def _constant(value, place):
    return ast.copy_location(ast.Constant(value), place)


def _full(place, what, *args):
    return _call(FULL, place, _constant(what, place), *args)


def _outside_methods(node):
    """The nodes below a node without those of methods, which run when a test calls them."""
    in_methods = set()
    for part in walk(node):
        if isinstance(part, ast.ClassDef):
            for statement in part.body:
                if isinstance(statement, FUNCTIONS):
                    in_methods.update(walk(statement))
    return [part for part in walk(node) if part not in in_methods]


def _watched(statement):
    watch = ast.copy_location(ast.Name(WATCH, ast.Load()), statement)
    return ast.copy_location(ast.With([ast.withitem(watch)], [statement]), statement)


def _zipped(call):
    """``__zip__`` for a ``zip``; its first argument says which of the values may be longer than the others.

    A result may be longer than the values that the tests write down: they may look at its beginning. Parts of the same
    list, as in ``zip(x, x[1:])``, may have any lengths.
    """
    roots = [_root(arg) for arg in call.args]
    shared = any(root and roots.count(root) > 1 for root in roots)
    starred = any(isinstance(arg, ast.Starred) for arg in call.args)
    if len(roots) < 2 or shared or starred:
        return call
    literals = [not root or root.startswith("range(") for root in roots]
    may_be_longer = [any(literals) and not literal for literal in literals]
    return _call(ZIP, call, _constant(tuple(may_be_longer), call), *call.args)


def _root(node):
    """The source of what ``node`` is a part of: ``f(3)`` for ``f(3)[1:]`` and ``islice(f(3), 2)``; "" for a literal."""
    while True:
        match node:
            case (
                ast.Subscript(value=whole)
                | ast.Call(func=ast.Name(id="islice" | "iter"), args=[whole, *_])
            ):
                node = whole
            case ast.List() | ast.Tuple() | ast.Constant():
                return ""
            case _:
                return ast.unparse(node)
