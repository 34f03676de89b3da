"""The script of the site's format explorer: its results in Node and in Chromium."""

from __future__ import annotations

import base64
import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import qsim
from support.chromium import Chromium
from support.emitted import run, tool

DOCS = Path(__file__).parents[2] / "docs"
SEED, STREAM = 5, 7
_CALL = """
(x, random, format, rounding, overflow) => {
  const fmt = qsim.format(format), results = new Float32Array(x.length);
  for (let i = 0; i < x.length; i++) results[i] = qsim.quantize(x[i], fmt, rounding, overflow, random[i]);
  return results;
}
"""
_NODE = """
const fs = require("node:fs");
require(process.argv[2]);
const given = fs.readFileSync(process.argv[3]);
const words = new Uint32Array(given.buffer.slice(given.byteOffset, given.byteOffset + given.length));
const half = words.length / 2, x = new Float32Array(words.buffer, 0, half), random = words.subarray(half);
const call = %s, results = JSON.parse(process.argv[5]).map((how) => Buffer.from(call(x, random, ...how).buffer));
fs.writeFileSync(process.argv[4], Buffer.concat(results));
"""
_BROWSER = """
((words) => {
  const half = words.length / 2, x = new Float32Array(words.buffer, 0, half), random = words.subarray(half);
  const bytes = new Uint8Array((%s)(x, random, ...%s).buffer);
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
})(globalThis.given ??= new Uint32Array(Uint8Array.from(atob("%s"), (sign) => sign.charCodeAt(0)).buffer))
"""


class How(NamedTuple):
    """A rounding that the script is asked for."""

    format: str
    rounding: str
    overflow: str


def script(folder: Path) -> Path:
    """The explorer's script, as the site has it."""
    pytest.importorskip("docutils")
    path = folder / "explorer.js"
    path.write_text(runpy.run_path(str(DOCS / "_ext" / "explorer.py"))["script"]())
    return path


def noise(count: int) -> Tensor:
    """The random words of the elements of a tensor, as `qsim.quantize` draws them."""
    return qsim.random.random_bits(count, 32, seed=SEED, stream=STREAM)


def quantized(how: How, x: Tensor) -> Tensor:
    """The results of `qsim.quantize` for float32 bits, as such bits."""
    drawn: dict[str, Any] = {"seed": qsim.random.Noise(SEED, STREAM)} if how.rounding == "stochastic" else {}
    return _bits(qsim.quantize(x.to(torch.int32).view(torch.float32), how.format, how.rounding, overflow=how.overflow, **drawn))  # type: ignore[arg-type]


def _bits(values: Tensor) -> Tensor:
    """Float32's bits, with one NaN."""
    return torch.where(values.isnan(), 0x7FFFFFFF, values.view(torch.int32).long() & 0xFFFFFFFF)


def _words(x: Tensor, random: Tensor) -> bytes:
    return np.concatenate([column.numpy().astype(np.uint32) for column in (x, random)]).tobytes()


def in_node(hows: Sequence[How], x: Tensor, folder: Path) -> list[Tensor]:
    """The script's results in Node."""
    (folder / "main.cjs").write_text(_NODE % _CALL)
    (folder / "in.bin").write_bytes(_words(x, noise(len(x))))
    run(tool("node"), folder / "main.cjs", script(folder), folder / "in.bin", folder / "out.bin", json.dumps(hows))
    rows = np.fromfile(folder / "out.bin", dtype=np.float32).reshape(len(hows), -1)
    return [_bits(torch.from_numpy(row.copy())) for row in rows]


def in_chromium(hows: Sequence[How], x: Tensor, browser: Chromium, folder: Path) -> list[Tensor]:
    """The script's results in Chromium."""
    browser.open("about:blank")
    browser.evaluate(script(folder).read_text())
    given = base64.b64encode(_words(x, noise(len(x)))).decode()
    found = []
    for place, how in enumerate(hows):
        text = browser.evaluate(_BROWSER % (_CALL, json.dumps(how), "" if place else given))
        found.append(_bits(torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.float32).copy())))
    return found
