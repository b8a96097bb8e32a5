#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Loads a file of `flashmask run --out` with the safetensors package and checks it.

usage: check_safetensors.py FILE      exit status: 0 all is well, 1 it is not (the reasons are printed)

Names, types, shapes and metadata must be those of docs/run.md, and the tensors must agree with each other: this is
a second implementation of the rules, in numpy.
"""

import sys

import numpy as np
import safetensors
import safetensors.numpy

BEGIN, END, PAD, ANSWER = 256, 257, 258, 259
NODE_COLUMNS = ["segment", "node", "parent", "sequence", "begin", "end"]


def check_tensors(tensors, task):
    """Yields what is wrong with names, types and shapes."""
    shared = task in ("dpo", "rm")
    types = {
        "input_ids": np.int32,
        "position_ids": np.int32,
        "labels": np.int64,
        "loss_mask": np.bool_,
        "startend_row_indices": np.int32,
        "segment_ids": np.int32,
    }
    if shared:
        types["answer_ids"] = np.int32
    if task == "tree":
        types["node_ids"] = types["nodes"] = np.int32
    if set(tensors) != set(types):
        yield f"the tensors are {sorted(tensors)}, expected {sorted(types)}"
        return
    sequences, seqlen = tensors["input_ids"].shape
    for name, dtype in types.items():
        shape = (sequences, 1, seqlen, 1) if name == "startend_row_indices" else (sequences, seqlen)
        if name == "nodes":
            shape = (len(tensors[name]), len(NODE_COLUMNS))
        if tensors[name].dtype != dtype or tensors[name].shape != shape:
            yield f"{name} is {tensors[name].dtype} {tensors[name].shape}, expected {np.dtype(dtype)} {shape}"


def check_metadata(metadata, tensors):
    sequences, seqlen = tensors["input_ids"].shape
    expected = {
        "format": "flashmask-packed",
        "format_version": "1",
        "tokenizer": "bytes",
        "vocabulary": "260",
        "begin_token": str(BEGIN),
        "end_token": str(END),
        "pad_token": str(PAD),
        "answer_token": str(ANSWER),
        "seqlen": str(seqlen),
        "tokens": str(int((tensors["segment_ids"] >= 0).sum())),
        "documents": str(int(tensors["segment_ids"].max()) + 1),
        "mask": "startend_row_indices, causal",
    }
    if "nodes" in tensors:
        expected["node_columns"] = ", ".join(NODE_COLUMNS)
    for key, value in expected.items():
        if metadata.get(key) != value:
            yield f"metadata {key} is {metadata.get(key)!r}, expected {value!r}"
    if not metadata.get("source"):
        yield "metadata source is missing"
    if sequences == 0:
        yield "there are no sequences"


def visible_by_documents(segments, answers):
    """Row i sees key j: same document, not later, and j in the question or in i's own answer."""
    index = np.arange(len(segments))
    visible = (index[None, :] <= index[:, None]) & (segments[:, None] == segments[None, :]) & (segments[:, None] >= 0)
    if answers is not None:
        visible &= (answers[None, :] == 0) | (answers[None, :] == answers[:, None])
    return visible


def check_nodes(tensors, s):
    """Yields where the table of nodes and sequence s disagree: each token's node, positions along paths, visibility."""
    visible = np.zeros((tensors["input_ids"].shape[1],) * 2, dtype=bool)
    node_ids = np.full(visible.shape[0], -1)
    paths = {}
    for segment, node, parent, _, begin, end in tensors["nodes"][tensors["nodes"][:, 3] == s].tolist():
        paths[segment, node] = path = paths.get((segment, parent), []) + list(range(begin, end))
        if (parent < 0) != (node == 0) or (parent >= 0 and (segment, parent) not in paths):
            yield f"node {node} of tree {segment} has the parent {parent}"
        if (tensors["segment_ids"][s, begin:end] != segment).any():
            yield f"node {node} of tree {segment} has tokens of another document"
        if not np.array_equal(tensors["position_ids"][s, path], np.arange(len(path))):
            yield f"the positions on the way to node {node} of tree {segment} are not contiguous"
        node_ids[begin:end] = node
        for t in range(begin, end):
            visible[t, [p for p in path if p <= t]] = True
    if not np.array_equal(node_ids, tensors["node_ids"][s]):
        yield "nodes and node_ids disagree"
    if not np.array_equal(visible, visible_by_indices(tensors["startend_row_indices"][s, 0, :, 0])):
        yield "startend_row_indices and the nodes disagree"


def visible_by_indices(lts):
    index = np.arange(len(lts))
    return (index[None, :] <= index[:, None]) & (index[:, None] < lts[None, :])


def check_sequence(tensors, s):
    """Yields what is wrong with sequence s."""
    get = lambda name: tensors[name][s]
    tokens, segments, positions, labels = get("input_ids"), get("segment_ids"), get("position_ids"), get("labels")
    answers = get("answer_ids") if "answer_ids" in tensors else None
    padding = segments < 0
    if not np.array_equal(padding, tokens == PAD):
        yield "segment_ids and input_ids disagree on what is padding"
    if padding.any() and not padding[np.argmax(padding) :].all():
        yield "padding is not at the end"
    if (np.diff(segments[~padding]) < 0).any():
        yield "documents are out of order"
    if "nodes" in tensors:
        answers = get("node_ids") + 1  # labels must stay inside of a node
        yield from check_nodes(tensors, s)
    elif not np.array_equal(
        visible_by_documents(segments, answers), visible_by_indices(get("startend_row_indices")[0, :, 0])
    ):
        yield "startend_row_indices and the documents disagree"
    if not np.array_equal(get("loss_mask"), labels != -100):
        yield "loss_mask and labels disagree"
    for t in np.flatnonzero(labels != -100):
        same = (
            t + 1 < len(tokens)
            and segments[t] == segments[t + 1]
            and (answers is None or answers[t] == answers[t + 1] > 0)
        )
        if not same or labels[t] != tokens[t + 1] or padding[t]:
            yield f"label {t} is not the next token of the same document or answer"
            break
    if not (positions[padding] == 0).all() or not (positions[tokens == BEGIN] == 0).all():
        yield "position_ids do not begin with 0"


def problems(path):
    tensors = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    found = list(check_tensors(tensors, metadata.get("task")))
    if found:
        return found
    found = list(check_metadata(metadata, tensors))
    for s in range(tensors["input_ids"].shape[0]):
        found += [f"sequence {s}: {problem}" for problem in check_sequence(tensors, s)]
    return found


def main():
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 1
    found = problems(sys.argv[1])
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
