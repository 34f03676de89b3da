"""The operators `torch.ops.qsim.*`: schema, fake implementation, and which implementation runs on which device."""

from qsim_kernels.ops import accumulate, accumulate_rows, accumulate_scaled, quantize, scaled, tally, transposes, update

__all__ = ["accumulate", "accumulate_rows", "accumulate_scaled", "quantize", "scaled", "tally", "transposes", "update"]
