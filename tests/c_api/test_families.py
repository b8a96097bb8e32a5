# SPDX-License-Identifier: Apache-2.0
"""docs/families.md against the library: every family, and the parameters that each takes."""

import json
import re
from pathlib import Path

import pytest
from flashmask import capi

PAGE = (Path(__file__).resolve().parents[2] / "docs/families.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE, re.MULTILINE))
DOCUMENTS = ["seqlen", "cu_seqlens", "seqlens", "doc_ids", "position_ids"]


@pytest.fixture(scope="module")
def names():
    """Arguments of each family, in the library's order."""
    status, text = capi.text_of(capi.load().fm_mask_families_json)
    assert status == capi.OK
    return {family["name"]: family["names"] for family in json.loads(text)["families"]}


def test_the_page_lists_every_family(names):
    assert list(ROWS) == list(names)


@pytest.mark.parametrize("family", ROWS)
def test_the_page_lists_the_parameters(names, family):
    row = re.sub(r"\([^)]*\)", "", ROWS[family])
    listed = []
    for name in (part.strip() for part in row.split(",")):
        documents = DOCUMENTS[1:] if "without seqlen" in name else DOCUMENTS
        listed += documents if name.startswith("*documents*") else [name]
    assert sorted(names[family]) == sorted({*listed, "unfit_out"})
