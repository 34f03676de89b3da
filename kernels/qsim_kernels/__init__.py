"""qsim's compute kernels: rounding onto a set of values, in plain torch and in Triton, as operators of torch's dispatcher.

Importing this package defines the operators `torch.ops.qsim.*`. It does not import triton or touch a device; the first CUDA tensor does.
"""

from qsim_kernels import lowered, ops
from qsim_kernels.numbers.grid import Coding, Grid, Mode, Rule, read, spell

__all__ = ["Coding", "Grid", "Mode", "Rule", "lowered", "ops", "read", "spell"]
