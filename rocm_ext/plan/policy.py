"""Plan a step of GRPO: sampling and training share this process, or servers sample on GPUs of their own."""

import inspect
import math
from dataclasses import dataclass, replace

from omegaconf import DictConfig

from rocm_ext.base.importing import COMPONENT, import_component
from rocm_ext.plan.planner import Choice, SamplingPlan, SamplingPlanner, TrainingPlanner
from rocm_ext.plan.workload import Questions


@dataclass(frozen=True)
class PolicyPlan:
    """The plan of a step of GRPO, without the groups whose rewards are equal.

    Attributes:
        asked: prompts and answers.
        sampling: memory and speed of sampling, in this process or on one server.
        servers: number of servers; 0: this process samples.
        beside: whether servers sample the next step's answers while a step trains.
        peak: bytes while this process samples; 0 with servers.
        layout: bytes of weights that the sampler keeps while training; 0 with servers.
        steps: steps of the run.
        updates: optimiser updates of a step.
        evaluations: number of evaluations in the run.
        sampling_seconds: time to sample a step's answers.
        evaluation_seconds: time of one evaluation; None: its prompts are unknown.
        scoring_seconds: time of the passes before the updates that compute log-probs.
        updates_seconds: time of a step's updates, as configured.
    """

    asked: Questions
    sampling: SamplingPlan
    servers: int
    beside: bool
    peak: int
    layout: int
    steps: int
    updates: int
    evaluations: int
    sampling_seconds: float
    evaluation_seconds: float | None
    scoring_seconds: float
    updates_seconds: float

    @property
    def training_seconds(self) -> float:
        """Seconds of a step's passes and updates."""
        return self.scoring_seconds + self.updates_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of a step, without verification, which runs beside sampling."""
        parts = self.sampling_seconds, self.training_seconds
        return max(parts) if self.beside else sum(parts)

    @property
    def run_seconds(self) -> float | None:
        """Seconds of all steps and evaluations; None if an evaluation's prompts are unknown."""
        if self.evaluation_seconds is None:
            return None
        first = min(self.sampling_seconds, self.training_seconds) if self.beside else 0.0
        return self.steps * self.step_seconds + first + self.evaluations * self.evaluation_seconds

    @property
    def waiting(self) -> tuple[str, float] | None:
        """The side that waits for the other in each step, and its seconds; None unless both work at once."""
        if not self.beside:
            return None
        ahead = self.sampling_seconds - self.training_seconds
        return ("the training GPUs", ahead) if ahead > 0 else ("the servers", -ahead)

    def at(self, training: float, sampling: float) -> "PolicyPlan":
        """Return the plan where training and sampling run at these shares of their computed speeds."""
        evaluation = self.evaluation_seconds
        return replace(
            self,
            sampling_seconds=self.sampling_seconds / sampling,
            evaluation_seconds=evaluation and evaluation / sampling,
            scoring_seconds=self.scoring_seconds / training,
            updates_seconds=self.updates_seconds / training,
        )

    def kept(self, training_peak: int, budget: int) -> int:
        """Return the bytes that the sampler keeps while training: weights and cache, or what of them fits.

        Args:
            training_peak: bytes of training alone.
            budget: bytes that this process may use.
        """
        if self.servers:
            return 0
        whole = self.layout + self.sampling.cache
        return next((kept for kept in (whole, self.layout) if training_peak + kept <= budget), 0)


def rows_of_update(cfg: DictConfig, rows: int) -> int:
    """Return the most rows of an optimiser update, over all ranks, of a step with ``rows`` rows."""
    return math.ceil(rows / cfg.minibatches)


def plan_policy(
    cfg: DictConfig,
    asked: Questions,
    sampler: SamplingPlanner,
    training: TrainingPlanner,
    now: Choice,
    budget: int,
    servers: int,
) -> PolicyPlan:
    """Plan a step.

    A server is taken to be one GPU of the target's kind, as fast as this library's sampler.

    Args:
        cfg: config of ``grpo_rocm``.
        asked: prompts and answers.
        sampler: planner of sampling, in this process or on one server.
        training: planner of the updates.
        now: an update as configured.
        budget: bytes that a rank may use.
        servers: number of servers that sample; 0: this process samples.
    """
    fixed = now.memory.weights if servers else now.memory.fixed
    sampling = sampler.plan(budget - fixed, 0 if servers else now.peak - now.memory.weights)
    slots, workers = sampling.slots, servers or training.ranks
    if servers:
        slots = min(slots, training.ranks * _concurrency(cfg, slots))
    columns, updates = training.objective.columns, cfg.updates_per_step * cfg.minibatches
    passes = ("old_logprobs" in columns and cfg.old_logprobs == "trainer") + ("reference_logprobs" in columns)
    held_out, prompts = asked.held_out, asked.prompts or cfg.prompts_per_step
    return PolicyPlan(
        asked=asked,
        sampling=sampling,
        servers=servers,
        beside=bool(servers and cfg.max_staleness),
        peak=0 if servers else fixed + sampling.peak,
        layout=0 if servers else sampling.layout,
        steps=cfg.steps,
        updates=updates,
        evaluations=0 if held_out == 0 else 1 + math.ceil(cfg.steps / cfg.eval_every_n_steps),
        sampling_seconds=sampler.seconds(prompts / workers, cfg.samples_per_prompt, slots),
        evaluation_seconds=held_out and sampler.seconds(held_out / workers, 1 + cfg.eval_samples, slots),
        scoring_seconds=passes * cfg.minibatches * now.step.forward_seconds,
        updates_seconds=updates * now.step.seconds,
    )


def _concurrency(cfg: DictConfig, default: int) -> int:
    """Return the simultaneous requests of each rank to a server."""
    known = inspect.signature(import_component(cfg.engine[COMPONENT])).parameters.get("concurrency")
    return cfg.engine.get("concurrency", default if known is None else known.default)
