"""The matrix units of real chips."""

from __future__ import annotations

from typing import NamedTuple

from qsim.accumulators.aligned import Aligned
from qsim.accumulators.base import labelled
from qsim.accumulators.block_scaled import BlockScaled
from qsim.accumulators.two_step import TwoStep
from qsim.formats import Float

#: The running sum of FP8 products in Ada and Hopper: float32 without its ten last bits.
E8M13 = Float(8, 13, specials="ieee")

_SIM = "Xie et al., MMA-Sim, arXiv 2511.10909"
_SIM_CODE = f"{_SIM}, and its code of November 2025"
_VOLTA = "Fasi et al., Numerical Behavior of NVIDIA Tensor Cores, 2021"
#: How a model is known to be right.
CHECKED, READ = "checked on the chip", "from the literature"


class Unit(NamedTuple):
    """The sum of a real chip's matrix unit.

    Attributes:
        accumulator: The model.
        evidence: `CHECKED` or `READ`.
        source: A paper, or what was compared.
    """

    accumulator: Aligned | TwoStep | BlockScaled
    evidence: str
    source: str


def _unit(
    block: int, fraction: int, operands: tuple[str, ...], source: str = _SIM, evidence: str = READ, out: Float | str = "fp32"
) -> Unit:
    return Unit(Aligned(block, fraction, out, operands=operands), evidence, source)


_FP8 = ("e4m3", "e5m2")
#: The elements of MXFP8 and MXFP6, which may be mixed, and those of MXFP4 in such a mix.
_MX = (*_FP8, "e3m2", "e2m3", "e2m1")
_HOPPER = "against torch.{} on an H200"

#: Every unit by its name.
UNITS: dict[str, Unit] = {
    "h100_fp8": _unit(32, 13, _FP8, _HOPPER.format("_scaled_mm with use_fast_accum=True"), CHECKED, E8M13),
    "h100_bf16": _unit(16, 25, ("bf16",), _HOPPER.format("mm with out_dtype=torch.float32"), CHECKED),
    "h100_fp16": _unit(16, 25, ("fp16",), _HOPPER.format("mm with out_dtype=torch.float32"), CHECKED),
    "h100_tf32": _unit(8, 25, ("tf32",), "against torch.mm with allow_tf32 on an H200", CHECKED),
    "b200_fp8": _unit(32, 25, _FP8),
    "b200_bf16": _unit(16, 25, ("bf16",)),
    "b200_fp16": _unit(16, 25, ("fp16",)),
    "b200_tf32": _unit(8, 25, ("tf32",)),
    "b200_mxfp8": Unit(BlockScaled(32, 25, 32, operands=_MX), READ, _SIM_CODE),
    "b200_mxfp6": Unit(BlockScaled(32, 25, 32, operands=_MX), READ, _SIM_CODE),
    "b200_mxfp4": Unit(BlockScaled(64, 35, 16, exact=True, operands=("e2m1",)), READ, _SIM_CODE),
    "b200_nvfp4": Unit(BlockScaled(64, 35, 16, "e4m3", exact=True, operands=("e2m1",)), READ, _SIM_CODE),
    "ada_fp8": _unit(16, 13, _FP8, out=E8M13),
    "ada_bf16": _unit(8, 24, ("bf16",)),
    "ada_fp16": _unit(8, 24, ("fp16",)),
    "ada_tf32": _unit(4, 24, ("tf32",)),
    "a100_bf16": _unit(8, 24, ("bf16",)),
    "a100_fp16": _unit(8, 24, ("fp16",)),
    "a100_tf32": _unit(4, 24, ("tf32",)),
    "t4_fp16": _unit(8, 24, ("fp16",)),
    "v100_fp16": _unit(4, 23, ("fp16",), f"{_VOLTA}; {_SIM}"),
    "cdna3_fp8": Unit(TwoStep(16, 24, 31, apart=True, operands=("e4m3fnuz", "e5m2fnuz")), READ, _SIM_CODE),
    "cdna3_bf16": Unit(TwoStep(8, 24, 31, operands=("bf16",)), READ, _SIM_CODE),
    "cdna3_fp16": Unit(TwoStep(8, 24, 31, operands=("fp16",)), READ, _SIM_CODE),
    "cdna3_tf32": Unit(TwoStep(4, 24, 31, operands=("tf32",)), READ, _SIM_CODE),
}
for _name, _known in UNITS.items():
    labelled(_known.accumulator, _name)
