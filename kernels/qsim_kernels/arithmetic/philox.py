"""Philox4x32-10, a random number generator that turns a counter and a key into four words of 32 random bits.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011. Eight elements share a counter: each gets 16 bits, a half of a word. Where
it needs more, the next 16 come from the same half of the same word of a second counter.
"""

from qsim_kernels.arithmetic.words import low_word, unrolled, wide_product

#: The factors of a round, and what the key grows by from round to round.
FACTOR_0, FACTOR_2 = 0xD2511F53, 0xCD9E8D57
GROWTH_0, GROWTH_1 = 0x9E3779B9, 0xBB67AE85
#: Elements that share a counter.
SHARED = 8
#: Set in the upper word of the number of a block that holds the last 16 bits of elements; no element's index is that large.
LATE = 1 << 31


def philox(c0, c1, c2, c3, k0, k1):
    """The four words of a counter of four words, under a key of two."""
    for _ in unrolled(10):
        high0, low0 = wide_product(c0, FACTOR_0)
        high1, low1 = wide_product(c2, FACTOR_2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = low_word(k0 + GROWTH_0), low_word(k1 + GROWTH_1)
    return c0, c1, c2, c3
