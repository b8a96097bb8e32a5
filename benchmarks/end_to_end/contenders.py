# SPDX-License-Identifier: Apache-2.0
"""The attentions that train beside each other, each by the name that transformers knows it by.

ours      flashmask's integration, the mask as intervals
flex      FlexAttention under torch.compile, with the same mask
varlen    torch's attention over packed sequences; causal documents alone
sdpa      torch's scaled_dot_product_attention under the mask as a matrix of bools, as transformers calls it
dense     ours under the mask as a matrix, which skips nothing
vanilla   matrix products and a softmax, as transformers' eager attention
nothing   no attention at all: sums of query, key and value

A mask is made in every step from what a Batch has on the device.
"""

import functools
import inspect

import torch
from flashmask import masks
from transformers import AttentionInterface


def is_causal_document(batch):
    """True if each document has at most one answer, so that the mask is causal within documents."""
    return batch.last.shape[1] == 1


def _registered(function):
    """The name in transformers of an attention function."""
    name = f"end_to_end_{function.__name__}"
    AttentionInterface.register(name, function)
    return name


class Ours:
    def __init__(self, device):
        from flashmask.integrations.transformers import register

        self.attention = register()

    def mask(self, batch):
        if is_causal_document(batch):
            return masks.causal_document(batch.ends, seqlen=batch.seqlen)
        return masks.shared_question(seqlens=batch.segments, is_question=batch.is_question, seqlen=batch.seqlen)

    def arguments(self, mask):
        return {"attention_mask": mask}

    def tensors(self, mask):
        """All that a mask keeps in memory."""
        plans = [mask.plan()]
        return [x for x in (mask.bounds, *plans) if x is not None]


class Flex:
    def __init__(self, device):
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        is_cuda = torch.device(device).type == "cuda"
        self.attention, self.ids = _registered(_flex_attention), None
        if is_cuda:
            torch._dynamo.config.recompile_limit = 64  # a kernel for each length; beyond the limit it is not compiled
        _flex_attention.call = torch.compile(flex_attention, dynamic=False) if is_cuda else flex_attention
        # In a graph for each length, as one of symbolic length would be another contender at the second.
        create = torch.compile(create_block_mask, dynamic=False) if is_cuda else create_block_mask
        self.create = functools.partial(create, device=device)

    def mask(self, batch):
        # Written into the same tensors, so that the function of the mask stays one, and its kernels compiled.
        if self.ids is None or self.ids[0].shape != batch.document.shape:
            self.ids = batch.document.clone(), batch.answer.clone()
            self.function = _flex_document(*self.ids) if is_causal_document(batch) else _flex_question(*self.ids)
        for mine, new in zip(self.ids, (batch.document, batch.answer)):
            mine.copy_(new)
        return self.create(self.function, None, None, batch.seqlen, batch.seqlen)

    def arguments(self, mask):
        return {"attention_mask": mask}

    def tensors(self, mask):
        return [*self.ids, *(x for x in mask.as_tuple() if isinstance(x, torch.Tensor))]


def _flex_document(document, answer):
    return lambda batch, head, row, key: (row >= key) & (document[row] == document[key])


def _flex_question(document, answer):
    def visible(batch, head, row, key):
        same = (answer[key] == 0) | (answer[row] == answer[key])
        return (row >= key) & (document[row] == document[key]) & same

    return visible


def _flex_attention(module, query, key, value, attention_mask, scaling=None, **others):
    grouped = query.shape[1] != key.shape[1]
    out = _flex_attention.call(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


class Varlen:
    def __init__(self, device):
        self.attention = _registered(_varlen_attention)

    def mask(self, batch):
        return batch.ends, batch.longest

    def arguments(self, mask):
        return {"packed": mask}

    def tensors(self, mask):
        return [mask[0]]


def _varlen_attention(module, query, key, value, attention_mask, packed=None, scaling=None, **others):
    from torch.nn.attention.varlen import varlen_attn

    accepted = inspect.signature(varlen_attn).parameters  # of torch 2.10 to 2.13, which differ
    causal = {"window_size": (-1, 0)} if "window_size" in accepted else {"is_causal": True}
    grouped = query.shape[1] // key.shape[1]
    if "enable_gqa" in accepted:
        causal["enable_gqa"] = grouped > 1
    elif grouped > 1:
        key, value = (x.repeat_interleave(grouped, 1) for x in (key, value))
    ends, longest = packed
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return varlen_attn(query, key, value, ends, ends, longest, longest, **causal)[None], None


ROWS_AT_ONCE = 1024


def dense_matrix(batch):
    """bool [1, 1, seqlen, seqlen], True where a row sees a key."""
    document, answer = batch.document, batch.answer
    place = torch.arange(batch.seqlen, device=document.device)
    matrix = torch.empty((batch.seqlen,) * 2, dtype=torch.bool, device=document.device)
    for first in range(0, batch.seqlen, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        visible = (place[rows, None] >= place) & (document[rows, None] == document)
        visible &= (answer == 0) | (answer[rows, None] == answer)
        matrix[rows] = visible
    return matrix[None, None]


class Sdpa:
    attention = "sdpa"

    def __init__(self, device):
        pass

    def mask(self, batch):
        return dense_matrix(batch)

    def arguments(self, mask):
        return {"attention_mask": mask}

    def tensors(self, mask):
        return [mask]


class Vanilla(Sdpa):
    attention = "eager"

    def mask(self, batch):
        """The bias that is added to the scores."""
        dtype = torch.bfloat16 if batch.document.is_cuda else torch.float32
        visible = dense_matrix(batch)
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(dtype).min
        )


class Dense(Sdpa):
    def __init__(self, device):
        self.attention = _registered(_dense_attention)

    def mask(self, batch):
        """Stores each key's rows contiguously: lanes read a row of keys, then the next row, which is in L1."""
        return super().mask(batch).mT.contiguous().mT

    def arguments(self, mask):
        return {"dense": mask}


def _dense_attention(module, query, key, value, attention_mask, dense=None, **others):
    from benchmarks.training.llama import DenseAttention

    return DenseAttention.apply(*(x.transpose(1, 2) for x in (query, key, value)), dense), None


class Nothing:
    def __init__(self, device):
        self.attention = _registered(_no_attention)

    def mask(self, batch):
        return None

    def arguments(self, mask):
        return {}

    def tensors(self, mask):
        return []


def _no_attention(module, query, key, value, attention_mask, **others):
    """Sums query, key and value, so that all projections are computed and have gradients."""
    seen = (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)
    return (query + seen).transpose(1, 2), None


CONTENDERS = {
    "ours": Ours,
    "flex": Flex,
    "varlen": Varlen,
    "sdpa": Sdpa,
    "dense": Dense,
    "vanilla": Vanilla,
    "nothing": Nothing,
}


def refusal(name, task, device):
    """The reason why a contender takes no part in a task; None if it does."""
    if name == "varlen" and torch.device(device).type != "cuda":
        return "torch's varlen attention runs on CUDA alone"
    if name == "varlen" and task in ("dpo", "rm"):
        return "packed sequences cannot share a question"
    if name == "flex" and torch.device(device).type != "cuda":
        return "FlexAttention has no backward on the CPU"
    return None
