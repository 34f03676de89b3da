"""SystemVerilog from the arithmetic: synthesizable modules whose wires have the names of the definition.

Values are vectors of bits. Shifts by numbers, masks and sums of values without common bits are parts of vectors and concatenations.
A wire that can be negative holds two's complement. Operands of an operation are written as wide as its result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from qsim.silicon.printers.routines import Routine, as_defined, parameters
from qsim.silicon.printers.verilog_words import KEYWORDS
from qsim_kernels.meanings.expressions import COMPARISONS, Known, Operand, Symbol, known, operands

#: Levels of logic that operations add, roughly, by which stages of a pipeline are balanced; shifts by numbers are wires.
_DEPTHS = {
    "+": 2,
    "-": 2,
    "*": 6,
    "//": 40,
    "%": 40,
    "<": 2,
    "<=": 2,
    "==": 2,
    "min": 3,
    "max": 3,
    "<<": 2,
    ">>": 2,
    "named": 0,
    "signed": 0,
}

#: Marsaglia's generator of 32 bits with shifts and exclusive ors, a linear feedback shift register whose bits are all new at each clock.
_GENERATOR = """\
  logic [31:0] state;
  wire [31:0] state_1 = state ^ (state << 13);
  wire [31:0] state_2 = state_1 ^ (state_1 >> 17);
  always_ff @(posedge clk)
    if (reset) state <= SEED;
    else state <= state_2 ^ (state_2 << 5);
  wire [{last}:0] random = {bits}'(state >> {rest});
"""


def module(routine: Routine, stages: int = 0, generator: bool = False) -> str:
    """A module with the inputs of a routine and an output `y`.

    Args:
        routine: The routine.
        stages: The number of registers between input and output: 0 makes it combinational.
        generator: Whether the module makes its random bits itself, instead of reading them from a port.
    """
    drawn = [x for x in routine.inputs if x.args[0] == "random"] if generator else []
    ports = ["input wire clk"] if stages or drawn else []
    ports += ["input wire reset"] if drawn else []
    ports += [f"input wire {_dimensions(x.words, x.bits)} {x.name}" for x in parameters(routine) if not (drawn and x.name == "random")]
    ports.append(f"output wire {_dimensions(len(routine.result) if isinstance(routine.result, tuple) else 0, routine.width)} y")
    constants = "#(parameter logic [31:0] SEED = 32'd1) " if drawn else ""
    lines = [*(f"// {line}".rstrip() for line in routine.comment)]
    lines += [f"module {routine.name} {constants}(", *(f"  {port}," for port in ports[:-1]), f"  {ports[-1]}", ");"]
    for x in drawn:
        lines += _GENERATOR.format(last=x.args[1] - 1, bits=x.args[1], rest=32 - x.args[1]).splitlines()
    return "\n".join([*lines, *_Body(routine, stages).lines(), "endmodule", ""])


def _dimensions(count: int, bits: int) -> str:
    """The bits of a port; elements of an array follow each other, because Yosys has no packed arrays."""
    return f"[{max(count, 1) * bits - 1}:0]"


class _BitText(NamedTuple):
    """The text of some bits.

    Attributes:
        text: The text.
        is_atom: Whether it can be an operand without parentheses.
    """

    text: str
    is_atom: bool = True

    @property
    def closed(self) -> str:
        """The text of an operand."""
        return self.text if self.is_atom else f"({self.text})"


class _Wire(NamedTuple):
    """A vector of bits with a name: an input, or what has a wire.

    Attributes:
        name: Its name.
        width: Its bits.
        stage: The stage of the pipeline in which it is computed.
        first: The place of its last bit in the port of an array, else 0.
        is_element: Whether it is part of such a port.
    """

    name: str
    width: int
    stage: int
    first: int = 0
    is_element: bool = False


class _Body:
    """The wires and registers of a module."""

    def __init__(self, routine: Routine, stages: int) -> None:
        self._routine, self._stages = routine, stages
        self._order = as_defined(routine.results)
        self._widths = _widths(self._order, routine)
        self._stage = _stages(self._order, self._widths, stages)
        #: Operations that are read in later stages: registers carry their results, not their operands.
        self._carried = {y.order for x in self._order for y in operands(x) if self._stage[y.order] < self._stage[x.order]}
        self._uses = Counter(y.order for x in self._order for y in operands(x) for _ in range(2 if x.op in ("min", "max") else 1))
        self._uses.update(x.order for x in routine.results if isinstance(x, Symbol))
        self._wires = {x.order: _port(*x.args) for x in routine.inputs}
        self._lines: list[str] = []
        #: The stages of the pipeline to which wires are carried on by registers, and the bits of wires that are read at a stage.
        self._last: dict[int, int] = {}
        self._bits_read: Counter[tuple[int, int]] = Counter()
        self._taken = Counter([*KEYWORDS, "clk", "reset", "y", "unused", *(x.name for x in parameters(routine))])
        #: The stage of the expression that is written.
        self._now = 0

    def lines(self) -> list[str]:
        """The registers, the wires and the result."""
        for symbol in self._order:
            if symbol.op == "named":
                value, name, comment, _ = symbol.args
                if comment and f"  // {comment}" not in self._lines:
                    self._lines += [*([""] if self._lines else []), f"  // {comment}"]
                self._add_wire(symbol, name, value)
            elif symbol.op != "input" and self._needs_wire(symbol):
                self._add_wire(symbol, _NAMES.get(symbol.op, "value"), symbol)
        self._now = self._stages
        results = [self._bits(x, self._routine.width - 1, 0).text for x in reversed(self._routine.results)]
        result = results[0] if len(results) == 1 else f"{{{', '.join(results)}}}"
        return [*self._registers(), *self._lines, *self._unused(), f"  assign y = {result};"]

    def _needs_wire(self, symbol: Symbol) -> bool:
        """Whether an operation without a name gets a wire: what is read several times, or could not be written where it is read."""
        if self._is_part(symbol):
            return False
        return self._uses[symbol.order] > 1 or symbol.order in self._carried or symbol.op in ("*", "//", "%", "min", "max")

    def _is_part(self, x: Symbol) -> bool:
        """Whether an operation takes bits of a wire that follow each other."""
        if not isinstance(x.args[-1], int):
            return False
        if x.op == "&":
            mask = x.args[1]
            return mask & mask + (mask & -mask) == 0 and (x.args[0].order in self._wires or self._is_part(x.args[0]))
        return x.op in ("<<", ">>")

    def _add_wire(self, symbol: Symbol, name: str, value: Operand) -> None:
        self._now = self._stage[symbol.order]
        width = self._widths[symbol.order]
        text = self._operation(value, width - 1, 0).text if value is symbol else self._bits(value, width - 1, 0).text
        self._wires[symbol.order] = _Wire(self._unique(name), width, self._now)
        self._lines.append(f"  wire {'' if width == 1 else f'[{width - 1}:0] '}{self._wires[symbol.order].name} = {text};")

    def _unique(self, name: str) -> str:
        self._taken[name] += 1
        return name if self._taken[name] == 1 else f"{name}_{self._taken[name]}"

    def _unused(self) -> list[str]:
        """Lines that keep tools from reporting bits that nothing reads: inputs, and lower bits of sums, of which only carries matter."""
        unread = []
        for order, wire in self._wires.items():
            last = self._last.get(order, wire.stage)
            name = wire.name if last == wire.stage else _delayed(wire, last)
            own = wire if last == wire.stage else wire._replace(first=0, is_element=False)
            for is_read, high, low in _runs(self._bits_read[order, last], wire.width):
                if not is_read:
                    unread.append(_part(own, name, high, low))
        notes = [f"  wire unused = &{{1'b0, {', '.join(unread)}}};"]
        return ["  /* verilator lint_off UNUSED */", *notes, "  /* verilator lint_on UNUSED */"] if unread else []

    # Registers.

    def _registers(self) -> list[str]:
        chains = []
        for order, last in self._last.items():
            wire = self._wires[order]
            names = [_part(wire, wire.name, wire.width - 1, 0), *(_delayed(wire, k) for k in range(wire.stage + 1, last + 1))]
            chains.append((wire.width, names))
        declared = [f"  logic [{width - 1}:0] {', '.join(names[1:])};" for width, names in chains]
        moves = [f"    {after} <= {before};" for _, names in chains for before, after in pairwise(names)]
        return [*declared, "  always_ff @(posedge clk) begin", *moves, "  end"] if moves else []

    def _read(self, order: int, high: int, low: int) -> _BitText:
        """Bits of a wire, at the stage of the pipeline of the expression that is written."""
        wire = self._wires[order]
        self._bits_read[order, self._now] |= (1 << high + 1) - (1 << low)
        if wire.stage == self._now:
            return _BitText(_part(wire, wire.name, high, low))
        self._last[order] = max(self._now, self._last.get(order, 0))
        return _BitText(_part(wire._replace(first=0, is_element=False), _delayed(wire, self._now), high, low))

    # Expressions.

    def _bits(self, x: Operand, high: int, low: int) -> _BitText:
        """Bits of a value, from the place `high` down to the place `low`."""
        width = high - low + 1
        if not isinstance(x, Symbol):
            return _BitText(_literal(x >> low & (1 << width) - 1, width))
        own = self._wires[x.order].width if x.order in self._wires else x.known.width
        if high >= own:
            return self._extended(x, high, low, own)
        if x.order in self._wires:
            return self._read(x.order, high, low)
        return self._operation(x, high, low)

    def _extended(self, x: Symbol, high: int, low: int, own: int) -> _BitText:
        """Bits of which the first ones are beyond those of a value: zeros, or its sign."""
        if x.known.low >= 0:
            if low >= own:
                return _BitText(_literal(0, high - low + 1))
            return _concatenated([_literal(0, high - own + 1), self._bits(x, own - 1, low).text])
        sign = self._bits(x, own - 1, own - 1).text
        count = high - max(low, own) + 1
        extension = f"{{{count}{{{sign}}}}}"
        return _BitText(extension) if low >= own else _BitText(f"{{{extension}, {self._bits(x, own - 1, low).text}}}")

    def _joined(self, parts: Sequence[tuple[Operand, int, int]]) -> _BitText:
        """Bits of several values, the first ones first."""
        if len(parts) == 1:
            return self._bits(*parts[0])
        return _concatenated([self._bits(*part).text for part in parts])

    def _operation(self, x: Symbol, high: int, low: int) -> _BitText:
        """Bits of the result of an operation."""
        op, args, width = x.op, x.args, high - low + 1
        if op in ("named", "signed"):
            return self._bits(args[0], high, low)
        if op in COMPARISONS:
            return self._compared(op, *args)
        if op in ("<<", ">>") and isinstance(args[1], int):
            return self._moved(op, args[0], args[1], high, low)
        if op in ("&", "|", "^"):
            return self._bitwise(op, args[0], args[1], high, low)
        if op == "where":
            return self._chosen(args[0], args[1], args[2], high, low)
        if op in ("min", "max"):
            is_first = self._ordered("<" if op == "min" else ">", *args).closed
            first, second = (self._bits(y, high, low) for y in args)
            return _BitText(f"{is_first} ? {first.closed} : {second.text}", False)
        if low > 0:
            return self._from_wire(x, high, low)
        if op in ("+", "-", "*"):
            return _BitText(f" {op} ".join(self._bits(y, high, 0).closed for y in args), False)
        if op == "<<":
            return _BitText(f"{self._bits(args[0], high, 0).closed} << {self._whole(args[1]).closed}", False)
        return self._cut_to(width, op, *args)

    def _from_wire(self, x: Symbol, high: int, low: int) -> _BitText:
        """Bits of an operation that has to have a wire, because parts of expressions have no parts."""
        width = high + 1
        text = self._operation(x, high, 0).text
        self._wires[x.order] = wire = _Wire(self._unique(_NAMES.get(x.op, "value")), width, self._now)
        self._lines.append(f"  wire [{width - 1}:0] {wire.name} = {text};")
        return self._read(x.order, high, low)

    def _cut_to(self, width: int, op: str, a: Operand, b: Operand) -> _BitText:
        """The last bits of an operation that reads all of its operands."""
        whole = max(known(a).width, width) if op == ">>" else max(known(a).width, known(b).width)
        first = self._bits(a, whole - 1, 0).closed
        if op == ">>":
            text = f"$signed({first}) >>> {self._whole(b).closed}" if known(a).low < 0 else f"{first} >> {self._whole(b).closed}"
        else:
            text = f"{first} {op[0]} {self._bits(b, whole - 1, 0).closed}"
        return _BitText(text, False) if whole == width and not text.startswith("$") else _BitText(f"{width}'({text})", False)

    def _whole(self, x: Operand) -> _BitText:
        """All bits of a value."""
        return self._bits(x, known(x).width - 1, 0)

    def _moved(self, op: str, x: Operand, count: int, high: int, low: int) -> _BitText:
        """Bits of a value that is shifted by a number."""
        if op == ">>":
            return self._bits(x, high + count, low + count)
        if low >= count:
            return self._bits(x, high - count, low - count)
        if high < count:
            return self._bits(0, high - low, 0)
        return self._joined([(x, high - count, 0), (0, count - low - 1, 0)])

    def _bitwise(self, op: str, a: Operand, b: Operand, high: int, low: int) -> _BitText:
        width = high - low + 1
        if isinstance(b, int):
            mask = b >> low & (1 << width) - 1
            runs = _runs(mask, width)
            if op == "&" and len(runs) <= 3:
                return self._joined([(a if is_set else 0, low + end, low + start) for is_set, end, start in runs])
            if op == "|" and len(runs) <= 3:
                return self._joined([(-1 if is_set else a, low + end, low + start) for is_set, end, start in runs])
            if op == "^" and mask == 0:
                return self._bits(a, high, low)
            if op == "^" and mask == (1 << width) - 1:
                return _BitText(f"~{self._bits(a, high, low).closed}")
        elif op == "|":
            for upper, lower in ((a, b), (b, a)):
                place = known(lower).high.bit_length()
                if known(lower).low >= 0 and known(upper).zeros >= place:
                    return self._joined(
                        [
                            *([(upper, high, max(place, low))] if high >= place else []),
                            *([(lower, min(place - 1, high), low)] if low < place else []),
                        ]
                    )
        return _BitText(f" {op} ".join(self._operand_of(op, y, high, low) for y in (a, b)), False)

    def _operand_of(self, op: str, x: Operand, high: int, low: int) -> str:
        """An operand of a bitwise operation, without parentheses if it is the same operation."""
        text = self._bits(x, high, low)
        is_same = isinstance(x, Symbol) and x.op == op and x.order not in self._wires and f" {op} " in text.text and not text.is_atom
        return text.text if is_same else text.closed

    def _chosen(self, condition: Symbol, chosen: Operand, other: Operand, high: int, low: int) -> _BitText:
        asked, first, second = self._bits(condition, 0, 0), self._bits(chosen, high, low), self._bits(other, high, low)
        # A choice between a bit and a constant is one gate.
        if high == low:
            if second.text == "1'b0":
                return _BitText(f"{asked.closed} & {first.closed}", False)
            if first.text == "1'b0":
                return _BitText(f"~{asked.closed} & {second.closed}", False)
            if first.text == "1'b1":
                return _BitText(f"{asked.closed} | {second.closed}", False)
        return _BitText(f"{asked.closed} ? {first.closed} : {second.text}", False)

    def _compared(self, op: str, a: Operand, b: Operand) -> _BitText:
        if op == "<" and isinstance(a, int) and a == 0 and known(b).low >= 0:
            return _BitText(f"|{self._whole(b).closed}")
        if op == "==" and isinstance(b, int) and b == (1 << known(a).width) - 1 and known(a).low >= 0:
            return _BitText(f"&{self._whole(a).closed}")
        if op == "<" and isinstance(a, int):
            return self._ordered(">=", b, a + 1)
        return self._ordered(op, a, b)

    def _ordered(self, sign: str, a: Operand, b: Operand) -> _BitText:
        low, high = min(known(a).low, known(b).low), max(known(a).high, known(b).high)
        width = Known(low, high, 0, 0).width
        first, second = self._bits(a, width - 1, 0), self._bits(b, width - 1, 0)
        if low < 0 and sign != "==":
            return _BitText(f"$signed({first.text}) {sign} $signed({second.text})", False)
        return _BitText(f"{first.closed} {sign} {second.closed}", False)


#: Names of wires of operations that have none, by the operation.
_NAMES = {
    "+": "sum", "-": "difference", "*": "product", "//": "quotient", "%": "remainder", "<<": "shifted", ">>": "shifted", "where": "choice",
    "<": "is_less", "<=": "is_less", "==": "is_equal", "&": "masked", "|": "joined", "^": "flipped", "min": "smaller", "max": "larger",
}  # fmt: skip


def _port(name: str, bits: int) -> _Wire:
    """The wire of an input, which may be an element of an array."""
    array, _, place = name.rstrip("]").partition("[")
    return _Wire(array, bits, 0, int(place or 0) * bits, bool(place))


def _part(wire: _Wire, name: str, high: int, low: int) -> str:
    """Some bits of a wire."""
    if (high, low) == (wire.width - 1, 0) and not wire.is_element:
        return name
    high, low = high + wire.first, low + wire.first
    return f"{name}[{high}]" if high == low else f"{name}[{high}:{low}]"


def _delayed(wire: _Wire, stage: int) -> str:
    """The name of a wire's value at a later stage of the pipeline."""
    place = f"_{wire.first}" if wire.first else ""
    return f"{wire.name}{place}_stage{stage}"


def _concatenated(texts: Sequence[str]) -> _BitText:
    """Bits side by side, the first ones first; what is a concatenation itself becomes part of this one."""
    flat = [text[1:-1] if text.startswith("{") and text.endswith("}") and text.count("{") == 1 else text for text in texts]
    return _BitText(f"{{{', '.join(flat)}}}")


def _literal(x: int, width: int) -> str:
    return f"1'b{x}" if width == 1 else f"{width}'h{x:x}"


def _runs(mask: int, width: int) -> list[tuple[int, int, int]]:
    """The runs of equal bits of a mask, the first ones first: whether they are set, and their ends."""
    places = [k for k in range(1, width) if (mask >> k ^ mask >> k - 1) & 1]
    starts, ends = [0, *places], [*(k - 1 for k in places), width - 1]
    return [(mask >> start & 1, end, start) for start, end in zip(starts, ends, strict=True)][::-1]


def _widths(order: Sequence[Symbol], routine: Routine) -> dict[int, int]:
    """The bits of each value that others read: later ones need only the last bits of some sums and shifts."""
    read = dict.fromkeys((x.order for x in order), 1)
    read |= {x.order: routine.width for x in routine.results if isinstance(x, Symbol)}
    for symbol in reversed(order):
        if symbol.op == "input":
            read[symbol.order] = symbol.args[1]
            continue
        own = read[symbol.order] = min(read[symbol.order], symbol.known.width)
        for place, x in enumerate(symbol.args):
            if isinstance(x, Symbol):
                read[x.order] = max(read[x.order], min(_read(symbol, place, own), x.known.width))
    return read


def _read(symbol: Symbol, place: int, own: int) -> int:
    """The last bits of an operand that are read, if so many bits of the result are."""
    amount = symbol.args[-1]
    if symbol.op in ("+", "-", "*", "|", "^", "signed") or (symbol.op == "where" and place > 0):
        return own
    if symbol.op == "&":
        return min(own, amount.bit_length()) if isinstance(amount, int) and amount >= 0 else own
    if symbol.op == "<<" and place == 0:
        return max(own - amount, 1) if isinstance(amount, int) else own
    if symbol.op == ">>" and isinstance(amount, int):
        return own + amount
    return known(symbol.args[place]).width


def _stages(order: Sequence[Symbol], widths: dict[int, int], count: int) -> dict[int, int]:
    """The stage of a pipeline in which each operation is computed: its depth in the graph, in nearly equal parts.

    Between two stages is the depth at which fewest bits cross, among those that are near.
    """
    depths: dict[int, int] = {}
    for symbol in order:
        depths[symbol.order] = _depth(symbol) + max((depths[x.order] for x in operands(symbol)), default=0)
    whole = max(depths.values(), default=0) + 1
    last = dict(depths)
    for symbol in reversed(order):
        for x in operands(symbol):
            last[x.order] = max(last[x.order], last[symbol.order] if _depth(symbol) == 0 else depths[symbol.order])

    def crossing(depth: int) -> int:
        """The bits that are computed below a depth and read from it on."""
        return sum(widths[x.order] for x in order if _depth(x) + (x.op == "input") and depths[x.order] < depth <= last[x.order])

    ends = []
    for k in range(1, count + 1):
        middle, near = whole * k // (count + 1), whole // (6 * (count + 1))
        ends.append(min(range(middle - near, middle + near + 1), key=lambda depth: (crossing(depth), abs(depth - middle))))
    return {x: sum(depth >= end for end in ends) for x, depth in depths.items()}


def _depth(symbol: Symbol) -> int:
    """Levels of logic that an operation adds, roughly; inputs, names and parts of values add none."""
    wired = symbol.op in ("<<", ">>", "&", "|") and isinstance(symbol.args[1], int)
    return 0 if symbol.op == "input" or wired else _DEPTHS.get(symbol.op, 1)
