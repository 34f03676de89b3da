"""The operator that multiplies matrices with an accumulator: schema, fake implementation, an emulator per backend, or the chip itself."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim_kernels.chip.verified import CHIP
from qsim_kernels.ops.backend import HAS_NUMBA, OnBackend, library
from qsim_kernels.sums import Sum, is_single, is_stochastic, read_sum

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

#: Whether the chip itself multiplies, where its bits are the emulator's: where it can, never, or always.
CHIP_MODES = ("auto", "never", "require")

library.define(
    "accumulate(Tensor a, Tensor b, Tensor? seed, str how, SymInt stream, SymInt offset, ScalarType? dtype=None, str chip='auto') "
    "-> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


class Implementation(OnBackend):
    """The operator on one backend, whose `accumulate_into(out, a, b, seed, sum, stream, offset)` fills a contiguous result."""

    def accumulate(
        self,
        a: Tensor,
        b: Tensor,
        seed: Tensor | None,
        how: str,
        stream: int,
        offset: int,
        dtype: torch.dtype | None = None,
        chip: str = "auto",
    ) -> Tensor:
        """The product of matrices `[…, M, K]` and `[…, K, N]` with equal batch dimensions; see `qsim_kernels.sums`.

        Args:
            a: The left matrices.
            b: The right matrices.
            seed: A 0-d int64 tensor, needed only for stochastic rounding.
            how: The sum, spelled.
            stream: Which of the seed's streams of random bits to use.
            offset: Logical index of the first random number.
            dtype: The dtype to which results are rounded to nearest; by default that of the sum.
            chip: One of `CHIP_MODES`.
        """
        described = _checked(a, b, seed, how)
        wanted = dtype or _own_dtype(described)
        if chip != "never" and a.numel() and b.numel():
            found = CHIP.multiply(a, b, described, wanted, lambda x, y: self._emulated(x, y, None, described, 0, 0))
            if isinstance(found, Tensor):
                return found
            if chip == "require":
                raise RuntimeError(f"accumulate: chip='require': {found}")
        return self._emulated(a, b, seed, described, stream, offset).to(wanted)

    def _emulated(self, a: Tensor, b: Tensor, seed: Tensor | None, how: Sum, stream: int, offset: int) -> Tensor:
        out = a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=_own_dtype(how))
        self._backend.accumulate_into(out, a, b, seed, how, stream, offset)
        return out


def _checked(a: Tensor, b: Tensor, seed: Tensor | None, how: str) -> Sum:
    """The sum's description; raise an error for operands that do not fit."""
    if a.dim() < 2 or a.dim() != b.dim() or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2]:
        raise ValueError(f"accumulate: cannot multiply shapes {tuple(a.shape)} and {tuple(b.shape)}")
    for operand in (a, b):
        if operand.dtype not in OPERANDS:
            raise TypeError(f"accumulate: operands must be float32 or narrower floats, got {operand.dtype}")
    described = read_sum(how)
    if is_stochastic(described) and seed is None:
        raise ValueError("accumulate: stochastic rounding needs a seed")
    return described


def multiplied_by(
    a: Tensor, b: Tensor, seed: Tensor | None, how: str, stream: int, offset: int, dtype: torch.dtype | None = None, chip: str = "auto"
) -> str:
    """Who multiplied when the operator ran with these arguments: `chip`, `emulator`, or nobody on the meta device."""
    if a.is_meta:
        return ""
    described = read_sum(how)
    return "emulator" if chip == "never" or CHIP.obstacle(a, b, described, dtype or _own_dtype(described)) else "chip"


def _own_dtype(how: Sum) -> torch.dtype:
    """The dtype that holds every value of a sum."""
    return torch.float32 if is_single(how) else torch.float64


def _fake(
    a: Tensor, b: Tensor, seed: Tensor | None, how: str, stream: int, offset: int, dtype: torch.dtype | None = None, chip: str = "auto"
) -> Tensor:
    described = _checked(a, b, seed, how)
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=dtype or _own_dtype(described))


def register(backend: str, key: str) -> None:
    """Make a backend's module the implementation for a dispatch key; it is imported when the operator first runs."""
    library.impl("accumulate", Implementation(backend).accumulate, key)


register("qsim_kernels.reference.sums", "CompositeExplicitAutograd")
if HAS_NUMBA:
    register("qsim_kernels.compiled.sums", "CPU")
if torch.version.hip is None:
    register("qsim_kernels.triton.accumulate.launch", "CUDA")
torch.library.register_fake("qsim::accumulate", _fake, lib=library)
