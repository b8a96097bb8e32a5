# SPDX-License-Identifier: Apache-2.0
"""docs/families.md against the library: every family, and the parameters that each takes."""

import ctypes as C
import re
from pathlib import Path

import pytest
from flashmask import capi

PAGE = (Path(__file__).resolve().parents[2] / "docs/families.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
DOCUMENTS = ["seqlen", "cu_seqlens", "seqlens", "doc_ids", "position_ids"]


class Parameter(C.Structure):
    _fields_ = [("name", C.c_char_p), ("vector", capi.Tensor), ("number", C.c_int64)]


class Parameters(C.Structure):
    _fields_ = [("struct_size", C.c_uint32), ("count", C.c_uint32), ("items", C.POINTER(Parameter))]


def refusal(family, **parameters):
    """What fm_mask_shape says of numbers and vectors of one 1."""
    one = (C.c_int64 * 1)(1)
    vector = capi.device_tensor(C.addressof(one), 8, (1,))
    items = (Parameter * len(parameters))(
        *(Parameter(n.encode(), vector if p is None else capi.Tensor(), p or 0) for n, p in parameters.items())
    )
    lib = capi.load()
    given = Parameters(C.sizeof(Parameters), len(parameters), items)
    assert lib.fm_mask_shape(family.encode(), C.byref(given), C.byref(capi.make(capi.Mask)), None) != capi.OK
    return lib.fm_last_error().decode()


def test_the_page_lists_every_family():
    known = refusal("none_of_them").split("known: ")[1].split(", ")
    assert list(ROWS) == known


# Parameters without which a family does not get as far as looking for unknown ones: None is a vector.
NEEDED = {
    "full": dict(seqlen_q=1),
    "causal": dict(seqlen_q=1),
    "sliding_window": dict(seqlen_q=1, left=1),
    "prefix_lm_document": dict(seqlens=None, prefix=None),
    "shared_question": dict(seqlens=None, is_question=None),
    "global_sliding_window": dict(seqlen=1, global_tokens=1, window=1),
    "prefix_lm_causal": dict(seqlen=1, prefix=1),
    "eviction": dict(evicted_at=None),
    "hash_sparse": dict(query_buckets=None, key_buckets=None),
    "prefix_tree": dict(parents=None, lengths=None),
    "prefix_tree_from_intervals": dict(tin=None, tout=None),
    "padding": dict(seqlen_q=1, seqlen_k=1, key_lengths=1),
    "attention_sink_window": dict(sink=1, seqlens=None),
    "block_causal": dict(blocks=1, seqlens=None),
    "causal_with_blocks": dict(block_ids=None),
    "block_diffusion": dict(blocks=1, seqlens=None),
    "eagle3_ttt": dict(steps=1, seqlens=None),
    "dflash": dict(anchors=None, block=1, seqlens=None),
}


@pytest.mark.parametrize("family", [f for f in ROWS if f != "qk_sparse"])
def test_the_page_lists_the_parameters(family):
    known = refusal(family, **NEEDED.get(family, dict(seqlens=None)), no_such=1).split("known: ")[1].split(", ")
    row = re.sub(r"\([^)]*\)", "", ROWS[family])
    listed = []
    for name in (part.strip() for part in row.split(",")):
        documents = DOCUMENTS[1:] if "without seqlen" in name else DOCUMENTS
        listed += documents if name.startswith("*documents*") else [name]
    assert sorted(known) == sorted({*listed, "unfit_out"})
