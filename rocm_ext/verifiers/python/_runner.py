"""Runs test functions and classes as pytest does: parameters, fixtures, marks, set-up and tear-down.

This runs in the judge's sandbox with the standard library alone.
"""

import contextlib
import inspect
import itertools
import types

from _standin import Capsys, Failed, MonkeyPatch, Param
from _units import FIXTURES, Broken, is_test_class


class Runner:
    """Runs test functions and classes.

    Args:
        namespace: of the tests.
        unit: called as ``unit(run, sites, text)`` for each test: a function without arguments, the number of checks
            that it counts, and the text that names it.
        sites: name of a test function -> number of checks that it counts.
    """

    def __init__(self, namespace, unit, sites):
        self.namespace, self.unit, self.sites = namespace, unit, sites
        self.stack, self.cache = contextlib.ExitStack(), {}
        self.fixtures = self._fixtures(namespace)

    @staticmethod
    def _fixtures(namespace):
        return {f._fixture["name"]: f for f in namespace.values() if inspect.isfunction(f) and hasattr(f, "_fixture")}

    def function(self, name, function, kind=None, fixtures=None):
        """Run a test function, or a method of class ``kind``, once for each of its parameter sets."""
        fixtures = self.fixtures if fixtures is None else fixtures
        marks = [*_listed(self.namespace.get("pytestmark")), *(_listed(getattr(kind, "pytestmark", ()))),
                 *(m for base in reversed(getattr(kind, "__mro__", ())) for m in vars(base).get("_marks", ())),
                 *getattr(function, "_marks", ())]  # fmt: skip
        sites = 0 if kind else self.sites.get(name, 0)
        shown = f"{kind.__name__}.{name}" if kind else name
        for label, params, own in self._cases(function, marks, fixtures):
            every = [*marks, *own]
            if any(m.name == "skip" or (m.name == "skipif" and self._holds(m)) for m in every):
                continue
            xfail = next((m for m in every if m.name == "xfail" and (not m.args or self._holds(m))), None)
            if xfail is not None and not xfail.keywords.get("strict"):
                continue  # whether it fails decides nothing
            run = lambda params=params, every=every: self._call(function, kind, params, every, fixtures)  # noqa: E731
            self.unit(run if xfail is None else lambda run=run: _must_fail(run), sites, f"{shown}{label}")

    def _holds(self, mark):
        """Whether the condition of ``skipif`` or ``xfail`` holds."""
        conditions = mark.args or [mark.keywords.get("condition", True)]
        return any(eval(c, self.namespace) if isinstance(c, str) else c for c in conditions)

    def _cases(self, function, marks, fixtures):
        """The parameter sets of a function: (label, name -> value, marks) of each."""
        axes = []
        for mark in reversed([m for m in marks if m.name == "parametrize"]):
            axes.append(list(_axis(*mark.args, **mark.keywords)))
        names, seen = [*self._needs(function, marks, fixtures)], set()
        while names:
            name = names.pop(0)
            if name in fixtures and name not in seen:
                seen.add(name)
                names += self._needs(fixtures[name], (), {})
                if fixtures[name]._fixture["params"] is not None:
                    cases = _axis(name, fixtures[name]._fixture["params"])
                    axes.append([(label, {("param", name): each[name]}, own) for label, each, own in cases])
        for chosen in itertools.product(*axes):
            label = "-".join(part[0] for part in chosen)
            params = {key: value for part in chosen for key, value in part[1].items()}
            yield f"[{label[:100]}]" if chosen else "", params, [m for part in chosen for m in part[2]]

    def _needs(self, function, marks, fixtures):
        """The names of the fixtures that a function may need."""
        found = [name for name, f in fixtures.items() if f._fixture["autouse"]]
        found += [name for m in marks if m.name == "usefixtures" for name in m.args]
        return [*found, *(p.name for p in _parameters(function))]

    def _call(self, function, kind, params, marks, fixtures):
        with contextlib.ExitStack() as stack:
            target = kind() if kind else None
            method = function if target is None else getattr(target, function.__name__)
            if target is None:
                self._hooks(stack, self.namespace, "setup_function", "teardown_function", function)
            else:
                self._hooks(stack, target, "setup_method", "teardown_method", method)
            test = _Test(self, stack, params, fixtures, target, kind)
            for name in self._needs(lambda: None, marks, fixtures):
                test.value(name)
            found = method(**{p.name: test.value(p.name) for p in _parameters(method) if
                              p.default is p.empty or p.name in params})  # fmt: skip
            found = awaited(found)
            if inspect.isgenerator(found):
                raise Broken(f"{function.__name__}() is a generator, which does not run")
            if found is False:
                raise AssertionError("returned False")

    def _hooks(self, stack, owner, before, after, argument):
        get = owner.get if isinstance(owner, dict) else lambda name: getattr(owner, name, None)
        for name, call in ((after, stack.callback), (before, lambda function: function())):
            hook = get(name)
            if hook is not None:
                call(lambda hook=hook: hook(*[argument][: len(_parameters(hook))]))

    def run_class(self, kind):
        """Run the test methods of a class that pytest would collect."""
        with contextlib.ExitStack() as stack:
            self._hooks(stack, kind, "setup_class", "teardown_class", kind)
            members = {n: v for base in reversed(kind.__mro__) if base is not object for n, v in vars(base).items()}
            fixtures = {**self.fixtures, **self._fixtures(members)}
            for name, member in members.items():
                if isinstance(member, (staticmethod, classmethod)):
                    member = member.__func__
                if name.startswith("test") and inspect.isfunction(member):
                    self.function(name, member, kind, fixtures)
                elif is_test_class(name) and inspect.isclass(member):
                    self.run_class(member)

    def close(self):
        """Tear down the fixtures of the module."""
        self.stack.close()


class _Test:
    """The fixtures of one test."""

    def __init__(self, runner, stack, params, fixtures, target, kind):
        self.runner, self.stack, self.params, self.fixtures = runner, stack, params, fixtures
        self.target, self.kind, self.values = target, kind, {}

    def value(self, name):
        """The value of a fixture or parameter."""
        if name in self.params:
            return self.params[name]
        if name in self.values:
            return self.values[name]
        if name not in self.fixtures:
            self.values[name] = self._builtin(name)
            return self.values[name]
        function = self.fixtures[name]
        scope = function._fixture["scope"]
        if scope == "function":
            self.values[name] = self._make(name, function, self.stack)
            return self.values[name]
        chosen = self.params.get(("param", name))
        key = (name, self.kind if scope == "class" else None, id(chosen))
        if key not in self.runner.cache:
            self.runner.cache[key] = self._make(name, function, self.runner.stack)
        return self.runner.cache[key]

    def _make(self, name, function, stack):
        names = [p.name for p in _parameters(function) if p.default is p.empty]
        owner = []
        if names[:1] == ["self"]:
            owner, names = [self.target], names[1:]
        args = {n: self._request(name) if n == "request" else self.value(n) for n in names}
        found = function(*owner, **args)
        if not inspect.isgenerator(found):
            if inspect.iscoroutine(found) or inspect.isasyncgen(found):
                raise Broken(f"the fixture {name} is async, which does not work here")
            return found
        value = next(found)
        stack.callback(next, found, None)
        return value

    def _request(self, name):
        return types.SimpleNamespace(param=self.params.get(("param", name)), getfixturevalue=self.value,
                                     addfinalizer=self.stack.callback, instance=self.target, cls=self.kind)  # fmt: skip

    def _builtin(self, name):
        if name == "request":
            return self._request(None)
        if name == "monkeypatch":
            patch = MonkeyPatch()
            self.stack.callback(patch.undo)
            return patch
        if name == "capsys":
            return self.stack.enter_context(contextlib.closing(Capsys()))
        raise Broken(
            f"no fixture {name}: the tests define none, and of pytest's these work: {', '.join(sorted(FIXTURES))}"
        )


def awaited(found):
    """What an async test returns in the end; any other value as it is."""
    if not inspect.iscoroutine(found):
        return found
    import asyncio

    return asyncio.run(found)


def _must_fail(run):
    """``xfail(strict=True)``."""
    try:
        run()
    except (Exception, Failed):
        return
    raise Failed("passes, though xfail(strict=True) says that it fails")


def _listed(marks):
    return marks if isinstance(marks, (list, tuple)) else [marks] if marks else []


def _parameters(function):
    """The parameters that a caller can give by name; without ``self`` for a bound method."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = [p for p in inspect.signature(function).parameters.values() if p.kind in kinds]
    patches = [p for p in getattr(function, "patchings", ()) if p.attribute_name is None]  # of unittest.mock
    found = found[sum(repr(p.new) == "sentinel.DEFAULT" for p in patches) :]
    return [p for p in found if p.default is p.empty or p.name not in FIXTURES]


def _axis(argnames, argvalues, indirect=False, ids=None, scope=None):
    """The cases of one ``parametrize``: (label, name -> value, marks) of each."""
    if indirect:
        raise Broken("parametrize(indirect=...) does not work here")
    names = [n.strip() for n in argnames.split(",") if n.strip()] if isinstance(argnames, str) else list(argnames)
    one = isinstance(argnames, str) and "," not in argnames
    for index, each in enumerate(argvalues):
        values, marks, label = each if isinstance(each, Param) else ((each,) if one else tuple(each), (), None)
        if len(values) != len(names):
            raise Broken(f"parametrize names {', '.join(names)}, but a case has {len(values)} values")
        if label is None and ids is not None:
            label = str(ids(values[0]) if callable(ids) else list(ids)[index])
        yield label or "-".join(map(str, values)), {n: values[i] for i, n in enumerate(names)}, marks
