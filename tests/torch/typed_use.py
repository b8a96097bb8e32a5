# SPDX-License-Identifier: Apache-2.0
"""A user's program for mypy (style.types): right_use passes, and each line of wrong_use has an error.

mypy is strict here. It refuses calls of functions without annotations, and an `ignore` beside which there is no error.
"""

import flashmask
import numpy as np
import torch
from flashmask import Mask
from typing_extensions import assert_type


def right_use() -> None:
    """Run by test_package.py, too."""
    q, k, v = (torch.randn(1, 6, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    mask = assert_type(flashmask.masks.causal_document(seqlens=[2, 4]), Mask)
    out = assert_type(flashmask.flashmask_attention(q, k, v, mask, softcap=3, sink=torch.zeros(4)), torch.Tensor)
    out.sum().backward()  # type: ignore[no-untyped-call]  # torch's own
    out, lse = flashmask.flashmask_attention(q, k, v, causal=True, window_size=(2, None), return_softmax_lse=True)
    assert_type(lse, torch.Tensor)
    out, state = flashmask.flashmask_attention(q, k, v, mask, dropout=0.5, return_seed_offset=True)
    assert_type(flashmask.dropout_mask(state, 0.5, 1, 4, 6, 6), torch.Tensor)
    assert_type(flashmask.merge_attention([out, out], (lse, lse)), tuple[torch.Tensor, torch.Tensor])
    assert_type(flashmask.explain(q, k, v, mask, layout="bshd", backend="cpu"), str)

    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    query, key, value = heads_first
    assert_type(
        flashmask.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True), torch.Tensor
    )
    ends = np.array([0, 2, 6])
    packed = assert_type(flashmask.flashmask_varlen_func(q[0], k[0], v[0], ends, [0, 2, 6], causal=True), torch.Tensor)
    packed, lse = flashmask.flashmask_varlen_func(q[0], k[0], v[0], ends, ends, 4, 4, return_softmax_lse=True)

    assert_type(flashmask.masks.block_diffusion(2, torch.tensor([0, 4, 6])), tuple[Mask, torch.Tensor])
    assert_type(flashmask.masks.shared_question([(2, [1, 1]), (1, [1])]), Mask)
    both = flashmask.masks.intersect(mask, flashmask.masks.sliding_window(6, 6, 2))
    assert_type(flashmask.masks.crop(both.to("cpu"), (0, 3)).replace(causal=True).seqlen_q, int)
    assert_type(flashmask.masks.from_dense(both.to_dense()).stats().full_tiles, int)
    assert_type(both.bounds, torch.Tensor | None)
    assert_type(flashmask.__version__, str)
    try:
        flashmask.masks.from_dense(torch.eye(6).bool().logical_not())
    except (flashmask.UnrepresentableMaskError, flashmask.UnsupportedError) as error:
        print(error)


def wrong_use(q: torch.Tensor, array: "np.ndarray[tuple[int], np.dtype[np.float32]]") -> None:
    flashmask.flashmask_attention(q, q, array)  # type: ignore[call-overload]
    flashmask.flashmask_attention(q, q)  # type: ignore[call-overload]
    flashmask.flashmask_attention(q, q, q, casual=True)  # type: ignore[call-overload]
    flashmask.flashmask_attention(q, q, q, layout="sbhd")  # type: ignore[call-overload]
    flashmask.flashmask_attention(q, q, q, return_softmax_lse=True).sum()  # type: ignore[attr-defined]
    flashmask.flashmask_varlen_func(q, q, q, None, None)  # type: ignore[call-overload]
    flashmask.scaled_dot_product_attention(q, q, q, scale="1")  # type: ignore[arg-type]
    flashmask.merge_attention(q, 1)  # type: ignore[arg-type]
    flashmask.dropout_mask(q, 0.5)  # type: ignore[call-arg]
    flashmask.explain(q, q, q, sink=0.0)  # type: ignore[arg-type]
    flashmask.masks.document(seqlens=6)  # type: ignore[arg-type]
    flashmask.masks.causal(6).to_dense(1)  # type: ignore[call-arg]
    flashmask.Mask(6, 6, window="2")  # type: ignore[arg-type]
    flashmask.attend  # type: ignore[attr-defined]  # noqa: B018
