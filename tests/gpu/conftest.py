# SPDX-License-Identifier: Apache-2.0
"""The GPU tests need a CUDA device, torch, and FLASHMASK_LIBRARY.

FLASHMASK_TEST_DEVICE=cpu runs them on the CPU backend instead, to test the tests.
"""

import os

import pytest

torch = pytest.importorskip("torch")
DEVICE = os.environ.get("FLASHMASK_TEST_DEVICE", "cuda")


def pytest_collection_modifyitems(items):
    for item in items:
        if DEVICE == "cuda" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))
        if DEVICE != "cuda" and item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_configure(config):
    config.addinivalue_line("markers", "cuda: cannot run on the CPU backend")
    config.addinivalue_line("markers", "large: takes most of a GPU's memory, or measures how much is free")
