"""RAFT on 1…N ranks: sample answers, verify them, keep the right ones, train on those, repeat (arXiv:2304.06767).

    tune run raft_rocm --config strix_halo_qwen7b_raft
    tune run --nproc_per_node 8 raft_rocm --config mi300x_qwen7b_raft_8gpu

Every arrow is a file: ``cycle_k/`` has ``samples.jsonl``, ``verdicts.jsonl``, ``kept.jsonl``, ``adapter/`` and
``eval.json``; ``cycle_0/`` has the evaluation before any training. A run that was stopped goes on from the last
complete record. Training is :class:`LoRAFinetune`'s, unchanged, one run of it per cycle.
"""

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
from omegaconf import DictConfig, OmegaConf
from rocm_ext.recipes.lora_finetune_rocm import LoRAFinetune, run

from rocm_ext import config
from rocm_ext.config.checks import check_raft_values
from rocm_ext.data.prompts import Prompt, check_disjoint
from rocm_ext.data.render import render_prompt
from rocm_ext.data.rows import check_vocabulary
from rocm_ext.errors import UserError
from rocm_ext.files import replace_folder, replace_text
from rocm_ext.generation import Request, Sampling, sample_seed
from rocm_ext.hardware.budget import memory_budget
from rocm_ext.hardware.machine import host_memory
from rocm_ext.log import log
from rocm_ext.model import adapter_files
from rocm_ext.model.build import load_adapter
from rocm_ext.plan import workload
from rocm_ext.raft import evaluation
from rocm_ext.raft.cycles import Cycle, Run, best, pass_rates, stop_reason, table
from rocm_ext.raft.rollouts import Interrupted, Key, Phase, Rollouts, Sample
from rocm_ext.raft.selection import choose_prompts, filter_samples, to_rows
from rocm_ext.ranks import local_world_size
from rocm_ext.runs.scores import Score
from rocm_ext.train.checkpoint import FREE_KEYS, check_same_run
from rocm_ext.train.metrics import Metrics
from rocm_ext.verifiers import Pool, Result, build

# Keys that a resumed run may change, beside those that an SFT run may
_FREE = FREE_KEYS | frozenset(
    """
    cycles prompts eval_prompts verify_workers verify_timeout max_error_share stop_after_no_gain min_entropy
    engine.slots engine.graphs engine.urls engine.concurrency engine.timeout engine.retries engine.api_key_env
    """.split()  # noqa: SIM905
)


def fingerprint(state: Mapping[str, torch.Tensor]) -> str:
    """sha256 of tensors by name."""
    digest = sha256()
    for name, tensor in sorted(state.items()):
        digest.update(name.encode() + tensor.float().numpy().tobytes())
    return digest.hexdigest()


class RAFT:
    """Trains an adapter on the model's own verified answers.

    Args:
        cfg: what :func:`rocm_ext.config.load` returns for ``raft_rocm``.
    """

    def __init__(self, cfg: DictConfig) -> None:
        check_raft_values(cfg)
        self.cfg = cfg
        self.sampling = Sampling(
            max_new_tokens=cfg.max_new_tokens,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            min_p=cfg.min_p,
            stop_strings=tuple(cfg.stop_strings),
        )
        self.trainer = LoRAFinetune(self._trainer_config())
        self.out = Path(cfg.output_dir)
        self.interrupt = self.trainer.interrupt  # one for all phases

    def _trainer_config(self, **changes: Any) -> DictConfig:
        """The SFT recipe's config: its defaults, under what this recipe's says."""
        cfg, trainer = self.cfg, config.trainer_config(self.cfg)
        if cfg.objective == "raft++":
            ratio = {config.COMPONENT: "rocm_ext.objectives.loss.ClippedRatioLoss", "clip_high": cfg.clip_high}
            trainer["loss"] = trainer["loss"] | ratio
        return OmegaConf.create(trainer | changes)

    # ---- set-up

    def setup(self) -> None:
        """Everything that can fail for the user's reasons, the cheap parts first."""
        self._setup_prompts()
        self._setup_verifier()
        self._setup_machine()
        self._setup_tokens()
        self._setup_model()
        self._setup_run()

    def _setup_prompts(self) -> None:
        cfg = self.cfg
        self.prompts = self._prompts("prompts") if cfg.prompts is not None else []
        self.held_out = self._prompts("eval_prompts") if cfg.eval_prompts is not None else []
        if cfg.stop_after_no_gain and not self.held_out:
            raise UserError("stop_after_no_gain needs held-out prompts: set eval_prompts")
        check_disjoint(self.prompts, self.held_out)

    def _prompts(self, key: str) -> list[Prompt]:
        prompts = config.instantiate(self.cfg[key], key=key)
        if not prompts or not all(isinstance(prompt, Prompt) for prompt in prompts):
            raise UserError(f"{key}: {self.cfg[key]._component_} gave no list of rocm_ext.data.prompts.Prompt")
        return prompts

    def _setup_verifier(self) -> None:
        node: Any = OmegaConf.to_container(self.cfg.verifier, resolve=True)
        self.verifier, verifier = node, build(node)
        verifier.check()
        for prompt in (*self.prompts, *self.held_out):
            try:
                verifier.check_row(prompt.row)
            except (UserError, ValueError) as error:
                raise UserError(f"{prompt.origin}: {error}") from error

    def _setup_machine(self) -> None:
        cfg, trainer = self.cfg, self.trainer
        trainer._setup_machine()
        self.ranks = trainer.ranks
        self._recorded = Run(self.out).begun(cfg.resume_from_checkpoint, cfg.overwrite_output_dir)
        recorded = self._recorded["identity"]["seed"] if self._recorded else None
        seed = next(s for s in (cfg.seed, recorded, random.SystemRandom().randrange(2**31)) if s is not None)
        cfg.seed = trainer.cfg.seed = self.ranks.agree(seed)
        trainer._setup_tokenizer()

    def _setup_tokens(self) -> None:
        """Render every prompt, by the code that SFT rows are rendered with."""
        self.tokens = {
            prompt.id: render_prompt(self.trainer.tokenizer, prompt.messages)
            for prompt in (*self.prompts, *self.held_out)
        }

    def _setup_model(self) -> None:
        trainer, new = self.trainer, self.sampling.max_new_tokens
        trainer._setup_model()
        context = trainer.decoder.max_seq_len
        for prompt in (*self.prompts, *self.held_out):
            if (length := len(self.tokens[prompt.id])) + new > context:
                raise UserError(
                    f"{prompt.origin}: {length} tokens, with max_new_tokens {new} more than the {context} that the "
                    "model takes; lower max_new_tokens or drop the prompt"
                )
        check_vocabulary(max(map(max, self.tokens.values())), trainer.decoder.tok_embeddings.num_embeddings)
        self._setup_engine()
        trainer._setup_activations(self._expected_rows())
        trainer._setup_weights()
        self._initial = adapter_files.adapter_state(trainer.decoder)

    def _expected_rows(self) -> workload.Workload:
        """What cycles will train on, as far as it can be known."""
        lengths = [len(tokens) for tokens in self.tokens.values()]
        return workload.kept_rows(
            self.cfg,
            workload.Questions(
                prompts=len(self.prompts),
                held_out=len(self.held_out),
                longest=max(lengths),
                mean=fmean(lengths),
                answer=workload.expected_answer(self.cfg),
                source="the run's prompts",
            ),
        )

    def _setup_engine(self) -> None:
        node, trainer = self.cfg.engine, self.trainer
        offered = {"decoder": trainer.decoder, "tokenizer": trainer.tokenizer, "free_memory": self._free_memory}
        wanted = {name: value for name, value in offered.items() if config.takes(node, name, key="engine")}
        self.engine = config.instantiate(node, key="engine", **wanted)
        self.engine.check()
        known = self.engine.exact_tokens and self.engine.has_logprobs
        if not known and (self.cfg.objective == "raft++" or self.cfg.min_entropy is not None):
            raise UserError(
                "raft++ and min_entropy need the token ids and log-probs of sampling, which this engine does not give"
            )

    def _free_memory(self) -> int:
        """Bytes that sampling may still take on the device."""
        trainer = self.trainer
        if trainer.device.type == "cpu":
            return host_memory(Path("/"), "MemAvailable") // local_world_size()
        torch.cuda.empty_cache()
        taken = torch.cuda.memory_allocated(trainer.device)
        free = memory_budget(trainer.profile, trainer.machine)[0]
        if not trainer.machine.unified:  # there MemAvailable, in the budget, is without what is taken already
            free -= taken
        if self.cfg.memory_fraction is not None:
            free = min(free, int(self.cfg.memory_fraction * trainer.machine.total_memory) - taken)
        return free

    def _setup_run(self) -> None:
        """Make the folder this run's, once nothing can fail any more."""
        identity = {
            "base model": self.trainer.base_fingerprint,
            "prompts": self._fingerprint(self.prompts),
            "eval prompts": self._fingerprint(self.held_out),
            "dtype": str(self.trainer.dtype),
            "seed": self.cfg.seed,
            "first adapter": fingerprint(self._initial),
            "rows per step": self.trainer.rows_per_step,
        }
        if self._recorded is not None:
            check_same_run(self.out / "run.json", self._recorded, self.cfg, identity, _FREE)
        self.metrics: Metrics | None = None
        if self.ranks.is_main:
            self.metrics = Run(self.out).take(self.cfg, identity, fresh=self._recorded is None)
        self.ranks.barrier()

    def _fingerprint(self, prompts: Sequence[Prompt]) -> str:
        """Of what the model reads and what verifiers see, in any order."""
        rows = sorted(json.dumps([p.id, self.tokens[p.id], p.row], sort_keys=True, default=str) for p in prompts)
        return sha256("\n".join(rows).encode()).hexdigest()

    # ---- the cycle

    def train(self) -> None:
        """All cycles, then the outputs."""
        with self.verification() as self.rollouts:
            if self.held_out:
                self.evaluate(0)
            for cycle in range(1, self.cfg.cycles + 1):
                reason = self.cycle(cycle)
                if reason:
                    log.info("stopped: %s", reason)
                    break
        self.write_outputs()

    @contextmanager
    def verification(self) -> Iterator[Rollouts]:
        """Worker processes that verify while the model samples."""
        workers = self.cfg.verify_workers
        if workers is None:  # one core of each rank's share drives the sampler, and loading needs none meanwhile
            cores = psutil.cpu_count(logical=False) or 1
            if hasattr(os, "sched_getaffinity"):  # a container may have fewer
                cores = min(cores, len(os.sched_getaffinity(0)))
            workers = min(16, max(1, cores // local_world_size() - 1))
        with Pool(self.verifier, workers, self.cfg.verify_timeout) as pool:
            yield Rollouts(pool, self.ranks, self.interrupt, self.cfg.max_error_share)

    def cycle(self, cycle: int) -> str | None:
        """Sample, verify, filter, train, evaluate. What a file says is done is not done again.

        Returns:
            why no other cycle should follow, or None.
        """
        if not Cycle(self.out, cycle).trained:
            asked = self.choose(cycle)
            if not asked:
                return f"none of {len(self.prompts)} prompts is worth asking in cycle {cycle} (skip_solved)"
            phase = self.sample(cycle, asked)
            self.fit(cycle, self.keep(cycle, phase))
        self._check_changed(cycle)
        if self.held_out:
            self.evaluate(cycle)
        self.write_summary(cycle)
        return stop_reason(self._rows(), self.cfg.min_entropy, self.cfg.stop_after_no_gain)

    def choose(self, cycle: int) -> list[Prompt]:
        """The prompts that a cycle asks."""
        cfg = self.cfg
        chosen = choose_prompts(
            [prompt.id for prompt in self.prompts],
            [pass_rates(Cycle(self.out, each).results(), cfg.reward_threshold) for each in range(1, cycle)],
            count=cfg.prompts_per_cycle,
            skip_solved=cfg.skip_solved,
            retry_unsolved_after=cfg.retry_unsolved_after,
            seed=cfg.seed,
        )
        by_id = {prompt.id: prompt for prompt in self.prompts}
        return [by_id[prompt_id] for prompt_id in chosen]

    def sample(self, cycle: int, asked: Sequence[Prompt]) -> Phase:
        """Answers of the model as the cycle before left it, and their verdicts."""
        seed, samples = self.cfg.seed, self.cfg.samples_per_prompt  # omegaconf is slow to ask
        requests = [
            Request(
                prompt.id,
                sample,
                sample_seed(seed, cycle, prompt.id, sample),
                tuple(self.tokens[prompt.id]),
                prompt.messages,
            )
            for prompt in asked
            for sample in range(samples)
        ]
        return self._phase(cycle, "sample", cycle - 1, [(request, self.sampling) for request in requests], asked)

    def _phase(self, cycle: int, what: str, adapter_of: int, requests: Sequence, prompts: Sequence[Prompt]) -> Phase:
        """Completions of ``requests`` with their verdicts, from the model with the adapter of a cycle."""
        self._check_interrupt(cycle)
        self._load_adapter(adapter_of)
        rows = {prompt.id: prompt.row for prompt in prompts}
        folder = self._adapter(adapter_of)
        try:
            with self.interrupt:
                phase = self.rollouts.make(
                    Cycle(self.out, cycle).phase(what),
                    f"cycle {cycle} {what}",
                    requests,
                    rows,
                    lambda: self.engine.session(folder if folder.exists() else None),
                )
        except Interrupted as stop:
            self.trainer.leave(f"in cycle {cycle}", stop.signum)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the cache's memory is training's now
        if phase.stats.get("tokens"):  # else all of it was recorded before
            self._record(cycle, what, phase.stats, self._steps_before(cycle + (what == "eval")))
        return phase

    def _check_interrupt(self, cycle: int) -> None:
        """Leave if a signal came after the phase before had last looked."""
        if signum := max(signum or 0 for signum in self.ranks.gather(self.interrupt.signum)):
            self.trainer.leave(f"in cycle {cycle}", signum)

    def _record(self, cycle: int, phase: str, values: Mapping[str, Any], steps: int) -> None:
        """A line of ``metrics.jsonl``, and the numbers of it for the metric logger, ``steps`` into training."""
        if self.metrics is not None:
            self.metrics.write(cycle=cycle, phase=phase, **values)
        if self.trainer.metric_logger is not None:
            numbers = {f"{phase}_{name}": value for name, value in values.items() if isinstance(value, int | float)}
            self.trainer.metric_logger.log_dict(numbers, step=steps)

    def _steps_before(self, cycle: int) -> int:
        return sum(Cycle(self.out, each).training()["steps"] for each in range(1, cycle))

    def _load_adapter(self, cycle: int) -> None:
        """The adapter that a cycle left, always from its file: a resumed run has nothing else."""
        load_adapter(self.trainer.decoder, self._adapter_state(cycle), str(self._adapter(cycle)))

    def _adapter_state(self, cycle: int) -> Mapping[str, torch.Tensor]:
        if cycle == 0:
            return self._initial
        trainer = self.trainer
        return adapter_files.read_adapter(self._adapter(cycle), trainer.decoder, trainer.cfg.checkpointer.model_type)

    def _check_changed(self, cycle: int) -> None:
        """Refuse to call it training if nothing was learnt.

        Raises:
            UserError: the adapter is what the cycle began with.
        """
        before, after = self._adapter_state(self._trained_from(cycle)), self._adapter_state(cycle)
        if all(torch.equal(before[name], tensor) for name, tensor in after.items()):
            steps = Cycle(self.out, cycle).training()["steps"]
            raise UserError(
                f"cycle {cycle}: {steps} optimiser steps changed nothing, bit for bit. A warm-up as long as the cycle "
                "does that, and fp16 whose loss scale never settles: drop lr_scheduler, keep more answers, or take "
                "another dtype"
            )

    def _trained_from(self, cycle: int) -> int:
        """The cycle whose adapter a cycle's training begins with."""
        return cycle - 1 if self.cfg.start_from == "previous" else 0

    def _adapter(self, cycle: int) -> Path:
        """The PEFT folder that a cycle leaves; cycle 0's is the one to start from, if there is one."""
        first = self.cfg.checkpointer.get("adapter_checkpoint")
        return Path(first) if first and cycle == 0 else Cycle(self.out, cycle).adapter

    def keep(self, cycle: int, phase: Phase) -> list[Sample]:
        """The samples to train on, in ``kept.jsonl``.

        Raises:
            UserError: there are none, with the verdict counts.
        """
        kept, counts = self._filter(cycle, phase.samples, phase.results)
        told = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items())
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(phase.verdicts().items()))
        if not kept:
            raise UserError(
                f"cycle {cycle}: nothing to train on. {len(phase.samples)} answers: {verdicts}; {told}. Raise "
                "samples_per_prompt or max_new_tokens, or take easier prompts or a model that is sometimes right"
            )
        log.info("cycle %d: %d answers: %s; %s", cycle, len(phase.samples), verdicts, told)
        if self.ranks.is_main:
            lines = []
            for sample in kept:
                more = {"reward": phase.results[sample.key].reward, "prompt_tokens": self.tokens[sample.prompt_id]}
                lines.append(json.dumps({**sample.record(), **more}) + "\n")
            replace_text(Cycle(self.out, cycle).kept, "".join(lines))
        return kept

    def _filter(self, cycle: int, samples: Mapping[Key, Sample], results: Mapping[Key, Result]) -> Any:
        cfg = self.cfg
        return filter_samples(
            samples,
            results,
            threshold=cfg.reward_threshold,
            per_prompt=cfg.max_per_prompt,
            best_fraction=cfg.best_fraction,
            deduplicate=cfg.deduplicate,
            drop_truncated=cfg.drop_truncated,
            seed=sample_seed(cfg.seed, cycle, "filter", 0),
        )

    def fit(self, cycle: int, kept: Sequence[Sample]) -> None:
        """One run of the SFT recipe over ``kept``, with an optimiser of its own, in the cycle's folder."""
        cfg, trainer, folder = self.cfg, self.trainer, Cycle(self.out, cycle).folder
        with_logprobs = cfg.objective == "raft++"
        if with_logprobs and any(len(sample.logprobs) != len(sample.tokens) for sample in kept):
            raise UserError("raft++ needs log-probs of sampling, which this engine did not give; take objective=raft")
        lr = cfg.optimizer.lr
        lr = max(lr * cfg.lr_decay ** (cycle - 1), min(cfg.lr_floor, lr))
        self._load_adapter(self._trained_from(cycle))
        trainer.start(
            self._trainer_config(
                output_dir=str(folder),
                seed=sample_seed(cfg.seed, cycle, "train", 0) % 2**31,
                optimizer={**cfg.optimizer, "lr": lr},
                resume_from_checkpoint=(folder / "checkpoints").exists(),
                overwrite_output_dir=True,
                save_adapter_weights_only=True,
            ),
            to_rows(kept, self.tokens, with_logprobs),
            self._steps_before(cycle),
        )
        trainer.train()
        if self.ranks.is_main:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        self._record(cycle, "train", Cycle(self.out, cycle).training(), self._steps_before(cycle + 1))

    def evaluate(self, cycle: int) -> None:
        """``eval.json``: how the model as the cycle left it does on the held-out prompts."""
        path = Cycle(self.out, cycle).eval
        if path.exists():
            return
        cfg = self.cfg
        requests = evaluation.eval_requests(self.held_out, self.tokens, self.sampling, cfg.eval_samples, cfg.seed)
        phase = self._phase(cycle, "eval", cycle, requests, self.held_out)
        scores = evaluation.score(phase, cfg.eval_samples)
        if self.ranks.is_main:
            replace_text(path, json.dumps(scores, indent=2) + "\n")
        self.ranks.barrier()
        log.info("cycle %d: held-out %s", cycle, Score(scores["correct"], scores["prompts"]))

    # ---- what comes out

    def write_summary(self, cycle: int) -> None:
        """``summary.json``: an entry per cycle, from the cycles' files."""
        if self.ranks.is_main:
            threshold = self.cfg.reward_threshold
            earlier = {row["cycle"]: row for row in self._rows() if row["cycle"] < cycle}
            rows = [
                earlier.get(each) or Cycle(self.out, each).row(threshold, partial(self._filter, each))
                for each in range(0 if self.held_out else 1, cycle + 1)
            ]
            replace_text(self.out / "summary.json", json.dumps({"cycles": rows}, indent=2) + "\n")
        self.ranks.barrier()

    def _rows(self) -> list[dict[str, Any]]:
        path = self.out / "summary.json"
        return json.loads(path.read_text())["cycles"] if path.exists() else []

    def write_outputs(self) -> None:
        """``adapter/``, of the cycle that did best on held-out prompts, or of the last; ``merged/`` if asked for."""
        rows = self._rows()
        if not rows:
            raise UserError("no prompt is worth asking in the first cycle, so nothing was trained")
        if self.ranks.is_main:
            number = best(rows)
            with replace_folder(self.out / "adapter") as folder:
                shutil.copytree(Cycle(self.out, number).adapter, folder, dirs_exist_ok=True)
            if not self.cfg.save_adapter_weights_only:
                adapter_files.merge(self.trainer.cfg.checkpointer, self.out / "adapter", self.out / "merged")
            log.info("%s", table(rows))
            log.info("adapter: %s, of cycle %d", self.out / "adapter", number)
            if self.held_out and rows[number]["held_out"]["correct"] <= rows[0]["held_out"]["correct"]:
                log.warning("no cycle does better on held-out prompts than the model it began with")
        self.ranks.barrier()

    def cleanup(self) -> None:
        """Close files and leave the process group."""
        self.trainer.cleanup()


def evaluate_adapter(cfg: DictConfig, adapter: Path | None) -> dict[str, Any]:
    """The content of ``eval.json`` for ``eval_prompts`` of a config and any adapter, without a run.

    Args:
        cfg: of ``raft_rocm``, with an ``output_dir`` of its own: records go there.
        adapter: PEFT folder; None: the model as the config starts it.
    """
    if cfg.eval_prompts is None:
        raise UserError("eval_prompts is not set; name the prompts to evaluate on")
    if adapter is not None:
        cfg.checkpointer.adapter_checkpoint = str(adapter)
    cfg.prompts = None  # they need not be here
    raft = RAFT(cfg)
    raft.setup()
    with raft.verification() as raft.rollouts:
        raft.evaluate(0)
    raft.cleanup()
    return Cycle(raft.out, 0).scores() or {}


@config.recipe_main("raft_rocm")
def main(cfg: DictConfig) -> None:
    """RAFT: `tune run raft_rocm --config NAME [key=value ...]`."""
    run(RAFT(cfg))


if __name__ == "__main__":
    main()
