"""An all-reduce and a reduce-scatter among processes, message by message."""

from __future__ import annotations

import torch
from torch import Tensor, distributed

from qsim.distributed.all_reduce import AllReduce, Chunks, check_residual, check_scattered
from qsim.distributed.messages import Message, Round, exchange, scattering


def all_reduce(
    x: Tensor, how: AllReduce, *, seed: int = 0, residual: Tensor | None = None, group: distributed.ProcessGroup | None = None
) -> Tensor:
    """Add the tensors of all processes of a group, each rounded on its way: what every process then has, with the same bits.

    Processes send each other the messages of the algorithm, in float32, which holds every value of the wire's format: traffic and time are
    not those of the format.

    Args:
        x: This process's tensor.
        how: The all-reduce.
        seed: The seed of all random bits, the same in all processes.
        residual: For error feedback, a flat float32 tensor, zeros at first: it is added to `x`, and the errors of this process's roundings
            replace its content.
        group: The processes; all of them by default.

    Raises:
        RuntimeError: If torch.distributed is not initialized.
        ValueError: If a residual is missing, not needed or does not fit.

    Example:
        >>> import torch, qsim
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> qsim.distributed.all_reduce(torch.tensor([0.3]), qsim.distributed.AllReduce(wire="e4m3"))
        tensor([0.3125])
        >>> distributed.destroy_process_group()
    """
    _check_initialized("all_reduce")
    check_residual("all_reduce", how, x, residual)
    size, own = distributed.get_world_size(group), distributed.get_rank(group)
    plan = exchange(how.algorithm, size)
    chunks = Chunks(x.detach().flatten(), how, len(plan.owners), seed, residual)
    for number, messages in enumerate(plan.adding):
        received = _exchanged(messages, own, chunks, number, group)
        for message, value in received:
            chunks.add(number, message, value)
    for chunk, owner in enumerate(plan.owners):
        if owner == own:
            chunks.finish(chunk)
    for messages in plan.spreading:
        for message, value in _exchanged(messages, own, chunks, None, group):
            chunks.values[message.chunk] = value
    return chunks.whole(x)


def reduce_scatter(
    x: Tensor, how: AllReduce, *, seed: int = 0, residual: Tensor | None = None, group: distributed.ProcessGroup | None = None
) -> Tensor:
    """Add the tensors of all processes of a group, each rounded on its way: every process gets the chunk of the sum with its number.

    It is the first half of the all-reduce: a finished sum is not sent, and so not rounded to `wire`.

    Args:
        x: This process's tensor, whose elements the processes get in equal chunks.
        how: How tensors are added.
        seed: See `all_reduce`.
        residual: See `all_reduce`.
        group: See `all_reduce`.

    Returns:
        The chunk, flat, in the dtype of the tensor.

    Raises:
        RuntimeError: If torch.distributed is not initialized.
        ValueError: If chunks are not equal, or a residual is missing, not needed or does not fit.

    Example:
        >>> import torch, qsim
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> qsim.distributed.reduce_scatter(torch.tensor([0.3]), qsim.distributed.AllReduce(wire="e4m3"))
        tensor([0.3000])
        >>> distributed.destroy_process_group()
    """
    _check_initialized("reduce_scatter")
    check_residual("reduce_scatter", how, x, residual)
    size, own = distributed.get_world_size(group), distributed.get_rank(group)
    check_scattered("reduce_scatter", x, size)
    chunks = Chunks(x.detach().flatten(), how, size, seed, residual)
    for number, messages in enumerate(scattering(how.algorithm, size)):
        for message, value in _exchanged(messages, own, chunks, number, group):
            chunks.add(number, message, value)
    return chunks.values[own].to(x.dtype)


def _check_initialized(name: str) -> None:
    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError(f"{name}: torch.distributed is not initialized; simulate_{name} adds the tensors of virtual ranks")


def _exchanged(
    messages: Round, own: int, chunks: Chunks, number: int | None, group: distributed.ProcessGroup | None
) -> list[tuple[Message, Tensor]]:
    """Send and receive this process's messages of a round: rounded in a round with a number, and unchanged afterwards."""
    operations, received = [], []
    for message in messages:
        value = chunks.values[message.chunk]
        if not value.numel():
            continue
        if message.sender == own:
            sent = value if number is None else chunks.message(number, message)
            operations.append(_operation(distributed.isend, sent.contiguous(), message.receiver, group))
        if message.receiver == own:
            received.append((message, torch.empty_like(value)))
            operations.append(_operation(distributed.irecv, received[-1][1], message.sender, group))
    if operations:
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
    return received


def _operation(kind: object, x: Tensor, peer: int, group: distributed.ProcessGroup | None) -> distributed.P2POp:
    whole = peer if group is None else distributed.get_global_rank(group, peer)
    return distributed.P2POp(kind, x, whole, group)  # type: ignore[arg-type]
