"""An all-reduce and a reduce-scatter of virtual ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qsim.distributed.all_reduce import AllReduce, Chunks, check_how, check_residual, check_scattered
from qsim.distributed.messages import Round, exchange, scattering


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
    check_how("simulate_all_reduce", how)
    plan = exchange(how.algorithm, max(len(tensors), 1))
    ranks = _ranks("simulate_all_reduce", tensors, how, seed, residuals, len(plan.owners))
    _add(ranks, plan.adding)
    for chunk, owner in enumerate(plan.owners):
        ranks[owner].finish(chunk)
    finished = ranks[0]
    finished.values = [ranks[owner].values[chunk] for chunk, owner in enumerate(plan.owners)]
    return finished.whole(tensors[0])


def simulate_reduce_scatter(
    tensors: Sequence[Tensor], how: AllReduce, *, seed: int = 0, residuals: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """Add the tensors of virtual ranks in one process, with the bits of `reduce_scatter` among as many processes.

    Args:
        tensors: The tensor of each rank, of one shape and dtype.
        how: How tensors are added.
        seed: The seed of all random bits.
        residuals: See `simulate_all_reduce`.

    Returns:
        The chunk of the sum that each rank gets.

    Raises:
        ValueError: As `simulate_all_reduce`, and if chunks are not equal.

    Example:
        >>> import torch, qsim
        >>> from qsim.distributed import AllReduce, simulate_reduce_scatter
        >>> ranks = [torch.tensor([0.3, 1.7]) for _ in range(2)]
        >>> simulate_reduce_scatter(ranks, AllReduce("ring", wire="e4m3"))
        [tensor([0.6125]), tensor([3.4500])]
    """
    check_how("simulate_reduce_scatter", how)
    size = len(tensors)
    if tensors:
        check_scattered("simulate_reduce_scatter", tensors[0], size)
    ranks = _ranks("simulate_reduce_scatter", tensors, how, seed, residuals, size)
    _add(ranks, scattering(how.algorithm, size))
    return [rank.values[number].to(tensors[0].dtype) for number, rank in enumerate(ranks)]


def _ranks(
    owner: str, tensors: Sequence[Tensor], how: AllReduce, seed: int, residuals: Sequence[Tensor] | None, count: int
) -> list[Chunks]:
    """The parts of virtual ranks, each in chunks of a number."""
    if not tensors:
        raise ValueError(f"{owner}: there must be a tensor for each rank, got none")
    if any(x.shape != tensors[0].shape for x in tensors):
        raise ValueError(f"{owner}: all ranks must have tensors of one shape, got {[tuple(x.shape) for x in tensors]}")
    errors = [None] * len(tensors) if residuals is None else list(residuals)
    if len(errors) != len(tensors):
        raise ValueError(f"{owner}: there must be a residual for each of the {len(tensors)} ranks, got {len(errors)}")
    for x, residual in zip(tensors, errors, strict=True):
        check_residual(owner, how, x, residual)
    return [Chunks(x.detach().flatten(), how, count, seed, residual) for x, residual in zip(tensors, errors, strict=True)]


def _add(ranks: Sequence[Chunks], adding: Sequence[Round]) -> None:
    """Send the messages of all rounds, and add what arrives."""
    for number, messages in enumerate(adding):
        sent = [ranks[message.sender].message(number, message) for message in messages]
        for message, x in zip(messages, sent, strict=True):
            ranks[message.receiver].add(number, message, x)
