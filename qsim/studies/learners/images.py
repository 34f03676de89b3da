"""Labelled images, and nets for them: scikit-learn's digits, which come with it, or files of Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

import gzip
import math
import pickle
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qsim.studies.learners.training import Examples
from qsim.studies.learners.wide_resnet import WideResNet
from qsim.text.files import FileError, reading

DIGITS = "digits"
#: Residual nets, whatever the images: their names in reports, blocks per group and widths.
RESIDUAL = {
    "resnet": ("WideResNet-10-1", 1, (16, 16, 32, 64)),
    "wide": ("WideResNet-16-4", 2, (16, 64, 128, 256)),
    "resnet-18": ("pre-activation ResNet-18", 2, (64, 64, 128, 256, 512)),
}


@dataclass(frozen=True)
class Images(Examples):
    """Training and test images: images × channels × height × width, with zero mean and unit variance.

    Attributes:
        classes: The number of classes.
        model: One of `RESIDUAL`, or anything else for the net that suits the images.
    """

    classes: int = 10
    model: str = ""

    @property
    def kind(self) -> tuple[str, str]:
        """The net for images like these, by its name and its hidden layers: a perceptron, convolutions, or a residual net."""
        _, channels, height, _ = self.x.shape
        if self.model in RESIDUAL or channels == 3:
            return RESIDUAL[self.model if self.model in RESIDUAL else "wide"][0], ""
        if height < 16:
            return "perceptron", " (64 hidden units)"
        return "net of two convolutions and two linear layers", " (16 and 32 channels, 128 hidden units)"

    def net(self) -> nn.Module:
        """A net for images like these, with random weights."""
        _, channels, height, _ = self.x.shape
        if self.model in RESIDUAL or channels == 3:
            _, blocks, widths = RESIDUAL[self.model if self.model in RESIDUAL else "wide"]
            return WideResNet(self.classes, channels, blocks=blocks, widths=widths)
        if height < 16:
            return nn.Sequential(nn.Flatten(), *_hidden(height * height, 64), nn.Linear(64, self.classes))
        inputs = 32 * (height // 4) ** 2
        convolutions = *_convolution(channels, 16), *_convolution(16, 32)
        return nn.Sequential(*convolutions, nn.Flatten(), *_hidden(inputs, 128), nn.Linear(128, self.classes))


@lru_cache(maxsize=2)
def images(data: str, device: torch.device) -> Images:
    """The images that the option `--data` names.

    Args:
        data: `"digits"`, or a folder with the files of MNIST's kind (idx, also gzipped) or of CIFAR-10 (its Python version). With a number
            behind a colon, as in `"fashion-mnist:1024"`, only so many training images.
        device: The device to keep them on.

    Raises:
        FileError: If a file is malformed, or the files do not fit each other.
        ValueError: If the folder does not exist or contains neither.
    """
    source, _, count = data.partition(":")
    parts = _digits() if source == DIGITS else _from_files(Path(source))
    _check_parts(source, *parts)
    x, y, test_x, test_y = parts
    if count:
        if not (count.isdecimal() and 1 < int(count) <= len(y)):
            raise ValueError(f"data: behind the colon must be a number of training images from 2 to {len(y)}; got {data!r}")
        x, y = x[: int(count)], y[: int(count)]
    mean, spread = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    return Images((x - mean).div(spread).to(device), y.to(device), (test_x - mean).div(spread).to(device), test_y.to(device))


def described(data: str, model: str = "") -> str:
    """The data and the net for them, with its number of parameters; only the name if this machine does not have the data.

    Example:
        >>> described("digits")
        'A perceptron with 4,810 parameters (64 hidden units) learns digits: 898 training and 899 test images of 8 × 8 pixels in 10 classes'
    """
    try:
        found = replace(images(data, torch.device("cpu")), model=model)
    except ValueError:
        return f"A net learns {data}"
    _, channels, height, width = found.x.shape
    (kind, parts), net = found.kind, found.net()
    size = sum(weight.numel() for weight in net.parameters())
    colours = " in colour" if channels == 3 else ""
    name = Path(data).name.partition(":")[0]
    return (
        f"A {kind} with {size:,} parameters{parts} learns {name}: {len(found.y):,} training and {len(found.test_y):,} test "
        f"images of {height} × {width} pixels{colours} in {found.classes} classes"
    )


def variant(data: str, model: str = "") -> str:
    """The net and the data in a few words, for titles; empty for the digits and their perceptron.

    Example:
        >>> variant("fashion-mnist"), variant("digits", "resnet"), variant("digits")
        ('A small net on Fashion-MNIST', 'WideResNet-10-1 on digits', '')
    """
    name, _, count = Path(data).name.partition(":")
    name = {"fashion-mnist": "Fashion-MNIST", "cifar-10": "CIFAR-10"}.get(name.lower(), name)
    name = f"{int(count):,} images of {name}" if count else name
    if model in RESIDUAL:
        return f"{RESIDUAL[model][0]} on {name}"
    return "" if data == DIGITS else f"A small net on {name}"


def _hidden(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.ReLU()]


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]


_Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def _check_parts(data: str, x: Tensor, y: Tensor, test_x: Tensor, test_y: Tensor) -> None:
    """Raise an error for images without labels, of two sizes, or with labels that are not those of ten classes."""
    if (len(x), len(test_x)) != (len(y), len(test_y)):
        raise FileError(f"data: {data!r} has {len(x)} and {len(test_x)} images, but {len(y)} and {len(test_y)} labels")
    if not x.numel() or not test_x.numel():
        raise FileError(f"data: {data!r} has no pixels for training or testing")
    if x.shape[1:] != test_x.shape[1:]:
        raise FileError(f"data: {data!r} has training images of shape {tuple(x.shape[1:])} and test images of {tuple(test_x.shape[1:])}")
    low, high = torch.cat([y, test_y]).aminmax()
    if low < 0 or high >= Images.classes:
        raise FileError(f"data: {data!r} has labels from {low} to {high}; they must be from 0 to {Images.classes - 1}")


def _digits() -> _Parts:
    """Half of scikit-learn's 1797 images for training, half for testing."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(pixels, dtype=torch.float32)[order].view(-1, 1, 8, 8), torch.tensor(labels)[order].long()
    half = len(y) // 2
    return x[:half], y[:half], x[half:], y[half:]


def _from_files(folder: Path) -> _Parts:
    if not folder.is_dir():
        raise ValueError(f"data: must be {DIGITS!r} or a folder with images; there is no folder {str(folder)!r}")
    for reader in (_idx, _cifar_python):
        parts = reader(folder)
        if parts is not None:
            return parts
    raise ValueError(f"data: {str(folder)!r} holds neither MNIST's files (train-images-idx3-ubyte, …) nor CIFAR-10's (data_batch_1, …)")


def _idx(folder: Path) -> _Parts | None:
    found = []
    for part in ("train", "t10k"):
        for kind, dims in (("images-idx3-ubyte", 3), ("labels-idx1-ubyte", 1)):
            file = next((path for path in sorted(folder.glob(f"{part}-{kind}*")) if path.suffix in ("", ".gz")), None)
            if file is None:
                return None
            found.append(_read_idx(file, dims))
    x, y, test_x, test_y = found
    return x[:, None].float(), y.long(), test_x[:, None].float(), test_y.long()


def _read_idx(file: Path, dims: int) -> Tensor:
    with reading("data", file):
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    shape = np.frombuffer(content, ">u4", dims, 4).tolist() if len(content) >= 4 + 4 * dims else []
    if content[:4] != bytes([0, 0, 8, dims]) or len(content) != 4 + 4 * dims + math.prod(shape):
        raise FileError(f"data: {file} is not an idx file of bytes with {dims} dimension{'s' if dims > 1 else ''}")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


def _cifar_python(folder: Path) -> _Parts | None:
    names = [f"data_batch_{number}" for number in range(1, 6)]
    if not all((folder / name).exists() for name in (*names, "test_batch")):
        return None
    read = [_read_cifar_python(folder / name) for name in (*names, "test_batch")]
    pixels = [torch.from_numpy(batch[b"data"]).view(-1, 3, 32, 32).float() for batch in read]
    labels = [torch.tensor(batch[b"labels"]) for batch in read]
    return torch.cat(pixels[:5]), torch.cat(labels[:5]), pixels[5], labels[5]


class _Arrays(pickle.Unpickler):
    """Load arrays and plain values; other pickles could execute anything."""

    def find_class(self, module: str, name: str) -> Any:
        if (module.partition(".")[0], name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy", "_reconstruct"), ("_codecs", "encode")}:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _read_cifar_python(file: Path) -> dict[bytes, Any]:
    try:
        with file.open("rb") as content:
            batch = _Arrays(content, encoding="bytes").load()
        pixels, labels = batch[b"data"], batch[b"labels"]
        if pixels.dtype != np.uint8 or pixels.shape != (len(labels), 3072):
            raise ValueError(f"its array is {pixels.shape} of {pixels.dtype}")
        if not all(type(label) is int and label in range(10) for label in labels):
            raise ValueError("its labels are not from 0 to 9")
    except Exception as error:  # a pickle chooses the functions that read it, which raise errors of any type
        raise FileError(f"data: {file} is not a batch of CIFAR-10's Python version ({error})") from error
    return {b"data": pixels, b"labels": labels}
