"""Sample with the present adapter: in this process, or on servers that load it from its folder."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

from torch import Tensor

from rocm_ext.data.prompts import Prompt
from rocm_ext.errors import UserError
from rocm_ext.files import disk_errors
from rocm_ext.generation import Completion, Request, Sampling, Session
from rocm_ext.rollouts.journal import Records
from rocm_ext.rollouts.phases import Begun, Phase, Rollouts
from rocm_ext.rollouts.recipe import RolloutRecipe

Wanted = Sequence[tuple[Request, Sampling]]


class Sampler:
    """Makes the phases of a run.

    Engines in this process open one session for the run, and each phase copies the adapter's values into it. For
    servers, each step writes the adapter to ``policy/`` in the output folder, and the servers load it from there. At
    steps 1, 2, 4, 8, and so on, :class:`~rocm_ext.rollouts.swap.Swap` checks that they sample with it.

    Args:
        recipe: the run, set up.
        step: returns the number of steps done; the present adapter is that of this step.
    """

    def __init__(self, recipe: RolloutRecipe, step: Callable[[], int]) -> None:
        self._recipe, self._step = recipe, step
        self._folder = recipe.out / "policy"
        self._written: Path | None = None
        self._check_from = 0  # step
        self._earlier: tuple[str, Mapping[str, Tensor]] | None = None  # the adapter of the last check
        self.on_servers = hasattr(recipe.engines.sample, "check_adapter")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the session of an engine in this process open; remove the servers' adapters at the end."""
        self._remove()  # what a killed run left
        try:
            with self._recipe.engines.keep_open():
                yield
        finally:
            self._remove()

    def _remove(self) -> None:
        if self._recipe.ranks.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)

    def phase(
        self,
        name: str,
        journals: tuple[Records, Records],
        wanted: Wanted,
        prompts: Sequence[Prompt],
        needs: Sequence[str] = (),
        *,
        earlier: int = 0,
    ) -> Phase:
        """Sample and verify with the present adapter; see :meth:`RolloutRecipe.phase`.

        Args:
            name, journals, wanted, prompts, earlier: as there.
            needs: settings that need the token ids and log-probs of each answer.
        """
        return self._recipe.phase(name, journals, wanted, prompts, lambda: self._session(wanted, needs), earlier)

    def begin(
        self,
        name: str,
        journals: tuple[Records, Records],
        wanted: Wanted,
        prompts: Sequence[Prompt],
        needs: Sequence[str] = (),
    ) -> "Beside":
        """Begin a phase with the present adapter, in a thread; servers only. Arguments as in :meth:`phase`."""
        rollouts = self._recipe.rollouts
        assert rollouts is not None
        begun = rollouts.begin(name, journals, wanted, {prompt.id: prompt.row for prompt in prompts})
        return Beside(rollouts, begun, lambda: self._session(wanted, needs), prompts)

    def check_again(self) -> None:
        """Check in the next phase that the servers sample with its adapter."""
        self._check_from = 0

    @contextmanager
    def _session(self, wanted: Wanted, needs: Sequence[str]) -> Iterator[Session]:
        recipe, step = self._recipe, self._step()
        adapter = self._adapter() if self.on_servers else None

        def check(session: Session) -> None:
            assert adapter is not None
            if step >= self._check_from:
                self._check_from = max(1, 2 * step)
                recipe.swap.check(session, wanted, adapter, self._earlier)
                self._earlier = f"the adapter of step {step}", recipe.learner.adapter_state()

        with recipe.engines.session("sample", adapter, check) as session:
            yield _Complete(session, needs) if needs else session

    def _adapter(self) -> Path | None:
        """Write the present adapter for the servers; return its folder, None for the base model."""
        recipe, step = self._recipe, self._step()
        first = recipe.cfg.checkpointer.get("adapter_checkpoint")
        if not step:
            return Path(first) if first else None
        folder = self._folder / f"step_{step}"

        def write() -> None:
            with disk_errors(folder):
                shutil.rmtree(self._folder, ignore_errors=True)  # no session is open
                folder.mkdir(parents=True)
                recipe.learner.write_adapter(folder)

        if self._written != folder:
            recipe.ranks.on_main(write)
            self._written = folder
        return folder


class _Complete:
    """A session whose answers all have token ids and log-probs.

    Args:
        session: a session.
        needs: settings that need them.
    """

    def __init__(self, session: Session, needs: Sequence[str]) -> None:
        self._session, self._needs = session, needs
        self.stats = session.stats

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        """Yield completions.

        Raises:
            UserError: an answer has no log-probs; it is not yielded, so that a resumed run asks for it again.
        """
        for completion in self._session.generate(requests, sampling):
            if len(completion.logprobs) != len(completion.tokens):
                request = completion.request
                raise UserError(
                    f"the answer to prompt {request.prompt_id}, sample {request.sample}, has no token ids and "
                    f"log-probs of sampling, which {' and '.join(self._needs)} needs. The answers before it are "
                    "saved; once the server returns them, continue with resume_from_checkpoint=True"
                )
            yield completion


class _Failed(BaseException):
    """This rank has failed, perhaps alone."""


class Beside:
    """A phase whose answers a thread samples while the ranks train.

    The thread uses no collective operation. All ranks construct the phase and call :meth:`wait`, :meth:`stop` and
    :meth:`finish` together.

    Args:
        rollouts: the run's.
        begun: the phase.
        session: opens a session on servers; all ranks leave it in :meth:`wait`.
        prompts: the phase's prompts.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        begun: Begun,
        session: Callable[[], AbstractContextManager[Session]],
        prompts: Sequence[Prompt],
    ) -> None:
        self.prompts = prompts
        self._rollouts, self._begun, self._stack = rollouts, begun, ExitStack()
        self._failed: list[BaseException] = []
        self._seconds = self._waited = 0.0
        self._thread: threading.Thread | None = None
        if begun.wanted_by_any:
            engine = self._stack.enter_context(session())
            self._thread = threading.Thread(target=self._sample, args=(engine,), name="sampler", daemon=True)
            self._thread.start()

    def _sample(self, engine: Session) -> None:
        began = time.perf_counter()
        try:
            self._begun.sample(engine)
        except BaseException as error:  # for `wait` to raise
            self._failed.append(error)
        finally:
            self._begun.pause()
            self._seconds = time.perf_counter() - began

    def wait(self) -> None:
        """Wait for the samples, and leave the session.

        Raises:
            UserError: sampling failed, on this rank or another.
        """
        with self._stack:
            self._join()
            if self._failed:
                raise self._failed.pop()

    def _join(self) -> None:
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join()
            self._thread = None
            self._waited += time.perf_counter() - began

    def _halt(self) -> None:
        self._rollouts.halted = True
        self._join()
        self._rollouts.halted = False

    def stop(self) -> None:
        """Stop sampling; what is sampled stays in the records."""
        self._halt()
        with suppress(UserError):
            self.wait()

    def abandon(self) -> None:
        """Stop sampling without the other ranks, because this one failed."""
        self._halt()
        with suppress(_Failed), self._stack:
            raise _Failed

    def finish(self) -> Phase:
        """Wait for samples and verdicts; see :meth:`rocm_ext.rollouts.phases.Begun.finish`.

        Returns:
            The phase. ``stats`` has ``hidden`` also: the seconds of sampling that passed while the ranks trained.
        """
        self.wait()
        phase = self._begun.finish()
        phase.stats["hidden"] = max(0.0, self._seconds - self._waited)
        return phase
