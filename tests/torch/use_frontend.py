# SPDX-License-Identifier: Apache-2.0
"""use_frontend.py PACKAGE: what check_wheel runs where the wheel is unpacked, with a Python that may have PACKAGE.

A call and its gradient through the wheel's own libraries; documents of one token see themselves alone.
"""

import importlib.util
import sys
from pathlib import Path

import flashmask

SHAPE, LENGTHS = (1, 8, 2, 16), [1] * 8


def use_numpy():
    import numpy as np
    from flashmask import numpy as frontend

    x = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    mask = frontend.masks.causal_document(seqlens=LENGTHS)
    out, lse = frontend.attention(x, x, x, mask)
    _, _, dv = frontend.attention_backward(np.ones_like(x), x, x, x, out, lse, mask)
    assert np.allclose(out, x) and np.allclose(dv, 1)


def use_jax():
    import jax
    import jax.numpy as jnp
    from flashmask import jax as frontend

    x = jax.random.normal(jax.random.key(0), SHAPE)
    mask = frontend.masks.causal_document(seqlens=LENGTHS)
    out, back = jax.vjp(lambda v: frontend.dot_product_attention(x, x, v, mask), x)
    assert jnp.allclose(out, x) and jnp.allclose(back(jnp.ones_like(x))[0], 1)


def use_paddle():
    import paddle
    from flashmask import paddle as frontend

    x = paddle.randn(SHAPE)
    x.stop_gradient = False
    out = frontend.flashmask_attention(x, x, x, **frontend.masks.causal_document(seqlens=LENGTHS)._asdict())
    (dx,) = paddle.grad(out.sum(), [x])
    assert bool(paddle.allclose(out, x)) and bool(paddle.allclose(dx, paddle.ones_like(x)))


frontend = sys.argv[1]
if importlib.util.find_spec(frontend) is None:
    print(f"flashmask.{frontend} is left out: {sys.executable} has no {frontend}")
    sys.exit()
{"numpy": use_numpy, "jax": use_jax, "paddle": use_paddle}[frontend]()

loaded = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libflashmask" in line}
package = Path(flashmask.__file__).parent
assert loaded and all(Path(path).parent == package for path in loaded), loaded
