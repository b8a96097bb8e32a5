# SPDX-License-Identifier: Apache-2.0
"""FlashMask: exact attention under masks of O(N) memory, on CPU and CUDA tensors. The names here are those for PyTorch.

    import flashmask
    mask = flashmask.masks.causal_document(seqlens=[3000, 1096])
    out = flashmask.flashmask_attention(q, k, v, mask)

Importing this package loads nothing; the first use of a name below loads torch and the operators, and touches no GPU.
Other frontends are modules of their own and need no torch: flashmask.jax, flashmask.paddle, flashmask.numpy, and
flashmask.capi, the C interface through ctypes.
"""

import importlib

_MODULES = {
    "flashmask_attention": "attention",
    "flashmask_varlen_func": "varlen",
    "scaled_dot_product_attention": "sdpa",
    "merge_attention": "merge",
    "dropout_mask": "dropout",
    "explain": "explain",
    "Mask": "mask",
    "UnsupportedError": "errors",
    "UnrepresentableMaskError": "errors",
}
_SUBMODULES = ("context_parallel", "errors", "masks", "ops")
__all__ = [*_MODULES, *_SUBMODULES]


def __getattr__(name):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(f"flashmask.{name} needs PyTorch 2.10 or later: pip install torch") from error
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
    value = getattr(module, name) if name in _MODULES else module
    globals()[name] = value  # also over the submodule `explain`, whose function this is
    return value


def __dir__():
    return sorted(__all__)
