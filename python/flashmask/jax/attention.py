# SPDX-License-Identifier: Apache-2.0
"""dot_product_attention, with the arguments and conventions of jax.nn's function of that name."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._core import arguments, call_options
from .._core.annotations import Backend
from .._core.docstrings import composed
from .dropout import state_of
from .mask import Mask
from .xla_calls import Features, attention


class Options(NamedTuple):
    """Options of a call that are no arrays."""

    softmax_scale: float | None
    deterministic: bool
    backend: str
    softcap: float = 0.0
    dropout_p: float = 0.0
    split_size: int = 0


@composed
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    mask: Mask | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    return_residual: bool = False,
    bias: None = None,
    softcap: float | None = 0.0,
    sink: ArrayLike | None = None,
    alibi_slopes: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: Any = None,
    deterministic: bool = True,
    backend: Backend = "auto",
    split_size: int | None = 0,
) -> Any:
    """Softmax attention in which each key is hidden from up to two runs of query rows.

    query [batch, seqlen_q, heads_q, head_dim], key [batch, seqlen_k, heads_kv, head_dim] and value [batch, seqlen_k,
    heads_kv, head_dim_v] of one dtype: float32, bfloat16 or float16 on the CPU, bfloat16 or float16 on CUDA; float64
    with backend="reference". heads_q is a multiple of heads_kv. The batch may be missing, as in jax.nn.

    mask: a flashmask.jax.Mask, which says everything about the mask and excludes the other four arguments about it.
        None: those four define the mask.
    scale: of the scores, default 1 / sqrt(head_dim).
    is_causal: row i sees keys j <= i, whatever the lengths.
    query_seq_lengths, key_value_seq_lengths: integers [batch]: rows and keys from there on are padding.
    local_window_size: (left, right) or an int for both: row i sees i - left <= j <= i + right.
    return_residual: also returns the logarithm of the sum of exponentials of each row's scores.
    bias: not implemented; anything but None raises UnsupportedError.
    {softcap}
        None is 0.
    {sink}
        Differentiable, as query, key and value are.
    {alibi_slopes}
    dropout_rate: the share of the attention weights that are set to zero at random, a number in [0, 1); the others are
        scaled by 1 / (1 - dropout_rate). Rounded to 16 bits. The residual is over all weights.
    dropout_rng: a key of jax.random; or a state, a seed and an offset as the other frontends take it: uint32 [2, 2],
        the low half of each first, or int64 or uint64 [2]. It selects the dropped weights (dropout_mask), the same each
        time. Needed for dropout, and not read without it.
    deterministic: gradients with the same bits in every run. False may be faster on a GPU.
    backend: "auto", "cpu", "cuda" or "reference" (slow).
    {split_size}

    Returns out, in query's shape and dtype, but head_dim_v; with return_residual (out, residual), residual [batch,
    seqlen_q, heads_q], natural logarithm, in query's dtype. Both are differentiable with respect to query, key,
    value and sink, in reverse mode and once. A row that sees no key gets 0, and residual -inf (with a sink, the sink).

    {raises}
    On a machine with a GPU, a call that only the GPU refuses raises an error of JAX when the program runs.
    """
    options, (q, k, v), mask, features = read_call(
        query,
        key,
        value,
        mask,
        scale,
        is_causal,
        query_seq_lengths,
        key_value_seq_lengths,
        local_window_size,
        bias,
        softcap,
        sink,
        alibi_slopes,
        dropout_rate,
        dropout_rng,
        deterministic,
        backend,
        split_size,
    )
    with_residual = arguments.flag("return_residual", return_residual)
    out, lse = attention(options, q, k, v, mask, features)
    given_form = lambda x: x[0] if jnp.ndim(query) == 3 else x
    if not with_residual:
        return given_form(out)
    return given_form(out), given_form(lse.swapaxes(1, 2).astype(out.dtype))


def read_call(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    scale: Any,
    is_causal: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
    bias: Any,
    softcap: Any,
    sink: Any,
    alibi_slopes: Any,
    dropout_rate: Any,
    dropout_rng: Any,
    deterministic: Any,
    backend: Any,
    split_size: Any,
) -> tuple[Options, tuple[jax.Array, ...], Mask, Any]:
    """(options, (q, k, v), mask, features) that the arguments of dot_product_attention mean; raises what it would."""
    arguments.refuse_unsupported(bias=(bias, None))
    given = (_array("query", query), _array("key", key), _array("value", value))
    q, k, v = (x if x.ndim == 4 else x[None] for x in given)
    if mask is None:
        mask = _mask(q, k, is_causal, query_seq_lengths, key_value_seq_lengths, local_window_size)
    else:
        arguments.refuse_beside_mask(
            is_causal=is_causal or None,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            local_window_size=local_window_size,
        )
        _check_mask(mask, q, k)
    options = _options(scale, deterministic, backend, softcap, dropout_rate, split_size)
    return options, (q, k, v), mask, _features(sink, alibi_slopes, options.dropout_p, dropout_rng)


def _array(name: str, x: Any) -> jax.Array:
    x = jnp.asarray(x)
    if x.ndim not in (3, 4):
        raise ValueError(
            f"{name} has shape {list(x.shape)}; it must have 4 dimensions, [batch, seqlen, heads, head_dim], "
            "or 3 without the batch"
        )
    return x


def _options(scale: Any, deterministic: Any, backend: Any, softcap: Any, dropout_rate: Any, split_size: Any) -> Options:
    return Options(
        softmax_scale=None if scale is None else float(arguments.number("scale", scale)),
        deterministic=arguments.flag("deterministic", deterministic),
        backend=arguments.string("backend", backend),
        softcap=0.0 if softcap is None else float(arguments.number("softcap", softcap)),
        dropout_p=float(arguments.share("dropout_rate", dropout_rate)),
        **call_options.read(split_size=split_size),
    )


def _features(sink: Any, alibi_slopes: Any, dropout_p: float, dropout_rng: Any) -> Any:
    if dropout_p != 0 and dropout_rng is None:
        raise ValueError(f"dropout_rate is {dropout_p} and dropout_rng is missing; it must be a key of jax.random")
    return Features(
        sink=None if sink is None else jnp.asarray(sink),
        alibi_slopes=None if alibi_slopes is None else jnp.asarray(alibi_slopes),
        dropout_state=None if dropout_p == 0 else state_of(dropout_rng),
    )


# --- The mask of a call -----------------------------------------------------------------------------------------------


def _mask(
    q: jax.Array,
    k: jax.Array,
    is_causal: Any,
    query_seq_lengths: Any,
    key_value_seq_lengths: Any,
    local_window_size: Any,
) -> Mask:
    """Makes the mask of jax.nn's arguments, in which row i stands at key i."""
    batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    is_causal = arguments.flag("is_causal", is_causal)
    bounds = None
    if query_seq_lengths is not None or key_value_seq_lengths is not None:
        rows = _lengths("query_seq_lengths", query_seq_lengths, batch, seqlen_q)
        keys = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch, seqlen_k)
        bounds = _padding_bounds(rows, keys, seqlen_k, is_causal)
    window = None if local_window_size is None else _window(local_window_size)
    return Mask(seqlen_q, seqlen_k, bounds=bounds, causal=is_causal, window=window, q_offset=0)


def _padding_bounds(rows: jax.Array, keys: jax.Array, seqlen_k: int, is_causal: bool) -> jax.Array:
    """Bounds that hide rows and keys from the given lengths [batch] on: LTS, and UTE where there is no causality."""
    lts = jnp.where(jnp.arange(seqlen_k) < keys[:, None], rows[:, None], 0)
    vectors = (lts,) if is_causal else (lts, jnp.zeros_like(lts))
    return jnp.stack(vectors, -1)[:, None]


def _lengths(name: str, lengths: Any, batch: int, most: int) -> jax.Array:
    """int32 [batch], of lengths that may be missing."""
    if lengths is None:
        return jnp.full(batch, most, jnp.int32)
    lengths = jnp.asarray(lengths)
    if not jnp.issubdtype(lengths.dtype, jnp.integer) or lengths.shape != (batch,):
        raise ValueError(f"{name} is {lengths.dtype} {list(lengths.shape)}; it must be integers [batch], [{batch}]")
    return lengths.clip(0, most).astype(jnp.int32)


def _window(sizes: Any) -> tuple[int, int]:
    pair = arguments.pair("local_window_size", sizes)
    left, right = (arguments.integer("local_window_size", side, 0) for side in pair)
    return left, right


def _check_mask(mask: Any, q: jax.Array, k: jax.Array) -> None:
    if not isinstance(mask, Mask):
        raise TypeError(
            f"mask is {arguments.describe(mask)}; it must be a flashmask.jax.Mask or None. "
            "Dense masks are not taken; flashmask.jax.masks says the same in O(seqlen_k) memory"
        )
    arguments.check_mask_lengths(mask, q.shape[1], k.shape[1])
