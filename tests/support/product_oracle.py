"""Products written out: Algorithms 1 and 2 line by line in float64, from a product of torch and a description of the points.

Numbers are rounded by `oracle_arrays`, with random bits of `philox_oracle`; seeds and streams follow `docs/numerics.md`. It shares no code
with the library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from support.oracle import bottom, kind, magnitude, top
from support.oracle_arrays import Bracket, numbers
from support.philox_oracle import random_integers, stream

#: The streams of a layer's points, and what tells the second of two inputs from the first.
STREAMS = {name: stream("five points", name) for name in ("act", "weight", "act_bwd", "weight_bwd", "grad", "grad_w")}
SECOND = stream("five points", "second operand")

WORD, LONG = 2**32 - 1, 2**64 - 1


def drawn_seed(layer: int) -> int:
    """The next seed that a layer with a stream draws from torch's generator."""
    first = layer % 2**62
    return int(torch.randint(first, first + 2**62 - 1, ())) if first else int(torch.randint(2**63 - 1, ()))


def weight_seed(weight: Tensor, layer: int) -> int:
    """The seed of a weight: a sum over its elements, from a number that follows from torch's seed and the layer's stream."""
    start = stream("weight", stream("shared", torch.initial_seed()), layer)
    words = bits_of(weight.detach().cpu().contiguous().flatten())
    return (start + sum(mixed(word, index) for index, word in enumerate(words))) & LONG


def bits_of(x: Tensor) -> list[int]:
    """The bits of each number: in two's complement, so that the sign of 16 bits fills 32; those of 64 bits folded into 32."""
    if x.dtype != torch.float64:
        return [word & WORD for word in x.view(torch.int32 if x.dtype == torch.float32 else torch.int16).tolist()]
    words = (word & LONG for word in x.view(torch.int64).tolist())
    return [(word ^ (word >> 32) * 0x27D4EB2F) & WORD for word in words]


def mixed(word: int, index: int) -> int:
    """A word of 32 bits and an index, mixed."""
    h = word ^ (index + (index >> 32) * 0x27D4EB2F) * 0x9E3779B1 & WORD
    h = h * 0x85EBCA6B & WORD
    h ^= h >> 15
    h = h * 0xC2B2AE35 & WORD
    return h ^ h >> 16


def rounded(x: Tensor, point: Any, seed: int, number: int) -> Tensor:
    """A tensor as rounded by a point, in float64, with the bits of a stream."""
    if point is None:
        return x.detach().double()
    how, bracket = point.rounding, Bracket(point.format, numbers(x).reshape(-1))
    if kind(how) == "Stochastic":
        bits = how.bits or 32
        random = np.array(random_integers(x.numel(), bits, seed, number), np.int64)
        found = bracket.round("stochastic", point.overflow, random, bits, how.correction)
    else:
        found = bracket.round(str(how), point.overflow)
    return torch.from_numpy(found).view(x.shape).to(x.device)


def passes(x: Tensor, point: Any) -> Tensor | float:
    """The elements at which gradients pass a point."""
    if point is None or not point.clip_gradient:
        return 1.0
    low, high = -float(magnitude(point.format, bottom(point.format))), float(magnitude(point.format, top(point.format)))
    return ((x >= low) & (x <= high)).double()


class Due(NamedTuple):
    """The expected result: the exact one, the sum of the magnitudes of its terms, and whether torch computes it without a carrier."""

    exact: Tensor
    size: Tensor
    own: bool


Own = Callable[..., Tensor]


def written_out(
    own: Own, two_inputs: bool, points: Any, given: tuple[Tensor, ...], g: Tensor, dim: int, seed: int, layer: int
) -> list[Due]:
    """The result and the gradients of the operands.

    Args:
        own: Torch's own product.
        two_inputs: Whether the second operand is an input, rounded like the first.
        points: The points, of which attributes say what they round to and how.
        given: The operands, and a bias if there is one.
        g: The gradient of the result.
        dim: The dimension of the result along which the bias is added.
        seed: Torch's seed before the product.
        layer: The stream of the layer.
    """
    a, w, *bias = given
    torch.manual_seed(seed)
    drawn = drawn_seed(layer)
    act, act_bwd = points.act, points.act_bwd
    weight, weight_bwd = (act, act_bwd) if two_inputs else (points.weight, points.weight_bwd)
    if two_inputs:
        w_drawn, streams = drawn, [STREAMS[name] ^ SECOND for name in ("act", "act_bwd")]
    else:
        w_drawn, streams = weight_seed(w, layer), [STREAMS[name] for name in ("weight", "weight_bwd")]
    a_fwd = rounded(a, act, drawn, STREAMS["act"])
    w_fwd = rounded(w, weight, w_drawn, streams[0])
    a_bwd = a_fwd if isinstance(act_bwd, str) else rounded(a, act_bwd, drawn, STREAMS["act_bwd"])
    w_bwd = w_fwd if isinstance(weight_bwd, str) else rounded(w, weight_bwd, w_drawn, streams[1])
    g_a = rounded(g, points.grad, drawn, STREAMS["grad"])
    g_w = g_a if points.grad_w is None else rounded(g, points.grad_w, drawn, STREAMS["grad_w"])
    b = [x.detach().double() for x in bias]
    used_a, used_w = (act if act_bwd == "same" else act_bwd), (weight if weight_bwd == "same" else weight_bwd)
    rest = [d for d in range(g.dim()) if d != dim % g.dim()]
    y, size = own(a_fwd, w_fwd, *b), own(a_fwd.abs(), w_fwd.abs(), *(x.abs() for x in b))
    of_a, size_a = (gradient(own, 0, a, *both) for both in ((w_bwd, g_a), (w_bwd.abs(), g_a.abs())))
    of_w, size_w = (gradient(own, 1, x, w, other) for x, other in ((a_bwd, g_w), (a_bwd.abs(), g_w.abs())))
    return [
        Due(y, size, act is weight is None),
        Due(of_a * passes(a, act), size_a, points.grad is used_w is None),
        Due(of_w * passes(w, weight), size_w, points.grad is used_a is None),
        *[Due(add(g.double(), rest), add(g.double().abs(), rest), False) for _ in b],
    ]


def add(x: Tensor, dims: list[int]) -> Tensor:
    """The sum over some dimensions: an empty tuple means none, not all."""
    return x.sum(dims) if dims else x


def gradient(own: Own, which: int, a: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """The gradient of one operand of torch's own product, in float64."""
    both = [a.detach().double(), w.detach().double()]
    both[which].requires_grad_()
    return torch.autograd.grad(own(*both), both[which], g)[0]
