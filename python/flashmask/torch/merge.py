# SPDX-License-Identifier: Apache-2.0
"""The attention over a union of key sets from the attention over each of them."""

from collections.abc import Sequence

import torch

from .._core import arguments
from .._core.annotations import Layout
from . import tensor_arguments

__all__ = ["merge_attention"]


def merge_attention(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    layout: Layout = "bshd",
    sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention of the same queries over disjoint sets of keys into attention over all of them.

    With w_p = exp(lse_p - lse) and lse = log(sum over p of exp(lse_p)), the merged output is the sum of w_p * out_p:
    exact, up to the rounding of the parts. Differentiable in all outs and lses, and in the sink.

    Args:
        outs: sequence of [batch, seqlen_q, heads, head_dim_v] (layout "bhsd": [batch, heads, seqlen_q, head_dim_v]);
            also [total_q, heads, head_dim_v] as flashmask_varlen_func returns it.
        lses: one for each out, [batch, heads, seqlen_q] in either layout, or [heads, total_q]: natural log, -inf where
            a row saw no key.
        layout: "bshd" or "bhsd", of the outs.
        sink: [heads], as in flashmask_attention: the score of one more key, whose value is 0. Compute the parts without
            it, or each would count it once.

    Returns:
        (out, lse), in the dtypes and shapes of the parts; sums are taken in lse's dtype. A row that no part has a key
        for has out 0 and lse -inf (with a sink, the sink).

    Raises:
        ValueError: no parts, different numbers of outs and lses, or shapes or devices that do not match.
        TypeError: a part is no tensor.
    """
    outs, lses = arguments.sequence("outs", outs), arguments.sequence("lses", lses)
    _check_parts(outs, lses, layout)
    of_sink = [] if sink is None else [_expand_sink(sink, lses[0])]  # lse of a part whose out is 0
    weights, lse = _softmax(torch.stack([*lses, *of_sink]))
    if layout == "bshd":
        weights = weights.transpose(-1, -2)
    out = sum(weight.unsqueeze(-1) * part for weight, part in zip(weights, outs))
    return out.to(outs[0].dtype), lse


def merge_into_first(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges two parts or more in lse's dtype into the first out's memory: not differentiable, without checks; each
    part is read once."""
    of_parts = torch.stack(lses)
    lse = of_parts.logsumexp(0)
    weights = torch.exp(of_parts - lse.masked_fill(lse == -torch.inf, 0)).transpose(-1, -2).unsqueeze(-1)
    first, *others = weights.unbind()
    out = outs[0].mul_(first)
    for part, weight in zip(outs[1:], others):
        out.addcmul_(part, weight)
    return out, lse


def _softmax(lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the parts (dimension 0) and the log of the sum of their exponentials.

    Gradients are finite for rows that are -inf in all parts, too.
    """
    top = lses.detach().amax(0)
    top = torch.where(top == -torch.inf, 0, top)
    exponentials = torch.exp(lses - top)
    total = exponentials.sum(0)
    empty = total == 0
    total = torch.where(empty, 1, total)
    return exponentials / total, torch.where(empty, -torch.inf, top + torch.log(total))


def _expand_sink(sink: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    tensor_arguments.check_tensors("[heads]", sink=sink)
    tensor_arguments.check_one_device(lses=lse, sink=sink)
    if sink.shape[0] != lse.shape[-2]:
        raise ValueError(f"sink has {sink.shape[0]} entries; it must have one for each of the {lse.shape[-2]} heads")
    return sink.to(lse.dtype)[:, None].expand(lse.shape)


def _check_parts(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], layout: Layout) -> None:
    arguments.choice("layout", layout, ("bshd", "bhsd"))
    if not outs or len(outs) != len(lses):
        raise ValueError(f"outs has {len(outs)} parts and lses {len(lses)}; they must have as many, and at least one")
    named = {f"{name}[{p}]": x for name, parts in (("outs", outs), ("lses", lses)) for p, x in enumerate(parts)}
    tensor_arguments.check_tensors(None, **named)
    for p, (out, lse) in enumerate(zip(outs, lses)):
        rows = (*out.shape[:-3], out.shape[-2], out.shape[-3]) if layout == "bshd" else tuple(out.shape[:-1])
        if out.shape != outs[0].shape or tuple(lse.shape) != rows:
            raise ValueError(
                f"outs[{p}] is {tuple(out.shape)} and lses[{p}] {tuple(lse.shape)}; "
                f"with layout {layout!r} and outs[0] {tuple(outs[0].shape)}, "
                f"all outs must have one shape and lses the shape [..., heads, seqlen_q] of it"
            )
