# SPDX-License-Identifier: Apache-2.0
"""Attention over a dense matrix of visible elements, in float64 and plain torch: what the package is compared with."""

import torch
from devices import tolerance_of

NAMES = ("out", "lse", "dq", "dk", "dv")


def attention(q, k, v, visible, scale=None, *, softcap=0.0, sink=None, weights=None, alibi_slopes=None, distances=None):
    """Returns (out, lse).

    q [..., heads_q, rows, d], k and v [..., heads_kv, keys, d], visible bool on any device, that broadcasts to the
    scores; sink [heads_q]; weights: what the probabilities are multiplied by after the softmax; alibi_slopes [heads_q]
    or [batch, heads_q], with distances [rows, keys], by default those of indices whose last ones meet.
    """
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if alibi_slopes is not None:
        rows, keys = scores.shape[-2:]
        row, key = torch.arange(rows, device=q.device), torch.arange(keys, device=q.device)
        distances = (row[:, None] + keys - rows - key).abs() if distances is None else distances
        scores = scores - alibi_slopes.double()[..., None, None] * distances
    visible = visible.to(q.device).expand(scores.shape)
    seen = visible.any(-1)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sink is not None:
        return _with_sink(scores, v, sink.double()[:, None, None], weights)
    scores = scores.masked_fill(~seen[..., None], 0)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.sum(-1)
    p = torch.exp(scores - lse[..., None]).masked_fill(~visible, 0)
    return (p if weights is None else p * weights) @ v, lse.masked_fill(~seen, -torch.inf)


def _with_sink(scores, v, sink, weights):
    """Sink as models write it: one more column, which is dropped after the softmax."""
    scores = torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1)
    p = torch.softmax(scores, -1)[..., :-1]
    return (p if weights is None else p * weights) @ v, torch.logsumexp(scores, -1)


def assert_close(got, want, name="", tolerance=1e-5):
    """Compares: -inf at equal places, and otherwise within `tolerance` of the largest element of `want`, or of 1."""
    got, want = got.double(), want.double()
    assert got.shape == want.shape, name
    finite = torch.isfinite(want)
    assert torch.equal(got[~finite], want[~finite]), name
    if finite.any():
        error = (got - want)[finite].abs().max().item()
        assert error <= tolerance * want[finite].abs().max().clamp(min=1).item(), f"{name}: {error}"


def loss_of(out, lse, dout, dlse):
    """A scalar that reaches every output element and the lse of every row that sees something."""
    return (out.double() * dout).sum() + (lse.double().masked_fill(torch.isinf(lse), 0) * dlse).sum()


def gradients(function, inputs, dout, dlse):
    """(out, lse), and the gradients of loss_of in the inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = function(*inputs)
    return (out, lse, *torch.autograd.grad(loss_of(out, lse, dout, dlse), inputs))


def compare(ours, theirs, inputs, dout, dlse):
    """Two functions (q, k, v) -> (out, lse): their results, `theirs` in float64, and their gradients of loss_of."""
    results = gradients(ours, inputs, dout, dlse), gradients(theirs, [x.double() for x in inputs], dout, dlse)
    for name, got, want in zip(NAMES, *results):
        assert_close(got, want, name, tolerance_of(name, inputs[0].dtype))
