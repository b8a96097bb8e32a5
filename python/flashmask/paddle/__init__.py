# SPDX-License-Identifier: Apache-2.0
"""FlashMask for PaddlePaddle: flashmask_attention as in paddle.nn.functional, on CPU tensors too.

    from flashmask.paddle import flashmask_attention
    out = flashmask_attention(q, k, v, startend_row_indices, causal=True)

Tested on CPU tensors. CUDA tensors take the same path (their device, their current stream), but no test has run there.
"""

try:
    import paddle as _paddle  # noqa: F401
except ImportError as error:
    raise ImportError("flashmask.paddle needs PaddlePaddle 3.3 or later: pip install paddlepaddle") from error

from .._core.errors import UnrepresentableMaskError, UnsupportedError
from .attention import flashmask_attention
from .dropout import dropout_mask
from .explain import explain
from .mask import IntervalLists
from .mask_builders import MaskArguments, masks

__all__ = [
    "IntervalLists",
    "MaskArguments",
    "UnrepresentableMaskError",
    "UnsupportedError",
    "dropout_mask",
    "explain",
    "flashmask_attention",
    "masks",
]
