"""Texts from the environment, such as ``${oc.env:KEY}``: they may be secrets, so a config keeps the reference.

Files of a run (``config.yaml``, ``state.pt``, logged metrics) then hold the reference as well.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers.oc import env

from rocm_ext.base.errors import UserError
from rocm_ext.base.structure import flatten
from rocm_ext.base.types import Config

_NO_TEXT = "{name} is computed from a variable of the environment; refer to one itself, as in ${{oc.env:NAME}}"
_renamed = "replace" in signature(OmegaConf.register_resolver).parameters  # from OmegaConf 2.4 on
_register: Any = OmegaConf.register_resolver if _renamed else OmegaConf.register_new_resolver


@contextmanager
def kept() -> Iterator[None]:
    """Make ``${oc.env:KEY}`` resolve to itself inside the context. A metric logger resolves the config it gets."""
    _register("oc.env", _text, replace=True)
    try:
        yield
    finally:
        _register("oc.env", env, replace=True)


def _text(key: str, *default: Any) -> str:
    parts = [key]
    for value in default:
        parts.append("null" if value is None else json.dumps(str(value), ensure_ascii=False))
    return f"${{oc.env:{','.join(parts)}}}"


def resolve(cfg: DictConfig, plain: Collection[str]) -> None:
    """Resolve ``cfg`` in place, except texts from the environment. Numbers, switches and null are no secrets.

    ``plain`` are keys whose texts are no secrets. Raises a UserError if a value is computed from the environment, so no
    reference can stand for it.
    """
    values = cfg.copy()
    OmegaConf.resolve(values)
    with kept():
        OmegaConf.resolve(cfg)
    _keep_texts(cfg, values, plain, "")


def _keep_texts(cfg: Any, values: Any, plain: Collection[str], where: str) -> None:
    for key in range(len(cfg)) if isinstance(cfg, ListConfig) else list(cfg):
        name = f"{where}{key}"
        value = values[key]
        if OmegaConf.is_interpolation(cfg, key):
            is_plain_text = isinstance(value, str) and key in plain
            if value is None or isinstance(value, bool | int | float) or is_plain_text:
                cfg[key] = value
            elif cfg[key] != value:
                raise UserError(_NO_TEXT.format(name=name))
        elif isinstance(cfg[key], DictConfig | ListConfig):
            _keep_texts(cfg[key], value, plain, f"{name}.")
        elif isinstance(value, str) and cfg[key] != value:
            raise UserError(_NO_TEXT.format(name=name))


def digests(cfg: DictConfig) -> dict[str, str]:
    """Hash the texts from the environment, by dotted key, so that a resumed run can compare them.

    The hash is slow to compute, because a secret may be a short word. It has 64 hex digits.
    """
    hashes = {}
    values = _flat(cfg, resolve=True)
    for key, text in _flat(cfg, resolve=False).items():
        if text != values[key]:
            hashes[key] = _digest(key, values[key])
    return hashes


def begun_as(cfg: DictConfig, begun: Config, known: Mapping[str, str]) -> dict[str, object]:
    """Flatten a recorded config to compare it with ``cfg``, the config of this start.

    ``known`` are the :func:`digests` of ``begun``. A text that the environment still has stands as ``cfg`` writes it.
    """
    recorded = flatten(begun)
    texts = _flat(cfg, resolve=False)
    values = _flat(cfg, resolve=True)
    for key in texts.keys() & known.keys():
        same = known[key] == _digest(key, values[key])
        recorded[key] = texts[key] if same else "another value"
    return recorded


def _flat(cfg: DictConfig, resolve: bool) -> dict[str, object]:
    return flatten(OmegaConf.to_container(cfg, resolve=resolve))


def _digest(key: str, value: Any) -> str:
    content = json.dumps(value).encode()
    costs = {"n": 2**14, "r": 8, "p": 1}
    return hashlib.scrypt(content, salt=key.encode(), dklen=32, **costs).hex()
