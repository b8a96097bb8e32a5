# SPDX-License-Identifier: Apache-2.0
"""FlashMask for JAX: exact attention under masks of O(N) memory, in the conventions of jax.nn.

    from flashmask.jax import Mask, dot_product_attention
    out = dot_product_attention(query, key, value, Mask(seqlen, seqlen, bounds=startend_row_indices, causal=True))

The first call loads the compiled libraries; importing this package loads JAX alone, and touches no device.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("flashmask.jax needs JAX 0.5 or later: pip install jax") from error

from ..errors import UnsupportedError
from .attention import dot_product_attention
from .mask import Mask

__all__ = ["Mask", "UnsupportedError", "dot_product_attention"]
