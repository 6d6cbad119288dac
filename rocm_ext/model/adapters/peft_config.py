"""``adapter_config.json`` of an adapter in PEFT's format: what this library computes, and what it refuses."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from rocm_ext.base.errors import UserError
from rocm_ext.model.adapters import peft_experts
from rocm_ext.model.lora import Dora, adapters, rank_and_alpha

ADAPTER_CONFIG = "adapter_config.json"

# Keys that do not change what an adapter computes once its weights are known, or that `read` looks at.
_FREE = frozenset(
    """
    r lora_alpha use_rslora use_dora bias init_lora_weights base_model_name_or_path peft_type task_type auto_mapping
    revision peft_version inference_mode lora_dropout target_modules exclude_modules layers_to_transform layers_pattern
    target_parameters
    megatron_config megatron_core loftq_config eva_config corda_config qalora_group_size runtime_config
    """.split()  # noqa: SIM905
)
# Other ways to initialise an adapter (PiSSA, OLoRA, CorDA, LoftQ) change the base model, too.
_KEEP_BASE = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class PeftConfig:
    """The part of an ``adapter_config.json`` that decides what the adapter computes.

    Attributes:
        rank, alpha: LoRA's r and alpha.
        rslora: whether the factor is alpha / sqrt(r) (arXiv:2312.03732) instead of alpha / r.
        dora: whether the adapter has DoRA's magnitudes.
        base_model: name or folder of the base model; empty if the file has none.
        parameters: PEFT's ``target_parameters``, fused weights of experts.
        version: of PEFT; empty if the file has none.
    """

    rank: int
    alpha: float
    rslora: bool
    dora: bool
    base_model: str
    parameters: tuple[str, ...] = ()
    version: str = ""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Read a folder's ``adapter_config.json``.

        Raises:
            UserError: it is missing or damaged, or a setting changes the adapter's function in a way that this library
                does not compute; the message names the setting.
        """
        path = folder / ADAPTER_CONFIG
        try:
            config = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise UserError(f"no adapter in {folder}: {ADAPTER_CONFIG} is missing") from error
        except (ValueError, OSError, RecursionError) as error:
            raise UserError(f"cannot read the adapter in {folder}: {ADAPTER_CONFIG}: {error}") from error
        if not isinstance(config, dict):
            raise UserError(f"cannot read the adapter in {folder}: {ADAPTER_CONFIG} must hold a JSON object")
        if foreign := _not_computed(config):
            raise _unknown(folder, foreign)
        rank, alpha = config.get("r"), config.get("lora_alpha")
        whole = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool) and math.isfinite(alpha)
        if not (whole and number):
            raise UserError(f"{path} has r={rank!r}, lora_alpha={alpha!r}; expected a rank and a number")
        base = config.get("base_model_name_or_path")
        return cls(
            rank=rank,  # type: ignore[arg-type]
            alpha=alpha,  # type: ignore[arg-type]
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            base_model=base if isinstance(base, str) else "",
            parameters=_names(path, config.get("target_parameters")),
            version=str(config.get("peft_version") or ""),
        )

    def check(self, folder: Path, decoder: Any) -> None:
        """Check that ``decoder`` computes the same function of the adapter's weights.

        Args:
            folder: source of this config, for the message.
            decoder: model with adapters.

        Raises:
            UserError: rank, alpha, rsLoRA, DoRA or the adapted experts differ; the message says how to set the run's
                config.
        """
        _, layer = next(adapters(decoder))
        rank, alpha = rank_and_alpha(layer)
        rows = [
            ("r", self.rank, "model.lora_rank", rank),
            ("lora_alpha", self.alpha, "model.lora_alpha", alpha),
            ("use_rslora", self.rslora, "use_rslora", layer.rslora),
            ("use_dora", self.dora, "model.use_dora", isinstance(layer, Dora)),
        ]
        if wrong := [row for row in rows if row[1] != row[3]]:
            raise UserError(
                f"adapter {folder} has {', '.join(f'{name}={theirs}' for name, theirs, *_ in wrong)}; "
                f"the config has {', '.join(f'{key}={ours}' for *_, key, ours in wrong)}. "
                f"Set {' '.join(f'{key}={theirs}' for _, theirs, key, _ in wrong)}"
            )
        if self.parameters and not decoder.published_modules:  # native models have no experts
            raise _unknown(folder, [f"target_parameters={list(self.parameters)}"])
        found = peft_experts.matching(decoder, self.parameters)
        if found != peft_experts.expert_loras(decoder).keys() or (self.parameters and not found):
            ours = peft_experts.target_parameters(decoder)
            raise UserError(
                f"adapter {folder} has target_parameters={list(self.parameters)}; the config has {ours or None}. "
                f"Set model.target_parameters={list(self.parameters) or None}"
            )

    def other_base(self, folder: Path, base: str) -> str | None:
        """Compare the base model that the adapter names with the run's.

        Hub names and folders are equal if their last parts are: ``Qwen/Qwen2.5-7B`` and ``models/Qwen2.5-7B``.

        Args:
            folder: source of this config, for the warning.
            base: hub name or folder of the run's base model.

        Returns:
            A warning; None if the names agree, or the adapter names no base model.
        """
        if not self.base_model or _last(self.base_model) == _last(base):
            return None
        return (
            f"adapter {folder} was trained on {self.base_model}, this run's base model is {base}; "
            "if these are different models, its answers are wrong"
        )


def _names(path: Path, found: Any) -> tuple[str, ...]:
    if found is not None and not (isinstance(found, list) and all(isinstance(name, str) for name in found)):
        raise UserError(f"{path} has target_parameters={found!r}; expected a list of names")
    return tuple(found or ())


def _unknown(folder: Path, settings: list[str]) -> UserError:
    return UserError(
        f"adapter {folder} has {', '.join(settings)}, which this library does not compute; merge it into the "
        "base model with PEFT (merge_and_unload) and start from the merged model"
    )


def _not_computed(config: Mapping[str, Any]) -> list[str]:
    foreign = [f"{key}={value!r}" for key, value in config.items() if key not in _FREE and value]
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        foreign.insert(0, f"peft_type={kind!r}")
    if (bias := config.get("bias", "none")) != "none":
        foreign.append(f"bias={bias!r}")
    if (init := config.get("init_lora_weights", True)) not in _KEEP_BASE:
        foreign.append(f"init_lora_weights={init!r}")
    return [text if len(text) <= 80 else text[:77] + "..." for text in foreign]


def _last(name: str) -> str:
    parts = [part for part in PurePath(name.replace("\\", "/")).parts if part not in ("/", ".", "..")]
    cached = [part for part in parts if part.startswith("models--")]  # the hub's cache: models--OWNER--NAME/snapshots/…
    return (cached[-1].rsplit("--", 1)[-1] if cached else parts[-1] if parts else "").lower()
