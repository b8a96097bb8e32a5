# SPDX-License-Identifier: Apache-2.0
"""examples/speculative: the tokens of plain decoding, from fewer steps."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "speculative"))
import speculate
from decoder import Decoder

TOKENS = 24


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("lengths", [(1,), (15, 16, 17), (130, 2)])
def test_equal_tokens(lengths, layers):
    """Draft models that are seldom right, and the large model itself but for a layer."""
    torch.manual_seed(len(lengths))
    target = Decoder(vocab=64, width=64, layers=4, heads=4, heads_kv=2, head_dim=32)
    prompts = [torch.randint(64, (n,)).tolist() for n in lengths]
    plain, plain_steps = speculate.decode(target, prompts, TOKENS)
    tokens, steps = speculate.speculate(target, speculate.small_copy(target, layers), prompts, TOKENS)
    assert tokens == plain
    assert steps < plain_steps
    assert len({tuple(x) for x in plain}) == len(prompts) and all(len(set(x)) > 3 for x in plain)


def test_steps():
    """A draft model that is the large one finds most of each path."""
    torch.manual_seed(1)
    target = Decoder(vocab=64, width=64, layers=2, heads=4, heads_kv=2, head_dim=32)
    _, steps = speculate.speculate(target, target, [[1, 2, 3], [4]], TOKENS)
    assert steps <= TOKENS / 3


def test_path():
    """The second of two equal siblings is not taken, and neither is a choice that follows another draft."""
    tokens, parents = [7, 3, 5, 5, 9, 9], [-1, 0, 0, 0, 1, 2]
    assert speculate.path_of(tokens, parents, [5, 9, 9, 0, 1, 1]) == [0, 2, 5]
    assert speculate.path_of(tokens, parents, [4, 9, 9, 0, 1, 1]) == [0]


def test_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speculate.py", "--tokens", "12"])
    speculate.main()
    assert "equal tokens     True" in capsys.readouterr().out
