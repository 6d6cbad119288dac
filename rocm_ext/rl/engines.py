"""The engines of a run, and the sessions in which they sample with the present adapter, here or on servers."""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from math import inf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from omegaconf import DictConfig
from torch import Tensor

from rocm_ext import config
from rocm_ext.base.errors import UserError
from rocm_ext.base.files import disk_errors
from rocm_ext.base.log import log
from rocm_ext.distributed.ranks import Ranks, local_world_size
from rocm_ext.machine.sysfs import host_memory
from rocm_ext.model.lora import adapters
from rocm_ext.model.token_rows import trained_tokens
from rocm_ext.plan.memory import frozen_bytes
from rocm_ext.rl.records import Sample
from rocm_ext.rl.rollout import Requests
from rocm_ext.rl.selection import to_rows
from rocm_ext.sampling import Completion, Engine, LocalEngine, Sampling, Session
from rocm_ext.train.learner import Learner, first_adapter
from rocm_ext.train.scoring import reference, score

# about 200 log-probs tell adapters apart whose log-probs differ by a hundredth
_ANSWERS = 6
_TOKENS = 32
_FAR = 0.1  # nats per token; rounding to bf16 on both sides gives about 0.01
_SURE = 3.0  # standard errors
_LEAST = 0.003  # nats per token; adapters that differ less do not stop a run, because rounding may hide the difference
_FEWEST = 8  # tokens that have a standard error


@dataclass
class Engines:
    """The engines of a run.

    Attributes:
        sample: engine for the answers to train on.
        eval: engine for evaluations; it may be the same.
        ranks: all processes of the run.
        free: returns the free bytes on the device.
        training: returns the bytes that training will allocate between two phases of sampling.
    """

    sample: Engine
    eval: Engine
    ranks: Ranks
    free: Callable[[], int]
    training: Callable[[], int]

    def __post_init__(self) -> None:
        # open sessions by the engine's id, inside keep_open
        self._kept: dict[int, Any] | None = None
        self._stack = ExitStack()
        self._opening = 0.0  # seconds
        self._logged: set[str] = set()

    @property
    def max_seq_len(self) -> float:
        """Positions that every engine in this process takes."""
        return min(getattr(engine, "max_seq_len", inf) for engine in (self.sample, self.eval))

    @property
    def layout_bytes(self) -> int:
        """Upper bound on the bytes that sessions hold during training inside :meth:`keep_open`, without caches."""
        size = 0
        engines: list[Any] = [self.sample]
        if self.eval is not self.sample:
            engines.append(self.eval)
        for engine in engines:
            if getattr(engine, "refreshes", False):
                size += engine.layout_bytes()
        return size

    @contextmanager
    def keep_open(self) -> Iterator[None]:
        """Keep sessions open between phases, where the engine can follow the model's training.

        The first :meth:`session` of such an engine opens it. Later ones copy the adapter's present values, and keep the
        layout of the weights, the key-value cache and the graphs. If training does not fit into memory with them, the
        cache and the graphs are freed at the end of a phase, and the layout if need be. Other engines open a session
        per phase.
        """
        self._kept = {}
        try:
            with self._stack:
                yield
        finally:
            self._kept = None

    @contextmanager
    def session(
        self, what: str, adapter: Path | None, check: Callable[[Session], None] | None = None
    ) -> Iterator[Session]:
        """Open a session, or continue one inside :meth:`keep_open`; check that servers sample with the adapter.

        All ranks call this together.

        Args:
            what: the phase, ``sample`` or ``eval``.
            adapter: folder of the adapter that the learner has loaded. None for the initial weights.
            check: checks the session of an engine that loads adapters from their folders. None to check nothing.

        Raises:
            UserError: the engine cannot sample with this adapter, or a server samples with another.
        """
        engine: Any = self.eval if what == "eval" else self.sample
        if self._kept is not None and getattr(engine, "refreshes", False):
            session = self._kept.get(id(engine))
            if session is not None:
                session.refresh()
            else:
                began = time.perf_counter()
                session = self._stack.enter_context(engine.session(adapter))
                session.reserve = self.training
                self._kept[id(engine)] = session
                self._opening = time.perf_counter() - began
            yield session
            self._make_room(self._kept)
            return
        with engine.session(adapter) as session:
            if check is not None and adapter is not None and hasattr(session, "ask_each"):
                check(session)
            yield session

    def _make_room(self, kept: dict[int, Any]) -> None:
        """Free the caches of the sessions kept open, and then their layouts, if training does not fit otherwise."""
        needed = self.training()
        short = self.free() < needed
        if short:
            for session in kept.values():
                session.release()
            self._log_once(
                "training and the key-value cache do not fit into memory together, so the cache is freed after each "
                "phase of sampling; each phase allocates it and captures its graphs again"
            )
        # all ranks lay out the weights together, because sharded ones are gathered
        if any(self.ranks.gather(short and self.free() < needed)):
            self._stack.close()
            kept.clear()
            self._log_once(
                "training and the weights that sampling copies do not fit into memory together, so each phase of "
                f"sampling copies them again, which takes {self._opening:.1f} s"
            )

    def _log_once(self, what: str) -> None:
        if what[:30] not in self._logged and self.ranks.is_main:
            self._logged.add(what[:30])
            log.info("%s", what)


@dataclass
class Policy:
    """Opens sessions with the adapter that the learner has at a step.

    Engines in this process may keep one session open through the run, and a rollout copies the adapter's values into
    it. Servers load the adapter from a folder: of the cycle, or ``policy/`` in the output folder. A check that they
    sample with it follows: of cycles in every session, otherwise at steps 1, 2, 4, 8, and so on.

    Attributes:
        engines: the run's.
        learner: the model, set up.
        server_check: checks the servers' adapters.
        out: the run's output folder.
        unit: what messages call a step.
        folder_of: returns the folder of a step's adapter. None if the run keeps no such folders.
        check_from: first step whose session checks the servers' adapter again.
    """

    engines: Engines
    learner: Learner
    server_check: "ServerCheck"
    out: Path
    unit: str
    folder_of: Callable[[int], Path] | None
    check_from: int = 0

    def __post_init__(self) -> None:
        self._ranks = self.learner.runtime.ranks
        self._folder = self.out / "policy"
        self._written: Path | None = None
        self._open: list[int] = []  # steps of the adapters of open sessions
        # name and weights at the last check
        self._checked: tuple[str, Mapping[str, Tensor]] | None = None

    @contextmanager
    def opened(self, stays_open: bool) -> Iterator[None]:
        """Keep the session of an engine in this process open if it ``stays_open``; remove the servers' adapters at the
        end."""
        self._remove()  # leftovers of a killed run
        try:
            with self.engines.keep_open() if stays_open else nullcontext():
                yield
        finally:
            self._remove()

    def _remove(self) -> None:
        if self._ranks.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def session(self, step: int, requests: Requests, phase: str = "sample") -> Iterator[Session]:
        """Open a session with the present adapter, of ``step``; all ranks call this together.

        Args:
            step: number of steps done.
            requests: requests of the session; a check of servers chooses prompts from them.
            phase: ``sample`` or ``eval``, for which there may be another engine.
        """
        adapter = None
        if hasattr(self.engines.sample, "check_adapter"):
            adapter = self._adapter(step)

        def check(session: Session) -> None:
            assert adapter is not None
            if step >= self.check_from:
                self.check_from = max(1, 2 * step) if self.folder_of is None else 0
                self.server_check.check(session, requests, adapter, self._checked)
                self._checked = f"the adapter of {self.unit} {step}", self.learner.adapter_state()

        self._open.append(step)
        try:
            with self.engines.session(phase, adapter, check) as session:
                yield session
        finally:
            self._open.remove(step)

    def _adapter(self, step: int) -> Path | None:
        """Return the folder of the present adapter for the servers, None for the base model; write it if need be."""
        if not step:
            return first_adapter(self.learner.cfg)
        if self.folder_of is not None:
            return self.folder_of(step)
        folder = self._folder / f"step_{step}"

        def write() -> None:
            in_use = {f"step_{open_}" for open_ in self._open}
            with disk_errors(folder):
                for old in self._folder.glob("*"):
                    if old.name not in in_use:
                        shutil.rmtree(old, ignore_errors=True)
                folder.mkdir(parents=True)
                self.learner.write_adapter(folder)

        if self._written != folder:
            self._ranks.on_main(write)
            self._written = folder
        return folder


@dataclass
class ServerCheck:
    """Checks that servers sample with the adapter that they have loaded.

    A server answers a few prompts. The check compares its log-probs with ours for the same tokens: with the new
    adapter, with the one before, and without any. It uses sampled tokens, because servers compute a prompt's log-probs
    without the output layer's adapter (vLLM issue 51594) or from a stale cache (vLLM issue 42019).

    Attributes:
        learner: the model, set up.
        warn_unclear: whether to warn of a server whose log-probs do not show which adapter it has.
    """

    learner: Learner
    warn_unclear: bool

    def __post_init__(self) -> None:
        self._warned: set[tuple[str, str]] = set()

    def check(
        self,
        session: Any,
        requests: Requests,
        adapter: Path,
        earlier: tuple[str, Mapping[str, Tensor]] | None,
    ) -> None:
        """Check that the servers of ``session`` sample with ``adapter``.

        Every rank calls this, because sharded weights are gathered from all. The main rank asks the servers.

        Args:
            session: a session with ``ask_each``.
            requests: requests with the prompts to ask, the same on all ranks.
            adapter: folder of the adapter that the session has loaded; the learner has the same one.
            earlier: name and weights of an adapter that a server may have kept; None for the first adapter.

        Raises:
            UserError: a server samples with the earlier adapter, or without an adapter.
        """
        ranks = self.learner.runtime.ranks
        by_tokens = {request.tokens: request for request, _ in requests}
        asked = list(by_tokens.values())[:_ANSWERS]
        _, run_sampling = requests[0]
        sampling = Sampling(min(_TOKENS, run_sampling.max_new_tokens))
        given = ranks.on_main(lambda: self._usable(session.ask_each(asked, sampling)))
        answers = [answer for of_server in given.values() for answer in of_server]
        if not answers:
            return
        ours = self._logprobs(answers)
        with reference(self.learner):
            others = {"without an adapter": self._logprobs(answers)}
        if earlier is not None:
            name, state = earlier
            with reference(self.learner, state, name):
                others[f"with {name}"] = self._logprobs(answers)
        ranks.on_main(lambda: self._compare(given, adapter, ours, others))

    def _usable(self, given: Mapping[str, Sequence[Completion]]) -> dict[str, list[Completion]]:
        usable = {}
        for url, answers in given.items():
            complete = [c for c in answers if len(c.logprobs) == len(c.tokens) > 0]
            usable[url] = complete
            if answers and not complete:
                self._warn(
                    url,
                    "returns no log-probs with token ids, so nothing checks that it uses new adapters",
                )
        return usable

    def _logprobs(self, answers: Sequence[Completion]) -> Tensor:
        """Return the log-probs of the tokens of ``answers``, end to end, on the CPU."""
        prompts = {answer.request.prompt_id: answer.request.tokens for answer in answers}
        samples = list(map(Sample.of, answers))
        rows, _ = to_rows(samples, prompts)
        logprobs = np.concatenate(score(self.learner, rows))
        return torch.from_numpy(logprobs).double()

    def _compare(
        self,
        given: Mapping[str, Sequence[Completion]],
        adapter: Path,
        ours: Tensor,
        others: Mapping[str, Tensor],
    ) -> None:
        begin = 0
        for url, answers in given.items():
            logprobs: list[float] = []
            for answer in answers:
                logprobs += answer.logprobs
            served = torch.tensor(logprobs, dtype=torch.float64)
            end = begin + len(served)
            if len(served) >= _FEWEST:
                others_here = {name: values[begin:end] for name, values in others.items()}
                self._judge(url, adapter, served, ours[begin:end], others_here)
            begin = end

    def _judge(
        self, url: str, adapter: Path, served: Tensor, ours: Tensor, others: Mapping[str, Tensor]
    ) -> None:
        """Compare a server's log-probs with ours under ``adapter`` and under ``others``."""
        distance = _gap(served, ours)
        tokens = f"its log-probs of {len(served)} tokens differ"
        stale = []
        unclear = []
        for other, logprobs in others.items():
            low, high = _share(served, ours, logprobs)
            if high < 0.5 and _gap(ours, logprobs) >= _LEAST:
                stale.append(other)
            if low <= 0.5 and _gap(ours, logprobs):
                unclear.append(other)
        if stale or unclear:
            nearest = min(stale or unclear, key=lambda other: _gap(served, others[other]))
            figures = (
                f"{tokens}, in nats per token, by {distance:.2g} from ours with {adapter} and by "
                f"{_gap(served, others[nearest]):.2g} from ours {nearest}"
            )
            if stale:
                raise UserError(
                    f"{url} does not sample with the adapter that it has loaded: {figures}. Restart this server, then "
                    "continue with resume_from_checkpoint=True"
                )
            if self.warn_unclear:
                self._warn(url, f"does not show clearly which adapter it samples with: {figures}")
        if distance > _FAR:
            self._warn(
                url,
                f"serves something else than our model: {tokens} by {distance:.2g} nats per token from ours. Its "
                "weights may be quantised or of another model, or its chat template differs",
            )

    def _warn(self, url: str, what: str) -> None:
        kind = (url, what[:20])
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("%s %s", url, what)


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().mean())


def _share(served: Tensor, new: Tensor, old: Tensor) -> tuple[float, float]:
    """Estimate the share s in ``served = old + s (new - old) + noise``: 1 with the new adapter, 0 with the old one.

    Returns:
        The interval of s: least squares, with standard errors that allow for unequal noise (HC1, White 1980).
    """
    change = new - old
    seen = served - old
    square = float(change @ change)
    if not square:
        return -inf, inf
    share = float(seen @ change) / square
    noise = (seen - share * change) * change
    count = len(change)
    error = sqrt(float(noise @ noise) * count / (count - 1)) / square
    return share - _SURE * error, share + _SURE * error


def open_engines(
    cfg: DictConfig,
    learner: Learner,
    stopped: Callable[[], bool],
    sampling: Sampling,
    logprobs_for: Sequence[str],
    samples_new_adapters: bool,
) -> Engines:
    """Build the config's engine, and check that it fits the run.

    Of ``decoder``, ``tokenizer``, ``free_memory``, ``ranks``, ``stopped`` and ``trace``, the engine gets the arguments
    of its constructor, and ``routes=True`` with ``router_replay``. If it cannot load adapters and only evaluations need
    this, they sample in this process.

    Args:
        cfg: config of a recipe that samples answers, or of another through
            :func:`rocm_ext.config.chosen_model.sampling_config`, as in evaluations of SFT and DPO.
        learner: the model to sample from; its weights may be missing.
        stopped: returns whether the user asked to stop.
        sampling: the run's settings of sampling, with the temperature of log-probs.
        logprobs_for, samples_new_adapters: see :class:`rocm_ext.rl.loop.RLRecipe`.

    Raises:
        UserError: the engine cannot run or cannot load adapters, or returns no log-probs and the config needs them.
    """
    engine = _build_engine(cfg, learner, stopped)
    _check_logprobs(engine, sampling, logprobs_for)
    # the first call comes once the weights are loaded
    weights = cache(partial(frozen_bytes, learner.decoder, learner.runtime.ranks.world))

    def training_memory() -> int:
        """Return the bytes at the peak of training, in addition to the model's weights."""
        return max(0, learner.planned_peak - weights())

    free = partial(free_memory, cfg, learner, beside_graphs=True)
    engine_for_evaluations = engine
    if hasattr(engine, "check_adapter"):
        if cfg.get("max_staleness") and hasattr(engine, "check_exchange"):
            engine.check_exchange()
        try:
            _check_adapters(cfg, learner, engine, samples_new_adapters)
        except UserError as error:
            engine_for_evaluations = _engine_without_servers(
                cfg, learner, error, samples_new_adapters
            )
    return Engines(engine, engine_for_evaluations, learner.runtime.ranks, free, training_memory)


def _build_engine(cfg: DictConfig, learner: Learner, stopped: Callable[[], bool]) -> Any:
    """Build the config's engine with the arguments that it takes, and check that it can run."""
    offered = {
        "decoder": learner.decoder,
        "tokenizer": learner.tokenizer,
        "free_memory": partial(free_memory, cfg, learner),
        "ranks": learner.runtime.ranks,
        "stopped": stopped,
        "trace": learner.runtime.trace,
    }
    if cfg.get("router_replay"):
        offered["routes"] = True
    taken = {}
    for name, value in offered.items():
        if config.takes(cfg.engine, name, key="engine"):
            taken[name] = value
    if "routes" in offered and "routes" not in taken:
        raise UserError(
            "router_replay is True, and the engine does not return which experts it chose; set router_replay=False, or "
            "engine._component_=rocm_ext.sampling.LocalEngine"
        )
    engine = config.instantiate(cfg.engine, key="engine", **taken)
    if cfg.profile_steps and cfg.prompts is not None and "trace" not in taken:
        log.info(
            "profile_steps: training is recorded; sampling is not, because it runs outside of this process"
        )
    engine.check()
    return engine


def _check_logprobs(engine: Any, sampling: Sampling, needed_for: Sequence[str]) -> None:
    """Check that an engine returns token ids and log-probs if settings, which ``needed_for`` names, need them."""
    if not needed_for:
        return
    settings = " and ".join(needed_for)
    if not (engine.exact_tokens and engine.has_logprobs):
        raise UserError(
            f"{settings}: the engine returns no token ids and log-probs of sampling, which this needs"
        )
    if hasattr(engine, "check_logprobs"):
        try:
            engine.check_logprobs(sampling)
        except UserError as error:
            raise UserError(f"{settings}: {error}") from error


def _engine_without_servers(
    cfg: DictConfig, learner: Learner, problem: UserError, samples_new_adapters: bool
) -> LocalEngine:
    """Return an engine in this process, where servers cannot load the adapters and only evaluations need them.

    Args:
        problem: why the servers cannot load them.

    Raises:
        UserError: training samples with adapters, too, or this process cannot sample.
    """
    first = first_adapter(cfg)
    if cfg.prompts is not None and (first or samples_new_adapters):
        without = ""
        if "cycles" in cfg and first:
            without = "start without an adapter_checkpoint and with cycles=1, or "
        elif "cycles" in cfg:
            without = "set cycles=1, or "
        elif cfg.get("max_staleness"):
            without = "set max_staleness=0 and "
        raise UserError(
            f"{problem}. Without such a server, {without}sample in this process with "
            f"engine._component_=rocm_ext.sampling.LocalEngine"
        ) from problem
    free = partial(free_memory, cfg, learner)
    local = LocalEngine(decoder=learner.decoder, tokenizer=learner.tokenizer, free_memory=free)
    try:
        local.check()
    except UserError as other:
        raise UserError(
            f"{problem}. Evaluations cannot sample in this process either: {other}"
        ) from problem
    log.warning("%s. Evaluations sample in this process instead", problem)
    return local


def _check_adapters(
    cfg: DictConfig, learner: Learner, engine: Any, samples_new_adapters: bool
) -> None:
    """Check that the engine can load the adapters that the run will need."""
    first = first_adapter(cfg)
    writes = cfg.prompts is not None and (samples_new_adapters or cfg.eval_prompts)
    scales = [layer.scale for _, layer in adapters(learner.decoder)]
    problem = ""
    if max(scales) > min(scales) * (1 + 1e-4):  # roots of ranks are not exact
        problem = (
            "servers such as vLLM scale all layers of an adapter alike, and alpha / r differs between layers; set "
            "model.alpha_pattern so that it does not"
        )
    elif trained_tokens(learner.decoder):
        problem = (
            "model.trainable_tokens: no server is known to load an adapter with rows of tokens"
        )
    if problem and (first or writes):
        raise UserError(problem)
    if first:
        engine.check_adapter(first)
    if not writes:
        return  # the run writes no adapter that it samples with
    # the server must see this path, so it is in the run's folder
    folder = Path(cfg.output_dir) / ".adapter-check"
    ranks = learner.runtime.ranks

    def write() -> None:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            learner.write_adapter(folder)

    try:
        ranks.on_main(write)
        engine.check_adapter(folder)
    finally:
        if ranks.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # not empty
                folder.parent.rmdir()


def free_memory(cfg: DictConfig, learner: Learner, beside_graphs: bool = False) -> int:
    """Return how many bytes may still be allocated on the device.

    With ``beside_graphs``, memory that only the graphs of a session can use counts as taken.
    """
    runtime: Any = learner.runtime
    if runtime.device.type == "cpu":
        return host_memory(Path("/"), "MemAvailable") // local_world_size()
    torch.cuda.empty_cache()
    measure = torch.cuda.memory_reserved if beside_graphs else torch.cuda.memory_allocated
    taken = measure(runtime.device)
    free = runtime.budget(taken) - taken
    if cfg.memory_fraction is not None:
        allowed = int(cfg.memory_fraction * runtime.machine.total_memory)
        free = min(free, allowed - taken)
    return free


def verify_workers(cfg: DictConfig) -> int:
    """Return ``verify_workers``, or if it is null this rank's share of the physical cores minus one, from 1 to 16."""
    if cfg.verify_workers is not None:
        return cfg.verify_workers
    # one core of a rank's share drives the sampler; the data loader is idle while the model samples
    cores = psutil.cpu_count(logical=False) or 1
    if hasattr(os, "sched_getaffinity"):  # a container may have fewer cores than the machine
        cores = min(cores, len(os.sched_getaffinity(0)))
    return min(16, max(1, cores // local_world_size() - 1))
