"""Small files of MNIST's kind, with random pixels: for tests that read such files, or need the shape of their images."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def random(shape: tuple[int, ...], below: int = 256) -> np.ndarray:
    """Random bytes, the same for each shape."""
    return np.random.default_rng(sum(shape)).integers(below, size=shape, dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    """An idx file: two zero bytes, 8 for bytes, the number of dimensions; each as four bytes, the highest first; the content."""
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def parts(training: int = 20) -> dict[str, np.ndarray]:
    """The content of the four files, by their names: images for training, 7 for testing, of 28 × 28 pixels, and their labels."""
    return {
        "train-images-idx3-ubyte": random((training, 28, 28)),
        "train-labels-idx1-ubyte": random((training,), 10),
        "t10k-images-idx3-ubyte": random((7, 28, 28)),
        "t10k-labels-idx1-ubyte": random((7,), 10),
    }


def write(folder: Path, training: int = 20) -> None:
    """Write the four files into a new folder."""
    folder.mkdir()
    for name, array in parts(training).items():
        (folder / name).write_bytes(idx(array))
