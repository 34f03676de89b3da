"""Several narrow codes in whole bytes, along the last dimension, the first code in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor

from qsim.formats import Format

# Codes and bytes that make one group.
_GROUPS = {4: (2, 1), 6: (4, 3)}


def _group(fmt: Format) -> tuple[int, int]:
    if fmt.bits not in _GROUPS:
        raise ValueError(f"packed=True is for 4-bit and 6-bit formats; {fmt!r} has {fmt.bits} bits")
    return _GROUPS[fmt.bits]


def check_packing(fmt: Format, shape: torch.Size) -> None:
    """Raise an error for formats and shapes whose codes do not fill whole bytes."""
    codes, bytes_ = _group(fmt)
    if not shape or shape[-1] % codes:
        raise ValueError(
            f"packed=True puts {codes} codes of {fmt.bits} bits into {bytes_} byte(s): the last dimension must be a multiple of {codes}, "
            f"got shape {tuple(shape)}"
        )


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes of 4 or 6 bits."""
    group = codes.unflatten(-1, (-1, _GROUPS[bits][0]))
    if bits == 4:
        both: Tensor = group[..., 0] | group[..., 1] << 4
        return both
    a, b, c, d = group.unbind(-1)
    return torch.stack([a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2], dim=-1).flatten(-2)


def unpack(packed: Tensor, fmt: Format) -> Tensor:
    """Unpack the codes of a 4-bit or 6-bit format."""
    _, bytes_ = _group(fmt)
    if not packed.dim() or packed.shape[-1] % bytes_:
        raise ValueError(
            f"packed codes of {fmt.bits} bits come in groups of {bytes_} byte(s) along the last dimension, got shape {tuple(packed.shape)}"
        )
    if fmt.bits == 4:
        return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    a, b, c = packed.unflatten(-1, (-1, 3)).unbind(-1)
    return torch.stack([a & 63, (a >> 6 | b << 2) & 63, (b >> 4 | c << 4) & 63, c >> 2], dim=-1).flatten(-2)
