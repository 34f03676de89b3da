"""SystemVerilog from the arithmetic: synthesizable modules whose wires are as wide as their values need.

A wire that can be negative holds two's complement. All operands of an operation are extended to one width before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from qsim_kernels.meanings.expressions import COMPARISONS, Known, Operand, Symbol, known, needed, operands
from qsim_kernels.meanings.printing import Routine, parameters

#: Levels of logic that operations add, roughly, by which stages of a pipeline are balanced; shifts by numbers are wires.
_DEPTHS = {"+": 2, "-": 2, "*": 6, "//": 40, "%": 40, "<": 2, "<=": 2, "==": 2, "min": 3, "max": 3, "<<": 2, ">>": 2}

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


def _input(name: str, bits: int) -> str:
    """An input, or the bits of an element of an array."""
    array, _, place = name.rstrip("]").partition("[")
    return f"{array}[{int(place) * bits + bits - 1}:{int(place) * bits}]" if place else name


def _identifier(name: str) -> str:
    """A name for a value at another place than an input, which may be an element of an array."""
    return name.replace("[", "_").replace(":", "_").replace("]", "")


class _Body:
    """The wires and registers of a module."""

    def __init__(self, routine: Routine, stages: int) -> None:
        self._routine, self._stages = routine, stages
        self._order = needed(routine.results)
        self._stage = _stages(self._order, stages)
        self._widths = _widths(self._order, routine)
        self._names = {symbol.order: f"t{k}" for k, symbol in enumerate(x for x in self._order if x.op != "input")}
        self._names |= {x.order: _input(*x.args) for x in routine.inputs}
        self._last: dict[int, int] = {}

    def lines(self) -> list[str]:
        """The declarations, registers and the result."""
        wires = [
            f"  wire [{self._widths[symbol.order] - 1}:0] {self._names[symbol.order]} = {self._expression(symbol)};"
            for symbol in self._order
            if symbol.op != "input"
        ]
        results = [self._at(x, self._routine.width, self._stages) for x in reversed(self._routine.results)]
        result = results[0] if len(results) == 1 else f"{{{', '.join(results)}}}"
        declared = {x.order for x in self._order}
        unused = [_input(*x.args) for x in self._routine.inputs if x.order not in declared]
        notes = [f"  wire unused_{_identifier(name)} = &{{1'b0, {name}}};" for name in unused]
        notes = ["  /* verilator lint_off UNUSED */", *notes, "  /* verilator lint_on UNUSED */"] if notes else []
        return [*self._registers(), *wires, *notes, f"  assign y = {result};"]

    def _registers(self) -> list[str]:
        kept = [x for x in self._order if x.order in self._last]
        names = [
            (x, [self._names[x.order], *(self._delayed(x, k) for k in range(self._stage[x.order] + 1, self._last[x.order] + 1))])
            for x in kept
        ]
        declared = [f"  logic [{self._widths[x.order] - 1}:0] {', '.join(chain[1:])};" for x, chain in names]
        moves = [f"    {after} <= {before};" for _, chain in names for before, after in pairwise(chain)]
        return [*declared, "  always_ff @(posedge clk) begin", *moves, "  end"] if moves else []

    def _delayed(self, symbol: Symbol, stage: int) -> str:
        return f"{_identifier(self._names[symbol.order])}_stage{stage}"

    def _name(self, symbol: Symbol, stage: int) -> str:
        """The name of a value at a stage of the pipeline."""
        if stage == self._stage[symbol.order]:
            return self._names[symbol.order]
        self._last[symbol.order] = max(stage, self._last.get(symbol.order, 0))
        return self._delayed(symbol, stage)

    def _at(self, x: Operand, width: int, stage: int) -> str:
        """An operand in so many bits."""
        if not isinstance(x, Symbol):
            return f"{width}'h{x & ((1 << width) - 1):x}"
        name = self._name(x, stage)
        if self._widths[x.order] == width:
            return name
        return f"{width}'($signed({name}))" if x.known.low < 0 else f"{width}'({name})"

    def _expression(self, symbol: Symbol) -> str:
        op, args, stage = symbol.op, symbol.args, self._stage[symbol.order]
        width = self._widths[symbol.order]
        if op == "where":
            choices = (self._at(x, width, stage) for x in args[1:])
            return f"{self._name(args[0], stage)} ? {' : '.join(choices)}"
        if op in COMPARISONS or op in ("min", "max"):
            compared = self._compared(args, "<" if op == "min" else ">" if op == "max" else op, stage)
            if op in COMPARISONS:
                return compared
            return f"({compared}) ? {self._at(args[0], width, stage)} : {self._at(args[1], width, stage)}"
        if op == "signed":
            return self._at(args[0], width, stage)
        if op in ("//", "%"):
            whole = max(map(self._width, args))
            return f"{width}'({self._at(args[0], whole, stage)} {op[0]} {self._at(args[1], whole, stage)})"
        if op == "<<":
            return f"{self._at(args[0], width, stage)} << {self._amount(args[1], stage)}"
        if op == ">>":
            shifted = self._at(args[0], self._width(args[0]), stage)
            written = f"$signed({shifted}) >>>" if known(args[0]).low < 0 else f"{shifted} >>"
            return f"{width}'({written} {self._amount(args[1], stage)})"
        if op == "&" and isinstance(args[1], int) and args[1] & ((1 << width) - 1) == (1 << width) - 1:
            return self._at(args[0], width, stage)
        return f"{self._at(args[0], width, stage)} {op} {self._at(args[1], width, stage)}"

    def _compared(self, args: Sequence[Operand], sign: str, stage: int) -> str:
        low, high = min(known(x).low for x in args), max(known(x).high for x in args)
        a, b = (self._at(x, Known(low, high, 0, 0).width, stage) for x in args)
        return f"$signed({a}) {sign} $signed({b})" if low < 0 else f"{a} {sign} {b}"

    def _width(self, x: Operand) -> int:
        return self._widths[x.order] if isinstance(x, Symbol) else known(x).width

    def _amount(self, x: Operand, stage: int) -> str:
        return self._name(x, stage) if isinstance(x, Symbol) else str(x)


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


def _stages(order: Sequence[Symbol], count: int) -> dict[int, int]:
    """The stage of a pipeline in which each operation is computed: its depth in the graph, in equal parts."""
    depths: dict[int, int] = {}
    for symbol in order:
        wired = symbol.op in ("<<", ">>") and isinstance(symbol.args[1], int)
        own = 0 if symbol.op == "input" or wired else _DEPTHS.get(symbol.op, 1)
        depths[symbol.order] = own + max((depths[x.order] for x in operands(symbol)), default=0)
    whole = max(depths.values(), default=0) + 1
    return {order: depth * (count + 1) // whole for order, depth in depths.items()}
