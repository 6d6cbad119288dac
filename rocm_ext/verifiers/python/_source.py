"""Read the tests' source without running it: the tests, the names that the answer defines, and mistakes.

``check_row`` uses this, and so does the judge in its sandbox, where there is only the standard library.
"""

import ast
import builtins
import importlib
import re
import symtable
import warnings

LIBRARY = """bisect cmath collections copy datetime decimal fractions functools heapq itertools json math numpy operator
os pandas pytest random re statistics string sys time unittest"""
MODULES = {name: name for name in LIBRARY.split()} | {"np": "numpy", "pd": "pandas"}
COMMON = {  # well-known names of modules
    **dict.fromkeys(("isclose", "sqrt", "pi", "inf", "nan"), "math"),
    **dict.fromkeys(
        ("Counter", "OrderedDict", "defaultdict", "deque", "namedtuple"), "collections"
    ),
    "Decimal": "decimal",
    "Fraction": "fractions",
}
# Modules of which the tests may import all names with a star
STARRED = {*MODULES.values(), "typing", "enum", "dataclasses", "abc", "collections.abc"}
STARRED -= {"numpy", "pandas", "pytest"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DEFINITIONS = (*FUNCTIONS, ast.ClassDef)
SCOPES = (*DEFINITIONS, ast.Lambda)
BLOCKS = (ast.For, ast.While, ast.With, ast.Try)
BINDS = (*SCOPES, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.AugAssign)
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
CHECKS = {"fail", "raises", "warns"}  # calls that may fail, like assertEqual
RUNNERS = {"exit", "run", "main"}  # calls that may run tests, or end with their outcome
# Beginnings of methods' names that need no caller
HOOKS = ("__", "setup", "teardown", "asyncsetup", "asyncteardown", "runtest", "assert", "_assert")
PATCHES = ("patch.", "mock.patch.", "unittest.mock.patch.", "monkeypatch.")
REACHES = ("sys.stdout", "sys.stderr", "__main__.")  # the judge prints the code's output there
TEXT = "would run what the answer returns in the tests' process"
REFUSED = {  # reason -> calls, modules and fixtures; ".name": also methods; "name.": a module with all that it holds
    TEXT: """eval exec compile breakpoint __import__ __builtins__ __loader__ __spec__ sys.modules os.system os.popen
        numpy.load yaml.load yaml.load_all yaml.unsafe_load yaml.unsafe_load_all typing.ForwardRef typing.get_type_hints
        asyncio.create_subprocess_exec asyncio.create_subprocess_shell builtins. code. codeop. timeit. runpy. importlib.
        imp. pkgutil. pydoc. pickle. marshal. dill. cloudpickle. joblib. shelve. subprocess. pty. posix. pdb. bdb.
        cProfile. profile. trace. doctest. ctypes. sympy. jinja2. mako.""",
    "looks into the code's objects, log or warnings": """dataclasses.asdict dataclasses.astuple dataclasses.fields
        dataclasses.replace dataclasses.is_dataclass inspect.signature inspect.getsource inspect.getmembers
        inspect.iscoroutinefunction inspect.isgeneratorfunction inspect.isasyncgenfunction .assertLogs .assertNoLogs
        .assertWarns .assertWarnsRegex warnings.catch_warnings pytest.warns caplog recwarn""",
    "needs concurrent coroutines": """asyncio.gather asyncio.wait asyncio.wait_for asyncio.create_task
        asyncio.ensure_future asyncio.as_completed asyncio.timeout asyncio.TaskGroup .create_task""",
    "leaves tests out while they run": "pytest.skip pytest.xfail unittest.SkipTest .skipTest",
    "uses files": "tmp_path tmpdir tmp_path_factory open .mkdtemp .write_text .write_bytes",
    "uses tables, which do not cross": "pandas",
    "gives the code an object of the tests": """unittest.mock.Mock unittest.mock.MagicMock unittest.mock.AsyncMock
        unittest.mock.create_autospec""",
}
REASONS = {name: reason for reason, names in REFUSED.items() for name in names.split()}
TEXTS = set(REFUSED[TEXT].split())
INNER = ("__builtins__", "__globals__", "__self__", "__subclasses__")
RISKS = {name.split(".")[0] for name in TEXTS}
APART = "the code runs in another process; `isolation: same_process` can judge it"


class Broken(ValueError):
    """The tests themselves are wrong, or cannot be judged."""


class Tests:
    """The tests' source, split into units that pass or fail.

    Args:
        source: the tests.
        trusted: sources that run before them on both sides: the set-up, and the given beginning of the code.
        entry: the argument of ``check``, an expression. Empty if the row has none.
        apart: whether the code runs in another process, so that tests which do not reach it are refused.

    Attributes:
        body: the top level's statements in order. Test functions and classes run after them.
        units: top-level statements that pass or fail: not definitions, imports and assignments.
        simple: names of test functions without fixture, mark or class; also ``check``.
        runner: whether pytest must run the other test functions and test classes.
        helpers: names of test functions that others call with arguments, which do not run by themselves.
        defined: names of the top level's functions and classes.
        own: names that only the answer can define; it must define one of them.
        required: names that the answer must define.
        wanted: ``required``, and names that the answer may define.
        live: names of the answer whose changing values the tests see.
        library: name used without an import -> (module, attribute, or "" for the module itself).
        functions: definitions of functions in the tests, and of those at the top of the trusted sources.
        called: names that are called.

    Raises:
        Broken: a part of the tests would not run or could not fail, or the tested name is unknown.
    """

    def __init__(self, source, trusted=(), entry="", apart=True):
        self.entry = entry
        self.apart = apart
        self.lines = source.split("\n")
        tree = ast.parse(source)
        given = [ast.parse(text) for text in trusted]
        self.body = []
        for statement in tree.body:
            self.body += _unwrapped(statement)
        self.nodes = list(walk(tree))
        self.above = []
        above = []  # the top level of the trusted sources
        given_names = set()
        for text, part in zip(trusted, given, strict=True):
            self.above += walk(part)
            above += part.body
            given_names |= _globals(text, part)[0]
        self.imports = _imports([*above, *self.nodes])
        self.called = _ids(node.func for node in self.of(ast.Call))
        self.functions = self.of(*FUNCTIONS)
        self.functions += [node for node in above if isinstance(node, FUNCTIONS)]
        self.checking = functions_that(_checks_alone, self.functions)
        self._sort_definitions(above, "pytestmark" in source)
        self.units = {statement for statement in self.body if self._is_unit(statement)}
        running = [*self.units, *self.tests, *self.classes]
        if not any(map(self.checks, running)):
            raise Broken("the tests check nothing: they hold no assert that runs")
        bound, read = _globals(source, tree)
        of_entry = _ids(ast.walk(ast.parse(entry or "0")))
        self._find_names(bound, ((read - given_names) | of_entry) - bound)
        for problem in self._problems():
            raise Broken(problem)

    def _sort_definitions(self, above, marked):
        """Sort the functions and classes: tests, their helpers and fixtures, and what pytest must run.

        Args:
            above: the top level's statements of the trusted sources.
            marked: whether the tests have a mark of pytest for all of them.
        """
        top = []  # the top level's nodes, without the insides of definitions
        for statement in self.body:
            top += [statement] if isinstance(statement, SCOPES) else walk(statement, False)
        functions = self.of(*FUNCTIONS)
        self.defined = {node.name for node in top if isinstance(node, DEFINITIONS)}
        self.helpers = set()
        for function in functions:
            called = function.name in self.called
            if called and _needs(function) and not function.decorator_list:
                self.helpers.add(function.name)
        self.fixtures = {function for function in functions if _is_fixture(function)}
        cases = {"TestCase", "IsolatedAsyncioTestCase"}
        self.top_classes = [node for node in top if isinstance(node, ast.ClassDef)]
        for node in [*above, *self.top_classes]:
            if isinstance(node, ast.ClassDef):
                bases = {self.name(base).split(".")[-1] for base in node.bases}
                if bases & cases:
                    cases.add(node.name)
        self.classes = []
        for node in self.top_classes:
            if node.name.startswith("Test") or node.name in cases:
                self.classes.append(node)
        self.tests = []
        for node in top:
            if not isinstance(node, FUNCTIONS) or node in self.fixtures:
                continue
            is_check = node.name == "check" and self.entry
            if is_test(node.name) and (is_check or node.name not in self.helpers):
                self.tests.append(node)
        self.simple = []
        for function in self.tests:
            plain = not _needs(function) and not function.decorator_list
            if plain or function.name == "check":
                self.simple.append(function.name)
        hooks = any(function.name.startswith(("setup_", "teardown_")) for function in functions)
        with_pytest = len(self.tests) > len(self.simple)  # some have a fixture or a mark
        self.runner = bool(self.classes or self.fixtures or hooks or with_pytest or marked)

    def of(self, *kinds):
        return [node for node in self.nodes if isinstance(node, kinds)]

    def text(self, node):
        """The beginning of a node's source in one line."""
        lines = self.lines[node.lineno - 1 : node.end_lineno]
        return " ".join(map(str.strip, lines))[:200]

    def name(self, node):
        """The full name of an expression: ``unittest.mock.patch`` for ``patch``."""
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            return f"{self.name(node.value)}.{getattr(node, 'attr', '')}"
        if isinstance(node, ast.Name):
            return self.imports.get(node.id, node.id)
        return ""

    def checks(self, tree):
        """Whether code has a check: it asserts, raises, or calls a function that does."""
        return any(_checks(node, self.checking) for node in walk(tree))

    def _is_unit(self, statement):
        if isinstance(statement, ast.Expr):
            call = statement.value
            called = last_name(getattr(call, "func", None))
            return isinstance(call, (ast.Call, ast.Await)) and called != "print"
        if isinstance(statement, BINDS):
            return False
        return isinstance(statement, BLOCKS) or self.checks(statement)

    def uses_numpy(self):
        """Whether the tests use numpy."""
        names = [*self.imports.values(), *self.library]
        return "numpy" in map(module_of, names) or "np" in self.library

    def _find_names(self, bound, free):
        """Sort the names that the tests use: the answer's, builtins', the library's."""
        lead = self.entry.split(".")[0].split("(")[0]
        if lead in self.defined:
            raise Broken(
                f"the tests define {lead}, the entry_point: the answer's would not be tested"
            )
        needing = {test.name for test in self.tests if _needs(test)}
        if "check" in needing and not lead:
            raise Broken("check() takes an argument, and the row has no entry_point")
        own = {name for name in free if not _is_known(name)}
        unknown = []  # names of checks
        for name in sorted(own - {lead}):
            if name.lower().startswith("assert") or name == "TestCase":
                unknown.append(name)
        if unknown and (lead or len(unknown) < len(own)):
            raise Broken(f"nothing defines {unknown[0]}, so that the answer could: import it")
        imported = set()
        for name, path in self.imports.items():
            if module_of(path) == "solution":
                imported |= {name, path.split(".")[-1]}
        self.required = {lead} if lead.isidentifier() else set()
        self.own = set() if self.required or imported else own
        if not (own or self.required or imported):
            self.required = {self._tested(self.called & free)}
        # a name that the tests assign may be read before that, as in `count = count(x)`
        assigned = _ids(node for node in self.nodes if is_assigned(node))
        again = assigned & bound - self.defined
        reached = set()
        for node in self.of(ast.Attribute):
            if self.name(node.value) == "solution":
                reached.add(node.attr)
        self.wanted = own | self.required | again | imported | reached
        self.live = (own | self.required) - bound
        self.library = {}
        for name in free - self.wanted:
            if name in COMMON:
                self.library[name] = COMMON[name], name
            elif name in MODULES:
                self.library[name] = MODULES[name], name if name in self.called else ""

    def _tested(self, called):
        """The function under test, for tests that use only names of builtins and the library."""
        others = ("Error", "Exception", "Exit", "Interrupt", "Iteration")
        candidates = {name for name in called if not name.endswith(others)}
        plain = set()  # functions that an assert calls with constants, and whose result it compares
        for node in self.of(ast.Assert):
            match node.test:
                case ast.Compare(left=ast.Call(func=func, args=args)):
                    if not _ids(walk(ast.Tuple(args))):
                        plain.add(last_name(func))
        for names in (candidates, plain & candidates):
            if len(names) == 1:
                return names.pop()
        if candidates:
            raise Broken(
                f"which of {', '.join(sorted(candidates))} is tested? Name it in entry_point"
            )
        raise Broken(
            "the tests use no name that the answer could define: add `from solution import NAME`"
        )

    def _problem(self, node, reason):
        """The problem of a node in a message."""
        return f"`{self.text(node)[:80]}` {reason}"

    def _problem_apart(self, node, reason):
        """Yield the problem of a node if the code runs in another process."""
        if self.apart:
            yield self._problem(node, f"{reason}: {APART}")

    def _problems(self):
        """Yield why tests would not run, could not fail, or do not reach the code."""
        self.used = set()
        for node in self.of(ast.Name, ast.Attribute, ast.Constant):
            self.used.add(last_name(node) or str(getattr(node, "value", "")))
        self.tasks = {function.name for function in self.of(ast.AsyncFunctionDef)}
        self.expecting = set()  # what may be there for the exception that it raises
        for node in self.of(ast.With, ast.AsyncWith, ast.Try):
            self.expecting.update(walk(node))
        yield from self._problems_of_text()
        for node in self.nodes:
            yield from self._problems_of_blocks(node)
            yield from self._problems_of_node(node)
        for node in self.top_classes:
            yield from self._problems_of_class(node)

    def _problems_of_blocks(self, node):
        """Yield checks that come after the end of a node's blocks."""
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if not isinstance(block, list):
                continue
            ended = False
            for statement in block:
                if ended and self.checks(statement):
                    problem = "comes after the end of its block and never runs"
                    yield self._problem(statement, problem)
                ended = ended or isinstance(statement, ENDS)

    def _problems_of_text(self):
        """Yield what could run text that the answer returns."""
        self.passed_on = self._modules_passed_on([*self.above, *self.nodes])
        for node in filter(self._runs_text, self.above):
            yield f"`{ast.unparse(node)}` of the set-up {TEXT}"
        constant = set()
        for call in self.of(ast.Call):
            if self._runs_text(call.func) and _is_constant(call):
                constant.update(walk(call.func))
        for node in self.nodes:
            if node not in constant and self._runs_text(node):
                yield self._problem(node, f"has {ast.unparse(node)}, which {TEXT}")

    def _problems_of_node(self, node):
        match node:
            case ast.Module(body=body) | ast.ClassDef(body=body):
                names = [part.name for part in body if isinstance(part, DEFINITIONS)]
                for name in names:
                    if name.lower().startswith("test") and names.count(name) > 1:
                        yield f"{name} is defined twice, so that only the last runs: rename one"
            case ast.Assert(test=ast.Tuple(elts=[_, *_])):
                yield self._problem(node, "is always true: remove the parentheses")
            case ast.Expr(value=ast.Compare()) if node not in self.expecting:
                yield self._problem(node, "has a result that nobody looks at: write `assert`")
            case ast.Expr(value=ast.Call(func=func)):
                name = self.name(func).removeprefix("self.")
                tasks = (".create_task", ".ensure_future", "asyncio.gather")
                if name in self.tasks or name.endswith(tasks):
                    yield self._problem(node, "makes a task that nobody awaits")
            case ast.Import() | ast.ImportFrom():
                if "pandas" in map(module_of, _imports([node]).values()):
                    yield from self._problem_apart(node, REASONS["pandas"])
            case ast.Call():
                yield from self._problems_of_call(node)
            case ast.Raise(exc=ast.Name() | ast.Attribute() as kind):
                if self.name(kind) in REASONS:
                    yield from self._problem_apart(node, REASONS[self.name(kind)])
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                yield from self._problems_of_change(node, node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from self._problems_of_function(node)

    def _problems_of_call(self, node):
        name = self.name(node.func)
        last = name.split(".")[-1]
        reason = REASONS.get(name) or REASONS.get(f".{last}")
        if reason and reason != TEXT:
            yield from self._problem_apart(node, reason)
        marks = (".skipif", ".skipIf", ".skipUnless", ".mark.xfail")
        if name.endswith(marks) and self._chooses(node):
            yield from self._problem_apart(node, REASONS["pytest.skip"])
        if name.endswith("TextTestRunner"):
            yield self._problem(node, "is not needed: write the TestCase at the top level")
        formats = name.endswith((".format", ".format_map"))
        if formats and not self._is_constant_text(node.func.value):
            reason = "would read the tests as the answer's text says: use an f-string"
            yield self._problem(node, reason)
        if node.args and f"{name}.".startswith(PATCHES):
            yield from self._problems_of_change(node, *node.args[:2])

    def _chooses(self, mark):
        """Whether a mark leaves a test out for another reason than the machine and its packages."""
        known = self.imports.keys() | vars(builtins)
        first = mark.args[0] if mark.args else mark
        return isinstance(first, ast.Constant) or not _ids(walk(mark)) <= known

    def _is_constant_text(self, node):
        """Whether an expression is a constant, or a name that is only set to constants."""
        if isinstance(node, ast.Constant):
            return True
        name = self.name(node)
        values = []
        for statement in self.of(ast.Assign):
            if name in _ids(statement.targets):
                values.append(statement.value)
        return bool(values) and all(isinstance(value, ast.Constant) for value in values)

    def _modules_passed_on(self, nodes):
        """Mentions of modules without a dot after them: ``vars(sys)`` leads to everything that Python has loaded."""
        modules = set()
        paths = _imports(node for node in nodes if isinstance(node, ast.Import))
        for name, path in paths.items():
            if module_of(path) not in ("numpy", "solution"):
                modules.add(name)
        mentions = set()
        harmless = set()
        for node in nodes:
            match node:
                case ast.Name(id=name) if name in modules:
                    mentions.add(node)
                case ast.Attribute(value=owner, attr=name) if not name.startswith("__"):
                    harmless.add(owner)
                case ast.Call(args=args) if self._takes_names(node):
                    harmless.update(args)
        return mentions - harmless

    def _takes_names(self, call):
        return f"{self.name(call.func)}.".startswith((*PATCHES, "hasattr."))

    def _runs_text(self, node):
        """Whether a node is a name that can turn text into code in any use."""
        match node:
            case ast.Name() if node in self.passed_on:
                return True
            case ast.ImportFrom(module=str(module), names=[ast.alias(name="*")]):
                return f"{module_of(module)}." in TEXTS
            case ast.Attribute(attr=text) | ast.Constant(value=text) if text in INNER:
                return True
            case ast.Name(ctx=ast.Load()) | ast.Attribute():
                return self._is_risky(self.name(node), _ids(walk(node)))
        return False

    def _is_risky(self, name, names):
        """Whether a full name can turn text into code; ``names``: those of variables in its expression."""
        if names.isdisjoint(self.imports):  # a builtin, unless the answer or the tests define it
            return name in TEXTS and not names & (self.defined | self.required)
        parts = [part.lstrip("_") for part in name.split(".")]
        if parts[-1] in ("eval", "exec") and parts[0] != "solution":
            return True
        forms = (f"{parts[0]}.", ".".join(parts[-2:]), name)
        if "builtins" in parts or not TEXTS.isdisjoint(forms):
            return True
        return name.startswith(("os.exec", "os.spawn", "os.posix_spawn"))

    def _problems_of_change(self, node, target, name=None):
        """Yield changes of imported modules, such as ``time.time = f``, since they do not reach the code."""
        is_text = isinstance(target, ast.Constant)
        if is_text:
            changed = str(target.value)
        else:
            changed = f"{self.name(target)}.{getattr(name, 'value', '')}"
        of_module = is_text or module_of(changed) in map(module_of, self.imports.values())
        if of_module and not changed.startswith(REACHES):
            yield from self._problem_apart(node, "does not reach the code")

    def _problems_of_function(self, node):
        name = node.name
        named = name in self.used or is_test(name) or name.lower().startswith(HOOKS)
        if not (named or node.decorator_list) and self.checks(node):
            yield f"nothing calls {name}(), which holds asserts: call it or name it test_{name}"
        kinds = {type(n) for n in walk(node, False)}
        waits = isinstance(node, ast.AsyncFunctionDef) and ast.Await in kinds
        if waits and kinds & {ast.Nonlocal, ast.Global}:
            yield from self._problem_apart(node, "counts concurrent coroutines")
        runs = is_test(name) and name not in self.helpers and node not in self.fixtures
        if runs and kinds & {ast.Yield, ast.YieldFrom}:
            yield f"{name}() is a generator, which does not run: use asserts or parametrize"
        chosen = self.wanted & _ids(n for d in node.decorator_list for n in walk(d))
        if is_test(name) and chosen:
            yield f"{chosen.pop()} of the answer decorates {name}(), and so decides what is tested"
        for arg in node.args.args:
            if self.apart and arg.arg in REASONS:
                yield f"{name}() takes {arg.arg}, which {REASONS[arg.arg]}: {APART}"

    def _problems_of_class(self, node):
        name = node.name
        bases = {last_name(base) for base in node.bases}
        functions = [part for part in node.body if isinstance(part, FUNCTIONS)]
        tests = [function for function in functions if function.name.startswith("test")]
        runs = node in self.classes
        if tests and not runs and name not in self.used:
            yield f"class {name} does not run: name it Test{name} or derive it from TestCase"
        has_init = any(function.name == "__init__" for function in functions)
        if tests and runs and not bases and has_init:
            yield f"class {name} has an __init__: use setup_method"
        if bases == {"TestCase"} and any(isinstance(test, ast.AsyncFunctionDef) for test in tests):
            yield f"a test of {name} is async: derive it from IsolatedAsyncioTestCase"
        of_answer = bases & self.wanted
        if self.apart and of_answer:
            yield f"class {name} of the tests inherits from {of_answer.pop()} of the answer: {APART}"


def is_assigned(node):
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def is_test(name):
    return name == "check" or name.startswith("test")


def names_in(block):
    """The names that a part of an answer defines, imports, and only reads."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(block)
            bound, read = _globals(block, tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        defined = re.findall(r"^(?:async +)?(?:def|class) +(\w+)", block, re.M)
        return set(defined), set(), set()
    imported = _imports(tree.body).keys()
    return bound - imported, imported, read


def _unwrapped(statement):
    """The statements of an ``if __name__ == "__main__":`` block, since it runs; or the statement."""
    match statement:
        case ast.ImportFrom(module="solution", names=[ast.alias(name="*")]):
            return []  # the names that the tests use come anyway
    main = isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'"
    return statement.body if main else [statement]


def walk(tree, scopes=True):
    """The nodes of a tree, without constants in lists, which may be megabytes of data.

    ``scopes=False``: also without the insides of functions and classes below ``tree``.
    """
    todo = [tree]
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            todo += [item for item in reversed(node.elts) if type(item) is not ast.Constant]
        elif scopes or node is tree or not isinstance(node, SCOPES):
            todo += reversed(list(ast.iter_child_nodes(node)))


def calls_check(node):
    """Whether a node is a call that may fail by its name, such as ``assertEqual(a, b)``."""
    if not isinstance(node, ast.Call):
        return False
    name = last_name(node.func)
    return name in CHECKS or name.lower().startswith("assert")


def functions_that(holds, functions):
    """The names of functions that hold a certain node, or call functions that do.

    Args:
        holds: says whether it is the node, from the node and the names that are known so far.
        functions: definitions of functions.
    """
    names = set()
    while True:
        more = set()
        for function in functions:
            parts = (part for statement in function.body for part in walk(statement))
            if function.name not in names and any(holds(part, names) for part in parts):
                more.add(function.name)
        if not more:
            return names
        names |= more


def _checks(node, checking):
    """Whether a node is a check; ``checking``: names of functions that hold checks."""
    match node:
        case ast.Assert() | ast.Raise():
            return True
        case ast.Return(value=ast.Compare() | ast.BoolOp()):
            return True  # a test that returns False fails
        case ast.Call():
            name = last_name(node.func)
            return name in checking or name in RUNNERS or calls_check(node)
    return False


def _checks_alone(node, checking):
    """Whether a node is a check also in a function that is no test, whose result nobody looks at."""
    return not isinstance(node, ast.Return) and _checks(node, checking)


def _is_constant(call):
    """Whether a plain name is called with constants and lambdas, and the constants mention nothing that runs text."""
    parts = (ast.Name, ast.Attribute, ast.expr_context)
    plain = all(isinstance(node, parts) for node in walk(call.func))
    if not plain or not last_name(call.func)[:1].islower():
        return False
    values = list(call.args)
    for keyword in call.keywords:
        if ast.unparse(keyword.value) != "globals()":
            values.append(keyword.value)
    return bool(values) and all(_is_harmless(value) for value in values)


def _is_harmless(value):
    """Whether a node is a lambda, or a constant that mentions nothing that runs text."""
    if not isinstance(value, ast.Constant):
        return isinstance(value, ast.Lambda)
    return RISKS.isdisjoint(re.findall(r"\w+", str(value.value)))


def _needs(function):
    """Whether a function has parameters without a default."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    return len(positional) > len(args.defaults) or None in args.kw_defaults


def _is_fixture(function):
    decorators = (getattr(decorator, "func", decorator) for decorator in function.decorator_list)
    return "fixture" in map(last_name, decorators)


def _is_known(name):
    """Whether a name is a builtin's or a well-known one of the library."""
    return name in MODULES or name in COMMON or hasattr(builtins, name) or name == "__file__"


def _ids(nodes):
    return {n.id for n in nodes if isinstance(n, ast.Name)}


def module_of(path):
    """``a`` of the path ``a.b.c``."""
    return path.split(".")[0]


def last_name(node):
    """``c`` of the expression ``a.b.c``."""
    return getattr(node, "attr", getattr(node, "id", "")) or ""


def _imports(nodes):
    """Imports: name in the tests -> full name."""
    paths = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name != "*":
                    paths[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = module_of(alias.name)
                paths[alias.asname or top] = alias.name if alias.asname else top
    return paths


def _globals(source, tree):
    """The names that a module binds, also by ``from module import *``, and the names that it only reads."""
    bound = set()
    read = set()
    tables = [symtable.symtable(source, "tests", "exec")]
    for table in tables:
        tables += table.get_children()
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            if not (top or symbol.is_global()):
                continue
            if symbol.is_referenced():
                read.add(symbol.get_name())
            if symbol.is_assigned() or (top and symbol.is_imported()):
                bound.add(symbol.get_name())
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or node.names[0].name != "*":
            continue
        if node.module in STARRED:
            names = vars(importlib.import_module(node.module))
            public = [name for name in names if not name.startswith("_")]
            bound.update(names.get("__all__", public))
    return bound, read - bound - {"__name__", "__doc__", "__builtins__"}
