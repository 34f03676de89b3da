"""Hadamard transforms of blocks, in float32, or in float64 if the tensor is.

All sums have two terms: first of elements one apart, then two, four and so on. One product at the end makes the transform orthonormal.
"""

from qsim_kernels.arithmetic.philox import philox
from qsim_kernels.arithmetic.words import INFINITY, MAGNITUDE, SIGN, difference, low_word, minimum, product, total, where

#: The stream of signs. It is no stream of noise: those are hashes.
STREAM = int.from_bytes(b"Hadamard", "big")


def transformed(block, flips, largest, factor):
    """Transform a block.

    Args:
        block: The bits of its elements, a power of two many.
        flips: For each element 1 if its sign changes, otherwise 0.
        largest: The bits of the largest number divided by the number of elements.
        factor: The bits of one divided by the root of the number of elements.
    """
    block = [flipped(limited(bits, largest), flip) for bits, flip in zip(block, flips, strict=True)]
    step = 1
    while step < len(block):
        for place in range(len(block)):
            if place & step == 0:
                block[place], block[place + step] = butterfly(block[place], block[place + step])
        step *= 2
    return [product(bits, factor) for bits in block]


def limited(bits, largest):
    """A number so small that no sum of a block overflows; infinities and NaN stay."""
    magnitude = bits & MAGNITUDE
    return where(magnitude < INFINITY, minimum(magnitude, largest) | (bits & SIGN), bits)


def flipped(bits, flip):
    """A number, with its sign changed if `flip` is 1."""
    return bits ^ (flip * SIGN)


def butterfly(first, second):
    """The sum and the difference of two numbers."""
    return total(first, second), difference(first, second)


def flips(number, seed):
    """The random signs of elements `4 * number` to `4 * number + 3` of every block: 1 for a change."""
    word0, word1, word2, word3 = philox(number, 0, low_word(STREAM), STREAM >> 32, low_word(seed), seed >> 32)
    return word0 & 1, word1 & 1, word2 & 1, word3 & 1
