"""Accumulators: how a matrix product adds, from any narrow sum to the matrix units of real chips.

An accumulator is a frozen value, like a format. `qsim.matmul` and the layers take one, or its name; the result is then a function of the
operands, the accumulator and the seed, the same on every device.

Example:
    >>> import torch, qsim
    >>> a, b = torch.full((1, 4096), 0.1), torch.ones(4096, 1)
    >>> qsim.matmul(a, b, qsim.accumulators.Rounded("bf16"))
    tensor([[32.]])
    >>> qsim.accumulators.resolve("h100_fp8")
    Aligned(32, 13, out='e8m13ieee', operands=('e4m3', 'e5m2'))
    >>> qsim.accumulators.EVIDENCE["h100_fp8"][0]
    'checked on the chip'
"""

from qsim.accumulators.aligned import Aligned
from qsim.accumulators.base import Accumulator
from qsim.accumulators.block_scaled import BlockScaled
from qsim.accumulators.names import EVIDENCE, NAMED, listing, name_of, resolve
from qsim.accumulators.promoted import Promoted
from qsim.accumulators.rounded import Rounded
from qsim.accumulators.two_step import TwoStep

__all__ = ["Accumulator", "Aligned", "BlockScaled", "EVIDENCE", "NAMED", "Promoted", "Rounded", "TwoStep", "listing", "name_of", "resolve"]
