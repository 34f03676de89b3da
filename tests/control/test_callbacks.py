"""Controls in Lightning's Trainer and in transformers': the same as in a loop of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qsim.control import OsciReset, OutControl
from support.refusing import refused


def test_lightning(tmp_path: Path) -> None:
    pl = pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    import qsim
    from qsim.lightning import ControlCallback

    class Small(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layer = qsim.convert(torch.nn.Sequential(torch.nn.Linear(20, 4)), "mxfp4")

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(steps: int, **options: Any) -> tuple[Any, tuple[OsciReset, OutControl]]:
        torch.manual_seed(1)
        batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 20)), 4)
        controls = OsciReset(period=3, window=2, ratio=1.5), OutControl(window=3)
        silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        trainer = pl.Trainer(
            accelerator="cpu",
            max_steps=steps,
            accumulate_grad_batches=2,
            default_root_dir=tmp_path,
            callbacks=[ControlCallback(*controls)],
            **silent,
        )
        trainer.fit(Small(), batches, **options)
        return trainer, controls

    trainer, controls = fit(4)
    assert [control.steps for control in controls] == [4, 4]
    assert controls[0].counts
    assert len(controls[1].channels["layer.0"]) == 2
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    _, again = fit(6, ckpt_path=str(tmp_path / "state.ckpt"))
    assert [control.steps for control in again] == [6, 6]
    assert again[1].channels == controls[1].channels


@pytest.mark.slow
def test_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    import qsim
    from qsim.hugging_face import ControlCallback
    from support.trained_llama import model, trainer

    controls = OsciReset(period=3, window=2, ratio=1.5), OutControl(window=2)
    own = qsim.convert(model(), "mxfp4", exclude=["lm_head"])
    trainer(own, tmp_path, [ControlCallback(*controls)], max_steps=3).train()
    assert [control.steps for control in controls] == [3, 3]
    assert controls[0].counts.keys() == controls[1].channels.keys() != set()
    with refused(TypeError, "ControlCallback: give controls of qsim.control, such as OsciReset(), got 3"):
        ControlCallback(3)  # type: ignore[arg-type]
