"""Rounding under scales on processors: plain torch, but for the rounding of elements."""

from __future__ import annotations

from functools import partial

from qsim_kernels.compiled import quantize_into
from qsim_kernels.reference import scaling
from qsim_kernels.reference.hadamard import turned
from qsim_kernels.reference.scaling import amaxes_into, rescaled_into, scales_into

__all__ = ["amaxes_into", "quantize_scaled_into", "quantize_tiles_into", "rescaled_into", "scales_into", "turned"]

quantize_scaled_into = partial(scaling.quantize_scaled_into, quantize=quantize_into)
quantize_tiles_into = partial(scaling.quantize_tiles_into, quantize=quantize_into)
