"""Scales of tiles whose elements two neighbouring lanes of a warp hold: each lane computes half of them, in NVIDIA's PTX.

Otherwise both would compute all of them, a quarter of the instructions that rounding NVFP4's blocks takes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qsim_kernels.triton.device.tile_scales import tile_scales
from qsim_kernels.triton.placement import Placement

_COPIES = Placement(copies=2)

_PARITY = """.reg .pred odd;
    .reg .b32 lane, other;
    mov.u32 lane, %laneid;
    and.b32 lane, lane, 1;
    setp.ne.u32 odd, lane, 0;"""
#: PTX for the first of two numbers in even lanes of a warp, and for the second in odd ones.
ONE_OF_TWO: tl.constexpr = tl.constexpr(_COPIES.mark(f"{{ {_PARITY} selp.b32 $0, $2, $1, odd; }}"))
#: PTX for both numbers of a lane and its neighbour, that of the even lane first.
BOTH: tl.constexpr = tl.constexpr(
    _COPIES.mark(f"""{{ {_PARITY}
    shfl.sync.bfly.b32 other, $2, 1, 31, 0xFFFFFFFF;
    selp.b32 $0, other, $2, odd;
    selp.b32 $1, $2, other, odd; }}""")
)


@triton.jit
def of_both_lanes(x, SHAPE: tl.constexpr):
    """Two numbers from each two lanes, in the order in which `scales_by_lanes` splits them."""
    KIND: tl.constexpr = (x.dtype, x.dtype)
    first, second = tl.inline_asm_elementwise(BOTH, "=&r,=&r,r", [x], dtype=KIND, is_pure=True, pack=1)
    return tl.reshape(tl.permute(tl.join(first, second), (1, 0)), SHAPE)


@triton.jit
def scales_by_lanes(amaxes, under, making, MAKING: tl.constexpr, SCALE_ROUNDING: tl.constexpr):
    """`tile_scales` of tiles that two neighbouring lanes share: each lane computes half of the scales, and they exchange them.

    A thread must hold tiles of both halves of a region. The compiler takes both lanes to have the same numbers; `placement` checks
    that it then leaves them where they are.
    """
    SHAPE: tl.constexpr = amaxes.shape
    first, second = tl.split(tl.permute(tl.reshape(amaxes, (2, amaxes.numel // 2)), (1, 0)))
    bits = tl.inline_asm_elementwise(ONE_OF_TWO, "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1)
    scales, inverses = tile_scales(bits, under, making, MAKING, SCALE_ROUNDING)
    return of_both_lanes(scales, SHAPE), of_both_lanes(inverses, SHAPE)
