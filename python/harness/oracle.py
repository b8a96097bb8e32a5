# SPDX-License-Identifier: Apache-2.0
"""Masked attention in float64 on the GPU, a block of rows at a time, and the plain 16-bit implementation beside it.

`visible(rows)` gives a bool tensor that broadcasts to [batch, heads, len(rows), seqlen_k]. `features` see
harness.features; `factors` what dropout multiplies the weights by.
"""

import torch

from harness.features import NONE

FINITE_SLACK = 1e-5
FEW_ROWS = 8  # fewer are no sample of a head's errors (docs/decisions/gradient-accuracy.md)


def exact_products():
    """16-bit products accumulate in float32, as the plain implementation is defined."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def heads_first(x, heads):
    """[batch, seqlen, heads_kv, d] -> [batch, heads, seqlen, d], each key head repeated for its query heads."""
    x = x.transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def softmax(scores, visible, features=NONE):
    """(probabilities, lse) of capped scores, hidden ones at -inf; rows that see nothing: 0, and -inf or the sink."""
    sink = features.sink_column(scores)
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1), -1)
    shift = torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse))
    return torch.exp(scores - shift[..., None]), lse


def attend(q, k, v, visible, scale, features, factors):
    """(out, lse) in float64. q [batch, heads, rows, d]."""
    scores = features.capped((q.double() @ k.double().transpose(-1, -2)) * scale)
    probabilities, lse = softmax(scores, visible, features)
    return (probabilities * factors) @ v.double(), lse


def softmax_plain(scores, visible, features):
    """The probabilities in float32, of capped scores."""
    sink = features.sink_column(scores)
    scores = scores.masked_fill(~visible, float("-inf"))
    largest = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1).amax(-1, keepdim=True)
    largest = torch.where(torch.isfinite(largest), largest, torch.zeros_like(largest))
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True) + torch.exp(sink - largest)
    return torch.where(total > 0, weights / total, torch.zeros_like(weights))


def attend_plain(q, k, v, visible, scale, features, factors):
    """out in q's type: scores rounded to the type, scaled, softmax in float32, probabilities rounded, out rounded."""
    scores = features.capped((q @ k.transpose(-1, -2)).float() * scale)
    probabilities = softmax_plain(scores, visible, features).to(q.dtype)
    if not features.dropout:
        return probabilities @ v
    return ((probabilities.float() * factors.float()) @ v.float()).to(q.dtype)


def half_unit_of(values, dtype):
    """Half a unit in the last place that numbers of `dtype` have at these magnitudes; 0 of 0."""
    least = torch.finfo(dtype).smallest_normal
    exponent = torch.floor(torch.log2(values.abs().double().clamp(min=least)))
    return torch.where(values == 0, 0.0, torch.exp2(exponent) * torch.finfo(dtype).eps / 2)


def rows_of(factors, block):
    return factors[:, :, block] if factors.shape[2] > 1 else factors


def row_blocks(rows, heads_by_keys, elements=1 << 28):
    """Slices of `rows` so that a block of float64 scores has about `elements` elements."""
    size = max(1, elements // max(1, heads_by_keys))
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def errors(q, k, v, out, lse, visible, scale=None, rows=None, features=NONE):
    """Compares a call's results with float64 over `rows` (default all).

    Returns {out: largest error [batch, heads],
             plain: the plain implementation's, where few rows have numbers the largest of all heads, and with dropout
                    at least the rounding of the head's largest number (docs/decisions/gradient-accuracy.md),
             lse: largest of |error| / max(1, |lse|),
             empty: whether rows that see nothing have out 0 and lse -inf or the sink,
             finite: whether nothing else is NaN or infinite}.
    """
    exact_products()
    heads, dtype = q.shape[2], q.dtype
    scale = q.shape[3] ** -0.5 if scale is None else scale
    rows = torch.arange(q.shape[1], device=q.device) if rows is None else rows
    factors = features.factors(q.shape[0], heads, q.shape[1], k.shape[1]).to(q.device)
    q, k, v, out = q.transpose(1, 2), heads_first(k, heads), heads_first(v, heads), out.transpose(1, 2)
    worst = {
        name: torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
        for name in ("out", "plain", "lse", "size", "numbers")
    }
    good = torch.ones(2, dtype=torch.bool, device=q.device)
    for block in row_blocks(rows, q.shape[0] * heads * max(1, k.shape[2])):
        seen = visible(block)
        of_rows = q[:, :, block], k, v, seen, scale, features, rows_of(factors, block)
        want, want_lse = attend(*of_rows)
        plain = attend_plain(*of_rows)
        got, got_lse = out[:, :, block].double(), lse[:, :, block].double()
        blind = (~seen.any(-1)).expand_as(want_lse)
        good[0] &= ((got == 0).all(-1) & (got_lse == want_lse))[blind].all()
        good[1] &= torch.isfinite(got).all() & torch.isfinite(got_lse[~blind]).all()
        off = ((got_lse - want_lse).abs() / want_lse.abs().clamp(min=1)).masked_fill(blind, 0)
        for name, error in (
            ("out", (got - want).abs().amax(-1)),
            ("plain", (plain.double() - want).abs().amax(-1)),
            ("lse", off),
            ("size", want.abs().amax(-1)),
        ):
            worst[name] = torch.maximum(worst[name], error.amax(-1))
        worst["numbers"] += (want != 0).any(-1).sum(-1)
    size, numbers = worst.pop("size"), worst.pop("numbers")
    if features.dropout:
        worst["plain"] = torch.maximum(worst["plain"], half_unit_of(size, dtype))
    if numbers.numel():
        worst["plain"] = torch.where(numbers < FEW_ROWS, worst["plain"].amax(), worst["plain"])
    return {**worst, "empty": bool(good[0]), "finite": bool(good[1])}


def complaints(found):
    """Violations of the accuracy rule, as sentences: out at most twice the plain error + 1e-5, lse 1e-3 relative."""
    if not found["finite"]:
        yield "NaN or infinity where a number belongs"
    if not found["empty"]:
        yield "rows that see nothing are not out 0 and lse -inf, or the sink"
    allowed = 2 * found["plain"] + FINITE_SLACK
    if not bool((found["out"] <= allowed).all()):
        at = (found["out"] / allowed).flatten().nan_to_num(nan=float("inf")).argmax()
        error, bar = found["out"].flatten()[at], allowed.flatten()[at]
        yield f"out is off by {error:.3e}, allowed {bar:.3e} (batch x head {int(at)})"
    if not bool((found["lse"] <= 1e-3).all()):
        yield f"lse is off by {float(found['lse'].max()):.3e} of max(1, |lse|), allowed 1e-3"


# --- Gradients ---------------------------------------------------------------------------------------


def score_gradients(probabilities, dp, dlse, delta=None):
    """dS; without `delta` (dout . out of a given out) from the mean of dP under P."""
    mean = (probabilities * dp).sum(-1) if delta is None else delta
    return probabilities * (dp - (mean - dlse)[..., None])


def gradients(q, k, v, dout, dlse, visible, scale, given_out=None, features=NONE, factors=None):
    """(dq, dk, dv) in float64, for the out that was handed over if one is given."""
    q, k, v, dout, dlse = (x.double() for x in (q, k, v, dout, dlse))
    factors = 1.0 if factors is None else factors
    scores = (q @ k.transpose(-1, -2)) * scale
    probabilities, _ = softmax(features.capped(scores), visible, features)
    delta = None if given_out is None else (dout * given_out.double()).sum(-1)
    ds = score_gradients(probabilities, (dout @ v.transpose(-1, -2)) * factors, dlse, delta)
    ds = ds * features.slope(scores) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, (probabilities * factors).transpose(-1, -2) @ dout


def gradients_plain(q, k, v, dout, dlse, visible, scale, features, factors):
    """Gradients with scores, probabilities, dP and dS rounded to q's type and sums in float32, like the results."""
    factors = factors.float()
    scores = (q @ k.transpose(-1, -2)).float() * scale
    exact = softmax_plain(features.capped(scores), visible, features)
    probabilities = exact.to(q.dtype).float()
    weights = probabilities * factors
    dp = (dout @ v.transpose(-1, -2)).float() * factors
    ds = (score_gradients(probabilities, dp, dlse.float()) * features.slope(scores)).to(q.dtype)
    ds, q, k, dout = (x.float() for x in (ds, q, k, dout))
    return ds @ k * scale, ds.transpose(-1, -2) @ q * scale, weights.transpose(-1, -2) @ dout


def sink_gradient(sink, out, lse, dout, dlse):
    """(dsink, the sum of its terms' sizes) in float64 [heads], of the out and lse that were handed over; dlse may be
    None."""
    out, dout = (x.transpose(1, 2).double() for x in (out, dout))
    weight = torch.exp(sink.double()[:, None] - lse.double())
    delta, size = (dout * out).sum(-1), dout.norm(dim=-1) * out.norm(dim=-1)
    if dlse is not None:
        delta, size = delta - dlse.double(), size + dlse.double().abs()
    return -(weight * delta).sum((0, 2)), (weight * size).sum((0, 2))


def of_key_heads(x, heads_kv):
    """Sums over the query heads of each key head."""
    return x.unflatten(1, (heads_kv, -1)).sum(2)


def gradient_errors(q, k, v, dout, dlse, out, found, visible, scale=None, features=NONE):
    """Compares (dq, dk, dv) with float64: with the exact gradients, and with those for the rounded `out` handed over.

    Returns for each of them (largest error of ours, the smaller of the two; of the plain implementation), [batch, its
    heads]. docs/decisions/gradient-accuracy.md says why. `visible` as above; dlse may be None.
    """
    return gradient_errors_of(q, k, v, dout, dlse, out, [found], visible, scale, features)[0]


def gradient_errors_of(q, k, v, dout, dlse, out, calls, visible, scale=None, features=NONE):
    """Errors of the (dq, dk, dv) of several calls; float64 is computed once."""
    exact_products()
    torch.backends.cuda.matmul.allow_tf32 = False
    heads, heads_kv = q.shape[2], k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    dlse = torch.zeros((q.shape[0], heads, q.shape[1]), device=q.device) if dlse is None else dlse
    factors = features.factors(q.shape[0], heads, q.shape[1], k.shape[1]).to(q.device)
    q, dout, out = (x.transpose(1, 2) for x in (q, dout, out))
    k, v = heads_first(k, heads), heads_first(v, heads)
    shapes = [(x.shape[0], heads_kv, *x.shape[2:]) for x in (k, v)]
    totals = Totals([[x.transpose(1, 2).double() for x in call] for call in calls], q, shapes)
    for block in row_blocks(
        torch.arange(q.shape[2], device=q.device), q.shape[0] * heads * max(1, k.shape[2]), 1 << 26
    ):
        of_rows = q[:, :, block], k, v, dout[:, :, block], dlse[:, :, block], visible(block), scale
        asked = {"features": features, "factors": rows_of(factors, block)}
        exact = gradients(*of_rows, **asked)
        totals.add(block, "exact", exact)
        totals.add(block, "given", gradients(*of_rows, out[:, :, block], **asked))
        totals.add_plain(gradients_plain(*of_rows, **asked), exact)
    return totals.errors()


class Totals:
    """Totals over blocks of rows: the largest errors of dq, and the sums dk and dv.

    Kept for the exact gradients, the gradients for the given out and the plain implementation. `calls`: each call's
    gradients, heads first. `key_shapes`: shapes of dk and dv, likewise.
    """

    def __init__(self, calls, q, key_shapes):
        self.calls, self.dtype = calls, q.dtype
        self.dq = {
            name: [torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device) for _ in calls]
            for name in ("exact", "given")
        }
        self.plain_dq = torch.zeros(q.shape[:2], dtype=torch.float64, device=q.device)
        self.largest_dq = torch.zeros_like(self.plain_dq)
        self.keys = {
            name: [torch.zeros(shape, dtype=torch.float64, device=q.device) for shape in key_shapes]
            for name in ("exact", "given", "plain")
        }

    def add(self, block, name, expected):
        """`expected`: the gradients of the rows `block`."""
        self.dq[name] = [
            torch.maximum(worst, largest(ours[0][:, :, block] - expected[0]))
            for worst, ours in zip(self.dq[name], self.calls)
        ]
        if name == "exact":
            self.largest_dq = torch.maximum(self.largest_dq, largest(expected[0]))
        self.add_keys(name, expected)

    def add_plain(self, plain, exact):
        self.plain_dq = torch.maximum(self.plain_dq, largest(plain[0].to(self.dtype).double() - exact[0]))
        self.add_keys("plain", plain)

    def add_keys(self, name, expected):
        for total, x in zip(self.keys[name], expected[1:]):
            total += of_key_heads(x.double(), total.shape[1])

    def errors(self):
        """Errors of each call: a head is as good as the better of its two comparisons."""
        return [self.errors_of(n, ours) for n, ours in enumerate(self.calls)]

    def errors_of(self, call, ours):
        errors = {"dq": (torch.minimum(self.dq["exact"][call], self.dq["given"][call]), self.plain_dq)}
        for n, name in enumerate(("dk", "dv")):
            exact, given, plain = (self.keys[which][n] for which in ("exact", "given", "plain"))
            found = torch.minimum(largest(ours[n + 1] - exact), largest(ours[n + 1] - given))
            errors[name] = found, largest(plain.to(self.dtype).double() - exact)
        sizes = {"dq": self.largest_dq, "dk": largest(self.keys["exact"][0]), "dv": largest(self.keys["exact"][1])}
        return {name: (ours, self.measure(plain, sizes[name])) for name, (ours, plain) in errors.items()}

    def measure(self, plain, size):
        """The plain error of all heads of the call, at least half a unit in the last place of the largest number
        (docs/decisions/gradient-accuracy.md)."""
        if not size.numel():
            return plain
        rounding = torch.finfo(self.dtype).eps / 2 * torch.exp2(torch.floor(torch.log2(size.amax())))
        return torch.maximum(plain.amax(), rounding).expand_as(plain)


def largest(error):
    """Largest magnitude per head of [batch, heads, ..]; NaN counts as infinity."""
    flat = error.abs().nan_to_num(nan=float("inf")).flatten(2)
    return flat.amax(-1) if flat.shape[-1] else flat.new_zeros(flat.shape[:2])


def gradient_complaints(errors):
    """Violations of the accuracy rule, as sentences: at most twice the plain error + 1e-5 each."""
    for name, (ours, plain) in errors.items():
        allowed = 2 * plain + FINITE_SLACK
        if not bool((ours <= allowed).all()):
            at = (ours / allowed).flatten().nan_to_num(nan=float("inf")).argmax()
            error, bar = ours.flatten()[at], allowed.flatten()[at]
            yield f"{name} is off by {error:.3e}, allowed {bar:.3e} (batch x head {int(at)})"
