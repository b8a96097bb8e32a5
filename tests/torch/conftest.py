# SPDX-License-Identifier: Apache-2.0
"""What all tests of the PyTorch package share. The device they run on: devices.py."""

import atexit
import os
import random
import shutil
import sys
import tempfile
import types

# Compiled code is kept by what is traced, sizes of plans included, and not by the library that was there: that of an
# earlier build would be found again. Set before torch is imported.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="flashmask-inductor-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

import flashmask
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
    """In place of the compiled operators: a plan says how many were made before it."""
    made = []

    def plan(mask, device=None):
        made.append(mask)
        return torch.tensor([len(made)], dtype=torch.uint8)

    stand_in = types.ModuleType("flashmask.ops")
    stand_in.plan = plan
    monkeypatch.setitem(sys.modules, "flashmask.ops", stand_in)
    monkeypatch.setattr(flashmask, "ops", stand_in, raising=False)
    return made
