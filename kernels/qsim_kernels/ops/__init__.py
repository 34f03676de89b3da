"""The operators `torch.ops.qsim.*`: schema, fake implementation, and which implementation runs on which device."""

from qsim_kernels.ops import accumulate, quantize, scaled, update

__all__ = ["accumulate", "quantize", "scaled", "update"]
