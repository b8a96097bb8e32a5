# SPDX-License-Identifier: Apache-2.0
"""dropout_mask, which attention weights a call with dropout keeps; and the states that keys of jax.random stand for."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._core import arguments, ctypes_calls, explanation
from .._core.docstrings import composed

_STATE = (2, 2)  # a seed and an offset, the low half of each first


@composed
def dropout_mask(state: Any, p: float, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> jax.Array:
    """
    {dropout_mask}

    state: dropout_rng of the call, a key or a state. Made on the host, also within jit.
    """
    lengths = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = tuple(arguments.length(name, x) for name, x in lengths.items())
    p = float(arguments.share("p", p))
    write = lambda state: ctypes_calls.dropout_mask(_Host, np.ascontiguousarray(state), p, shape)
    return jax.pure_callback(write, jax.ShapeDtypeStruct(shape, jnp.bool_), state_of(state), vmap_method="sequential")


def state_of(rng: Any) -> jax.Array:
    """uint32 [2, 2] of what dropout_rng may be."""
    if isinstance(rng, np.ndarray) and rng.dtype in (np.int64, np.uint64) and rng.shape == (2,):
        return jnp.asarray(np.ascontiguousarray(rng, "<i8").view("<u4").reshape(_STATE))  # JAX would cut it to 32 bits
    given = jnp.asarray(rng) if isinstance(rng, np.ndarray) else rng
    if not isinstance(given, jax.Array):
        raise TypeError(f"dropout_rng is {arguments.describe(rng)}; it must be a key of jax.random or a state")
    if given.dtype in (jnp.int64, jnp.uint64) and given.shape == (2,):
        return jax.lax.bitcast_convert_type(given, jnp.uint32)
    if given.dtype == jnp.uint32 and given.shape == _STATE:
        return given
    is_key = jnp.issubdtype(given.dtype, jax.dtypes.prng_key) and given.ndim == 0
    if not is_key and (given.dtype != jnp.uint32 or given.ndim != 1):
        raise ValueError(
            f"dropout_rng is {arguments.describe(rng)}; it must be one key of jax.random, or a state, uint32 [2, 2] or "
            "int64 or uint64 [2]"
        )
    return jax.random.bits(given, _STATE, jnp.uint32)


class _Host:
    """The frontend that ctypes_calls asks for arrays."""

    @staticmethod
    def empty_on_host(shape: Any, dtype: Any) -> Any:
        return np.empty(shape, dtype)

    @staticmethod
    def array(x: Any) -> explanation.Array:
        return explanation.Array(x.shape, x.dtype.name, pointer=x.ctypes.data)
