"""Pieces of Triton's intermediate code for GPUs, as kernels have them that call texts in PTX."""

from __future__ import annotations

from qsim_kernels.triton.placement import Placement

#: What texts expect: elements of a block in a thread, in lanes, or copies in two lanes.
EXPECTED = {"thread": Placement(thread=4), "lanes": Placement(lanes=4), "copies": Placement(copies=2)}


def call(result: str, text: str, operand: str, shape: str = "8x128", encoding: str = "#own") -> str:
    """A line that calls a text."""
    text, tensor = text.replace("\n", "\\0A"), f"tensor<{shape}xi32, {encoding}>"
    given = f'"{text}" {{constraints = "=r,r", packed_element = 1 : i32, pure = true}}'
    return f"    {result} = tt.elementwise_inline_asm {given} {operand} : {tensor} -> {tensor} loc(#loc1)"


def compiled_code(expects: str, encoding: str, shape: str = "8x128", between: str = "") -> str:
    """A kernel that calls a text which expects something, with an operand in an encoding.

    Args:
        expects: A name among `EXPECTED`.
        encoding: The encoding that is called `#own`.
        shape: The operand's shape, as Triton writes it.
        between: Lines from the result `%b` of a first call with copies to the operand `%c` of a second one.
    """
    marked = EXPECTED[expects].mark("{ mov.b32 $0, $1; }")
    lines = [f"#own = {encoding}", "module {", call("%b", marked, "%a", shape)]
    if between:
        lines += [between, call("%d", marked, "%c", shape)]
    return "\n".join([*lines, "}"])
