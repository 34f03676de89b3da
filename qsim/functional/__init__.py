"""Rounding of single tensors: to values, to codes, and back."""

from qsim.functional.codes import decode, encode
from qsim.functional.scaled_codes import ScaledCodes
from qsim.functional.threshold import threshold_quantize
from qsim.functional.values import quantize, quantize_

__all__ = ["ScaledCodes", "decode", "encode", "quantize", "quantize_", "threshold_quantize"]
