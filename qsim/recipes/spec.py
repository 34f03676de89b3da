"""The type of the formats that recipes take."""

from __future__ import annotations

import torch

from qsim.formats import Format
from qsim.scaling.block_formats import Block

#: A format, with or without blocks.
Spec = str | torch.dtype | Format | Block
