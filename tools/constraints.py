"""Print constraints.txt from this environment; see ``make constraints``."""

import platform
from importlib.metadata import requires, version

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("test", "docs", "dist")


def versions(*extras: str) -> dict[str, str]:
    """Return the versions of all that this library with ``extras`` needs here, but torch and what only torch needs.

    Raises:
        importlib.metadata.PackageNotFoundError: one of them is not installed.
    """
    pins, seen = dict[str, str](), set[tuple[str, str]]()
    waiting = [Requirement(f"torchtune-rocm[{','.join(extras)}]")]
    while waiting:
        package = waiting.pop()
        name = canonicalize_name(package.name)
        if name == "torch":
            continue
        pins[name] = version(name)
        for extra in {"", *package.extras} - {extra for known, extra in seen if known == name}:
            seen.add((name, extra))
            needed = map(Requirement, requires(name) or ())
            waiting += [
                each
                for each in needed
                if each.marker is None or each.marker.evaluate({"extra": extra})
            ]
    del pins["torchtune-rocm"]
    return dict(sorted(pins.items()))


if __name__ == "__main__":
    major, minor, _ = platform.python_version_tuple()
    print(
        f"# Python {major}.{minor}\n# Made by `make constraints`: versions with which the tests have passed."
    )
    for name, exact in versions(*EXTRAS).items():
        print(f"{name}=={exact}")
