# SPDX-License-Identifier: Apache-2.0
"""FlashMask for numpy: exact attention under masks of O(N) memory, forward and backward, on the CPU.

    from flashmask.numpy import attention, attention_backward, masks
    mask = masks.causal_document(seqlens=[3000, 1096])
    out, lse = attention(q, k, v, mask)
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, mask)

and over a KV cache, forward alone:

    from flashmask.numpy import KvCache, SequenceMask, append_kv, flashmask_with_kvcache
    cache = KvCache(k_pages, v_pages, page_table, seqlens)
    append_kv(k, v, cache)
    out = flashmask_with_kvcache(q, cache, SequenceMask(window_size=(4095, 0)))

It needs numpy alone; bfloat16 arrays are those of ml_dtypes.
"""

try:
    import numpy as _numpy  # noqa: F401
except ImportError as error:
    raise ImportError("flashmask.numpy needs numpy: pip install numpy") from error

from .._core.errors import UnrepresentableMaskError, UnsupportedError
from .attention import attention, attention_backward
from .cached_attention import append_kv, flashmask_with_kvcache
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
    "attention",
    "attention_backward",
    "dropout_mask",
    "explain",
    "flashmask_with_kvcache",
    "masks",
]
