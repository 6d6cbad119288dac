"""What recipes that learn from sampled answers share: prompts, verifier, model, engines, rollouts and evaluations."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rocm_ext import config
from rocm_ext.data.tokenizer import open_tokenizer
from rocm_ext.model.download import use_downloaded
from rocm_ext.plan import workload
from rocm_ext.rl.engines import open_engines, verify_workers
from rocm_ext.rl.prompts import PromptSet
from rocm_ext.rl.rollout import Job, OpenSession, Rollout, Workers
from rocm_ext.rl.server_check import ServerCheck
from rocm_ext.sampling import Sampling
from rocm_ext.train.builders import check_tokenizer, setup_metric_logger
from rocm_ext.train.interrupt import Interrupt
from rocm_ext.train.learner import Learner
from rocm_ext.train.machines import SAME_DATA, check_same
from rocm_ext.train.output_dir import pick_seed
from rocm_ext.train.runtime import Runtime
from rocm_ext.verifiers import Pool


class RLRecipe:
    """A recipe whose model answers prompts; a subclass says what it learns from the answers.

    A subclass overrides :meth:`training_config`, :meth:`recorded_seed`, :meth:`check_training` and
    :meth:`expected_work` where its own differ. As it is, it only evaluates.

    Args:
        cfg: config of ``raft_rocm``, ``grpo_rocm`` or a recipe that extends one of them.
        learner: class that builds the model.

    Raises:
        UserError: a sampling setting is out of range.
    """

    def __init__(self, cfg: DictConfig, learner: type[Learner] = Learner) -> None:
        self.cfg, self._learner = cfg, learner
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

    logs_long_rollouts_only = False
    sessions_stay_open = False  # whether sessions of engines in this process stay open during training

    def training_config(self) -> DictConfig:
        """Return the config of the learner, with all keys of the SFT recipe."""
        plain = {config.COMPONENT: "rocm_ext.losses.CrossEntropy"}
        return OmegaConf.create(config.trainer_config(self.cfg) | {"loss": plain})

    def recorded_seed(self) -> int | None:
        """Return the seed of the run that this one resumes; None for a fresh run. Ranks and config are ready."""
        return None

    @property
    def samples_new_adapters(self) -> bool:
        """Whether the run samples answers to train on with adapters that it has written."""
        return False

    def logprobs_for(self) -> list[str]:
        """Return the settings that need the token ids and log-probs of sampling; the learner is built."""
        return []

    def check_training(self) -> None:
        """Check what training needs of the learner, before the weights are read."""

    def expected_work(self) -> workload.Workload:
        """Estimate the rows of a training step, before any sampling."""
        return workload.sampled_rows(self.cfg, self.prompts.questions())

    def open(self) -> None:
        """Prepare prompts, model and engines: :meth:`check`, then the weights.

        Raises:
            UserError: the config, the prompts, the weights or the machine do not allow this run.
        """
        self.check()
        self.metric_logger = setup_metric_logger(self.cfg, self.runtime)
        self.learner.load()
        self.server_check = ServerCheck(self.learner, warn_unclear=not self.logs_long_rollouts_only)

    def check(self) -> None:
        """Do all of the set-up that needs no weights, cheap steps first, so that a user's mistake ends the run early.

        Raises:
            UserError: the config, the prompts or the machine do not allow this run.
        """
        cfg = self.cfg
        self.prompts = PromptSet(cfg)
        self.verifier_config = self.prompts.check_verifier()
        tokenizer = self._open_tokenizer()
        self.prompts.render(tokenizer)
        self._check_same_prompts()
        self.learner = self._learner(self.training_config(), self.runtime, tokenizer)
        self.prompts.check_model(self.learner.decoder)
        self.check_training()
        self.engines = open_engines(
            cfg, self.learner, self.stopped, self.sampling, self.logprobs_for(), self.samples_new_adapters
        )
        self.prompts.check_length(self.engines.max_seq_len)
        self.learner.plan(self.expected_work(), self.engines.layout_bytes if self.sessions_stay_open else 0)

    def _check_same_prompts(self) -> None:
        prompts = self.prompts
        parts = {"prompts": prompts.training, "eval_prompts": prompts.held_out}
        check_same(lambda: {key: prompts.fingerprint(part) for key, part in parts.items()}, self.ranks, SAME_DATA)

    def open_model(self) -> None:
        """Prepare model and engines alone, to sample outside of phases.

        Raises:
            UserError: the config, the weights or the machine do not allow it.
        """
        tokenizer = self._open_tokenizer()
        self.learner = self._learner(self.training_config(), self.runtime, tokenizer)
        self.engines = open_engines(self.cfg, self.learner, self.stopped, self.sampling, [], False)
        self.learner.load()

    def _open_tokenizer(self) -> Any:
        """Open the machine, and then the tokenizer; the config gets the model's folder and a seed."""
        cfg = self.cfg
        self.runtime = Runtime.open(self.training_config(), cfg)
        self.ranks = self.runtime.ranks
        use_downloaded(cfg, self.ranks)
        cfg.seed = pick_seed(cfg.seed, self.recorded_seed(), self.ranks)
        tokenizer = open_tokenizer(cfg)
        check_tokenizer(tokenizer, cfg)
        return tokenizer

    def stopped(self) -> bool:
        """Whether engines must end sampling early."""
        return self.interrupt.signum is not None or (self.workers is not None and self.workers.halted)

    @contextmanager
    def verification(self) -> Iterator[None]:
        """Run the worker processes that verify while the model samples; rollouts happen inside."""
        cfg = self.cfg
        with Pool(self.verifier_config, verify_workers(cfg), cfg.verify_timeout) as pool:
            self.workers = Workers(pool, self.ranks, self.interrupt, cfg.max_error_share, self.logs_long_rollouts_only)
            yield
        self.workers = None

    def rollout(self, job: Job, open_session: OpenSession, kind: type[Rollout] = Rollout) -> Rollout:
        """Begin to sample and verify, inside :meth:`verification`; see :meth:`rocm_ext.rl.rollout.Rollout.begin`."""
        assert self.workers is not None, "rollouts happen inside verification()"
        with self.interrupt:
            return kind.begin(job, self.workers, open_session)

    def cleanup(self) -> None:
        """Close files and leave the process group."""
        if self.metric_logger is not None:
            self.metric_logger.close()
        self.ranks.close()
