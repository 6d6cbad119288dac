"""What the tests' source says, found without running it: its steps, the answer's names in it, and its mistakes.

``check_row`` uses this, and so does the judge in its sandbox, with the standard library alone.
"""

import ast
import builtins
import importlib
import symtable

MODULES = {"np": "numpy", "pd": "pandas"}
for _name in """bisect cmath collections copy datetime decimal fractions functools heapq itertools json math numpy
operator os pandas pytest random re statistics string sys time unittest""".split():  # noqa: SIM905
    MODULES[_name] = _name
COMMON = {
    **dict.fromkeys(("isclose", "sqrt", "pi", "inf", "nan"), "math"),
    **dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"),
    **{"Decimal": "decimal", "Fraction": "fractions"},
}
STARRED = {*MODULES.values(), "typing", "enum", "dataclasses", "abc", "collections.abc"} - {"numpy", "pandas", "pytest"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef, ast.Lambda)
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "import_module", "loads", "run_path", "system", "Popen", "check_output"}
RECORDERS = {"assertLogs", "assertNoLogs", "assertWarns", "assertWarnsRegex", "catch_warnings"}
LOOKS_INSIDE = {"asdict", "astuple", "fields", "replace", "is_dataclass", "signature", "getsource", "getmembers",
                "iscoroutinefunction", "isgeneratorfunction", "isasyncgenfunction"}  # fmt: skip
OF_FILES = {"tmp_path", "tmpdir", "tmp_path_factory", "tempfile", "mkdtemp", "write_text", "write_bytes"}
REACHES = ("builtins.input", "sys.stdin", "sys.stdout", "sys.stderr", "solution.")  # patches of these reach the code
APART = "the code runs in a process of its own; `isolation: same_process` can judge it"
SITE, RAN = "__site__", "__ran__"


class Broken(ValueError):
    """The tests themselves are wrong, or cannot be judged."""


class Tests:
    """The tests' source, split into what passes or fails by itself.

    Args:
        source: the tests.
        trusted: sources that run before them on both sides: the set-up, and the given beginning of the code.
        entry: the expression that ``check`` gets; empty: the row has none.
        apart: refuse what does not reach code in another process.

    Attributes:
        steps: (statement, text of the unit) pairs of the top level in order; the text is None for definitions,
            imports and assignments. Test functions and classes run after them.
        simple: the test functions that need no fixture, mark or class; with ``check``.
        runner: whether pytest must run the rest: other test functions, and classes of tests.
        helpers: test functions that others call with arguments, which do not run by themselves.
        own: names that only the answer can define; it must define one of them.
        required: names that the answer must define.
        wanted: names that the answer may define, with ``required``.
        library: the names of the standard library, numpy or pandas that the tests use without importing them:
            name -> (module, its attribute, or "" for the module).

    Raises:
        Broken: a part of the tests would not run, could not fail, or nothing says what they test.
    """

    def __init__(self, source, trusted=(), entry="", apart=True):
        self.source, self.entry, self.lines = source, entry, source.split("\n")
        self.tree = ast.parse(source)
        self.body = [part for statement in self.tree.body for part in _unwrapped(statement)]
        self.nodes = list(_walk(self.tree))
        self.functions = [node for node in self.nodes if isinstance(node, FUNCTIONS)]
        above = [node for text in trusted for node in ast.parse(text).body]
        self.checking = _checking([*self.functions, *above])
        top = [node for statement in self.body for node in _outside_scopes(statement)]
        called = {n.func.id for n in self.nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        self.helpers = {f.name for f in self.functions if f.name in called and _needed(f) and not f.decorator_list}
        cases = {n.name for n in [*above, *top] if isinstance(n, ast.ClassDef) and _is_case(n)}
        self.classes = {n.name for n in top if isinstance(n, ast.ClassDef) and (
            n.name.startswith("Test") or n.name in cases or cases & {_last(base) for base in n.bases})}  # fmt: skip
        tests = [f for f in top if isinstance(f, FUNCTIONS) and is_test(f.name) and not _is_fixture(f)]
        tests = [f for f in tests if f.name not in self.helpers or (f.name == "check" and entry)]
        self.defined = {node.name for node in top if isinstance(node, SCOPES[:3])}
        self.simple = [f.name for f in tests if f.name == "check" or not (_needed(f) or f.decorator_list)]
        hooks = any(f.name.startswith(("setup_", "teardown_")) or _is_fixture(f) for f in self.functions)
        self.runner = bool(self.classes or hooks or len(tests) > len(self.simple) or "pytestmark" in source)
        self.steps = [(s, self.text(s) if self._is_unit(s) else None) for s in self.body]
        held = [s for s, text in self.steps if text] + tests
        held += [n for n in top if isinstance(n, ast.ClassDef) and n.name in self.classes]
        if not held:
            raise Broken("the tests hold no assert, no test function and no check()")
        if not any(map(self.checks, held)):
            raise Broken("the tests check nothing: they hold no assert that runs")
        self._refuse(top, tests)
        bound, read = _globals(source, self.tree)
        given = {name for text in trusted for name in _globals(text, ast.parse(text))[0]}
        self._whose(bound, read - given)
        if apart:
            self._refuse_apart()

    def text(self, node):
        """The beginning of a node's source in one line."""
        return " ".join(line.strip() for line in self.lines[node.lineno - 1 : node.end_lineno])[:200]

    def checks(self, tree):
        """Whether code can fail by more than an exception of the answer: it asserts, raises, or calls what does."""
        return any(_checks(node, self.checking) for node in _walk(tree))

    def _is_unit(self, statement):
        if isinstance(statement, (*SCOPES, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign)):
            return False
        if isinstance(statement, ast.Expr):
            call = statement.value
            return isinstance(call, (ast.Call, ast.Await)) and getattr(getattr(call, "func", 0), "id", "") != "print"
        return self.checks(statement) or isinstance(statement, (ast.For, ast.While, ast.With, ast.Try))

    # what would not run, or could not fail

    def _refuse(self, top, tests):
        used = [n.id if isinstance(n, ast.Name) else n.attr if isinstance(n, ast.Attribute) else n.value
                for n in self.nodes if isinstance(n, (ast.Name, ast.Attribute, ast.Constant))]  # fmt: skip
        used = {name for name in used if isinstance(name, str)}
        coroutines = {f.name for f in self.functions if isinstance(f, ast.AsyncFunctionDef)}
        judged = {n.id for node in self.nodes for part in self._judged(node) for n in _walk(part) if isinstance(n, ast.Name)}
        for node in self.nodes:
            if isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and node.test.elts:
                raise Broken(f"`{ast.unparse(node)[:80]}` is always true: remove the parentheses")
            if isinstance(node, ast.Try):
                self._refuse_swallowed(node, judged)
            if isinstance(node, ast.With) and any(_suppresses(item.context_expr) for item in node.items) and self.checks(node):
                raise Broken(f"`{self.text(node)[:80]}` swallows the assert: remove the suppress()")
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                name = _last(node.value.func)
                if name in coroutines or name in ("create_task", "ensure_future"):
                    raise Broken(f"nobody awaits `{ast.unparse(node)[:80]}`")
            if isinstance(node, ast.Call) and _last(node.func) in RUNS_TEXT:
                if not all(isinstance(arg, ast.Constant) for arg in node.args) and not _is_data_parser(node):
                    raise Broken(f"`{ast.unparse(node)[:80]}` would run what the answer returns beside the tests")
            if isinstance(node, ast.Call) and _last(node.func) in ("format", "format_map"):
                if isinstance(node.func, ast.Attribute) and self._is_computed(node.func.value):
                    raise Broken(f"`{ast.unparse(node)[:80]}` would read the tests as the answer's text says")
            for block in _blocks_of(node):
                ends = next((i for i, s in enumerate(block) if isinstance(s, (ast.Return, ast.Raise, ast.Continue, ast.Break))), len(block))
                if late := next((s for s in block[ends + 1 :] if self.checks(s)), None):
                    raise Broken(f"`{self.text(late)[:80]}` comes after the end of its block and never runs")
            if isinstance(node, (ast.Module, ast.ClassDef)):
                names = [n.name for n in node.body if isinstance(n, SCOPES[:3]) and n.name.lower().startswith("test")]
                if twice := [name for name in names if names.count(name) > 1]:
                    raise Broken(f"{twice[0]} is defined twice, so that only the last runs: rename one")
        for block in _silent_blocks(self.body):
            for each in block:
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Compare):
                    raise Broken(f"nobody looks at the result of `{ast.unparse(each)[:80]}`: write `assert`")
        for node in self.functions:
            runs = node.decorator_list or node.name in used or is_test(node.name) or _is_hook(node.name)
            if not runs and not node.name.lstrip("_").startswith("assert") and self.checks(ast.Module(node.body, [])):
                raise Broken(f"nothing calls {node.name}(), which holds asserts: call it or name it test_{node.name}")
        for node in top:
            if isinstance(node, ast.ClassDef):
                self._refuse_class(node, used)
        for node in tests:
            if _yields(node):
                raise Broken(f"{node.name}() is a generator, which does not run: use asserts or parametrize")
            if node.name == "check" and _needed(node) == 1 and not self.entry:
                raise Broken("check() takes an argument, and the row has no entry_point")

    def _refuse_class(self, node, used):
        methods = [n for n in node.body if isinstance(n, FUNCTIONS)]
        named = [n for n in methods if n.name.startswith("test")]
        if node.name not in self.classes:
            if named and node.name not in used:
                raise Broken(f"class {node.name} does not run: name it Test{node.name} or derive it from TestCase")
            return
        if named and not node.bases and any(n.name == "__init__" for n in methods):
            raise Broken(f"class {node.name} has an __init__: use setup_method")
        for each in named:
            if _yields(each):
                raise Broken(f"{node.name}.{each.name}() is a generator, which does not run")
            if isinstance(each, ast.AsyncFunctionDef) and {_last(base) for base in node.bases} == {"TestCase"}:
                raise Broken(f"{each.name}() is async: derive {node.name} from IsolatedAsyncioTestCase")

    def _refuse_swallowed(self, node, judged):
        """Refuse a ``try`` whose handler makes an assert harmless: it catches it and changes nothing that is judged."""
        counts = {getattr(n.target, "id", "") for s in node.body for n in _walk(s) if isinstance(n, ast.AugAssign)}
        if not self.checks(ast.Module(node.body, [])) or not counts.isdisjoint(judged):
            return
        for handler in node.handlers:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            nodes = [n for s in handler.body for n in _walk(s)]
            kept = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            kept |= {getattr(n.value, "id", "") for n in nodes if isinstance(n, (ast.Attribute, ast.Subscript))}
            quiet = (ast.Pass, ast.Continue, ast.Expr, ast.Assign, ast.AugAssign)
            if (any(_last(kind) in ("", "AssertionError", "Exception", "BaseException") for kind in kinds)
                    and all(isinstance(s, quiet) or ast.unparse(s) == "return" for s in handler.body)
                    and kept.isdisjoint(judged) and not any(_checks(n, self.checking) for n in nodes)):  # fmt: skip
                raise Broken(f"`{ast.unparse(handler)[:40]}` after `{ast.unparse(node.body[0])[:80]}` swallows the "
                             "assert: remove the try")  # fmt: skip

    def _is_computed(self, node):
        """Whether a call gives the value of an expression, or of a variable in it."""
        assigns = [n for n in self.nodes if isinstance(n, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and n.value]
        assigns = [n for n in assigns if any(isinstance(each, ast.Call) for each in _walk(n.value))]
        names = {n.id for a in assigns for t in getattr(a, "targets", None) or [a.target] for n in _walk(t) if isinstance(n, ast.Name)}
        return any(isinstance(n, ast.Call) or (isinstance(n, ast.Name) and n.id in names) for n in _walk(node))

    def _judged(self, node):
        """The expressions on which a check depends."""
        if isinstance(node, (ast.Assert, ast.If)) and self.checks(node):
            return [node.test]
        if isinstance(node, ast.Return):
            return [node.value] if node.value else []
        return node.args if isinstance(node, ast.Call) and _checks(node, self.checking) else []

    def _refuse_apart(self):
        """Refuse what tests change or expect in the code's process."""
        modules = {(a.asname or a.name).split(".")[0]: a.name for n in self.nodes if isinstance(n, ast.Import) for a in n.names}
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                for base in node.bases:
                    if isinstance(base, ast.Name) and base.id in self.wanted:
                        raise Broken(f"class {node.name} of the tests inherits from {base.id} of the answer: {APART}")
            if isinstance(node, ast.arg) and node.arg in OF_FILES:
                raise Broken(f"the tests use files ({node.arg}): {APART}")
            if not isinstance(node, ast.Call):
                found = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and node.value
                if found and ast.unparse(found) in ("os.environ", "environ"):
                    raise Broken(f"`{ast.unparse(node)}` sets the tests' environment: {APART}")
                continue
            name = ast.unparse(node.func)
            inspects = name.startswith(("inspect.", "dataclasses.")) or ("." not in name and name not in self.defined)
            if _last(node.func) in RECORDERS or (inspects and _last(node.func) in LOOKS_INSIDE & {*modules, *self._imported()}):
                raise Broken(f"`{ast.unparse(node)[:80]}` looks into the code's objects or log: {APART}")
            if _last(node.func) in OF_FILES or name == "open":
                raise Broken(f"the tests use files (`{ast.unparse(node)[:80]}`): {APART}")
            is_patch = name.split(".")[-1] == "patch" or name.endswith(("patch.object", "patch.dict", "monkeypatch.setattr"))
            if name.endswith("monkeypatch.setenv") or (is_patch and node.args and not self._reaches(node.args, modules)):
                raise Broken(f"`{ast.unparse(node)[:80]}` does not reach the code: {APART}")

    def _imported(self):
        """The names that the tests import from modules, and the attributes that they read of modules."""
        found = {a.asname or a.name for n in self.nodes if isinstance(n, ast.ImportFrom) for a in n.names}
        return found | {n.attr for n in self.nodes if isinstance(n, ast.Attribute)}

    def _reaches(self, args, modules):
        """Whether a patch is of the tests' own things, of input and output, or of a name of the code."""
        target = str(args[0].value) if isinstance(args[0], ast.Constant) else ast.unparse(args[0])
        if not isinstance(args[0], ast.Constant) and target.split(".")[0] not in modules:
            return True
        if not isinstance(args[0], ast.Constant) and len(args) > 1 and isinstance(args[1], ast.Constant):
            target = f"{modules[target.split('.')[0]]}{target[len(target.split('.')[0]) :]}.{args[1].value}"
        return target.startswith((*REACHES, "__main__."))

    # names

    def _whose(self, bound, free):
        """Find out which names the answer defines."""
        lead = self.entry.split(".")[0].split("(")[0] if self.entry else ""
        if lead in self.defined:
            raise Broken(f"the tests define {lead}, the entry_point: the answer's would not be tested")
        free = (free | {n.id for n in _walk(ast.parse(self.entry or "0")) if isinstance(n, ast.Name)}) - bound
        calls = {n.func.id for n in self.nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)} & free
        solution = any(
            (isinstance(n, ast.ImportFrom) and n.module == "solution" and n.names[0].name != "*")
            or (isinstance(n, ast.Import) and any(a.name == "solution" for a in n.names))
            for n in self.nodes
        )
        own = {n for n in free if n not in MODULES and n not in COMMON and not hasattr(builtins, n)} - {"__file__"}
        unknown = [n for n in sorted(own - {lead}) if n.lower().startswith("assert") or n == "TestCase"]
        if unknown and (lead or len(unknown) < len(own)):
            raise Broken(f"nothing defines {unknown[0]}, so that the answer could: import it")
        self.required = {lead} if lead.isidentifier() else set()
        self.own = set() if self.required or solution else own
        if not own | self.required and not solution:
            self.required = {self._tested(calls)}
        # a name that the tests assign may be read before that, as in `count = count(x)`
        again = {n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)} & bound
        imported = {a.asname or a.name for n in self.nodes if isinstance(n, ast.ImportFrom) and n.module == "solution"
                    for a in n.names}  # fmt: skip
        self.wanted = own | self.required | (again - self.defined) | imported
        self.library = {n: (COMMON.get(n) or MODULES[n], n if n in COMMON or n in calls else "")
                        for n in free - self.wanted if n in MODULES or n in COMMON}  # fmt: skip

    def _tested(self, calls):
        """The function under test among the names of builtins and the library."""
        found, plain = {name for name in calls if not _is_exception(name)}, set()
        for node in self.nodes:
            left = node.test.left if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare) else None
            if isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and all(map(_is_literal, left.args)):
                plain.add(left.func.id)
        for names in (found, plain & found):
            if len(names) == 1:
                return names.pop()
        if found:
            raise Broken(f"which of {', '.join(sorted(found))} is tested? Name it in entry_point")
        raise Broken("the tests use no name that the answer could define: add `from solution import NAME`")

    # how they run

    def counted(self):
        """Let each check of a simple test count by itself: the test goes on after one that fails.

        Returns:
            the number of checks in each of these functions.
        """
        sites = {}
        for node in self.body:
            if isinstance(node, FUNCTIONS) and node.name in self.simple:
                many = [not isinstance(s, (*SCOPES, ast.Return, ast.Raise)) and self.checks(s) for s in node.body]
                node.body = [_site(s, sum(many[:i])) if many[i] else s for i, s in enumerate(node.body)]
                sites[node.name] = sum(many)
        return sites

    def watched(self):
        """Have each assert say that it runs; a test with asserts of which none runs has not passed.

        Returns:
            the first lines of the functions that check by assert alone.
        """
        lines, self.asserts = set(), set()
        for node in self.nodes:
            if isinstance(node, ast.Assert):
                self.asserts |= set(range(node.lineno, node.end_lineno + 1))
        for node in self.functions:
            held = [n for n in _walk(ast.Module(node.body, []), scopes=False)]
            others = any(isinstance(n, ast.Try) or (_checks(n, self.checking) and not isinstance(n, ast.Assert)) for n in held)
            if any(isinstance(n, ast.Assert) for n in held) and not others:
                lines.add(min(n.lineno for n in (node, *node.decorator_list)))
        for node in self.nodes:
            for block in _blocks_of(node):
                block[:] = [each for s in block for each in ([_ran(s), s] if isinstance(s, ast.Assert) else [s])]
        ast.fix_missing_locations(self.tree)
        return lines


def is_test(name):
    """Whether a function of this name is a test."""
    return name == "check" or name.startswith("test")


def _ran(statement):
    return ast.copy_location(ast.Expr(ast.Call(ast.Name(RAN, ast.Load()), [], [])), statement)


def _site(statement, index):
    """``with __site__(index):`` around a statement, at its place in the source."""
    call = ast.Call(ast.Name(SITE, ast.Load()), [ast.Constant(index)], [])
    return ast.copy_location(ast.With([ast.withitem(call)], [statement]), statement)


def _unwrapped(statement):
    """The statements of an ``if __name__ == "__main__":`` block, which runs; or the statement itself."""
    if isinstance(statement, ast.If) and ast.unparse(statement.test) in ("__name__ == '__main__'", "'__main__' == __name__"):
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


def _blocks_of(node):
    """The lists of statements directly in a node."""
    return [block for name in ("body", "orelse", "finalbody") if isinstance(block := getattr(node, name, None), list) and block]


def _silent_blocks(body):
    """The lists of statements in which a comparison by itself has no purpose: not those that await an exception."""
    yield body
    for statement in body:
        if not isinstance(statement, (ast.With, ast.AsyncWith, ast.Try)):
            for block in _blocks_of(statement):
                yield from _silent_blocks(block)


def _checks(node, checking):
    """Whether a node is a check; ``checking``: names of functions that hold checks."""
    if isinstance(node, (ast.Assert, ast.Raise)):
        return True
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return any(_last(getattr(item.context_expr, "func", None)) == "raises" for item in node.items)
    if isinstance(node, ast.Return):  # `return candidate(1) == 2`: a test that returns False fails
        return isinstance(node.value, (ast.Compare, ast.BoolOp))
    if not isinstance(node, ast.Call):
        return False
    name = _last(node.func)
    return name in checking or name.lower().startswith("assert") or name in ("fail", "exit", "run", "main", "raises")


def _checking(functions):
    """The names of functions that hold checks, or call others that do."""
    held, found = [f for f in functions if isinstance(f, FUNCTIONS)], set()
    while more := {f.name for f in held if f.name not in found and any(
            _checks(n, found) for s in f.body for n in _walk(s) if not isinstance(n, ast.Return))}:  # fmt: skip
        found |= more
    return found


def _needed(function):
    """How many arguments a function must get."""
    args = function.args
    return len(args.posonlyargs) + len(args.args) - len(args.defaults) + sum(d is None for d in args.kw_defaults)


def _yields(function):
    return any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in _walk(function, scopes=False))


def _is_case(node):
    return any(_last(base).endswith("TestCase") or _last(base) == "Case" for base in node.bases)


def _is_hook(name):
    """Whether Python, unittest or pytest calls a method of this name."""
    return name.lower().startswith(("__", "setup", "teardown", "asyncsetup", "asyncteardown", "runtest"))


def _is_fixture(node):
    return any(_last(getattr(d, "func", d)) == "fixture" for d in node.decorator_list)


def _suppresses(call):
    return isinstance(call, ast.Call) and _last(call.func) == "suppress" and any(
        _last(kind) in ("AssertionError", "Exception", "BaseException") for kind in call.args)  # fmt: skip


def _is_data_parser(call):
    """Whether a call only reads data: ``json.loads``, ``re.compile``."""
    return ast.unparse(call.func) in ("json.loads", "re.compile", "tomllib.loads")


def _last(node):
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
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module in STARRED:
            names = vars(importlib.import_module(node.module))
            bound |= set(names.get("__all__", [name for name in names if not name.startswith("_")]))
    return bound, read - bound - {"__name__", "__doc__", "__builtins__"}
