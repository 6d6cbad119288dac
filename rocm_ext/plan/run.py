"""Plan one config on one machine; ``rocm-ext plan`` prints the result.

A step of a recipe that samples does so in this process or on servers.
"""

import inspect
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torchtune.modules import TransformerDecoder

from rocm_ext import config
from rocm_ext.base import registry
from rocm_ext.base.errors import UserError
from rocm_ext.base.importing import COMPONENT, import_component
from rocm_ext.base.types import Json
from rocm_ext.config.algorithms import updates_of_pass, updates_of_step
from rocm_ext.config.chosen_model import BASE, is_server, teacher_config
from rocm_ext.data.batches import micro_batch_budget
from rocm_ext.data.rows import SIDE
from rocm_ext.data.tokenizer import check_max_seq_len
from rocm_ext.losses import CrossEntropy, objective_of
from rocm_ext.losses.objective import REFERENCE
from rocm_ext.machine.detect import Machine
from rocm_ext.machine.profile import check_locked
from rocm_ext.model import compiling
from rocm_ext.model.adapters import peft_files
from rocm_ext.model.attention import choose_attention, shares_beginnings
from rocm_ext.model.build import build_model, check_quantized
from rocm_ext.model.download import use_shape
from rocm_ext.plan import workload
from rocm_ext.plan.costs import Kernels
from rocm_ext.plan.memory import checkpointed_layers, held_bytes
from rocm_ext.plan.planner import Choice, SamplingPlan, SamplingPlanner, TrainingPlanner
from rocm_ext.plan.speeds import Target
from rocm_ext.plan.workload import Known, Questions, Workload


@dataclass(frozen=True)
class RolloutPlan:
    """The plan of a step, in RAFT a cycle; GRPO's without the groups whose rewards are equal.

    Times are NaN where the number of prompts or rows is unknown.

    Attributes:
        asked: prompts and answers.
        sampling: memory and speed of sampling, in this process or on one server.
        servers: number of servers. 0 if this process samples.
        beside: whether servers sample the next step's answers during training.
        peak: bytes while this process samples; 0 with servers.
        keeps: choices of bytes that the sampler would keep during training, largest first. Empty if it keeps none.
        steps: steps of the run.
        evaluations: number of evaluations in the run.
        sampling_seconds: time to sample a step's answers.
        evaluation_seconds: time of one evaluation.
        scoring_seconds: time of the passes that compute log-probs before the updates.
        updates_seconds: time of a step's updates, as configured.
    """

    asked: Questions
    sampling: SamplingPlan
    servers: int
    beside: bool
    peak: int
    keeps: tuple[int, ...]
    steps: int
    evaluations: int
    sampling_seconds: float
    evaluation_seconds: float
    scoring_seconds: float
    updates_seconds: float

    @property
    def training_seconds(self) -> float:
        """Seconds of a step's training."""
        return self.scoring_seconds + self.updates_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of a step without evaluation. Verification runs at the same time as sampling."""
        if self.beside:
            return max(self.sampling_seconds, self.training_seconds)
        return self.sampling_seconds + self.training_seconds

    @property
    def run_seconds(self) -> float:
        """Seconds of all steps and evaluations."""
        seconds = self.steps * self.step_seconds + self.evaluations * self.evaluation_seconds
        if self.beside:  # nothing trains while the first answers are sampled
            seconds += min(self.sampling_seconds, self.training_seconds)
        return seconds

    @property
    def waiting(self) -> tuple[str, float] | None:
        """The side that waits for the other, and its seconds per step; None unless both work at once."""
        if not self.beside:
            return None
        ahead = self.sampling_seconds - self.training_seconds
        return ("the training GPUs", ahead) if ahead > 0 else ("the servers", -ahead)

    def at(self, training: float, sampling: float) -> "RolloutPlan":
        """Return the plan for these shares of the computed speeds of training and sampling."""
        return replace(
            self,
            sampling_seconds=self.sampling_seconds / sampling,
            evaluation_seconds=self.evaluation_seconds / sampling,
            scoring_seconds=self.scoring_seconds / training,
            updates_seconds=self.updates_seconds / training,
        )

    def kept(self, training_peak: int, budget: int) -> int:
        """Return the bytes that the sampler keeps during training: weights and cache, or only weights, as they fit."""
        for size in self.keeps:
            if training_peak + size <= budget:
                return size
        return 0

    def content(self) -> Json:
        """Return the plan for JSON."""
        content = {**vars(self), "asked": vars(self.asked), "sampling": vars(self.sampling)}
        content["rounds"] = content.pop("steps")
        content["round_seconds"] = self.step_seconds
        content["run_seconds"] = self.run_seconds
        content["waiting"] = self.waiting
        return content


def _rollout_plan(
    cfg: DictConfig,
    family: str,
    asked: Questions,
    sampler: SamplingPlanner,
    training: TrainingPlanner,
    now: Choice,
    budget: int,
    servers: int,
    updates_seconds: float,
) -> RolloutPlan:
    """Plan a step, in RAFT a cycle.

    A server counts as one GPU of the target's kind, as fast as this library's sampler. ``sampler`` plans one server;
    without servers it plans this process. ``now`` is the configured update.
    """
    by_step = family in registry.BY_STEP
    keeps = _keeps(cfg, family) and not servers
    if servers:
        sampling = sampler.plan(budget - now.memory.weights)
        slots = min(sampling.slots, training.ranks * _concurrency(cfg, sampling.slots))
        peak = 0
    else:
        reserve = now.peak - now.memory.weights if keeps else 0
        sampling = sampler.plan(budget - now.memory.fixed, reserve)
        slots = sampling.slots
        peak = now.memory.fixed + sampling.peak
    if by_step:
        steps, every = cfg.steps, cfg.eval_every_n_steps
        prompts = asked.prompts or cfg.prompts_per_step
    else:
        steps, every = cfg.cycles, cfg.eval_every_n_cycles
        prompts = asked.prompts
    if cfg.get("given_answers"):
        prompts = 0
    workers = servers or training.ranks

    def seconds(prompts: int | None, samples: int) -> float:
        """Seconds to sample answers to all prompts; NaN if their number is unknown."""
        if prompts is None:
            return math.nan
        return sampler.seconds(prompts / workers, samples, slots) if prompts else 0.0

    return RolloutPlan(
        asked=asked,
        sampling=sampling,
        servers=servers,
        beside=bool(by_step and servers and cfg.get("max_staleness")),
        peak=peak,
        keeps=(sampling.layout + sampling.cache, sampling.layout) if keeps else (),
        steps=steps,
        evaluations=0 if asked.held_out == 0 else 1 + math.ceil(steps / every),
        sampling_seconds=seconds(prompts, cfg.samples_per_prompt),
        evaluation_seconds=seconds(asked.held_out, 1 + cfg.eval_samples),
        scoring_seconds=_scoring_seconds(cfg, training, now) if by_step else 0.0,
        updates_seconds=updates_seconds,
    )


def _concurrency(cfg: DictConfig, slots: int) -> int:
    """Requests that a rank sends to servers at once; without an option of the engine, one for each slot."""
    options = inspect.signature(import_component(cfg.engine[COMPONENT])).parameters
    usual = options["concurrency"].default if "concurrency" in options else slots
    return cfg.engine.get("concurrency", usual)


def _scoring_seconds(cfg: DictConfig, training: TrainingPlanner, now: Choice) -> float:
    """Seconds of the passes that compute log-probs before the updates of a step."""
    columns = training.objective.columns
    passes = 0
    if "old_logprobs" in columns and workload.old_logprobs(cfg, training.dtype) == "trainer":
        passes += 1
    if REFERENCE in columns:
        passes += 1
    return passes * updates_of_pass(cfg) * now.step.forward_seconds


@dataclass(frozen=True)
class TeacherPlan:
    """Costs of a distillation's teacher, in addition to the model in training.

    Attributes:
        parameters: number of parameters.
        weights: bytes of the weights on a rank, including gathered ones.
        forward: further bytes of a forward pass over a micro-batch.
        seconds: time of the forward passes over the rows of an update.
    """

    parameters: int
    weights: int
    forward: int
    seconds: float


@dataclass(frozen=True)
class RunPlan:
    """The plan of one run.

    Attributes:
        family: the recipe of this library that the config's recipe is or extends.
        target: the planned machine.
        ranks: processes that share the work.
        parameters: number of the model's parameters, and of the trained ones.
        shape: note that the model's shape comes from this library. None if it comes from the model's files.
        rows: the training data; of recipes that sample, of a step.
        now: an update as configured.
        best: the fastest update within the budget.
        steps: updates of all epochs, or of a step of a recipe that samples. None if the number of rows is unknown.
        training_seconds: seconds of these updates. NaN if their number is unknown.
        rollout: the plan of a step of a recipe that samples; None for other recipes.
        reference: seconds to score all rows once under DPO's reference. None without a reference, or if the number of
            rows is unknown.
        teacher: the teacher of a distillation, if it is another model; else None.
        programs: bytes of memory shared with the GPU that the programs of conversations may take.
        other_adapters: bytes of further adapters in training over the same weights, as of clients of ``serve``.
        compiled: what ``compile: auto`` chose, and why.
    """

    family: str
    target: Target
    ranks: int
    parameters: tuple[int, int]
    shape: str | None
    rows: Workload
    now: Choice
    best: Choice
    steps: int | None
    training_seconds: float
    rollout: RolloutPlan | None
    reference: float | None
    teacher: TeacherPlan | None
    programs: int
    other_adapters: int = 0
    compiled: str | None = None

    @property
    def step_name(self) -> str:
        """What the recipe calls a step: in RAFT a cycle."""
        return "cycle" if self.family == registry.RAFT else "step"

    @property
    def fits(self) -> bool:
        """Whether the unchanged config stays within the budget."""
        return self.highest(self.now) <= self.target.budget[0]

    def highest(self, choice: Choice) -> int:
        """Return the peak bytes of the run: of training or, if it takes more, of sampling."""
        training = self.peak(choice)
        if self.rollout is None:
            return training
        return max(training, self.beside + self.rollout.peak)

    @property
    def beside(self) -> int:
        """Bytes of the teacher's weights and of further adapters."""
        return self.other_adapters + (self.teacher.weights if self.teacher else 0)

    def kept(self, choice: Choice) -> int:
        """Return the bytes that the sampler keeps during training."""
        if self.rollout is None:
            return 0
        return self.rollout.kept(choice.peak, self.target.budget[0] - self.beside)

    def peak(self, choice: Choice) -> int:
        """Return the peak bytes of training, including sampler and teacher."""
        peak = choice.peak
        if self.teacher:  # it computes before the model
            peak = max(peak, choice.memory.fixed + self.teacher.forward)
        return peak + self.kept(choice) + self.beside

    def changes(self) -> dict[str, int | str]:
        """Return the changed keys of ``best`` with their values."""
        keys: dict[str, int | str] = {}
        if self.best.micro_batch != self.now.micro_batch:
            keys["tokens_per_micro_batch"] = self.best.micro_batch
        if len(self.best.checkpointed) != len(self.now.checkpointed):
            keys["enable_activation_checkpointing"] = "auto"
        return keys


def plan_run(
    cfg: DictConfig,
    machine: Machine,
    *,
    family: str,
    bench: Path | None,
    ranks: int,
    known: Known,
    chip: str | None = None,
    adapters: int = 1,
) -> RunPlan:
    """Plan a run.

    Args:
        cfg: config of any recipe, from :func:`rocm_ext.config.load`; its ``loss`` is a component.
        machine: this machine; the plan is for ``cfg.hardware``.
        family: the recipe of this library that the config's recipe is or extends.
        bench: file that ``rocm-ext bench`` wrote. Without it, this machine's default file, if it exists.
        ranks: processes that share the work.
        known: the user's sizes of data that are not on disk.
        chip: chip of the profile, to plan for a machine as sold with it. Without it, the plan is for this machine, if
            ``cfg.hardware`` describes it.
        adapters: adapters in training at once over the same weights, all like the config's.

    Raises:
        UserError: the recipe would refuse the config, or the machine's speeds are unknown.
    """
    target = Target.of(cfg, machine, bench, chip)
    compiled = None
    if cfg.compile == compiling.AUTO:
        cfg.compile, why = compiling.choose_compile(cfg, target.profile, machine, target.here)
        compiled = compiling.in_words(cfg.compile, why)
    shape = use_shape(cfg)
    decoder = build_model(cfg.model, target.dtype, 0, torch.device("meta"))
    _check(cfg, target, machine, decoder, ranks)
    choose_attention(decoder, cfg.attention)
    asked = workload.questions(cfg, known) if family in registry.SAMPLED else None
    samples_here = asked is not None and cfg.engine[COMPONENT].endswith(".LocalEngine")
    kept_layout = 0
    if asked and samples_here:
        engine = _checked_engine(cfg, decoder, asked)
        if _keeps(cfg, family):
            kept_layout = engine.layout_bytes()
    planner = TrainingPlanner(
        cfg,
        decoder,
        objective_of(config.instantiate(cfg.loss, key="loss")),
        target.dtype,
        target.device,
        rows=_rows(cfg, family, asked, known, shares_beginnings(decoder)),
        ranks=ranks,
        speeds=lambda: target.figures,
        kernels=Kernels.on(target.device, "bf16" in target.figures.flops, cfg.attention),
    )
    teacher_planner = _teacher_planner(cfg, family, planner)
    budget = target.budget[0]
    if teacher_planner:
        budget -= held_bytes(teacher_planner.decoder, ranks)
    other_adapters = 0
    if adapters > 1:
        memory = planner.memory(planner.rows.longest)
        other_adapters = (adapters - 1) * (memory.adapter + memory.gradients + memory.optimizer)
        budget -= other_adapters
    # the weights that the sampler keeps for the next step leave less for training, as in the recipe
    room = budget - kept_layout
    now = best = planner.fit(room)
    if cfg.tokens_per_micro_batch != "auto":
        micro_batch = micro_batch_budget(cfg, planner.rows.longest)
        layers, _ = checkpointed_layers(
            cfg.enable_activation_checkpointing, planner.memory(micro_batch), room
        )
        now = planner.choice(micro_batch, layers, room)
    teacher = None
    update_seconds = now.step.seconds
    if teacher_planner:
        teacher = _plan_teacher(teacher_planner, now)
        update_seconds += teacher.seconds
    steps = _steps(cfg, family, planner)
    training_seconds = math.nan if steps is None else steps * update_seconds
    rollout = None
    if asked:
        servers = 0 if samples_here else max(1, len(cfg.engine.get("urls") or []))
        sharing = 1 if servers else ranks
        sampler = SamplingPlanner(
            cfg, decoder, target.device, asked, ranks=sharing, figures=target.figures
        )
        rollout = _rollout_plan(
            cfg, family, asked, sampler, planner, now, budget, servers, training_seconds
        )
    return RunPlan(
        family=family,
        target=target,
        ranks=ranks,
        parameters=_parameters(decoder),
        shape=shape,
        rows=planner.rows,
        now=now,
        best=planner.better(now, best, room),
        steps=steps,
        training_seconds=training_seconds,
        rollout=rollout,
        reference=_reference(planner, now),
        teacher=teacher,
        programs=ranks * _programs(cfg, target),
        other_adapters=other_adapters,
        compiled=compiled,
    )


def _checked_engine(cfg: DictConfig, decoder: TransformerDecoder, asked: Questions) -> Any:
    """Return the engine that samples in this process.

    Raises:
        UserError: prompt and answer are too long for the model; a plan of rows that long would take minutes.
    """
    engine = config.instantiate(
        cfg.engine, key="engine", decoder=decoder, tokenizer=None, free_memory=lambda: 0
    )
    longest = asked.longest + workload.longest_answer(cfg)
    if longest > engine.max_seq_len:
        raise UserError(
            f"a prompt and max_new_tokens are up to {longest} tokens; the model takes at most {engine.max_seq_len}"
        )
    return engine


def _keeps(cfg: DictConfig, family: str) -> bool:
    """Whether a sampler in this process keeps its copy of the weights during training, if it fits; RAFT's does not."""
    return family in registry.BY_STEP and not cfg.get("given_answers")


def _teacher_planner(
    cfg: DictConfig, family: str, planner: TrainingPlanner
) -> TrainingPlanner | None:
    """The planner of a distillation's teacher; None without a teacher, or if a server or this model's base teaches."""
    if family != registry.DISTIL or cfg.teacher == BASE or is_server(cfg.teacher):
        return None
    cfg = OmegaConf.create(cfg)
    # an earlier run may write it
    if cfg.teacher_adapter and not Path(cfg.teacher_adapter).exists():
        cfg.teacher_adapter = None
    teacher = teacher_config(cfg, cfg)
    use_shape(teacher)
    decoder = build_model(teacher.model, planner.dtype, 0, torch.device("meta"))
    choose_attention(decoder, cfg.attention)
    return replace(planner, cfg=teacher, decoder=decoder, objective=CrossEntropy())


def _plan_teacher(planner: TrainingPlanner, now: Choice) -> TeacherPlan:
    """Plan the teacher's passes over the micro-batches of the configured update ``now``."""
    alone = planner.choice(now.micro_batch, (), 0)
    return TeacherPlan(
        parameters=_parameters(planner.decoder)[0],
        weights=held_bytes(planner.decoder, planner.ranks),
        forward=max(layer.entry + layer.kept for layer in alone.memory.layer_costs),
        seconds=alone.step.forward_seconds,
    )


def _rows(
    cfg: DictConfig, family: str, asked: Questions | None, known: Known, share: bool
) -> Workload:
    """Estimate the rows to train on; for GRPO, set the config's rows of an update."""
    if asked is None:
        return workload.sft_rows(cfg, known, share)
    if family == registry.RAFT:
        return workload.kept_rows(cfg, asked)
    if known.rows:
        cfg.prompts_per_step = known.rows
    rows = workload.sampled_rows(cfg, asked)
    cfg.sequences_per_step = workload.rows_of_update(cfg, rows.count or 1)
    return rows


def _check(
    cfg: DictConfig, target: Target, machine: Machine, decoder: TransformerDecoder, ranks: int
) -> None:
    """Raise the recipe's errors about the config."""
    settings: Any = OmegaConf.to_container(cfg)
    overrides = list(cfg.hardware_overrides)
    check_locked(target.profile, settings, overrides)
    check_quantized(decoder, target.profile, overrides, ranks, target.budget[0])
    peft_files.check_checkpointer(cfg, decoder)
    check_max_seq_len(cfg.tokenizer.get("max_seq_len"))
    if target.here and cfg.device != "cpu" and machine.backend == "cpu":
        raise UserError(
            f"device={cfg.device}: found {machine}. Set device=cpu to plan for this machine, hardware=NAME for another"
        )


def _parameters(decoder: TransformerDecoder) -> tuple[int, int]:
    """Return the number of all parameters, and of the trained ones."""
    total = trained = 0
    for parameter in decoder.parameters():
        total += parameter.numel()
        if parameter.requires_grad:
            trained += parameter.numel()
    return total, trained


def _steps(cfg: DictConfig, family: str, planner: TrainingPlanner) -> int | None:
    if family in registry.BY_STEP:
        return updates_of_step(cfg)
    if planner.rows.count is None:
        return None
    steps = math.ceil(planner.rows.count / planner.rows_per_step)
    return cfg.epochs * min(steps, cfg.max_steps_per_epoch or steps)


def _reference(planner: TrainingPlanner, choice: Choice) -> float | None:
    """Seconds of a forward pass over all preferences, if the objective needs the reference's log-probs.

    KTO needs a second pass, over the answers of its baseline.
    """
    needed = {SIDE, REFERENCE}.issubset(planner.objective.columns)
    if not needed or planner.rows.count is None:
        return None
    passes = 1 if getattr(planner.objective, "baseline", None) is None else 2
    return passes * planner.rows.count / planner.rows_per_step * choice.step.forward_seconds


def _programs(cfg: DictConfig, target: Target) -> int:
    """The most bytes of memory shared with the GPU that a rank's programs take."""
    environment = cfg.get("environment")
    runs_programs = environment and environment[COMPONENT].endswith(".Program")
    if target.profile.memory["of"] != "unified" or not runs_programs:
        return 0
    # here, because this module imports the verifiers, which Windows lacks
    from rocm_ext.environments.program import MEMORY_MB, MOST_AT_ONCE

    at_once = environment.get("at_once") or MOST_AT_ONCE
    memory_mb = environment.get("memory_mb") or MEMORY_MB
    return int(at_once * memory_mb * 2**20)
