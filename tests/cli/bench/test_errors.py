"""Tests that `qsim bench` lists its measurements, and raises errors in one line before it runs anything."""

from __future__ import annotations

import shlex

import pytest
import torch

from qsim.cli import main

#: What is typed after `qsim bench`, and what the error says.
ERRORS = [
    ("linear --shapes 8x4", "--shapes: '8x4' is not a shape: write 16384x4096x4096, for tokens, inputs and outputs"),
    ("linear --shapes 8x4x2,8x0x2", "--shapes: '8x0x2' is not a shape"),
    ("linear --shapes ' , '", "--shapes needs at least one word"),
    ("linear --dtype fp8", "--dtype: 'fp8' is not one of fp32, bf16, fp16, fp64"),
    ("linear --format e4m33", "unknown format 'e4m33': did you mean 'e4m3'?"),
    ("linear --backward neerest", "unknown rounding 'neerest': did you mean 'nearest'?"),
    ("linear --accumulate h100_fp9", "FivePoint: accumulate: unknown accumulator 'h100_fp9'"),
    ("linear --accumulate h100_fp8 --recipe mxfp8", "--accumulate: an option of the recipe, as in --recipe "),
    ("linear --device tpu", "--device: 'tpu' is not one of cuda, cpu"),
    ("linear --seconds -1", "--seconds: -1 is not a duration: write 0.3"),
    ("train --models gtp", "--models: 'gtp' is not one of gpt, conv"),
    ("train --size huge", "--size: 'huge' is not one of medium, small, tiny"),
    ("train --size small,tiny", "--size: 'small,tiny' is not one of medium, small, tiny"),
    ("train --seconds 0", "--seconds: 0 is not a duration: write 0.3"),
    ("train --device cpu --layers 0", "--layers: 0 is not a number of layers: write 6"),
    ("train --device cpu --recipes mxfp4", "--recipes compares compiled models: add --compile, or --compile blocks"),
    ("train --device cpu --compile --recipes native,mxfp5", "mxfp5"),
    ("train --device cpu --monitor 0", "--monitor: 0 is not a number of steps: write 50"),
    ("train --device cpu --monitor 5 --compile", "--monitor: compiled code is not watched"),
    ("train --device cpu --monitor 5 --compile fast", "--compile: 'fast' is not one of default, reduce-overhead, regions, blocks"),
    ("optim --tensors two", "--tensors: 'two' is not one of one, gpt"),
    ("optim --elements 2^x", "--elements: '2^x' is not a count: write 4096 or 2^28"),
    ("optim --repeats 0", "--repeats: '0' is not a count"),
    ("optim --size huge", "--size: 'huge' is not one of medium, tiny"),
    ("optim --algorithms lion", "--algorithms: 'lion' is not one of adamw, adamw-moments, adamw-e4m3, sgd, copy"),
    ("quantize --formats ' , '", "--formats needs at least one word"),
    ("quantize --dtypes fp32:fp8", "--dtypes: 'fp8' is not one of fp32, bf16, fp16, fp64; write pairs such as fp32:bf16"),
    ("quantize --only quantise", "--only: 'quantise' is not one of sweep, quantize, codes, layouts"),
    ("host --points fp5", "--points: 'fp5' is not one of nearest, five points, fp8_hybrid, mxfp4, nvfp4"),
    ("host --device cpu --layers 0", "--layers: 0 is not a number of layers: write 24"),
    ("host --device cpu --only calls,stack", "--only stack measures compiled layers: add --compile"),
    ("host --device cpu --only calls --compile", "--compile measures a compiled stack, which --only leaves out"),
    ("host --device cpu --only calls --trace", "--trace counts the calls of layers and of small tensors: omit --only or --trace"),
    ("host --device cpu --trace --compile", "--trace: compiled code makes no calls"),
    ("experts --device cpu --sizes 2x8x4", "--sizes: '2x8x4' is not a size: write 8x16384x4096x14336"),
    ("experts --device cpu --compile", "--compile: torch compiles grouped products of bfloat16 only; add --dtype bf16"),
    ("accumulate --device cpu --accumulators ,", "at least one"),
    ("accumulate --device cpu --size none", "--size"),
    ("scaled --device cpu --formats mxfp5", "'mxfp5' is not one of mxfp8"),
]


@pytest.mark.parametrize(("words", "message"), ERRORS)
def test_unknown_words_are_refused_before_anything_runs(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert main(["bench", *shlex.split(words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qsim: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quantize", "--device", "cuda"]) == 2
    assert "--device: torch finds no CUDA device" in capsys.readouterr().err


def test_measurements_are_listed_and_their_helpers_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    names = capsys.readouterr().out.split()
    assert {"accumulate", "experts", "host", "linear", "optim", "quantize", "scaled", "train"} <= set(names)
    assert not [name for name in names if name.startswith("_")]


@pytest.mark.parametrize(
    ("words", "about"),
    [
        ("linear --device cpu --shapes 8x4x2,6x8x8 --seconds 0.001", "qsim "),
        ("optim --device cpu --elements 2^6 --repeats 2 --tensors one --algorithms sgd,adamw-e4m3", "2^6 elements"),
        ("quantize --device cpu --elements 2^6 --repeats 2 --only quantize --formats e4m3,fp16 --dtypes fp32:bf16", "2^6 elements"),
    ],
)
def test_text_has_a_heading_and_the_ratio_last(words: str, about: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *shlex.split(words)]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith("CPU, ")
    assert f"torch {torch.__version__}, triton " in heading
    assert about in heading
    assert [line for line in lines if line.endswith("  ratio")]
