"""The operators: schema, fake implementation, plain torch for every device, Triton for CUDA.

Formats and roundings come as the plain numbers of `qsim_kernels.grid`, spelt out, so that graphs and exported programs can carry them.
Noise is a pure function of (seed, stream, logical index): no operator has a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsim_kernels import reference
from qsim_kernels.grid import Coding, Grid, Mode, Rule

_GRID = "int mantissa, int exponent, float least, float max, float min, bool zero, bool negative_zero, bool infinity"
_RULE = "int mode, int random_bits, bool correction, bool saturate"
_NOISE = "int stream, int offset"
_CODING = "int bits, bool twos_complement, int nan_code, int infinity_code"

# Where the numbers of each group begin, behind the tensors.
_RULE_AT = len(Grid._fields)
_CODING_AT = _RULE_AT + len(Rule._fields)
_CODING_END = _CODING_AT + len(Coding._fields)

library = torch.library.Library("qsim", "DEF")
for _schema in (
    f"quantize(Tensor x, Tensor? seed, {_GRID}, {_RULE}, {_NOISE}, ScalarType dtype) -> Tensor",
    f"quantize_(Tensor(a!) x, Tensor? seed, {_GRID}, {_RULE}, {_NOISE}) -> ()",
    f"quantize_out(Tensor x, Tensor? seed, {_GRID}, {_RULE}, {_NOISE}, Tensor(a!) out) -> ()",
    f"encode(Tensor x, Tensor? seed, {_GRID}, {_RULE}, {_CODING}, {_NOISE}, bool check) -> Tensor",
    f"decode(Tensor codes, {_GRID}, {_CODING}, ScalarType dtype) -> Tensor",
):
    library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


def code_dtype(bits: int) -> torch.dtype:
    """The dtype that codes of a width come in."""
    return torch.uint8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32


def _check_seed(seed: Tensor | None, mode: int) -> None:
    if mode == Mode.STOCHASTIC and seed is None:
        raise ValueError("stochastic rounding needs a seed")


class Implementation:
    """The operators on one backend: unpack the numbers, allocate, fill.

    Args:
        load: Gives the backend's module when an operator first runs, so that nothing is imported before it is needed.
    """

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    def quantize(self, x: Tensor, seed: Tensor | None, *numbers: Any) -> Tensor:
        """Rounds into a new tensor."""
        out = torch.empty_like(x, dtype=numbers[-1])
        self._fill(out, x, seed, numbers[:-1])
        return out

    def quantize_(self, x: Tensor, seed: Tensor | None, *numbers: Any) -> None:
        """Rounds in place."""
        self._fill(x, x, seed, numbers)

    def quantize_out(self, x: Tensor, seed: Tensor | None, *numbers: Any) -> None:
        """Rounds into a tensor that is given."""
        self._fill(numbers[-1], x, seed, numbers[:-1])

    def _fill(self, out: Tensor, x: Tensor, seed: Tensor | None, numbers: tuple[Any, ...]) -> None:
        grid, rule = Grid(*numbers[:_RULE_AT]), Rule(*numbers[_RULE_AT:_CODING_AT])
        _check_seed(seed, rule.mode)
        self._load().quantize_into(out, x, seed, grid, rule, *numbers[_CODING_AT:])

    def encode(self, x: Tensor, seed: Tensor | None, *numbers: Any) -> Tensor:
        """Rounds and writes codes."""
        grid, rule = Grid(*numbers[:_RULE_AT]), Rule(*numbers[_RULE_AT:_CODING_AT])
        coding = Coding(*numbers[_CODING_AT:_CODING_END])
        stream, offset, check = numbers[_CODING_END:]
        _check_seed(seed, rule.mode)
        check = check and coding.nan < 0
        if check and x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "encode: a format without NaN needs a check for NaN, which cannot be read back while a CUDA graph is captured; "
                "pass check=False"
            )
        codes = torch.empty_like(x, dtype=code_dtype(coding.bits))
        lost = self._load().encode_into(codes, x, seed, grid, rule, coding, stream, offset)
        if check and bool(lost):
            raise ValueError("encode: x holds NaN, for which the format has no code; pass check=False to store the largest value instead")
        return codes

    def decode(self, codes: Tensor, *numbers: Any) -> Tensor:
        """Reads codes."""
        values = torch.empty_like(codes, dtype=numbers[-1])
        self._load().decode_into(values, codes, Grid(*numbers[:_RULE_AT]), Coding(*numbers[_RULE_AT:-1]))
        return values


def _triton() -> Any:
    from qsim_kernels import triton

    return triton


def _register(implementation: Implementation, key: str) -> None:
    for name in ("quantize", "quantize_", "quantize_out", "encode", "decode"):
        library.impl(name, getattr(implementation, name), key)


_register(Implementation(lambda: reference), "CompositeExplicitAutograd")
if torch.version.hip is None:
    _register(Implementation(_triton), "CUDA")


@torch.library.register_fake("qsim::quantize", lib=library)
def _quantize_fake(x: Tensor, seed: Tensor | None, *numbers: Any) -> Tensor:
    return torch.empty_like(x, dtype=numbers[-1])


@torch.library.register_fake("qsim::quantize_", lib=library)
def _quantize_fake_(x: Tensor, seed: Tensor | None, *numbers: Any) -> None:
    return None


@torch.library.register_fake("qsim::quantize_out", lib=library)
def _quantize_out_fake(x: Tensor, seed: Tensor | None, *numbers: Any) -> None:
    return None


@torch.library.register_fake("qsim::encode", lib=library)
def _encode_fake(x: Tensor, seed: Tensor | None, *numbers: Any) -> Tensor:
    return torch.empty_like(x, dtype=code_dtype(numbers[_CODING_AT]))


@torch.library.register_fake("qsim::decode", lib=library)
def _decode_fake(codes: Tensor, *numbers: Any) -> Tensor:
    return torch.empty_like(codes, dtype=numbers[-1])


def _batched(name: str) -> Callable[..., Any]:
    """A rule for vmap: the operator is a pure function, so every sample gets the bits that it would get alone."""

    def rule(info: Any, in_dims: tuple[Any, ...], x: Tensor, *arguments: Any) -> tuple[Tensor, int]:
        operator = getattr(torch.ops.qsim, name)
        seed = arguments[0] if name != "decode" else None
        x_dim = in_dims[0]
        if x_dim is not None and not isinstance(seed, Tensor):
            return operator(x.movedim(x_dim, 0), *arguments), 0
        assert isinstance(seed, Tensor)
        seed_dim = in_dims[1]
        xs = x.movedim(x_dim, 0).unbind() if x_dim is not None else [x] * info.batch_size
        seeds = seed.movedim(seed_dim, 0).unbind() if seed_dim is not None else [seed] * info.batch_size
        return torch.stack([operator(x, seed, *arguments[1:]) for x, seed in zip(xs, seeds, strict=True)]), 0

    return rule


for _name in ("quantize", "encode", "decode"):
    torch.library.register_vmap(f"qsim::{_name}", _batched(_name), lib=library)
