# SPDX-License-Identifier: Apache-2.0
"""Loads the handlers that XLA calls: FLASHMASK_JAX_LIBRARY, or libflashmask_jax.so in the package."""

import ctypes as C
import functools

import jax

from .._core import call_options, capi

PLATFORMS = {"cpu": "cpu", "cuda": "CUDA"}  # JAX's names of platforms, and of their registries of handlers
OPERATIONS = ("forward", "backward", "build_plan", "build_mask", "cached_forward", "append_kv")


@functools.cache
def load() -> C.CDLL:
    """libflashmask.so through ctypes, with the handlers flashmask_forward and so on known to XLA."""
    library = capi.load()
    handlers = C.CDLL(str(capi.library_path("FLASHMASK_JAX_LIBRARY", "libflashmask_jax.so")))
    for operation in OPERATIONS:
        for platform, registry in PLATFORMS.items():
            handler = getattr(handlers, f"flashmask_{operation}_{platform}")
            jax.ffi.register_ffi_target(f"flashmask_{operation}", jax.ffi.pycapsule(handler), platform=registry)
    return library


@functools.cache
def platforms() -> list[str]:
    """Members of PLATFORMS that this process has devices of; JAX's preferred one comes first."""
    found = [name for name in PLATFORMS if _has(name)]
    return sorted(found, key=lambda name: (name == "cuda") != (jax.default_backend() == "gpu"))


def _has(platform: str) -> bool:
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def workspace_bytes(operation: str, args: C.Structure, options: C.Structure) -> int:
    """Returns the call's workspace in bytes, from shapes alone; raises if the call is invalid."""
    size = C.c_size_t()
    capi.check(getattr(load(), f"fm_{operation}_workspace")(C.byref(args), C.byref(options), C.byref(size)))
    return size.value


def plan_bytes(mask: capi.Mask) -> int:
    """Returns the bytes of an fm_mask's plan, from shapes alone: enough on every platform that there is."""
    return max(_plan_bytes_on(platform, mask) for platform in platforms())


def _plan_bytes_on(platform: str, mask: capi.Mask) -> int:
    size = C.c_size_t()
    options = capi.make(call_options.Options, device=capi.cuda_device() if platform == "cuda" else 0)
    capi.check(load().fm_plan_device_bytes(C.byref(mask), C.byref(options), C.byref(size), C.byref(C.c_size_t())))
    return size.value
