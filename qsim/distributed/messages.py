"""The messages of an all-reduce and a reduce-scatter: who sends which chunk to whom, in which round, for each algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Message:
    """A chunk on its way.

    Attributes:
        sender: The rank that sends it.
        receiver: The rank that receives it.
        chunk: The number of the chunk.
    """

    sender: int
    receiver: int
    chunk: int


#: The messages of a round, which are sent at the same time. A rank sends at most one of them, and receives at most one.
Round = tuple[Message, ...]


@dataclass(frozen=True)
class Exchange:
    """The messages of an all-reduce.

    Attributes:
        owners: The rank that has the sum of each chunk after the first half.
        adding: The rounds of the first half, whose receivers add what they receive to their own chunk.
        spreading: The rounds of the second half, in which the sums go to all ranks.
    """

    owners: tuple[int, ...]
    adding: tuple[Round, ...]
    spreading: tuple[Round, ...]


def _ring(size: int) -> Exchange:
    """Each rank sends to the next one: partial sums of chunks go around once, then the sums."""
    adding = tuple(tuple(Message(r, (r + 1) % size, (r - t) % size) for r in range(size)) for t in range(size - 1))
    spreading = tuple(tuple(Message(r, (r + 1) % size, (r + 1 - t) % size) for r in range(size)) for t in range(size - 1))
    return Exchange(tuple((chunk - 1) % size for chunk in range(size)), adding, spreading)


def _tree(size: int) -> Exchange:
    """Whole tensors go up a binary tree to rank 0, and the sum comes down."""
    strides: list[int] = []
    while 1 << len(strides) < size:
        strides.append(1 << len(strides))
    up = [tuple((r, r - stride) for r in range(stride, size, 2 * stride)) for stride in strides]
    adding = tuple(tuple(Message(child, parent, 0) for child, parent in pairs) for pairs in up)
    spreading = tuple(tuple(Message(parent, child, 0) for child, parent in pairs) for pairs in reversed(up))
    return Exchange((0,), adding, spreading)


def _all_to_all(size: int) -> Exchange:
    """Each rank sends a chunk to every other, which adds all that it gets; then it sends its sum to every other."""
    adding = tuple(tuple(Message(r, (r + t) % size, (r + t) % size) for r in range(size)) for t in range(1, size))
    spreading = tuple(tuple(Message(r, (r + t) % size, r) for r in range(size)) for t in range(1, size))
    return Exchange(tuple(range(size)), adding, spreading)


ALGORITHMS: Mapping[str, Callable[[int], Exchange]] = {"ring": _ring, "tree": _tree, "all_to_all": _all_to_all}


@lru_cache(maxsize=64)
def exchange(algorithm: str, size: int) -> Exchange:
    """The messages of an algorithm among a number of ranks.

    Example:
        >>> exchange("tree", 4).adding
        ((Message(sender=1, receiver=0, chunk=0), Message(sender=3, receiver=2, chunk=0)), (Message(sender=2, receiver=0, chunk=0),))
    """
    return ALGORITHMS[algorithm](size)


@lru_cache(maxsize=64)
def scattering(algorithm: str, size: int) -> tuple[Round, ...]:
    """The messages of a reduce-scatter: each rank gets the sum of the chunk with its number.

    They are the first half of the all-reduce. A tree has a root for each chunk, the rank that gets it, as in NCCL's PAT (arXiv 2506.20252).

    Example:
        >>> scattering("ring", 2)
        ((Message(sender=0, receiver=1, chunk=1), Message(sender=1, receiver=0, chunk=0)),)
    """
    plan = exchange(algorithm, size)
    if len(plan.owners) == size:
        return tuple(tuple(Message(m.sender, m.receiver, plan.owners[m.chunk]) for m in messages) for messages in plan.adding)
    return tuple(
        tuple(Message((m.sender + root) % size, (m.receiver + root) % size, root) for root in range(size))
        for messages in plan.adding
        for m in messages
    )
