"""The operators in Triton, for CUDA; for tests they run on the CPU through Triton's interpreter."""

from qsim_kernels.triton.quantize.launch import decode_into, encode_into, quantize_and_encode_into, quantize_into
from qsim_kernels.triton.quantize.transposes import encode_both_ways
from qsim_kernels.triton.reductions.checksum import checksum
from qsim_kernels.triton.reductions.row_sums import quantize_and_sum_into
from qsim_kernels.triton.reductions.tally import tally
from qsim_kernels.triton.update.step import update

__all__ = [
    "checksum", "decode_into", "encode_both_ways", "encode_into", "quantize_and_encode_into", "quantize_and_sum_into",
    "quantize_into", "tally", "update",
]  # fmt: skip
