"""An all-reduce of virtual ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qsim.distributed.all_reduce import AllReduce, Chunks, check_residual
from qsim.distributed.messages import exchange


def simulate_all_reduce(tensors: Sequence[Tensor], how: AllReduce, *, seed: int = 0, residuals: Sequence[Tensor] | None = None) -> Tensor:
    """Add the tensors of virtual ranks in one process, with the bits of `all_reduce` among as many processes.

    Args:
        tensors: The tensor of each rank, of one shape and dtype.
        how: The all-reduce.
        seed: The seed of all random bits.
        residuals: For error feedback, a flat float32 tensor for each rank, zeros at first: it is added to the rank's tensor, and the errors
            of the rank's roundings replace its content.

    Returns:
        The sum, in the dtype of the tensors: all ranks have the same.

    Raises:
        ValueError: If there are no tensors, or they differ in shape; or if residuals are missing, not needed or do not fit.

    Example:
        >>> import torch, qsim
        >>> from qsim.distributed import AllReduce, simulate_all_reduce
        >>> ranks = [torch.tensor([0.3]) for _ in range(64)]
        >>> for algorithm in ("ring", "tree", "all_to_all"):
        ...     print(algorithm, simulate_all_reduce(ranks, AllReduce(algorithm, wire="e4m3", sums="bf16")).item())
        ring 8.0
        tree 20.0
        all_to_all 20.0
    """
    if not tensors:
        raise ValueError("simulate_all_reduce: there must be a tensor for each rank, got none")
    if any(x.shape != tensors[0].shape for x in tensors):
        raise ValueError(f"simulate_all_reduce: all ranks must have tensors of one shape, got {[tuple(x.shape) for x in tensors]}")
    errors = [None] * len(tensors) if residuals is None else list(residuals)
    if len(errors) != len(tensors):
        raise ValueError(f"simulate_all_reduce: there must be a residual for each of the {len(tensors)} ranks, got {len(errors)}")
    for x, residual in zip(tensors, errors, strict=True):
        check_residual("simulate_all_reduce", how, x, residual)
    plan = exchange(how.algorithm, len(tensors))
    pairs = zip(tensors, errors, strict=True)
    ranks = [Chunks(x.detach().flatten(), how, len(plan.owners), seed, residual) for x, residual in pairs]
    for number, messages in enumerate(plan.adding):
        sent = [ranks[message.sender].message(number, message) for message in messages]
        for message, x in zip(messages, sent, strict=True):
            ranks[message.receiver].add(number, message, x)
    for chunk, owner in enumerate(plan.owners):
        ranks[owner].finish(chunk)
    finished = ranks[0]
    finished.values = [ranks[owner].values[chunk] for chunk, owner in enumerate(plan.owners)]
    return finished.whole(tensors[0])
