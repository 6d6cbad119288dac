"""RAFT on 1…N ranks: sample answers, verify them, keep the correct ones, train on those, repeat (arXiv:2304.06767).

    tune run raft_rocm --config strix_halo_qwen7b_raft
    tune run --nproc_per_node 8 raft_rocm --config mi300x_qwen7b_raft_8gpu

Each stage writes a file: ``cycle_k/`` has ``samples.jsonl``, ``verdicts.jsonl``, ``kept.jsonl``, ``adapter/`` and
``eval.json``. ``cycle_0/`` has the evaluation before any training. A stopped run continues after its last complete
record. To train, each cycle runs the SFT recipe's :class:`Trainer` once.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from rocm_ext import config
from rocm_ext.config.checks import check_raft_values, check_values
from rocm_ext.data.batches import rows_per_step
from rocm_ext.data.prompts import Prompt
from rocm_ext.errors import UserError
from rocm_ext.files import replace_folder, replace_text
from rocm_ext.generation import Sampling, sample_seed
from rocm_ext.log import log
from rocm_ext.model import adapter_files
from rocm_ext.raft import evaluation
from rocm_ext.raft.adapters import Adapters
from rocm_ext.raft.cycles import RAFT_FREE_KEYS, Cycle, RunRecord, best, gained, stop_reason, table
from rocm_ext.raft.engine import open_engine, verify_workers
from rocm_ext.raft.history import History
from rocm_ext.raft.prompt_set import PromptSet
from rocm_ext.raft.rollouts import Phase, Rollouts, Sample, SampleKey, sampling_requests
from rocm_ext.raft.selection import ROW_COLUMNS, choose_prompts, filter_samples, to_rows, write_kept
from rocm_ext.raft.training import cycle_config, training_config
from rocm_ext.runs.scores import Score
from rocm_ext.train.checkpoint import check_same_run
from rocm_ext.train.components import setup_metric_logger, setup_tokenizer
from rocm_ext.train.interrupt import Interrupt, Interrupted
from rocm_ext.train.learner import Learner
from rocm_ext.train.output_dir import OutputDir, pick_seed
from rocm_ext.train.run import run
from rocm_ext.train.runtime import Runtime
from rocm_ext.train.trainer import Trainer
from rocm_ext.verifiers import Pool, Result


class RAFT:
    """Trains an adapter on the model's own verified answers.

    Args:
        cfg: config of ``raft_rocm`` or of a recipe that extends it, from :func:`rocm_ext.config.load`.
        learner: class that builds the model.
        trainer: class that trains the model in each cycle.

    Raises:
        UserError: a value in ``cfg`` is out of range.
    """

    def __init__(self, cfg: DictConfig, learner: type[Learner] = Learner, trainer: type[Trainer] = Trainer) -> None:
        check_raft_values(cfg)
        check_values(training_config(cfg))
        self.cfg, self._learner, self._trainer = cfg, learner, trainer
        self.sampling = Sampling(
            max_new_tokens=cfg.max_new_tokens,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            min_p=cfg.min_p,
            stop_strings=tuple(cfg.stop_strings),
        )
        self.out = Path(cfg.output_dir)
        self.interrupt = Interrupt()  # all phases share it
        self.metric_logger: Any = None
        self.rollouts: Rollouts | None = None  # set while the verification processes run

    # ---- set-up

    def setup(self) -> None:
        """Prepare the run, cheap steps first, so that a user's mistake ends the run early.

        Raises:
            UserError: the config, the prompts, the weights or the machine do not allow this run.
        """
        cfg = self.cfg
        self.prompts = PromptSet(cfg)
        self.verifier_node = self.prompts.check_verifier()
        self.runtime = Runtime.open(training_config(cfg))
        self.ranks = self.runtime.ranks
        begun = RunRecord(self.out).begun(cfg.resume_from_checkpoint, cfg.overwrite_output_dir)
        cfg.seed = pick_seed(cfg.seed, begun["identity"]["seed"] if begun else None, self.ranks)
        tokenizer = setup_tokenizer(cfg)
        self.prompts.render(tokenizer)
        self.learner = self._learner(training_config(cfg), self.runtime, tokenizer)
        self.learner.check_columns(ROW_COLUMNS)
        self.prompts.check_model(self.learner.decoder)
        self.engine = open_engine(cfg, self.learner)
        self.learner.setup(self.prompts.expected_work())
        self.adapters = Adapters(cfg, self.learner, self.out)
        self.history = self._setup_folder(begun)
        self.metric_logger = setup_metric_logger(cfg, self.runtime)

    def _setup_folder(self, begun: dict[str, Any] | None) -> History:
        """Claim the output folder for this run; called once all other set-up has succeeded.

        Args:
            begun: the recorded config and identity of the run to resume; None starts a new run.

        Raises:
            UserError: the recorded run differs from this one, or the disk is full.
        """
        cfg, prompts = self.cfg, self.prompts
        identity = {
            "base model": self.learner.base_fingerprint,
            "prompts": prompts.fingerprint(prompts.training),
            "eval prompts": prompts.fingerprint(prompts.held_out),
            "dtype": str(self.runtime.dtype),
            "seed": cfg.seed,
            "first adapter": adapter_files.fingerprint(self.adapters.first),
            "rows per step": rows_per_step(cfg, self.ranks.world),
        }
        record = RunRecord(self.out)
        if begun is not None:
            check_same_run(record.path, begun, cfg, identity, RAFT_FREE_KEYS)
        if self.ranks.is_main:
            record.take(cfg, identity, fresh=begun is None)
        self.ranks.barrier()
        return History(self.out, cfg.reward_threshold, self.ranks)

    # ---- the cycle

    def train(self) -> None:
        """Run all cycles, then write the outputs.

        Raises:
            Interrupted: the user asked to stop; all finished work is saved.
            UserError: a cycle cannot continue; the message says why.
        """
        done = 0
        with self.verification():
            if self.prompts.held_out:
                self.evaluate(0)
            for cycle in range(1, self.cfg.cycles + 1):
                reason = self.cycle(cycle)
                if cycle in self.history.rows:
                    done = cycle
                if reason:
                    log.info("stopped: %s", reason)
                    break
        self.write_outputs(done)

    @contextmanager
    def verification(self) -> Iterator[None]:
        """Run the worker processes that verify while the model samples; phases can be made inside."""
        with Pool(self.verifier_node, verify_workers(self.cfg), self.cfg.verify_timeout) as pool:
            self.rollouts = Rollouts(pool, self.ranks, self.interrupt, self.cfg.max_error_share)
            yield
        self.rollouts = None

    def cycle(self, cycle: int) -> str | None:
        """Sample, verify, filter, train, evaluate; skip stages whose files are complete.

        Args:
            cycle: number of the cycle, from 1.

        Returns:
            The reason to stop after this cycle, or None to continue.
        """
        if cycle not in self.history.rows:
            if not Cycle(self.out, cycle).trained:
                asked = self.choose(cycle)
                if not asked:
                    asked_of = len(self.prompts.training)
                    return f"none of {asked_of} prompts qualifies for cycle {cycle} (skip_solved, retry_unsolved_after)"
                phase = self.sample(cycle, asked)
                self.fit(cycle, self.keep(cycle, phase))
            self.adapters.check_changed(cycle)
            if self.prompts.held_out:
                self.evaluate(cycle)
            self._summarize(cycle)
        return stop_reason(self.history.until(cycle), self.cfg.min_entropy, self.cfg.stop_after_no_gain)

    def choose(self, cycle: int) -> list[Prompt]:
        """Choose the prompts that a cycle asks."""
        cfg = self.cfg
        chosen = choose_prompts(
            [prompt.id for prompt in self.prompts.training],
            self.history.last_asked,
            cycle,
            count=cfg.prompts_per_cycle,
            skip_solved=cfg.skip_solved,
            retry_unsolved_after=cfg.retry_unsolved_after,
            seed=cfg.seed,
        )
        return [self.prompts[prompt_id] for prompt_id in chosen]

    def sample(self, cycle: int, asked: Sequence[Prompt]) -> Phase:
        """Sample answers to ``asked`` with the previous cycle's adapter, and verify them."""
        tokens, samples = self.prompts.tokens, self.cfg.samples_per_prompt
        requests = sampling_requests(asked, tokens, samples, self.cfg.seed, cycle)
        return self._phase(cycle, "sample", cycle - 1, [(request, self.sampling) for request in requests], asked)

    def _phase(self, cycle: int, what: str, adapter_of: int, requests: Sequence, prompts: Sequence[Prompt]) -> Phase:
        """Complete ``requests`` with the adapter of cycle ``adapter_of``, and verify the completions."""
        assert self.rollouts is not None, "phases are made inside verification()"
        if signum := self.interrupt.agree(self.ranks):  # a signal may arrive after the previous phase's last check
            raise Interrupted(f"in cycle {cycle}", signum)
        self.adapters.load(adapter_of)
        folder = self.adapters.folder(adapter_of)
        with self.interrupt:
            phase = self.rollouts.make(
                Cycle(self.out, cycle).phase(what),
                cycle,
                what,
                requests,
                {prompt.id: prompt.row for prompt in prompts},
                lambda: self.engine.session(folder if folder.exists() else None),
            )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # frees the key-value cache's memory for training
        if phase.stats.get("tokens"):  # without new tokens, an earlier process recorded the whole phase
            self._record(cycle, what, phase.stats)
        return phase

    def _record(self, cycle: int, phase: str, values: Mapping[str, Any]) -> None:
        """Write ``values`` to ``metrics.jsonl``, and pass the numbers among them to the metric logger."""
        self.history.log(cycle, phase, values)
        if self.metric_logger is not None:
            numbers = {f"{phase}_{name}": value for name, value in values.items() if isinstance(value, int | float)}
            self.metric_logger.log_dict(numbers, step=self.history.steps)

    def keep(self, cycle: int, phase: Phase) -> list[Sample]:
        """Select the samples to train on, and write them to ``kept.jsonl``.

        Raises:
            UserError: no sample is left; the message has the number of each verdict.
        """
        kept, counts = self._filter(cycle, phase.samples, phase.results)
        rules = ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in counts.items())
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(phase.verdicts().items()))
        if not kept:
            raise UserError(
                f"cycle {cycle}: nothing to train on. {len(phase.samples)} answers: {verdicts}; {rules}. Raise "
                "samples_per_prompt or max_new_tokens, or use easier prompts or a model that is right more often"
            )
        log.info("cycle %d: %d answers: %s; %s", cycle, len(phase.samples), verdicts, rules)
        if self.ranks.is_main:
            write_kept(Cycle(self.out, cycle).kept, kept, phase.results, self.prompts.tokens)
        return kept

    def _filter(self, cycle: int, samples: Mapping[SampleKey, Sample], results: Mapping[SampleKey, Result]) -> Any:
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
        """Train on ``kept`` with a new optimiser, in the cycle's folder.

        Raises:
            UserError: the objective needs log-probs and the samples have none, or training fails.
        """
        columns, folder = self.learner.objective.columns, Cycle(self.out, cycle).folder
        if "old_logprobs" in columns and any(len(sample.logprobs) != len(sample.tokens) for sample in kept):
            loss = type(self.learner.objective).__name__
            raise UserError(f"loss {loss} needs the log-probs of sampling, and this engine returned none")
        self.adapters.load_for_training(cycle)
        cfg = cycle_config(self.cfg, cycle, folder)
        self._trainer(
            self.learner,
            to_rows(kept, self.prompts.tokens, columns),
            cfg,
            OutputDir.open(cfg, self.ranks),
            metric_logger=self.metric_logger,
            interrupt=self.interrupt,
            steps_before=self.history.steps,
        ).train()
        if self.ranks.is_main:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        self.history.add(Cycle(self.out, cycle))
        self._record(cycle, "train", Cycle(self.out, cycle).training())

    def evaluate(self, cycle: int) -> None:
        """Score a cycle's adapter on the held-out prompts, and write ``eval.json`` unless it exists."""
        path = Cycle(self.out, cycle).eval
        if path.exists():
            return
        cfg, prompts = self.cfg, self.prompts
        requests = evaluation.eval_requests(prompts.held_out, prompts.tokens, self.sampling, cfg.eval_samples, cfg.seed)
        phase = self._phase(cycle, "eval", cycle, requests, prompts.held_out)
        scores = evaluation.score(phase, cfg.eval_samples)
        if self.ranks.is_main:
            replace_text(path, json.dumps(scores, indent=2) + "\n")
        self.ranks.barrier()
        log.info("cycle %d: held-out %s", cycle, Score(scores["correct"], scores["prompts"]))

    # ---- the outputs

    def _summarize(self, cycle: int) -> None:
        """Add this cycle to ``summary.json``; with cycle 1 also add the evaluation of cycle 0."""
        for each in ([0] if cycle == 1 and self.prompts.held_out else []) + [cycle]:
            self.history.summarize(Cycle(self.out, each), partial(self._filter, each))

    def write_outputs(self, last: int) -> None:
        """Write ``adapter/`` and, if the config asks for it, ``merged/``.

        The adapter is that of the cycle with the best held-out score. Without held-out prompts it is the last
        cycle's.

        Args:
            last: number of the last trained cycle; 0 without one.

        Raises:
            UserError: no cycle was trained.
        """
        if not last:
            raise UserError("no prompt qualifies for the first cycle, so no cycle was trained")
        rows = self.history.until(last)
        self.history.write(last)
        if self.ranks.is_main:
            number = best(rows)
            with replace_folder(self.out / "adapter") as folder:
                shutil.copytree(Cycle(self.out, number).adapter, folder, dirs_exist_ok=True)
            if not self.cfg.save_adapter_weights_only:
                adapter_files.merge(self.learner.cfg.checkpointer, self.out / "adapter", self.out / "merged")
            log.info("%s", table(rows))
            log.info("adapter: %s, of cycle %d", self.out / "adapter", number)
            if self.prompts.held_out and not gained(rows, number):
                log.warning("no cycle scores higher on the held-out prompts than the initial model")
        self.ranks.barrier()

    def cleanup(self) -> None:
        """Close files and leave the process group."""
        if self.metric_logger is not None:
            self.metric_logger.close()
        self.ranks.close()


def evaluate_adapter(cfg: DictConfig, adapter: Path | None) -> dict[str, Any]:
    """Score an adapter on a config's ``eval_prompts``, without training.

    Args:
        cfg: config of ``raft_rocm``; its ``output_dir`` receives the records, so it needs one of its own.
        adapter: PEFT folder; None evaluates the model that the config starts from.

    Returns:
        The content of ``eval.json``, see :func:`rocm_ext.raft.evaluation.score`.

    Raises:
        UserError: ``eval_prompts`` is not set, or the evaluation cannot run.
        SystemExit: 128 + the signal's number, after Ctrl-C or SIGTERM.
    """
    if cfg.eval_prompts is None:
        raise UserError("eval_prompts is not set; set it to the prompts to evaluate on")
    if adapter is not None:
        cfg.checkpointer.adapter_checkpoint = str(adapter)
    cfg.prompts = cfg.metric_logger = None  # the evaluation neither reads training prompts nor logs
    raft = RAFT(cfg)
    raft.setup()
    try:
        with raft.verification():
            raft.evaluate(0)
    except Interrupted as stop:
        raise SystemExit(128 + stop.signum) from None
    finally:
        raft.cleanup()
    return Cycle(raft.out, 0).scores() or {}


@config.recipe_main("raft_rocm")
def main(cfg: DictConfig) -> None:
    """RAFT: `tune run raft_rocm --config NAME [key=value ...]`."""
    run(RAFT(cfg))


if __name__ == "__main__":
    main()
