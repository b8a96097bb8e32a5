# SPDX-License-Identifier: Apache-2.0
"""FlashMask for JAX: exact attention under masks of O(N) memory, in the conventions of jax.nn.

    from flashmask.jax import dot_product_attention, masks
    out = dot_product_attention(query, key, value, masks.causal_document(doc_ids=segment_ids))

The first call loads the compiled libraries; importing this package loads JAX alone, and touches no device.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError("flashmask.jax needs JAX 0.6 or later: pip install jax") from error

from .._core.errors import UnrepresentableMaskError, UnsupportedError
from .attention import dot_product_attention
from .cached_attention import append_kv, attention_with_cache
from .dropout import dropout_mask
from .explain import explain
from .kv_cache import KvCache, SequenceMask
from .mask import Mask
from .mask_builders import masks

__all__ = [
    "KvCache",
    "Mask",
    "SequenceMask",
    "UnrepresentableMaskError",
    "UnsupportedError",
    "append_kv",
    "attention_with_cache",
    "dot_product_attention",
    "dropout_mask",
    "explain",
    "masks",
]
