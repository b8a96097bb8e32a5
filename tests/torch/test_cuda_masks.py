# SPDX-License-Identifier: Apache-2.0
"""Masks in device memory. Needs FLASHMASK_TEST_DEVICE=cuda."""

import random

import flashmask
import pytest
import torch
from builder_calls import LISTS, TRACED
from devices import DEVICE, cuda_only
from flashmask import UnrepresentableMaskError, masks
from mask_cases import draw_mask
from test_attention import FAMILIES

pytestmark = cuda_only


def same(on_device, on_host):
    """Asserts that the mask on the device equals the host's bit for bit."""
    assert (on_device.seqlen_q, on_device.seqlen_k, on_device.causal, on_device.window, on_device.q_offset) == (
        on_host.seqlen_q,
        on_host.seqlen_k,
        on_host.causal,
        on_host.window,
        on_host.q_offset,
    )
    for name in ("bounds", "block_mask"):
        a, b = getattr(on_device, name), getattr(on_host, name)
        assert (a is None) == (b is None)
        if a is not None:
            assert a.device == DEVICE and a.dtype == b.dtype and torch.equal(a.cpu(), b)


def values_for(name, seed):
    """Contents that the builder takes."""
    return torch.randint(0, 4, (9,), generator=torch.Generator().manual_seed(seed)) + (name == "qk_sparse")


@pytest.mark.parametrize("name", TRACED)
def test_builders_of_tensors(name):
    for seed in range(5):
        values = values_for(name, seed)
        same(TRACED[name](values.to(DEVICE)), TRACED[name](values))


@pytest.mark.parametrize("name", TRACED)
def test_builders_wait_for_nothing(name):
    values = values_for(name, 0).to(DEVICE)
    TRACED[name](values)
    torch.cuda.set_sync_debug_mode("error")
    try:
        TRACED[name](values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", LISTS)
def test_builders_of_lists(name):
    same(LISTS[name](DEVICE), LISTS[name]("cpu"))


@pytest.mark.parametrize("build", [masks.causal_document, masks.document, masks.causal_blockwise])
def test_builders_of_long_documents(build):
    lengths = torch.randint(0, 300, (3, 40))
    ids = torch.repeat_interleave(torch.arange(40), lengths[0])
    seqlen = 40 * 300
    same(build(seqlens=lengths.to(DEVICE), seqlen=seqlen), build(seqlens=lengths, seqlen=seqlen))
    same(build(doc_ids=ids.to(DEVICE)), build(doc_ids=ids))


@pytest.mark.parametrize("seed", range(20))
def test_other_forms_of_a_mask(seed):
    host = draw_mask(random.Random(seed), longest=300)
    mask = host.to(DEVICE)
    assert torch.equal(mask.to_dense().cpu(), host.to_dense()) and mask.stats() == host.stats()
    if host.seqlen_q and host.seqlen_k:
        assert mask.plot().replace(str(mask.device), str(host.device)) == host.plot()
        ours, theirs = mask.to_block_mask(), host.to_block_mask()
        assert torch.equal(ours.to_dense().cpu(), theirs.to_dense()) and torch.equal(
            ours.full_kv_num_blocks.cpu(), theirs.full_kv_num_blocks
        )
    if host.block_mask is None:
        assert startend(mask) == startend(host)


def startend(mask):
    """to_startend as numbers, or the message of the error."""
    try:
        bounds, causal = mask.to_startend()
        return bounds.tolist(), causal
    except UnrepresentableMaskError as error:
        return str(error)


@pytest.mark.parametrize("family", FAMILIES)
def test_from_dense(family):
    visible = FAMILIES[family]().to_dense()
    same(masks.from_dense(visible.to(DEVICE)), masks.from_dense(visible))


def test_from_dense_that_needs_lists():
    visible = torch.ones(40, 40, dtype=torch.bool, device=DEVICE)
    visible[[3, 6, 9], 17] = False
    mask = masks.from_dense(visible)
    assert mask.intervals.device == DEVICE and mask.intervals.tolist() == [[3, 4], [6, 7], [9, 10]]
    assert torch.equal(mask.to_dense()[0, 0], visible)


def test_moves():
    mask = masks.causal_document(seqlens=[3, 4])
    there = mask.cuda()
    same(there, mask)
    assert there.to(DEVICE) is there and there.to("cuda") is there
    assert there.plan() is there.plan("cuda") is there.plan(DEVICE) and there.plan().device == DEVICE
    same(flashmask.masks.causal_document(seqlens=[3, 4], device="cuda"), mask)
    assert repr(there).splitlines()[0] == repr(mask).splitlines()[0].replace("cpu", str(DEVICE))


@pytest.mark.parametrize("loader", [False, True])
def test_moves_from_pinned_memory_wait_for_nothing(loader):
    mask = masks.causal_document(seqlens=[3, 4])
    pinned = (
        next(iter(torch.utils.data.DataLoader([mask], batch_size=None, collate_fn=lambda x: x, pin_memory=True)))
        if loader
        else mask.pin_memory()
    )
    assert pinned.bounds.is_pinned() and torch.equal(pinned.bounds, mask.bounds)
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = pinned.to(DEVICE, non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    same(there, mask)
