"""Circuits as C, SystemVerilog or JavaScript."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

import qsim
from qsim.formats import Format
from qsim.formats.base import check_flag
from qsim.rounding import Overflow, Rounding
from qsim.silicon.circuits import Circuit, Operation
from qsim.silicon.commands import command
from qsim.silicon.dots import Dot
from qsim.silicon.graphs import AnyCircuit, routine
from qsim.silicon.printers import c, javascript, systemverilog, transcription
from qsim.silicon.printers.routines import Routine

Language = Literal["c", "systemverilog", "javascript"]
#: In place of a format: its numbers are parameters of the code.
ANY = "any"


def _heading(*names: str) -> tuple[str, ...]:
    """The first lines of a file: its name, who wrote it and its licence."""
    return (
        *names,
        f"Written by qsim {qsim.__version__}: the arithmetic of https://pypi.org/project/qsim-torch, to the bit.",
        "SPDX-License-Identifier: BSD-3-Clause",
    )


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
        name: The name of a C header, of which its guard is made: any text.

    Raises:
        ValueError: If an argument is not one of these.

    Example:
        >>> from qsim.silicon import emit
        >>> print(emit("systemverilog", "e2m1", "toward_zero", source="bf16"))  # doctest: +ELLIPSIS
        // qsim_round_e2m1_toward_zero_from_bf16.sv
        ...
        endmodule
        <BLANKLINE>
    """
    _check(language, stages, generator)
    if not operations:
        raise ValueError("operations must name at least one of 'round', 'encode', 'decode'")
    if format == ANY:
        if language != "javascript":
            raise ValueError(f"format='any' is for JavaScript, got language={language!r}")
        return transcription.module(_heading())
    chosen = [rounding] if isinstance(rounding, (str, Rounding)) else rounding
    circuits = [Circuit(format, operation, how, overflow, source) for operation in operations if operation != "decode" for how in chosen]
    circuits += [Circuit(format, "decode")] if "decode" in operations else []
    return emit_circuits(language, circuits, stages=stages, generator=generator, name=name)


def emit_circuits(
    language: Language, circuits: Sequence[AnyCircuit], *, stages: int = 0, generator: bool = False, name: str = "qsim"
) -> str:
    """Write circuits as code: operations of formats and of block formats, sums of products, and Philox.

    Vectors are arrays, whose first element has the index 0; Philox's four words are the array `y` in C and SystemVerilog, and are returned
    in JavaScript. Ports of modules hold arrays with the first element in the lowest bits.

    Args:
        language: See `emit`.
        circuits: The circuits.
        stages: See `emit`.
        generator: See `emit`; a module makes one random integer for each input.
        name: See `emit`.

    Raises:
        ValueError: If an argument is not one of these.

    Example:
        >>> from qsim.silicon import Dot, emit_circuits
        >>> code = emit_circuits("c", [Dot("Rounded('fp16')", "e4m3")])
        >>> print(next(line for line in code.splitlines() if line.startswith("QSIM_FUNCTION")))
        QSIM_FUNCTION uint32_t qsim_dot1_rounded_fp16_e4m3(const uint32_t a[1], const uint32_t b[1], uint32_t c)
    """
    _check(language, stages, generator)
    for circuit in circuits:
        if generator and isinstance(circuit, Dot) and circuit.draws > 1:
            raise ValueError(f"generator makes one random integer, but {circuit.name} reads {circuit.draws}: leave it out for a port")
    routines = [_with_command(circuit, language, stages, generator) for circuit in circuits]
    if language == "c":
        return c.header(name, _heading(), routines)
    if language == "javascript":
        return javascript.module(_heading(), routines)
    return "\n".join(
        systemverilog.module(
            each._replace(comment=(*_heading(f"{each.name}.sv"), "", *each.comment)), stages, generator and circuit.random_bits > 0
        )
        for circuit, each in zip(circuits, routines, strict=True)
    )


def _with_command(circuit: AnyCircuit, language: str, stages: int, generator: bool) -> Routine:
    """A routine whose comment ends with the command that emits it."""
    each = routine(circuit)
    return each._replace(comment=(*each.comment, f"Command: {command(circuit, language, stages, generator)}"))


def _check(language: str, stages: int, generator: bool) -> None:
    check_flag("emit", "generator", generator)
    if language not in get_args(Language):
        raise ValueError(f"language must be one of {', '.join(map(repr, get_args(Language)))}, got {language!r}")
    if language != "systemverilog" and (stages or generator):
        raise ValueError(f"stages and generator are for SystemVerilog, got language={language!r}")
    check_stages(stages)


def check_stages(stages: int) -> None:
    """Raise an error if a module cannot have so many registers between input and output."""
    if not 0 <= stages <= 64:
        raise ValueError(f"stages must be in 0…64, got {stages}")
