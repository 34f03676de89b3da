"""transformers' Trainer with converted models: every option trains, and an interrupted run goes on to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qsim
from qsim import FivePoint, Quantizer

pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")
pytest.importorskip("qsim.hugging_face")

NOISY = FivePoint("e4m3", Quantizer("e4m3", "stochastic"), act_bwd="same", weight_bwd="same", grad=Quantizer("e5m2", "stochastic"))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXTS = [{"input_ids": row, "labels": row} for row in torch.randint(3, 40, (4, 12), generator=torch.Generator().manual_seed(0))] * 4


def model() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, vocab_size=40, attn_implementation="qsim"))


def trainer(model: Any, folder: Path, callbacks: Any = (), **options: Any) -> Any:
    given = {"per_device_train_batch_size": 4, "max_steps": 8, "learning_rate": 1e-2, "use_cpu": True, "seed": 3}
    silent = {"report_to": [], "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(folder), **{**given, **silent, **options})
    optimizer = qsim.optim.AdamW(model.parameters(), lr=1e-2, update="stochastic", seed=5)
    return transformers.Trainer(model, arguments, train_dataset=TEXTS, optimizers=(optimizer, None), callbacks=[*callbacks])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16": {"bf16": True},
}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


@pytest.mark.parametrize("option", OPTIONS)
def test_it_trains(option: str, tmp_path: Path) -> None:
    own = trainer(qsim.convert(model(), NOISY), tmp_path, **OPTIONS[option])
    own.train()
    losses = [entry["loss"] for entry in own.state.log_history if "loss" in entry]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]


def test_checkpointing_and_compilation_do_not_change_a_bit(tmp_path: Path) -> None:
    def weights(**options: Any) -> list[torch.Tensor]:
        own = qsim.convert(model(), NOISY)
        trainer(own, tmp_path, max_steps=3, **options).train()
        return list(own.parameters())

    usual = weights()
    for options in (OPTIONS["checkpointing"], COMPILED):
        assert all(map(torch.equal, usual, weights(**options))), options


def test_inductor_trains_as_eager_code_does(tmp_path: Path) -> None:
    def losses(**options: Any) -> list[float]:
        own = trainer(qsim.convert(model(), "fp8_hybrid"), tmp_path, **options)
        own.train()
        return [entry["loss"] for entry in own.state.log_history if "loss" in entry]

    # Sums in another order change roundings now and then.
    assert losses(torch_compile=True, torch_compile_backend="inductor") == pytest.approx(losses(), rel=0.01)


def test_an_interrupted_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    whole: nn.Module = qsim.convert(model(), NOISY)
    trainer(whole, tmp_path, **saving).train()
    checkpoint = tmp_path / "checkpoint-4"
    resumed = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="qsim")
    assert qsim.nn.conversion(resumed) == qsim.nn.conversion(whole)
    trainer(resumed, tmp_path / "again", **saving).train(resume_from_checkpoint=str(checkpoint))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


PHASES: dict[int | float, Any] = {0: "bf16", 0.25: "nvfp4", 0.75: "bf16"}


def scheduled(phases: dict[int | float, Any] = PHASES) -> Any:
    from qsim.hugging_face import ScheduleCallback

    return ScheduleCallback(qsim.Schedule(phases), qsim.Schedule({0: {"update": "stochastic"}, 5: {"update": "kahan"}}))


def formats(model: Any) -> set[str]:
    return {str(points.act.format.bits) for _, _, points in qsim.nn.conversion(model).changed if points.act is not None}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> tuple[Any, Path]:
    """A model after a run with a schedule, and the folder of its checkpoints."""
    folder, own = tmp_path_factory.mktemp("whole"), model()
    trainer(own, folder, [scheduled()], save_strategy="steps", save_steps=1).train()
    return own, folder


@pytest.mark.parametrize(("stop", "bits"), [(1, {"16"}), (2, {"4", "16"}), (4, {"4", "16"}), (7, {"16"})])
@pytest.mark.parametrize("loaded", [True, False], ids=["from_pretrained", "a new model"])
def test_a_schedule_goes_on_to_the_bit_inside_each_phase(
    stop: int, bits: set[str], loaded: bool, whole: tuple[Any, Path], tmp_path: Path
) -> None:
    own, folder = whole
    checkpoint = folder / f"checkpoint-{stop}"
    saved = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="qsim")
    assert formats(saved) == bits
    resumed = saved if loaded else model()
    trainer(resumed, tmp_path, [scheduled()]).train(resume_from_checkpoint=str(checkpoint))
    assert all(map(torch.equal, own.parameters(), resumed.parameters()))
    assert qsim.nn.conversion(resumed) == qsim.nn.conversion(own)


def test_a_compiled_model_follows_a_schedule(tmp_path: Path) -> None:
    def weights(**options: Any) -> list[torch.Tensor]:
        own = model()
        trainer(own, tmp_path, [scheduled({0: "bf16", 1: "fp8_hybrid", 2: "bf16"})], max_steps=3, **options).train()
        return list(own.parameters())

    assert all(map(torch.equal, weights(), weights(**COMPILED)))


def test_a_callback_takes_schedules() -> None:
    from qsim.hugging_face import ScheduleCallback

    with pytest.raises(TypeError, match=r"ScheduleCallback: schedule must be a qsim\.Schedule, got 'nvfp4'"):
        ScheduleCallback("nvfp4")  # type: ignore[arg-type]
