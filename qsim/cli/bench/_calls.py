"""Plain user calls whose overhead is measured: time on the host, and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

import qsim


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class UserCall:
    """A call that makes a new tensor.

    Attributes:
        call: A function of the prepared input.
        prepare: A function that creates the input from float32 values.
    """

    call: Callable[[Tensor], Tensor]
    prepare: Callable[[Tensor], Tensor] = _same


#: The calls, by their names in the tables.
CALLS = {
    "quantize e4m3": UserCall(lambda x: qsim.quantize(x, "e4m3")),
    "quantize e4m3, stochastic": UserCall(lambda x: qsim.quantize(x, "e4m3", rounding="stochastic")),
    "quantize mxfp4": UserCall(lambda x: qsim.quantize(x, "mxfp4")),
    "quantize nvfp4": UserCall(lambda x: qsim.quantize(x, "nvfp4")),
    "encode e4m3": UserCall(lambda x: qsim.encode(x, "e4m3")),
    "encode e2m1": UserCall(lambda x: qsim.encode(x, "e2m1")),
    "encode e2m1, check=False": UserCall(lambda x: qsim.encode(x, "e2m1", check=False)),
    "decode e4m3": UserCall(lambda codes: qsim.decode(codes, "e4m3"), lambda x: qsim.encode(x, "e4m3")),
}
