"""qsim emulates low-precision arithmetic for training neural networks in PyTorch.

Example:
    >>> import torch, qsim
    >>> qsim.quantize(torch.tensor([0.3, 1.7]), "e4m3")
    tensor([0.3125, 1.7500])
"""

from qsim import formats, random, rounding
from qsim.formats import Fixed, Float, Format, Int, PowerOfTwo, format
from qsim.functional import decode, encode, quantize, quantize_, threshold_quantize
from qsim.quantizer import Quantizer
from qsim.rounding import Rounding, Stochastic

__version__ = "0.1.0"

__all__ = [
    "Fixed",
    "Float",
    "Format",
    "Int",
    "PowerOfTwo",
    "Quantizer",
    "Rounding",
    "Stochastic",
    "decode",
    "encode",
    "format",
    "formats",
    "quantize",
    "quantize_",
    "random",
    "rounding",
    "threshold_quantize",
]
