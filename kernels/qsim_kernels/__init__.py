"""qsim's compute kernels as operators of torch's dispatcher: in plain torch, in loops compiled by Numba for CPUs, and in Triton for GPUs.

Importing this package defines the operators `torch.ops.qsim.*`. It imports neither Numba nor Triton and touches no device: an operator
imports its backend when it first runs there. What is computed for each element is defined once, in `arithmetic`.
"""

from qsim_kernels import lowered, ops
from qsim_kernels.numbers.grid import Coding, Grid, Mode, Rule, read, spell

__all__ = ["Coding", "Grid", "Mode", "Rule", "lowered", "ops", "read", "spell"]
