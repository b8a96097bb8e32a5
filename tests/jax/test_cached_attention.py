# SPDX-License-Identifier: Apache-2.0
"""attention_with_cache and append_kv, against dense attention of the sequences in the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dense_reference import DTYPE, HEAD_DIM, ON_GPU, TOLERANCES, dense_attention, inputs
from flashmask.jax import (
    KvCache,
    SequenceMask,
    UnsupportedError,
    append_kv,
    attention_with_cache,
    dot_product_attention,
)

PAGE = 16
KEYS = 150
LENGTHS = np.array([150, 61], np.int32)
FOR_GOOD = 2**31 - 1


class Sequences:
    """Random sequences in a cache of shuffled pages; NaN where no key has been written."""

    def __init__(self, rng, form="pages"):
        self.q, self.k, self.v = inputs(rng, seqlen_q=KEYS, seqlen_k=KEYS)
        pages, batch = -(-KEYS // PAGE), len(LENGTHS)
        shape = (batch * pages, PAGE) if form != "contiguous" else (batch, KEYS)
        empty = jnp.full((*shape, 2, HEAD_DIM), np.nan, DTYPE)
        table = np.arange(batch * pages, dtype=np.int32)
        rng.shuffle(table)
        tables = {"pages": table.reshape(batch, pages), "contiguous": None}
        tables["indices"] = np.arange(batch + 1, dtype=np.int32) * pages, table
        self.cache = KvCache(empty, empty, tables[form], LENGTHS)
        self.rows, self.ends = [list(range(n)) for n in LENGTHS], np.array([0, *LENGTHS.cumsum()], np.int32)
        self.cache = append_kv(self.packed(self.k), self.packed(self.v), self.cache, cu_seqlens=self.ends)

    def packed(self, x):
        return jnp.concatenate([x[b, :n] for b, n in enumerate(LENGTHS)])

    def check(self, visible, mask=None, scale=HEAD_DIM**-0.5, **options):
        """All rows of both sequences. visible: bool, of rows i and keys j."""
        function = jax.jit(lambda q, cache, mask: attention_with_cache(q, cache, mask, self.ends, **options))
        out, lse = function(self.packed(self.q), self.cache, mask)
        for b, n in enumerate(LENGTHS):
            rows = slice(self.ends[b], self.ends[b + 1])
            seen = jnp.asarray(np.broadcast_to(visible(np.arange(n)[:, None], np.arange(n)), (1, 4, n, n)))
            want = dense_attention(*(x[b : b + 1, :n] for x in (self.q, self.k, self.v)), seen, scale)
            close(out[rows], want[0][0])
            close(lse[:, rows].T, want[1][0])


def close(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    finite = np.isfinite(want)
    assert (np.isfinite(got) == finite).all()
    assert abs(got[finite] - want[finite]).max() <= TOLERANCES[np.dtype(DTYPE).name] * max(1, abs(want[finite]).max())


@pytest.mark.parametrize("form", ["pages", "indices", "contiguous"])
def test_forms(rng, form):
    Sequences(rng, form).check(lambda i, j: j <= i, return_softmax_lse=True)


def test_masks(rng):
    x, check = Sequences(rng), dict(return_softmax_lse=True)
    x.check(lambda i, j: (j <= i) & (j > i - 20), SequenceMask(window_size=(19, 0)), **check)
    x.check(lambda i, j: (i >= 0) & (j >= 0), SequenceMask(causal=False), scale=0.5, softmax_scale=0.5, **check)
    lts = np.where(np.arange(KEYS) < 4, FOR_GOOD, np.arange(KEYS) + 30).astype(np.int32)
    mask = SequenceMask(bounds=lts[None, None, :, None])
    x.check(lambda i, j: (j <= i) & ((j < 4) | (j > i - 30)), mask, **check)
    blocks = np.array([[[[True, True]], [[False, True]]]])
    expected = lambda i, j: np.stack([(j <= i), (j <= i), (j <= i) & (j >= 128), (j <= i) & (j >= 128)])
    x.check(expected, SequenceMask(block_mask=blocks), **check)


def test_drafts(rng):
    """The last rows are a tree: a root, two children, a child of the first."""
    x = Sequences(rng)
    tail = np.array([[1], [3], [5], [11]], np.int32)[None].repeat(2, 0)
    q = jnp.stack([x.q[b, n - 4 : n] for b, n in enumerate(LENGTHS)])
    out = attention_with_cache(q, x.cache, SequenceMask(tail=tail))
    for b, n in enumerate(LENGTHS):
        visible = np.tril(np.ones((n, n), bool))
        visible[n - 2, n - 3] = visible[n - 1, n - 2] = False
        arrays = q[b : b + 1], x.k[b : b + 1, :n], x.v[b : b + 1, :n]
        close(out[b], dense_attention(*arrays, jnp.asarray(visible[None, None, n - 4 :]), HEAD_DIM**-0.5)[0][0])


def test_features(rng):
    """A sink adds to the sum of exponentials; slopes of 1e4 leave each row its own key."""
    x = Sequences(rng)
    q = x.packed(x.q)
    out, lse = attention_with_cache(q, x.cache, None, x.ends, return_softmax_lse=True)
    sink = jnp.arange(4, dtype=DTYPE)
    with_sink, lse_with_sink = attention_with_cache(q, x.cache, None, x.ends, sink=sink, return_softmax_lse=True)
    wanted = np.logaddexp(np.asarray(lse, np.float64), np.arange(4)[:, None])
    close(lse_with_sink, wanted)
    close(with_sink, np.asarray(out, np.float64) * np.exp(np.asarray(lse, np.float64) - wanted).T[..., None])
    own = attention_with_cache(q, x.cache, None, x.ends, alibi_slopes=jnp.full(4, 1e4))
    close(own, jnp.repeat(x.packed(x.v), 2, axis=1))
    capped = attention_with_cache(q, x.cache, None, x.ends, softcap=1e-6)
    close(capped[x.ends[1] - 1], jnp.repeat(x.v[0].astype(jnp.float32).mean(0), 2, axis=0))


@pytest.mark.skipif(ON_GPU, reason="split_size of a training call is the CPU's")
def test_training_has_the_bits_of_a_cache(rng):
    """Also jitted and under a gradient, whose own bits are others by rounding alone."""
    q, k, v = inputs(rng, seqlen_q=300, seqlen_k=300)
    wanted = attention_with_cache(q, KvCache(k, v), split_size=128)

    def loss(q, split_size):
        out = dot_product_attention(q, k, v, is_causal=True, split_size=split_size)
        return (out.astype(jnp.float32) ** 2).sum(), out

    step = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    dq, out = step(q, 128)
    assert np.asarray(out).tobytes() == np.asarray(wanted).tobytes()
    plain_dq, plain_out = step(q, None)
    assert np.asarray(plain_out).tobytes() != np.asarray(wanted).tobytes()
    close(dq, plain_dq)
    with pytest.raises(UnsupportedError, match="dropout is not taken beside split_size"):
        dot_product_attention(q, k, v, split_size=128, dropout_rate=0.1, dropout_rng=jax.random.key(0))


def test_donated_cache(rng):
    """A step in jit writes a donated cache in place; one trace serves all lengths."""
    x, traces = Sequences(rng), []

    def step(q, k, v, cache):
        traces.append(1)
        cache = append_kv(k, v, cache.replace(seqlens=cache.seqlens + 1))
        return attention_with_cache(q, cache), cache

    step = jax.jit(step, donate_argnums=3)
    cache = x.cache.replace(seqlens=LENGTHS - 5)
    for n in range(-5, 0):
        rows = [jnp.stack([y[b, m + n] for b, m in enumerate(LENGTHS)])[:, None] for y in (x.q, x.k, x.v)]
        place, before = cache.k.unsafe_buffer_pointer(), cache
        out, cache = step(*rows, cache)
        assert before.k.is_deleted() and cache.k.unsafe_buffer_pointer() == place
    assert len(traces) == 1
    whole = attention_with_cache(x.packed(x.q), cache, None, x.ends)
    assert np.array_equal(out[:, 0], whole[x.ends[1:] - 1]) or ON_GPU
    kept = append_kv(*(y[:, :1] for y in (x.k, x.v)), cache)
    assert kept.k.unsafe_buffer_pointer() != cache.k.unsafe_buffer_pointer() and not cache.k.is_deleted()


def test_slots(rng):
    x = Sequences(rng)
    cache = append_kv(x.k[0, :2], x.v[0, :2], x.cache, slots=jnp.array([3 * PAGE + 1, -1]))
    changed = (cache.k != x.cache.k) & ~(jnp.isnan(cache.k) & jnp.isnan(x.cache.k))
    assert jnp.array_equal(cache.k[3, 1], x.k[0, 0]) and set(map(int, jnp.nonzero(changed)[0])) <= {3}


@pytest.mark.skipif(ON_GPU, reason="a float8 cache is the CPU's")
def test_float8(rng):
    """uint8 stands for float8_e4m3fn; both are multiplied by their scales."""
    x = Sequences(rng)
    cache = x.cache.replace(k=x.cache.k.astype(jnp.float8_e4m3fn), v=x.cache.v.astype(jnp.float8_e4m3fn), k_scale=2.0)
    cache = append_kv(x.packed(x.k), x.packed(x.v), cache, cu_seqlens=x.ends)
    out = attention_with_cache(x.packed(x.q), cache, None, x.ends)
    as_bytes = [jax.lax.bitcast_convert_type(y, jnp.uint8) for y in (cache.k, cache.v)]
    same = attention_with_cache(x.packed(x.q), cache.replace(k=as_bytes[0], v=as_bytes[1]), None, x.ends)
    assert np.array_equal(out, same)
    exact = x.cache.replace(k=2 * cache.k.astype(DTYPE), v=cache.v.astype(DTYPE))
    close(out, attention_with_cache(x.packed(x.q), exact, None, x.ends))
    assert 0 < abs(exact.k - x.cache.k)[cache.k == cache.k].max() < 0.2


@pytest.mark.skipif(ON_GPU, reason="a float8 cache is the CPU's")
@pytest.mark.parametrize("of", ["pages", "tokens"])
def test_scales_are_written(rng, of):
    """They come back with the cache, in jit and out of it; a donated cache keeps its place."""
    x = Sequences(rng)
    pages = x.cache.k.shape[0]
    scales = jnp.zeros((pages, 1 if of == "pages" else PAGE, 2), jnp.float32)
    float8 = x.cache.replace(**{name: jnp.zeros(x.cache.k.shape, jnp.float8_e4m3fn) for name in "kv"})
    float8 = float8.replace(k_scale=scales, v_scale=scales + 0)
    rows = x.packed(x.k), x.packed(x.v)
    append = lambda k, v, cache: append_kv(k, v, cache, cu_seqlens=x.ends, write_scales=True)
    cache = append(*rows, float8)
    assert not float8.k_scale.any() and (cache.k_scale > 0).any()
    if of == "pages":
        page, n = x.cache.page_table[0][0], abs(np.asarray(x.k[0, :PAGE], np.float64)).max((0, 2))
        assert np.array_equal(cache.k_scale[page, 0], np.exp2(np.ceil(np.log2(n / 448))))
    exact = x.cache.replace(
        **{
            n: (getattr(cache, n).astype(jnp.float32) * getattr(cache, n + "_scale")[..., None]).astype(DTYPE)
            for n in "kv"
        }
    )
    out = attention_with_cache(x.packed(x.q), cache, None, x.ends)
    close(out, attention_with_cache(x.packed(x.q), exact, None, x.ends))
    place = float8.k_scale.unsafe_buffer_pointer()
    donated = jax.jit(append, donate_argnums=2)(*rows, float8)
    assert donated.k_scale.unsafe_buffer_pointer() == place and float8.k_scale.is_deleted()
    assert np.array_equal(donated.k_scale, cache.k_scale) and np.array_equal(donated.v_scale, cache.v_scale)
    with pytest.raises(ValueError, match="write_scales is set and k_scale is absent"):
        append(*rows, x.cache)


def test_transformations(rng):
    x = Sequences(rng)
    with pytest.raises(UnsupportedError, match="vmap over attention_with_cache is not implemented; requests are its"):
        jax.vmap(lambda q: attention_with_cache(q, x.cache))(x.q[None])
    with pytest.raises(UnsupportedError, match="vmap over append_kv is not implemented"):
        jax.vmap(lambda k: append_kv(k, x.v, x.cache))(x.k[None])
    with pytest.raises(ValueError, match="cannot be differentiated"):
        jax.grad(lambda q: attention_with_cache(q, x.cache).sum())(x.q)


@pytest.mark.parametrize(
    "changes, error, says",
    [
        ({"q": np.zeros((2, 1, 4, 8), DTYPE)}, ValueError, "cache.k is .* q's head_dim"),
        ({"q": np.zeros((2, 4, HEAD_DIM), np.float32)}, ValueError, "q has shape"),
        ({"cache": (1, 2)}, TypeError, r"cache is .*; it must be a flashmask.jax.KvCache"),
        ({"mask": np.ones((2, 2))}, TypeError, "mask is .*; it must be a flashmask.jax.SequenceMask"),
        ({"mask": SequenceMask(tail=np.zeros((2, 4, 1), np.float32))}, ValueError, "tail is float32"),
        ({"split_size": 100}, ValueError, "split_size is 100"),
        ({"softcap": 1e9}, (ValueError, UnsupportedError), "softcap is 1e"),
        ({"backend": "tpu"}, ValueError, "backend 'tpu'"),
    ],
)
def test_wrong_arguments(rng, changes, error, says):
    x = Sequences(rng)
    given = {"q": x.q[:, :1], "cache": x.cache, **changes}
    with pytest.raises(error, match=says):
        attention_with_cache(**given)


def test_wrong_appends(rng):
    x = Sequences(rng)
    with pytest.raises(Exception, match=r"k is float32 \[2, 1, 1, 16\]|k is bfloat16 \[2, 1, 1, 64\]"):
        jax.block_until_ready(append_kv(x.k[:, :1, :1], x.v[:, :1], x.cache).k)
    with pytest.raises(TypeError, match="cache is .*; it must be a flashmask.jax.KvCache"):
        append_kv(x.k, x.v, None)


def test_wrong_pytrees():
    with pytest.raises(ValueError, match="page_table has 3 entries"):
        KvCache(np.zeros(1), np.zeros(1), (1, 2, 3))
    with pytest.raises(TypeError, match="causal is 'yes'"):
        SequenceMask(causal="yes")
    with pytest.raises(ValueError, match="key_layout is 'rows'"):
        SequenceMask(key_layout="rows")
