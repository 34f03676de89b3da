"""The summand of an element in the checksum of a tensor: its bits mixed with its index, so that every change of either changes the sum."""

from qsim_kernels.arithmetic.words import low_word

#: Odd numbers whose bits show no pattern: the first folds 64 bits into 32, the second spreads an index over all 32.
FOLD, SPREAD = 0x27D4EB2F, 0x9E3779B1
#: Factors of two rounds; shifts carry a product's upper bits to its lower ones.
FACTOR_1, FACTOR_2 = 0x85EBCA6B, 0xC2B2AE35


def folded(bits):
    """Bits of an element of 64 bits, as 32 that depend on all of them."""
    return low_word(bits ^ (bits >> 32) * FOLD)


def mixed(word, index):
    """32 bits that depend on all of a word of 32 bits and of an index in 64."""
    h = low_word(word ^ low_word((index + (index >> 32) * FOLD) * SPREAD))
    h = low_word(h * FACTOR_1)
    h ^= h >> 15
    h = low_word(h * FACTOR_2)
    return h ^ h >> 16
