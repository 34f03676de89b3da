"""A model that was saved and loaded computes the same bits, and nothing that differs goes unnoticed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import qsim
from qsim import FivePoint, Quantizer, scaling
from qsim.checkpoints import folders

DELAYED = Quantizer("e4m3", scale=scaling.Delayed(history=4))
NOISY = Quantizer("e4m1", "stochastic")


class Model(nn.Module):
    """Layers of several kinds, a tied weight, and points of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.mix = nn.Linear(16, 16)
        self.between = qsim.nn.Quantize("e5m2", "e5m2")
        self.own = qsim.nn.Linear(16, 16, points=FivePoint(act="bf16", act_bwd=None), stream=5)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return self.head(self.own(self.between(self.mix(x))))


def converted() -> Model:
    torch.manual_seed(0)
    model = Model()
    qsim.convert(
        model,
        {
            "attend": FivePoint(NOISY, NOISY, grad=NOISY, act_bwd=None, weight_bwd=None),
            "mix": FivePoint(DELAYED, DELAYED, act_bwd=None, weight_bwd=None),
        },
        exclude=["head"],
    )
    qsim.convert(model, FivePoint(weight=NOISY, weight_bwd="same", grad="e5m2"), include=["head"])
    step(model)
    return model


def step(model: nn.Module) -> list[Tensor]:
    """The output and the gradients of one step in training, from fixed seeds."""
    torch.manual_seed(3)
    output = model(torch.arange(10).view(2, 5))
    model.zero_grad()
    output.square().sum().backward()
    return [output.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


def test_a_loaded_model_computes_the_same_bits(tmp_path: Path) -> None:
    model = converted()
    qsim.save(model, tmp_path / "saved", max_shard_size=2000)
    assert len(list(tmp_path.glob("saved/model-*.safetensors"))) > 2
    # A conversion that the model has already is replaced, and loading draws nothing from torch's generator.
    other = qsim.convert(Model(), "mxfp8")
    before = torch.get_rng_state()
    loaded = qsim.load(other, tmp_path / "saved")
    assert torch.equal(before, torch.get_rng_state())
    assert qsim.nn.conversion(loaded) == qsim.nn.conversion(model)
    assert loaded.mix.points == model.mix.points
    first, second = step(model), step(loaded)
    assert len(first) == 10
    assert all(map(torch.equal, first, second))
    # In evaluation the delayed scales follow from histories that were saved.
    assert all(map(torch.equal, step(model.eval()), step(loaded.eval())))


class Experts(nn.Module):
    """A module that multiplies by a parameter of its own, and by activations."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(3, 16, 16))
        self.table = nn.Embedding(10, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.stack([nn.functional.linear(self.table(tokens), weight) for weight in self.stack]).sum(0)
        return nn.functional.linear(x @ x.mT @ x, self.table.weight)


def test_products_outside_of_layers_are_saved_with_the_model(tmp_path: Path) -> None:
    grad = Quantizer("e4m1", "stochastic", overflow="saturate")
    model, loaded = qsim.convert(Experts(), FivePoint(NOISY, NOISY, grad=grad, act_bwd=None, weight_bwd=None), calls="all"), Experts()
    qsim.save(model, tmp_path / "saved")
    qsim.load(loaded, tmp_path / "saved")
    assert all(torch.equal(own, other) for own, other in zip(step(loaded), step(model), strict=True))
    assert all(product.points for product in qsim.coverage(loaded, torch.arange(10).view(2, 5)).products)
    with pytest.raises(ValueError, match="the saved model had another architecture"):
        qsim.load(nn.Sequential(Experts()), tmp_path / "saved")


class Borrows(nn.Module):
    """A module without parameters that multiplies by the weights of its layers, in a function of torch as well."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16)
        self.mix = nn.Conv1d(16, 16, 3, padding=1, groups=16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.mix(self.table(tokens).mT)
        return nn.functional.conv1d(x, self.mix.weight, groups=16)


@pytest.mark.parametrize("calls", ["parameters", "none"])
def test_products_with_the_weights_of_layers_are_saved_with_the_model(calls: Any, tmp_path: Path) -> None:
    model = qsim.convert(Borrows(), qsim.recipes.nvfp4().points, calls=calls)
    qsim.save(model, tmp_path / "saved")
    loaded = qsim.load(Borrows(), tmp_path / "saved")
    assert all(map(torch.equal, step(loaded), step(model)))
    share = qsim.coverage(loaded, torch.arange(10).view(2, 5)).share
    assert share == qsim.coverage(model, torch.arange(10).view(2, 5)).share
    assert (share == 1) == (calls == "parameters")
    # With the note on the transform that a depthwise convolution does not take.
    assert qsim.nn.conversion(loaded) == qsim.nn.conversion(model)
    assert len(qsim.nn.conversion(loaded).notes) == 1


class Scored(nn.Module):
    """A module whose part without parameters multiplies activations."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)
        self.add_module(name, Scores())


class Scores(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.mT


def test_modules_whose_calls_were_rounded_must_exist(tmp_path: Path) -> None:
    qsim.save(qsim.convert(Scored("scores"), "mxfp8", calls="all"), tmp_path / "saved")
    model = Scored("other")
    with pytest.raises(ValueError, match=r"^scores, whose calls were rounded, does not exist in the model: the saved model had another"):
        qsim.load(model, tmp_path / "saved")
    assert type(model.mix) is nn.Linear
    assert type(qsim.load(Scored("scores"), tmp_path / "saved").mix) is qsim.nn.Linear


def test_a_folder_holds_no_pickle_and_says_what_it_is(tmp_path: Path) -> None:
    model = qsim.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "nvfp4")
    qsim.save(model, tmp_path / "saved")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["model.safetensors", "qsim.json"]
    assert torch.equal(load_file(tmp_path / "saved" / "model.safetensors")["0.weight"], model[0].weight)
    facts = json.loads((tmp_path / "saved" / "qsim.json").read_text())
    conversion = facts["conversion"]
    assert facts["torch_seed"] == torch.initial_seed()
    assert conversion["layers"]["1"]["recipe"] == "nvfp4"
    assert FivePoint.from_dict(conversion["points"][conversion["layers"]["0"]["points"]]) == qsim.recipes.nvfp4().points


def test_weights_of_a_converted_model_in_a_plain_one_cause_a_warning(tmp_path: Path) -> None:
    model = qsim.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), FivePoint(act=DELAYED, act_bwd=None), exclude=["1"])
    qsim.save(model, tmp_path / "saved")
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.warns(UserWarning, match=r"load: the saved model rounds in 1 of its layers, and with convert=False this model keeps"):
        qsim.load(plain, tmp_path / "saved", convert=False)
    assert type(plain[0]) is nn.Linear
    assert torch.equal(plain[0].weight, model[0].weight)
    qsim.load(model, tmp_path / "saved", convert=False)  # the same conversion: nothing to warn of


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4)), "the model lacks 1.bias, 1.weight: the saved model had another architecture"),
        (lambda: nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), r"the folder lacks 2.weight, 2.bias"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), r"1.bias has shape \(3,\) in the model and was saved with \(2,\)"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16(), r"model.to\(torch.float32\) first"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to("meta"), r"on the meta device: call model.to_empty"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.modules.linear.NonDynamicallyQuantizableLinear(4, 2)),
            "1, a converted Linear, is a NonDynamicallyQuantizableLinear in the model",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2), qsim.nn.Quantize("e4m3")),
            "the model's qsim.nn.Quantize modules are not those of the saved model",
        ),
    ],
)
def test_another_model_is_refused_and_unchanged(tmp_path: Path, other: object, error: str) -> None:
    qsim.save(qsim.convert(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "fp8_hybrid"), tmp_path / "saved")
    model = other()
    before = {name: (type(module), module.training) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=error):
        qsim.load(model, tmp_path / "saved")
    assert {name: (type(module), module.training) for name, module in model.named_modules()} == before


def test_a_model_of_another_dtype_of_the_same_size_is_refused(tmp_path: Path) -> None:
    qsim.save(nn.Linear(4, 2, bias=False).bfloat16(), tmp_path / "saved")
    with pytest.raises(ValueError, match=r"weight is torch\.float16 in the model and was saved as torch\.bfloat16: model\.to\(torch\.bfl"):
        qsim.load(nn.Linear(4, 2, bias=False).half(), tmp_path / "saved")


def test_layers_built_with_points_must_have_been_saved(tmp_path: Path) -> None:
    qsim.save(nn.Linear(4, 4), tmp_path / "saved")
    with pytest.raises(ValueError, match="the model was built with points, and the saved model had none there"):
        qsim.load(qsim.nn.Linear(4, 4, points="mxfp8"), tmp_path / "saved")


def test_states_that_safetensors_cannot_hold_are_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 3}

    with pytest.raises(TypeError, match="save: _extra_state is not a tensor but dict"):
        qsim.save(Extra(2, 2), tmp_path / "saved")
    with pytest.raises(ValueError, match="save: weight is lazy and has seen no input"):
        qsim.save(nn.LazyLinear(2), tmp_path / "saved")
    with pytest.raises(ValueError, match="save: weight is on the meta device and has no values"):
        qsim.save(nn.Linear(2, 2, device="meta"), tmp_path / "saved")
    sparse = nn.Module()
    sparse.register_buffer("mask", torch.eye(2).to_sparse())
    with pytest.raises(TypeError, match=r"save: mask must be a dense tensor, got layout torch\.sparse_coo"):
        qsim.save(sparse, tmp_path / "saved")
    with pytest.raises(ValueError, match="max_shard_size must be a number of bytes or a text such as '5GB', got '5 apples'"):
        qsim.save(nn.Linear(2, 2), tmp_path / "saved", max_shard_size="5 apples")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_only_on_request(tmp_path: Path) -> None:
    target = tmp_path / "saved"
    qsim.save(nn.Linear(2, 2), target)
    with pytest.raises(FileExistsError, match=r"save: .*saved is not empty; overwrite=True replaces a checkpoint"):
        qsim.save(nn.Linear(3, 3), target)
    qsim.save(nn.Linear(3, 3), target, overwrite=True)
    assert sorted(path.name for path in target.iterdir()) == ["model.safetensors", "qsim.json"]
    assert load_file(target / "model.safetensors")["weight"].shape == (3, 3)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError, match="file is a file, and a folder is written"):
        qsim.save(nn.Linear(2, 2), tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"load: there is no .*qsim.json"):
        qsim.load(nn.Linear(2, 2), tmp_path)
    (target / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"load: there is no .*model.safetensors"):
        qsim.load(nn.Linear(3, 3), target)


def test_an_interrupted_folder_does_not_look_complete(tmp_path: Path) -> None:
    target = tmp_path / "saved"
    qsim.save(nn.Linear(2, 2), target)
    with pytest.raises(KeyboardInterrupt), folders.whole_folder("save", target, overwrite=True) as place:  # noqa: PT012
        assert place.name.endswith(".incomplete")
        (place / "model.safetensors").write_bytes(b"half of it")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    qsim.load(nn.Linear(2, 2), target)


def test_a_newer_description_is_refused(tmp_path: Path) -> None:
    qsim.save(nn.Linear(2, 2), tmp_path / "saved")
    path = tmp_path / "saved" / "qsim.json"
    facts = json.loads(path.read_text())
    facts["conversion"]["version"] = 2
    path.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="the description of the conversion has version 2; this release reads 1"):
        qsim.load(nn.Linear(2, 2), tmp_path / "saved")


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = qsim.convert(nn.Sequential(nn.Linear(4, 4)), "fp8_hybrid")
    qsim.save(model, tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for action, folder in ((qsim.save, "new"), (qsim.export, "new"), (qsim.load, "saved")):
        with pytest.raises(ImportError, match=rf"^{action.__name__} needs safetensors: pip install 'qsim-torch\[export\]'"):
            action(model, tmp_path / folder)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_what_is_no_model_is_neither_saved_nor_loaded() -> None:
    with pytest.raises(TypeError, match=r"save: model must be a torch\.nn\.Module, got 'place'"):
        qsim.save("place", nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"load: model must be a torch\.nn\.Module, got 'place'"):
        qsim.load("place", nn.Linear(2, 2))  # type: ignore[type-var, arg-type]
