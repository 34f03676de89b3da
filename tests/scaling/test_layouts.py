"""Block formats of tensors in any layout: results depend only on values and logical indices."""

from __future__ import annotations

import pytest
import torch

import qsim
from qsim.scaling import NAMED
from support.comparing import same_bits
from support.scaled_cases import DIFFERENT, hard


@pytest.mark.parametrize("name", DIFFERENT)
class TestLayouts:
    """Results depend only on values and logical indices."""

    def test_strides(self, name: str) -> None:
        x = torch.randn(3, 8, 6, 10)
        for dim in range(4):
            due = qsim.quantize(x, name, dim=dim, rounding="stochastic", seed=1)
            others = [
                x.to(memory_format=torch.channels_last),
                x.movedim(0, -1).contiguous().movedim(-1, 0),
                torch.stack([x, x + 1], dim=-1)[..., 0],
                x.flip(1).flip(1),
            ]
            for other in others:
                assert same_bits(qsim.quantize(other, name, dim=dim, rounding="stochastic", seed=1), due)
        expanded = torch.randn(1, 8, 6, 10).expand(3, 8, 6, 10)
        assert same_bits(qsim.quantize(expanded, name), qsim.quantize(expanded.contiguous(), name))

    def test_dimensions_are_names(self, name: str) -> None:
        # Blocks along one dimension are those along the last of the transposed tensor.
        if isinstance(NAMED[name].size, tuple):
            pytest.skip("tiles lie in the last two dimensions")
        x = hard(40, 33)
        assert same_bits(qsim.quantize(x, name, dim=0), qsim.quantize(x.t(), name, dim=1).t())
        assert same_bits(qsim.quantize(x, name, dim=0), qsim.quantize(x.t().contiguous(), name).t())

    def test_dimensions_of_one(self, name: str) -> None:
        x = torch.randn(1, 40, 1)
        due = qsim.quantize(x.view(40), name) if isinstance(NAMED[name].size, int) else qsim.quantize(x.view(40, 1), name).view(40)
        assert same_bits(qsim.quantize(x, name, dim=1).view(40), due)

    def test_nothing(self, name: str) -> None:
        for shape in ((0, 3), (3, 0), (2, 0, 5)):
            assert qsim.quantize(torch.zeros(shape), name, dim=0).shape == shape
            assert qsim.quantize(torch.zeros(shape), name, dim=-1).shape == shape


@pytest.mark.parametrize("name", [name for name in DIFFERENT if isinstance(NAMED[name].size, int)])
def test_one_number(name: str) -> None:
    x = torch.tensor(0.7)
    assert same_bits(qsim.quantize(x, name), qsim.quantize(x[None], name)[0])
    assert qsim.encode(x, name).scales.shape == ()
