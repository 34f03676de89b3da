"""Block formats: an element format, and a scale that neighbours share.

Example:
    >>> import torch, qsim
    >>> from qsim import block
    >>> x = torch.linspace(0.1, 3.1, 32)
    >>> for fmt in (block.MXFP8_E4M3, block.MXFP8_E5M2, block.MXFP6_E2M3, block.MXFP6_E3M2, block.MXINT8, block.MXFP4, block.NVFP4):
    ...     print(f"{(qsim.quantize(x, fmt) - x).abs().max():.4f}", fmt)
    0.1177 Block('e4m3', 32, scale='e8m0', rule='floor')
    0.2290 Block('e5m2', 32, scale='e8m0', rule='floor')
    0.1177 Block('e2m3', 32, scale='e8m0', rule='floor')
    0.2290 Block('e3m2', 32, scale='e8m0', rule='floor')
    0.0153 Block('Fixed(8, 6)', 32, scale='e8m0', rule='floor')
    0.4806 Block('e2m1', 32, scale='e8m0', rule='floor')
    0.4839 Block('e2m1', 16, scale='e4m3', rule='fit', outer="Tensor(format='fp32', rule='fit')")
    >>> block.FP8_1X128 == block.NAMED["fp8_1x128"], block.FP8_128X128 == block.NAMED["fp8_128x128"]
    (True, True)
"""

from qsim.scaling.block import (
    FP8_1X128,
    FP8_128X128,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NAMED,
    NVFP4,
    Block,
    resolve,
)

__all__ = [
    "FP8_128X128",
    "FP8_1X128",
    "MXFP4",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "MXINT8",
    "NAMED",
    "NVFP4",
    "Block",
    "resolve",
]
