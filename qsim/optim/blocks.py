"""States of optimizers in blocks of 8-bit and 4-bit numbers, as other libraries keep them."""

from __future__ import annotations

from typing import Literal

from qsim.formats import Dynamic, Table
from qsim.functional.quantizer import Quantizer
from qsim.scaling import PerBlock

#: Those of 4-bit second moments: no zero, by which an update would be divided.
_LINEAR = Table([i / 16 for i in range(1, 17)])


def block_states(bits: Literal[4, 8] = 8, size: int | None = None) -> dict[str, Quantizer]:
    """How bitsandbytes and torchao keep the moments of Adam, as the argument `state=` of `Quantized`.

    With 8 bits, both moments are in dynamic tables, the second in an unsigned one, with a float32 scale for each 256 neighbours: Dettmers
    et al., arXiv 2110.02861. With 4 bits, the first moment is in a dynamic table and the second in sixteenths from 1/16 to 1, for each 128
    neighbours, as in torchao: Li et al., arXiv 2309.01507. Both libraries leave states of fewer than 4096 elements in float32.

    Args:
        bits: 8 or 4.
        size: Elements that share a scale.

    Example:
        >>> import torch, qsim
        >>> weight = torch.nn.Parameter(torch.randn(64, 64))
        >>> adam = qsim.optim.Quantized(torch.optim.AdamW([weight]), state=qsim.optim.block_states(8))
        >>> weight.square().sum().backward()
        >>> adam.step()
        >>> moment = adam.state[weight]["exp_avg"].view(-1, 256)
        >>> max(len(block.unique()) for block in moment / moment.abs().amax(1, keepdim=True)) <= 256
        True
    """
    if bits not in (4, 8):
        raise ValueError(f"block_states: bits must be 4 or 8, got {bits!r}")
    scale = PerBlock((256 if bits == 8 else 128) if size is None else size)
    second = Dynamic(8, signed=False) if bits == 8 else _LINEAR
    return {"exp_avg": Quantizer(Dynamic(bits), scale=scale), "exp_avg_sq": Quantizer(second, scale=scale)}
