"""Rounding on wires: collectives whose messages and partial sums are rounded, between processes and simulated in one.

Example:
    >>> import torch, qsim
    >>> gradients = [torch.full((4,), 1.0 + rank / 8) for rank in range(4)]
    >>> qsim.distributed.simulate_all_reduce(gradients, qsim.distributed.AllReduce("ring", wire="e4m3"))
    tensor([4.5000, 5.0000, 4.5000, 5.0000])
"""

from qsim.distributed.all_reduce import AllReduce
from qsim.distributed.fsdp import FSDPWire
from qsim.distributed.hooks import WireState, comm_hook
from qsim.distributed.processes import all_reduce, reduce_scatter
from qsim.distributed.simulated import simulate_all_reduce, simulate_reduce_scatter

__all__ = [
    "AllReduce",
    "FSDPWire",
    "WireState",
    "all_reduce",
    "comm_hook",
    "reduce_scatter",
    "simulate_all_reduce",
    "simulate_reduce_scatter",
]
