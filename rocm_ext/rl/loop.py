"""The loop of recipes that learn from sampled answers: RAFT, GRPO and distillation are presets of it."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.base.log import log
from rocm_ext.config.checks.rollouts import check_sampled_values
from rocm_ext.config.checks.training import check_values
from rocm_ext.data import overview
from rocm_ext.data.prompts import Prompt
from rocm_ext.data.rows import Rows
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.environments import Environments
from rocm_ext.model.download import use_downloaded
from rocm_ext.plan import workload
from rocm_ext.plan.workload import rows_of_update
from rocm_ext.rl import evaluation
from rocm_ext.rl.ahead import Ahead, RolloutAhead
from rocm_ext.rl.conversations import ConversationQueue, Limits
from rocm_ext.rl.engines import Policy, ServerCheck, open_engines, verify_workers
from rocm_ext.rl.prompts import PromptSet
from rocm_ext.rl.records import Records, is_correct, key_of
from rocm_ext.rl.rollout import Answers, Job, OpenSession, Requests, Rollout, Workers
from rocm_ext.rl.selection import Selected
from rocm_ext.rl.trainer import PolicyTrainer
from rocm_ext.runs.records import ROWS
from rocm_ext.sampling import Sampling, Session
from rocm_ext.train.builders import check_tokenizer
from rocm_ext.train.forgetting import in_words
from rocm_ext.train.learner import Learner
from rocm_ext.train.lifecycle import Interrupt, Interrupted, Runtime
from rocm_ext.train.machines import SAME_DATA, check_same
from rocm_ext.train.metrics import log_config, setup_metric_logger
from rocm_ext.train.output_dir import OutputDir, pick_seed
from rocm_ext.verifiers import Pool, Result


class RLRecipe:
    """A recipe whose model answers prompts. This class only evaluates; subclasses train on the answers.

    Args:
        cfg: config with the keys of ``defaults/sampling.yaml``.
        learner: class that builds the model.

    Attributes:
        logs_long_rollouts_only: whether short rollouts log no progress.
        sessions_stay_open: whether sessions of engines in this process stay open during training.
        judges: whether answers need a verifier or an environment.
        samples_new_adapters: whether adapters of the run sample answers to train on.
    """

    logs_long_rollouts_only = False
    sessions_stay_open = False
    samples_new_adapters = False
    judges = True

    unit = "step"  # what messages call a step
    records: Records

    def __init__(
        self, cfg: DictConfig, learner: Callable[[DictConfig, Runtime, Any], Learner] = Learner
    ) -> None:
        self.cfg = cfg
        self._learner_class = learner
        self.sampling = Sampling(
            max_new_tokens=cfg.max_new_tokens,
            temperature=cfg.temperature,
            top_k=cfg.top_k,
            top_p=cfg.top_p,
            min_p=cfg.min_p,
            stop_strings=tuple(cfg.stop_strings),
        )
        self.out = Path(cfg.output_dir)
        self.interrupt = Interrupt()  # all rollouts share it
        self.metric_logger: Any = None
        self.workers: Workers | None = None  # set while the verification processes run

    def training_config(self) -> DictConfig:
        """Return the config of the learner, with all keys of the SFT recipe."""
        trainer = config.trainer_config(self.cfg)
        return OmegaConf.create(trainer | {"loss": self.objective_config()})

    def objective_config(self) -> dict[str, object]:
        """Return the component of the learner's objective."""
        return {config.COMPONENT: "rocm_ext.losses.CrossEntropy"}

    def open_folder(self) -> None:
        """Open the output folder of a run that trains, and choose the config's seed if it has none."""
        self.cfg.seed = pick_seed(self.cfg.seed, None, self.ranks)

    def logprobs_for(self) -> list[str]:
        """Return the settings that need the token ids and log-probs of sampling; the learner is built."""
        return []

    def check_training(self) -> None:
        """Check that the learner fits the training, before the weights are read."""

    @property
    def earlier_plan(self) -> dict[str, int]:
        """The memory plan of the checkpoint that the run resumes; empty without one."""
        return {}

    def expected_work(self) -> workload.Workload:
        """Estimate the rows of a training step, before any sampling."""
        return workload.sampled_rows(self.cfg, self.prompts.questions())

    def load(self) -> None:
        """Read the weights, after :meth:`check`."""
        self.learner.load()

    def setup(self) -> None:
        """Prepare the run: :meth:`check`, then :meth:`load`."""
        self.check()
        self.metric_logger = setup_metric_logger(self.cfg, self.ranks.is_main)
        self.load()
        self.server_check = ServerCheck(self.learner, warn_unclear=not self.logs_long_rollouts_only)

    def check(self) -> None:
        """Do all set-up that needs no weights, cheap steps first, so that a user's mistake ends the run early."""
        cfg = self.cfg
        self.prompts = PromptSet(cfg)
        self.verifiers = self.prompts.check_verifier(required=self.judges)
        tokenizer = self._open_tokenizer()
        self.prompts.render(tokenizer)
        check_same(
            lambda: {
                "prompts": self.prompts.fingerprint(self.prompts.training),
                "eval_prompts": self.prompts.fingerprint_held_out(),
            },
            self.ranks,
            SAME_DATA,
        )
        self.learner = self._learner_class(self.training_config(), self.runtime, tokenizer)
        self.prompts.check_model(self.learner.decoder)
        self.check_training()
        self.engines = open_engines(
            cfg,
            self.learner,
            self.stopped,
            self.sampling,
            self.logprobs_for(),
            self.samples_new_adapters,
        )
        self.prompts.check_length(self.engines.max_seq_len)
        self.plan_memory(self.expected_work())

    def plan_memory(self, work: workload.Workload, beside: int = 0) -> None:
        """Plan the memory of training on ``work``, with ``beside`` bytes in use and open sessions of the sampler."""
        if self.sessions_stay_open:
            beside += self.engines.layout_bytes
        self.learner.plan(work, beside, before=self.earlier_plan)

    def open_model(self, work: workload.Workload | None = None) -> None:
        """Prepare only model and engines, to sample outside of phases; plan memory if rows like ``work`` will train."""
        tokenizer = self._open_tokenizer()
        self.learner = self._learner_class(self.training_config(), self.runtime, tokenizer)
        self.engines = open_engines(self.cfg, self.learner, self.stopped, self.sampling, [], False)
        if work is not None:
            self.plan_memory(work)
            self.learner.check_budget()
        self.learner.load()

    def _open_tokenizer(self) -> Any:
        """Open the machine, and then the tokenizer; the config gets the model's folder and a seed."""
        cfg = self.cfg
        self.runtime = Runtime.open(self.training_config(), cfg)
        self.ranks = self.runtime.ranks
        use_downloaded(cfg, self.ranks)
        self.open_folder()
        tokenizer = open_tokenizer(cfg)
        check_tokenizer(tokenizer, cfg)
        return tokenizer

    def stopped(self) -> bool:
        """Whether engines must end sampling early."""
        halted = self.workers is not None and self.workers.halted
        return halted or self.interrupt.signum is not None

    @contextmanager
    def verification(self) -> Iterator[None]:
        """Context of rollouts, with the processes of the verifier or of environments."""
        cfg = self.cfg
        workers = Workers(
            self.ranks, self.interrupt, cfg.max_error_share, self.logs_long_rollouts_only
        )
        with ExitStack() as stack:
            if cfg.environment is None:
                pools: dict[str, Pool] = {}  # sets with equal verifiers share one
                for name, verifier in self.verifiers.items():
                    described = repr(verifier)
                    if described not in pools:
                        pool = Pool(verifier, verify_workers(cfg), cfg.verify_timeout)
                        pools[described] = stack.enter_context(pool)
                    workers.pools[name] = pools[described]
            else:
                component = self.verifiers[""]
                environments = stack.enter_context(Environments(component, cfg.verify_timeout))
                limits = Limits(cfg.max_turns, cfg.max_environment_tokens)
                workers.conversations = lambda queue, sampling, *records: ConversationQueue(
                    queue,
                    sampling,
                    environments,
                    self.learner.tokenizer,
                    limits,
                    self.stopped,
                    *records,
                )
            self.workers = workers
            yield
        self.workers = None

    def rollout(
        self, job: Job, open_session: OpenSession, kind: type[Rollout] = Rollout
    ) -> Rollout:
        """Begin to sample and verify, inside :meth:`verification`; see :class:`rocm_ext.rl.rollout.Rollout`."""
        assert self.workers is not None, "rollouts happen inside verification()"
        with self.interrupt:
            return kind(job, self.workers, open_session)

    def answer_held_out(
        self, step: int, open_session: Callable[[Requests], AbstractContextManager[Session]]
    ) -> Answers:
        """Answer the held-out prompts with the present adapter, of ``step``, inside :meth:`verification`."""
        requests = self.prompts.evaluation_requests(self.sampling)
        name = f"evaluation at {self.unit} {step}"
        records = self.records.phase(step, "eval")
        job = Job(name, requests, self.prompts.held_out, *records)
        return self.rollout(job, lambda: open_session(requests)).finish()

    def report_gain_at(self, step: int, looks: int, target: str) -> None:
        """Log the gain of the adapter of ``step``, the best of so many ``looks``, over the initial model.

        ``target`` is the name of the set whose prompts count.
        """
        if self.ranks.is_main:
            before = self._right(0, target)
            after = self._right(step, target)
            evaluation.report_gain(before, after, f"{self.unit} {step}", looks)

    def _right(self, step: int, target: str) -> dict[str, bool]:
        """Read whether the greedy answers after ``step`` are right, of the set ``target``."""
        right = evaluation.greedy(self.records.verdicts(step, "eval"))
        prompts = self.prompts.sets[target]
        return {prompt.id: right[prompt.id] for prompt in prompts if prompt.id in right}

    def cleanup(self) -> None:
        """Close files and leave the process group."""
        if self.metric_logger is not None:
            self.metric_logger.close()
        self.ranks.close()


class Loop(RLRecipe, ABC):
    """Sample, verify, select, make rows, update, evaluate and save, and again.

    A preset makes four choices: :meth:`select` chooses answers and their worth, :meth:`training_config` the objective,
    the trainer how long optimiser and adapter live, and :meth:`choose` and :meth:`more_prompts` the size of a step.

    ``samples.jsonl`` and ``verdicts.jsonl`` have all answers, ``metrics.jsonl`` the measurements, and ``checkpoints``
    the state. A resumed run continues from the last checkpoint, and reads later answers from the records.

    Args:
        cfg: config of the recipe, from :func:`rocm_ext.config.load`.
        learner: class that builds the model.
        trainer: class that updates the adapter.

    Attributes:
        recipe: name of the recipe of this library whose values are checked. Empty for a recipe that extends none.
        trainer_cls: class that updates the adapter, unless the caller brings another.
        steps: steps of the run.
        prompts_per_step: prompts that a step asks at first, at most.
        evaluate_every: steps from one evaluation to the next.
        max_staleness: steps by which an answer's adapter may be older than the adapter that it trains.
        entropy_steps: newest steps whose mean entropy ``min_entropy`` limits.
    """

    recipe = ""
    trainer_cls = PolicyTrainer
    entropy_steps = 3  # one step alone is noisy

    def __init__(
        self,
        cfg: DictConfig,
        learner: type[Learner] = Learner,
        trainer: type[PolicyTrainer] | None = None,
    ) -> None:
        if self.recipe:
            check_sampled_values(cfg, self.recipe)
        super().__init__(cfg, learner)
        check_values(self.training_config())
        self.trainer_cls = trainer or self.trainer_cls
        self.unit = self.trainer_cls.unit
        self.steps: int = cfg[f"{self.unit}s"]
        self.evaluate_every: int = cfg[f"eval_every_n_{self.unit}s"]
        # null: all that qualify
        self.prompts_per_step: int = cfg[f"prompts_per_{self.unit}"] or sys.maxsize
        self.max_staleness: int = cfg.get("max_staleness", 0)

    # ---- the choices of a preset

    def training_config(self) -> DictConfig:
        """Return the config of the learner, with the rows of an update."""
        answers = self.cfg.prompts_per_step * self.cfg.samples_per_prompt
        trainer = super().training_config()
        trainer.sequences_per_step = rows_of_update(self.cfg, answers)
        return trainer

    def logprobs_for(self) -> list[str]:
        """Return the settings that need the token ids and log-probs of sampling."""
        return ["min_entropy"] if self.cfg.min_entropy is not None else []

    def passes(self, result: Result) -> bool:
        """Return whether an answer counts for its prompt's pass rate."""
        return is_correct(result)

    @abstractmethod
    def choose(self, step: int, count: int, exclude: Collection[str] = ()) -> list[Prompt]:
        """Choose the prompts of a step.

        Args:
            step: number of the step, from 1.
            count: number of prompts, at most.
            exclude: ids of prompts that the step has asked already.
        """

    def more_prompts(
        self, step: int, rounds: int, selected: Selected, asked: Sequence[Prompt]
    ) -> list[Prompt]:
        """Choose the prompts of another round of the step's sampling; none if the step has enough answers.

        Args:
            step: number of the step.
            rounds: number of rounds so far.
            selected: the selection of their answers.
            asked: the prompts so far.
        """
        return []

    @abstractmethod
    def select(self, rounds: Sequence[Answers], asked: Sequence[str]) -> Selected:
        """Choose the answers to train on, and their worth.

        Args:
            rounds: the rounds of the step's sampling.
            asked: ids of their prompts, in order.
        """

    def finish_sampling(self, step: int, selected: Selected) -> None:
        """Run after a step's sampling, before its updates."""
        self.drop_old_samples(step)

    @abstractmethod
    def rows(self, selected: Selected) -> tuple[Rows, list[str]]:
        """Convert the answers to train on to rows with the objective's columns; return them with their prompts."""

    def stop_reason(self) -> str | None:
        """Return why the run ends before its last step; None to continue.

        Raises:
            UserError: the run cannot learn anything.
        """
        return evaluation.stop_reason(self.trainer.lines, self.cfg, self.entropy_steps)

    # ---- set-up

    def open_folder(self) -> None:
        """Open the output folder; the config gets the seed of the run that it continues."""
        self.folder = OutputDir.open(self.cfg, self.ranks)

    @property
    def earlier_plan(self) -> dict[str, int]:
        """See :attr:`RLRecipe.earlier_plan`."""
        return self.folder.earlier_plan(self.cfg)

    def check(self) -> None:
        """Do all set-up that needs no weights; see :meth:`RLRecipe.check`."""
        super().check()
        if self.folder.resumed is None:  # a run that has begun has shown that it fits
            self.learner.check_budget()

    def setup(self) -> None:
        """Prepare the run; see :meth:`RLRecipe.setup`. Then claim the output folder."""
        super().setup()
        self.trainer = self.trainer_cls(
            self.learner,
            self.cfg,
            self.folder,
            inputs=self.inputs(),
            metric_logger=self.metric_logger,
            interrupt=self.interrupt,
        )
        self.trainer.open()
        if self.trainer.fresh and self.ranks.is_main:
            tokenizer, window = self.learner.tokenizer, self.learner.decoder.max_seq_len
            overview.write(self.out / ROWS, lambda: self.prompts.overview(tokenizer, window))
        self.records = Records(
            self.out,
            self.ranks,
            self.trainer.step,
            self.trainer.evaluated,
            self.passes,
            self.trainer.asked,
            self.cfg.samples_per_prompt,
            all_samples=self.cfg.get("keep_samples", "all") == "all",
        )
        self.policy = Policy(
            self.engines,
            self.learner,
            self.server_check,
            self.out,
            self.unit,
            self.trainer.adapter_folder,
        )
        self.ahead: Ahead | None = None  # answers of coming steps
        log_config(self.metric_logger, self.cfg)

    def inputs(self) -> dict[str, str | int]:
        """Return values that a resumed run shares with the one before."""
        return {
            "prompts": self.prompts.fingerprint(self.prompts.training),
            "eval prompts": self.prompts.fingerprint_held_out(),
        }

    # ---- the run

    def train(self) -> None:
        """Do all steps, then write the outputs.

        Raises:
            Interrupted: the user asked to stop; all finished work is saved.
        """
        trainer = self.trainer
        if trainer.step >= self.steps:
            log.info(
                "all %d %ss are done already; raise %ss to go on", self.steps, self.unit, self.unit
            )
        with self.interrupt, self.verification(), self.policy.opened(self.sessions_stay_open):
            try:
                self.evaluate_if_due()
                self.sample_ahead()
                while trainer.step < self.steps:
                    trainer.stopped = self.stop_reason()
                    if trainer.stopped is not None:
                        break
                    self.step()
                self.stop_sampling()
                self.evaluate_if_due(last=True)
                trainer.save_if_new()
                self.drop_old_samples(trainer.step, last=True)
            except Interrupted:
                trainer.save_if_new()
                self.stop_sampling()
                raise
            finally:
                if self.ahead is not None:
                    self.ahead.abandon()
                self.records.close()
        if trainer.stopped:
            log.info("stopped: %s", trainer.stopped)
        trainer.write_outputs()
        self.report_gain()

    def step(self) -> None:
        """Do one step: sample, verify, select, update, log; perhaps evaluate and save.

        Raises:
            Interrupted: the user asked to stop; all finished work is saved.
        """
        began = time.perf_counter()
        trainer = self.trainer
        number = trainer.step + 1
        selected = self.sample(number)
        self.records.finish(number, selected.results)
        self.finish_sampling(number, selected)
        if selected.advantages:
            rows, groups = self.rows(selected)
            updates = trainer.train_on(rows, groups)
        else:
            updates = trainer.train_on_nothing()
        trainer.finish_step(selected, updates, time.perf_counter() - began)
        self.warn_if_sampler_drifts()
        self.sample_ahead()
        self.evaluate_if_due()
        trainer.save_if_due()
        self.interrupt.check(f"at {self.unit} {number}", self.ranks)

    def drop_old_samples(self, step: int, last: bool = False) -> None:
        """Remove samples that are older than ``keep_samples`` steps and than the last checkpoint, once they are many.

        ``step`` is the newest step with samples. With ``last`` all old samples go.
        """
        keep = self.cfg.get("keep_samples", "all")
        if keep != "all" and (last or step % keep == 0):
            saved, _ = self.trainer.saved
            self.records.keep_samples_from(min(step - keep, saved) + 1, at_once=last)

    # ---- sampling

    def sample(self, step: int) -> Selected:
        """Sample and verify the answers of a step, until there are enough to train on."""
        if self.ahead is not None:
            job, answers = self.ahead.finish()
        else:
            prompts = self.choose(step, self.prompts_per_step)
            job = self.job(step, 0, prompts)
            answers = self.rollout_of(job).finish()
        asked = list(job.prompts)
        rounds = [answers]
        while True:
            selected = self.select(rounds, [prompt.id for prompt in asked])
            refill = self.more_prompts(step, len(rounds), selected, asked)
            if not refill:
                return selected
            asked += refill
            job = self.job(step, len(rounds), refill, earlier=len(selected.samples))
            rounds.append(self.rollout_of(job).finish())

    def sample_ahead(self) -> None:
        """With ``max_staleness``, let servers sample coming steps; prompts with recorded answers come first."""
        done = self.trainer.step
        policy = self.trainer.adapter_step
        if not self.max_staleness or done == self.steps:
            return
        if self.ahead is None:
            assert self.workers is not None, "sampling happens inside verification()"
            self.ahead = Ahead(self.workers, done, self.max_staleness)
        # the check that servers use the adapter asks a few prompts
        few_prompts = self.prompts.training[:8]
        few_requests = self.prompts.requests(few_prompts, done, self.sampling)
        self.ahead.use(policy, lambda: self.policy.session(policy, few_requests))
        last = min(done + 1 + self.max_staleness, self.steps)
        for step in range(self.ahead.last + 1, last + 1):
            begun = self.records.begun(step)
            asked = [prompt for prompt in self.prompts.training if prompt.id in begun]
            missing = self.prompts_per_step - len(asked)
            asked += self.choose(step, missing, exclude=begun)
            self.records.begin(step, [prompt.id for prompt in asked])
            job = self.job(step, 0, asked)
            self.ahead.add(self.rollout_of(job, RolloutAhead))

    def job(self, step: int, round_: int, prompts: Sequence[Prompt], earlier: int = 0) -> Job:
        """Return the job of a round of a step's sampling, after ``earlier`` answers of the step.

        Answers of an earlier process stay if the step trains on answers of their adapter.
        """
        samples, verdicts, turns = self.records.phase(
            step, "sample", round_, policy=self.trainer.adapter_step
        )
        samples.drop(lambda record: not self.trains_on(record["policy"], step))
        verdicts.drop(lambda record: key_of(record) not in samples.records)
        requests = self.prompts.requests(prompts, step, self.sampling)
        name = f"{self.unit} {step}"
        if round_:
            name += f" refill {round_}"
        return Job(name, requests, prompts, samples, verdicts, turns, self.logprobs_for(), earlier)

    def trains_on(self, policy: int, step: int) -> bool:
        """Return whether ``step`` trains on answers of the adapter of step ``policy``."""
        return policy >= step - 1 - self.max_staleness

    def rollout_of(self, job: Job, kind: type[Rollout] = Rollout) -> Any:
        """Begin a rollout with the present adapter."""
        step = self.trainer.adapter_step
        return self.rollout(job, lambda: self.policy.session(step, job.requests), kind)

    def stop_sampling(self) -> None:
        """Stop sampling in the background, on all ranks together; a resumed run uses the answers so far."""
        if self.ahead is not None:
            self.ahead.stop()
            self.ahead = None

    def warn_if_sampler_drifts(self) -> None:
        """Warn if sampler and trainer differ more than in earlier steps, and check the servers' adapters again."""
        warning = evaluation.mismatch_warning(self.trainer.lines)
        if warning:
            self.policy.check_from = 0
            if self.ranks.is_main:
                log.warning("%s", warning)

    # ---- evaluation

    def evaluate_if_due(self, last: bool = False) -> None:
        """Evaluate the present adapter on the held-out prompts, every so many steps and at the ``last``.

        Raises:
            Interrupted: another process evaluates, or continues the training.
        """
        step = self.trainer.adapter_step
        due = last or step % self.evaluate_every == 0 or step == self.steps
        if not self.prompts.held_out or not due or self.trainer.evaluated == step:
            return
        with self.trainer.evaluating(f"the evaluation at {self.unit} {step}"):
            self.evaluate(step)

    def evaluate(self, step: int) -> None:
        """Evaluate the present adapter, of ``step``, on the held-out prompts."""
        answers = self.answer_held_out(
            step, lambda requests: self.policy.session(step, requests, "eval")
        )
        judged = evaluation.judge(answers, self.prompts.sets, self.cfg.eval_samples)
        self.trainer.finish_evaluation(step, judged, answers.stats)
        log.info("%s %d: %s", self.unit, step, in_words(judged))

    def report_gain(self) -> None:
        """Log the best adapter's gain on the held-out prompts over the initial model."""
        best = self.trainer.best
        if best is not None:
            evaluations = evaluation.evaluations_of(self.trainer.lines)
            looks = sum(line["step"] > 0 for line in evaluations)
            self.report_gain_at(best["step"], looks, self.trainer.forgetting.target)
