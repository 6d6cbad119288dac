"""Cases that are calls: arguments, and the value that the answer must return. They are data and run no code of tests.

This runs in the judge's sandbox with the standard library alone.
"""

import math


class Calls:
    """The cases of a row.

    Args:
        task: what the verifier sent.

    Attributes:
        required, own, wanted, library: the names that calling needs, as of :class:`_units.Tests`.
    """

    def __init__(self, task):
        self.cases, self.entry, self.tolerance = task["cases"], task["entry_point"], task["tolerance"]
        self.lead = self.entry.split(".")[0].split("(")[0]
        self.required, self.library = set(), {}
        self.own = self.wanted = {self.lead, "Solution"}

    def take(self, namespace, score):
        """Make the calls; each is a unit."""
        for args, expected, unwrap in self.cases:
            text = f"{self.entry}({', '.join(map(repr, args))[:150]})"
            score.unit(lambda a=args, e=expected, u=unwrap: self._call(namespace, a, e, u), 0, text)

    def _call(self, namespace, args, expected, unwrap):
        entry = self.entry
        if self.lead == entry and entry not in namespace and "Solution" in namespace:
            entry = f"Solution().{entry}"  # as LeetCode has it
        if self.lead not in namespace and entry == self.entry:
            raise NameError(f"the code defines no {self.lead}")
        found = eval(entry, namespace)(*args)
        alone = unwrap and isinstance(expected, list) and len(expected) == 1
        if not (self.equal(found, expected) or (alone and self.equal(found, expected[0]))):
            raise AssertionError(f"returned {found!r:.150}")

    def equal(self, found, expected):
        """Whether a value is the expected one; tuples count as lists, and the keys of JSON's dicts are text."""
        if isinstance(expected, (list, tuple)):
            return (isinstance(found, (list, tuple)) and len(found) == len(expected)
                    and all(map(self.equal, found, expected)))  # fmt: skip
        if isinstance(expected, dict):
            if not isinstance(found, dict):
                return False
            found = {str(key): value for key, value in found.items()}
            return found.keys() == expected.keys() and all(self.equal(found[k], expected[k]) for k in expected)
        if type(found) is float and type(expected) in (int, float) and self.tolerance is not None:
            near = abs(found - expected) <= self.tolerance * max(1.0, abs(expected))
            return found == expected or (math.isfinite(found) and near)
        return bool(found == expected)
