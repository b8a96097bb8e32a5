# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin: of the tests that are chosen, runs the n-th of N parts of equal length, FLASHMASK_PYTEST_SHARE=n/N.

Neighbours stay together, as they share what the first of them compiles.
"""

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    n, parts = map(int, os.environ.get("FLASHMASK_PYTEST_SHARE", "1/1").split("/"))
    begin, end = (len(items) * part // parts for part in (n - 1, n))
    config.hook.pytest_deselected(items=items[:begin] + items[end:])
    items[:] = items[begin:end]


def pytest_sessionfinish(session, exitstatus):
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # there are fewer tests than parts
        session.exitstatus = pytest.ExitCode.OK
