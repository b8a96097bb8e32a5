# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the builders: a mask against a rule over its elements, and against the C++ library's."""

import json
import os
import subprocess

import pytest
import torch
from flashmask import masks

COMMAND = os.environ.get("FLASHMASK_COMMAND")
LENGTHS = [[], [0], [1], [5], [0, 3, 0, 0, 4, 0], [1, 1, 1], [3, 0], [2, 7, 1, 0, 5]]


def draw_lengths(rng, documents=6, longest=9):
    return [rng.choice((0, 1, rng.randint(0, longest))) for _ in range(rng.randint(0, documents))]


def documents_of(lengths):
    """The document of each token."""
    return [n for n, length in enumerate(lengths) for _ in range(length)]


def dense(rows, keys, rule):
    return torch.tensor([[bool(rule(i, j)) for j in range(keys)] for i in range(rows)], dtype=torch.bool).reshape(
        rows, keys
    )


def check(mask, rows, keys, rule, batch=0, head=0):
    got = mask.to_dense()[batch, head]
    want = dense(rows, keys, rule)
    assert torch.equal(got, want), f"{mask}\n{want.int()}"


def from_cpp(family, seqlen, **parameters):
    """The C++ library's mask as a dense matrix [batch, rows, keys], from its vectors or lists as JSON."""
    if not COMMAND:
        pytest.skip("FLASHMASK_COMMAND is not set")
    arguments = [
        f"{name}={','.join(map(str, value)) if isinstance(value, list) else int(value)}"
        for name, value in parameters.items()
    ]
    done = subprocess.run(
        [COMMAND, "show", family, "--seqlen", str(seqlen), "--json", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    mask = json.loads(done.stdout)["mask"]
    keys, lo, hi, offset = mask["seqlen_k"], mask["band"]["lo"], mask["band"]["hi"], mask["q_offset"]

    def hidden(vectors, default, at, i):
        begin, end = (mask.get(name) for name in vectors)
        if begin is None and end is None:
            return False
        return (begin[at] if begin else 0) <= i < (end[at] if end else mask["seqlen_q"])

    def listed(at, i):
        first, last = mask["column_ptr"][at : at + 2] if "column_ptr" in mask else (0, 0)
        ends = mask.get("intervals", [])[2 * first : 2 * last]
        return any(begin <= i < end for begin, end in zip(ends[::2], ends[1::2]))

    def visible(b, i, j):
        at = b * keys + j
        if listed(at + b, i):
            return False
        in_band = (lo is None or lo <= j - i - offset) and (hi is None or j - i - offset <= hi)
        return in_band and not hidden(("lts", "lte"), None, at, i) and not hidden(("uts", "ute"), None, at, i)

    return torch.stack([dense(mask["seqlen_q"], keys, lambda i, j: visible(b, i, j)) for b in range(mask["batch"])])


def check_cpp(mask, family, seqlen, **parameters):
    assert torch.equal(mask.to_dense()[:, 0], from_cpp(family, seqlen, **parameters))


def ways_to_give(lengths):
    """Yields equal documents in every form that can express them."""
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    yield {"seqlens": lengths}
    yield {"seqlens": torch.tensor(lengths, dtype=torch.int32)}
    yield {"cu_seqlens": ends}
    yield {"cu_seqlens": torch.tensor(ends), "seqlen": ends[-1]}
    yield {"doc_ids": torch.tensor(documents_of(lengths), dtype=torch.int64) * 3 % 17}
    yield {"position_ids": [at for length in lengths for at in range(length)]}


def document_rules(doc):
    last = doc[-1] if doc else None
    return {
        masks.causal_document: lambda i, j: doc[i] == doc[j] and j <= i,
        masks.document: lambda i, j: doc[i] == doc[j],
        masks.causal_blockwise: lambda i, j: j <= i and (doc[i] == doc[j] or doc[i] == last),
    }
