# SPDX-License-Identifier: Apache-2.0
"""What all tests of the PyTorch front share. FLASHMASK_TEST_DEVICE (cpu) is the device that those with a `device` run on."""

import os

import pytest
import torch


@pytest.fixture
def device():
    return torch.device(os.environ.get("FLASHMASK_TEST_DEVICE", "cpu"))


@pytest.fixture(autouse=True)
def repeatable():
    torch.manual_seed(0)
