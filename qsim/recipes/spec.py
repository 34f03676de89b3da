"""The type of the formats that recipes take."""

from __future__ import annotations

import torch

from qsim.block import Block
from qsim.formats import Format

#: A format, with or without blocks.
Spec = str | torch.dtype | Format | Block
