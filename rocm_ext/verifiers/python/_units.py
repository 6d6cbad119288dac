"""What the tests' source holds, found without running it: its units, the names it takes from the answer, its mistakes.

``check_row`` uses this, and so does the judge in its sandbox, with the standard library alone.
"""

import ast
import builtins
import importlib
import symtable

MODULES = {"np": "numpy", "pd": "pandas"}
for _name in (
    *("bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
    *("json", "math", "numpy", "operator", "os", "pandas", "pytest", "random", "re", "statistics", "string", "sys"),
    *("time", "unittest"),
):
    MODULES[_name] = _name
COMMON = {
    **dict.fromkeys(("isclose", "sqrt", "pi", "inf", "nan"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"),
    **{"Decimal": "decimal", "Fraction": "fractions"},
}
STARRED = {*MODULES.values(), "typing", "enum", "dataclasses", "abc", "collections.abc"} - {"numpy", "pandas", "pytest"}
PYTEST = {"approx", "fail", "fixture", "main", "mark", "param", "raises", "skip", "xfail", "MonkeyPatch",
          "CaptureFixture", "FixtureRequest"}  # fmt: skip
FIXTURES = {"capsys", "monkeypatch", "request"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Lambda)
SITE, ITERATION = "__site__", "__iteration__"


class Broken(ValueError):
    """The tests themselves are wrong."""


class Tests:
    """The tests' source, split into what passes or fails by itself.

    Args:
        source: the tests.
        trusted: sources that run before them on both sides: the set-up, and the given beginning of the code.
        entry: the expression that ``check`` gets; empty: the row has none.

    Attributes:
        steps: (statement, text of the unit) pairs of the top level in order; the text is None for definitions,
            imports and assignments. Test functions and classes run after them, unless the top level calls them.
        called: the functions that the top level calls, and those that others call with arguments.
        defined: the functions and classes of the top level.
        own: names that only the answer can define; it must define one of them.
        required: names that the answer must define.
        wanted: names that the answer may define, with ``required``.
        library: the names of the standard library, numpy or pandas that the tests use without importing them:
            name -> (module, its attribute, or "" for the module).

    Raises:
        Broken: a part of the tests would not run, or nothing says what they test.
    """

    def __init__(self, source, trusted=(), entry=""):
        self.source, self.entry, self.lines = source, entry, source.split("\n")
        self.tree = ast.parse(source)
        self.body = [part for statement in self.tree.body for part in _unwrapped(statement)]
        nodes = list(_walk(self.tree))
        self.functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
        trusted_trees = [ast.parse(text) for text in trusted]
        self.helpers = _helpers([*self.functions, *(n for t in trusted_trees for n in t.body)])
        top = [node for statement in self.body for node in _outside_scopes(statement)]
        self.cases = _unittests([n for t in trusted_trees for n in t.body] + top)
        self.called = self._runs(top)
        self.defined = {node.name for node in top if isinstance(node, SCOPES[:3])}
        self.steps = [(s, self.text(s) if self._is_unit(s) else None) for s in self.body]
        collected = [node for node in top if isinstance(node, SCOPES[:3]) and self.collects(node)]
        if not collected and not any(text for _, text in self.steps):
            raise Broken("the tests hold no assert, no test function and no check()")
        if not any(getattr(s, "bases", ()) or self.checks(s) for s in [*(s for s, t in self.steps if t), *collected]):
            raise Broken("the tests check nothing: they hold no assert that runs")
        self._refuse(nodes, top, collected)
        given = set().union(*(_globals(*pair)[0] for pair in zip(trusted, trusted_trees)))  # noqa: B905 - Python 3.9
        self._whose(nodes, given)

    def text(self, node):
        """The beginning of a node's source in one line."""
        return " ".join(line.strip() for line in self.lines[node.lineno - 1 : node.end_lineno])[:200]

    def _runs(self, top):
        """The functions that run without being collected."""
        found = _calls(top)
        while True:
            more = {name for f in self.functions if f.name in found for name in _calls(_walk(f))} - found
            if not more:
                break
            found |= more
        called = {name for f in self.functions for name in _calls(_walk(f))}
        return found | {f.name for f in self.functions if f.name in called and not f.decorator_list
                        and len(f.args.args) > len(f.args.defaults)}  # fmt: skip

    def _is_unit(self, statement):
        if isinstance(statement, (*SCOPES, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign)):
            return False
        if isinstance(statement, (ast.Pass, ast.Delete, ast.Global, ast.Nonlocal)):
            return False
        if isinstance(statement, ast.Expr):
            call = statement.value
            return isinstance(call, (ast.Call, ast.Await)) and getattr(getattr(call, "func", 0), "id", "") != "print"
        if any(isinstance(node, (*FUNCTIONS, ast.ClassDef)) for node in _walk(statement)):
            return self.checks(statement)  # definitions under a condition
        simple = (ast.Import, ast.ImportFrom, ast.Assign)
        return self.checks(statement) or not all(isinstance(s, simple) for s in _inner(statement))

    def collects(self, node):
        """Whether a definition of the top level is run as a test: a test function, ``check`` or a class of tests."""
        if isinstance(node, FUNCTIONS):
            return is_test(node.name) and node.name not in self.called and not _is_fixture(node)
        return is_test_class(node.name) or node.name in self.cases

    def checks(self, tree):
        """Whether code can fail by more than an exception of the answer: it asserts, raises, or calls what does."""
        return any(_checks(node, self.helpers) for node in _walk(tree))

    # what would not run

    def _refuse(self, nodes, top, collected):
        """Raise Broken for code that looks like a test and does not run, or cannot fail."""
        self._refuse_modules(nodes)
        judged = {n.id for node in nodes for part in self._judged(node) for n in _walk(part) if isinstance(n, ast.Name)}
        for node in nodes:
            if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and node.test.elts:
                raise Broken(f"`{ast.unparse(node)[:80]}` is always true: remove the parentheses")
            if isinstance(node, ast.Try) and self.checks(ast.Module(node.body, [])):
                counts = {
                    getattr(n.target, "id", "") for s in node.body for n in _walk(s) if isinstance(n, ast.AugAssign)
                }
                for handler in (h for h in node.handlers if counts.isdisjoint(judged) and _swallows(h, judged)):
                    kind = f"except {ast.unparse(handler.type)}" if handler.type else "except"
                    raise Broken(
                        f"`{kind}:` after `{ast.unparse(node.body[0])[:80]}` swallows the assert: remove the try"
                    )
        for block in _blocks(self.body):
            for each in block:
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Compare):
                    raise Broken(f"nobody looks at the result of `{ast.unparse(each)[:80]}`: write `assert`")
        for owner in [self.tree, *(node for node in nodes if isinstance(node, ast.ClassDef))]:
            names = [n.name for n in owner.body if isinstance(n, SCOPES[:3])]
            if twice := [name for name in names if names.count(name) > 1 and name.lower().startswith("test")]:
                raise Broken(f"{twice[0]} is defined twice, so that only the last runs: rename one")
        used = _used(nodes)
        for node in self.functions:
            called = node.decorator_list or node.name in used or is_test(node.name) or _is_hook(node.name)
            called = called or node.name.lstrip("_").startswith("assert")  # a helper that is not needed
            if not called and any(isinstance(n, ast.Assert) or self._drives(n) for n in _walk(node)):
                raise Broken(f"nothing calls {node.name}(), which holds asserts: call it or name it test_{node.name}")
        renamed = [k.value for n in self.functions if _is_fixture(n) for d in n.decorator_list
                   for k in getattr(d, "keywords", ()) if k.arg == "name"]  # fmt: skip
        fixtures = {n.name for n in self.functions if _is_fixture(n)} | {getattr(n, "value", "") for n in renamed}
        self._refuse_signatures(collected, fixtures)
        for node in top:
            skipped = isinstance(node, ast.ClassDef) and not self.collects(node) and node.name not in used
            if skipped and any(isinstance(n, FUNCTIONS) and n.name.startswith("test") for n in node.body):
                raise Broken(f"class {node.name} does not run: name it Test{node.name} or derive it from TestCase")

    def _judged(self, node):
        """The expressions on which a check depends."""
        if isinstance(node, (ast.Assert, ast.If)) and self.checks(node):
            return [node.test]
        if isinstance(node, ast.Return):
            return [node.value] if node.value else []
        return node.args if isinstance(node, ast.Call) and _checks(node, self.helpers) else []

    def _drives(self, node):
        """Whether a node calls a function that holds checks and runs only if it is called."""
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        return name in self.helpers and (name in self.called or not is_test(name))

    def _refuse_modules(self, nodes):
        """Raise Broken for what the stand-in for pytest lacks."""
        imports = [(alias, n) for n in nodes if isinstance(n, (ast.Import, ast.ImportFrom)) for alias in n.names]
        pytest = {"pytest"} | {a.asname for a, n in imports if isinstance(n, ast.Import) and a.name == "pytest"}
        if any("doctest" in (getattr(n, "module", ""), a.name) for a, n in imports):
            raise Broken("doctest does not run here: write asserts")
        names = [a.name for a, n in imports if getattr(n, "module", "") == "pytest"]
        names += [n.attr for n in nodes if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") in pytest]
        if unknown := [name for name in names if name not in PYTEST]:
            raise Broken(f"pytest.{unknown[0]} does not work here; these do: {', '.join(sorted(PYTEST))}")

    def _refuse_signatures(self, collected, fixtures):
        known = fixtures | FIXTURES
        for node in collected:
            methods = [n for n in node.body if isinstance(n, FUNCTIONS)] if isinstance(node, ast.ClassDef) else []
            if {"__init__"} < {n.name for n in methods if is_test(n.name) or n.name == "__init__"} and not node.bases:
                raise Broken(f"class {node.name} has an __init__: use setup_method")
            for each in [node] if isinstance(node, FUNCTIONS) else methods:
                if not is_test(each.name) or _is_fixture(each):
                    continue
                if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in _walk(each, scopes=False)):
                    raise Broken(f"{each.name}() is a generator, which does not run: use asserts or parametrize")
                if node is not each and node.bases:
                    direct = {_last_name(base) for base in node.bases} == {"TestCase"}
                    if direct and isinstance(each, ast.AsyncFunctionDef):
                        raise Broken(f"{each.name}() is async: derive {node.name} from IsolatedAsyncioTestCase")
                    continue
                given = _parametrized(each)
                decorators = [*each.decorator_list, *(node.decorator_list if node is not each else ())]
                if given is None or (node is not each and _parametrized(node) != set()) or _foreign(decorators):
                    continue
                needed = [arg.arg for arg in each.args.args[: len(each.args.args) - len(each.args.defaults)]]
                needed = [name for name in needed[node is not each :] if name not in known | given]
                if each.name == "check" and node is each and len(needed) == 1:
                    if self.entry:
                        continue
                    raise Broken("check() takes an argument, and the row has no entry_point")
                if needed:
                    raise Broken(f"{each.name}() takes {', '.join(needed)}: neither a fixture of the tests nor a "
                                 f"parameter of parametrize, nor one of {', '.join(sorted(FIXTURES))}")  # fmt: skip

    # names

    def _whose(self, nodes, given):
        """Find out which names the answer defines."""
        bound, read = _globals(self.source, self.tree)
        entry_names = {n.id for n in _walk(ast.parse(self.entry or "0", mode="eval")) if isinstance(n, ast.Name)}
        lead = self.entry.split(".")[0].split("(")[0] if self.entry else ""
        if lead in self.defined:
            raise Broken(f"the tests define {lead}, the entry_point: the answer's would not be tested")
        free = (read | entry_names) - bound - given
        calls = _calls(nodes) & free
        solution = any(
            (isinstance(n, ast.ImportFrom) and n.module == "solution" and n.names[0].name != "*")
            or (isinstance(n, ast.Import) and any(a.name == "solution" for a in n.names))
            for n in nodes
        )
        own = {name for name in free if name not in MODULES and name not in COMMON and not hasattr(builtins, name)}
        own -= {"__file__"}
        unknown = [n for n in sorted(own - {lead}) if n.lower().startswith("assert") or n == "TestCase"]
        if unknown and (lead or len(unknown) < len(own)):
            raise Broken(f"nothing defines {unknown[0]}, so that the answer could: import it")
        self.required = {lead} if lead.isidentifier() else set()
        self.own = set() if self.required or solution else own
        if not own | self.required and not solution:
            self.required = {self._tested(nodes, calls)}
        # a name that the tests assign may be read before that, as in `count = count(x)`
        reassigned = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} & bound
        self.wanted = own | self.required | (reassigned - self.defined)
        self.library = {n: (COMMON.get(n) or MODULES[n], n if n in COMMON or n in calls else "")
                        for n in free - self.wanted if n in MODULES or n in COMMON}  # fmt: skip

    def _tested(self, nodes, calls):
        """The function under test among the names of builtins and the library."""
        found = {name for name in calls if not _is_exception(name)}
        plain = set()
        for node in nodes:
            left = node.test.left if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) else None
            if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and all(map(_is_literal, left.args)):
                plain.add(left.func.id)
        for names in (found, plain & found):
            if len(names) == 1:
                return names.pop()
        if found:
            raise Broken(f"which of {', '.join(sorted(found))} is tested? Name it in entry_point")
        raise Broken("the tests use no name that the answer could define: add `from solution import NAME`")

    # partial credit

    def counted(self):
        """Rewrite the tests so that each check counts by itself, and the code goes on after one that fails.

        Returns:
            the number of checks in each test function.
        """
        sites = {}
        for loop in (statement for statement, text in self.steps if text and isinstance(statement, ast.For)):
            self._count_loop(loop, 0)
        # a caller may expect the exception of a check
        waits = {n.func.id for s in _walk(self.tree) if isinstance(s, (ast.Try, ast.With)) for n in _walk(s)
                 if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}  # fmt: skip
        for statement in self.body:
            for node in _outside_scopes(statement):
                xfail = any("xfail" in ast.unparse(d) for d in getattr(node, "decorator_list", ()))
                if isinstance(node, FUNCTIONS) and is_test(node.name) and node.name not in waits and not xfail:
                    count, body = 0, []
                    for each in node.body:
                        if not self._countable(each):
                            body.append(each)
                            continue
                        body.append(self._count_loop(each, count) if isinstance(each, ast.For)
                                    else _guarded([each], SITE, count))  # fmt: skip
                        count += 1
                    node.body = body
                    sites[node.name] = count
        ast.fix_missing_locations(self.tree)
        return sites

    def _countable(self, statement):
        return not isinstance(statement, (*SCOPES, ast.Return, ast.Raise)) and self.checks(statement)

    def _count_loop(self, loop, index):
        loop.body = [_guarded(loop.body, ITERATION, index)]
        return loop


def is_test(name):
    """Whether a function of this name is a test."""
    return name == "check" or name.startswith("test")


def is_test_class(name):
    """Whether a class of this name holds tests, as pytest has it."""
    return name.startswith("Test")


def _unwrapped(statement):
    """The statements of an ``if __name__ == "__main__":`` block, which runs; or the statement itself."""
    test = statement.test if isinstance(statement, ast.If) and not statement.orelse else None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        sides = [test.left, *test.comparators]
        values = {getattr(side, "id", getattr(side, "value", None)) for side in sides}
        if values == {"__name__", "__main__"}:
            return statement.body
    if isinstance(statement, ast.ImportFrom) and statement.module == "solution" and statement.names[0].name == "*":
        return []  # the names that the tests use come anyway
    return [statement]


def _walk(tree, scopes=True):
    """The nodes of a tree, without constants in lists, which may be megabytes of data.

    ``scopes=False``: also without what is in a function or class below the tree itself.
    """
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, SCOPES) and not scopes and node is not tree:
            continue
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            todo += [each for each in reversed(node.elts) if type(each) is not ast.Constant]
        else:
            todo += reversed(list(ast.iter_child_nodes(node)))


def _outside_scopes(statement):
    """The nodes of a statement of the top level that are not in a function or class."""
    return [statement] if isinstance(statement, SCOPES) else _walk(statement, scopes=False)


def _inner(statement):
    """The statements directly in a compound statement."""
    blocks = [getattr(statement, name, None) or [] for name in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(statement, "handlers", ())]
    return [each for block in blocks for each in block] or [statement]


def _blocks(body):
    """The lists of statements in which a comparison by itself has no purpose: not those that await an exception."""
    yield body
    for statement in body:
        if not isinstance(statement, (ast.With, ast.AsyncWith, ast.Try)):
            for name in ("body", "orelse"):
                block = getattr(statement, name, None)
                if isinstance(block, list) and block:
                    yield from _blocks(block)


def _checks(node, helpers):
    """Whether a node is a check; ``helpers``: names of functions that hold checks."""
    if isinstance(node, (ast.Assert, ast.Raise)):
        return True
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any(_last_name(getattr(item.context_expr, "func", None)) == "raises" for item in node.items)
    if isinstance(node, ast.Return):  # `return candidate(1) == 2`: a test that returns False fails
        return isinstance(node.value, (ast.Compare, ast.BoolOp))
    if not isinstance(node, ast.Call):
        return False
    name = _last_name(node.func)
    return name in helpers or name.lower().startswith("assert") or name in ("fail", "exit", "run", "main", "raises")


def _helpers(functions):
    """The names of functions that hold checks, or call others that do."""
    held, found = [f for f in functions if isinstance(f, FUNCTIONS)], set()
    while True:
        more = {f.name for f in held if f.name not in found and any(
            _checks(n, found) for s in f.body for n in _walk(s) if not isinstance(n, ast.Return))}  # fmt: skip
        if not more:
            return found
        found |= more


def _swallows(handler, judged):
    """Whether an exception handler makes an assert harmless: it catches it and changes none of the names ``judged``."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    nodes = [n for s in handler.body for n in _walk(s)]
    kept = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    kept |= {getattr(n.value, "id", "") for n in nodes if isinstance(n, (ast.Attribute, ast.Subscript))}
    quiet = (ast.Pass, ast.Continue, ast.Expr, ast.Assign, ast.AugAssign)
    return (any(_last_name(kind) in ("", "AssertionError", "Exception", "BaseException") for kind in kinds)
            and all(isinstance(s, quiet) or ast.unparse(s) == "return" for s in handler.body)
            and kept.isdisjoint(judged) and not any(_checks(n, ()) for n in nodes))  # fmt: skip


def _calls(nodes):
    """The names that code calls."""
    return {n.func.id for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}


def _unittests(nodes):
    """The names of the classes that derive from unittest's."""
    found = {a.asname for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names
             if a.asname and a.name.endswith("TestCase")}  # fmt: skip
    for node in nodes:
        names = map(_last_name, getattr(node, "bases", ()))
        if isinstance(node, ast.ClassDef) and any(name in found or name.endswith("TestCase") for name in names):
            found.add(node.name)
    return found


def _used(nodes):
    """The names that code loads, also as attributes, arguments and text."""
    used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    used |= {n.attr for n in nodes if isinstance(n, ast.Attribute)} | {n.arg for n in nodes if isinstance(n, ast.arg)}
    return used | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _is_hook(name):
    """Whether Python, unittest or pytest calls a method of this name."""
    return name.lower().startswith(("__", "setup", "teardown", "asyncsetup", "asyncteardown", "runtest"))


def _is_fixture(node):
    return any(_last_name(getattr(d, "func", d)) == "fixture" for d in node.decorator_list)


def _foreign(decorators):
    """Whether a decorator is not pytest's or unittest's, so that the signature may be another at run time."""
    names = [ast.unparse(getattr(d, "func", d)) for d in decorators]
    return any("mark." not in name and "skip" not in name for name in names)


def _parametrized(node):
    """The arguments that ``parametrize`` gives; None if its names are not literals."""
    found = set()
    for each in node.decorator_list:
        if isinstance(each, ast.Call) and _last_name(each.func) == "parametrize":
            names = each.args[0] if each.args else next((k.value for k in each.keywords if k.arg == "argnames"), None)
            if not _is_literal(names):
                return None
            names = ast.literal_eval(names)
            found |= {n.strip() for n in (names.split(",") if isinstance(names, str) else names)}
    return found


def _last_name(node):
    """``c`` of the expression ``a.b.c``."""
    return getattr(node, "attr", getattr(node, "id", "")) or ""


def _is_literal(node):
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


def _is_exception(name):
    value = getattr(builtins, name, None)
    return isinstance(value, type) and issubclass(value, BaseException)


def _globals(source, tree):
    """The names that a module binds, also by ``from module import *``, and those that it only reads."""
    bound, read = set(), set()
    todo = [symtable.symtable(source, "tests", "exec")]
    while todo:
        table = todo.pop()
        todo += table.get_children()
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if top or symbol.is_global():
                if symbol.is_referenced():
                    read.add(symbol.get_name())
                if symbol.is_assigned() or (top and symbol.is_imported()):
                    bound.add(symbol.get_name())
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            bound |= _public(node.module)
    return bound, read - bound - {"__name__", "__doc__", "__builtins__"}


def _public(module):
    """The names that ``from module import *`` binds, for a module of the standard library."""
    if module not in STARRED:
        return set()
    namespace = vars(importlib.import_module(module))
    return set(namespace.get("__all__", [name for name in namespace if not name.startswith("_")]))


def _guarded(body, name, index):
    """``with name(index):`` around statements, at their place in the source."""
    call = ast.Call(ast.Name(name, ast.Load()), [ast.Constant(index)], [])
    return ast.copy_location(ast.With([ast.withitem(call)], body), body[0])
