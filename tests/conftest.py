# SPDX-License-Identifier: Apache-2.0
"""Hooks of all Python tests: tests marked long run in `make test-long` alone."""

import os

import pytest

IS_LONG = bool(os.environ.get("FLASHMASK_TEST_LONG"))


def pytest_configure(config):
    config.addinivalue_line("markers", "long: only with FLASHMASK_TEST_LONG set (make test-long)")


def pytest_collection_modifyitems(items):
    if not IS_LONG:
        for item in items:
            if item.get_closest_marker("long"):
                item.add_marker(pytest.mark.skip(reason="FLASHMASK_TEST_LONG is not set"))
