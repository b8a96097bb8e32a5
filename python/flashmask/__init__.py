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
from typing import TYPE_CHECKING

_MODULES = {
    "flashmask_attention": "torch.attention",
    "flashmask_varlen_func": "torch.varlen",
    "scaled_dot_product_attention": "torch.sdpa",
    "merge_attention": "torch.merge",
    "dropout_mask": "torch.dropout",
    "flashmask_with_kvcache": "torch.cached_attention",
    "flash_attn_with_kvcache": "torch.flash_attn_cache",
    "append_kv": "torch.cached_attention",
    "CachePlan": "torch.cached_attention",
    "KvCache": "torch.kv_cache",
    "SequenceMask": "torch.kv_cache",
    "explain": "torch.explain",
    "Mask": "torch.mask",
    "UnsupportedError": "errors",
    "UnrepresentableMaskError": "errors",
}
_SUBMODULES = ("context_parallel", "errors", "inference", "masks", "ops")
__all__ = [*_MODULES, *_SUBMODULES]

if TYPE_CHECKING:
    from . import context_parallel as context_parallel
    from . import errors as errors
    from . import inference as inference
    from . import masks as masks
    from . import ops as ops
    from .errors import UnrepresentableMaskError as UnrepresentableMaskError
    from .errors import UnsupportedError as UnsupportedError
    from .torch.attention import flashmask_attention as flashmask_attention
    from .torch.cached_attention import CachePlan as CachePlan
    from .torch.cached_attention import append_kv as append_kv
    from .torch.cached_attention import flashmask_with_kvcache as flashmask_with_kvcache
    from .torch.dropout import dropout_mask as dropout_mask
    from .torch.explain import explain as explain
    from .torch.flash_attn_cache import flash_attn_with_kvcache as flash_attn_with_kvcache
    from .torch.kv_cache import KvCache as KvCache
    from .torch.kv_cache import SequenceMask as SequenceMask
    from .torch.mask import Mask as Mask
    from .torch.merge import merge_attention as merge_attention
    from .torch.sdpa import scaled_dot_product_attention as scaled_dot_product_attention
    from .torch.varlen import flashmask_varlen_func as flashmask_varlen_func

    __version__: str
else:

    def __getattr__(name):
        if name != "__version__" and name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = _version() if name == "__version__" else _of_torch(name)
        globals()[name] = value
        return value


def _version() -> str:
    """include/flashmask/version.h's: the installed package's or, in a source tree, that of the library it uses."""
    from importlib import metadata
    from pathlib import Path

    for installed in metadata.distributions(name="flashmask", path=[str(Path(__file__).parents[1])]):
        return installed.version
    from . import capi

    return capi.load().fm_version().decode()


def _of_torch(name: str) -> object:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ImportError(f"flashmask.{name} needs PyTorch 2.10 or later: pip install torch") from error
    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, name)}")
    return getattr(module, name) if name in _MODULES else module


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
