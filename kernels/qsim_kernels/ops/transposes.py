"""The operators that write codes of a matrix transposed, alone or next to its codes in place, from one read.

A product on a chip reads FP8 operands along the sum. The three products of a layer sum along different dimensions, so that each of its
matrices is needed both ways, as rounded forward and as rounded backward.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from qsim_kernels.grid import Coding, Grid, Rule, read
from qsim_kernels.ops.backend import OnBackend, library, read_rounding
from qsim_kernels.ops.quantize import code_dtype

library.define(
    "encode_transpose(Tensor x, Tensor? seed, str grid, str rule, str coding, SymInt stream) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.define(
    "encode_with_transpose(Tensor x, Tensor? seed, str grid, str rule, str coding, SymInt stream, "
    "str turned_grid, str turned_rule, str turned_coding, SymInt turned_stream) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def encode_transpose(x: Tensor, seed: Tensor | None, grid: str, rule: str, coding: str, stream: int) -> Tensor:
    """The codes of a matrix's transpose; random bits are those of the matrix's own elements."""
    codes = torch.ops.qsim.encode.default(x.contiguous(), seed, grid, rule, coding, stream, 0, False)
    return codes.t().contiguous()  # type: ignore[no-any-return]


def encode_with_transpose(
    x: Tensor,
    seed: Tensor | None,
    grid: str,
    rule: str,
    coding: str,
    stream: int,
    turned_grid: str,
    turned_rule: str,
    turned_coding: str,
    turned_stream: int,
) -> tuple[Tensor, Tensor]:
    """The codes of a matrix, and those of its transpose in another format or rounding."""
    codes = torch.ops.qsim.encode.default(x.contiguous(), seed, grid, rule, coding, stream, 0, False)
    return codes, encode_transpose(x, seed, turned_grid, turned_rule, turned_coding, turned_stream)


class Implementation(OnBackend):
    """The operators by one kernel, `encode_both_ways(codes, turned, x, seed, rounding, stream, turned_rounding, turned_stream)`."""

    def encode_transpose(self, x: Tensor, seed: Tensor | None, grid: str, rule: str, coding: str, stream: int) -> Tensor:
        """The codes of a matrix's transpose."""
        rounding = _read(grid, rule, coding, seed is not None)
        turned = x.new_empty(x.shape[::-1], dtype=code_dtype(rounding[2].bits))
        self._backend.encode_both_ways(None, turned, x, seed, rounding, stream, rounding, stream)
        return turned

    def encode_with_transpose(
        self,
        x: Tensor,
        seed: Tensor | None,
        grid: str,
        rule: str,
        coding: str,
        stream: int,
        turned_grid: str,
        turned_rule: str,
        turned_coding: str,
        turned_stream: int,
    ) -> tuple[Tensor, Tensor]:
        """The codes of a matrix, and those of its transpose."""
        rounding = _read(grid, rule, coding, seed is not None)
        turned_rounding = _read(turned_grid, turned_rule, turned_coding, seed is not None)
        codes = x.new_empty(x.shape, dtype=code_dtype(rounding[2].bits))
        turned = x.new_empty(x.shape[::-1], dtype=code_dtype(turned_rounding[2].bits))
        self._backend.encode_both_ways(codes, turned, x, seed, rounding, stream, turned_rounding, turned_stream)
        return codes, turned


@lru_cache(maxsize=4096)
def _read(grid: str, rule: str, coding: str, is_seeded: bool) -> tuple[Grid, Rule, Coding]:
    return *read_rounding(grid, rule, is_seeded), read(Coding, coding)


def _encode_transpose_fake(x: Tensor, seed: Tensor | None, grid: str, rule: str, coding: str, stream: int) -> Tensor:
    return x.new_empty((x.shape[1], x.shape[0]), dtype=code_dtype(read(Coding, coding).bits))


def _encode_with_transpose_fake(
    x: Tensor,
    seed: Tensor | None,
    grid: str,
    rule: str,
    coding: str,
    stream: int,
    turned_grid: str,
    turned_rule: str,
    turned_coding: str,
    turned_stream: int,
) -> tuple[Tensor, Tensor]:
    turned = x.new_empty((x.shape[1], x.shape[0]), dtype=code_dtype(read(Coding, turned_coding).bits))
    return x.new_empty(x.shape, dtype=code_dtype(read(Coding, coding).bits)), turned


def _register(transpose: object, both: object, key: str) -> None:
    library.impl("encode_transpose", transpose, key)
    library.impl("encode_with_transpose", both, key)


_register(encode_transpose, encode_with_transpose, "CompositeExplicitAutograd")
if torch.version.hip is None:
    _triton = Implementation("qsim_kernels.triton.quantize.transposes")
    _register(_triton.encode_transpose, _triton.encode_with_transpose, "CUDA")
torch.library.register_fake("qsim::encode_transpose", _encode_transpose_fake, lib=library)
torch.library.register_fake("qsim::encode_with_transpose", _encode_with_transpose_fake, lib=library)
