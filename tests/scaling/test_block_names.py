"""Block formats as values: their names, text and bits."""

from __future__ import annotations

import pytest
import torch

import qsim
from qsim.scaling import NAMED


@pytest.mark.parametrize("name", NAMED)
def test_blocks_print_as_the_calls_that_make_them(name: str) -> None:
    assert qsim.scaling.block_formats.resolve(repr(NAMED[name])) == NAMED[name]
    for outer in ("PerTensor()", "tensor"):
        assert qsim.Block("e2m1", 16, outer=outer) == qsim.Block("e2m1", 16, outer=qsim.scaling.PerTensor())


@pytest.mark.parametrize("name", NAMED)
def test_names_of_blocks_are_known_where_only_formats_are_taken(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is a block format, .* take its name; qsim.scaling.NAMED holds it"):
        qsim.format(name)


def test_bits_of_an_element_are_its_own_and_its_share_of_the_scale() -> None:
    assert {name: fmt.bits for name, fmt in NAMED.items() if "_e" not in name} == {
        "mxfp8": 8 + 8 / 32,
        "mxfp6": 6 + 8 / 32,
        "mxfp4": 4 + 8 / 32,
        "mxint8": 8 + 8 / 32,
        "nvfp4": 4 + 8 / 16,
        "fp8_1x128": 8 + 8 / 128,
        "fp8_128x128": 8 + 8 / 128**2,
    }
    codes = qsim.encode(torch.randn(64, 64), "mxfp4", packed=True)
    assert 8 * (codes.codes.numel() + codes.scales.numel()) == NAMED["mxfp4"].bits * 64 * 64
