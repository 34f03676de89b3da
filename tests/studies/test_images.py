"""Images for studies: reading files written here, nets for them, and errors for other files."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from qsim import FileError
from qsim.studies.learners.images import DIGITS, Images, images
from qsim.studies.learners.wide_resnet import WideResNet
from support.idx_files import idx, parts, random

CPU = torch.device("cpu")


def check(found: Images, x: np.ndarray, y: np.ndarray, test_x: np.ndarray, test_y: np.ndarray) -> None:
    """Training pixels have zero mean and unit variance, channel by channel; test pixels are normalized in the same way."""
    mean, spread = x.mean((0, 2, 3), keepdims=True), x.std((0, 2, 3), keepdims=True, ddof=1)
    # Float32 sums of thousands of pixels up to 255.
    assert np.allclose(found.x.numpy(), (x - mean) / spread, atol=1e-4)
    assert np.allclose(found.test_x.numpy(), (test_x - mean) / spread, atol=1e-4)
    assert found.y.tolist() == y.tolist()
    assert found.test_y.tolist() == test_y.tolist()
    assert found.y.dtype == torch.int64
    assert found.net()(found.test_x).shape == (len(test_y), 10)


@pytest.mark.parametrize("zipped", [False, True])
def test_idx_files(tmp_path: Path, zipped: bool) -> None:
    for name, array in parts().items():
        (tmp_path / (f"{name}.gz" if zipped else name)).write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    x, y, test_x, test_y = parts().values()
    check(images(str(tmp_path), CPU), x[:, None], y, test_x[:, None], test_y)


def cifar() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Pixels and labels of five training batches and one test batch."""
    return [random((4 + number, 3072)) for number in range(6)], [random((4 + number,), 10) for number in range(6)]


def write_python(folder: Path) -> None:
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    for name, pixels, labels in zip(names, *cifar(), strict=True):
        (folder / name).write_bytes(pickle.dumps({b"data": pixels, b"labels": labels.tolist()}, protocol=2))


def test_cifar_10(tmp_path: Path) -> None:
    write_python(tmp_path)
    pixels, labels = cifar()
    coloured = [each.reshape(-1, 3, 32, 32) for each in pixels]
    found = images(str(tmp_path), CPU)
    check(found, np.concatenate(coloured[:5]), np.concatenate(labels[:5]), coloured[5], labels[5])
    assert isinstance(found.net(), WideResNet)


def test_digits_come_with_scikit_learn() -> None:
    pytest.importorskip("sklearn")
    found = images(DIGITS, CPU)
    assert (len(found.y), len(found.test_y)) == (898, 899)
    assert found.x.shape[1:] == (1, 8, 8)
    assert found.net()(found.x[:3]).shape == (3, 10)


def test_a_wide_resnet_16_4_has_its_parameters() -> None:
    """From its definition: a convolution, three groups of two blocks, of which the first has a shortcut, and a linear layer."""
    due = 3 * 16 * 9
    for inputs, outputs in ((16, 64), (64, 128), (128, 256)):
        due += 9 * (inputs * outputs + 3 * outputs * outputs) + inputs * outputs
        due += 2 * (inputs + 3 * outputs)  # normalization before each three by three convolution
    due += 2 * 256 + 256 * 10 + 10
    net = WideResNet(10)
    assert sum(parameter.numel() for parameter in net.parameters()) == due
    # 2.7 million, as in its paper's table.
    assert round(due / 1e6, 1) == 2.7
    # Sixteen layers: the first, four in each group, the last, and also a shortcut in each group.
    layers = [module for module in net.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    assert len(layers) - 3 == 1 + 3 * 4 + 1
    # Each group except the first halves both sides.
    assert net.blocks(net.stem(torch.zeros(1, 3, 32, 32))).shape == (1, 256, 8, 8)


def test_folders_without_known_files_raise_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data: must be 'digits' or a folder with images; there is no folder '.*none'"):
        images(str(tmp_path / "none"), CPU)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(random((2, 28, 28))))
    with pytest.raises(ValueError, match=r"holds neither MNIST's files \(train-images-idx3-ubyte, …\) nor CIFAR-10's \(data_batch_1, …\)"):
        images(str(tmp_path), CPU)


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\0\x08", b"\0\0\x09\1\0\0\0\1a", b"\0\0\x08\0a", b"\0\0\x08\1\0\0\0\2a", b"\0\0\x08\1\0\0\0\1ab", b"\0\0\x08\3\0\0\0\1"],
)
def test_files_that_are_not_idx_files_raise_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
    for name in ("train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (tmp_path / name).write_bytes(idx(random((2,))))
    with pytest.raises(ValueError, match="train-images-idx3-ubyte is not an idx file of bytes"):
        images(str(tmp_path), CPU)


def test_images_without_labels_raise_an_error(tmp_path: Path) -> None:
    for part, labels in (("train", 3), ("t10k", 2)):
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(idx(random((2, 28, 28))))
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(idx(random((labels,), 10)))
    with pytest.raises(ValueError, match=r"data: '.*' has 2 and 2 images, but 3 and 2 labels"):
        images(str(tmp_path), CPU)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train-images-idx3-ubyte": idx(random((20, 784)))}, "train-images-idx3-ubyte is not an idx file of bytes with 3 dimensions"),
        ({"train-labels-idx1-ubyte": idx(random((20, 1), 10))}, "train-labels-idx1-ubyte is not an idx file of bytes with 1 dimension$"),
        ({"train-labels-idx1-ubyte": idx(np.full(20, 200, np.uint8))}, r"has labels from 0 to 200; they must be from 0 to 9"),
        ({"train-images-idx3-ubyte": idx(random((20, 0, 28)))}, "has no pixels for training or testing"),
        (
            {"t10k-images-idx3-ubyte": idx(random((7, 14, 28)))},
            r"has training images of shape \(1, 28, 28\) and test images of \(1, 14, 28\)",
        ),
        # The number of pixels is a multiple of 2^64.
        ({"train-images-idx3-ubyte": bytes([0, 0, 8, 3]) + 2 * b"\x80\0\0\0" + b"\0\0\0\4"}, "is not an idx file of bytes with 3 dim"),
    ],
)
def test_idx_files_that_do_not_make_images_raise_an_error(tmp_path: Path, changed: dict[str, bytes], message: str) -> None:
    for name, content in ({name: idx(array) for name, array in parts().items()} | changed).items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError, match=f"data: .*{message}"):
        images(str(tmp_path), CPU)


class Harmful:
    """An object that is pickled as a function call."""

    def __reduce__(self) -> tuple[object, ...]:
        return print, ("harm",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"no pickle", "invalid load key"),
        (pickle.dumps({b"data": random((1, 3072))}), "b'labels'"),
        (pickle.dumps({b"data": random((2, 3072)), b"labels": [1]}), r"its array is \(2, 3072\) of uint8"),
        (pickle.dumps({b"data": random((1, 3072)), b"labels": [2**70]}), "its labels are not from 0 to 9"),
        (pickle.dumps({b"data": random((1, 3072)), b"labels": [1]}, protocol=2).replace(b"latin1", b"latinX"), "unknown encoding"),
        (pickle.dumps({b"data": Harmful(), b"labels": [1]}), "it asks for .*print"),
    ],
)
def test_batches_that_are_not_pickled_arrays_raise_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, told: str
) -> None:
    write_python(tmp_path)
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match=rf"data: .*data_batch_2 is not a batch of CIFAR-10's Python version \(.*{told}"):
        images(str(tmp_path), CPU)
    assert capsys.readouterr().out == ""


def test_a_resnet_18_has_its_parameters() -> None:
    """11.17 million, as the one for CIFAR-10 with one channel: two blocks each of 64, 128, 256 and 512 channels."""
    due = 9 * 64 + 2 * 512 + 512 * 10 + 10
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        due += 9 * (inputs * outputs + 3 * outputs * outputs) + 2 * (inputs + 3 * outputs) + (inputs * outputs if inputs != outputs else 0)
    net = Images(*[torch.zeros(1, 1, 28, 28), torch.zeros(1)] * 2, model="resnet-18").net()
    assert sum(parameter.numel() for parameter in net.parameters()) == due


def test_a_number_behind_the_name_takes_fewer_training_images() -> None:
    pytest.importorskip("sklearn")
    found, whole = images("digits:100", CPU), images(DIGITS, CPU)
    assert (len(found.y), len(found.test_y)) == (100, 899)
    assert torch.equal(found.y, whole.y[:100])
    for count in ("899", "1", "many"):
        with pytest.raises(ValueError, match="from 2 to 898"):
            images(f"digits:{count}", CPU)
