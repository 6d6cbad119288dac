"""Import torchtune beside newer torchao, and only the parts of both that a program uses.

Importing torchtune imports all its models and data sets, all of torchao and `datasets`: two thirds of the time that a
command takes. In this library's programs, packages of both run their ``__init__`` when an attribute is first read.
"""

from __future__ import annotations

import importlib
import sys
import threading
from functools import partial
from importlib.abc import Loader
from importlib.machinery import PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from rocm_ext.base.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec


def bridge() -> None:
    """Let torchtune import names that torchao has moved or removed. Programs without torchtune see no difference."""
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def defer() -> None:
    """Like :func:`bridge`, and let packages of torchtune and torchao wait until an attribute of theirs is read."""
    bridge()
    _finder.deferring = True


# Their __init__ imports what runs seldom use: data sets, all models, quantisers. While they wait, each module of
# torchtune and torchao can be imported, also as the first.
_DEFERRED = {
    "torchtune",
    "torchtune.config",
    "torchtune.data",
    "torchtune.datasets",
    "torchtune.generation",
    "torchtune.models",
    "torchtune.models.qwen2",
    "torchtune.rlhf",
    "torchtune.training",
    "torchtune.training.checkpointing",
    "torchtune.utils",
    "torchao",
    "torchao.dtypes",
    "torchao.quantization",
    "torchao.quantization.quantize_",
    "torchao.quantization.quantize_.workflows",
}
_NF4, _NF4_SINCE_0_18 = (
    "torchao.dtypes.nf4tensor",
    "torchao.quantization.quantize_.workflows.nf4.nf4_tensor",
)


class _Finder:
    """An entry of ``sys.meta_path`` for torchtune and torchao.

    Attributes:
        deferring: whether the packages in ``_DEFERRED`` run their ``__init__`` when an attribute is first read.
    """

    deferring = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in ("torchtune", "torchao"):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            moved = name == _NF4 and "torchtune" in sys.modules  # pytorch/ao#4256
            return spec_from_loader(name, _Moved()) if moved else None
        if name == "torchtune.training.quantization":
            _before(spec.loader, _add_names)
        elif self.deferring and name in _DEFERRED:
            spec.loader = _Deferring(spec.loader)
        return spec


_finder = _Finder()


class _Moved(Loader):
    """Puts torchao's NF4 module under its former name."""

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[_NF4] = importlib.import_module(_NF4_SINCE_0_18)


class _Deferring(Loader):
    """Makes a package of :class:`_Deferred`, which ``loader`` executes later."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_execute=self._loader.exec_module, _lock=threading.RLock())


class _Deferred(ModuleType):
    """A package that runs its ``__init__`` when an attribute is first read."""

    _execute: Callable[[ModuleType], None] | None
    _lock: threading.RLock

    def __getattr__(self, name: str) -> Any:
        # imports look for the others
        if not (name.startswith("__") and name not in ("__all__", "__version__")):
            with self._lock:
                execute = self._execute
                self._execute = None  # the __init__ itself reads attributes that are missing
                try:
                    if execute is not None:
                        execute(self)
                except BaseException:
                    self._execute = execute
                    raise
        return self.__getattribute__(name)


def _before(loader: Any, action: Callable[[], None]) -> None:
    """Let ``loader`` call ``action`` before it executes a module."""
    execute = loader.exec_module

    # not in find_spec, which holds the lock of all imports
    def act_and_execute(module: ModuleType) -> None:
        action()
        execute(module)

    loader.exec_module = act_and_execute


def _add_names() -> None:
    """Add the names that torchtune's quantiser imports; torchtune's recipe ``quantize`` alone calls them."""
    import torchao.dtypes
    import torchao.quantization

    for module, gone in (
        (torchao.quantization, "int4_weight_only"),  # in 0.16 (pytorch/ao#3308)
        (torchao.quantization, "int8_dynamic_activation_int4_weight"),
        (torchao.dtypes, "TensorCoreTiledLayout"),  # in 0.18 (pytorch/ao#4153)
    ):
        if not hasattr(module, gone):
            setattr(module, gone, partial(_refuse, gone))


def _refuse(gone: str, *_: object, **__: object) -> NoReturn:
    raise UserError(
        f"torchtune's quantizer needs torchao's {gone}, which is gone: pip install \"torchao<0.16\""
    )
