# SPDX-License-Identifier: Apache-2.0
"""FlashMask for numpy: exact attention under masks of O(N) memory, forward and backward, on the CPU.

    from flashmask.numpy import attention, attention_backward, masks
    mask = masks.causal_document(seqlens=[3000, 1096])
    out, lse = attention(q, k, v, mask)
    dq, dk, dv = attention_backward(dout, q, k, v, out, lse, mask)

It needs numpy alone; bfloat16 arrays are those of ml_dtypes.
"""

import ctypes as C
import dataclasses

try:
    import numpy as np
except ImportError as error:
    raise ImportError("flashmask.numpy needs numpy: pip install numpy") from error

from . import _calls, _explain, _values, capi
from ._docs import composed
from ._families import Builders
from .errors import UnrepresentableMaskError, UnsupportedError

__all__ = [
    "Mask",
    "UnrepresentableMaskError",
    "UnsupportedError",
    "attention",
    "attention_backward",
    "dropout_mask",
    "explain",
    "masks",
]


@composed
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mask:
    """
    {mask}

    {positions}

    bounds and positions of int32 are borrowed, other bounds converted; a block mask is borrowed.

    Raises TypeError or ValueError if an argument is wrong.
    """

    seqlen_q: int
    seqlen_k: int
    _: dataclasses.KW_ONLY
    bounds: np.ndarray | None = None
    causal: bool = False
    window: tuple | None = None
    q_offset: int | None = None
    block_mask: np.ndarray | None = None
    q_pos: np.ndarray | None = None
    k_pos: np.ndarray | None = None

    def __post_init__(self):
        checked = {
            "seqlen_q": _values.length("seqlen_q", self.seqlen_q),
            "seqlen_k": _values.length("seqlen_k", self.seqlen_k),
            "causal": _values.flag("causal", self.causal),
            "window": _values.window("window", self.window),
            "q_offset": _values.q_offset(self.q_offset),
        }
        if self.bounds is not None:
            checked["bounds"] = _int32("startend_row_indices", self.bounds, checked["seqlen_q"])
        if self.block_mask is not None:
            checked["block_mask"] = np.asarray(self.block_mask)
        for name in ("q_pos", "k_pos"):
            if (positions := getattr(self, name)) is not None:
                checked[name] = np.asarray(positions)
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        capi.check(capi.load().fm_plan_bytes(C.byref(_calls.mask_of(_Numpy, self)), C.byref(C.c_size_t())))

    @property
    def batch(self):
        """Batch entries of the mask: 1 (for all of the call's), or as many as the call has."""
        return self._wider(0, "bounds", "block_mask", "q_pos", "k_pos")

    @property
    def heads(self):
        """Heads of the mask: 1 (for all of the call's), heads_kv or heads_q; the larger if its arrays have both."""
        return self._wider(1, "bounds", "block_mask")

    def _wider(self, dim, *names):
        return max((x.shape[dim] for name in names if (x := getattr(self, name)) is not None), default=1)

    def replace(self, **changes):
        """The same mask with some of the constructor's arguments replaced."""
        return dataclasses.replace(self, **changes)

    def to_dense(self):
        """A bool array [batch, heads, seqlen_q, seqlen_k], True where row i sees key j."""
        visible = np.empty((self.batch, self.heads, self.seqlen_q, self.seqlen_k), np.bool_)
        fm_mask = _calls.mask_of(_Numpy, self)
        capi.check(capi.load().fm_mask_to_dense(C.byref(fm_mask), C.byref(capi.tensor(visible))))
        return visible

    def __repr__(self):
        return f"Mask({self.seqlen_q}, {self.seqlen_k}: {_explain.describe(self)})"


@composed
def attention(
    q,
    k,
    v,
    mask=None,
    *,
    causal=False,
    window_size=None,
    q_offset=None,
    block_mask=None,
    softmax_scale=None,
    layout="bshd",
    backend="auto",
    threads=0,
    softcap=0.0,
    sink=None,
    q_pos=None,
    k_pos=None,
    dropout=0.0,
    dropout_state=None,
):
    """Softmax attention in which each key is hidden from up to two runs of query rows: (out, lse).

    q [batch, seqlen_q, heads_q, head_dim], k [batch, seqlen_k, heads_kv, head_dim] and v [batch, seqlen_k, heads_kv,
    head_dim_v] of one dtype: float32, float16 or ml_dtypes.bfloat16; float64 with backend="reference". heads_q is a
    multiple of heads_kv. Any strides, but the last dimension contiguous: nothing is copied.

    mask: a flashmask.numpy.Mask, which says everything about the mask; or startend_row_indices as Mask.bounds; or None:
        no key has hidden rows of its own.
    causal, window_size, q_offset, block_mask, q_pos, k_pos: as in Mask (window_size is its window), without one.
    {softmax_scale}
    {layout}
    backend: "auto", "cpu" or "reference" (slow).
    threads: at most so many; 0: OpenMP's default. The result does not depend on it.
    {softcap}
    {sink}
    {dropout}
    dropout_state: int64 or uint64 [2], a seed and an offset, which say what is dropped (dropout_mask); the backward
        takes the same. Needed for dropout.

    Returns out, in q's dtype and layout, [batch, seqlen_q, heads_q, head_dim_v], and lse [batch, heads_q, seqlen_q],
    natural logarithm, float32 (float64 for float64).
    {hidden_rows}

    {raises}
    """
    q, k, v = _bshd(layout, q=q, k=k, v=v)
    call_mask = _mask(mask, q, k, causal, window_size, q_offset, block_mask, q_pos, k_pos)
    out, lse = _calls.forward(
        _Numpy, q, k, v, call_mask, **_options(softmax_scale, backend, threads, softcap, sink, dropout, dropout_state)
    )
    return _in_layout(layout, out), lse


@composed
def attention_backward(
    dout,
    q,
    k,
    v,
    out,
    lse,
    mask=None,
    *,
    dlse=None,
    causal=False,
    window_size=None,
    q_offset=None,
    block_mask=None,
    softmax_scale=None,
    layout="bshd",
    backend="auto",
    threads=0,
    softcap=0.0,
    sink=None,
    q_pos=None,
    k_pos=None,
    dropout=0.0,
    dropout_state=None,
):
    """The gradients of attention(): (dq, dk, dv), in the shapes, dtypes and memory layouts of q, k and v.

    With a sink (dq, dk, dv, dsink).

    dout: the gradient of out, which it has the shape and dtype of. dlse: that of lse, or None. All other arguments are
    those of the forward call, and out and lse what it returned. The same bits in every run.

    {raises}
    """
    dout, q, k, v, out = _bshd(layout, dout=dout, q=q, k=k, v=v, out=out)
    call_mask = _mask(mask, q, k, causal, window_size, q_offset, block_mask, q_pos, k_pos)
    options = _options(softmax_scale, backend, threads, softcap, sink, dropout, dropout_state)
    lse = _array("lse", lse)
    dlse = None if dlse is None else _array("dlse", dlse)
    gradients = _calls.backward(_Numpy, dout, dlse, q, k, v, out, lse, call_mask, **options)
    return *(_in_layout(layout, x) for x in gradients[:3]), *gradients[3:]


@composed
def explain(
    q,
    k,
    v,
    mask=None,
    *,
    causal=False,
    window_size=None,
    q_offset=None,
    block_mask=None,
    softmax_scale=None,
    layout="bshd",
    backend="auto",
    threads=0,
    softcap=0.0,
    sink=None,
    q_pos=None,
    k_pos=None,
    dropout=0.0,
    dropout_state=None,
):
    """
    {explain}
    """

    def prepare():
        arrays = _bshd(layout, q=q, k=k, v=v)
        call_mask = _mask(mask, *arrays[:2], causal, window_size, q_offset, block_mask, q_pos, k_pos)
        options = _options(softmax_scale, backend, threads, softcap, sink, dropout, dropout_state)
        options["sink"] = None if sink is None else _Numpy.array(options["sink"])
        del options["dropout_state"]
        call = _explain.Call(*map(_Numpy.array, arrays), deterministic=True, needs_gradient=True, **options)
        fm_mask = _calls.mask_of(_Numpy, call_mask)
        return _explain.Described(call, call_mask, fm_mask, _explain.host_tiles(fm_mask))

    return _explain.explain(prepare)


@composed
def dropout_mask(state, p, batch, heads, seqlen_q, seqlen_k):
    """
    {dropout_mask}
    """
    lengths = {"batch": batch, "heads": heads, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    shape = tuple(_values.length(name, x) for name, x in lengths.items())
    return _calls.dropout_mask(_Numpy, _state(state), _values.share("p", p), shape)


class _Numpy:
    """What _calls and the builders of masks ask of a frontend."""

    has_positions = True

    @staticmethod
    def empty(shape, dtype, like):
        if dtype == like.dtype.name:
            dtype = like.dtype  # of a name that only ml_dtypes knows
        return _in_memory_as(like, dtype) if shape == like.shape else np.empty(shape, dtype)

    @staticmethod
    def array(x):
        size = x.dtype.itemsize
        if any(stride % size for stride in x.strides):
            raise ValueError(f"an array {x.dtype} {list(x.shape)} has strides {x.strides} bytes, not whole elements")
        dtype = x.dtype.name if x.dtype.isnative else x.dtype.str
        return _explain.Array(x.shape, dtype, "cpu", tuple(stride // size for stride in x.strides), x.ctypes.data)

    @staticmethod
    def place(_):
        return {}

    empty_on_host = staticmethod(np.empty)

    @staticmethod
    def integers(name, value, device, shape=None):
        if device not in (None, "cpu"):
            raise ValueError(f"device is {device!r}; numpy's arrays are in host memory")
        values = _numbers(name, value)
        _values.check_vector(name, values, not values.size or values.dtype.kind in "iu", shape=shape)
        return values.astype(np.int64, copy=False)

    @classmethod
    def flags(cls, name, value, device):
        values = _numbers(name, value)
        _values.check_vector(name, values, not values.size or values.dtype.kind in "iub", "bools")
        return cls.integers(name, (values != 0).astype(np.int32), device)

    @staticmethod
    def build(family, form, vectors, numbers, device=None):
        if form.vectors == 0:
            return Mask(form.rows, form.keys, causal=form.causal, window=form.window, q_offset=form.q_offset), None
        built = _calls.build_mask(_Numpy, family, vectors, numbers, family == "block_diffusion", form.has_positions)
        bounds, order, *positions = built
        keys = bounds.shape[2]
        places = dict.fromkeys(("q_pos", "k_pos"), *positions)
        return Mask(form.rows_of(keys), keys, bounds=bounds, causal=form.causal, window=form.window, **places), order


# The mask families, as flashmask.masks has them for torch.
masks = Builders(_Numpy)


def _in_memory_as(like, dtype):
    """A dense array, its dimensions in memory in the order of `like`'s strides, but the last one innermost.

    numpy's empty_like puts a dimension that is broadcast, whose stride is 0, within the last.
    """
    outer = sorted(range(like.ndim - 1), key=lambda d: like.strides[d], reverse=True)
    order = (*outer, like.ndim - 1)
    return np.empty([like.shape[d] for d in order], dtype).transpose(np.argsort(order))


def _numbers(name, value):
    try:
        return np.asarray(value)
    except ValueError as error:
        raise _values.ragged(name, error) from None


def _options(softmax_scale, backend, threads, softcap, sink, dropout, dropout_state):
    p = _values.share("dropout", dropout)
    if p > 0 and dropout_state is None:
        raise ValueError(f"dropout is {p} without dropout_state; it must be given, int64 or uint64 [2]")
    return {
        "softmax_scale": None if softmax_scale is None else _values.number("softmax_scale", softmax_scale),
        "backend": _values.string("backend", backend),
        "threads": _values.integer("threads", threads, 0, 2**31 - 1),
        "softcap": _values.number("softcap", softcap),
        "sink": None if sink is None else _array("sink", sink),
        "dropout_p": p,
        "dropout_state": None if dropout_state is None else _state(dropout_state),
    }


def _state(x):
    is_right = _array("dropout_state", x).shape == (2,) and x.dtype in (np.int64, np.uint64)
    _values.check_state("dropout_state", x, is_right, "int64 or uint64")
    return np.ascontiguousarray(x).view(np.int64)


def _array(name, x):
    if not isinstance(x, np.ndarray):
        raise TypeError(f"{name} is {_values.given(x)}; it must be a numpy array")
    return x


def _bshd(layout, **arrays):
    """The arrays as BSHD views."""
    shape = _values.LAYOUTS[_values.choice("layout", layout, _values.LAYOUTS)]
    for name, x in arrays.items():
        _values.check_dimensions(name, _array(name, x).shape, shape)
    return [_in_layout(layout, x) for x in arrays.values()]


def _in_layout(layout, x):
    return x.swapaxes(1, 2) if layout == "bhsd" else x


def _mask(mask, q, k, causal, window_size, q_offset, block_mask, q_pos, k_pos):
    """The Mask that the arguments mean."""
    if not isinstance(mask, Mask):
        window = _values.window("window_size", window_size)
        band = {"causal": causal, "window": window, "q_offset": q_offset, "q_pos": q_pos, "k_pos": k_pos}
        return Mask(q.shape[1], k.shape[1], bounds=mask, block_mask=block_mask, **band)
    others = {"window_size": window_size, "q_offset": q_offset, "block_mask": block_mask}
    _values.refuse_beside_mask(causal=causal or None, **others, q_pos=q_pos, k_pos=k_pos)
    _values.check_mask_lengths(mask, q.shape[1], k.shape[1])
    return mask


def _int32(name, values, seqlen_q):
    """`values` as int32: those that need more bits are clamped to [0, seqlen_q] first, as they would be anyway."""
    values = np.asarray(values)
    if values.dtype.kind not in "iu":
        raise TypeError(f"{name} is {values.dtype} {list(values.shape)}; it must be integers, not a dense mask")
    return values if values.dtype == np.int32 else values.clip(0, seqlen_q).astype(np.int32)
