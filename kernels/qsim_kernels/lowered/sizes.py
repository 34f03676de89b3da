"""Sizes of tensors while a graph is traced: on a GPU they decide whether kernels take the time or their launches."""

from __future__ import annotations

from torch import Tensor

from qsim_kernels import private

#: The fewest elements for which the operators' own kernels are faster than Inductor's: rounding in MXFP8 added 17 ms to a step of GPT-2
#: medium on an H100, and 38 ms when it was lowered, which also took twice as long to compile.
_LARGE = 2**20
#: The most elements that a single program reads for a scale and again to be rounded, in one kernel in place of three.
_SMALL = 2**16


def is_large(x: Tensor) -> bool:
    """Whether a tensor is on a GPU and statically known to be large."""
    return x.is_cuda and are_known(x.numel() >= _LARGE)


def is_small(x: Tensor) -> bool:
    """Whether a tensor is on a GPU and statically known to be small: then launches take longer than kernels do."""
    return x.is_cuda and are_known(x.numel() <= _SMALL)


def are_known(*conditions: bool) -> bool:
    """Whether conditions on sizes hold, whatever the values of symbols are."""
    return all(map(private.statically_known_true, conditions))  # imports sympy
