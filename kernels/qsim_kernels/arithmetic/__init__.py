"""The arithmetic: what is computed for each element, written once for all machines.

These are functions of integers and floats in a small vocabulary, `words`. Unbound, they compute with Python's numbers. `meanings`
binds the same functions to torch's tensors, to Numba's scalars, to Triton's blocks and to Inductor's loops.
"""

from qsim_kernels.arithmetic import (
    carriers,
    codes,
    direct,
    direct_values,
    float_sums,
    hadamard,
    mixing,
    philox,
    rounding,
    scales,
    sums,
    tables,
    updates,
)

__all__ = [
    "carriers",
    "codes",
    "direct",
    "direct_values",
    "float_sums",
    "hadamard",
    "mixing",
    "philox",
    "rounding",
    "scales",
    "sums",
    "tables",
    "updates",
]
