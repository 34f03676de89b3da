"""The operators for each element: schema, fake implementation, and one on each backend.

Formats and roundings are passed as the numbers of `numbers.grid`, formatted as text, so that graphs and exported programs can carry
them. Noise is a pure function of (seed, stream, logical index): operators are stateless.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from qsim_kernels.numbers import tallies
from qsim_kernels.numbers.encoding import Encoding, code_dtype
from qsim_kernels.numbers.grid import Coding, Grid, read
from qsim_kernels.ops.backend import OnBackend, library, one_by_one, operator, read_rounding

_ROUNDING = "Tensor? seed, str grid, str rule, SymInt stream"
_CODES = "str rounding, SymInt stream, ScalarType dtype"
#: Results depend only on logical indices, so compiled code may pass tensors in any memory layout, for example channels last.
_FREE = torch.Tag.flexible_layout


@lru_cache(maxsize=4096)
def _read_encoding(grid: str, rule: str, coding: str, is_seeded: bool) -> Encoding:
    return Encoding(*read_rounding(grid, rule, is_seeded), read(Coding, coding))


def _fake_values(x: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(x, dtype=rest[-1])


def _fake_codes(x: Tensor, coding: str) -> Tensor:
    return torch.empty_like(x, dtype=code_dtype(read(Coding, coding).bits))


def _fake_transpose(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[::-1], dtype=rest[-1])


def _batched(name: str) -> Callable[..., Any]:
    """A vmap rule: every sample gets the same bits as in a call of its own. Without random bits, one call rounds all of them."""
    each = one_by_one(name)

    def rule(info: Any, in_dims: tuple[Any, ...], x: Tensor, *arguments: Any) -> Any:
        if isinstance(arguments[0], Tensor):
            return each(info, in_dims, x, *arguments)
        results: Tensor = getattr(torch.ops.qsim, name)(x.movedim(in_dims[0], 0), *arguments)
        return results, 0

    return rule


def _fake_tally(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(tallies.SIZE, dtype=torch.int64), x.new_empty(tallies.SUMS, dtype=torch.float64)


class Implementation(OnBackend):
    """The operators on one backend: parse the numbers, allocate, fill. Bumps the version counters of tensors that kernels mutate."""

    @operator(f"(Tensor x, {_ROUNDING}, SymInt offset, ScalarType dtype) -> Tensor", _fake_values, _FREE, vmap=_batched)
    def quantize(self, x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, offset: int, dtype: torch.dtype) -> Tensor:
        """Round into a new tensor."""
        out = torch.empty_like(x) if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
        self._backend.quantize_into(out, x, read_rounding(grid, rule, seed is not None), (seed, stream, offset))
        return out

    @operator(f"(Tensor(a!) x, {_ROUNDING}, SymInt offset) -> ()", lambda *_: None)
    def quantize_(self, x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, offset: int) -> None:
        """Round in place."""
        self._backend.quantize_into(x, x, read_rounding(grid, rule, seed is not None), (seed, stream, offset))
        increment_version(x)

    @operator(f"(Tensor x, {_ROUNDING}, SymInt offset, Tensor(a!) out) -> ()", lambda *_: None)
    def quantize_out(self, x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, offset: int, out: Tensor) -> None:
        """Round into a given tensor."""
        self._backend.quantize_into(out, x, read_rounding(grid, rule, seed is not None), (seed, stream, offset))
        increment_version(out)

    @operator(
        "(Tensor x, Tensor? seed, str grid, str rule, str coding, SymInt stream, SymInt offset, bool check) -> Tensor",
        lambda x, seed, grid, rule, coding, *_: _fake_codes(x, coding),
        _FREE,
        vmap=_batched,
    )
    def encode(self, x: Tensor, seed: Tensor | None, grid: str, rule: str, coding: str, stream: int, offset: int, check: bool) -> Tensor:
        """Round and write codes."""
        encoding = _read_encoding(grid, rule, coding, seed is not None)
        check = check and encoding.coding.nan < 0
        if check and x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "encode: a format without NaN needs a check for NaN, which cannot be read back while a CUDA graph is captured; "
                "pass check=False"
            )
        codes = torch.empty_like(x, dtype=code_dtype(encoding.coding.bits))
        lost = self._backend.encode_into(codes, x, encoding, (seed, stream, offset), check)
        if check and bool(lost):
            raise ValueError("encode: x holds NaN, for which the format has no code; pass check=False to store the largest value instead")
        return codes

    @operator(
        f"(Tensor x, {_ROUNDING}, ScalarType dtype, str code_grid, str code_rule, str coding, SymInt code_stream) -> (Tensor, Tensor)",
        lambda x, *rest: (torch.empty_like(x, dtype=rest[4]), _fake_codes(x, rest[-2])),
        _FREE,
    )
    def quantize_and_encode(
        self, x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, dtype: torch.dtype, *to_codes: Any
    ) -> tuple[Tensor, Tensor]:
        """Round to values and to codes of another grid in one read."""
        *spelt, code_stream = to_codes
        rounding, encoding = read_rounding(grid, rule, seed is not None), _read_encoding(*spelt, seed is not None)
        out, codes = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=code_dtype(encoding.coding.bits))
        self._backend.quantize_and_encode_into(out, codes, x, rounding, (seed, stream, 0), encoding, (seed, code_stream, 0))
        return out, codes

    @operator(f"(Tensor x, Tensor? seed, {_CODES}) -> Tensor", _fake_transpose)
    def encode_transpose(self, x: Tensor, seed: Tensor | None, *turned: Any) -> Tensor:
        """The codes of a matrix's transpose, from one read; see `reference.encode_both_ways`."""
        return self._backend.encode_both_ways(x, seed, None, turned)[1]  # type: ignore[no-any-return]

    @operator(
        f"(Tensor x, Tensor? seed, {_CODES}, str turned, SymInt turned_stream, ScalarType turned_dtype) -> (Tensor, Tensor)",
        lambda x, *rest: (x.new_empty(x.shape, dtype=rest[3]), _fake_transpose(x, *rest)),
    )
    def encode_with_transpose(self, x: Tensor, seed: Tensor | None, *codes: Any) -> tuple[Tensor, Tensor]:
        """The codes of a matrix, and those of its transpose in another format or rounding, from one read."""
        return self._backend.encode_both_ways(x, seed, codes[:3], codes[3:])  # type: ignore[no-any-return]

    @operator(
        f"(Tensor x, {_ROUNDING}, ScalarType dtype) -> (Tensor, Tensor)",
        lambda x, *rest: (
            x.new_empty(x.shape, dtype=rest[-1]),
            x.new_empty(x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32)),
        ),
    )
    def quantize_and_sum(
        self, x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Round a matrix and sum its unrounded rows in one read."""
        rounding = read_rounding(grid, rule, seed is not None)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        return out, self._backend.quantize_and_sum_into(out, x, rounding, (seed, stream, 0))

    @operator("(Tensor codes, str grid, str coding, ScalarType dtype) -> Tensor", _fake_values, _FREE, vmap=_batched)
    def decode(self, codes: Tensor, grid: str, coding: str, dtype: torch.dtype) -> Tensor:
        """Decode codes."""
        values = torch.empty_like(codes, dtype=dtype)
        self._backend.decode_into(values, codes, read(Grid, grid), read(Coding, coding))
        return values

    @operator("(Tensor x, int start, int offset, int row, int stride) -> Tensor", lambda x, *_: x.new_empty((), dtype=torch.int64))
    def checksum(self, x: Tensor, start: int, offset: int, row: int, stride: int) -> Tensor:
        """`start` plus the sum, modulo 2**64, of each element's bits mixed with its index in the whole tensor; see `reference.checksum`."""
        return self._backend.checksum(x, start, offset, row, stride)  # type: ignore[no-any-return]

    @operator("(Tensor x, Tensor rounded, float low, float high) -> (Tensor, Tensor)", _fake_tally)
    def tally(self, x: Tensor, rounded: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
        """Counts and sums as described in `qsim_kernels.numbers.tallies`, on the device of `x`, without synchronizing."""
        if x.shape != rounded.shape:
            raise ValueError(f"tally: x has shape {tuple(x.shape)}, rounded {tuple(rounded.shape)}: they must be the same")
        return self._backend.tally(x, rounded, low, high)  # type: ignore[no-any-return]


Implementation.register(reference="torch", compiled="numba", triton="triton")


def _quantize_negated_(x: Tensor, *rounding: Any) -> None:
    """Round a view in place whose memory holds its numbers with the other sign, as `y.conj().imag` does."""
    x.copy_(torch.ops.qsim.quantize.default(x.resolve_neg(), *rounding, x.dtype))


def _quantize_negated_out(x: Tensor, *arguments: Any) -> None:
    """Round into a tensor, one of them such a view."""
    *rounding, out = arguments
    out.copy_(torch.ops.qsim.quantize.default(x.resolve_neg(), *rounding, out.dtype))


# torch resolves such views for operators that return something; these do not.
library.impl("quantize_", _quantize_negated_, "Negative")
library.impl("quantize_out", _quantize_negated_out, "Negative")
