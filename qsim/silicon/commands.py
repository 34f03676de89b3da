"""The commands that emit circuits, which emitted code names."""

from __future__ import annotations

import shlex

from qsim.formats import FP32, Format, name_of
from qsim.scaling.block_formats import NAMED, Block
from qsim.silicon.blocks import BlockCircuit
from qsim.silicon.circuits import Circuit
from qsim.silicon.dots import Dot
from qsim.silicon.generators import Philox


def command(circuit: Circuit | BlockCircuit | Dot | Philox, language: str, stages: int = 0, generator: bool = False) -> str:
    """The command that emits a circuit.

    Args:
        circuit: The circuit.
        language: See `emit`.
        stages: See `emit`.
        generator: See `emit`.

    Example:
        >>> from qsim.silicon import Circuit
        >>> command(Circuit("e4m3", "encode", source="bf16"), "systemverilog", stages=2)
        'qsim emit systemverilog --format e4m3 --operation encode --rounding nearest --source bf16 --stages 2'
    """
    options = [*_options(circuit), *(["--stages", str(stages)] if stages else []), *(["--generator"] if generator else [])]
    return shlex.join(["qsim", "emit", language, *options])


def _options(circuit: Circuit | BlockCircuit | Dot | Philox) -> list[str]:
    match circuit:
        case Philox():
            return ["--philox"]
        case Dot():
            adder = circuit.accumulator.label or repr(circuit.accumulator)
            times = [] if circuit.a == circuit.b else ["--times", name_of(circuit.b)]
            return ["--format", name_of(circuit.a), "--accumulate", adder, *times, "--length", str(circuit.length)]
    options = ["--format", _block_name(circuit.format) if isinstance(circuit, BlockCircuit) else name_of(circuit.format)]
    options += ["--operation", circuit.operation]
    if circuit.operation == "decode":
        return options
    options += ["--rounding", str(circuit.rounding)] if circuit.operation != "scale" else []
    options += ["--overflow", circuit.overflow] if isinstance(circuit, Circuit) and circuit.overflow != "saturate" else []
    return [*options, *_source(circuit.source)]


def _source(fmt: Format) -> list[str]:
    return [] if fmt == FP32 else ["--source", name_of(fmt)]


def _block_name(block: Block) -> str:
    return next((name for name, each in NAMED.items() if each == block), repr(block))
