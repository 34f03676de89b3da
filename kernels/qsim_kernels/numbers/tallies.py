"""The layout of a tally of rounding outcomes over a tensor's elements, shared by all implementations.

The first `FIELDS` counts are those of float32's exponent field: count `f` is the number of elements whose magnitude is in
`[2**(f - BIAS), 2**(f - BIAS + 1))`. Field 0 also counts all smaller ones, including zeros; `LARGEST` also counts larger ones, which
occur in float64; `SPECIAL` counts infinities and NaN. The other counts follow.
"""

#: The number of values of float32's exponent field, and its bias.
FIELDS, BIAS = 256, 127
LARGEST, SPECIAL = 254, 255

#: Zeros; NaN; beyond the largest or the smallest value; rounded to zero; unchanged. The last three are mutually exclusive.
ZERO, NAN, SATURATED, UNDERFLOWED, EXACT = range(FIELDS, FIELDS + 5)
SIZE = FIELDS + 5

#: The sums, of squares and of squared differences, over elements where both numbers are finite.
SIGNAL, NOISE = range(2)
SUMS = 2
