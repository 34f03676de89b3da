"""A communication hook of DistributedDataParallel: gradients are averaged over a wire that rounds."""

# Annotations are evaluated: torch checks those of a hook.
from typing import Any

import torch
from torch import Tensor, distributed

from qsim.distributed.all_reduce import AllReduce, check_how
from qsim.distributed.processes import all_reduce
from qsim.random import streams


class WireState:
    """The state of `comm_hook`: how gradients are added, the number of the step, and the errors that are fed back.

    Args:
        how: The all-reduce.
        seed: The seed of all random bits, the same in all processes.
        group: The processes; all of them by default.

    Attributes:
        how: The all-reduce.
        step: Number of steps so far, from which random bits follow.

    Example:
        >>> import qsim
        >>> state = qsim.distributed.WireState(qsim.distributed.AllReduce("tree", wire="e5m2"), seed=3)
        >>> state.state_dict()
        {'seed': 3, 'step': 0, 'residuals': {}}
    """

    def __init__(self, how: AllReduce, *, seed: int = 0, group: "distributed.ProcessGroup | None" = None) -> None:
        check_how("WireState", how)
        self.how, self.step = how, 0
        self._seed, self._group = seed, group
        # By the number of a parameter in the order in which gradients arrived first: buckets are rearranged after the first step.
        self._numbers: dict[Tensor, int] = {}
        self._residuals: dict[int, Tensor] = {}

    def average(self, buffer: Tensor, parameters: list[Tensor], bucket: int, *, is_last: bool) -> Tensor:
        """Average a bucket's gradients over all processes."""
        seed = bucket_seed(self._seed, self.step, bucket)
        buffer = buffer / distributed.get_world_size(self._group)
        numbers = [self._numbers.setdefault(parameter, len(self._numbers)) for parameter in parameters]
        residual = self._gathered(numbers, parameters, buffer) if self.how.error_feedback else None
        result = all_reduce(buffer, self.how, seed=seed, residual=residual, group=self._group)
        if residual is not None:
            sizes = [parameter.numel() for parameter in parameters]
            self._residuals |= {number: part.clone() for number, part in zip(numbers, residual.split(sizes), strict=True)}
        self.step += is_last
        return result

    def _gathered(self, numbers: list[int], parameters: list[Tensor], buffer: Tensor) -> Tensor:
        """The errors to feed back, in the order of a bucket."""
        zeros = (torch.zeros(parameter.numel(), dtype=torch.float32, device=buffer.device) for parameter in parameters)
        return torch.cat([self._residuals.get(number, zero) for number, zero in zip(numbers, zeros, strict=True)])

    def state_dict(self) -> dict[str, Any]:
        """The seed, the number of steps and this process's errors, to resume with."""
        return {"seed": self._seed, "step": self.step, "residuals": {number: x.clone() for number, x in self._residuals.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict` of the same process, with the same model."""
        self._seed, self.step = state["seed"], state["step"]
        self._residuals = {number: x.clone() for number, x in state["residuals"].items()}


def bucket_seed(seed: int, step: int, bucket: int) -> int:
    """The seed of a bucket's all-reduce in a step.

    Example:
        >>> bucket_seed(0, 1, 2) == bucket_seed(0, 2, 1)
        False
    """
    return streams.stream("comm_hook", seed, step, bucket)


def comm_hook(state: WireState, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Average a bucket of gradients over a wire that rounds: the hook for `DistributedDataParallel.register_comm_hook`.

    Gradients are divided by the number of processes before they are sent, as torch does. Buckets are added one after the other, so the time
    of a step says nothing about real wires.

    Args:
        state: How to add, and what is kept between steps.
        bucket: The bucket.

    Example:
        >>> import torch, qsim
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
        >>> model.register_comm_hook(qsim.distributed.WireState(qsim.distributed.AllReduce(wire="e4m3")), qsim.distributed.comm_hook)
        >>> model(torch.tensor([[0.3]])).sum().backward()
        >>> model.module.weight.grad
        tensor([[0.3125]])
        >>> del model  # before the group, as the last to hold it might wait forever for its threads
        >>> distributed.destroy_process_group()
    """
    buffer = bucket.buffer()
    buffer.copy_(state.average(buffer, bucket.parameters(), bucket.index(), is_last=bucket.is_last()))
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done
