# SPDX-License-Identifier: Apache-2.0
"""The run of decode on the CPU backend: its cells, what is handed to peers, for which functions of their interfaces in
plain PyTorch stand in, its bars and its page. Nothing is timed."""

import json
import math
import types

import pytest

from benchmarks import peers
from benchmarks.measure.gpu import (
    bench,
    decode,
    decode_bars,
    decode_shapes,
    forest_bars,
    forests,
    prefill,
    prefill_bars,
)
from benchmarks.report import decode_page, missed_bars, prefill_section

FA3_METADATA = (
    "batch rows keys heads_q heads_kv dim dim_v dtype lengths cu_q cu_k cu_new used_q leftpad page new causal left "
    "right softcap splits pack margin"
).split()
FA3_FWD = (
    "q k v k_new v_new qv out cu_q cu_k cu_new used_q used_k rows keys table batch_idx leftpad cos sin rotary q_scale "
    "k_scale v_scale scale causal left right softcap interleaved metadata splits pack margin sink world rank total"
).split()
HOST_HEADS = (8, 2, 64)


# --- Peers ----------------------------------------------------------------------------------------------


def attention(q, k, v, tables, visible):
    """q [batch, rows, heads, dim], k and v in pages, visible [batch, rows, keys]."""
    import torch

    keys = visible.shape[-1]
    k, v = (x[tables.long()].flatten(1, 2)[:, :keys].float() for x in (k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bthd,bnhd->bhtn", q.float(), k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhtn,bnhd->bthd", weights, v).to(q.dtype)


def causal(batch, rows, keys):
    import torch

    return (torch.arange(keys) <= torch.arange(keys - rows, keys)[:, None]).expand(batch, rows, keys)


class Fa3:
    def get_scheduler_metadata(self, *arguments):
        return dict(zip(FA3_METADATA, arguments, strict=True))

    def fwd(self, *arguments):
        import torch

        a = dict(zip(FA3_FWD, arguments, strict=True))
        (batch, rows), made = a["q"].shape[:2], a["metadata"]
        keys = made["keys"]
        assert (made["batch"], made["rows"], made["causal"]) == (batch, rows, a["causal"])
        assert a["causal"] == (rows > 1) and a["used_k"].tolist() == [keys] * batch
        if a["table"] is None:
            a["table"] = torch.arange(batch)[:, None]
            assert made["page"] is None and a["k"].shape[:2] == (batch, keys)
        else:
            assert made["page"] == a["k"].shape[1] and a["keys"] == keys
        a["out"].copy_(attention(a["q"], a["k"], a["v"], a["table"], causal(batch, rows, keys)))


class Wrapper:
    """FlashInfer's two wrappers of paged caches."""

    def __init__(self, workspace, layout, use_tensor_cores=None, backend=None):
        assert layout == "NHD" and backend == "fa2"
        self.is_decode = bool(use_tensor_cores)

    def plan(self, *arguments, causal=False, packed_custom_mask=None, **_):
        names = ("indptr", "indices", "last", "heads_q", "heads_kv", "dim", "page")
        self.a = dict(zip((() if self.is_decode else ("rows",)) + names, arguments, strict=True))
        self.causal, self.mask = causal, packed_custom_mask

    def run(self, q, caches, out):
        import torch

        batch, a = len(self.a["indptr"]) - 1, self.a
        tables = self._paged_kv_indices_buf.view(batch, -1)
        keys = (tables.shape[1] - 1) * a["page"] + int(a["last"][0])
        q = q.view(batch, -1, *q.shape[1:])
        assert self.is_decode == (q.shape[1] == 1) and (self.is_decode or self.causal or self.mask is not None)
        visible = causal(batch, q.shape[1], keys)
        if self.mask is not None:
            starts = self._mask_indptr_buf
            assert starts[-1] == len(self.mask)
            bits = self.mask[:, None] >> torch.arange(8) & 1
            visible = bits.bool().view(batch, q.shape[1], keys)
        out.copy_(attention(q, *caches, tables, visible).reshape(out.shape))


class Levels:
    """FlashInfer's wrapper of attention in levels."""

    def __init__(self, levels, workspace, layout):
        assert levels == 2 and layout == "NHD"
        self._batch_prefill_wrappers = [types.SimpleNamespace() for _ in range(levels)]

    def plan(self, rows, begins, indices, last, heads_q, heads_kv, dim, page, q_data_type, kv_data_type):
        import torch

        batch = len(begins[1]) - 1
        assert rows[0].tolist() == [0, batch] and rows[1].tolist() == list(range(batch + 1))
        assert [int(x[-1]) for x in begins] == [len(x) for x in indices] and last[0].tolist() == [page]
        assert all(level._backend == "fa2" for level in self._batch_prefill_wrappers)
        self.tables = torch.cat((indices[0].expand(batch, -1), indices[1].view(batch, -1)), 1)
        self.keys = (self.tables.shape[1] - 1) * page + int(last[1][0])

    def run(self, q, caches):
        return attention(q[:, None], *caches, self.tables, causal(len(q), 1, self.keys))[:, 0]


def xqa(q, k, v, tables, lengths, out, workspace, semaphores, heads_kv, page, q_seq_len, mask):
    import torch

    assert k.shape[1:3] == (page, heads_kv) and lengths.dtype == torch.uint32
    keys, batch = int(lengths.view(torch.int32)[0, 0]), len(q)
    visible = causal(batch, q_seq_len, keys).clone()
    if mask is not None:
        assert mask.dtype == torch.uint16 and mask.shape == (batch, q_seq_len, -(-q_seq_len // 32) * 2)
        bits = mask.view(torch.int16)[..., None].int() >> torch.arange(16) & 1
        visible[:, :, -q_seq_len:] = bits.flatten(2)[..., :q_seq_len].bool()
    rows = q.view(batch, q_seq_len, *q.shape[-2:])
    out.copy_(attention(rows, k, v, tables, visible).reshape(out.shape))


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, block_table, mm_prefix_range, **others
):
    """vLLM's, of images that see all of themselves."""
    import torch

    batch = len(seqused_k)
    assert cu_seqlens_q.tolist() == [n * max_seqlen_q for n in range(batch + 1)] and others["causal"] is True
    assert seqused_k.tolist() == [max_seqlen_k] * batch and len(mm_prefix_range) == batch
    key, row = torch.arange(max_seqlen_k), torch.arange(max_seqlen_k - max_seqlen_q, max_seqlen_k)[:, None]
    first, last = (x[..., None, None] for x in mm_prefix_range.unbind(-1))
    of_image = (first <= key) & (key <= last) & (first <= row) & (row <= last)
    visible = (key <= row) | of_image.any(1)
    out.copy_(attention(q.view(batch, max_seqlen_q, *q.shape[1:]), k, v, block_table, visible).reshape(out.shape))


# --- A run ----------------------------------------------------------------------------------------------


@pytest.fixture
def steps(monkeypatch):
    """The steps over small caches in host memory; needs the PyTorch package's operators."""
    torch = pytest.importorskip("torch")
    try:
        from benchmarks.measure.gpu import decode_cell, decode_steps
    except Exception as error:  # whatever keeps the package from its operators
        pytest.skip(f"no operators: {error}")
    from test_gpu_cells import OnTheCpu

    from benchmarks.peers import fa3_cache, flashinfer_caches, vllm_triton

    def in_turns(contenders, rounds, seed):
        for contender in contenders.values():
            contender.call(contender.count - 1)
        return {name: [1.0 + n for n in range(rounds)] for name in contenders}

    class Stream:
        def __init__(self, x, stages):
            self.bytes = 1 << 16

        def __call__(self, n=0):
            pass

    small = decode_shapes.Shape(2, 256, *HOST_HEADS)
    for name, value in {
        "MODELS": (HOST_HEADS,),
        "BATCHES": (1, 2),
        "LENGTHS": (128, 256),
        "EVERY_LAYOUT": [small],
        "TREE": small._replace(rows=8),
        "LONG": small,
        "SMALLEST": small,
        "UPDATED": (small,),
        "SHARED": ((small, 128), (small, 0)),
        "FLOAT8": (small,),
        "INVARIANT": HOST_HEADS,
        "ONE_SPLIT": small,
    }.items():
        monkeypatch.setattr(decode_shapes, name, value)
    bars = {"LARGE_MB": 0.2, "TREE_OVER": {}, "SHARE_US": 1e9, "HOST_US": 1e9, "UPDATE_HOST_US": 1e9}  # all times are 1
    bars |= {"FLOAT8_OVER_PEERS": 1, "OVER_ONE_SPLIT": 1}
    for name, value in bars.items():
        monkeypatch.setattr(decode_bars, name, value)
    monkeypatch.setattr(decode_cell, "ROTATED_BYTES", 1 << 18)
    monkeypatch.setattr(decode_steps, "POOL_ELEMENTS", 1 << 18)
    monkeypatch.setattr(decode_steps, "HOST_CALLS", 2)
    monkeypatch.setattr(decode_steps, "in_turns", in_turns)
    monkeypatch.setattr(decode_steps.stream, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(fa3_cache, "load", Fa3)
    monkeypatch.setattr(vllm_triton, "load", lambda: unified_attention)
    names = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
    wrappers = types.SimpleNamespace(**dict.fromkeys(names, Wrapper))
    monkeypatch.setattr(flashinfer_caches, "load", lambda: (wrappers, wrappers, xqa))
    levels = types.SimpleNamespace(MultiLevelCascadeAttentionWrapper=Levels)
    monkeypatch.setattr(flashinfer_caches, "cascades", lambda: levels)
    monkeypatch.setattr(flashinfer_caches, "WORKSPACE_BYTES", 8)
    monkeypatch.setattr(flashinfer_caches, "SEMAPHORE_BYTES", 8)
    before = torch.is_grad_enabled()
    with OnTheCpu():
        yield decode_steps
    torch.set_grad_enabled(before)
    for name in ("workspace", "semaphores"):
        getattr(flashinfer_caches, name).cache_clear()


def run_of(budget=1000, cells="", peers=tuple(decode_bars.PEERS), arch="sm90"):
    """(whether it passed, the receipt of a run)"""
    kernels = types.SimpleNamespace(hashes_of=lambda ids: dict.fromkeys(ids, "0"), arch=arch)
    arguments = types.SimpleNamespace(rounds=4, budget=budget, cells=cells, peers=peers, kernels=kernels)
    receipt = {"figures": {}}
    return decode.run(arguments, receipt, lambda: None, None), receipt


def test_a_run_measures_every_layout_beside_peers_that_agree(steps, capsys):
    passed, receipt = run_of()
    figures = json.loads(json.dumps(receipt["figures"]["decode"]))
    assert passed and not figures["failed"] and not figures["not_measured"]
    found = {cell["cell"]: cell for cell in figures["cells"]}
    assert len(found) == 10
    for name, cell in found.items():
        pages = 2 * ("page" in name) + ("page 64" in name or "page 16" in name)
        assert set(cell["left_out"]) == {0: {"flashinfer", "xqa"}, 2: {"xqa"}, 3: set()}[pages]
        assert set(cell["over_ours"]) == set(decode_bars.PEERS) - set(cell["left_out"])
        assert ("stream_share" in cell) == (cell["mb"] >= 0.2) and ("over_64" in cell) == (cell["page"] != 64)
    tree = figures["masks"][0]
    assert set(tree["us"]) == {"ours", *decode_bars.PEERS, "tree", "flashinfer_tree", "xqa_tree", "tail"}
    assert [row["contender"] for row in figures["host"]] == ["ours", *decode_bars.PEERS]
    assert [set(row["us"]) for row in figures["float8"]] == [{"ours", *decode_bars.PEERS, "by_token", "bf16"}]
    sizes = {str(size) for size in decode_shapes.SPLIT_SIZES}
    found = [set(row["us"]) - {"ours", *sizes} for row in figures["invariance"]]
    assert found.count({"fa3_one_split"}) == 1 and found.count(set()) == 3
    assert {"sm90.cache.shares"} < set(receipt["kernel_hashes"])
    last = capsys.readouterr().out.splitlines()[-2:]
    assert "bars held; missed:" in last[0] and last[1] == "none"


def test_a_run_ends_within_its_budget(steps, capsys):
    _, receipt = run_of(budget=-1)
    figures = receipt["figures"]["decode"]
    assert not figures["cells"] and len(figures["not_measured"]) == 11
    assert "11 steps not measured" in capsys.readouterr().out


def test_kernels_of_mma_sync_are_measured_over_all_cells_alone(steps):
    _, receipt = run_of(peers=("flashinfer",), arch="sm80")
    figures = receipt["figures"]["decode"]
    assert len(figures["cells"]) == 10 and not figures["failed"]
    assert not any(figures[name] for name in ("masks", "updates", "host", "float8", "invariance"))


def test_a_stream_that_fails_costs_only_its_bar(steps, monkeypatch):
    def broken(x, stages):
        raise RuntimeError("CUDA driver: no")

    monkeypatch.setattr(steps.stream, "Stream", broken)
    passed, receipt = run_of(peers=())
    figures = receipt["figures"]["decode"]
    assert not passed and figures["failed"] == {"the stream": "RuntimeError: CUDA driver: no"}
    assert len(figures["cells"]) == 10 and not any("stream_share" in cell for cell in figures["cells"])


def test_only_some_cells(steps):
    _, receipt = run_of(cells="2 x 256, 8/2 d=64 page 16", peers=())
    assert [cell["page"] for cell in receipt["figures"]["decode"]["cells"]] == [16]
    assert not receipt["figures"]["decode"]["masks"]


def test_a_peer_with_another_tree_fails_its_step(steps, monkeypatch):
    def causal_alone(*arguments, mask, **options):
        xqa(*arguments, mask=None, **options)

    wrappers = steps.flashinfer_caches.load()[:2]
    monkeypatch.setattr(steps.flashinfer_caches, "load", lambda: (*wrappers, causal_alone))
    passed, receipt = run_of(peers=("xqa",))
    figures = receipt["figures"]["decode"]
    assert (
        not passed and list(figures["failed"]) == ["a tree"] and "xqa differs from ours" in figures["failed"]["a tree"]
    )


def test_a_peer_that_computes_something_else_fails_its_shape(steps, monkeypatch, capsys):
    class Wrong(Fa3):
        def fwd(self, *arguments):
            super().fwd(*arguments)
            arguments[6].add_(1)

    monkeypatch.setattr(steps.fa3_cache, "load", Wrong)
    passed, receipt = run_of(cells="1 x 128", peers=("fa3",))
    assert not passed and "fa3 differs from ours" in receipt["figures"]["decode"]["failed"]["1 x 128, 8/2 d=64"]
    assert "FAIL  1 x 128, 8/2 d=64: " in capsys.readouterr().out


@pytest.mark.parametrize("rows", [8, 32, 40, 64])
def test_a_causal_tail_has_every_word_of_its_rows(rows):
    torch = pytest.importorskip("torch")
    from benchmarks.peers.flashinfer_caches import causal_tail, visible

    cell = types.SimpleNamespace(batch=2, rows=rows, keys=rows, q=torch.zeros(1))
    assert torch.equal(visible(cell, causal_tail(cell)), causal(2, rows, rows))


# --- What is not there ----------------------------------------------------------------------------------


def test_peers_that_are_not_there_are_named(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    from benchmarks.peers import fa3_cache, flashinfer_caches, vllm_triton

    monkeypatch.setenv("FLASHMASK_PEERS", str(tmp_path))
    for name in ("flashinfer", "vllm"):
        monkeypatch.setitem(flashinfer_caches.sys.modules, name, None)
    with pytest.raises(peers.LeftOut, match="there is no _vllm_fa3_C.abi3.so"):
        fa3_cache.load()
    with pytest.raises(peers.LeftOut, match="flashinfer is not imported"):
        flashinfer_caches.load()
    with pytest.raises(peers.LeftOut, match="vllm is not imported"):
        vllm_triton.load()


def test_a_module_that_is_not_compiled_is_left_out(tmp_path):
    pytest.importorskip("torch")
    from benchmarks.peers import flashinfer_caches

    spec = types.SimpleNamespace(name="xqa", load=lambda path: path.name, get_library_path=lambda: tmp_path / "xqa.so")
    with pytest.raises(peers.LeftOut, match="there is no xqa.so"):
        flashinfer_caches.load_built(spec)
    (tmp_path / "xqa.so").touch()
    assert flashinfer_caches.load_built(spec) == "xqa.so"


# --- Bars and the page ------------------------------------------------------------------------------------


def cell_of(page=64, mb=100.0, batch=1, **changes):
    shape = decode_shapes.Shape(batch, 1024, *decode_shapes.MODELS[0])
    return {
        "cell": shape.name(page),
        **shape._asdict(),
        "page": page,
        "mb": mb,
        "us": {"ours": 10.0},
        "over_ours": {},
        "gb_per_s": 1000.0,
        "left_out": {},
        **changes,
    }


@pytest.mark.parametrize(
    "changes, missed",
    [
        ({"over_ours": {"fa3": 0.96, "xqa": 1.3}}, 0),
        ({"over_ours": {"fa3": 0.96, "xqa": 0.94}}, 1),
        ({"over_ours": {"fa3": 0.91}, "mb": 4.2}, 0),
        ({"over_ours": {"fa3": 0.89}, "mb": 4.2}, 1),
        ({"stream_share": 0.97}, 0),
        ({"stream_share": 0.969}, 1),
        ({"page": 16, "over_64": 0.97}, 1),
        ({"page": 1, "over_64": 0.97}, 0),
        ({"page": 1, "over_64": 0.94}, 1),
        ({"page": 0, "over_64": 0.5}, 0),
    ],
)
def test_bars_of_a_cell(changes, missed):
    cell = cell_of(**changes)
    assert sum(not c["passed"] for c in decode_bars.of_cell(cell)) == missed
    assert decode.cell_line(cell).startswith("FAIL" if missed else "PASS")


@pytest.mark.parametrize(
    "shared, us, held",
    [
        (8192, {"forest": 11.0, "update": 1001.0}, [False, False]),
        (8192, {"forest": 10.0, "update": 9.0, "cascade": 12.9}, [True, True, False]),
        (0, {"forest": 41.3, "update": 9.0}, [True, False]),
    ],
)
def test_bars_of_forests(shared, us, held):
    row = {"cell": "64 x 8704, 32/8", "us": {"ours": 40.0, **us}, "shared": shared}
    assert [c["passed"] for c in forest_bars.of_forest(row)] == held


def test_bars_of_float8_and_invariance():
    row = {"cell": "64 x 8192, 32/8", "us": {"ours": 10.0, "by_token": 10.4}, "over_ours": {"bf16": 1.7, "xqa": 1.04}}
    assert [c["passed"] for c in decode_bars.of_float8(row)] == [False, False, False]
    good = {**row, "us": {"ours": 10.0, "by_token": 10.2}, "over_ours": {"bf16": 1.73, "xqa": 1.06}}
    assert all(c["passed"] for c in decode_bars.of_float8(good))
    rows = [{"cell": "1 x 8192, 32/8", "us": {"ours": 7.0, "1024": 10.0, "fa3_one_split": 59.0}}]
    assert [c["passed"] for c in decode_bars.of_invariance(rows)] == [False, False, False]
    rows = [{"cell": "1 x 1024, 32/8", "us": {"ours": 9.1, "1024": 10.0, "fa3_one_split": 61.0}}]
    assert all(c["passed"] for c in decode_bars.of_invariance(rows)) and not decode_bars.of_invariance([])
    narrow = cell_of(kernel="sm80.decode", over_ours={"flashinfer": 0.99})
    assert [c["passed"] for c in decode_bars.of_cell(narrow)] == [False]
    assert not decode_bars.of_cell({**narrow, "mb": 99.0}) and not decode_bars.of_mean([narrow])


def test_bars_of_all():
    tree = {"cell": "a tree", "us": {"ours": 10.0, "tree": 10.6, "xqa_tree": 10.0, "flashinfer_tree": 26.0}}
    few = {"cell": "few keys", "us": {"ours": 100.0, "window": 7.1, "evicted": 19.0}}
    few["live"] = {"window": 0.01, "evicted": 0.1}
    cells = [cell_of(over_ours={"fa3": 0.96}), cell_of(over_ours={"fa3": 1.02}), cell_of(mb=400, over_ours={"fa3": 2})]
    cells.append(cell_of(page=1, over_ours={"fa3": 0.1}))  # no cell of the grid
    updates = [
        {"update": "64 x 8192, causal", "us": 6.1, "vector_mb": 0, "host_us": 15.1},
        {"update": "64 x 8192, vectors", "us": 6.1, "vector_mb": 2.1},
        {"update": "1 x 1, causal", "us": 1e3, "vector_mb": 0},
    ]
    host = [{"contender": "ours", "us": 26.0}, {"contender": "fa3", "us": 60.0}]
    figures = {"cells": cells, "masks": [tree, few], "updates": updates, "host": host}
    checks = decode_bars.of_all({**figures, "stream_gb_per_s": {"3": 4500.0, "6": 4600.0}})
    assert [c["name"] for c in checks if not c["passed"]] == [
        "decode: geometric mean below 300 MB over the best peer",
        "a tree: a tree's time over causal attention's",
        "a tree: a tree over XQA's",
        "few keys: evicted, its time over what its blocks allow",
        "plan.update 64 x 8192, causal, 6.0 us: an update's time over its aim",
        "plan.update 64 x 8192, causal: microseconds of the host",
        "microseconds of the host in a call",
    ]


def test_the_page_of_a_receipt():
    peer = {"fa3": 0.9, "flashinfer": 1.1}
    cells = [cell_of(page, over_ours=peer, **({} if page == 64 else {"over_64": 0.99})) for page in (64, 16, 1, 0)]
    cells.append(cell_of(64, batch=64, mb=2000.0, stream_share=0.98))
    figures = {
        "cells": cells,
        "masks": [{"cell": "16 x 16384", "us": {"ours": 1.0, "fa3": 2.0, "tree": 3.0, "xqa_tree": 4.0}}],
        "updates": [{"update": "64 x 8192, causal", "us": 6.7, "vector_mb": 0, "host_us": 9.6}],
        "host": [{"contender": "ours", "us": 40.0}],
        "versions": {"flashinfer": "0.6"},
        "stream_gb_per_s": {},
    }
    run = {"date": "2026-01-02", "device": "H200", "torch": "2.11", "figures": {"decode": figures}}
    text = "\n".join(decode_page.lines({"decode": run}))
    assert decode_page.lines({}) == []
    assert "| 1 x 1024 | 10.0 (0.90) |" in text and "| 64 x 1024 | 10.0 |" in text
    assert "98.0 %" in text and "XQA, the tree" in text and "FlashInfer 0.6" in text
    assert "| the host's time of it, 64 x 8192, causal | 9.6 |" in text
    assert len([bar for bar in missed_bars.of_decode({"decode": run}) if not bar.passed]) == 6


def test_the_words_of_its_command():
    arguments = bench.parse(["decode", "--budget", "30", "--peers", "fa3", "--cells", "d=64"])
    assert (arguments.budget, arguments.peers, arguments.what) == (30, ["fa3"], "decode")
    arguments.kernels = types.SimpleNamespace(arch="sm90")
    decode.check_arguments(arguments)
    assert arguments.what == "decode-cells" and set(bench.parse(["decode"]).peers) == set(decode_bars.PEERS)
    arguments.kernels.arch, arguments.peers = "sm80", ["fa3", "flashinfer"]
    decode.check_arguments(arguments)
    assert arguments.peers == ["flashinfer"]
    arguments.kernels.arch = "sm86"
    with pytest.raises(SystemExit, match="of sm90 and sm80, and sm86 is in use"):
        decode.check_arguments(arguments)


# --- Forests --------------------------------------------------------------------------------------------


def test_forests_are_measured_beside_the_plain_call_and_levels(steps, capsys):
    kernels = types.SimpleNamespace(hashes_of=lambda ids: dict.fromkeys(ids, "0"), arch="sm90")
    arguments, receipt = (
        types.SimpleNamespace(rounds=3, budget=1000, peers=forests.PEERS, kernels=kernels, what="forests"),
        {},
    )
    receipt |= {"figures": {}, "date": "2026-01-02", "device": "H200"}
    forests.run(arguments, receipt, lambda: None, None)
    figures = json.loads(json.dumps(receipt["figures"]["forests"]))
    assert not figures["failed"] and not figures["not_measured"]
    assert [(row["shared"], set(row["us"])) for row in figures["cells"]] == [
        (128, {"ours", "forest", "in_order", "cascade", "update"}),
        (0, {"ours", "forest", "in_order", "update"}),
    ]
    assert {"sm90.cache.shares"} < set(receipt["kernel_hashes"])
    assert "3 of 3 bars held" in capsys.readouterr().out
    page = "\n".join(decode_page.forests({"forests": receipt}))
    assert "| 2 x 256, " in page and not decode_page.forests({})
    assert len(missed_bars.of_forests({"forests": receipt})) == 3


# --- Prefill --------------------------------------------------------------------------------------------


@pytest.fixture
def prefill_steps(steps, monkeypatch):
    """The steps of prefill over small caches. SDPA with a dense mask takes FlexAttention's place."""
    from benchmarks.measure.gpu import prefill_steps

    shape = decode_shapes.Shape(2, 256, *HOST_HEADS, rows=40)
    shapes = {"CHUNKS": {shape: (64, 16)}, "DRAFTS": shape, "IMAGES": shape._replace(batch=1, rows=256)}
    shapes["FLOAT8_CHUNKS"] = (shape,)
    for name, value in (shapes | {"PREFILL_SPLITS": (128,)}).items():
        monkeypatch.setattr(decode_shapes, name, value)
    monkeypatch.setattr(prefill_steps, "IMAGE", 32)

    def flex(cell, of_image, key):
        from torch.nn.functional import scaled_dot_product_attention

        image = key // prefill_steps.IMAGE
        visible = (key[:, None] >= key) | (of_image & (image[:, None] == image))
        q, k, v = (x.transpose(1, 2) for x in (cell.q, *cell.cache(0)[:2]))
        return lambda n: scaled_dot_product_attention(q, k, v, visible, enable_gqa=True).transpose(1, 2)

    monkeypatch.setattr(prefill_steps, "flex_of", flex)
    return prefill_steps


def test_prefill_is_measured_beside_peers_and_contiguous_tensors_that_agree(prefill_steps, capsys):
    kernels = types.SimpleNamespace(hashes_of=lambda ids: dict.fromkeys(ids, "0"), arch="sm90")
    arguments = types.SimpleNamespace(rounds=3, budget=1000, peers=prefill.PEERS, kernels=kernels, what="prefill")
    receipt = {"figures": {}, "date": "today", "device": "a card", "torch": "2"}
    prefill.run(arguments, receipt, lambda: None, None)
    figures = json.loads(json.dumps(receipt["figures"]["prefill"]))
    assert not figures["failed"] and not figures["not_measured"]
    contenders = {"ours", "fa3", "flashinfer", "contiguous", "128"}
    assert [set(row["us"]) for row in figures["chunks"]] == [contenders] * 2
    trees = {"tree", "flashinfer_tree", "xqa_tree"}
    assert set(figures["drafts"][0]["us"]) == {"ours", "fa3", "flashinfer", "xqa"} | trees
    assert set(figures["drafts"][0]["left_out"]) == {"fa3_tree"}
    assert set(figures["images"][0]["us"]) == {"ours", "causal", "flex", "vllm_triton"}
    assert [set(row["us"]) for row in figures["float8"]] == [{"ours", "by_token", "bf16", "fa3"}]
    missed = [check["name"].split(": ")[1] for check in prefill_bars.of_all(figures) if not check["passed"]]
    assert missed == [  # all times are 1
        *["over FlashInfer"] * 2,
        "a tree over FlashInfer's",
        "a tree over XQA's",
        "images over FlexAttention",
        "images over vLLM's Triton kernel",
    ]
    assert "bars held; missed:" in capsys.readouterr().out
    page = "\n".join(prefill_section.lines({"prefill": receipt}))
    assert "2 x 256, 8/2 d=64 page 16, 40 rows" in page and "a random tree" in page
    assert "vLLM's Triton kernel" in page and "XQA, the tree" in page
    assert "| 2 x 256, 8/2 d=64 page 64, 40 rows |" in page.partition("| a scale for all |")[2]
    assert not prefill_section.lines({})


def test_images_without_their_peer_say_why(steps, prefill_steps, monkeypatch):
    def load():
        raise peers.LeftOut("vllm is not imported")

    monkeypatch.setattr(prefill_steps.vllm_triton, "load", load)
    row = prefill_steps.images(steps.Session(types.SimpleNamespace(rounds=3, peers=prefill.PEERS)))[0]
    assert row["left_out"] == {"vllm_triton": "vllm is not imported"} and set(row["us"]) == {"ours", "causal", "flex"}


@pytest.mark.parametrize(
    "of_row, us, missed",
    [
        (prefill_bars.of_drafts, {"tree": 10.0, "flashinfer_tree": 45.0, "xqa_tree": 33.0}, []),
        (prefill_bars.of_drafts, {"tree": 10.0, "flashinfer_tree": 45.0, "xqa_tree": 32.9}, ["a tree over XQA's"]),
        (prefill_bars.of_drafts, {"tree": 10.6}, ["a tree's time over causal attention's"]),
        (prefill_bars.of_images, {"flex": 25.0, "vllm_triton": 20.0}, []),
        (prefill_bars.of_images, {"flex": 25.0, "vllm_triton": 19.9}, ["images over vLLM's Triton kernel"]),
    ],
)
def test_bars_of_drafts_and_images(of_row, us, missed):
    found = of_row({"cell": "a cell", "us": {"ours": 10.0, **us}})
    assert [check["name"] for check in found if not check["passed"]] == [f"a cell: {what}" for what in missed]
