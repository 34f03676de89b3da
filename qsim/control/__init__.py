"""Control of a run by what is measured in it: weights that oscillate are reset, and channels or layers get a wider format.

Each control works like a learning rate scheduler: `start(model)` before the first step, `step()` after each step of the optimizer, and
`state_dict` for checkpoints. `ControlCallback` of `qsim.hugging_face` and `qsim.lightning` does this in a Trainer.

Example:
    >>> import torch, qsim
    >>> model = qsim.convert(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)), "tetrajet2")
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    >>> controls = [qsim.control.OutControl(window=2).start(model), qsim.control.OsciReset(period=4, window=3).start(model)]
    >>> for _ in range(4):
    ...     model(torch.randn(16, 64)).square().mean().backward()
    ...     optimizer.step()
    ...     for control in controls:
    ...         control.step()
    >>> [len(channels) for channels in controls[0].channels.values()]
    [6, 6]
"""

from qsim.control.base import Control
from qsim.control.fallback import Fallback, Moved, MovedLayers
from qsim.control.oscillations import OsciReset
from qsim.control.outliers import OutControl

__all__ = ["Control", "Fallback", "Moved", "MovedLayers", "OsciReset", "OutControl"]
