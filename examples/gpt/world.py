"""The processes of a run, each with a device: one, or as many as torchrun has started."""

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
    """Who this process is among the others."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def several(self) -> bool:
        """Whether torchrun has started this process."""
        return distributed.is_initialized()

    def shard(self, model: nn.Module) -> None:
        """Spreads the weights of a model with `blocks` over all processes, each block on its own."""
        if self.several:
            mesh = init_device_mesh(self.device.type, (self.size,))
            for part in (*model.blocks, model):
                fully_shard(part, mesh=mesh)

    def mean(self, x: Tensor) -> float:
        """The mean of what all processes have."""
        total = x.double()
        if self.several:
            distributed.all_reduce(total)
        return total.item() / self.size

    def wait(self) -> None:
        """Until the device has done all that it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_mib(self) -> float | None:
        """The most memory that tensors took since `forget_peak`, on the device where it was most; CPUs do not keep count."""
        if self.device.type != "cuda":
            return None
        peak = torch.tensor(torch.cuda.max_memory_allocated(), device=self.device)
        if self.several:
            distributed.all_reduce(peak, distributed.ReduceOp.MAX)
        return peak.item() / MIB

    def forget_peak(self) -> None:
        """Start counting memory again."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def leave(self) -> None:
        """Ends this process, if torchrun has started it."""
        if self.several:
            distributed.destroy_process_group()
            sys.stdout.flush()
            sys.stderr.flush()
            # At once: threads of torch's that are still there when a process takes itself down abort it now and then.
            os._exit(0)


def join(device: str | None) -> World:
    """Finds the other processes; without a device each takes a GPU, and the CPU where there is none."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not distributed.is_torchelastic_launched():
        return World(torch.device(kind))
    own = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(own)
    distributed.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    return World(own, distributed.get_rank(), distributed.get_world_size())


def sum_in_one_order() -> None:
    """Has torch choose algorithms whose results are the same every time; to be called before anything is computed."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS makes no promise, and torch says so
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
