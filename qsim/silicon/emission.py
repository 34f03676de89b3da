"""Circuits as C, SystemVerilog or JavaScript."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from qsim.formats import Format
from qsim.rounding import Overflow, Rounding
from qsim.silicon.circuits import Circuit, Operation
from qsim.silicon.graphs import routine
from qsim_kernels.meanings import c, javascript, systemverilog, transcription

Language = Literal["c", "systemverilog", "javascript"]
#: In place of a format: its numbers are parameters of the code.
ANY = "any"


def emit(
    language: Language,
    format: str | torch.dtype | Format,
    rounding: str | Rounding | Sequence[str | Rounding] = "nearest",
    *,
    operations: Sequence[Operation] = ("round",),
    overflow: Overflow = "saturate",
    source: str | torch.dtype | Format = "fp32",
    stages: int = 0,
    generator: bool = False,
    name: str = "qsim",
) -> str:
    """Write the rounding of a format as code.

    Args:
        language: `"c"` gives a header that is also C++ and code for CUDA devices, `"systemverilog"` one module for each circuit,
            `"javascript"` a module of functions.
        format: The format that is rounded to. `"any"`, in JavaScript, writes the arithmetic itself, with all roundings, operations and
            scales: a format's numbers are its parameters.
        rounding: A rounding or several.
        operations: `"round"`, `"encode"` and `"decode"`; see `Circuit`.
        overflow: See `quantize`.
        source: The format of the numbers that are rounded, whose codes are the inputs.
        stages: Registers between input and output of a SystemVerilog module.
        generator: Whether SystemVerilog modules make their random bits themselves, by a linear feedback shift register.
        name: The name of a C header, for its guard.

    Raises:
        ValueError: If an argument is not one of these.

    Example:
        >>> from qsim.silicon import emit
        >>> print(emit("systemverilog", "e2m1", "toward_zero", source="bf16"))  # doctest: +ELLIPSIS
        // Rounds a number of bf16 = Float(8, 7, specials='ieee') to e2m1 = Float(2, 1).
        ...
        endmodule
        <BLANKLINE>
    """
    if language not in get_args(Language):
        raise ValueError(f"language must be one of {', '.join(map(repr, get_args(Language)))}, got {language!r}")
    if language != "systemverilog" and (stages or generator):
        raise ValueError(f"stages and generator are for SystemVerilog, got language={language!r}")
    if not 0 <= stages <= 64:
        raise ValueError(f"stages must be in 0…64, got {stages}")
    if not operations:
        raise ValueError("operations must name at least one of 'round', 'encode', 'decode'")
    comment = ("Written by `qsim emit`: the arithmetic of https://pypi.org/project/qsim-torch, to the bit.",)
    if format == ANY:
        if language != "javascript":
            raise ValueError(f"format='any' is for JavaScript, got language={language!r}")
        return transcription.module(comment)
    chosen = [rounding] if isinstance(rounding, (str, Rounding)) else rounding
    circuits = [Circuit(format, operation, how, overflow, source) for operation in operations if operation != "decode" for how in chosen]
    circuits += [Circuit(format, "decode")] if "decode" in operations else []
    routines = [routine(circuit) for circuit in circuits]
    if language == "c":
        return c.header(name, comment, routines)
    if language == "javascript":
        return javascript.module(comment, routines)
    return "\n".join(
        systemverilog.module(each, stages, generator and circuit.random_bits > 0) for circuit, each in zip(circuits, routines, strict=True)
    )
