# SPDX-License-Identifier: Apache-2.0
"""Lets the tests find vLLM and what it imports, behind the packages that the tests have themselves."""

import os
import sys

import pytest
import torch

sys.path.append(os.environ["FLASHMASK_VLLM_PACKAGES"])

import vllm.platforms  # noqa: E402
from vllm.platforms.interface import UnspecifiedPlatform  # noqa: E402

# On a CPU vLLM finds none by itself. Beside a GPU it would ask for its kernels, which are not unpacked.
vllm.platforms._current_platform = UnspecifiedPlatform()
from serving import DEVICE  # noqa: E402


@pytest.fixture(autouse=True)
def repeatable():
    torch.manual_seed(0)
    with DEVICE:
        yield
