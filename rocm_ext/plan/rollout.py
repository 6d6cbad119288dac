"""Plan a cycle of RAFT or a step of GRPO: sampling and training share this process, or servers sample elsewhere."""

import inspect
import math
from dataclasses import dataclass, replace

from omegaconf import DictConfig

from rocm_ext.base import registry
from rocm_ext.base.importing import COMPONENT, import_component
from rocm_ext.plan.planner import Choice, SamplingPlan, SamplingPlanner, TrainingPlanner
from rocm_ext.plan.workload import Questions


@dataclass(frozen=True)
class RolloutPlan:
    """The plan of a round: a cycle of RAFT, or a step of GRPO without the groups whose rewards are equal.

    Attributes:
        asked: prompts and answers.
        sampling: memory and speed of sampling, in this process or on one server.
        servers: number of servers; 0: this process samples.
        beside: whether servers sample the next round's answers while a round trains.
        peak: bytes while this process samples; 0 with servers.
        keeps: bytes that the sampler would keep while training, largest first; empty: it keeps none.
        rounds: cycles or steps of the run.
        evaluations: number of evaluations in the run.
        sampling_seconds: time to sample a round's answers; None: the number of prompts is unknown.
        evaluation_seconds: time of one evaluation; None: its prompts are unknown.
        scoring_seconds: time of the passes before the updates that compute log-probs.
        updates_seconds: time of a round's updates, as configured; None: the number of rows is unknown.
    """

    asked: Questions
    sampling: SamplingPlan
    servers: int
    beside: bool
    peak: int
    keeps: tuple[int, ...]
    rounds: int
    evaluations: int
    sampling_seconds: float | None
    evaluation_seconds: float | None
    scoring_seconds: float
    updates_seconds: float | None

    @property
    def round_seconds(self) -> float | None:
        """Seconds of a round, without its evaluation, and without verification, which runs beside sampling."""
        if self.sampling_seconds is None or self.updates_seconds is None:
            return None
        parts = self.sampling_seconds, self.scoring_seconds + self.updates_seconds
        return max(parts) if self.beside else sum(parts)

    @property
    def run_seconds(self) -> float | None:
        """Seconds of all rounds and evaluations; None if a part is unknown."""
        if self.round_seconds is None or self.evaluation_seconds is None:
            return None
        training = self.scoring_seconds + (self.updates_seconds or 0.0)
        first = min(self.sampling_seconds or 0.0, training) if self.beside else 0.0
        return self.rounds * self.round_seconds + first + self.evaluations * self.evaluation_seconds

    @property
    def waiting(self) -> tuple[str, float] | None:
        """The side that waits for the other in each round, and its seconds; None unless both work at once."""
        if not self.beside or self.sampling_seconds is None or self.updates_seconds is None:
            return None
        ahead = self.sampling_seconds - self.scoring_seconds - self.updates_seconds
        return ("the training GPUs", ahead) if ahead > 0 else ("the servers", -ahead)

    def at(self, training: float, sampling: float) -> "RolloutPlan":
        """Return the plan where training and sampling run at these shares of their computed speeds."""
        return replace(
            self,
            sampling_seconds=self.sampling_seconds and self.sampling_seconds / sampling,
            evaluation_seconds=self.evaluation_seconds and self.evaluation_seconds / sampling,
            scoring_seconds=self.scoring_seconds / training,
            updates_seconds=self.updates_seconds and self.updates_seconds / training,
        )

    def kept(self, training_peak: int, budget: int) -> int:
        """Return the bytes that the sampler keeps while training: weights and cache, or what of them fits.

        Args:
            training_peak: bytes of training alone.
            budget: bytes that this process may use.
        """
        return next((kept for kept in self.keeps if training_peak + kept <= budget), 0)


def rows_of_update(cfg: DictConfig, rows: int) -> int:
    """Return the most rows of an optimiser update, over all ranks, of a step with ``rows`` rows."""
    return math.ceil(rows / cfg.minibatches)


def plan_rollout(
    cfg: DictConfig,
    family: str,
    asked: Questions,
    sampler: SamplingPlanner,
    training: TrainingPlanner,
    now: Choice,
    budget: int,
    servers: int,
    updates_seconds: float | None,
) -> RolloutPlan:
    """Plan a round.

    A server is taken to be one GPU of the target's kind, as fast as this library's sampler.

    Args:
        cfg: config of the family.
        family: RAFT, whose sampler frees its memory before training, or GRPO, whose sampler keeps what it can.
        asked: prompts and answers.
        sampler: planner of sampling, in this process or on one server.
        training: planner of the updates.
        now: an update as configured.
        budget: bytes that a rank may use.
        servers: number of servers that sample; 0: this process samples.
        updates_seconds: time of a round's updates; None: unknown.
    """
    grpo = family == registry.GRPO
    fixed = now.memory.weights if servers else now.memory.fixed
    keeps = grpo and not servers
    sampling = sampler.plan(budget - fixed, now.peak - now.memory.weights if keeps else 0)
    slots, workers = sampling.slots, servers or training.ranks
    if servers:
        options = inspect.signature(import_component(cfg.engine[COMPONENT])).parameters
        usual = options["concurrency"].default if "concurrency" in options else slots
        slots = min(slots, training.ranks * cfg.engine.get("concurrency", usual))  # requests of a rank at once
    columns = training.objective.columns
    passes = ("old_logprobs" in columns and cfg.old_logprobs == "trainer") + ("reference_logprobs" in columns)
    rounds, every = (cfg.steps, cfg.eval_every_n_steps) if grpo else (cfg.cycles, cfg.eval_every_n_cycles)
    held_out = asked.held_out
    prompts = asked.prompts or (cfg.prompts_per_step if grpo else None)
    return RolloutPlan(
        asked=asked,
        sampling=sampling,
        servers=servers,
        beside=bool(grpo and servers and cfg.max_staleness),
        peak=0 if servers else fixed + sampling.peak,
        keeps=(sampling.layout + sampling.cache, sampling.layout) if keeps else (),
        rounds=rounds,
        evaluations=0 if held_out == 0 else 1 + math.ceil(rounds / every),
        sampling_seconds=prompts and sampler.seconds(prompts / workers, cfg.samples_per_prompt, slots),
        evaluation_seconds=held_out and sampler.seconds(held_out / workers, 1 + cfg.eval_samples, slots),
        scoring_seconds=passes * cfg.minibatches * now.step.forward_seconds if grpo else 0.0,
        updates_seconds=updates_seconds,
    )
