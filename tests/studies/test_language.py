"""Text and the GPT used by studies."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from qsim.studies.learners.byte_pairs import WORDS, learnt, tokenized
from qsim.studies.learners.gpt import GPT, SIZES, language_loss, size
from qsim.studies.learners.text import VOCABULARY, text

CPU = torch.device("cpu")


def test_sequences_to_learn_from_end_before_what_is_held_out(tmp_path: Path) -> None:
    # Each byte gives the hundredth of the text in which it is.
    (tmp_path / "a.txt").write_bytes(bytes(number // 100 for number in range(10_000)))
    found = text(str(tmp_path), 32, CPU)
    learnt = found.batch(2000, 32, torch.Generator().manual_seed(0))
    assert learnt.shape == (2000, 33)
    assert learnt.max() < 95, "any place, but the last twentieth"
    assert learnt.min() == 0
    held = found.validation(16, 32)
    assert held.shape == (16, 33)
    assert held.min() >= 95
    assert held[-1, -1] == 99


def test_batches_follow_from_the_generator(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(256)) * 10)
    found = text(str(tmp_path / "a"), 8, CPU)
    first, again, other = (found.batch(4, 8, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_unreadable_text_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data: must be 'library', 'packages', a file or a folder; .* does not exist"):
        text(str(tmp_path / "none"), 8, CPU)
    (tmp_path / "short").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"has 5 bytes; sequences of 64 need 1340"):
        text(str(tmp_path / "short"), 64, CPU)
    with pytest.raises(ValueError, match=r"size: must be one of tiny, mini, small, medium, large, neo-1\.3b, neo-2\.7b; got 'huge'"):
        size("huge")


@pytest.mark.parametrize(("name", "millions"), [("small", 124.4), ("medium", 354.8), ("large", 774.0)])
def test_sizes_are_gpt_2s(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = GPT(SIZES[name], 50257, 1024)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == millions


def test_a_gpt_begins_by_knowing_nothing_and_never_looks_ahead() -> None:
    torch.manual_seed(0)
    model = GPT(size("tiny"), VOCABULARY, 16)
    sequences = torch.randint(VOCABULARY, (8, 17), dtype=torch.uint8)
    assert abs(language_loss(model, sequences).item() - math.log(VOCABULARY)) < 0.1
    # A trained-looking model, so that effects are visible.
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    changed = sequences.clone()
    changed[:, 10] += 1
    before, after = model(sequences[:, :16].long()), model(changed[:, :16].long())
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_tokens_spell_the_text() -> None:
    content = b"the cat sat on the mat.\n\n\tThe rat: 1024 + x_2 = \xff\x00 the end  \n" * 3
    tokens = tokenized(content, 300)
    spelt = {token: bytes([token]) for token in range(256)}
    for (left, right), token in learnt(Counter(WORDS.findall(content)), 300).items():
        spelt[token] = spelt[left] + spelt[right]
    assert b"".join(spelt[token] for token in tokens.tolist()) == content
    assert len(tokens) < 0.6 * len(content)


def test_the_most_frequent_pair_is_learnt_first_and_counts_follow_merges() -> None:
    a, b, c, d = b"abcd"
    # ab occurs seven times, bc five, and only twice outside of ab; then cd leads, and then ab with it.
    pairs = learnt({b"abc": 3, b"ab": 4, b"bc": 2, b"cd": 4}, 300)
    assert list(pairs.items()) == [((a, b), 256), ((c, d), 257), ((256, c), 258), ((b, c), 259)]
    assert learnt({b"ab": 1}, 300) == {}
    assert list(learnt({b"aaaa": 2}, 300)) == [(a, a), (256, 256)]


def test_byte_pairs_are_learnt_from_the_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"to be or not to be " * 40)
    found = text(str(tmp_path / "a"), 4, CPU, 270)
    assert 256 < int(found.tokens.max()) < 270
    assert len(found.tokens) < 19 * 40 / 2
    with pytest.raises(ValueError, match=r"has \d+ tokens; sequences of 64 need 1340"):
        text(str(tmp_path / "a"), 64, CPU, 270)
