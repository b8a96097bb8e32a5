# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: tests that would begin later than FLASHMASK_PYTEST_SECONDS after the first are skipped, and counted
so.
"""

import os
import time

import pytest

SECONDS = float(os.environ.get("FLASHMASK_PYTEST_SECONDS", "inf"))
began = []


def pytest_runtest_setup(item):
    began.append(time.monotonic())
    if began[-1] - began[0] > SECONDS:
        pytest.skip(f"{SECONDS:.0f} s are over")
