"""Block formats: an element format, and a scale that neighbours share."""

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
