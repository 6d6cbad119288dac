"""Import functions and classes by dotted names, as in ``_component_``."""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import PathFinder
from typing import Any

from rocm_ext.base.errors import UserError, nearest, one_line

COMPONENT = "_component_"
# a component's configuration: its dotted name under COMPONENT, and its arguments
Component = Mapping[str, Any]


def import_component(path: Any) -> Callable:
    """Import a function or class; its module may also be in the current folder.

    Args:
        path: a dotted name such as ``torch.optim.AdamW`` or ``my_module.MyClass``.

    Raises:
        UserError: the import fails.
    """
    if not isinstance(path, str) or "." not in path.strip("."):
        raise UserError(
            f"{path!r} cannot be imported: expected module.Class, such as torch.optim.AdamW"
        )
    here = os.getcwd()
    # only if needed: the current folder may be a downloaded one, and libraries try out imports
    if here not in sys.path and not _installed(path.partition(".")[0]):
        sys.path.append(here)
        importlib.invalidate_caches()
    component, names = _import_module(path, here)
    for name in names:
        if not hasattr(component, name):
            public = [
                key
                for key, value in vars(component).items()
                if callable(value) and not key.startswith("_")
            ]
            where = getattr(component, "__name__", path)
            raise UserError(
                f"{path!r} cannot be imported: {where} has no {name!r}{nearest(name, public)}"
            )
        component = getattr(component, name)
    if not callable(component):
        raise UserError(f"{path!r} is a {type(component).__name__}; expected a function or class")
    return component


def _installed(package: str) -> bool:
    if package in sys.modules:
        return True
    spec = PathFinder.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder without a package has no origin


def _import_module(path: str, here: str) -> tuple[Any, list[str]]:
    """The module in a dotted path, and the remaining names, of attributes."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:end])
        try:
            return importlib.import_module(module), parts[end:]
        except Exception as error:  # modules may raise anything
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            # the error comes from inside the module
            if not missing or not f"{module}.".startswith(f"{missing}."):
                raise UserError(
                    f"{path!r} cannot be imported: importing {module}: {one_line(error)}"
                ) from error
    raise UserError(
        f"{path!r} cannot be imported: there is no module {parts[0]!r}, neither installed nor in {here}"
    )
