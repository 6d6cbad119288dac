"""Checks of all keys of a config, and of those of RAFT, GRPO and distillation."""

import inspect
from collections.abc import Callable, Iterator

from omegaconf import DictConfig, OmegaConf

from rocm_ext.base import registry
from rocm_ext.base.errors import refuse
from rocm_ext.base.importing import COMPONENT, import_component
from rocm_ext.base.kinds import check
from rocm_ext.base.log import log
from rocm_ext.config import algorithms
from rocm_ext.config.algorithms import ALGORITHMS, updates_of_step
from rocm_ext.config.checks.training import UNJUDGED, check_values
from rocm_ext.config.chosen_model import BASE, is_server
from rocm_ext.config.components import judges_held_out
from rocm_ext.config.keys import kind_of, kinds
from rocm_ext.config.layers import defaults, trainer_config

_UNREAD: tuple[tuple[str, Callable[[DictConfig], bool], tuple[str, ...]], ...] = (  # when the run ignores some keys
    ("without an environment", lambda cfg: cfg.environment is None, ("max_turns", "max_environment_tokens")),
    ("with an environment, which has a process for each conversation", lambda cfg: cfg.environment is not None,
     ("verify_workers",)),
    ("with objective=raft", lambda cfg: cfg.get("objective") == "raft", ("clip_high",)),
    ("with refill=False", lambda cfg: cfg.get("refill") is False, ("max_refills",)),
    ("unless truncated=penalize", lambda cfg: cfg.get("truncated", "penalize") != "penalize",
     ("truncation_penalty", "truncation_margin")),
    ("with loss=reverse_kl", lambda cfg: cfg.get("loss") == "reverse_kl", ("beta",)),
    ("with given_answers", lambda cfg: cfg.get("given_answers") is not None, ("samples_per_prompt", "min_entropy")),
    ("with mismatch=none", lambda cfg: cfg.get("mismatch") == "none", ("mismatch_level",)),
    ("with kl_coef=0", lambda cfg: cfg.get("kl_coef") == 0, ("kl_in",)),
    ("with lr_decay=1", lambda cfg: cfg.get("lr_decay") == 1, ("lr_floor",)),
)  # fmt: skip


def check_config(cfg: DictConfig, family: str) -> None:
    """Raise a UserError for values that a recipe would refuse before it reads a file.

    ``family`` is the recipe of this library that runs it or that its recipe extends. If empty, nothing is checked.
    """
    if family in registry.SAMPLED:
        check_values(OmegaConf.create(trainer_config(cfg)))
        check_sampled_values(cfg, family)
    elif family:
        check_values(cfg)


def check_sampled_values(cfg: DictConfig, family: str) -> None:
    """Raise a UserError for wrong values of the keys of RAFT, GRPO or distillation, whichever recipe ``family`` is.

    SFT's keys and the arguments of ``Sampling`` are checked elsewhere.
    """
    check(cfg, kinds(family))
    refuse(_shared_faults(cfg, family))
    refuse(_FAULTS[family](cfg))


def _shared_faults(cfg: DictConfig, recipe: str) -> Iterator[str]:
    """Yield faults in keys that all three recipes have, and log the keys that are set but not read."""
    usual = defaults(recipe)
    for when, unread, keys in _UNREAD:
        if unread(cfg):
            changed = [f"{key}={cfg[key]}" for key in keys if cfg[key] != usual[key]]
            if changed:
                log.info("not read %s: %s", when, ", ".join(changed))
    if cfg.environment is not None:
        if cfg.verifier is not None:
            yield "verifier and environment are both set, and both judge answers; set one of them to null"
        if cfg.stop_strings:
            strings = list(cfg.stop_strings)
            yield f"stop_strings is {strings}; with an environment a message ends with its stop token; set []"
        if cfg.get("max_staleness"):
            yield "max_staleness does not work with an environment; set max_staleness=0"
        if cfg.engine.get("endpoint", "completions") == "chat":
            yield "endpoint chat would render a conversation's turns anew; set engine.endpoint=completions"
    yield from _repetition_faults(cfg, "eval_samples", 0)
    if not isinstance(cfg.optimizer, DictConfig):
        yield f"optimizer is {cfg.optimizer!r}; expected a _component_ with its lr"
    if not cfg.optimizer.get("lr"):
        yield f"optimizer.lr is {cfg.optimizer.get('lr')!r}; expected a number above 0"


def _repetition_faults(cfg: DictConfig, key: str, most: int) -> Iterator[str]:
    if cfg.temperature == 0 and cfg[key] > most:
        yield f"temperature 0 gives the same answer {cfg[key]} times; set {key}={most}, or a temperature above 0"


def _raft_faults(cfg: DictConfig) -> Iterator[str]:
    if cfg.optimizer_state == "run" and cfg.start_from == "base":
        yield (
            "optimizer_state=run keeps the moments of other weights: start_from=base trains the run's initial adapter "
            "again in every cycle; set optimizer_state=cycle, or start_from=previous"
        )
    yield from _repetition_faults(cfg, "samples_per_prompt", 1)


def _grpo_faults(cfg: DictConfig) -> Iterator[str]:
    check(cfg, {"temperature": kind_of(["0 < number, because a group needs different answers"])})
    yield from _loss_faults(cfg)
    group = algorithms.filled(cfg)
    if cfg.samples_per_prompt < 2 and group.center in ("mean", "leave_one_out"):
        yield (
            f"samples_per_prompt is {cfg.samples_per_prompt}; expected at least 2: an advantage compares an answer "
            "with the others of its group, so one answer alone has none"
        )
    # the others give flat groups no advantage
    scales = {"none": ["none"], "batch": ["batch", "none"]}
    if group.center in scales and group.scale not in scales[group.center]:
        yield (
            f"center={group.center} gives advantages to groups of equal rewards, which scale={group.scale} would "
            "divide by 0; set scale=none, or center to mean or leave_one_out"
        )
    yield from _update_faults(cfg)
    if cfg.truncation_margin > cfg.max_new_tokens:
        yield f"truncation_margin is {cfg.truncation_margin}; expected at most max_new_tokens, {cfg.max_new_tokens}"
    yield from _sampling_faults(cfg, "GRPO", "filter answers with raft_rocm")
    if cfg.max_staleness:
        yield from _staleness_faults(cfg)
    if cfg.router_replay and cfg.compile not in (False, "auto"):
        yield "router_replay does not work in compiled layers; set compile=False, or router_replay=False"
    yield from _record_faults(cfg)


def _distil_faults(cfg: DictConfig) -> Iterator[str]:
    yield from _record_faults(cfg)
    yield from _update_faults(cfg)
    unread = ("teacher_model", "teacher_api_key_env")
    if is_server(cfg.teacher):
        unread = ("teacher_adapter", "teacher_quantize_base")
        if cfg.loss != "reverse_kl" or cfg.temperature not in (0, 1):
            yield (
                "teacher is a server, which gives log-probs of tokens at temperature 1: set loss=reverse_kl and "
                f"temperature=1, found {cfg.loss} and {cfg.temperature:g}"
            )
    for key in unread:
        if cfg[key]:
            usual = {"teacher_quantize_base": False}.get(key, "null")
            yield f"{key} is {cfg[key]!r}, which teacher {cfg.teacher} does not read; set {key}={usual}"
    if cfg.teacher == BASE and cfg.teacher_quantize_base:
        yield "teacher is base, whose weights are the model's: set model.quantize_base instead"
    begins_elsewhere = cfg.teacher_adapter or cfg.checkpointer.get("adapter_checkpoint")
    if cfg.teacher == BASE and not begins_elsewhere:
        yield (
            "teacher is base, and the model in training begins as it: there is nothing to learn; set teacher_adapter, "
            "or checkpointer.adapter_checkpoint to the adapter that forgot something"
        )
    if cfg.loss == "reverse_kl":
        yield from _sampling_faults(cfg, "loss=reverse_kl", "loss=jsd")
        of_others = cfg.given_answers is not None or cfg.temperature == 0
        if of_others or updates_of_step(cfg) > 1:
            yield (
                "loss=reverse_kl estimates a divergence from answers that the present model drew; with given_answers, "
                "temperature=0 or several updates in a step (updates_per_step, groups_per_update) they are not: set "
                "loss=jsd"
            )
    if not judges_held_out(cfg):
        yield UNJUDGED
    yield from _repetition_faults(cfg, "samples_per_prompt", 1)


def _record_faults(cfg: DictConfig) -> Iterator[str]:
    if cfg.keep_samples != "all" and cfg.keep_samples < cfg.save_every_n_steps:
        yield (
            f"keep_samples is {cfg.keep_samples}, less than save_every_n_steps, {cfg.save_every_n_steps}: a resumed "
            "run trains again on the samples since its last checkpoint; raise keep_samples or lower save_every_n_steps"
        )


def _update_faults(cfg: DictConfig) -> Iterator[str]:
    if (cfg.groups_per_update or 1) > cfg.prompts_per_step:
        yield (
            f"groups_per_update is {cfg.groups_per_update}, more than the {cfg.prompts_per_step} groups of a step "
            "(prompts_per_step); null takes all of them"
        )


def _sampling_faults(cfg: DictConfig, what: str, cure: str) -> Iterator[str]:
    for key in ("top_k", "top_p", "min_p"):
        if cfg[key] is not None:
            yield (
                f"{key} is {cfg[key]!r}, and {what} samples from the full distribution: log-probs that ignore {key} "
                f"bias the gradient; set {key}=null, or {cure}"
            )


def _loss_faults(cfg: DictConfig) -> Iterator[str]:
    if isinstance(cfg.loss, DictConfig) and COMPONENT in cfg.loss:
        return
    if cfg.loss not in list(ALGORITHMS):
        yield f"loss is {cfg.loss!r}; expected {', '.join(ALGORITHMS)}, or a _component_"
    with_ratio = [name for name, algorithm in ALGORITHMS.items() if algorithm.ratio != "none"]
    updates = updates_of_step(cfg)
    if cfg.loss not in with_ratio and updates > 1:
        yield (
            f"loss {cfg.loss} has no ratio, so it takes one update per step, and updates_per_step and "
            f"groups_per_update give up to {updates}; set them to 1 and null, or loss to "
            f"{', '.join(with_ratio[:-1])} or {with_ratio[-1]}"
        )


def _staleness_faults(cfg: DictConfig) -> Iterator[str]:
    engine = import_component(cfg.engine[COMPONENT])
    if inspect.isclass(engine) and not hasattr(engine, "check_adapter"):
        yield (
            f"max_staleness={cfg.max_staleness} samples while earlier steps train, and {engine.__name__} samples with "
            "the weights in training; set max_staleness=0, or sample on servers with engine._component_="
            "rocm_ext.sampling.OpenAIEngine"
        )
    clipped = updates_of_step(cfg) > 1 and cfg.old_logprobs == "sampler"
    if cfg.mismatch == "none" and not clipped and not isinstance(cfg.loss, DictConfig):
        yield (
            f"max_staleness={cfg.max_staleness} trains on answers of earlier adapters, and with mismatch=none nothing "
            "weighs them by how likely the present one gives them; set mismatch=truncate or mask, or max_staleness=0"
        )


_FAULTS: dict[str, Callable[[DictConfig], Iterator[str]]] = {
    registry.RAFT: _raft_faults,
    registry.GRPO: _grpo_faults,
    registry.DISTIL: _distil_faults,
}
