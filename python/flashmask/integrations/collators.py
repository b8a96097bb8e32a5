# SPDX-License-Identifier: Apache-2.0
"""Batches without padding and without repeated prefixes, for the attention of transformers.py.

    PackedCollator         examples one after the other in one sequence: pretraining, SFT
    SharedPrefixCollator   beside the batch of another collator, its sequences as one prefix tree: DPO, reward models,
                           rollouts. transformers.share_prefixes(model) makes a model run on the tree
    prefix_tree, log_probs the same by hand, for a training loop of your own

All is made in host memory; a Mask moves with the batch (`to`), as DataLoader, accelerate and TRL move tensors.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .. import masks
from .._core import arguments
from .._core.annotations import Flags, Integers
from ..torch import tensor_arguments

IGNORED = -100  # the label of a token that is not trained on


class PackedCollator:
    """Examples as documents of one sequence, in what transformers' models and flash-attn's collator call them.

    Returns {input_ids, labels, position_ids, cu_seq_lens_q, cu_seq_lens_k, use_cache}.

    Each example is a dict with `input_ids`, a list, array or tensor of integers, which may be empty, and may have

    attention_mask   1, and 0 for padding at either end, which is left out
    seq_lengths      lengths of the documents that the example holds, as TRL's packing leaves them; the default is one
    labels           each token's label, -100 if it is not trained on; the default is input_ids
    completion_mask  1, and 0 for tokens that are not trained on, whatever their labels; assistant_masks: the same

    None counts as absent.

    The first token of a document is never trained on, as nothing predicts it, so the model's own loss (the mean over
    labels) equals the padded batch's. Raises ValueError for any other key with numbers for each token, which would be
    ignored, and TypeError or ValueError if a value is none of these.

    length: the length to fill the sequence up to, so that all batches have one shape; None: as long as the examples.
    Filling tokens are `pad_token_id`, documents of their own and not trained on. ValueError if the examples are longer.

    Tensors are int64 [1, tokens], but cu_seq_lens_q and _k int32 [documents + 1], 0 and the documents' ends; with
    `length` they are [length + 1], the last end repeated. From them the attention of transformers.py keeps documents
    apart in every model, in addition to the model's windows. (Positions that restart suffice for many models, but not
    all, and for none that makes a cache, so use_cache is False.)
    """

    def __init__(self, length: int | None = None, pad_token_id: int = 0) -> None:
        self.length = None if length is None else arguments.length("length", length)
        self.pad_token_id = arguments.integer("pad_token_id", pad_token_id, 0)

    def __call__(self, examples: Iterable[dict[str, Any]]) -> dict[str, Any]:
        documents = [document for n, example in enumerate(examples) for document in _documents(n, example)]
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
        if self.length is not None:
            ends = ends.unique()  # empty documents would need room
            ends = torch.cat([ends, ends[-1:].expand(self.length + 1 - len(ends))])
        return ends.to(torch.int32)


_LOSS_MASKS = ("completion_mask", "assistant_masks")
_KNOWN = ("input_ids", "labels", "attention_mask", "seq_lengths", *_LOSS_MASKS)


def _documents(n, example):
    """[(ids, labels), ...] of an example, int64 tensors of one length each."""
    if not hasattr(example, "keys"):
        raise TypeError(f"example {n} is {arguments.describe(example)}; it must be a dict with input_ids")
    given = {name: example[name] for name in example.keys() if example[name] is not None}
    if "input_ids" not in given:
        raise ValueError(f"input_ids of example {n} is missing; it has {', '.join(map(str, example.keys()))}")
    ids = _integers("input_ids", n, given["input_ids"])
    _refuse_unknown(n, given, len(ids))
    labels = _integers("labels", n, given.get("labels", ids), len(ids)).clone()
    for name in _LOSS_MASKS:
        if name in given:
            labels[~_flags(name, n, given[name], len(ids))] = IGNORED
    if "attention_mask" in given:
        shown = _flags("attention_mask", n, given["attention_mask"], len(ids))
        _check_padding(f"attention_mask of example {n}", shown)
        ids, labels = ids[shown], labels[shown]
    seqlens = [len(ids)]
    if "seq_lengths" in given:
        seqlens = _integers("seq_lengths", n, given["seq_lengths"]).tolist()
        if min(seqlens, default=0) < 0 or sum(seqlens) != len(ids):
            raise ValueError(
                f"seq_lengths of example {n} is {seqlens}; they must be at least 0 and add up to its {len(ids)} tokens"
            )
    documents = list(zip(ids.split(seqlens), labels.split(seqlens)))
    for _, of_document in documents:
        of_document[:1] = IGNORED
    return documents


def _integers(name, n, values, tokens=None):
    """An int64 tensor [tokens] of example n's values."""
    try:
        values = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} of example {n} is {arguments.describe(values)}: {error}; it must be integers"
        ) from None
    is_float = values.dtype.is_floating_point and values.numel() > 0  # torch makes floats of an empty list
    if values.ndim != 1 or is_float or values.dtype == torch.bool or values.dtype.is_complex:
        raise ValueError(f"{name} of example {n} is {values.dtype} {list(values.shape)}; it must be integers [tokens]")
    _check_count(name, n, values, tokens)
    return values.to(torch.int64)


def _flags(name, n, values, tokens):
    """A bool tensor [tokens] of example n's values."""
    try:
        values = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} of example {n} is {arguments.describe(values)}: {error}; it must be 0 and 1") from None
    _check_count(name, n, values, tokens)
    _check_flags(f"{name} of example {n}", values)
    return values == 1


def _check_count(name, n, values, tokens):
    if tokens is not None and values.shape != (tokens,):
        raise ValueError(f"{name} of example {n} has {list(values.shape)} elements; its input_ids {[tokens]}")


def _check_flags(name, values):
    if not ((values == 0) | (values == 1)).all():
        raise ValueError(f"{name} has other values than 0 and 1; documents are told by seq_lengths")


def _check_padding(name, shown):
    """ValueError unless what is not shown [..., tokens] is at the ends."""
    begins = torch.nn.functional.pad(shown, (1, 0))
    if (begins.int().diff(dim=-1) == 1).sum(-1).gt(1).any():
        raise ValueError(f"{name} is 0 between tokens that it shows; padding must be at the ends")


def _refuse_unknown(n, given, tokens):
    """ValueError for a key of numbers for each token that nothing here heeds."""
    for name, value in given.items():
        if name not in _KNOWN and tokens > 0 and _is_per_token(value, tokens):
            raise ValueError(
                f"{name} of example {n} has a number for each token, and would be ignored; leave it out of the "
                f"examples. Known are {', '.join(_KNOWN)}"
            )


def _is_per_token(value, tokens):
    if hasattr(value, "shape"):
        return len(value.shape) > 0 and value.shape[0] == tokens
    if not isinstance(value, (list, tuple)) or len(value) != tokens:
        return False
    return all(isinstance(x, (bool, int, float, list, tuple)) or hasattr(x, "shape") for x in value)


def _filled(length, tokens):
    if length is not None and tokens > length:
        raise ValueError(f"the batch has {tokens} tokens; length is {length}")
    return tokens if length is None else length


def _row(parts, filled, value):
    return torch.cat([torch.empty(0, dtype=torch.int64), *parts, torch.full((filled,), value)]).long()[None]


# --- Prefix trees ---------------------------------------------------------------------------------


# Inputs of a model's layers, beside input_ids and attention_mask, that are by sequences and not by their tree.
NOT_OF_TREES = (
    "inputs_embeds",
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "seq_idx",
    "pixel_values",
)


class SharedPrefixCollator:
    """The batch of `collator` with its sequences as a prefix tree beside it, as `shared_prefixes`: see prefix_tree().

    collator: of any trainer, as TRL's DataCollatorForPreference; its batch has input_ids [sequences, tokens] and, if
    they are padded, attention_mask. With transformers.share_prefixes(model) the model's layers run on the tree; heads,
    loss and a trainer's metrics use the unchanged batch. Raises ValueError if the batch has other inputs for the
    layers, such as position_ids or token_type_ids, which a tree has no place for.
    """

    def __init__(self, collator: Callable[[Any], Any], length: int | None = None) -> None:
        if not callable(collator):
            raise TypeError(f"collator is {arguments.describe(collator)}; it must be a function of a list of examples")
        self.collator, self.length = collator, length

    def __call__(self, examples: Any) -> Any:
        batch = self.collator(examples)
        if batch.get("input_ids") is None:
            raise ValueError(f"input_ids is missing in the collator's batch; it has {', '.join(batch.keys())}")
        for name in NOT_OF_TREES:
            if batch.get(name) is not None:
                raise ValueError(f"{name} is in the collator's batch; a prefix tree has no place for it")
        batch["shared_prefixes"] = prefix_tree(batch["input_ids"], batch.get("attention_mask"), length=self.length)
        return batch


def prefix_tree(
    input_ids: Integers,
    attention_mask: Flags | Integers | None = None,
    *,
    length: int | None = None,
    pad_token_id: int = 0,
) -> dict[str, Any]:
    """Sequences as one sequence in which each common prefix stands once: {input_ids, position_ids, mask, places}.

    input_ids: integers [sequences, tokens]; attention_mask: likewise, 0 where there is padding, on either side. Both
    in host memory.

    Returns a dict: input_ids and position_ids int64 [1, n], the tree's tokens, each sequence's own after the shared
    ones, and their places in their sequences; mask, by masks.prefix_tree_from_intervals, under which each token sees
    those before it in its own sequence; places int64 [sequences, tokens], where each token of input_ids is in the tree,
    0 for padding. For an output `out` [1, n, ...] of the tree, out[0, places] is the sequences' output.

    length: the length to fill the tree up to with `pad_token_id`, so that all batches have one shape; by default it is
    not filled.
    """
    tokens: torch.Tensor = tensor_arguments.integers("input_ids", input_ids, "cpu", "[sequences, tokens]")
    if attention_mask is None:
        shown = torch.ones_like(tokens, dtype=torch.bool)
    else:
        if isinstance(attention_mask, torch.Tensor):
            _check_flags("attention_mask", attention_mask)
        shown = tensor_arguments.flags("attention_mask", attention_mask)
    if tokens.ndim != 2 or shown.shape != tokens.shape:
        raise ValueError(
            f"input_ids is {list(tokens.shape)} and attention_mask {list(shown.shape)}; "
            "both must be [sequences, tokens]"
        )
    _check_padding("attention_mask", shown)
    sequences = [ids[here].tolist() for ids, here in zip(tokens, shown)]
    ids, depth, ends, paths = _tree(sequences)
    places = torch.zeros_like(tokens)
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


def log_probs(logits: torch.Tensor, tree: dict[str, Any], input_ids: torch.Tensor) -> torch.Tensor:
    """The log probability of each token but the first of its sequence: float32 or float64 [sequences, tokens - 1].

    logits: [1, n, vocabulary], of prefix_tree's sequence; tree: its result; input_ids: its argument. Values at padding,
    and behind it, mean nothing.
    """
    places = tree["places"]
    if input_ids.shape != places.shape or logits.shape[:2] != tree["input_ids"].shape:
        raise ValueError(
            f"logits is {list(logits.shape)} and input_ids {list(input_ids.shape)}; "
            f"the tree has {tree['input_ids'].shape[1]} tokens and {list(places.shape)} places"
        )
    # Normalizes the tree's tokens: they are fewer than the sequences'.
    normalized = logits[0].to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    return normalized[places[:, :-1], input_ids[:, 1:]]
