"""The processes of a run, each with a device: one, or as many as torchrun started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import torch
import torch.utils.deterministic
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

MIB = 2**20


@dataclass(frozen=True)
class World:
    """This process's device and rank, and the number of processes."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def several(self) -> bool:
        """Whether torchrun has started this process."""
        return distributed.is_initialized()

    def shard(self, model: nn.Module) -> None:
        """Shard the weights of a model with `blocks` over all processes, block by block."""
        if self.several:
            mesh = init_device_mesh(self.device.type, (self.size,))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)

    def mean(self, x: Tensor) -> float:
        """The mean over all processes."""
        total = x.double()
        if self.several:
            distributed.all_reduce(total)
        return total.item() / self.size

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_mib(self) -> float | None:
        """The peak memory of tensors since `forget_peak`, on the device where it was largest; not available on CPUs."""
        if self.device.type != "cuda":
            return None
        peak = torch.tensor(torch.cuda.max_memory_allocated(), device=self.device)
        if self.several:
            distributed.all_reduce(peak, distributed.ReduceOp.MAX)
        return peak.item() / MIB

    def forget_peak(self) -> None:
        """Reset the peak memory."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def leave(self) -> None:
        """End this process, if torchrun started it."""
        if self.several:
            distributed.destroy_process_group()
            sys.stdout.flush()
            sys.stderr.flush()
            # Immediately: torch threads that are still alive when a process shuts down occasionally abort it.
            os._exit(0)


def join(device: str | None) -> World:
    """Connect to the other processes; by default each uses a GPU, or the CPU if there is none."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not distributed.is_torchelastic_launched():
        return World(torch.device(kind))
    own = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(own)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    return World(own, distributed.get_rank(), distributed.get_world_size())


def sum_in_one_order() -> None:
    """Make torch use deterministic algorithms; call this before any computation."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic, and torch says so
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
