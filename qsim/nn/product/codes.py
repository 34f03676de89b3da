"""Codes in place of an operand's values: for the backward pass, and for products on a chip.

A chip takes FP8 codes that are stored along the dimension over which a product sums. A layer uses these where the chip has the accumulators
of all three of its products. The input and the gradient are then read once for both of their products. Products that the chip does not
compute after all take the same codes to the emulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qsim.formats import E4M3, E5M2, Format
from qsim.nn.product.arithmetic import rows
from qsim_kernels.chip.library import product_of
from qsim_kernels.numbers.encoding import spell_encoding
from qsim_kernels.numbers.grid import Coding, read, spell
from qsim_kernels.numbers.sums import read_sum
from qsim_kernels.ops.direct import Operators
from qsim_kernels.private import constant

if TYPE_CHECKING:
    from qsim.nn.product.sites import Site

#: Formats of at most this many bits are kept for the backward pass as codes.
CODE_BITS = 8
#: The dtypes whose values are a format's, by the text of its grid.
_DTYPES = {E4M3.spelling[0]: torch.float8_e4m3fn, E5M2.spelling[0]: torch.float8_e5m2}


def coding_of(fmt: Format) -> str:
    """The codes in which an operand is kept: the format's own, one bit wider where that makes room for a NaN that it lacks."""
    coding = read(Coding, fmt.spelling[1])
    if coding.nan >= 0 or coding.twos_complement or coding.bits == CODE_BITS:
        return fmt.spelling[1]
    if fmt.grid.table:
        return spell(coding._replace(bits=coding.bits + 1, nan=1 << coding.bits))
    magnitude_bits = coding.bits if fmt.min < 0 else coding.bits + 1
    return spell(coding._replace(bits=coding.bits + 1, nan=(1 << magnitude_bits) - 1))


def kept_coding(forward: Site, backward: Site) -> str | None:
    """The codes in which an input is kept for the backward pass, if there are any.

    A weight is kept anyway. Compiled code keeps operands, because a compiler can recompute them from tensors kept for other reasons, such
    as the input of an activation function, while it must keep the results of opaque operators.
    """
    point = backward.quantizer
    is_plain = forward.is_plain and backward.is_plain and forward.call is None
    return coding_of(point.format) if is_plain and point is not None and point.format.bits <= CODE_BITS else None


def takes_codes(sites: Iterable[Site], sums: Sequence[str | None]) -> bool:
    """Whether a layer's products may be multiplied in FP8 codes: plain points in E4M3 and E5M2, and the sums of FP8 products."""
    are_fp8 = all(
        site.quantizer is not None and site.is_plain and site.quantizer.spelt.grid in _DTYPES and not (site.place.row or site.place.offset)
        for site in sites
    )
    return are_fp8 and all(how is not None and _adds_fp8(how) for how in sums)


def _adds_fp8(how: str) -> bool:
    product = product_of(read_sum(how))
    return product is not None and product.is_fp8


def encoded(ops: Operators, x: Tensor, site: Site, seed: Tensor | None) -> Tensor:
    """A tensor as codes, stored along the dimension that its product sums over."""
    how = site.spelt
    chosen = seed if how.is_stochastic else None
    if not _is_by_rows(site):
        return _turned_back(ops.encode_transpose(rows(x), chosen, *_arguments(site)), x)
    if torch.compiler.is_compiling() and not how.is_stochastic:
        # Rounding and the conversion fuse.
        return ops.quantize(x.contiguous(), None, how.grid, how.rule, 0, 0, x.dtype).to(_DTYPES[how.grid])  # type: ignore[no-any-return]
    codes = ops.encode(x.contiguous(), chosen, how.grid, how.rule, how.coding, site.stream, 0, False)
    return codes.view(_DTYPES[how.grid])  # type: ignore[no-any-return]


def encoded_twice(ops: Operators, x: Tensor, one: Site, other: Site, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """A tensor as the codes of two sites, whose products sum over different dimensions, from one read."""
    by_rows, turned = (one, other) if _is_by_rows(one) else (other, one)
    chosen = seed if one.is_stochastic or other.is_stochastic else None
    codes, turned_codes = ops.encode_with_transpose(rows(x), chosen, *_arguments(by_rows), *_arguments(turned))
    plain, back = codes.view(x.shape), _turned_back(turned_codes, x)
    return (plain, back) if by_rows is one else (back, plain)


def _turned_back(codes: Tensor, x: Tensor) -> Tensor:
    """Return transposed codes in the shape of the tensor that was encoded."""
    return codes.t().view(x.shape)


def _is_by_rows(site: Site) -> bool:
    return site.along is not None and site.along.summed == -1


def _arguments(site: Site) -> tuple[str, int, torch.dtype]:
    """A site's rounding as operators take it."""
    how = site.spelt
    return spell_encoding(how.grid, how.rule, how.coding), site.stream, _DTYPES[how.grid]


# Under torch.compile strings are constants, and so is the result of a function marked like this.
constant(_adds_fp8)
