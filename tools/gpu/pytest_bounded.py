# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: skips tests that would begin over FLASHMASK_PYTEST_SECONDS after the first, and counts them."""

import os
import time

import pytest

SECONDS = float(os.environ.get("FLASHMASK_PYTEST_SECONDS", "inf"))
began = []


def pytest_runtest_setup(item):
    began.append(time.monotonic())
    if began[-1] - began[0] > SECONDS:
        pytest.skip(f"{SECONDS:.0f} s are over")
