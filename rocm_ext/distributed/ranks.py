"""The ranks of a run: one process, or several that torchrun started.

FSDP2 shards the frozen base weights. Adapters are a thousandth of the model and are replicated, so a step
needs one all-reduce of their gradients and no reduce-scatter per micro-batch. On one rank no method
communicates.
"""

import itertools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rocm_ext.base.errors import UserError
from rocm_ext.distributed import watch

_GLOO = "GLOO_SOCKET_IFNAME"
_MEET = 300.0  # seconds between the first rank to start and the last
_counters = itertools.count()


def world_size() -> int:
    """Number of processes torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Index of this process in the run; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def local_world_size() -> int:
    """Number of torchrun's processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def local_rank() -> int:
    """Index of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


def several_machines() -> bool:
    """Whether torchrun started processes on more than one machine."""
    return local_world_size() < world_size()


def machine_index() -> int:
    """Index of this machine in the run."""
    return int(os.environ.get("GROUP_RANK", 0))


def tell_others(text: str) -> None:
    """Tell the ranks on other machines why this rank ends; on one machine torchrun's launcher does it."""
    if not several_machines():
        return
    if watch.tell(text) or dist.is_initialized():
        return
    with suppress(Exception):  # the other machines may have ended
        _store(5).set(_key("failed"), f"rank {rank()} on {socket.gethostname()}: {text}")


@dataclass(frozen=True)
class Ranks:
    """This process as one of the ranks.

    Attributes:
        device: this rank's device.
        rank: index of this process.
        world: number of processes.
        mesh: FSDP2's device mesh; None on one rank.
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None

    @classmethod
    def from_env(cls, device: torch.device, patience: float = 60.0) -> "Ranks":
        """Join the process group that torchrun describes in the environment; without torchrun, use one rank.

        Args:
            device: this rank's device.
            patience: seconds without an answer after which another machine counts as lost and this process ends.

        Raises:
            UserError: several ranks run on a torch older than 2.7, or a rank on another machine is missing.
        """
        if world_size() == 1:
            return cls(device)
        if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (
            2,
            7,
        ):  # fully_shard(ignored_params=…)
            raise UserError(f"several ranks need torch 2.7 or newer, found {torch.__version__}")
        # gloo beside RCCL/NCCL: counts and flags must not wait for the GPU
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # A rank may wait long for another rank's last answers. torchrun detects dead ranks on its machine,
        # rocm_ext.distributed.watch detects them on other machines.
        forever = timedelta(days=1)
        if _GLOO not in os.environ and sys.platform == "linux" and (name := _interface()):
            os.environ[_GLOO] = name
        if several_machines():
            store = dist.PrefixStore("default_pg", _meet())
            dist.init_process_group(
                backend, timeout=forever, store=store, rank=rank(), world_size=world_size()
            )
        else:
            dist.init_process_group(backend, timeout=forever)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        ranks = cls(device, dist.get_rank(), dist.get_world_size(), mesh)
        if several_machines():
            watch.begin(ranks.rank, machine_index(), ranks.gather, patience)
        return ranks

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def shard(
        self, blocks: Iterable[nn.Module], root: nn.Module, replicated: set[nn.Parameter]
    ) -> None:
        """Shard ``root`` over the ranks.

        Args:
            blocks: modules inside ``root``; FSDP2 gathers one at a time.
            root: the model.
            replicated: parameters that stay complete on every rank.
        """
        if self.mesh is None:
            return
        from torch.distributed.fsdp import fully_shard

        for module in (*blocks, root):
            fully_shard(module, mesh=self.mesh, ignored_params=replicated)

    def shard_like(self, full: torch.Tensor, like: torch.Tensor, copy: bool = True) -> torch.Tensor:
        """Lay ``full`` out as ``like``: this rank's shard, or a copy on the device, in ``like``'s dtype.

        Every rank passes the full tensor, so the ranks do not communicate. Without ``copy`` the result may be ``full``.
        """
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(like, DTensor):
            full = full.to(self.device, like.dtype)
            return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
        return full.to(self.device, like.dtype, copy=copy)

    def sum(self, values: list[float]) -> list[float]:
        """Sum ``values`` over the ranks, one by one; counts below 2**53 are exact."""
        if self.mesh is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Sum the gradients over the ranks, in one all-reduce."""
        if self.mesh is None:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        for p, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = total.view_as(p)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` in rank order, on every rank.

        Values travel as pickles, so a forged rank could run code: see docs/several-machines.md.
        """
        if self.mesh is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def agree(self, value: Any) -> Any:
        """Return rank 0's ``value`` on every rank."""
        return self.gather(value)[0]

    def on_main(self, action: Callable[[], Any]) -> Any:
        """Run ``action`` on the main rank and return its result on every rank.

        Raises:
            UserError: on every rank, if ``action`` raises it.
        """
        result, failed = None, None
        if self.is_main:
            try:
                result = action()
            except UserError as error:
                failed = str(error), error.code
        result, failed = self.agree((result, failed))
        if failed:
            raise UserError(*failed)
        return result

    def counter(self) -> Callable[[], int]:
        """Make a counter that the ranks share; all ranks call this together.

        Returns:
            A function that increments the counter and returns its new value, without waiting for other ranks.
        """
        if self.mesh is None:
            return itertools.count(1).__next__
        key = f"rocm_ext/counter/{next(_counters)}"
        return lambda: dist.distributed_c10d._get_default_store().add(key, 1)

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.mesh is not None:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if self.mesh is not None:
            self.barrier()  # if a rank leaves early, the others' last collective fails
            watch.close()
            dist.destroy_process_group()


def _meet() -> dist.Store:
    """Wait for the ranks of all machines; return their store.

    Raises:
        UserError: a rank has failed, or is missing.
    """
    store, end = _store(_MEET), time.monotonic() + _MEET
    store.set(_key(f"rank {rank()}"), socket.gethostname())
    everyone = {number: _key(f"rank {number}") for number in range(world_size())}
    while not store.check(list(everyone.values())):
        if store.check([failed := _key("failed")]):
            said = " ".join(store.get(failed).decode(errors="replace").split())
            raise UserError("".join(c if c.isprintable() else "?" for c in said))
        if time.monotonic() > end:
            missing = ", ".join(
                str(number) for number, key in everyone.items() if not store.check([key])
            )
            raise UserError(
                f"no sign of rank {missing} on other machines for {_MEET:.0f} s; look at the messages there"
            )
        time.sleep(0.1)
    return store


def _store(seconds: float) -> dist.Store:
    """torchrun's store, which the ranks of all machines reach."""
    return next(dist.rendezvous("env://", timeout=timedelta(seconds=seconds)))[0]


def _key(name: str) -> str:
    return f"rocm_ext/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{name}"


def _interface() -> str | None:
    """The network interface that leads to rank 0; None: unknown.

    By default gloo takes the interface of this machine's name, which often is the loopback on several machines, and a
    network on one machine.
    """
    with suppress(OSError):
        kind, _, _, _, address = socket.getaddrinfo(
            os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            local = probe.getsockname()[0]
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address.partition("%")[0] == local for entry in addresses):
                return name
    return None
