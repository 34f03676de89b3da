"""transformers' Trainer with converted models: every option trains, and an interrupted run goes on to the bit."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qsim
from qsim import FivePoint, Quantizer
from support.comparing import same_bits

pytest.importorskip("accelerate")
transformers: Any = pytest.importorskip("transformers")

from qsim.hugging_face import ScheduleCallback  # noqa: E402
from support.trained_llama import model, run, scheduled, trainer  # noqa: E402

NOISY = FivePoint("e4m3", Quantizer("e4m3", "stochastic"), act_bwd="same", weight_bwd="same", grad=Quantizer("e5m2", "stochastic"))

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16": {"bf16": True},
}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("option", OPTIONS)
def test_it_trains(option: str, tmp_path: Path) -> None:
    own = trainer(qsim.convert(model(), NOISY), tmp_path, **OPTIONS[option])
    own.train()
    losses = [entry["loss"] for entry in own.state.log_history if "loss" in entry]
    assert len(losses) == 8
    assert losses[-1] < 0.9 * losses[0]


# Compiled code draws other random bits.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "points"), [(OPTIONS["checkpointing"], NOISY), (COMPILED, "fp8_hybrid")], ids=["checkpointing", "compiled"]
)
def test_checkpointing_and_compilation_do_not_change_a_bit(options: dict[str, Any], points: Any, tmp_path: Path) -> None:
    def weights(**options: Any) -> list[torch.Tensor]:
        own = qsim.convert(model(), points)
        trainer(own, tmp_path, max_steps=3, **options).train()
        return list(own.parameters())

    assert all(map(torch.equal, weights(), weights(**options)))


@pytest.mark.slow
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


def formats(model: Any) -> set[str]:
    return {str(points.act.format.bits) for _, _, points in qsim.nn.conversion(model).changed if points.act is not None}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> tuple[Any, Path]:
    """A model after a run with a schedule, and the folder of its checkpoints."""
    folder, own = tmp_path_factory.mktemp("whole"), model()
    trainer(own, folder, [scheduled()], save_strategy="steps", save_steps=1).train()
    return own, folder


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("stop", "bits"), [(2, {"4", "16"}), (1, {"16"}), (4, {"4", "16"}), (7, {"16"})])
@pytest.mark.parametrize("loaded", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["from_pretrained", "a new model"])
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


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_bit_in_each_phase(tmp_path: Path) -> None:
    """BF16, NVFP4 from the fourth step, BF16 from the tenth; killed in the third, eighth and twelfth, and started again each time.

    Only this test: `pytest tests/nn/test_trainer.py -k killed`.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["support.trained_llama"])

    def start(folder: Path, killed_in: int | None = None) -> int | None:
        process = processes.Process(target=run, args=(folder, killed_in))
        process.start()
        process.join()
        return process.exitcode

    assert start(whole) == 0
    for step, checkpoint in ((2, "checkpoint-2"), (7, "checkpoint-6"), (11, "checkpoint-10")):
        assert start(killed, step) == -signal.SIGKILL
        assert transformers.trainer_utils.get_last_checkpoint(killed) == str(killed / checkpoint)
    assert start(killed) == 0
    ends = [torch.load(folder / "end.pt") for folder in (whole, killed)]
    assert len(ends[0]) == len(ends[1]) > 12
    assert all(map(same_bits, *ends))


@pytest.mark.slow
def test_a_compiled_model_follows_a_schedule(tmp_path: Path) -> None:
    def weights(**options: Any) -> list[torch.Tensor]:
        own = model()
        trainer(own, tmp_path, [scheduled({0: "bf16", 1: "fp8_hybrid", 2: "bf16"})], max_steps=3, **options).train()
        return list(own.parameters())

    assert all(map(torch.equal, weights(), weights(**COMPILED)))


def test_a_callback_takes_schedules() -> None:
    with pytest.raises(TypeError, match=r"ScheduleCallback: schedule must be a qsim\.Schedule, got 'nvfp4'"):
        ScheduleCallback("nvfp4")  # type: ignore[arg-type]
