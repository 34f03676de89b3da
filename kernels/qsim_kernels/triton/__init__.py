"""The operators in Triton, for CUDA; through Triton's interpreter they run on the CPU, for tests."""

from qsim_kernels.triton.launch import decode_into, encode_into, quantize_and_encode_into, quantize_into

__all__ = ["decode_into", "encode_into", "quantize_and_encode_into", "quantize_into"]
