"""Records as text: every kind is read back, and a text that lacks something or has too much raises an error that says what."""

from __future__ import annotations

import pytest

import qsim
from qsim_kernels.numbers.encoding import Encoding, spell_encoding
from qsim_kernels.numbers.grid import BAR, Coding, Grid, Rule, read, spell
from qsim_kernels.numbers.scales import read_scales, spell_scales
from qsim_kernels.numbers.sums import AlignedSum, RoundedSum, read_sum, spell_sum

GRID, CODING = qsim.format("e4m3").spelling
RULE = spell(Rule(mode=7, bits=6, correction=False, overflow=1))
ENCODING = spell_encoding(GRID, RULE, CODING)
#: Accumulators, and the words with which the texts of their sums begin.
SUMS = {
    "Rounded('fp16')": "rounded",
    "Rounded('fp16', product='bf16')": "rounded",
    "Rounded('bf16', chunk=32, order='kahan', rounding='stochastic')": "rounded",
    "Promoted(Rounded('bf16', product='fp16'), 64)": "promoted",
    "Promoted('h100_fp8', 128)": "promoted",
    "h100_fp8": "aligned",
    "cdna3_bf16": "two-step",
    "b200_mxfp8": "block-scaled",
}


@pytest.mark.parametrize(("accumulator", "word"), SUMS.items())
def test_sums_are_read_back(accumulator: str, word: str) -> None:
    fmt = qsim.format("bf16" if "bf16" in accumulator else "e4m3")
    text = qsim.accumulators.resolve(accumulator).spelled(fmt, fmt)
    assert spell_sum(read_sum(text)) == text
    assert text.startswith(f"{word} ")


def test_an_encoding_and_scales_are_read_back() -> None:
    read_back = read(Encoding, ENCODING)
    assert read_back == Encoding(read(Grid, GRID), read(Rule, RULE), read(Coding, CODING))
    assert spell(read_back) == ENCODING
    making = qsim.scaling.PerBlock(16, format="e4m3").spelling(qsim.format("e2m1"))
    assert spell_scales(read_scales(*making)) == making


ALIGNED = "aligned mode=3 block=16 fraction=25 low_a=-126 low_b=-126"
MALFORMED = {
    "another record": (Grid, RULE, f"Grid is spelt mantissa=… exponent=… .*, got '{RULE}'"),
    "too few numbers": (Rule, "mode=7 bits=6", "Rule is spelt mode=… bits=… correction=… overflow=…, got 'mode=7 bits=6'"),
    "a record too many": (Rule, RULE + BAR + RULE, f"Rule is spelt without '{RULE}'"),
    "no grid": (AlignedSum, ALIGNED, "AlignedSum is spelt with its grid, got none"),
    "no word": (AlignedSum, ALIGNED.partition(" ")[2] + BAR + GRID, "AlignedSum is spelt aligned mode=… .*, got 'mode=3"),
    "another sum": (RoundedSum, ALIGNED + BAR + GRID, "RoundedSum is spelt rounded chunk=… .*, got 'aligned mode=3"),
}


@pytest.mark.parametrize(("kind", "text", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_texts_are_refused(kind: type[tuple[object, ...]], text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(kind, text)
