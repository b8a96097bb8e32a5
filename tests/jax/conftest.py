# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests of the JAX package."""

import os

# Before JAX is imported: shard_map needs several devices.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture(autouse=True)
def exact_products():
    """The reference's, which would be of fewer bits on a GPU."""
    with jax.default_matmul_precision("highest"):
        yield
