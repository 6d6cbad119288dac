"""Sample with the present adapter: in this process, or on servers that load it from its folder."""

import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from rocm_ext.data.prompts import Prompt
from rocm_ext.errors import UserError
from rocm_ext.files import disk_errors
from rocm_ext.generation import Request, Sampling, Session
from rocm_ext.rollouts.journal import Records
from rocm_ext.rollouts.phases import Begun, Phase
from rocm_ext.rollouts.recipe import RolloutRecipe

Wanted = Sequence[tuple[Request, Sampling]]


class Sampler:
    """Makes the phases of a run.

    Engines in this process open one session for the run, and each phase copies the adapter's values into it. For
    servers, each phase writes the adapter to ``policy/`` in the output folder, and the servers load it from there.

    Args:
        recipe: the run, set up.
        step: returns the number of steps done; the present adapter is that of this step.
    """

    def __init__(self, recipe: RolloutRecipe, step: Any) -> None:
        self._recipe, self._step = recipe, step
        self._folder = recipe.out / "policy"
        self._checked = False
        self.on_servers = hasattr(recipe.engines.sample, "check_adapter")

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Keep the session of an engine in this process open; remove the servers' adapters at the end."""
        recipe = self._recipe
        try:
            with recipe.engines.keep_open():
                yield
        finally:
            if recipe.ranks.is_main:
                shutil.rmtree(self._folder, ignore_errors=True)

    def phase(self, name: str, journals: tuple[Records, Records], wanted: Wanted, prompts: Sequence[Prompt]) -> Phase:
        """Sample and verify with the present adapter; see :meth:`RolloutRecipe.phase`."""
        return self._recipe.phase(name, journals, wanted, prompts, lambda: self._session(wanted))

    def begin(
        self, name: str, journals: tuple[Records, Records], wanted: Wanted, prompts: Sequence[Prompt]
    ) -> "Beside":
        """Begin a phase with the present adapter, in a thread; servers only."""
        assert self._recipe.rollouts is not None
        rows = {prompt.id: prompt.row for prompt in prompts}
        begun = self._recipe.rollouts.begin(name, journals, wanted, rows)
        return Beside(begun, self._session(wanted), prompts)

    def _session(self, wanted: Wanted) -> AbstractContextManager[Session]:
        adapter, earlier = self._adapter() if self.on_servers else (None, None)
        check = None
        if adapter is not None and not self._checked:
            # later phases show in the mismatch whether servers sample with the adapter
            self._checked = True
            state = None if earlier is None else (str(earlier), self._recipe.learner.read_adapter(earlier))

            def check(session: Session) -> None:
                self._recipe.swap.check(session, wanted, adapter, state)

        return self._recipe.engines.session("sample", adapter, check)

    def _adapter(self) -> tuple[Path | None, Path | None]:
        """Write the present adapter for the servers.

        Returns:
            Its folder, None for the base model; and the folder of the adapter before it, if there is one.
        """
        recipe, step = self._recipe, self._step()
        first = recipe.cfg.checkpointer.get("adapter_checkpoint")
        if not step:
            return (Path(first) if first else None), None
        folder = self._folder / f"step_{step}"

        def write() -> None:
            with disk_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                recipe.learner.write_adapter(folder)
                for other in self._folder.iterdir():  # the servers may still have the last one
                    if other.name not in (f"step_{step}", f"step_{step - 1}"):
                        shutil.rmtree(other, ignore_errors=True)

        recipe.ranks.on_main(write)
        before = self._folder / f"step_{step - 1}"
        return folder, before if before.exists() else None


class Beside:
    """A phase whose answers a thread samples while the ranks train.

    Args:
        begun: the phase.
        session: a session on servers; all ranks open it here and leave it in :meth:`wait`.
        prompts: the phase's prompts.
    """

    def __init__(self, begun: Begun, session: AbstractContextManager[Session], prompts: Sequence[Prompt]) -> None:
        self.prompts = prompts
        self._begun, self._stack = begun, ExitStack()
        self._failed: list[BaseException] = []
        self._thread: threading.Thread | None = None
        if begun.wanted_by_any:
            engine = self._stack.enter_context(session)
            self._thread = threading.Thread(target=self._sample, args=(engine,), name="sampler", daemon=True)
            self._thread.start()

    def _sample(self, engine: Session) -> None:
        try:
            self._begun.sample(engine)
        except BaseException as error:  # for `wait` to raise
            self._failed.append(error)

    def wait(self) -> None:
        """Wait for the samples, and leave the session.

        Raises:
            UserError: sampling failed.
        """
        with self._stack:
            if self._thread is not None:
                self._thread.join()
                self._thread = None
            if self._failed:
                raise self._failed.pop()

    def abandon(self) -> None:
        """Stop sampling, because the run ends; what is sampled stays in the records."""
        self._begun.stop()
        with suppress(UserError):
            self.wait()

    def finish(self) -> Phase:
        """Wait for samples and verdicts; see :meth:`rocm_ext.rollouts.phases.Begun.finish`."""
        self.wait()
        return self._begun.finish()
