"""Scales that do not follow from the current tensor: a number, or a scale from earlier tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qsim.formats import Format
from qsim.formats.base import check_integer
from qsim.scaling.base import Rule, Whole
from qsim_kernels.numbers import scales as numbers

_HOMELESS = "delayed scales live in a module, which keeps their history: give them to a layer of qsim.nn, or to qsim.convert"
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, init=False, repr=False)
class Given(Whole):
    """A fixed, given scale for the whole tensor. Values beyond its range saturate, including infinities.

    Args:
        value: The scale: a positive number, converted to float32.

    Example:
        >>> import torch, qsim
        >>> qsim.quantize(torch.tensor([0.3, 100.0]), "e2m1", scale=qsim.scaling.Given(0.25))
        tensor([0.2500, 1.5000])
    """

    value: float
    _geometry = ("value",)

    def __init__(self, value: float) -> None:
        super().__init__()
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"Given: value must be a number, got {value!r}")
        if not numbers.SMALLEST <= value <= _LARGEST:
            raise ValueError(f"Given: value must be a number from 2**-127 to float32's largest, got {value!r}")
        object.__setattr__(self, "value", torch.tensor(value, dtype=torch.float32, device="cpu").item())

    def __repr__(self) -> str:
        return f"Given(value={self.value!r})"


@dataclass(frozen=True, init=False, repr=False)
class Delayed(Whole):
    """One scale for the whole tensor that follows from the largest magnitudes of earlier tensors at the same point of a layer.

    The history lives in the layer, and in its `state_dict`. In training every tensor's largest magnitude goes into it after the scale has
    been taken from it; in evaluation it is only read. The first tensor is scaled by its own largest magnitude, and so is one preceded only
    by zeros. Values beyond the scale's range saturate. Non-finite magnitudes are not recorded, and affect only their own tensor.

    Histories are buffers, separate in each process: pass `broadcast_buffers=False` to `DistributedDataParallel`, or it overwrites them with
    those of the first process.

    Args:
        history: Number of tensors to remember.
        margin: See `Scaling`.
        format: See `Scaling`.
        rule: See `Scaling`.

    Example:
        >>> import qsim
        >>> spec = qsim.Quantizer("e4m3", scale=qsim.scaling.Delayed(history=16))
        >>> layer = qsim.nn.Linear(4, 2, points=qsim.FivePoint(act=spec))
        >>> list(layer.state_dict())
        ['weight', 'bias', 'act_amaxes', 'act_recorded']
    """

    history: int
    _geometry = ("history",)

    def __init__(self, history: int = 1024, margin: int = 0, format: str | torch.dtype | Format = "fp32", rule: Rule = "fit") -> None:
        super().__init__(format, rule, margin)
        object.__setattr__(self, "history", check_integer("Delayed", "history", history, 1, 2**20))

    def tiles(self, shape: Sequence[int]) -> numbers.TileSizes:  # noqa: D102 (documented above)
        raise ValueError(_HOMELESS)

    def extent(self, shape: Sequence[int]) -> tuple[int, ...]:  # noqa: D102 (documented above)
        raise ValueError(_HOMELESS)
