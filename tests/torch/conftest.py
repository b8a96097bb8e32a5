# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests of the PyTorch package. The device they run on: devices.py."""

import random
import sys
import types

import flashmask.torch
import harness.inductor_cache  # noqa: F401  before torch compiles
import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable():
    torch.manual_seed(0)


@pytest.fixture(params=range(3))
def rng(request):
    return random.Random(request.param)


@pytest.fixture
def calls(monkeypatch):
    """Replaces the compiled operators: a plan holds the number of plans made so far."""
    made = []

    def make_plan(mask, device=None, *, counted=False, max_mask_bytes=None):
        made.append(mask)
        return torch.tensor([len(made)], dtype=torch.uint8)

    stand_in = types.ModuleType("flashmask.torch.operators")
    stand_in.make_plan = make_plan
    monkeypatch.setitem(sys.modules, "flashmask.torch.operators", stand_in)
    monkeypatch.setattr(flashmask.torch, "operators", stand_in, raising=False)
    return made
