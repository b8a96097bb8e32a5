# SPDX-License-Identifier: Apache-2.0
"""Text that every Python brings along, cut into records, packed by `flashmask run`, and read back as batches."""

import json
import math
import random
import struct
import subprocess
from dataclasses import dataclass

import torch
from flashmask import Mask, masks

TORCH_TYPES = {"I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool}


def _node(text, *branches):
    return {"text": text, "branches": list(branches)}


# Task: how many pieces of one text make a record, and the record. Later pieces stand in for worse answers.
RECORDS = {
    "sft": (2, lambda prompt, response: {"prompt": prompt, "response": response}),
    "dpo": (3, lambda prompt, chosen, rejected: {"prompt": prompt, "chosen": chosen, "rejected": rejected}),
    "rm": (5, lambda prompt, *answers: {"prompt": prompt, "answers": list(answers)}),
    "tree": (
        7,
        lambda root, a, aa, ab, b, ba, bb: _node(root, _node(a, _node(aa), _node(ab)), _node(b, _node(ba), _node(bb))),
    ),
}


# --- Writing ----------------------------------------------------------------------------------------


def texts():
    """Python's help texts, in the order of their names."""
    from pydoc_data import topics  # only writing needs it, and a Python cut to size may lack it

    return [text for _, text in sorted(topics.topics.items())]


def pieces(text, longest, lengths):
    """`text` in pieces of a fourth of `longest` to `longest` characters; what is left over at the end is dropped."""
    begin = 0
    while (end := begin + lengths.randint(longest // 4, longest)) <= len(text):
        yield text[begin:end]
        begin = end


def records(task, seqlen, sequences, seed=0):
    """Records of Python's help texts, about `sequences` * `seqlen` tokens in all; fewer where the texts end before.

    A piece has at most seqlen / 16 characters: the longest record, a tree, then fills less than half a sequence.
    """
    count, make = RECORDS[task]
    lengths, left = random.Random(seed), seqlen * sequences
    for text in texts():
        cut = list(pieces(text, seqlen // 16, lengths))
        for first in range(0, len(cut) - count + 1, count):
            chosen = cut[first : first + count]
            left -= sum(len(piece.encode()) + 2 for piece in chosen)
            if left < 0:
                return
            yield make(*chosen)


def pack(task, folder, seqlen, sequences, command):
    """Writes TASK.jsonl and what `flashmask run` makes of it, TASK.safetensors, into `folder`."""
    lines, packed = folder / f"{task}.jsonl", folder / f"{task}.safetensors"
    lines.write_text(
        "".join(json.dumps(record) + "\n" for record in records(task, seqlen, sequences)), encoding="utf-8"
    )
    little = ["--limit-sequences", "1", "--dense-seconds", "0"]  # the file has all sequences all the same
    subprocess.run(
        [command, "run", "--input", lines, "--task", task, "--seqlen", str(seqlen), *little, "--out", packed],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return packed


# --- Reading ----------------------------------------------------------------------------------------


def load(path):
    """{name: tensor} of a packed file, in host memory. docs/run.md says what is in it."""
    data = bytearray(path.read_bytes())
    (size,) = struct.unpack_from("<Q", data)
    header, begin = json.loads(data[8 : 8 + size]), 8 + size
    header.pop("__metadata__", None)

    def tensor(dtype, shape, data_offsets):
        return torch.frombuffer(
            data, dtype=TORCH_TYPES[dtype], count=math.prod(shape), offset=begin + data_offsets[0]
        ).reshape(shape)

    return {name: tensor(**entry) for name, entry in header.items()}


@dataclass(frozen=True)
class Batch:
    """input_ids, position_ids and labels int64 [batch, seqlen] and the mask of their documents, on one device."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    mask: Mask


def batches(path, size, device):
    """The sequences of a packed file in Batches of `size`; those left over are dropped."""
    packed = load(path)
    sequences = packed["input_ids"].shape[0]
    if sequences < size:
        raise ValueError(f"{path} has {sequences} sequences, which is less than a batch of {size}")
    return [batch(packed, slice(first, first + size), device) for first in range(0, sequences - size + 1, size)]


def batch(packed, rows, device):
    """The Batch of some rows of a packed file."""
    ids, positions, labels = (
        packed[name][rows].to(device, torch.int64) for name in ("input_ids", "position_ids", "labels")
    )
    return Batch(
        ids, positions, labels, masks.from_startend(packed["startend_row_indices"][rows].to(device), causal=True)
    )
