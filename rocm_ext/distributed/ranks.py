"""The ranks of a run: one process, or several that torchrun started.

FSDP2 shards the frozen base weights. Adapters are a thousandth of the model and are replicated, so a step
needs one all-reduce of their gradients and no reduce-scatter per micro-batch. On one rank no method
communicates.
"""

import itertools
import os
import socket
import sys
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

_GLOO = "GLOO_SOCKET_IFNAME"
_MEET = 300.0  # seconds between the first rank that starts and the last
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
    def from_env(cls, device: torch.device, timeout: float = 7200.0) -> "Ranks":
        """Join the process group that torchrun describes in the environment; without torchrun, use one rank.

        Args:
            device: this rank's device.
            timeout: seconds that a rank waits for the others in a collective before it fails. A healthy rank may wait
                long for another one's last answers.

        Raises:
            UserError: several ranks run on a torch older than 2.7, or a rank is missing.
        """
        if world_size() == 1:
            return cls(device)
        major, minor, *_ = torch.__version__.split(".")
        if (int(major), int(minor)) < (2, 7):  # older ones lack fully_shard(ignored_params=…)
            raise UserError(f"several ranks need torch 2.7 or newer, found {torch.__version__}")
        # gloo beside RCCL/NCCL: counts and flags must not wait for the GPU
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if sys.platform == "linux" and _GLOO not in os.environ:
            interface = _interface()
            if interface is not None:
                os.environ[_GLOO] = interface
        patience = timedelta(seconds=timeout)
        if several_machines():
            store = _meet()
            store.set_timeout(patience)
            dist.init_process_group(
                backend, timeout=patience, store=store, rank=rank(), world_size=world_size()
            )
        else:  # torchrun ends all ranks of its machine if one ends
            dist.init_process_group(backend, timeout=patience)
        mesh = init_device_mesh(device.type, (world_size(),))
        return cls(device, rank(), world_size(), mesh)

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
        gradients = []
        for p in parameters:
            gradient = torch.zeros_like(p) if p.grad is None else p.grad
            gradients.append(gradient.reshape(-1))
        flat = torch.cat(gradients)
        dist.all_reduce(flat)
        sizes = [p.numel() for p in parameters]
        for p, total in zip(parameters, flat.split(sizes), strict=True):
            p.grad = total.view_as(p)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` in rank order, on every rank.

        Values travel as pickles, so a forged rank could run code: see docs/several-machines.md.
        """
        if self.mesh is None:
            return [value]
        values = [None] * self.world
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
            dist.destroy_process_group()


def _meet() -> dist.Store:
    """torchrun's store, once the ranks of all machines have come.

    Raises:
        UserError: a rank is missing, or machine 0 has left.
    """
    patience = timedelta(seconds=_MEET)
    store, _, _ = next(dist.rendezvous("env://", timeout=patience))
    keys = [f"rocm_ext/rank/{number}" for number in range(world_size())]
    store.set(keys[rank()], "")
    missing: list[str] = []
    try:
        store.wait(keys)
    except dist.DistStoreError:
        for number, key in enumerate(keys):
            if not store.check([key]):
                missing.append(str(number))
    except dist.DistNetworkError as error:
        raise UserError("machine 0 has left; look at the messages there") from error
    if missing:
        raise UserError(
            f"no sign of rank {', '.join(missing)} for {_MEET:.0f} s; look at the messages on the other machines"
        )
    return store


def _interface() -> str | None:
    """The network interface that leads to rank 0; None if it is unknown.

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
            for entry in addresses:
                address, _, _ = entry.address.partition("%")
                if address == local:
                    return name
    return None
