"""The placement of elements on threads and lanes that a text in PTX expects, and a check of compiled kernels: Triton decides it.

Triton calls a text with some elements of a thread, and does not know what it does with them. A text that draws one Philox block for all of
them, or exchanges words with other lanes of a warp, is right only where Triton places elements as it has so far. So it says what it expects
in a comment, and compiled kernels are compared with that: another placement is an error, never another result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import triton

#: For each bit of the number of a register, a lane or a warp, how far it moves an element along each dimension.
Bases = list[tuple[int, ...]]


class Placement(NamedTuple):
    """Elements of a tensor as a text expects them.

    Attributes:
        thread: So many neighbours along the last dimension are the first registers of a thread, in order.
        lanes: So many neighbours along the last dimension are in neighbouring lanes, in order.
        copies: So many neighbouring lanes hold the same elements. What the text computes may differ between them, until another text
            with such lanes ends that: between the two, only operations on single elements are allowed.
    """

    thread: int = 1
    lanes: int = 1
    copies: int = 1

    def mark(self, text: str) -> str:
        """The text with a comment about what it expects."""
        return f"// {_MARK} thread={self.thread} lanes={self.lanes} copies={self.copies}\n{text}"


_MARK = "placement:"
_MARKED = re.compile(_MARK + r" thread=(\d+) lanes=(\d+) copies=(\d+)")


def placement_of(text: str) -> Placement | None:
    """The placement that a text expects, if it says so."""
    match = _MARKED.search(text)
    return match and Placement(*map(int, match.groups()))


class Layout(NamedTuple):
    """Where the elements of a tensor are: the bases of a thread's registers and of a warp's lanes."""

    registers: Bases
    lanes: Bases

    def without(self, dim: int) -> Layout:
        """The layout of a sum along a dimension: registers that held others along it are gone, and lanes hold copies."""
        registers, lanes = ([basis[:dim] + basis[dim + 1 :] for basis in bases] for bases in self)
        return Layout([basis for basis in registers if any(basis)], lanes)


def _layout(encoding: str, named: dict[str, str], shape: tuple[int, ...]) -> Layout:
    """The layout that an encoding of Triton's intermediate code gives a tensor.

    Args:
        encoding: Its text.
        named: The encodings that have names.
        shape: The tensor's shape.
    """
    encoding = named.get(encoding, encoding)
    if match := re.match(r"#ttg\.slice<\{dim = (\d+), parent = (.*)\}>$", encoding):
        dim = int(match[1])
        # The size along the dimension that is gone is not known; a large one leaves no lane without an element.
        return _layout(match[2], named, (*shape[:dim], 1 << 20, *shape[dim:])).without(dim)
    if match := re.match(r"#ttg\.linear<\{register = (.*), lane = (.*), warp = .*\}>$", encoding):
        return Layout(
            *([tuple(map(int, basis.split(", "))) for basis in re.findall(r"\[(\d[^\[\]]*)\]", bases)] for bases in match.groups())
        )
    if encoding.startswith("#ttg.blocked<"):
        registers, lanes, order = (_numbers(encoding, name) for name in ("sizePerThread", "threadsPerWarp", "order"))
        return _blocked(registers, lanes, order, shape)
    raise ValueError(f"a text in PTX has operands in a layout that qsim does not know: {encoding}")


def _numbers(encoding: str, name: str) -> list[int]:
    match = re.search(rf"{name} = \[([\d, ]+)\]", encoding)
    if match is None:
        raise ValueError(f"a layout without {name}: {encoding}")
    return [int(number) for number in match[1].split(",")]


def _blocked(registers: list[int], lanes: list[int], order: list[int], shape: tuple[int, ...]) -> Layout:
    """A blocked layout, without the registers of further blocks."""
    steps, bases = [1] * len(shape), []
    for sizes in (registers, lanes):
        own: Bases = []
        for dim in order:
            for _ in range(sizes[dim].bit_length() - 1):
                own.append(tuple(steps[dim] * (i == dim and steps[dim] < shape[dim]) for i in range(len(shape))))
                steps[dim] *= 2
        bases.append(own)
    return Layout([basis for basis in bases[0] if any(basis)], bases[1])


def _is_placed(layout: Layout, expected: Placement) -> bool:
    """Whether elements are where a text expects them."""

    def are(bases: Bases, count: int, of_bit: int) -> bool:
        bits = count.bit_length() - 1
        return len(bases) >= bits and all(not any(basis[:-1]) and basis[-1] == of_bit << i for i, basis in enumerate(bases[:bits]))

    return are(layout.registers, expected.thread, 1) and are(layout.lanes, expected.lanes, 1) and are(layout.lanes, expected.copies, 0)


_OPERATION = re.compile(r"\s*(?:(%[\w#]+)(?::\d+)? = )?\"?([\w.]+)\"?")
_TENSOR = re.compile(r"tensor<([\dx]+)x\w[^,<>]*, (#.*?)>(?=[,\s)]|$)")
#: Operations on single elements, of whose results each lane computes its own.
_ELEMENTWISE = re.compile(
    r"arith\.|math\.|tt\.(bitcast|fp_to_fp|elementwise_inline_asm|extern_elementwise|clampf|precise_divf|precise_sqrt|mulhiui)\b"
)


def misplaced(code: str) -> Iterator[str]:
    """Find the placements that a kernel's texts expect and do not get.

    Args:
        code: The kernel in Triton's intermediate code for GPUs.
    """
    named = dict(re.findall(r"^(#\w+) = (#ttg\..*>)$", code, re.MULTILINE))
    differing: set[str] = set()
    for line in code.splitlines():
        match = _OPERATION.match(line)
        if match is None:
            continue
        result, operation = match.groups()
        text = re.search(r'"((?:[^"\\]|\\.)*)" \{constraints', line) if operation == "tt.elementwise_inline_asm" else None
        expected = placement_of(text[1]) if text else None
        # Without places in the source, which have names, too.
        rest = re.sub(r" loc\(.*$", "", line[match.end() if text is None else text.end() :])
        differs = not differing.isdisjoint(re.findall(r"%\w+", rest))
        if expected is not None:
            shape, encoding = _operand(rest)
            if not _is_placed(_layout(encoding, named, shape), expected):
                yield f"{expected} in a tensor of {shape}, not {named.get(encoding, encoding)}"
            # A text with copies begins a difference between lanes, or ends it.
            differs = expected.copies > 1 and not differs
        elif differs and not _ELEMENTWISE.match(operation):
            yield f"numbers that differ between lanes go through {operation}"
        if differs and result is not None:
            differing.add(result)


def _operand(rest: str) -> tuple[tuple[int, ...], str]:
    """The shape and the encoding of the first tensor among an operation's types."""
    match = _TENSOR.search(rest)
    if match is None:
        raise ValueError(f"a text in PTX without a tensor that has a layout: {rest}")
    return tuple(map(int, match[1].split("x"))), match[2]


def expect_placement(kernel: Any, name: str) -> None:
    """Raise an error if a compiled kernel's texts do not get elements where they expect them.

    Args:
        kernel: The compiled kernel.
        name: Its name.
    """
    code = kernel.asm.get("ttgir", "")
    faults = list(misplaced(code)) if _MARK in code else []
    if faults:
        raise RuntimeError(
            f"Triton {triton.__version__} compiles {name} with elements on other lanes than its PTX expects, which would give wrong bits. "
            f"Install Triton 3.6 or 3.7, and report this: {'; '.join(faults)}"
        )
