# SPDX-License-Identifier: Apache-2.0
"""A problem, its mask by a rule of its own, and everything that is checked of a forward and of a backward call.

The rule here is written from the public contract (include/flashmask/c_api.h), in torch, from the raw vectors: the
library is never asked which elements are visible.
"""

import os
from dataclasses import dataclass, field, replace

import torch
from harness import oracle
from harness.calls import Backward, Forward, Mask, Plan, explained
from harness.features import NONE, Features

DEVICE = torch.device(os.environ.get("FLASHMASK_TEST_DEVICE", "cuda"))
BLOCK = 128
GRANULE_ROWS = 64  # rows of the plan's granules of 64 x 128


@dataclass
class Case:
    """bounds int32 [1 or batch, mask heads, seqlen_k, n]; block_mask [.., blocks of rows, blocks of keys]; q_pos, k_pos
    int32 [1 or batch, seqlen]."""

    seqlen_q: int
    seqlen_k: int
    batch: int = 1
    heads: int = 2
    heads_kv: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    bounds: torch.Tensor = None
    window: tuple = None
    q_offset: int = None
    block_mask: torch.Tensor = None
    scale: float = None
    layout: str = "bshd"
    seed: int = 0
    inputs: tuple = field(default=None, repr=False)
    dim_v: int = None  # default: dim
    features: Features = field(default_factory=lambda: NONE)
    q_pos: torch.Tensor = None
    k_pos: torch.Tensor = None

    def __post_init__(self):
        self.dim_v = self.dim if self.dim_v is None else self.dim_v

    def __str__(self):
        names = (
            "batch seqlen_q seqlen_k heads heads_kv dim dim_v dtype causal window q_offset scale layout seed features"
        )
        words = {n: getattr(self, n) for n in names.split()}
        tensors = ("bounds", "block_mask", "q_pos", "k_pos")
        shapes = {n: tuple(x.shape) for n in tensors if (x := getattr(self, n)) is not None}
        return ", ".join(f"{n} {v}" for n, v in {**words, **shapes}.items())

    def has_dense_twin(self):
        """True if a run with a dense mask, whose rows end at the last key, has equal scores."""
        return self.features.alibi_slopes is None or (self.q_offset is None and self.q_pos is None)

    def mask(self):
        return Mask(
            self.seqlen_q,
            self.seqlen_k,
            bounds=self.bounds,
            causal=self.causal,
            window=self.window,
            q_offset=self.q_offset,
            block_mask=self.block_mask,
            q_pos=self.q_pos,
            k_pos=self.k_pos,
            device=DEVICE,
        )

    def tensors(self):
        """q, k, v from a standard normal in the case's layout."""
        if self.inputs is None:
            torch.manual_seed(self.seed)
            self.inputs = draw(self)
        return self.inputs

    def per_query_head(self, x):
        """[.., mask heads, ..] -> mask heads 1 or heads."""
        return x if x.shape[1] in (1, self.heads) else x.repeat_interleave(self.heads // x.shape[1], dim=1)

    def edges(self):
        """The least and the greatest position of a key less that of a row that sees it; None is unbounded."""
        left, right = self.window or (-1, -1)
        return (-left if left >= 0 else None), (0 if self.causal else right if right >= 0 else None)

    def visible(self, rows, with_band=True):
        """bool [1 or batch, 1 or heads, len(rows), seqlen_k]"""
        i, j = rows[:, None], torch.arange(self.seqlen_k, device=rows.device)[None, :]
        if self.q_pos is None:
            distance = j - (i + (self.seqlen_k - self.seqlen_q if self.q_offset is None else self.q_offset))
        else:
            distance = self.k_pos.long()[:, None, None, :] - self.q_pos.long()[:, None, rows, None]
        seen = torch.ones((1, 1, len(rows), self.seqlen_k), dtype=torch.bool, device=rows.device)
        lo, hi = self.edges() if with_band else (None, None)
        if lo is not None:
            seen = seen & (distance >= lo)
        if hi is not None:
            seen = seen & (distance <= hi)
        if self.bounds is not None:
            seen = seen & ~self.per_query_head(hidden_by(self.bounds, self.causal, i))
        if self.block_mask is not None:
            kept = self.block_mask[:, :, rows // BLOCK][..., torch.arange(self.seqlen_k, device=rows.device) // BLOCK]
            seen = seen & self.per_query_head(kept != 0)
        return seen

    def rows(self):
        return torch.arange(self.seqlen_q, device=DEVICE)

    def dense(self):
        """Dense mask in rows or, as it may have any strides, in columns."""
        visible = self.visible(self.rows())
        return visible.mT.contiguous().mT if self.seed % 2 else visible.contiguous()


def hidden_by(bounds, causal, i):
    """Elements in the hidden row intervals: bool [mask batch, mask heads, rows, keys]."""
    v = [bounds[..., n][:, :, None, :] for n in range(bounds.shape[3])]
    i = i[None, None]
    if len(v) == 1:
        return i >= v[0]
    if len(v) == 4:
        return ((i >= v[0]) & (i < v[1])) | ((i >= v[2]) & (i < v[3]))
    return (i >= v[0]) & (i < v[1]) if causal else (i >= v[0]) | (i < v[1])


def draw(case):
    def normal(*shape):
        return torch.randn(shape, dtype=torch.float32, device=DEVICE).to(case.dtype)

    b, sq, sk, h, hk, d = case.batch, case.seqlen_q, case.seqlen_k, case.heads, case.heads_kv, case.dim
    shapes = ((h, sq, d), (hk, sk, d), (hk, sk, case.dim_v))
    if case.layout == "bhsd":
        return tuple(normal(b, n, s, d).transpose(1, 2) for n, s, d in shapes)
    if case.layout == "padded":  # rows of d elements and 8 more, a longer sequence, more heads
        return tuple(normal(b, s + 3, n + 1, d + 8)[:, :s, :n, :d] for n, s, d in shapes)
    if case.layout == "packed":
        assert case.dim_v == d
        if sq == sk and h == hk:
            return normal(b, sq, 3, h, d).unbind(2)
        q, (k, v) = normal(b, sq, h, d), normal(b, sk, 2, hk, d).unbind(2)
        return q, k, v
    return tuple(normal(b, s, n, d) for n, s, d in shapes)


def same_bits(a, b):
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def assert_same(a, b, what, case):
    assert same_bits(a.out, b.out), f"{what}: out has other bits; {case}"
    assert same_bits(a.lse, b.lse), f"{what}: lse has other bits; {case}"


def live_tiles(case, remaining_rows, chunk=4096):
    """Tiles of remaining_rows x 128 that have to be run, over batch entries and query heads: those with a visible
    element, and over positions those with granules that minima and maxima of these do not rule out."""
    total, step = 0, max(1, chunk // remaining_rows) * remaining_rows
    for begin in range(0, case.seqlen_q, step):
        rows = case.rows()[begin : begin + step]
        granules = any_of(case.visible(rows, with_band=case.q_pos is None), GRANULE_ROWS)
        if case.q_pos is not None:
            granules = granules & some_in_band(case, rows)
        granules = torch.nn.functional.pad(granules, (0, 0, 0, -granules.shape[2] % (remaining_rows // GRANULE_ROWS)))
        tiles = granules.unflatten(2, (-1, remaining_rows // GRANULE_ROWS)).any(3)
        total += int(tiles.sum()) * (case.batch // tiles.shape[0]) * (case.heads // tiles.shape[1])
    return total


def any_of(seen, remaining_rows):
    """Tiles of remaining_rows x 128 that have a visible element."""
    seen = torch.nn.functional.pad(seen, (0, -seen.shape[3] % BLOCK, 0, -seen.shape[2] % remaining_rows))
    return seen.unflatten(3, (-1, BLOCK)).any(4).unflatten(2, (-1, remaining_rows)).any(3)


def greatest_of(positions, size):
    """The greatest of each `size` positions: [batch, parts]."""
    padded = torch.nn.functional.pad(positions, (0, -positions.shape[1] % size), value=-(1 << 40))
    return padded.unflatten(1, (-1, size)).amax(2)


def some_in_band(case, rows):
    """Granules of these rows whose positions the band may let see each other: [1 or batch, 1, rows, keys]."""
    lo, hi = case.edges()
    of_rows, of_keys = case.q_pos[:, rows].long(), case.k_pos.long()
    row_least, row_greatest = -greatest_of(-of_rows, GRANULE_ROWS), greatest_of(of_rows, GRANULE_ROWS)
    least, greatest = -greatest_of(-of_keys, BLOCK), greatest_of(of_keys, BLOCK)
    seen = torch.ones((1, 1, 1), dtype=torch.bool, device=rows.device)
    if lo is not None:
        seen = seen & (greatest[:, None, :] - row_least[:, :, None] >= lo)
    if hi is not None:
        seen = seen & (least[:, None, :] - row_greatest[:, :, None] <= hi)
    return seen[:, None]


def output_like(q, v, layout, dtype):
    """An output in q's layout; None lets the call make a contiguous one."""
    if layout == "bhsd":
        shape = q.shape[0], q.shape[2], q.shape[1], v.shape[3]
        return torch.empty(shape, dtype=dtype, device=q.device).transpose(1, 2)
    if layout == "padded":
        shape = *q.shape[:2], q.shape[2] + 1, v.shape[3] + 8
        return torch.empty(shape, dtype=dtype, device=q.device)[:, :, : q.shape[2], : v.shape[3]]
    return None


def call(case, mask, **more):
    q, k, v = case.tensors()
    more.setdefault("out", output_like(q, v, case.layout, case.features.result_dtype(q.dtype)))
    return Forward(q, k, v, mask, scale=case.scale, features=case.features, **more).poison()


def check(case, dense=True):
    """Accuracy, empty rows, and the exactness of everything that must not change a bit. Returns the call."""
    q, k, v = case.tensors()
    mask = case.mask()
    plan = Plan(mask)
    ours = call(case, mask, plan=plan).run()
    found = oracle.errors(q, k, v, ours.out, ours.lse, case.visible, case.scale, features=case.features)
    wrong = list(oracle.complaints(found))
    assert not wrong, f"{'; '.join(wrong)}; {case}"
    assert_same(ours, call(case, mask, plan=plan).run(), "run again", case)
    assert_same(ours, call(case, mask).run(), "with a plan made in the call", case)
    check_tiles(case, mask, plan, ours)
    if dense and case.has_dense_twin():
        check_dense(case, ours)
    return ours


def check_tiles(case, mask, plan, ours):
    counted = call(case, mask, plan=plan, count=True)
    executed, rows = counted.executed_tiles(), counted.tile_rows()
    assert executed == live_tiles(case, rows), (
        f"{executed} tiles executed, {live_tiles(case, rows)} tiles of {rows} rows are live; {case}"
    )
    assert_same(ours, counted, "counting tiles", case)


def check_dense(case, ours):
    """The dense-mask run has the same bits, but for the sign of a zero, and executes every tile."""
    baseline = call(case, None, dense=case.dense(), count=True)
    executed, tiles = (
        baseline.executed_tiles(),
        case.batch * case.heads * -(-case.seqlen_q // baseline.tile_rows()) * -(-case.seqlen_k // BLOCK),
    )
    assert executed == tiles, f"the dense-mask run executed {executed} of {tiles} tiles; {case}"
    assert torch.equal(ours.out, baseline.out) and torch.equal(ours.lse, baseline.lse), (
        f"the dense-mask run differs; {case}"
    )


# --- Gradients ---------------------------------------------------------------------------------------


def gradient_inputs(case, with_dlse=True):
    """dout in the case's layout and dlse, from a standard normal."""
    torch.manual_seed(case.seed + 1)
    dout = draw(replace(case, dim=case.dim_v))[0]
    dout = dout.contiguous() if case.layout == "packed" else dout
    dlse = torch.randn((case.batch, case.heads, case.seqlen_q), dtype=torch.float32, device=DEVICE)
    return dout, dlse if with_dlse else None


def gradient_like(layout):
    """How dq, dk and dv are made: in the layout of the inputs."""

    def like(x):
        if layout == "bhsd":
            return torch.empty_like(x.transpose(1, 2).contiguous()).transpose(1, 2)
        if layout == "padded":
            return torch.empty(
                (x.shape[0], x.shape[1], x.shape[2] + 1, x.shape[3] + 8), dtype=x.dtype, device=x.device
            )[:, :, : x.shape[2], : x.shape[3]]
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

    return like


def call_backward(case, forward, dout, dlse, **more):
    more.setdefault("like", gradient_like(case.layout))
    return Backward(forward, dout, dlse, scale=case.scale, **more).poison()


def assert_same_gradients(a, b, what, case, names=("dq", "dk", "dv", "dsink")):
    for name in names:
        if name == "dsink" and a.dsink is None:
            continue
        assert same_bits(getattr(a, name), getattr(b, name)), f"{what}: {name} has other bits; {case}"


def check_backward(case, with_dlse=True, dense=True):
    """Accuracy, zeros where nothing contributes, repeatable bits, tiles, and the dense mask's bits.

    Returns the deterministic call.
    """
    mask = case.mask()
    plan = Plan(mask)
    forward = call(case, mask, plan=plan).run()
    dout, dlse = gradient_inputs(case, with_dlse)
    fast = call_backward(case, forward, dout, dlse, plan=plan).run()
    check_gradients(case, forward, dout, dlse, fast)
    again = call_backward(case, forward, dout, dlse).run()
    assert_same_gradients(fast, again, "run again, with a plan made in the call", case, ("dk", "dv", "dsink"))
    ours = call_backward(case, forward, dout, dlse, plan=plan, deterministic=True).run()
    check_gradients(case, forward, dout, dlse, ours)
    summed_alike = ("dsink",) if shares_rows(fast) else ("dk", "dv", "dsink")
    assert_same_gradients(fast, ours, "deterministic", case, summed_alike)
    again = call_backward(case, forward, dout, dlse, deterministic=True).run()
    assert_same_gradients(ours, again, "deterministic run again, with a plan made in the call", case)
    check_backward_tiles(case, forward, dout, dlse, plan)
    if dense and case.has_dense_twin():
        check_dense_backward(case, forward, dout, dlse, ours)
    return ours


def shares_rows(ours):
    """True if two CTAs share each key tile's rows: dk and dv are not summed up as in deterministic mode, where none
    do."""
    return explained(ours, True)["instance"].endswith(".shared")


def check_gradients(case, forward, dout, dlse, ours):
    q, k, v = case.tensors()
    errors = oracle.gradient_errors(
        q, k, v, dout, dlse, forward.out, ours.gradients(), case.visible, case.scale, case.features
    )
    wrong = list(oracle.gradient_complaints(errors))
    assert not wrong, f"{'; '.join(wrong)}; {case}"
    if ours.dsink is not None:
        check_sink_gradient(case, forward, dout, dlse, ours.dsink)
    check_zeros(case, ours)


def check_sink_gradient(case, forward, dout, dlse, dsink):
    """docs/features.md says how far it may be off."""
    want, size = oracle.sink_gradient(case.features.sink, forward.out, forward.lse, dout, dlse)
    rounding = want.abs() * torch.finfo(dsink.dtype).eps
    error = (dsink.double() - want).abs()
    assert bool((error <= 1e-5 * size + rounding).all()), f"dsink is off by {error / size} of its terms; {case}"


def check_zeros(case, ours, chunk=4096):
    """Rows that see no key, and keys that no row sees (of any query head of theirs), have gradients of exactly 0."""
    seen_keys = torch.zeros((case.batch, case.heads_kv, case.seqlen_k), dtype=torch.bool, device=DEVICE)
    for rows in case.rows().split(chunk):
        seen = case.visible(rows).expand(case.batch, case.heads, -1, -1)
        blind = ~seen.any(-1) if case.seqlen_k else torch.ones(seen.shape[:3], dtype=torch.bool, device=DEVICE)
        assert bool((ours.dq[:, rows].transpose(1, 2)[blind] == 0).all()), (
            f"dq of rows that see nothing is not 0; {case}"
        )
        seen_keys |= seen.any(2).unflatten(1, (case.heads_kv, -1)).any(2)
    for name in ("dk", "dv"):
        assert bool((getattr(ours, name).transpose(1, 2)[~seen_keys] == 0).all()), (
            f"{name} of keys that no row sees is not 0; {case}"
        )


def check_backward_tiles(case, forward, dout, dlse, plan):
    counted = call_backward(case, forward, dout, dlse, plan=plan, count=True)
    executed, live = counted.executed_tiles(), live_tiles(case, counted.tile_rows())
    assert executed == (live, live), f"{executed} tiles executed, {live} are live; {case}"


def check_dense_backward(case, forward, dout, dlse, ours):
    """The deterministic dense-mask run has the same bits, but for the sign of a zero, and executes every tile."""
    baseline = call_backward(case, forward, dout, dlse, dense=case.dense(), deterministic=True, count=True)
    tiles = case.batch * case.heads * -(-case.seqlen_q // baseline.tile_rows()) * -(-case.seqlen_k // BLOCK)
    executed = baseline.executed_tiles()
    assert executed == (tiles, tiles), f"the dense-mask run executed {executed} of {tiles} tiles; {case}"
    for name in ("dq", "dk", "dv") if ours.dsink is None else ("dq", "dk", "dv", "dsink"):
        assert torch.equal(getattr(ours, name), getattr(baseline, name)), (
            f"{name} of the dense-mask run differs; {case}"
        )
