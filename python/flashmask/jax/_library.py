# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled libraries: the C interface, and the handlers that XLA calls, which it registers.

FLASHMASK_JAX_LIBRARY names the handlers' library and FLASHMASK_LIBRARY the library they call, for development;
otherwise both lie in the package, as the wheel installs them.
"""

import ctypes as C
import functools
import os
from pathlib import Path

import jax

from .. import capi
from ..errors import UnsupportedError

PLATFORMS = ("cpu", "cuda")
OPERATIONS = ("forward", "backward")


@functools.cache
def load():
    """libflashmask.so through ctypes, with the handlers flashmask_forward and flashmask_backward known to XLA."""
    library = capi.load()
    path = Path(os.environ.get("FLASHMASK_JAX_LIBRARY") or Path(capi.__file__).with_name("libflashmask_jax.so"))
    if not path.is_file():
        raise ImportError(
            f"{path} is not there. Install flashmask with `pip install .` from its source, with jax installed, "
            "or set FLASHMASK_JAX_LIBRARY to a built libflashmask_jax.so"
        )
    handlers = C.CDLL(str(path))
    for operation in OPERATIONS:
        for platform in PLATFORMS:
            handler = getattr(handlers, f"flashmask_{operation}_{platform}")
            jax.ffi.register_ffi_target(f"flashmask_{operation}", jax.ffi.pycapsule(handler), platform=platform)
    return library


@functools.cache
def platforms():
    """Those of PLATFORMS that this process has devices of, the one that JAX prefers first."""
    found = [name for name in PLATFORMS if _has(name)]
    return sorted(found, key=lambda name: (name == "cuda") != (jax.default_backend() == "gpu"))


def _has(platform):
    try:
        return bool(jax.devices(platform))
    except RuntimeError:
        return False


def workspace_bytes(operation, args, options):
    """What the call needs beside its arrays, from shapes alone; raises what is wrong with it."""
    size = C.c_size_t()
    check(getattr(load(), f"fm_{operation}_workspace")(C.byref(args), C.byref(options), C.byref(size)))
    return size.value


def check(status):
    """Raises what the last call of the C interface failed with, if it did."""
    if status != capi.OK:
        kind = {capi.INVALID_ARGUMENT: ValueError, capi.UNSUPPORTED: UnsupportedError}.get(status, RuntimeError)
        raise kind(load().fm_last_error().decode())
