# SPDX-License-Identifier: Apache-2.0
"""Calls of every builder: with a tensor of 9 numbers on any device (TRACED), and with lists (LISTS)."""

import torch
from flashmask import masks

TRACED = {
    "cu_seqlens": lambda x: masks.causal_document(torch.nn.functional.pad(x.cumsum(0), (1, 0)), seqlen=30),
    "seqlens": lambda x: masks.document(seqlens=x, seqlen=30),
    "doc_ids": lambda x: masks.causal_blockwise(doc_ids=x.cumsum(0) // 3),
    "position_ids": lambda x: masks.causal_document(position_ids=x),
    "prefix_lm_document": lambda x: masks.prefix_lm_document(seqlens=x, prefix=x // 2, seqlen=30),
    "shared_question": lambda x: masks.shared_question(
        seqlens=x, is_question=torch.arange(9, device=x.device) % 3 == 0, seqlen=30
    ),
    "global_sliding_window": lambda x: masks.global_sliding_window(x.shape[0], 2, 3, device=x.device),
    "prefix_lm_causal": lambda x: masks.prefix_lm_causal(16, x),
    "qk_sparse": lambda x: masks.qk_sparse(30, torch.stack([x.cumsum(0), x.cumsum(0) + 1], -1)),
    "eviction": lambda x: masks.eviction(x),
    "random_eviction": lambda x: masks.random_eviction(x.shape[0], 3, device=x.device),
    "hash_sparse": lambda x: masks.hash_sparse(x.sort().values, x, True),
    "attention_sink_window": lambda x: masks.attention_sink_window(2, 3, position_ids=x),
    "block_causal": lambda x: masks.block_causal(x, seqlens=x.flip(0), window=2, seqlen=30),
    "block_causal, equal": lambda x: masks.block_causal(3, position_ids=x, window=2),
    "causal_with_blocks": lambda x: masks.causal_with_blocks(x.sort().values - 1, position_ids=x, window=2),
    "block_diffusion": lambda x: masks.block_diffusion(x, seqlens=x.flip(0), seqlen=30)[0],
    "block_diffusion, concatenated": lambda x: masks.block_diffusion(
        3, seqlen=x.shape[0], order="concatenated", device=x.device
    )[0],
    "eagle3_ttt": lambda x: masks.eagle3_ttt(3, position_ids=x),
    "dflash": lambda x: masks.dflash(x.sort().values, 2, seqlens=x, seqlen=30),
    "prefix_tree": lambda x: masks.prefix_tree(torch.arange(-1, 8, device=x.device), x, seqlen=30),
    "prefix_tree, window": lambda x: masks.prefix_tree(torch.arange(-1, 8, device=x.device), x, window=3, seqlen=30),
    "prefix_tree_from_intervals": lambda x: masks.prefix_tree_from_intervals(x[:1] * 0, x[:1], seqlen=9),
    "padding": lambda x: masks.padding(16, 9, x),
    "from_startend": lambda x: masks.from_startend(x[None, None, :, None], True),
}


LISTS = {
    "seqlens": lambda device: masks.causal_document(seqlens=[[2, 0, 3], [1, 0, 0]], device=device),
    "cu_seqlens": lambda device: masks.document([[0, 2, 5], [0, 0, 4]], device=device),
    "position_ids": lambda device: masks.document(position_ids=[0, 1, 0], device=device),
    "groups": lambda device: masks.shared_question([(2, [1, 3]), (4, [])], device=device),
    "prefix_lm_document": lambda device: masks.prefix_lm_document([0, 4], [2], device=device),
    "qk_sparse": lambda device: masks.qk_sparse(9, [(2, 4)], device=device),
    "attention_sink_window": lambda device: masks.attention_sink_window(2, 3, seqlen=9, device=device),
    "block_causal": lambda device: masks.block_causal([2, 3], window=1, device=device),
    "block_causal, equal": lambda device: masks.block_causal(2, seqlen=9, device=device),
    "causal_with_blocks": lambda device: masks.causal_with_blocks([-1, 0, 0, 1, 1], seqlens=[3, 2], device=device),
    "block_diffusion": lambda device: masks.block_diffusion([2, 3], device=device)[0],
    "block_diffusion, equal": lambda device: masks.block_diffusion(2, seqlen=9, order="concatenated", device=device)[0],
    "eagle3_ttt": lambda device: masks.eagle3_ttt(2, seqlen=9, device=device),
    "dflash": lambda device: masks.dflash([0, 3], 2, seqlens=[3, 2], device=device),
    "prefix_tree": lambda device: masks.prefix_tree([-1, 0, 0], [2, 1, 3], device=device),
    "prefix_tree, window": lambda device: masks.prefix_tree([-1, 0, 0], [2, 1, 3], window=2, device=device),
    "prefix_tree_from_intervals": lambda device: masks.prefix_tree_from_intervals([0, 2], [5, 5], device=device),
    "hash_sparse": lambda device: masks.hash_sparse([0, 1], [1, 0], False, device=device),
    "padding": lambda device: masks.padding(4, 4, [3, 1], device=device),
    "eviction": lambda device: masks.eviction([3, 1], device=device),
    "random_eviction": lambda device: masks.random_eviction(9, 1, device=device),
    "global_sliding_window": lambda device: masks.global_sliding_window(9, 1, 1, device=device),
    "prefix_lm_causal": lambda device: masks.prefix_lm_causal(9, 1, device=device),
}
