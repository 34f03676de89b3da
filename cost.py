import sys
from lab import numbers_of, Circuit, direct
from ycost import cost
from qsim.silicon.values import value_of
from qsim.silicon.graphs import routine
from qsim_kernels.meanings import symbols, systemverilog
from qsim_kernels.meanings.expressions import word
from qsim_kernels.meanings.printing import Routine
from qsim_kernels.numbers.carrier import SINGLE
def new(c):
    x = word("x", c.input.bits); random = (word("random", c.random_bits),) if c.random_bits else ()
    F = symbols.meaning(direct, SINGLE)
    return Routine(c.name, c.specification, (x, *random), F.code_of_rounded(value_of(x, c.source), *(random or (0,)), *numbers_of(c)), c.output.bits)
for spec in sys.argv[1:]:
    f, r, s = spec.split(";")
    c = Circuit(f, "encode", r, "saturate", s)
    print(f"{c.name:50}", "old", cost(systemverilog.module(routine(c)), c.name), "new", cost(systemverilog.module(new(c)), c.name), flush=True)
