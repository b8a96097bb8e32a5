# SPDX-License-Identifier: Apache-2.0
"""What all tests of the PyTorch front share. The device they run on: devices.py."""

import pytest
import torch


@pytest.fixture(autouse=True)
def repeatable():
    torch.manual_seed(0)
