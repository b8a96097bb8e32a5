# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests of the integrations."""

import harness.inductor_cache  # noqa: F401  before torch compiles
import pytest
import torch
from flashmask.integrations.transformers import register


@pytest.fixture(autouse=True)
def repeatable():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def attention():
    """The name that attention is registered by."""
    return register()
