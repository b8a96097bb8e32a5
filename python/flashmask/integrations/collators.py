# SPDX-License-Identifier: Apache-2.0
"""Batches without padding and without repeated prefixes, for the attention of transformers.py.

    PackedCollator         examples one after the other in one sequence: pretraining, SFT
    SharedPrefixCollator   beside the batch of another collator, its sequences as one prefix tree: DPO, reward models,
                           rollouts. transformers.share_prefixes(model) makes a model run on the tree
    prefix_tree, log_probs the same by hand, for a training loop of your own

All is made in host memory; a Mask moves with the batch (`to`), as DataLoader, accelerate and TRL move tensors.
"""

import torch

from .. import _arguments, masks

IGNORED = -100  # the label of a token that is not trained on


class PackedCollator:
    """Examples as documents of one sequence, in what transformers' models and flash-attn's collator call them.

    Returns {input_ids, labels, position_ids, cu_seq_lens_q, cu_seq_lens_k, use_cache}.

    Each example is a dict with `input_ids`, a list or tensor of integers, and `labels` of the same length. Without
    labels it may have `completion_mask`, 1 for each token that is trained on; without both all are. The first token of
    an example is never trained on, as nothing predicts it, so the model's own loss (the mean over labels) is that of
    the padded batch.

    length: what the sequence is filled up to, so that all batches have one shape; None: as long as the examples. Tokens
    that fill it are `pad_token_id`, documents of their own and not trained on. ValueError if the examples are longer.

    Tensors are int64 [1, tokens], but cu_seq_lens_q and _k int32 [documents + 1], 0 and the documents' ends; with
    `length` they are [length + 1], the last end repeated. From them the attention of transformers.py keeps documents
    apart in every model, beside the model's own windows. (Positions that begin anew tell many models, but not all, and
    none that makes a cache, so use_cache is False.)
    """

    def __init__(self, length=None, pad_token_id=0):
        self.length = None if length is None else _arguments.length("length", length)
        self.pad_token_id = _arguments.integer("pad_token_id", pad_token_id, 0)

    def __call__(self, examples):
        documents = [_document(n, example) for n, example in enumerate(examples)]
        seqlens = [len(ids) for ids, _ in documents]
        tokens = sum(seqlens)
        filled = _filled(self.length, tokens) - tokens
        return {
            "input_ids": _row([ids for ids, _ in documents], filled, self.pad_token_id),
            "labels": _row([labels for _, labels in documents], filled, IGNORED),
            "position_ids": _row([torch.arange(n) for n in seqlens], filled, 0),
            "cu_seq_lens_q": (ends := self._ends(seqlens)),
            "cu_seq_lens_k": ends,
            "use_cache": False,
        }

    def _ends(self, seqlens):
        ends = torch.tensor([0, *seqlens]).cumsum(0)
        missing = 0 if self.length is None else max(0, self.length + 1 - len(ends))
        return torch.cat([ends, ends[-1:].expand(missing)]).to(torch.int32)


def _document(n, example):
    """(ids, labels) of an example, int64 tensors of one length."""
    ids = torch.as_tensor(example["input_ids"])
    if ids.ndim != 1 or ids.dtype.is_floating_point:
        raise ValueError(f"input_ids of example {n} is {ids.dtype} {list(ids.shape)}; it must be integers [tokens]")
    name = next((name for name in ("labels", "completion_mask") if name in example), None)
    labels = ids if name is None else torch.as_tensor(example[name])
    if labels.shape != ids.shape:
        raise ValueError(f"{name} of example {n} has {list(labels.shape)} elements; its input_ids {list(ids.shape)}")
    labels = ids.masked_fill(labels == 0, IGNORED) if name == "completion_mask" else labels.clone()
    labels[:1] = IGNORED
    return ids, labels


def _filled(length, tokens):
    if length is not None and tokens > length:
        raise ValueError(f"the batch has {tokens} tokens; length is {length}")
    return tokens if length is None else length


def _row(parts, filled, value):
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts, torch.full((filled,), value)]).long()[None]


# --- Prefix trees ---------------------------------------------------------------------------------


class SharedPrefixCollator:
    """The batch of `collator` with its sequences as a prefix tree beside it, as `shared_prefixes`: see prefix_tree().

    collator: of any trainer, as TRL's DataCollatorForPreference; its batch has input_ids [sequences, tokens] and, if
    they are padded, attention_mask. With transformers.share_prefixes(model) the model's layers run on the tree, and
    everything behind them, so the loss and what a trainer reports, on the batch as it is.
    """

    def __init__(self, collator, length=None):
        if not callable(collator):
            raise TypeError(f"collator is {_arguments.given(collator)}; it must be a function of a list of examples")
        self.collator, self.length = collator, length

    def __call__(self, examples):
        batch = self.collator(examples)
        batch["shared_prefixes"] = prefix_tree(batch["input_ids"], batch.get("attention_mask"), length=self.length)
        return batch


def prefix_tree(input_ids, attention_mask=None, *, length=None, pad_token_id=0):
    """Sequences as one sequence in which each common prefix stands once: {input_ids, position_ids, mask, places}.

    input_ids: integers [sequences, tokens]; attention_mask: likewise, 0 where there is padding, on either side. Both
    in host memory.

    Returns a dict: input_ids and position_ids int64 [1, n], the tree's tokens, a sequence's behind those it shares with
    others, and their places in their sequences; mask, by masks.prefix_tree_from_intervals, under which each token sees
    those before it in its own sequence; places int64 [sequences, tokens], where each token of input_ids is in the tree,
    0 for padding. With an output `out` [1, n, ...] of the tree, out[0, places] is that of the sequences.

    length: what the tree is filled up to with `pad_token_id`, so that all batches have one shape; the default is none.
    """
    input_ids = _arguments.integers("input_ids", input_ids, "cpu", "[sequences, tokens]")
    shown = torch.ones_like(input_ids) if attention_mask is None else _arguments.flags("attention_mask", attention_mask)
    shown = shown.bool()
    if input_ids.ndim != 2 or shown.shape != input_ids.shape:
        raise ValueError(
            f"input_ids is {list(input_ids.shape)} and attention_mask {list(shown.shape)}; "
            "both must be [sequences, tokens]"
        )
    sequences = [ids[here].tolist() for ids, here in zip(input_ids, shown)]
    ids, depth, ends, paths = _tree(sequences)
    places = torch.zeros_like(input_ids)
    places[shown] = torch.tensor([place for path in paths for place in path], dtype=places.dtype)
    filled = _filled(length, len(ids)) - len(ids)
    return {
        "input_ids": _row([torch.tensor(ids, dtype=torch.int64)], filled, pad_token_id),
        "position_ids": _row([torch.tensor(depth, dtype=torch.int64)], filled, 0),
        "mask": masks.prefix_tree_from_intervals(
            torch.arange(len(ids)), torch.tensor(ends, dtype=torch.int64), seqlen=len(ids) + filled
        ),
        "places": places,
    }


def _tree(sequences):
    """(ids, depth, ends, paths): tokens in depth-first order, their subtrees' ends, and each sequence's tokens."""
    ids, depth, ends, paths = [], [], [], [[] for _ in sequences]
    path = before = ()
    # Next to each other in this order are those that share most.
    for n in sorted(range(len(sequences)), key=sequences.__getitem__):
        sequence = sequences[n]
        shared = next((k for k, (a, b) in enumerate(zip(before, sequence)) if a != b), min(len(before), len(sequence)))
        for place in path[shared:]:
            ends[place] = len(ids)
        path = [*path[:shared], *range(len(ids), len(ids) + len(sequence) - shared)]
        ids += sequence[shared:]
        depth += range(shared, len(sequence))
        ends += [0] * (len(sequence) - shared)
        paths[n], before = path, sequence
    for place in path:
        ends[place] = len(ids)
    return ids, depth, ends, paths


def log_probs(logits, tree, input_ids):
    """The log probability of each token but the first of its sequence: float32 or float64 [sequences, tokens - 1].

    logits: [1, n, vocabulary], of prefix_tree's sequence; tree: what it returned; input_ids: what it was given. The
    values at padding, and behind it, mean nothing.
    """
    places = tree["places"]
    if input_ids.shape != places.shape or logits.shape[:2] != tree["input_ids"].shape:
        raise ValueError(
            f"logits is {list(logits.shape)} and input_ids {list(input_ids.shape)}; "
            f"the tree has {tree['input_ids'].shape[1]} tokens and {list(places.shape)} places"
        )
    # Of the tree's tokens, not of the sequences', as these are the larger number.
    normalized = logits[0].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return normalized[places[:, :-1], input_ids[:, 1:]]
