"""PTX text, executed in NumPy by warps of 32 lanes, each of which has its own place in the text.

Lanes that are the furthest behind go first, so that those that took different branches meet again. What a GPU leaves undefined is an error:
a lane that does not take part in an exchange or a vote, a branch said to be uniform that is not, a register that is read before it is
written, and an operand that is read after a result has been written into what may be its register.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from support.ptx_words import COMPARISONS, MEANINGS, Words, numbers

LANES = 32
#: What a register has in lanes that did not write it: bits of 0 and 1.
_GARBAGE = 0x35
_KINDS = {"b16": np.uint16, "b32": np.uint32, "f32": np.uint32, "b64": np.uint64, "pred": np.bool_}
_OPERANDS = {"r": np.uint32, "f": np.uint32, "l": np.uint64, "d": np.uint64}


class UndefinedError(AssertionError):
    """The text does what a GPU does not define."""


class Instruction(NamedTuple):
    """An instruction.

    Attributes:
        guard: The predicate under which it is executed, or "".
        name: Its name.
        target: The registers that it writes.
        operands: The others, numbers, labels and pairs of registers.
    """

    guard: str
    name: str
    target: tuple[str, ...]
    operands: tuple[str | tuple[str, ...], ...]


class Program(NamedTuple):
    """A text that has been read: its instructions, the places of labels, and the kinds of its registers."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    kinds: dict[str, Any]


@lru_cache(maxsize=256)
def program_of(text: str) -> Program:
    """Read a text."""
    text = re.sub(r"//[^\n]*", "", text).strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    kinds: dict[str, Any] = {"%laneid": np.uint32}
    for statement in re.split(r";|(?<=\w):(?=\s|$)", text):
        statement = statement.strip()
        if match := re.fullmatch(r"\.reg \.(\w+) (.*)", statement):
            kinds |= dict.fromkeys(re.split(r",\s*", match[2]), _KINDS[match[1]])
        elif re.fullmatch(r"[A-Za-z]\w*", statement):
            labels[statement] = len(instructions)
        elif statement and not statement.startswith(".pragma"):
            instructions.append(_instruction(statement))
    return Program(tuple(instructions), labels, kinds)


def _instruction(statement: str) -> Instruction:
    match = re.fullmatch(r"(?:@(!?\w+)\s+)?([\w.]+)\s+(.*)", statement, re.DOTALL)
    assert match, f"not an instruction: {statement!r}"
    parts = [tuple(re.split(r",\s*", part.strip("{} "))) if "{" in part else part for part in re.findall(r"\{[^}]*\}|[^,\s]+", match[3])]
    if match[2].startswith("bra"):
        return Instruction(match[1] or "", match[2], (), tuple(parts))
    target = parts[0] if isinstance(parts[0], tuple) else (parts[0],)
    return Instruction(match[1] or "", match[2], target, tuple(parts[1:]))


class _Run:
    """The registers and the places of the lanes of some warps while they execute a program."""

    def __init__(self, program: Program, registers: dict[str, Words], kinds: dict[str, Any], shared: set[str], warps: int) -> None:
        self.program, self.registers, self.kinds = program, registers, kinds
        self.shape = warps, LANES
        self.at = np.zeros(self.shape, np.int64)
        #: Operands that may be in the registers of results that were written.
        self.shared, self.lost = shared, False

    def value(self, name: str, kind: Any = np.uint32) -> Words:
        """A register's words, or a number's."""
        if name in self.registers:
            if self.lost and name in self.shared:
                raise UndefinedError(f"{name} is read after a result that may be in its register has been written")
            return self.registers[name]
        if name in self.kinds:
            raise UndefinedError(f"{name} is read before it is written")
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.full((1, 1), number & (1 << 8 * np.dtype(kind).itemsize) - 1, kind)

    def write(self, name: str, words: Words, active: Words) -> None:
        """Write a register in the active lanes."""
        assert name in self.kinds, f"{name} is not declared"
        words = np.broadcast_to(np.asarray(words), self.shape)
        assert words.dtype == self.kinds[name], f"{name} is {self.kinds[name].__name__}, not {words.dtype}"
        if not active.all():
            words = np.where(active, words, self.registers.get(name, words.dtype.type(_GARBAGE)))
        self.registers[name] = words
        self.lost |= name.startswith("$") and bool(self.shared)

    def step(self) -> bool:
        """Execute the instruction of the lanes that are furthest behind; False at the end of all."""
        place = int(self.at.min())
        if place == len(self.program.instructions):
            return False
        instruction = self.program.instructions[place]
        here = self.at == place
        active = here
        if instruction.guard:
            condition = np.broadcast_to(self.value(instruction.guard.lstrip("!")), self.shape)
            active = here & (~condition if instruction.guard.startswith("!") else condition)
        self.at = np.where(here, place + 1, self.at)
        if instruction.name.startswith("bra"):
            if instruction.name == "bra.uni" and (active.any(-1) & (here & ~active).any(-1)).any():
                raise UndefinedError("lanes of a warp disagree about a branch that is uniform")
            self.at = np.where(active, self.program.labels[str(instruction.operands[0])], self.at)
        elif active.any():
            self.compute(instruction, active)
        return True

    def compute(self, instruction: Instruction, active: Words) -> None:
        """Execute an instruction that is no branch."""
        name, target, operands = instruction.name, instruction.target, instruction.operands
        kind = np.uint64 if name.endswith(("64", "u64")) and not name.startswith(("shr", "cvt")) else np.uint32
        given = [x if isinstance(x, tuple) else self.value(x, kind) for x in operands]
        if name.startswith(("mov.b64", "mov.b32")) and (len(target) == 2 or isinstance(operands[0], tuple)):
            self.split(target, operands[0], active)
        elif name.startswith("setp."):
            self.write(target[0], self.compared(name, given), active)
        elif name == "vote.sync.all.pred":
            self.expect_whole_warps(active)
            self.write(target[0], np.broadcast_to(given[0].all(-1, keepdims=True), self.shape), active)
        elif name == "shfl.sync.bfly.b32":
            self.expect_whole_warps(active)
            distance = int(np.ravel(given[1])[0])
            self.write(target[0], np.broadcast_to(given[0], self.shape)[:, np.arange(LANES) ^ distance], active)
        else:
            self.write(target[0], MEANINGS[name](*given), active)

    def split(self, target: tuple[str, ...], operand: Any, active: Words) -> None:
        """Move a register to two halves, or two to a register."""
        if len(target) == 2:
            word = self.value(operand)
            kind = self.kinds[target[0]]
            bits = word.dtype.type(8 * np.dtype(kind).itemsize)
            for name, half in zip(target, (word.astype(kind), (word >> bits).astype(kind)), strict=True):
                self.write(name, half, active)
        else:
            kind = self.kinds[target[0]]
            first, second = (self.value(name).astype(kind) for name in operand)
            self.write(target[0], first | second << kind(4 * np.dtype(kind).itemsize), active)

    def compared(self, name: str, given: list[Words]) -> Words:
        """The predicate of `setp`, maybe with another one."""
        _, comparison, *others = name.split(".")
        a, b = (numbers(x) if others[-1] == "f32" else x for x in given[:2])
        result = COMPARISONS[comparison](a, b)
        return result & given[2] if others[0] == "and" else result

    def expect_whole_warps(self, active: Words) -> None:
        """Raise an error if only some lanes of a warp are here."""
        if (active.any(-1) != active.all(-1)).any():
            raise UndefinedError("only some lanes of a warp take part in an exchange")


def execute(text: str, constraints: str, operands: list[Words]) -> list[Words]:
    """The results of a text.

    Args:
        text: The text, as `tl.inline_asm_elementwise` takes it.
        constraints: The constraints of its results and operands.
        operands: Arrays with one row of 32 lanes for each warp, or a dimension of 1: `uint32`, and `uint64` for operands of 64 bits.
    """
    program = program_of(text)
    kinds = constraints.split(",")
    results = [kind for kind in kinds if kind.startswith("=")]
    declared = {f"${i}": _OPERANDS[kind[-1]] for i, kind in enumerate(kinds)}
    given = {f"${i}": np.atleast_2d(x) for i, x in enumerate(operands, len(results))}
    for name, x in given.items():
        assert x.dtype == declared[name], f"{name} is {declared[name].__name__}, not {x.dtype}"
    warps = max(x.shape[0] for x in given.values())
    assert len(given) + len(results) == len(kinds), f"{len(kinds)} constraints for {len(results)} results and {len(given)} operands"
    shared = set() if all("&" in kind for kind in results) else set(given)
    lane = np.broadcast_to(np.arange(LANES, dtype=np.uint32), (warps, LANES))
    with np.errstate(over="ignore"):
        run = _Run(program, given | {"%laneid": lane}, declared | program.kinds, shared, warps)
        while run.step():
            pass
    return [run.registers[f"${i}"] for i in range(len(results))]
