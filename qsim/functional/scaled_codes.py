"""Scaled codes: a tensor's elements and its scales, both as bit patterns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qsim.formats import FP32, Format, name_of
from qsim.functional import packing
from qsim.functional.arguments import Spelling, refuse_dtype, spelling
from qsim.functional.scaled import quantize_scaled
from qsim.functional.tracing import is_readable
from qsim.rounding import overflow_in
from qsim.scaling import PerBlock, PerTile, Scaling
from qsim_kernels.numbers.encoding import code_dtype
from qsim_kernels.numbers.grid import Noise
from qsim_kernels.numbers.scales import Restore
from qsim_kernels.ops.direct import operators
from qsim_kernels.private import register_pytree_node
from qsim_kernels.torch.rounding import one_nan
from qsim_kernels.torch.scaling import saturated, under_whole


@dataclass(frozen=True, eq=False)
class ScaledCodes:
    """The result of `encode` with scales, and the input of `decode`.

    A block whose scale is NaN, because an element was not finite, decodes to NaN, whatever its elements' codes. `encode` gives these the
    code of NaN if the elements' format has one, else that of its largest value.

    Attributes:
        codes: Codes of the elements, in the tensor's shape, or packed along its last dimension.
        scales: Codes of the scales in their own format (uint8 for E8M0, an exponent plus 127, and for E4M3); float32 values where that is
            fp32. In the tensor's shape, but as many along each dimension as there are scales.
        outer: The scale of the whole tensor, a 0-d float32 tensor, if there is one.
        format: The formats of elements and scales and the size of blocks, which `decode` compares with its own; any if it is empty, as for
            codes that another program made.

    The three tensors can be unpacked, as in `codes, scales, outer = encode(…)`.

    Example:
        >>> import torch, qsim
        >>> qsim.encode(torch.tensor([[0.5, 1.0, -6.0, 0.0], [64.0, 0.0, 0.0, 0.0]]), qsim.Block("e2m1", size=4), packed=True)
        ScaledCodes(codes=tensor([[33, 15],
                [ 6,  0]], dtype=torch.uint8), scales=tensor([[127],
                [131]], dtype=torch.uint8), outer=None, format='e2m1 under e8m0 per 4')
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor | None = None
    format: str = ""

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.codes, self.scales, self.outer))


# In torch's transforms the tensors change, and the formats do not.
register_pytree_node(
    ScaledCodes,
    lambda codes: ([tensor for tensor in codes if tensor is not None], codes.format),
    lambda tensors, formats: replace(ScaledCodes(*tensors), format=formats),
    serialized_type_name="qsim.ScaledCodes",
    to_dumpable_context=str,
    from_dumpable_context=str,
)


def _formats(element: Format, scaling: Scaling) -> str:
    """The facts on which values of codes depend, and that the shapes of codes and scales do not show."""
    sizes = (scaling.size,) if isinstance(scaling, PerBlock) else (scaling.height, scaling.width) if isinstance(scaling, PerTile) else ()
    block = " × ".join(str(size) for size in sizes if size > 1)
    return f"{name_of(element)} under {name_of(scaling.format)}" + (f" per {block}" if block else "")


def _are_coded(scaling: Scaling) -> bool:
    """Whether scales have codes of their own, rather than being float32 values."""
    # Texts, because Dynamo makes variables of a format's numbers.
    return scaling.format.spelling != FP32.spelling


def check_codable(spelt: Spelling, scaling: Scaling, x: Tensor, overflow: str, packed: bool) -> None:
    """Raise an error for formats without codes, or whose codes cannot represent the result of `quantize`."""
    fmt, wide = spelt.format, torch.promote_types(x.dtype, torch.float32)
    scaling.tiles(x.shape)
    if _are_coded(scaling) and not scaling.format.has_nan:
        raise ValueError(f"encode: {scaling.format!r} has no code of NaN, the scale of what is not finite; choose scales that have")
    if overflow_in(fmt, overflow) == "nonfinite" and not fmt.has_nan:
        raise ValueError(f"encode: overflow={overflow!r} makes NaN of what overflows, for which {fmt!r} has no code")
    if wide not in spelt.holders:
        refuse_dtype(spelt, wide, "encode: what x is divided in")
    if packed:
        packing.check_packing(fmt, x.shape)


def encode_scaled(x: Tensor, spelt: Spelling, scaling: Scaling, noise: Noise, overflow: str, packed: bool) -> ScaledCodes:
    """The codes of what `quantize_scaled` gives, element by element and scale by scale; the arguments are its, and two of `encode`."""
    fmt, narrowest = spelt.format, spelt.holders[0]
    elements, scales, outer = quantize_scaled(operators(x), x.detach(), spelt, scaling, noise, narrowest, Restore.NOTHING)
    codes = _codes(elements, spelling(fmt, "nearest", overflow))
    assert scales is not None  # no scale was multiplied in
    scales = scales.view(scaling.counts(x.shape))
    if _are_coded(scaling):
        scales = _codes(scales, spelling(scaling.format, "nearest", "saturate"))
    return ScaledCodes(packing.pack(codes, fmt.bits) if packed else codes, scales, outer, _formats(fmt, scaling))


def check_codes(codes: object, fmt: Format, packed: bool) -> Tensor:
    """Raise an error unless these are codes of a format's values; return them unpacked."""
    if not isinstance(codes, Tensor):
        raise TypeError(f"decode: codes must be a tensor, got {type(codes).__name__}")
    expected = torch.uint8 if packed else code_dtype(fmt.bits)
    if codes.layout != torch.strided:
        raise TypeError(f"decode: codes must be dense, got layout {codes.layout}; call codes.to_dense() first")
    if codes.dtype != expected:
        raise TypeError(f"decode: {fmt!r} has codes in {expected}, got {codes.dtype}")
    if packed:
        return packing.unpack(codes, fmt)
    _check_range("codes", codes, fmt)
    return codes


def _check_range(name: str, codes: Tensor, fmt: Format) -> None:
    """Raise an error for codes of more bits than a format has, where looking is cheap: on a GPU the host would wait."""
    if fmt.bits == 8 * codes.dtype.itemsize or codes.device.type != "cpu" or type(codes) is not Tensor or not is_readable(codes):
        return
    least, largest = (int(end) for end in torch.aminmax(codes)) if codes.numel() else (0, 0)
    if least < 0 or largest >= 1 << fmt.bits:
        wrong = least if least < 0 else largest
        raise ValueError(f"decode: {name} of {fmt!r} must be in 0…{(1 << fmt.bits) - 1}, as it has {fmt.bits} bits, got {wrong}")


def check_scaled_codes(given: ScaledCodes, fmt: Format, scaling: Scaling, packed: bool) -> Tensor:
    """Raise an error for codes and scales that do not go together; gives the codes unpacked."""
    expected = _formats(fmt, scaling)
    if given.format not in ("", expected):
        raise ValueError(f"decode: the codes are those of {given.format}, and the format is {expected}: decode them as they were encoded")
    codes = check_codes(given.codes, fmt, packed)
    _check_scales(codes, given.scales, scaling)
    _check_outer(given.outer, scaling)
    for name, tensor in (("scales", given.scales), ("outer", given.outer)):
        if tensor is not None and tensor.device != codes.device:
            raise ValueError(f"decode: {name} is on {tensor.device}, codes on {codes.device}: they must be on the same device")
    return codes


def _check_scales(codes: Tensor, scales: object, scaling: Scaling) -> None:
    if not isinstance(scales, Tensor):
        raise TypeError(f"decode: scales must be a tensor, got {type(scales).__name__}")
    expected = code_dtype(scaling.format.bits) if _are_coded(scaling) else torch.float32
    if scales.dtype != expected:
        raise TypeError(f"decode: scales in {scaling.format!r} come in {expected}, got {scales.dtype}")
    shape = scaling.counts(codes.shape)
    if tuple(scales.shape) != shape:
        raise ValueError(f"decode: codes of shape {tuple(codes.shape)} have scales of shape {shape}, got {tuple(scales.shape)}")
    if _are_coded(scaling):
        _check_range("scales", scales, scaling.format)


def _check_outer(outer: object, scaling: Scaling) -> None:
    if scaling.outer is None:
        if outer is not None:
            raise ValueError("decode: this scaling has no outer scale: outer must be None")
        return
    if not isinstance(outer, Tensor):
        raise TypeError(f"decode: these scales need outer, a float32 scale of the whole tensor, got {type(outer).__name__}")
    if outer.dtype != torch.float32 or outer.dim():
        raise ValueError(f"decode: outer must be float32 and of shape (), got {outer.dtype} and {tuple(outer.shape)}")


def decode_scaled(
    codes: Tensor, scales: Tensor, outer: Tensor | None, spelt: Spelling, scaling: Scaling, overflow: str, dtype: torch.dtype
) -> Tensor:
    """The values of codes, given unpacked, under scales: products in float32, or in float64 where the result is in that."""
    wide = torch.promote_types(dtype, torch.float32)
    factors = scales
    if _are_coded(scaling):
        _, grid, coding, *_ = spelling(scaling.format, "nearest", "saturate")
        factors = torch.ops.qsim.decode.default(scales, grid, coding, torch.float32)
    if outer is not None:
        factors = under_whole(factors, outer)
    elements = torch.ops.qsim.decode.default(codes, spelt.grid, spelt.coding, wide)
    product = elements * _spread(factors.to(wide), codes, scaling)
    if overflow != "nonfinite":
        # The code of an infinity stays one, whatever its scale.
        product = torch.where(elements.isinf(), product, saturated(product, dtype))
    return one_nan(product.to(dtype)).contiguous()


def _codes(values: Tensor, spelt: Spelling) -> Tensor:
    """The codes of values that are in the format."""
    return torch.ops.qsim.encode.default(values, None, spelt.grid, spelt.rule, spelt.coding, 0, 0, False)  # type: ignore[no-any-return]


def _spread(scales: Tensor, codes: Tensor, scaling: Scaling) -> Tensor:
    """Each element's scale; along dimensions that have but one, that one, for broadcasting."""
    for dim, (size, reach) in enumerate(zip(codes.shape, scaling.extent(codes.shape), strict=True)):
        if reach not in (1, size):
            scales = scales.index_select(dim, torch.arange(size, device=codes.device) // reach)
    return scales
