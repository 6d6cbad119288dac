"""What the tests take each name of the code for: a class, whose objects they use, or a function, which gives data.

The tests' source alone decides, never what the code made of the name. This runs inside the judge's sandbox.
"""

import ast
import collections

LIBRARY: tuple = (str, bytes, bytearray, list, tuple, dict, set, frozenset, int, float, complex, range, memoryview,
           collections.deque, collections.Counter, collections.OrderedDict, type({}.keys()))  # fmt: skip
# methods of types whose modules may not be loaded: decimal, fractions, datetime, pathlib, numpy and pandas
MORE = """
quantize compare copy_sign is_nan is_finite is_signed sqrt ln exp normalize to_integral_value limit_denominator
isoformat strftime timestamp total_seconds weekday isoweekday isocalendar astimezone utcoffset date time timetuple
exists is_file is_dir read_text with_suffix with_name relative_to is_relative_to joinpath as_posix match
equals all any allclose tolist to_list to_dict to_numpy sum mean min max std var median prod cumsum round astype reshape
flatten ravel transpose dot argmax argmin argsort nonzero searchsorted fill head tail describe groupby sort_values
sort_index reset_index set_index isna isnull notna notnull dropna fillna unique nunique value_counts idxmax idxmin
apply map applymap agg aggregate merge concat iterrows itertuples isin between duplicated drop_duplicates
""".split()  # noqa: SIM905 - a list of these would take a screen
NUMBERS = {"real", "imag", "numerator", "denominator"}
METHODS = (
    NUMBERS
    | frozenset(name for kind in LIBRARY for name in dir(kind) if callable(getattr(kind, name)))
    | frozenset(MORE)
)
PREDICATES = {
    *(name for name in METHODS if name.startswith(("is", "any", "all")) and not name.startswith("iso")),
    *("startswith", "endswith", "equals", "match", "between", "exists"),
}
GENERATOR = {"send", "throw", "close", "asend", "athrow", "aclose"}


class Roles:
    """What tests take names for.

    Attributes:
        classes: names that the tests use as classes.
        objects: names of functions and methods whose results they use as objects of the code's classes.
        bare: names of classes that only hold functions, such as LeetCode's ``Solution``.
    """

    def __init__(self, statements, entry_point=""):
        self.nodes = [node for statement in statements for node in ast.walk(statement)]
        self.bare = {"Solution"}
        self.objects = set()
        self._sources = collections.defaultdict(set)  # variable -> names of the calls that its values may come from
        entry = ast.parse(entry_point or "None", mode="eval").body
        while isinstance(entry, (ast.Attribute, ast.Call)):
            whole, entry = entry, entry.value if isinstance(entry, ast.Attribute) else entry.func
            if isinstance(whole, ast.Attribute) and isinstance(entry, (ast.Call, ast.Name)):
                self.bare |= {node.id for node in ast.walk(entry) if isinstance(node, ast.Name)}
        self._find_sources()
        for node in self.nodes:
            if isinstance(node, ast.Attribute) and node.attr not in METHODS and node.attr not in GENERATOR:
                self.objects |= self._from(node.value)
            elif isinstance(node, ast.withitem):
                self.objects |= self._from(node.context_expr)
        for node in self.nodes:
            check = isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args
            if check and check[0].arg in self.objects:  # the name that check() gives the entry point
                self.objects |= {entry_point, entry_point.split(".")[-1]}
        self.classes = set(filter(None, map(self._used_as_class, self.nodes)))

    def is_class(self, name):
        """Whether the tests take a name for a class, or for a function whose results they use as objects."""
        return name in self.classes or name in self.objects or name.lstrip("_")[:1].isupper()

    @staticmethod
    def _used_as_class(node):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
            kind = node.args[1]
            if node.func.id in ("isinstance", "issubclass") and isinstance(kind, ast.Name):
                return kind.id
        if isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name):
            return node.type.id
        return None

    def _find_sources(self):
        assigned = []
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                assigned += [(target, node.value) for target in node.targets]
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                assigned.append((node.target, node.value))
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
                assigned.append((node.target, node.iter))
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                assigned.append((node.optional_vars, node.context_expr))
        pairs = [
            (name.id, value)
            for target, value in assigned
            for name in ast.walk(target)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        ]
        for _ in range(4):  # through as many variables
            for name, value in pairs:
                self._sources[name] |= self._from(value)

    def _from(self, node):
        """The names of the calls and attributes that an expression's value may come from."""
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                return {node.func.id}
            if isinstance(node.func, ast.Attribute):
                return {node.func.attr}
            return self._from(node.func)
        if isinstance(node, ast.Name):
            return self._sources.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {node.attr} | self._from(node.value)
        if isinstance(node, (ast.Subscript, ast.Await, ast.Starred)):
            return self._from(node.value)
        if isinstance(node, ast.BinOp):
            return self._from(node.left) | self._from(node.right)
        return set()
