"""Where things stand in a tally, for every implementation: what became of the elements of a tensor when they were rounded.

The first `FIELDS` counts are those of float32's exponent field: the one numbered `f` counts elements whose magnitude is in
`[2**(f - BIAS), 2**(f - BIAS + 1))`. Field 0 has all smaller ones, zeros among them; `LARGEST` has larger ones too, which float64 has;
`SPECIAL` has infinities and NaN. The other counts follow.
"""

#: Values of float32's exponent field, and what is subtracted from it.
FIELDS, BIAS = 256, 127
LARGEST, SPECIAL = 254, 255

#: Zeros; NaN; beyond the largest or the smallest value; zero now and not before; what it was. The last three are mutually exclusive.
ZERO, NAN, SATURATED, UNDERFLOWED, EXACT = range(FIELDS, FIELDS + 5)
SIZE = FIELDS + 5

#: The sums: of squares, and of squared differences, where both numbers are finite.
SIGNAL, NOISE = range(2)
SUMS = 2
