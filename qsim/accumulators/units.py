"""The matrix units of real chips, as far as a block of aligned and truncated products describes them."""

from __future__ import annotations

from typing import NamedTuple

from qsim.accumulators.aligned import Aligned
from qsim.accumulators.base import labelled
from qsim.formats import Float

#: The running sum of FP8 products in Ada and Hopper: float32 without its ten last bits.
E8M13 = Float(8, 13, specials="ieee")

_SIM = "Xie et al., MMA-Sim, arXiv 2511.10909"
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

    accumulator: Aligned
    evidence: str
    source: str


def _unit(
    block: int, fraction: int, operands: tuple[str, ...], source: str = _SIM, evidence: str = READ, out: Float | str = "fp32"
) -> Unit:
    return Unit(Aligned(block, fraction, out, operands=operands), evidence, source)


_FP8 = ("e4m3", "e5m2")
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
    "ada_fp8": _unit(16, 13, _FP8, out=E8M13),
    "ada_bf16": _unit(8, 24, ("bf16",)),
    "ada_fp16": _unit(8, 24, ("fp16",)),
    "ada_tf32": _unit(4, 24, ("tf32",)),
    "a100_bf16": _unit(8, 24, ("bf16",)),
    "a100_fp16": _unit(8, 24, ("fp16",)),
    "a100_tf32": _unit(4, 24, ("tf32",)),
    "t4_fp16": _unit(8, 24, ("fp16",)),
    "v100_fp16": _unit(4, 23, ("fp16",), f"{_VOLTA}; {_SIM}"),
}
for _name, _known in UNITS.items():
    labelled(_known.accumulator, _name)

#: Units that users ask for and this model does not describe, and why.
ABSENT = {
    "b200_mxfp8": "block scales enter its sums as exponents",
    "b200_mxfp6": "block scales enter its sums as exponents",
    "b200_mxfp4": "block scales enter its sums, after exact sums of 16 products",
    "b200_nvfp4": "block scales enter its sums, after exact sums of 16 products",
    "cdna3_fp8": "it adds even and odd products apart, and rounds down between the steps",
    "cdna3_bf16": "it adds products and the running sum in two steps, and rounds down between them",
    "cdna3_fp16": "it adds products and the running sum in two steps, and rounds down between them",
}
