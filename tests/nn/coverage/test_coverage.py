"""`qsim.coverage`: its result, its errors, and `convert` with an example."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qsim
from support.multiplying_models import ALL, Calls, made, mlp


def test_plain_values_and_a_table() -> None:
    model, x = made("mlp", ALL)
    found = qsim.coverage(model, x)
    plain = found.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert (plain["share"], plain["multiply_adds"], len(plain["products"])) == (1.0, found.multiply_adds, len(found.products))
    assert plain["products"][0] == {
        "module": "0",
        "direction": "forward",
        "operator": "addmm",
        "shapes": [[3, 4], [4, 8]],
        "calls": 1,
        "multiply_adds": 96,
        "points": ["act=e4m3", "weight=e4m3"],
        "reason": "",
        "by": "",
    }
    lines = str(found).splitlines()
    assert lines[0] == "432 multiply-adds; both operands rounded: 100 %, one of them: 0 %"
    assert lines[1].split() == ["module", "pass", "operator", "operands", "calls", "multiply-adds", "rounded", "at"]
    assert len(lines) == 2 + len(found.products)
    assert found.table() == str(found)
    assert "(the model)" in str(qsim.coverage(nn.Linear(2, 2), torch.randn(1, 2)))


@pytest.mark.parametrize(
    ("exclude", "modules"), [((), {"*.0": "3", "*.1": "3"}), ("2.1", {"*.0": "3", "0.1": "1", "1.1": "1", "2.1": "1"})]
)
def test_blocks_share_their_rows_where_they_compute_the_same(exclude: Any, modules: dict[str, str]) -> None:
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(3)))
    found = qsim.coverage(qsim.convert(blocks, ALL, exclude=exclude), torch.randn(3, 4), backward=False)
    rows = [line.split() for line in found.table().splitlines()[2:]]
    assert {row[0]: row[5] for row in rows} == modules
    assert sum(int(row[6]) for row in rows) == found.multiply_adds == 3 * 2 * 3 * 4 * 8
    assert len(found.products) == 6


@pytest.mark.parametrize("kind", ["loss", "dictionary", "tuple"])
def test_gradients_are_of_the_loss_or_of_all_outputs(kind: str) -> None:
    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Any:
            one, other = self.first(x), self.second(x)
            if kind == "tuple":
                return one, [other, other.argmax()], "text"
            return {"loss" if kind == "loss" else "one": one.mean(), "other": other}

    found = qsim.coverage(Outputs(), torch.randn(3, 4))
    backward = {product.module for product in found.products if product.direction == "backward"}
    assert backward == ({"first"} if kind == "loss" else {"first", "second"})


def test_converting_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    line = "336 multiply-adds; both operands rounded: 42.86 %, one of them: 0 %"
    for example in (torch.randn(3, 4), (torch.randn(3, 4),), {"input": torch.randn(3, 4)}):
        qsim.convert(mlp(), ALL, exclude="0", verbose=True, example=example)
        assert capsys.readouterr().out.splitlines()[-1] == line
    assert isinstance(qsim.convert(mlp().requires_grad_(False), ALL, example=torch.randn(3, 4)), nn.Module)
    assert not capsys.readouterr().out
    model = Calls(lambda own, x: own.one(x), one=nn.Linear(4, 4), other=nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="convert: the model never called these layers with the example, so they round nothing: other"):
        qsim.convert(model, ALL, example=torch.randn(3, 4))


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"coverage: model must be a torch.nn.Module, got 3"):
        qsim.coverage(3, None)  # type: ignore[arg-type]
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"coverage: the model multiplies nothing with these inputs$"):
        qsim.coverage(nn.ReLU(), x, backward=False)
    with pytest.raises(ValueError, match="coverage: no output requires a gradient: give backward=False"):
        qsim.coverage(mlp().requires_grad_(False), x)
    with pytest.raises(ValueError, match="coverage: its module '1' is lazy and has seen no input: call the model once before"):
        qsim.coverage(nn.Sequential(nn.ReLU(), nn.LazyLinear(2)), x)
    model = mlp()
    with pytest.raises(ValueError, match="coverage: the model is compiled, and compiled code does not report its products"):
        qsim.coverage(torch.compile(model), x)  # type: ignore[arg-type]
    model[0].compile()  # type: ignore[index]
    with pytest.raises(ValueError, match="coverage: its module '0' is compiled"):
        qsim.coverage(model, x)
