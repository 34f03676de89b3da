"""Layers that round at five points, and the conversion of models to them."""

from qsim.nn import functional
from qsim.nn.attention import MultiheadAttention
from qsim.nn.converting.convert import convert, revert
from qsim.nn.converting.table import Conversion, changes, conversion
from qsim.nn.coverage.report import CountedProduct, Coverage
from qsim.nn.modules import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d, Embedding, Linear
from qsim.nn.quantize import Quantize

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Conversion",
    "CountedProduct",
    "Coverage",
    "Embedding",
    "Linear",
    "MultiheadAttention",
    "Quantize",
    "changes",
    "conversion",
    "convert",
    "functional",
    "revert",
]
