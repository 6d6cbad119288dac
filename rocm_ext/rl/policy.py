"""The model as engines sample from it: with the present adapter, in this process or on servers that load its folder."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path

from torch import Tensor

from rocm_ext.base.files import disk_errors
from rocm_ext.rl.engines import Engines
from rocm_ext.rl.rollout import Requests
from rocm_ext.rl.server_check import ServerCheck
from rocm_ext.sampling import Session
from rocm_ext.train.learner import Learner


class Policy:
    """Opens sessions with the adapter that the learner has at a step.

    Engines in this process open one session for the run, and each rollout copies the adapter's values into it. For
    servers, each step writes the adapter to ``policy/`` in the output folder, and the servers load it from there. At
    steps 1, 2, 4, 8, and so on, :class:`~rocm_ext.rl.server_check.ServerCheck` checks that they sample with it.

    Args:
        engines: the run's.
        learner: the model, set up.
        server_check: checks the servers' adapters.
        out: the run's output folder.

    Attributes:
        on_servers: whether servers sample.
    """

    unit = "step"

    def __init__(self, engines: Engines, learner: Learner, server_check: ServerCheck, out: Path) -> None:
        self._engines, self._learner, self._server_check = engines, learner, server_check
        self._ranks = learner.runtime.ranks
        self._out, self._folder = out, out / "policy"
        self._written: Path | None = None
        self._check_from = 0  # step
        self._checked: tuple[str, Mapping[str, Tensor]] | None = None  # name and weights at the last check
        self.on_servers = hasattr(engines.sample, "check_adapter")

    @contextmanager
    def opened(self, stays_open: bool) -> Iterator[None]:
        """Keep the session of an engine in this process open if it ``stays_open``; remove the servers' adapters at the
        end."""
        self._remove()  # what a killed run left
        try:
            with self._engines.keep_open() if stays_open else nullcontext():
                yield
        finally:
            self._remove()

    def _remove(self) -> None:
        if self._ranks.is_main:
            shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def session(self, step: int, requests: Requests, phase: str = "sample") -> Iterator[Session]:
        """Open a session with the present adapter, which is that of ``step``; all ranks call this together.

        Args:
            step: number of steps done.
            requests: requests of the session; a check of servers chooses prompts from them.
            phase: ``sample`` or ``eval``, for which there may be another engine.

        Raises:
            UserError: a server cannot load the adapter, or samples with another.
        """
        adapter = self._adapter(step) if self.on_servers else None

        def check(session: Session) -> None:
            assert adapter is not None
            if step >= self._check_from:
                self._check_from = self._next_check(step)
                self._server_check.check(session, requests, adapter, self._checked)
                self._checked = f"the adapter of {self.unit} {step}", self._learner.adapter_state()

        with self._engines.session(phase, adapter, check) as session:
            yield session

    def check_again(self) -> None:
        """Check in the next session that the servers sample with its adapter."""
        self._check_from = 0

    def _next_check(self, step: int) -> int:
        """Return the step from which on the servers are checked again after a check at ``step``."""
        return max(1, 2 * step)

    def _adapter(self, step: int) -> Path | None:
        """Write the present adapter for the servers; return its folder, None for the base model."""
        first = self._learner.cfg.checkpointer.get("adapter_checkpoint")
        if not step:
            return Path(first) if first else None
        folder = self._folder / f"step_{step}"

        def write() -> None:
            with disk_errors(folder):
                shutil.rmtree(self._folder, ignore_errors=True)  # no session is open
                folder.mkdir(parents=True)
                self._learner.write_adapter(folder)

        if self._written != folder:
            self._ranks.on_main(write)
            self._written = folder
        return folder


class CyclePolicy(Policy):
    """Opens sessions with the adapters in the folders of RAFT's cycles, and checks servers in each of them."""

    unit = "cycle"

    def _next_check(self, step: int) -> int:
        return 0

    def _adapter(self, step: int) -> Path | None:
        return self._out / f"cycle_{step}" / "adapter" if step else super()._adapter(0)
