"""Controls in Lightning's Trainer and in transformers': the same as in a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qsim.control import OsciReset, OutControl
from support.comparing import same_bits
from support.refusing import refused


def test_lightning(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    import qsim
    from qsim.lightning import ControlCallback

    class Small(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = qsim.convert(torch.nn.Sequential(torch.nn.Linear(20, 4)), qsim.FivePoint("mxfp4", "mxfp4"))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(steps: int, **options: Any) -> tuple[Any, tuple[OsciReset, OutControl]]:
        torch.manual_seed(1)
        # Equal batches: Lightning begins an epoch again where it resumes.
        batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4, 20).repeat(8, 1)), 4)
        controls = OsciReset(period=5, window=5, ratio=1.5), OutControl(window=5)
        silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        saved = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            accumulate_grad_batches=2,
            default_root_dir=tmp_path,
            callbacks=[saved, ControlCallback(*controls)],
            **silent,
        )
        trainer.fit(Small(), batches, **options)
        return trainer, controls

    whole, controls = fit(6)
    assert [control.steps for control in controls] == [6, 6]
    assert controls[0].counts
    assert len(controls[1].channels["layer.0"]) == 2
    # Inside both windows, and inside an epoch.
    resumed, again = fit(6, ckpt_path=str(tmp_path / "step=2.ckpt"))
    assert [control.steps for control in again] == [6, 6]
    assert again[0].counts == controls[0].counts
    assert again[1].channels == controls[1].channels
    assert all(same_bits(x, resumed.model.state_dict()[name]) for name, x in whole.model.state_dict().items())


@pytest.mark.slow
def test_transformers(tmp_path: Path) -> None:
    """A run that resumes inside the windows of both controls is that without a break, to the bit."""
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    import qsim
    from qsim.hugging_face import ControlCallback
    from support.trained_llama import model, trainer

    def train(folder: Path, steps: int, **options: Any) -> tuple[Any, tuple[OsciReset, OutControl]]:
        controls = OsciReset(period=4, window=4, ratio=1.5), OutControl(window=3)
        own = qsim.convert(model(), "mxfp4", exclude=["lm_head"])
        callback = ControlCallback(*controls)
        run = trainer(own, folder, [callback], max_steps=steps, save_strategy="steps", save_steps=2, lr_scheduler_type="constant")
        run.train(**options)
        return own, controls

    whole, controls = train(tmp_path / "whole", 5)
    assert [control.steps for control in controls] == [5, 5]
    assert controls[0].counts.keys() == controls[1].channels.keys() != set()
    train(tmp_path / "part", 2)
    assert (tmp_path / "part" / "checkpoint-2" / "qsim_controls_0.pt").is_file()
    resumed, again = train(tmp_path / "part", 5, resume_from_checkpoint=True)
    assert [control.steps for control in again] == [5, 5]
    assert again[0].counts == controls[0].counts
    assert again[1].channels == controls[1].channels
    assert all(same_bits(x, resumed.state_dict()[name]) for name, x in whole.state_dict().items())
    (tmp_path / "part" / "checkpoint-5" / "qsim_controls_0.pt").unlink()
    with pytest.raises(FileNotFoundError, match=r"ControlCallback: there is no .*checkpoint-5.*: load each control's state first"):
        train(tmp_path / "part", 6, resume_from_checkpoint=True)
    with refused(TypeError, "ControlCallback: give controls of qsim.control, such as OsciReset(), got 3"):
        ControlCallback(3)  # type: ignore[arg-type]
