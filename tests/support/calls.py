"""Calls of every operation, for tests that compare them with themselves: compiled, traced, batched, under autocast."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import qsim
from qsim.random import Noise
from support.comparing import same_bits

#: A stream by name. It is hashed outside the compiled functions, as in layers, which do so at construction.
STREAM = qsim.random.stream("weight")
#: Values between two of E4M3's and beyond its range, a zero of either sign and a NaN.
POINTS = [0.3, -1.7, 1000.0, -500.0, 0.0, -0.0, torch.nan, 2.0**-10, 1.0625, -17.0, torch.inf, 5e-4]


def points(device: torch.device) -> Tensor:
    """Four rows of three values."""
    return torch.tensor(POINTS, device=device).view(4, 3)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors agree in device, strides and every bit."""
    return (a.device, a.stride()) == (b.device, b.stride()) and same_bits(a, b)


def noisy(x: Tensor) -> Tensor:
    """Stochastic rounding that draws its own seed."""
    return qsim.quantize(x, "e4m3", rounding="stochastic")


def seeded(x: Tensor, seed: Tensor | int) -> Tensor:
    """Stochastic rounding with a seed that may be batched."""
    return qsim.quantize(x, "e4m3", rounding="stochastic", seed=seed)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest": lambda x: qsim.quantize(x, "e4m3"),
    "nonfinite": lambda x: qsim.quantize(x, "e5m2", rounding="up", overflow="nonfinite"),
    "stochastic": lambda x: qsim.quantize(x, "e4m3", rounding="stochastic", seed=Noise(3, STREAM, 1)),
    "six bits": lambda x: qsim.quantize(x, "int8", rounding=qsim.Stochastic(6, correction=True), seed=-3),
    "dtype": lambda x: qsim.quantize(x, "e4m3", dtype=torch.bfloat16),
    "out": lambda x: qsim.quantize(x, "e4m3", out=torch.full_like(x, 7.0)),
    "in place": lambda x: qsim.quantize_(x.clone(), "e4m3"),
    "encode": lambda x: qsim.encode(x, "e4m3", rounding="stochastic", seed=3),
    "decode": lambda x: qsim.decode(qsim.encode(x, "e5m2"), "e5m2", dtype=torch.float16),
    "packed": lambda x: qsim.encode(x.t().contiguous(), "e2m1", packed=True, check=False),
    "threshold": lambda x: qsim.functional.threshold_quantize(x, 0.25, 0.5),
}
