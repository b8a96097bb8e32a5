# SPDX-License-Identifier: Apache-2.0
"""Packed synthetic documents by the FlashMask paper's recipe (arXiv:2410.01359, A.2.1), as tensors to train on.

A sequence of seqlen tokens holds 1 to 10 documents of random lengths, each at least 128 tokens (reward models: 512),
and behind them a rest of padding of at most as many; reward models have at most 3 documents up to 4K tokens and 4 up
to 8K. A document is a question with 1 (sft, lora), 2 (dpo) or 6 (rm) answers of 10 to 20 % of the question's length
each, which see the question and themselves. For each length 240 sequences are drawn; those that are trained on stand
for all by their place among them in the order of sparsity. The paper calls the last document padding without saying
whether it is among the 1 to 10: here it is not, as a sequence of one document would be nothing else.

The text is no language, but can be learnt: a token is drawn with a probability inverse to its rank, from a part of the
vocabulary that the questions have and another for each answer of a document.
"""

import functools
from typing import NamedTuple

import numpy as np
import torch
from flashmask import masks

ANSWERS = {"sft": 1, "lora": 1, "dpo": 2, "rm": 6}  # of a document, by task
TASKS = tuple(ANSWERS)
SEQUENCES = 240
MOST_DOCUMENTS = 10
LEAST_TOKENS = {"sft": 128, "lora": 128, "dpo": 128, "rm": 512}  # of a document; also the most of padding
# Positions of the trained sequences among the 240 ordered by sparsity, as fractions. The median comes first; each later
# pair is symmetric about it.
PLACES = (0.5, 0.3, 0.7, 0.1, 0.9)
VOCABULARY_PARTS = 1 + max(ANSWERS.values())


class Layout(NamedTuple):
    """Layout of a sequence: documents (question, [answer, ...]) in tokens, then padding."""

    documents: list
    padding: int

    def segments(self):
        """(lengths, is a question) of all questions and answers in their order; padding is a question, too."""
        lengths, questions = [], []
        for question, answers in [*self.documents, *([(self.padding, [])] if self.padding else [])]:
            lengths += [question, *answers]
            questions += [True] + [False] * len(answers)
        return lengths, questions

    def mask(self):
        """The flashmask.Mask, in host memory. With one answer it is the causal document mask."""
        lengths, questions = self.segments()
        return masks.shared_question(seqlens=lengths, is_question=questions)

    def sparsity(self):
        """The share of 128 x 128 tiles that are empty, as the paper counts."""
        stats = self.mask().stats()
        return stats.empty_tiles / stats.tiles


def most_documents(task, seqlen):
    if task == "rm" and seqlen <= 8192:
        return 3 if seqlen <= 4096 else 4
    return MOST_DOCUMENTS


def least_tokens(task, seqlen):
    """Fewest tokens of a document; below the paper's if a sequence is too short for the most documents, as in tests."""
    least = LEAST_TOKENS[task]
    return least if (most_documents(task, seqlen) + 1) * least <= seqlen else min(least, seqlen // 16)


def draw(rng, task, seqlen):
    """A Layout."""
    least = least_tokens(task, seqlen)
    padding = int(rng.integers(0, least + 1))
    count = int(rng.integers(1, min(most_documents(task, seqlen), (seqlen - padding) // least) + 1))
    spare = seqlen - padding - count * least
    cuts = np.sort(rng.integers(0, spare + 1, count - 1))
    lengths = least + np.diff(np.concatenate([[0], cuts, [spare]]))
    return Layout([divided(rng, int(length), ANSWERS[task]) for length in lengths], padding)


def divided(rng, length, answers):
    """A document of `length` tokens in its question and answers.

    Among k answers one of a share s of its question's length has s / (1 + s k) of the document's, if all have as much:
    the paper draws between the values for 10 and 20 %.
    """
    low, high = (share * length / (1 + share * answers) for share in (0.1, 0.2))
    sizes = [max(1, int(size)) for size in rng.uniform(low, high, answers)]
    return length - sum(sizes), sizes


@functools.cache
def layouts(task, seqlen, count=SEQUENCES):
    """[(sparsity, Layout)] of `count` sequences, by sparsity. SFT and LoRA have the same."""
    rng = np.random.default_rng([ANSWERS[task], seqlen])
    drawn = [draw(rng, task, seqlen) for _ in range(count)]
    return sorted(((layout.sparsity(), layout) for layout in drawn), key=lambda pair: pair[0])


def chosen(task, seqlen, count=SEQUENCES):
    """The (sparsity, Layout) at PLACES."""
    found = layouts(task, seqlen, count)
    return [found[int(place * len(found))] for place in PLACES]


def even(task, seqlen, length):
    """The Layout of documents of `length` tokens each: for memory, which does not depend on their lengths."""
    rng = np.random.default_rng(0)
    return Layout([divided(rng, length, ANSWERS[task]) for _ in range(seqlen // length)], seqlen % length)


# --- Batches ----------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """A sequence on a device, with all that a loader can know beforehand: a step reads nothing back.

    input_ids, position_ids int64 [1, seqlen]; an answer's positions follow its question's. segments int32 [n] and
    is_question bool [n]: Layout.segments. document and answer int32 [seqlen]: each token's document, and its answer's
    number from 1, or 0 in a question. ends int32 [documents + 1], 0 and where each ends, padding last; longest: the
    longest of them in tokens. sources int64 [targets]: the tokens that answers' tokens are predicted from; targets
    int64 [targets]: those tokens; of_answer int64 [targets]: which answer of the sequence they are of. last int64
    [documents, answers]: each answer's last token.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: torch.Tensor
    is_question: torch.Tensor
    document: torch.Tensor
    answer: torch.Tensor
    ends: torch.Tensor
    longest: int
    sources: torch.Tensor
    targets: torch.Tensor
    of_answer: torch.Tensor
    last: torch.Tensor

    def to(self, device):
        return Batch(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in self))

    @property
    def seqlen(self):
        return self.input_ids.shape[1]


def batch_of(layout, vocabulary, seed):
    """The Batch of a Layout, in host memory."""
    lengths, questions = layout.segments()
    begins = np.cumsum([0, *lengths[:-1]])
    document = np.cumsum(questions) - 1
    first = np.flatnonzero(questions)  # segment of each document's question
    number = np.arange(len(lengths)) - first[document]
    position = np.arange(sum(lengths)) - np.repeat(begins, lengths)
    position += np.repeat(np.where(number > 0, np.array(lengths)[first[document]], 0), lengths)
    ids = drawn_tokens(np.repeat(number, lengths), vocabulary, seed)
    is_answer = np.flatnonzero(number > 0)
    asked_at = begins[first[document]] + np.array(lengths)[first[document]] - 1  # the last token of its question
    sources = [np.r_[asked_at[n], begins[n] : begins[n] + lengths[n] - 1] for n in is_answer]
    targets = [ids[begins[n] : begins[n] + lengths[n]] for n in is_answer]
    ends = np.r_[begins[first], sum(lengths)]
    tensors = {
        "input_ids": ids[None],
        "position_ids": position[None],
        "segments": np.array(lengths, np.int32),
        "is_question": np.array(questions),
        "document": np.repeat(document, lengths).astype(np.int32),
        "answer": np.repeat(number, lengths).astype(np.int32),
        "ends": ends.astype(np.int32),
        "sources": np.concatenate(sources),
        "targets": np.concatenate(targets),
        "of_answer": np.repeat(np.arange(len(is_answer)), np.array(lengths)[is_answer]),
        "last": (begins + lengths - 1)[is_answer].reshape(len(layout.documents), -1),
    }
    made = {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in tensors.items()}
    return Batch(**made, longest=int(np.diff(ends).max()))


def drawn_tokens(part, vocabulary, seed):
    """int64 tokens, each from its part of the vocabulary."""
    ranks = vocabulary // VOCABULARY_PARTS
    uniform = np.random.default_rng(seed).uniform(size=len(part))
    return np.minimum((ranks + 1) ** uniform - 1, ranks - 1).astype(np.int64) * VOCABULARY_PARTS + part
