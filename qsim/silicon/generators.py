"""A circuit that makes random bits: Philox."""

from __future__ import annotations

from typing import NamedTuple


class Philox(NamedTuple):
    """Philox4x32-10: four words of random bits for a counter of four words and a key of two.

    Element `i` of a tensor has a half of a word of counter `(i // 8, i // 8 >> 32, stream, stream >> 32)`, under the seed as the key: the
    lower half of word `i % 8 // 2` if `i` is even, the upper half if it is odd. The next 16 bits come from the same place for the counter
    whose second word has its first bit set.

    Example:
        >>> from qsim.silicon import Philox
        >>> Philox().name
        'qsim_philox'
    """

    @property
    def name(self) -> str:
        """The name of the function or module."""
        return "qsim_philox"

    @property
    def random_bits(self) -> int:
        """None: a generator reads no random bits."""
        return 0

    @property
    def specification(self) -> tuple[str, ...]:
        """Lines that say what the circuit computes."""
        return (
            "Philox4x32-10: four words of 32 random bits for a counter and a key.",
            "counter: the number of a block of eight elements, and the stream, 64 bits each, lower words first. key: the seed, likewise.",
        )
