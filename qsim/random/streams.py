"""Streams: separate random bits under one seed, for tensors, layers, points, steps and ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from torch import distributed

from qsim_kernels.private import constant

#: The largest stream and the largest seed that are drawn.
LARGEST = 2**63 - 1
#: Whether torch was built with distributed runs.
_MAY_BE_DISTRIBUTED = distributed.is_available()


def stream(*names: str | int) -> int:
    """A separate stream number for a tensor, layer, point or step, hashed from its names.

    Args:
        *names: Strings and integers; their order and kinds matter.

    Returns:
        An integer below 2**63.

    Example:
        >>> import qsim
        >>> qsim.random.stream("encoder.0", "weight", 7) == qsim.random.stream("encoder.0", "weight", 8)
        False
    """
    for name in names:
        if isinstance(name, bool) or not isinstance(name, (str, int)):
            raise TypeError(f"stream: names must be strings and integers, got {name!r}")
    return _hashed(names)


def _hashed(names: tuple[str | int, ...]) -> int:
    return _known_hash(names)


@lru_cache(maxsize=4096)
def _known_hash(names: tuple[str | int, ...]) -> int:
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & LARGEST


# Compilers cannot trace hashes, and warn of caches; names are constants of a graph.
constant(_hashed)


def own_rank() -> int:
    """The rank of this process in a distributed run; 0 outside of one."""
    return distributed.get_rank() if _MAY_BE_DISTRIBUTED and distributed.is_initialized() else 0


def is_one_of_several() -> bool:
    """Whether this process is one of several in a distributed run."""
    return _MAY_BE_DISTRIBUTED and distributed.is_initialized() and distributed.get_world_size() > 1


def rank_stream(number: int, rank: int | None = None) -> int:
    """A per-process stream in a distributed run, derived from a common one by a bijection, so that streams do not collide by accident.

    Args:
        number: The common stream.
        rank: The process, this one by default.
    """
    if rank is None:
        rank = 0 if _is_shared else own_rank()
    return number ^ (rank * 0x9E3779B97F4A7C15 & LARGEST)


#: Whether all ranks use the streams of the first.
_is_shared = False


@contextmanager
def shared_streams() -> Iterator[None]:
    """Let all ranks draw the same random bits inside the block, if they are seeded alike: for what replicas round identically."""
    global _is_shared
    before, _is_shared = _is_shared, True
    try:
        yield
    finally:
        _is_shared = before


class Drawn(NamedTuple):
    """The source of the stream of a layer that was not given one.

    Attributes:
        seed: Drawn when the layer was created, or when its model was converted.
        number: The number of this draw in this process. Processes agree on a seed once per draw, whatever was drawn before.
        name: The layer's name among those created with the same draw.
    """

    seed: int
    number: int
    name: str = ""

    @classmethod
    def of(cls, seed: int) -> Drawn:
        """The source of a newly drawn seed."""
        return cls(seed, next(_DRAWS))

    @property
    def agreed_seed(self) -> int:
        """The seed in use: rank 0's, if the processes of a distributed run have agreed on one."""
        return _AGREED.get((self.seed, self.number), self.seed)


_DRAWS = count()
# Seeds shared by all processes, by the seeds drawn in this process and the numbers of the draws.
_AGREED: dict[tuple[int, int], int] = {}


#: What a layer's stream follows from: a stream that it was given, or a draw.
Source = int | Drawn


def stream_of(source: Source, training: bool, name: str = "") -> int:
    """The stream of a layer.

    Args:
        source: What it follows from.
        training: Whether processes agree on rank 0's: all of them must then call this in the same order.
        name: What is added to the name of the source, if there are several streams.
    """
    if isinstance(source, int):
        return source
    drawn = source.seed, source.number
    if training and drawn not in _AGREED and is_one_of_several():
        seeds = [source.seed]
        distributed.broadcast_object_list(seeds, src=0)
        _AGREED[drawn] = seeds[0]
    return _hashed(("layer", _AGREED.get(drawn, source.seed), f"{source.name}.{name}" if name else source.name))
