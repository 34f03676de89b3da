"""Rounding of tensors: immediately, or forward and backward in a model."""

from qsim.compat.qtorch.quant.quant_function import block_quantize, fixed_point_quantize, float_quantize, quantizer
from qsim.compat.qtorch.quant.quant_module import Quantizer

__all__ = ["fixed_point_quantize", "block_quantize", "float_quantize", "quantizer", "Quantizer"]
