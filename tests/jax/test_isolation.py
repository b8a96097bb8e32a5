# SPDX-License-Identifier: Apache-2.0
"""Modules that importing and calling flashmask.jax load, and its messages if something is missing."""

import os
import subprocess
import sys

import pytest

CALL = """
import numpy as np
from flashmask.jax import dot_product_attention
x = np.ones((1, 8, 1, 64), np.float16)
dot_product_attention(x, x, x, is_causal=True).block_until_ready()
"""
OTHERS = "'torch', 'paddle', 'flashmask.torch', 'flashmask.numpy', 'flashmask.paddle'"


def run(program, **environment):
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def test_loads_no_other_front():
    status, said = run(CALL + f"import sys; assert not {{{OTHERS}}} & set(sys.modules), sys.modules.keys()")
    assert status == 0, said


def test_importing_loads_no_library():
    status, said = run(
        "import flashmask.jax; assert 'libflashmask' not in open('/proc/self/maps').read()", FLASHMASK_LIBRARY="nowhere"
    )
    assert status == 0, said


def test_without_jax():
    status, said = run("import sys; sys.modules['jax'] = None; import flashmask.jax")
    assert status == 1 and "ImportError: flashmask.jax needs JAX 0.6 or later: pip install jax" in said


@pytest.mark.parametrize("variable", ["FLASHMASK_LIBRARY", "FLASHMASK_JAX_LIBRARY"])
def test_without_a_library(variable):
    status, said = run(CALL, **{variable: "/nowhere.so"})
    assert status == 1 and "ImportError: /nowhere.so is not there. Install flashmask" in said and variable in said
