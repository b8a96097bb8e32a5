# SPDX-License-Identifier: Apache-2.0
"""examples/rl: training has the bits of the rollout, of attention and of log probabilities."""

import sys
from pathlib import Path

import pytest
import torch
from flashmask import flashmask_with_kvcache

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "rl"))
import on_policy
from row_model import RowModel


@pytest.fixture
def model():
    torch.manual_seed(0)
    return RowModel(vocab=8, width=32, layers=2, heads=4, heads_kv=2, head_dim=16)


@pytest.fixture
def prompts():
    return [torch.randint(1, 8, (n,)) for n in (130, 130, 50, 1)]


def test_equal_bits(model, prompts):
    rollouts = on_policy.sample(model, prompts, 12)
    lengths = [len(x) - n for x, n in zip(rollouts.sequences, rollouts.prompts)]
    assert len(set(lengths)) > 1 and max(lengths) <= 12, "some rollouts end early"
    assert [len(x) for x in rollouts.log_probs] == lengths
    log_probs, attention = on_policy.evaluate(model, rollouts, on_policy.SPLIT_SIZE)
    assert all(x.requires_grad for x in log_probs)
    assert on_policy.differing_bits(attention, rollouts.attention) == 0
    assert on_policy.differing_bits(log_probs, rollouts.log_probs) == 0


def test_what_makes_them_equal(model, prompts, monkeypatch):
    """Other splits in training or in the rollout, or none, give other bits."""
    rollouts = on_policy.sample(model, prompts, 4)
    for split_size in (None, 256):
        _, attention = on_policy.evaluate(model, rollouts, split_size)
        assert on_policy.differing_bits(attention, rollouts.attention) > 0

    def other_splits(q, cache, mask, plan, ends, **_):
        return flashmask_with_kvcache(q, cache, mask, cu_seqlens_q=ends, split_size=256)

    monkeypatch.setattr(on_policy, "flashmask_with_kvcache", other_splits)
    torch.manual_seed(1)
    rollouts = on_policy.sample(model, prompts, 4)
    _, attention = on_policy.evaluate(model, rollouts, on_policy.SPLIT_SIZE)
    assert on_policy.differing_bits(attention, rollouts.attention) > 0


def test_step(model, prompts):
    before = [x.clone() for x in model.parameters()]
    found = on_policy.step(model, torch.optim.SGD(model.parameters(), lr=0.1), prompts[1:3], 6)
    assert found.bits == [0, 0] and found.log_prob_bits == 0 and found.ratios == (1.0, 1.0)
    assert 180 < found.tree_tokens <= 180 + 2 * on_policy.GROUP * 6 and found.tokens > 540
    assert 0 < found.tree_error < 1e-5
    assert found.plain_ratios != (1.0, 1.0) and all(abs(x - 1) < 1e-5 for x in found.plain_ratios)
    assert any((x != y).any() for x, y in zip(model.parameters(), before))


def test_differing_bits():
    x = torch.tensor([1.0, -2.0, 0.0])
    assert on_policy.differing_bits([x], [x.clone()]) == 0
    assert on_policy.differing_bits([x, x], [x, -x]) == 3
    assert on_policy.differing_bits([x], [torch.nextafter(x, x + 1)]) > 0


def test_program(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["on_policy.py", "--tokens", "3", "--steps", "1"])
    on_policy.main()
    out = capsys.readouterr().out
    assert out.count(" 0 differing bits") == 3 and "ratio of the policies: 1 to 1;" in out
    assert "% saved" in out
