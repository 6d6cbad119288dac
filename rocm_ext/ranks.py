"""The ranks of a run: one process, or several that torchrun started.

FSDP2 shards the frozen base weights. Adapters are a thousandth of the model and are replicated, so a step
needs one all-reduce of their gradients and no reduce-scatter per micro-batch. On one rank no method
communicates.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rocm_ext.errors import UserError


def world_size() -> int:
    """Number of processes torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """Index of this process among all that torchrun started; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def local_world_size() -> int:
    """Number of torchrun's processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def local_rank() -> int:
    """Index of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", 0))


@dataclass(frozen=True)
class Ranks:
    """This process's place among all ranks.

    Attributes:
        device: of this rank.
        rank: index of this process among all.
        world: number of processes.
        mesh: FSDP2's device mesh; None on one rank.
    """

    device: torch.device
    rank: int = 0
    world: int = 1
    mesh: DeviceMesh | None = None

    @classmethod
    def from_env(cls, device: torch.device) -> "Ranks":
        """Join the process group that torchrun describes in the environment; without torchrun, use one rank.

        Raises:
            UserError: several ranks run on a torch older than 2.7.
        """
        if world_size() == 1:
            return cls(device)
        if tuple(int(n) for n in torch.__version__.split(".")[:2]) < (2, 7):  # fully_shard(ignored_params=…)
            raise UserError(f"several ranks need torch 2.7 or newer, found {torch.__version__}")
        # gloo beside RCCL/NCCL: counts and flags must not wait for the GPU
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        # A rank may wait long for another rank's last answers. torchrun detects dead ranks.
        dist.init_process_group(backend, timeout=timedelta(days=1))
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        return cls(device, dist.get_rank(), dist.get_world_size(), mesh)

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def shard(self, blocks: Iterable[nn.Module], root: nn.Module, replicated: set[nn.Parameter]) -> None:
        """Shard ``root`` over the ranks, with each of ``blocks`` as one FSDP2 unit.

        Args:
            blocks: modules inside ``root``, gathered one at a time.
            root: the whole model.
            replicated: parameters that every rank keeps whole.
        """
        if self.mesh is None:
            return
        from torch.distributed.fsdp import fully_shard

        for module in (*blocks, root):
            fully_shard(module, mesh=self.mesh, ignored_params=replicated)

    def place(self, full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Lay ``full`` out as ``like``: this rank's shard, or a copy on the device, in ``like``'s dtype.

        Every rank passes the whole tensor, so the ranks do not communicate.
        """
        from torch.distributed.tensor import DTensor, distribute_tensor

        if isinstance(like, DTensor):
            full = full.to(self.device, like.dtype)
            return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)
        return full.to(self.device, like.dtype, copy=True)

    def sum(self, values: list[float]) -> list[float]:
        """Sum each value over the ranks; counts below 2**53 are exact."""
        if self.mesh is None:
            return values
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def sum_gradients(self, parameters: list[nn.Parameter]) -> None:
        """Replace each gradient by its sum over the ranks, in one all-reduce."""
        if self.mesh is None:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        for p, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad = total.view_as(p)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's ``value`` in rank order, on every rank."""
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
        found, failed = None, ""
        if self.is_main:
            try:
                found = action()
            except UserError as error:
                failed = str(error)
        found, failed = self.agree((found, failed))
        if failed:
            raise UserError(failed)
        return found

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.mesh is not None:
            dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        if self.mesh is not None:
            self.barrier()  # if a rank leaves early, the others' last collective fails
            dist.destroy_process_group()
