"""The operators that write codes of a matrix transposed, alone or next to its codes in place, from one read.

A product on a chip reads FP8 operands along the sum. The three products of a layer sum along different dimensions, so that each of its
matrices is needed both ways, as rounded forward and as rounded backward. Codes are returned in the dtype in which products take them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qsim_kernels.numbers.grid import BAR
from qsim_kernels.ops.backend import OnBackend, library, schema_of


def encode_transpose(x: Tensor, seed: Tensor | None, rounding: str, stream: int, dtype: torch.dtype) -> Tensor:
    """The codes of a matrix's transpose; random bits are those of the matrix's own elements.

    Args:
        x: A matrix.
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        rounding: How codes are made, spelled.
        stream: Which of the seed's streams of random bits to use.
        dtype: The dtype of the codes, which may be a float's of their width.
    """
    return _encoded(x, seed, rounding, stream, dtype).t().contiguous()


def encode_with_transpose(
    x: Tensor,
    seed: Tensor | None,
    rounding: str,
    stream: int,
    dtype: torch.dtype,
    turned: str,
    turned_stream: int,
    turned_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The codes of a matrix, and those of its transpose in another format or rounding.

    Args:
        x: A matrix.
        seed: A 0-d int64 tensor, needed only for stochastic rounding.
        rounding: How the codes in place are made, spelled.
        stream: Their stream of random bits.
        dtype: Their dtype.
        turned: The same for the transposed codes.
        turned_stream: The same.
        turned_dtype: The same.
    """
    return _encoded(x, seed, rounding, stream, dtype), encode_transpose(x, seed, turned, turned_stream, turned_dtype)


def _encoded(x: Tensor, seed: Tensor | None, rounding: str, stream: int, dtype: torch.dtype) -> Tensor:
    return torch.ops.qsim.encode.default(x.contiguous(), seed, *rounding.split(BAR), stream, 0, False).view(dtype)  # type: ignore[no-any-return]


class Implementation(OnBackend):
    """The operators on a backend with a kernel for both."""

    def encode_transpose(self, x: Tensor, seed: Tensor | None, *turned: Any) -> Tensor:
        """The codes of a matrix's transpose."""
        return self._backend.encode_both_ways(x, seed, None, turned)[1]  # type: ignore[no-any-return]

    def encode_with_transpose(self, x: Tensor, seed: Tensor | None, *codes: Any) -> tuple[Tensor, Tensor]:
        """The codes of a matrix, and those of its transpose."""
        return self._backend.encode_both_ways(x, seed, codes[:3], codes[3:])  # type: ignore[no-any-return]


def _transpose_fake(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[::-1], dtype=rest[-1])


def _both_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=rest[3]), _transpose_fake(x, *rest)


_KERNEL = Implementation("qsim_kernels.triton.quantize.transposes")
for _reference, _fake in ((encode_transpose, _transpose_fake), (encode_with_transpose, _both_fake)):
    _name = _reference.__name__
    library.define(schema_of(_reference), tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(_name, _reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"qsim::{_name}", _fake, lib=library)
    if torch.version.hip is None:
        library.impl(_name, getattr(_KERNEL, _name), "CUDA")
