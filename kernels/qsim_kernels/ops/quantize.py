"""The operators: schema, fake implementation, plain torch for every device, Numba for CPUs if it is installed, Triton for CUDA.

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

from qsim_kernels.numbers.encoding import Encoding, code_dtype
from qsim_kernels.numbers.grid import Coding, Grid, read
from qsim_kernels.ops.backend import OnBackend, library, read_rounding

#: Results depend only on logical indices, so compiled code may pass tensors in any memory layout, for example channels last.
_FREE = ("quantize", "encode", "quantize_and_encode", "decode")
for _schema in (
    "quantize(Tensor x, Tensor? seed, str grid, str rule, SymInt stream, SymInt offset, ScalarType dtype) -> Tensor",
    "quantize_(Tensor(a!) x, Tensor? seed, str grid, str rule, SymInt stream, SymInt offset) -> ()",
    "quantize_out(Tensor x, Tensor? seed, str grid, str rule, SymInt stream, SymInt offset, Tensor(a!) out) -> ()",
    "encode(Tensor x, Tensor? seed, str grid, str rule, str coding, SymInt stream, SymInt offset, bool check) -> Tensor",
    "quantize_and_encode(Tensor x, Tensor? seed, str grid, str rule, SymInt stream, ScalarType dtype, "
    "str code_grid, str code_rule, str coding, SymInt code_stream) -> (Tensor, Tensor)",
    "quantize_and_sum(Tensor x, Tensor? seed, str grid, str rule, SymInt stream, ScalarType dtype) -> (Tensor, Tensor)",
    "decode(Tensor codes, str grid, str coding, ScalarType dtype) -> Tensor",
    "checksum(Tensor x, int start, int offset, int row, int stride) -> Tensor",
):
    _tags = (torch.Tag.flexible_layout,) if _schema.partition("(")[0] in _FREE else ()
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, *_tags))


@lru_cache(maxsize=4096)
def _read_encoding(grid: str, rule: str, coding: str, is_seeded: bool) -> Encoding:
    return Encoding(*read_rounding(grid, rule, is_seeded), read(Coding, coding))


class Implementation(OnBackend):
    """The operators on one backend: parse the numbers, allocate, fill. Bumps the version counters of tensors that kernels mutate."""

    def quantize(self, x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, offset: int, dtype: torch.dtype) -> Tensor:
        """Round into a new tensor."""
        out = torch.empty_like(x) if dtype == x.dtype else torch.empty_like(x, dtype=dtype)
        self._backend.quantize_into(out, x, read_rounding(grid, rule, seed is not None), (seed, stream, offset))
        return out

    def quantize_(self, x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, offset: int) -> None:
        """Round in place."""
        self._backend.quantize_into(x, x, read_rounding(grid, rule, seed is not None), (seed, stream, offset))
        increment_version(x)

    def quantize_out(self, x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, offset: int, out: Tensor) -> None:
        """Round into a given tensor."""
        self._backend.quantize_into(out, x, read_rounding(grid, rule, seed is not None), (seed, stream, offset))
        increment_version(out)

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

    def quantize_and_encode(
        self, x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, dtype: torch.dtype, *to_codes: Any
    ) -> tuple[Tensor, Tensor]:
        """Round to values and to codes of another grid in one read."""
        *spelt, code_stream = to_codes
        rounding, encoding = read_rounding(grid, rule, seed is not None), _read_encoding(*spelt, seed is not None)
        out, codes = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=code_dtype(encoding.coding.bits))
        self._backend.quantize_and_encode_into(out, codes, x, rounding, (seed, stream, 0), encoding, (seed, code_stream, 0))
        return out, codes

    def quantize_and_sum(
        self, x: Tensor, seed: Tensor | None, grid: str, rule: str, stream: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Round a matrix and sum its unrounded rows in one read."""
        rounding = read_rounding(grid, rule, seed is not None)
        out = torch.empty(x.shape, dtype=dtype, device=x.device)
        return out, self._backend.quantize_and_sum_into(out, x, rounding, (seed, stream, 0))

    def decode(self, codes: Tensor, grid: str, coding: str, dtype: torch.dtype) -> Tensor:
        """Decode codes."""
        values = torch.empty_like(codes, dtype=dtype)
        self._backend.decode_into(values, codes, read(Grid, grid), read(Coding, coding))
        return values

    def checksum(self, x: Tensor, start: int, offset: int, row: int, stride: int) -> Tensor:
        """`start` plus the sum, modulo 2**64, of each element's bits mixed with its index in the whole tensor; see `reference.checksum`."""
        return self._backend.checksum(x, start, offset, row, stride)  # type: ignore[no-any-return]


def _fake_codes(x: Tensor, coding: str) -> Tensor:
    return torch.empty_like(x, dtype=code_dtype(read(Coding, coding).bits))


Implementation.register(
    {
        "quantize": lambda x, *rest: torch.empty_like(x, dtype=rest[-1]),
        "quantize_": lambda *_: None,
        "quantize_out": lambda *_: None,
        "encode": lambda x, seed, grid, rule, coding, *_: _fake_codes(x, coding),
        "quantize_and_encode": lambda x, *rest: (torch.empty_like(x, dtype=rest[4]), _fake_codes(x, rest[-2])),
        "quantize_and_sum": lambda x, *rest: (
            x.new_empty(x.shape, dtype=rest[-1]),
            x.new_empty(x.shape[1:], dtype=torch.promote_types(x.dtype, torch.float32)),
        ),
        "decode": lambda codes, *rest: torch.empty_like(codes, dtype=rest[-1]),
        "checksum": lambda x, *_: x.new_empty((), dtype=torch.int64),
    },
    reference="qsim_kernels.torch",
    compiled="qsim_kernels.numba",
    triton="qsim_kernels.triton",
)


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


def _batched(name: str) -> Callable[..., Any]:
    """A vmap rule: the operator is a pure function, so every sample gets the same bits as in a call of its own."""

    def rule(info: Any, in_dims: tuple[Any, ...], x: Tensor, *arguments: Any) -> tuple[Tensor, int]:
        operator = getattr(torch.ops.qsim, name)
        seed = arguments[0] if name != "decode" else None
        x_dim = in_dims[0]
        if x_dim is not None and not isinstance(seed, Tensor):
            return operator(x.movedim(x_dim, 0), *arguments), 0
        assert isinstance(seed, Tensor)
        seed_dim = in_dims[1]
        xs = x.movedim(x_dim, 0) if x_dim is not None else x.expand(info.batch_size, *x.shape)
        if not info.batch_size:
            return operator(xs, seed.new_zeros(()), *arguments[1:]), 0
        seeds = seed.movedim(seed_dim, 0).unbind() if seed_dim is not None else [seed] * info.batch_size
        return torch.stack([operator(x, seed, *arguments[1:]) for x, seed in zip(xs, seeds, strict=True)]), 0

    return rule


for _name in ("quantize", "encode", "decode"):
    torch.library.register_vmap(f"qsim::{_name}", _batched(_name), lib=library)
