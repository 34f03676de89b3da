"""The operator that multiplies matrices with an emulated accumulator: schema, fake implementation, one implementation per backend."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.ops.backend import HAS_NUMBA, OnBackend, library
from qsim_kernels.sums import is_single, is_stochastic, read_sum

#: The dtypes of operands: everything that float32 holds.
OPERANDS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)

library.define(
    "accumulate(Tensor a, Tensor b, Tensor? seed, str how, SymInt stream, SymInt offset) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Implementation(OnBackend):
    """The operator on one backend, whose `accumulate_into(out, a, b, seed, sum, stream, offset)` fills a contiguous result."""

    def accumulate(self, a: Tensor, b: Tensor, seed: Tensor | None, how: str, stream: int, offset: int) -> Tensor:
        """The product of matrices `[…, M, K]` and `[…, K, N]` with equal batch dimensions; see `qsim_kernels.sums`."""
        out = _result(a, b, seed, how, stream, offset)
        self._backend.accumulate_into(out, a, b, seed, read_sum(how), stream, offset)
        return out


def _result(a: Tensor, b: Tensor, seed: Tensor | None, how: str, stream: int, offset: int) -> Tensor:
    """An empty result; raise an error for operands that do not fit."""
    if a.dim() < 2 or a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"accumulate: cannot multiply shapes {tuple(a.shape)} and {tuple(b.shape)}")
    for operand in (a, b):
        if operand.dtype not in OPERANDS:
            raise TypeError(f"accumulate: operands must be float32 or narrower floats, got {operand.dtype}")
    described = read_sum(how)
    if is_stochastic(described) and seed is None:
        raise ValueError("accumulate: stochastic rounding needs a seed")
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=torch.float32 if is_single(described) else torch.float64)


def register(backend: str, key: str) -> None:
    """Make a backend's module the implementation for a dispatch key; it is imported when the operator first runs."""
    library.impl("accumulate", Implementation(backend).accumulate, key)


register("qsim_kernels.reference.sums", "CompositeExplicitAutograd")
if HAS_NUMBA:
    register("qsim_kernels.compiled.sums", "CPU")
if torch.version.hip is None:
    register("qsim_kernels.triton.accumulate.launch", "CUDA")
torch.library.register_fake("qsim::accumulate", _result, lib=library)
