"""Which random bits a call uses: a seed, one of its streams, and where in the stream the first element is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qsim.random import seeds, streams
from qsim_kernels.ops.direct import DISPATCHED, Operators


class Noise(NamedTuple):
    """The random bits of a call, for `seed=`: a pure function of seed, stream and the logical index of an element.

    Args:
        seed: An int or a 0-d int64 tensor. By default it is drawn from the call's `generator=`, or from torch's CPU generator.
        stream: Which of the seed's streams to use; see `qsim.random.stream`. Where neither a seed nor a generator is given, each rank of a
            distributed run uses its own streams; give all ranks the same seed or generators in the same state to share noise.
        offset: Logical index of the first element, where a tensor is a piece of a larger one.

    Example:
        >>> import torch, qsim
        >>> from qsim.random import Noise
        >>> x = torch.full((6,), 1.25)
        >>> qsim.quantize(x, "e2m1", "stochastic", seed=0)
        tensor([1.5000, 1.0000, 1.5000, 1.5000, 1.5000, 1.5000])
        >>> qsim.quantize(x[2:], "e2m1", "stochastic", seed=Noise(0, offset=2))
        tensor([1.5000, 1.5000, 1.5000, 1.5000])
        >>> qsim.quantize(x, "e2m1", "stochastic", seed=Noise(0, stream=1))
        tensor([1.0000, 1.5000, 1.0000, 1.5000, 1.5000, 1.0000])
    """

    seed: int | Tensor | None = None
    stream: int = 0
    offset: int = 0


def draw(
    is_stochastic: bool,
    seed: int | Tensor | Noise | None,
    generator: torch.Generator | None,
    device: torch.device,
    ops: Operators = DISPATCHED,
) -> tuple[Tensor | None, int, int]:
    """The seed of one call, if it needs one, its stream and its offset; checks all that says which random bits are meant.

    What is drawn from torch's own generator may be the same on all ranks of a distributed run, so each takes streams of its own.
    `ops` are the operators for the tensor, if known.
    """
    number, stream, offset = seed if isinstance(seed, Noise) else (seed, 0, 0)
    if (stream != 0 or offset != 0) and not torch.compiler.is_compiling():
        seeds.check_index(stream, offset)
    if is_stochastic and number is None and generator is None:
        return seeds.drawn(device, ops), streams.rank_stream(stream), offset
    if is_stochastic:
        return seeds.seed_tensor(number, generator, device), stream, offset
    if number is not None or generator is not None:
        seeds.check_source(number, generator, device)
    return None, stream, offset
