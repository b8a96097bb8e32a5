# SPDX-License-Identifier: Apache-2.0
"""The report: the documents' figures, the HTML page and the pictures; no GPU needed.

Figures are invented here, but for those of the committed documents, and the library that judges them is a JSON file
(fake_kernels.py).
"""

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import fake_kernels
import invented
import pytest

from benchmarks import ROOT, charts, receipts
from benchmarks.instruments import medians
from benchmarks.masks import paper_masks
from benchmarks.measure.gpu import sparsity_chart
from benchmarks.report import __main__ as report
from benchmarks.report import documents, missed_bars, performance_pages, pictures, sections, shapes, unreceipted_peers

FWD, BWD = "sm90.fwd.bf16.d128.dv128.c3", "sm90.bwd.bf16.d128.dv128.c2"
FRESH_COMMAND = f"run `{performance_pages.COMMAND}`"


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A made-up library; kernels.py answers for it."""
    fake_kernels.put_in_place(monkeypatch)
    return invented.library_file(tmp_path)


# --- The committed documents -------------------------------------------------------------------------


def test_pages_have_the_receipts_figures():
    """Every file that the command writes, and no other in the folder that it has to itself."""
    written = documents.pages(receipts.load_folder())
    in_folder = {path for path in written if path.startswith(f"{performance_pages.FOLDER}/")}
    assert {
        f"{performance_pages.FOLDER}/{path.name}" for path in (ROOT / performance_pages.FOLDER).iterdir()
    } == in_folder
    assert {performance_pages.PAGE, performance_pages.INDEX, *documents.PAGES} <= set(written) and len(in_folder) > 10
    stale = [path for path, text in written.items() if (ROOT / path).read_text(encoding="utf-8") != text]
    assert not stale, FRESH_COMMAND


def test_the_pages_judge_context_parallelism_as_its_receipt_was_judged():
    _, topics = documents.of_receipts(receipts.load_folder())
    runs = missed_bars.context_parallel_runs(topics)
    assert runs[2]["what"] == "context-parallel"
    for run in runs.values():
        bars = missed_bars.of_context_parallel(run)
        held = sum(bar.passed for bar in bars)
        assert run["tests"] == {"passed": held, "failed": len(bars) - held}


def test_processes_of_a_part_of_the_tests_are_counted_together():
    parts = [{"name": "verify", "passed": 7, "failed": 0, "skipped": 1}]
    parts += [{"name": f"verify --cases, from {n}", "passed": n, "failed": 1} for n in (10, 20)]
    assert sections.part_counts(parts) == {"verify": [7, 0, 1], "verify --cases": [30, 2, 0]}


def test_the_page_of_performance_is_one_that_one_reads():
    text = (ROOT / performance_pages.PAGE).read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 200
    index = (ROOT / performance_pages.INDEX).read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / performance_pages.FOLDER).iterdir()} - {"README.md"}
    assert names == set(re.findall(r"\]\(([\w.-]+\.(?:md|csv))\)", index))


def test_pages_have_their_marked_parts():
    """A mark that is misspelt would keep its figures for ever."""
    for page in documents.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        marks = [match[2] for match in documents.MARKED.finditer(text)]
        assert marks and len(marks) == text.count("<!-- figures") == text.count("<!-- end of figures -->")
        assert set(marks) <= set(documents.PARTS)


def test_pictures_are_the_reports():
    drawn = {f"gpu-{name}.svg": svg for name, svg in pictures.document_drawings(receipts.load_folder()).items()}
    kept = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "img").glob("gpu-*.svg")}
    assert len(kept) > 10 and kept == drawn, FRESH_COMMAND


def test_readme_fits_on_few_pages_and_keeps_no_figures_by_hand():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 110
    outside = re.sub(r"<!-- figures.*?<!-- end of figures -->", "", text, flags=re.S)
    assert not re.search(r"\d\.\d+x|TFLOP/s", outside)


# --- The documents' figures --------------------------------------------------------------------------


def peers_file(path, file, **changes):
    """A file like data/peers.json: FlashAttention-3, 0.94 and 1.02, and the deterministic mode, at both head dims."""
    cell = {
        "head_dim": 128,
        "seqlen": 8192,
        "mask": "causal",
        "over_ours": {"fa3": [0.94, 1.02], "deterministic": [None, 1.47]},
    }
    held = {
        "source": "S",
        "tokens": 131072,
        "hidden": 4096,
        "dtype": "bfloat16",
        "toolkit": invented.HASHED,
        "names": {"fa3": "FA3", "deterministic": "det"},
        "kernel_hashes": fake_kernels.hashes(file)["kernels"],
        "tables": [{"title": "T", "about": "A.", "cells": [cell, {**cell, "head_dim": 64}]}],
    }
    path.write_text(json.dumps({**held, **changes}))
    return path


@pytest.fixture
def documented(file, tmp_path, monkeypatch):
    """All pages of performance and README's part, of receipts and a peers.json: [lines, lines]."""

    def run(*made, **changes):
        peers = peers_file(tmp_path / "peers.json", file, **changes)
        monkeypatch.setattr(unreceipted_peers, "FILE", peers)
        made = [invented.with_recorded_v3(receipt, fwd=1.2, bwd=0.95) for receipt in made]
        cases, topics = documents.of_receipts({f"{r['what']}.json": r for r in made})
        pages = performance_pages.pages(cases, topics)
        return [line for text in pages.values() for line in text.splitlines()], documents.summary(cases, topics)

    return run


def slices(file):
    return [invented.slice_of(file, op, head_dim) for op in ("fwd", "bwd") for head_dim in (128, 64)]


def test_the_page_has_a_table_of_every_slice(file, documented):
    page, _ = documented(*slices(file))
    assert "| full | 50.0 % | 14.7 | 594 | 1.58x | 1.19x | 1.09x |" in page
    assert "| causal_document | 50.0 % | 14.7 | 594 | 1.58x | 1.19x |  |" in page
    assert "| full | 50.0 % | 36.7 | 594 | 1.58x | 0.94x | 1.09x | 1.05 |" in page
    assert "| d = 128, 8K | 1.19x | 0.94x | 1.02x |" in page
    assert "| d = 128, 8K | 1.58x | 1.19x | 1.19x (full) | 1.09x / 1.09x |" in page
    assert "| d = 64, 8K | 1.58x |  |  | 1.09x / 1.09x |" in page


def test_other_kernel_sets_have_a_section_and_stay_out_of_hoppers(file, documented):
    _, part = documented(*slices(file))
    made = [*slices(file), *(invented.mma_sync_slice(file, op) for op in ("fwd", "bwd"))]
    _, same = documented(*made)
    cases, topics = documents.of_receipts({f"{r['what']}.json": r for r in made})
    hopper = [case for case in cases if case["arch"] == receipts.HOPPER]
    pages, without = performance_pages.pages(cases, topics), performance_pages.pages(hopper, topics)
    assert same == part and set(pages) - set(without) == {"docs/performance/mma-sync.md"}
    assert pages["docs/performance/d128.md"] == without["docs/performance/d128.md"]
    own = pages["docs/performance/mma-sync.md"]
    assert "[The kernels of mma.sync](performance/mma-sync.md)" in pages[performance_pages.PAGE]
    assert "forward, 0.79 of FlexAttention's in 12 cells and 1.04 of FlashAttention-2's in 2 cells" in " ".join(
        pages[performance_pages.PAGE].split()
    )
    assert "## sm80, Forward, d = 128, 8K" in own and "../img/gpu-backward-d128-8k-sm80.svg" in own
    assert "`FLASHMASK_KERNELS=sm80 scripts/gpu-check bench --op fwd --head-dim 128 --seqlen 8192`" in own
    assert "over FlashAttention-2 | over SDPA with a dense mask | deterministic over fast | tiles of 99 KiB" in own
    assert "PASS  sm80: every cell over FA2: 1.040 (bar 0.88)" in own
    drawn = pictures.document_drawings({f"{r['what']}.json": r for r in made})
    assert {"forward-d128-8k", "forward-d128-8k-sm80", "total-d128-8k-sm80"} <= set(drawn)


def test_a_page_of_no_receipts_is_a_page(documented):
    page, part = documented()
    assert "## Where ours is not first" in page and "# On the CPU" in page
    assert part[0].startswith("Speed over other kernels")


def test_the_page_has_what_a_part_of_the_suite_found(file, documented):
    row = {"what": "speed", "seqlen": 8192, "mask": "full", "flashmask_us": 812.34, "jax_nn_us": 850, "ratio": 1.046}
    rows = [{**row, "direction": "forward"}, {**row, "direction": "with_gradient", "fast_ratio": 1.101}]
    speed = {"jax": "0.11.2", "heads": 16, "head_dim": 128, "rows": rows}
    parts = [{"name": "jax: speed", "passed": 2, "failed": 0}]
    page, _ = documented(invented.topic(file, "tests-jax_speed", [], jax_speed=speed, parts=parts))
    assert "| 8192 | full | forward | 812 | 850 | 1.05 |  |" in page
    assert "| 8192 | full | forward + backward | 812 | 850 | 1.05 | 1.10 |" in page
    assert any(line.startswith("| sm90 | jax: speed | 2 | 0 |") for line in page)


def test_peers_of_the_run_itself_have_columns_and_of_two_measurements_the_worse_counts(file, documented):
    own, grouped = invented.slice_of(file), invented.case(file, "full", heads_kv=8, flashmask_v3=0.9)
    for case in own["cases"]:
        case["peers"] |= {"flashmask_v3": invented.peer(1.3, 1.0, 0.01)}
        case["matmul"], case["left_out"] = {"ms": 1.5, "tflops": 700.0}, {"fa3": "no library"}
    own["cases"][0]["peers"]["fa3"] = invented.peer(0.9, 1.0, 0.01)
    own["cases"][1]["peers"]["fa3"] = invented.peer(0.97, 1.0, 0.01)
    own["cases"].append(grouped)
    page, part = documented(own, *slices(file)[1:])
    (line,) = [line for line in page if line.startswith("| causal | 50.0 % | 14.7")][:1]
    assert line.split(" | ")[4:] == ["1.58x", "1.29x", "0.96x", "1.09x |"]
    assert "## Forward, d = 128, 8K, 32 heads for 8 key heads" in page
    assert "`scripts/gpu-check bench --op fwd --head-dim 128 --seqlen 8192 --heads-kv 8`" in page
    assert "| causal, forward | FlashAttention-3 0.94 (d = 128, 8K; d = 64, 8K) |" in page
    assert "| full, grouped heads, forward | FlashMask V3 0.89 (d = 128, 8K) |" in page
    assert "| full, forward | FlashAttention-3 0.89 (d = 128, 8K) |" in page
    assert "| FlashAttention-3, full / causal | 0.89x / 0.96x |  |  |  |" in part


def test_readmes_part_says_where_ours_is_not_first(file, documented):
    _, part = documented(*slices(file))
    assert "| FlashMask V3 (2026-11-26, H100) | 1.19x | 0.94x |  |  |" in part
    said = " ".join(part)
    assert "FlashAttention-3 and FlashMask V3 take 0.94 of our time in some cells ([which](docs/perf" in said
    assert said.count("which](docs/performance.md#where-ours-is-not-first)") == 1


def test_peers_without_a_receipt_count_next_to_the_receipts_kernels_alone(file, documented):
    """The backward's kernels of the receipts are others at head dim 128; the forward's and those of 64 are not."""
    hashes = {**fake_kernels.hashes(file)["kernels"], BWD: "old"}
    page, _ = documented(*slices(file), kernel_hashes=hashes)
    assert "| d = 64, 8K | causal | 0.94 / 1.02 | 1.47 |" in page
    assert "| d = 128, 8K | causal | 0.94 |  |" in page
    neither, _ = documented(*slices(file), kernel_hashes={**hashes, FWD: "old"})
    assert not any(line.startswith("| d = 128, 8K | causal | 0.94") for line in neither)
    other_planner = {**fake_kernels.hashes(file)["kernels"], "sm90.plan.rank": "old"}
    page, _ = documented(*slices(file), kernel_hashes=other_planner)  # times hardly depend on it
    assert "| d = 128, 8K | causal | 0.94 / 1.02 | 1.47 |" in page


def test_a_length_counts_by_its_own_receipts_and_the_page_says_that_builds_differ(file, documented):
    """At 32K the receipts are still of the kernels that were measured without one, at 8K no more."""
    long = invented.slice_of(file, "bwd", 128, 32768)
    hashes = {**fake_kernels.hashes(file)["kernels"], BWD: "old"}
    for case in long["cases"]:
        case["kernel_hashes"][BWD] = "old"
    cell = {"head_dim": 128, "mask": "full", "over_ours": {"fa3": [1.5, 0.91]}}
    cells = [{**cell, "seqlen": seqlen} for seqlen in (8192, 32768)]
    tables = [{"title": "T", "about": "A.", "cells": cells}]
    page, _ = documented(*slices(file), long, kernel_hashes=hashes, tables=tables)
    assert "| d = 128, 8K | full | 1.50 |" in page and "| d = 128, 32K | full | 1.50 / 0.91 |" in page
    assert f"Lengths that ran different builds of a kernel: `{BWD}`: 8K apart from 32K." in page


def test_the_page_names_the_kernels_that_an_earlier_build_alone_was_measured_beside(file, documented):
    cell = {"head_dim": 128, "seqlen": 8192, "mask": "full", "over_ours": {"fa3": [1.0, 0.9], "fa4": [1.0, 0.9]}}
    tables = [{"title": "T", "about": "A.", "cells": [cell]}]
    hashes = fake_kernels.hashes(file)["kernels"]
    said = "FlashAttention-4 were measured in earlier runs alone."
    for changed, is_said in ((hashes, False), ({**hashes, BWD: "old"}, True)):
        page, _ = documented(*slices(file), kernel_hashes=changed, tables=tables)
        assert (said in "\n".join(page)) == is_said


def test_the_page_says_which_bars_were_missed(file, documented):
    overhead = {
        "microseconds": {"empty": 7.7, "no_grad": 14.2, "with_backward": 46.8},
        "bars": {"no_grad": 15, "with_backward": 40},
    }
    made = invented.topic(file, "tests-overhead", [], torch_overhead=overhead, parts=[])
    page, _ = documented(*slices(file), made)
    said = " ".join(page)
    assert "1 of 2 (host time of a PyTorch call)" in said
    link = "[host time of a PyTorch call](performance/measurements.md#host-time-of-a-pytorch-call)"
    assert f"| {link} | forward and backward, us | 1 of 1 | 46.8 | at most 40 |" in page
    assert "(a forward holds its bar of 15 us; forward and backward misses its bar of 40 us)" in said
    assert "| [Hopper's kernels](#overview) | every cell over V3 | 1 of 2 | 0.9406 | at least 1 |" in page


def test_bars_of_small_problems_and_first_calls():
    cell = {"mask": "causal", "head_dim": 64, "heads": 8, "seqlen": 2048, "us": {"ours": 60.0}}
    figures = {"op": "bwd", "cells": [{**cell, "ours_over": {"cudnn": 0.5}}, {**cell, "mask": "causal_document"}]}
    first = [{"head_dim": 64, "seconds": 0.02, "process_difference": 0.31}]
    topics = {"small-bwd": {"figures": {"small": figures}}, "first": {"figures": {"first": first}}}
    found = missed_bars.of_all([], topics, [])
    assert [tuple(bar) for bar in found["small problems"]] == [
        ("forward and backward, time over cuDNN's", 0.5, 1.0, True),
        ("forward and backward, microseconds", 60.0, 57, False),
    ]
    assert [(bar.got, bar.passed) for bar in found["first call"]] == [(0.02, True), (0.31, False)]


def test_bars_of_one_kind_are_told_together():
    bars = [missed_bars.Bar("a time", 1.5, 1.2, False), missed_bars.Bar("a time", 1.1, 1.2, True)]
    bars += [missed_bars.Bar("a speed", 0.9, 1.0, False), missed_bars.Bar("a speed", 0.8, 1.1, False)]
    rows = missed_bars.missed_rows(bars)
    assert rows == [
        ["a time", "1 of 2", "1.5", "at most 1.2"],
        ["a speed", "2 of 2", "0.8 to 0.9", "at least 1 and 1.1"],
    ]
    assert missed_bars.missed_rows(bars[1:2]) == []


def test_the_pages_say_where_flashmask_v3_was_not_measured(file, documented):
    wide = {**invented.slice_of(file, head_dim=64), "what": "fwd-d256-dv256-8k"}
    wide["cases"] = [
        {**case, "head_dim": 256, "head_dim_v": 256, "heads": 16, "heads_kv": 16} for case in wide["cases"]
    ]
    page, _ = documented(*slices(file), wide)
    said = " ".join(page)
    assert "- FlashMask V3 was not measured at d = 256 and d = 64, although it has kernels of d = 256." in said
    assert said.count("FlashMask V3 was not measured at d = 64. ") == 1
    assert "FlashMask V3 was not measured at d = 256, although it has kernels of that head dim." in said


def test_every_cell_is_a_line_of_the_csv(file, documented):
    page, _ = documented(*slices(file), invented.slice_of(file, masks=["full"], seqlen=32768))
    head = page.index(next(line for line in page if line.startswith("kernels,op,head_dim,")))
    rows = [dict(zip(page[head].split(","), line.split(","), strict=True)) for line in page[head + 1 :]]
    assert len(rows) == 4 * 12 + 1
    first = rows[0]
    assert [first[name] for name in ("kernels", "op", "head_dim", "seqlen", "mask")] == [
        "sm90",
        "fwd",
        "128",
        "8192",
        "full",
    ]
    assert (first["over_flex"], first["over_flashmask_v3"], first["over_fa2"]) == ("1.584", "1.188", "")


def test_varlen_kernels_are_called_so_for_packed_documents(file, documented):
    cell = {"head_dim": 64, "seqlen": 32768, "mask": "document", "over_ours": {"fa3": [1.0, 0.92]}}
    page, _ = documented(*slices(file), tables=[{"title": "T", "about": "A.", "cells": [cell]}])
    faster = "FlashAttention-3 (varlen) 0.92 (d = 64, 32K); FlashMask V3 0.94 (d = 128, 8K)"
    assert f"| document, backward | {faster} |" in page


def test_the_command_writes_pages_and_pictures(file, tmp_path, monkeypatch, capsys):
    stale = tmp_path / "docs" / "performance" / "d7.md"
    stale.parent.mkdir(parents=True)
    stale.write_text("of a head dim that is gone")
    mark = "<!-- figures: {} (a command) -->\nold\n<!-- end of figures -->\nkept\n"
    (tmp_path / "README.md").write_text(mark.format("summary"))
    for page, name in zip(documents.PAGES[1:], ("training", "context_parallel", "overlap"), strict=True):
        (tmp_path / page).write_text(mark.format(name))
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    made = slices(file)
    made[0]["cases"][0]["kernel_hashes"][FWD] = "old"
    folder = invented.put(tmp_path / "r", *made)
    assert report.main(["--results", str(folder), "--docs", "--library", str(file)]) == 0
    readme = (tmp_path / "README.md").read_text()
    assert "old" not in readme and readme.endswith("<!-- end of figures -->\nkept\n") and "1.58x" in readme
    assert (tmp_path / "docs" / "performance.md").read_text().startswith("<!-- Written by")
    assert not stale.exists() and (stale.parent / "d128.md").exists()
    assert (tmp_path / "docs" / "img" / "gpu-forward-d128-8k.svg").exists()
    printed = capsys.readouterr()
    assert "docs/performance.md" in printed.out
    assert printed.err == f"in the documents, though a cell of fwd-d128-dv128-8k.json is stale: {FWD}\n"


def context_parallel_cell(times, **others):
    """A cell of a receipt. times: {contender: ms forward, backward}."""
    return {
        **{"seqlen": 32768, "batch": 2, "mask": "document", "heads": 64, "heads_kv": 8, "auto": "gather"},
        **{"errors": {"gather": 0.01}, "least_received_keys": 16384, "received_keys": 16384},
        **{"fixed_forward_ms": 0.1, "fixed_backward_ms": 0.25, "predicted_ms": {"gather": 4.2, "arrive": 4.4}},
        "times": {name: dict(zip(("forward_ms", "backward_ms"), ms)) for name, ms in times.items()},
        **others,
    }


def context_parallel_topic(cells, ranks=2, complete=True):
    figures = {"context_parallel": {"ranks": ranks, "link_gb_s": 290.4, "cells": cells}}
    return {"date": "2026-01-02", "device": "A GPU", "complete": complete, "figures": figures}


def test_context_parallelism_has_a_table():
    times = {"one": (2, 6), "gather": (1, 3.5), "overlap": (3, 6), "all gather": (1, 4), "kernels": (1, 3)}
    topic = context_parallel_topic([context_parallel_cell(times)], complete=False)
    lines = documents.context_parallel([], {"context-parallel": topic})
    row = "| 32K x 2 | document | 64 / 8 | 25.0 % | 8.00 | 4.50 | 1.78x | 1.11x | 9.00 | 0.10 / 0.25 | -6.7 % |"
    assert row in lines and not any("FlexAttention" in line for line in lines)
    said = " ".join(lines[lines.index(row) + 1 :])
    assert "gather's speed over one GPU is 1.78x, and that of its kernels alone" in said
    assert "once all keys are there, 2.00x." in said
    assert 'On 2 GPUs of one host `way="overlap"` is slower than gather in 1 of 1 cells' in said
    assert "it takes 2.00 times as long" in said
    assert "6 of 7 bars held; missed were speed-up: 1 of 1 (1.778; at least 1.9)." in said
    assert documents.context_parallel([], {}) == documents.overlap([], {}) == []


def test_torchs_flexattention_has_a_column_where_it_was_measured():
    times = {"one": (2, 6.8), "gather": (1, 3.5), "all gather": (1, 4)}
    with_flex = context_parallel_cell({**times, "flex": (3, 6)})
    without = context_parallel_cell(times, heads=8, heads_kv=1, missing={"flex": "why"})
    topic = context_parallel_topic([with_flex, without], complete=False)
    lines = documents.context_parallel([], {"context-parallel": topic})
    assert "over torch's FlexAttention behind torch's own all-gather" in " ".join(lines)
    assert "with 64 / 8 heads alone" in " ".join(lines)
    (head,) = (line for line in lines if line.startswith("| tokens"))
    assert "| over an all-gather | over torch's FlexAttention | fixed |" in head
    assert (
        "| 32K x 2 | document | 64 / 8 | 25.0 % | 8.80 | 4.50 | 1.96x | 1.11x | 2.00x | 0.10 / 0.25 | -6.7 % |" in lines
    )
    assert "| 32K x 2 | document | 8 / 1 | 25.0 % | 8.80 | 4.50 | 1.96x | 1.11x |  | 0.10 / 0.25 | -6.7 % |" in lines
    bars = missed_bars.of_context_parallel(topic)
    assert [bar.got for bar in bars if bar.what == "flex, over ours"] == [2.0] and all(bar.passed for bar in bars)


def test_each_number_of_gpus_has_its_table():
    """Beside the way that the model chooses the others, and the bar of the fastest of them."""
    times = {
        "one": (4, 12),
        "gather": (1, 3.5),
        "arrive": (0.9, 3.5),
        "early gradients": (0.9, 3.6),
        "all gather": (1, 4),
    }

    def topics(auto):
        cell = context_parallel_cell(times, fastest="arrive", auto=auto, predicted_ms={"gather": 4.5, "arrive": 4.4})
        return {f"context-parallel-{ranks}": context_parallel_topic([cell], ranks, complete=False) for ranks in (4, 2)}

    lines = documents.context_parallel([], topics("arrive"))
    tables = [line for line in lines if "GPUs, d = 128" in line]
    assert [line.split(" GPUs")[0] for line in tables] == [f"Forward and backward on {ranks}" for ranks in (2, 4)]
    (head,) = {line for line in lines if line.startswith("| tokens")}
    assert "| over an all-gather | gather, ms | early gradients, ms | fixed |" in head
    row = "| 32K x 2 | document | 64 / 8 | 25.0 % | 16.0 | 4.40 | 3.64x | 1.14x | 4.50 | 4.50 | 0.10 / 0.25 | 0.0 % |"
    assert lines.count(row) == 2
    found = missed_bars.of_all([], topics("gather"), [])
    assert list(found) == ["two GPUs", "four GPUs"]
    assert [bar.what for bar in found["four GPUs"] if not bar.passed] == ["auto, over the fastest way"]
    assert all(bar.passed for bar in missed_bars.of_all([], topics("arrive"), [])["two GPUs"])


def context_parallel_run(ranks, speedups, ahead):
    """A complete run of 18 cells. speedups: of gather, by length; ahead: cells in which arrive is faster."""
    cells = []
    for n in range(18):
        seqlen = 32768 if n % 2 else 131072
        gather, arrive = (1.0, 2.0), (1.0, 1.99 if n < ahead else 2.01)
        times = {"one": (1.0, 3 * speedups[seqlen] - 1), "gather": gather, "arrive": arrive, "all gather": (2, 2)}
        cells.append(context_parallel_cell(times, seqlen=seqlen, heads=8, predicted_ms={"gather": 3.0}))
    return context_parallel_topic(cells, ranks)


def joint_bars(run):
    """{what: (figure, bar, whether it holds)} of a run's bars of all cells together."""
    bars = missed_bars.of_context_parallel(run)
    assert {bar.what for bar in bars if not bar.passed} <= {bar.what for bar in bars if _is_joint(bar)}
    return {bar.what: (pytest.approx(bar.got), bar.bar, bar.passed) for bar in bars if _is_joint(bar)}


def _is_joint(bar):
    return bar.what.startswith(("mean speed-up", "cells in which"))


def test_runs_of_context_parallelism_are_judged_as_a_whole():
    mean, ahead = "mean speed-up at 32K and 128K", "cells in which arrive is faster than gather"
    both = {32768: 1.92, 131072: 1.95}
    root = math.sqrt(1.92 * 1.95)
    assert joint_bars(context_parallel_run(2, both, 15)) == {mean: (root, 1.93, True), ahead: (15, 15, True)}
    slower = context_parallel_run(2, {32768: 1.9, 131072: 1.95}, 14)
    assert [x[2] for x in joint_bars(slower).values()] == [False, False]
    said = " ".join(documents.context_parallel([], {"context-parallel": slower}))
    assert f"missed were {mean}: 1 of 1 (1.925; at least 1.93); {ahead}: 1 of 1 (14; at least 15)." in said
    of_four = joint_bars(context_parallel_run(4, {32768: 3.51, 131072: 3.84}, 0))
    assert of_four == {"mean speed-up at 32K": (3.51, 3.5, True), "mean speed-up at 128K": (3.84, 3.85, False)}
    # A run that goes on has no bars for all its cells.
    assert joint_bars({**slower, "complete": False}) == {}


def test_training_over_context_parallelism_has_a_table():
    run = {"seqlen": 131072, "dp": 2, "cp": 4, "parameters": 1.1e9, "tokens_per_second": 65536, "peak_memory_gb": 41.26}
    topic = {"date": "2026-01-02", "device": "A GPU", "figures": {"runs": [run]}}
    lines = documents.long_context([], {"long-context": topic})
    assert "| 128K | 65,536 | 4.00 | 41.3 |" in lines
    assert "2 sequences, each over 4 GPUs, a model of 1.10 B parameters" in " ".join(lines)
    assert documents.long_context([], {}) == []


# --- The HTML page -----------------------------------------------------------------------------------


def sparsity_figures():
    points = [
        {"kind": kind, "live": n / 20, "ms": 5.0 * n + 1} for n in range(1, 21) for kind, *_ in sparsity_chart.KINDS
    ]
    intercept, slope, r2 = medians.line_fit([p["live"] for p in points], [p["ms"] for p in points])
    assert (intercept, slope, r2) == (pytest.approx(1), pytest.approx(100), pytest.approx(1))
    fit = {
        "intercept_ms": intercept,
        "slope_ms": slope,
        "r2": r2,
        "samples": len(points),
        "intercept_share": intercept / 101,
    }
    return {
        "seqlen": 32768,
        "head_dim": 128,
        "batch": 4,
        "heads": 32,
        "full_ms": 101.0,
        "points": points,
        "fits": {"all": fit},
    }


@pytest.fixture
def reported(file, tmp_path, monkeypatch):
    """Makes a report from receipts: (page, {file name: SVG})."""

    def run(*made):
        folder = invented.put(tmp_path / "r", *(invented.with_recorded_v3(r, fwd=1.2, bwd=1.1) for r in made))
        words = [
            "--results",
            str(folder),
            "--html",
            str(tmp_path / "page.html"),
            "--svg",
            str(tmp_path / "svg"),
            "--library",
            str(file),
        ]
        assert report.main(words) == 0
        return (tmp_path / "page.html").read_text(), {p.name: p.read_text() for p in (tmp_path / "svg").iterdir()}

    return run


def test_the_page_has_the_time_of_building_masks(file, documented):
    cells = [{"mask": "eviction", "replay_us": 6.04, "host_ms": 0.114}]
    made = invented.topic(file, "masks", [FWD], masks={"columns": 131072, "cells": cells})
    page, _ = documented(*slices(file), made)
    assert "## Building a mask" in page and "| eviction | 6.0 us | 0.11 ms |" in page


def test_the_page_has_block_masks_by_their_live_share(file, documented):
    cells = [
        {
            "op": op,
            "seqlen": seqlen,
            "live": live,
            "over_share": share,
            "bar": 1.04,
            "passed": share <= 1.04 or live < 0.2,
        }
        for seqlen in (8192, 32768)
        for op in ("fwd", "bwd")
        for live in (0.8999, 0.1001)
        for share in [1 + seqlen / 1e6 + live / 100]
    ]
    made = invented.topic(file, "blocks", [FWD], blocks={"head_dim": 128, "least_live": 0.2, "cells": cells})
    page, _ = documented(*slices(file), made)
    assert "| live blocks | 8K forward | 8K backward | 32K forward | 32K backward |" in page
    assert "| 90.0 % | 1.017 | 1.017 | **1.042** | **1.042** |" in page
    assert "| 10.0 % | 1.009 | 1.009 | 1.034 | 1.034 |" in page
    said = " ".join(page)
    assert "A bar of 1.04 was set for live shares of at least 20%: 2 of 4 cells hold it, those in bold do not." in said
    assert "The rest, of at most 10.01%, have none; the receipt counts them as passed, and so 6 of 8." in said
    assert "not beside [Block-Sparse-Attention]" in said
    link = "[block masks](performance/measurements.md#block-masks)"
    assert f"| {link} | time over the live share of the full mask's | 2 of 4 | 1.042 | at most 1.04 |" in page


def test_report_is_one_page_without_outside_resources(file, reported):
    page, drawn = reported(
        invented.slice_of(file, device="<device>"), invented.topic(file, "sparsity", [FWD], sparsity=sparsity_figures())
    )
    assert "&lt;device&gt;" in page and "shared question" in page and "Not shown" not in page and "derived" not in page
    for outside in ("<script", "src=", "href=", "@import", "url("):
        assert outside not in page
    assert page.count("http") == page.count("http://www.w3.org/2000/svg")
    assert set(drawn) == {"gpu-forward-d128-8k.svg", "gpu-sparsity.svg", "gpu-mask-memory.svg"}
    for svg in drawn.values():
        ElementTree.fromstring(svg)
    bars = drawn["gpu-forward-d128-8k.svg"]
    assert [bars.count(f"{name}:") for name in ("flashmask (plan included)", "cuDNN", "FlashMask V3")] == [12, 2, 12]
    assert "FlashMask V3 (2026-11-26, H100): beside our kernels of that time" in bars
    assert drawn["gpu-sparsity.svg"].count("<circle") == 60


def test_report_shows_fresh_cells_and_marks_another_toolkits(file, reported):
    made = invented.slice_of(file, masks=["full", "causal", "document"])
    made["cases"][1]["kernel_hashes"][FWD] = "old"
    made["cases"][2]["run"] = {**receipts.run_of(made, made["cases"][2]), "toolkit": "Build cuda_12.9"}
    page, drawn = reported(made)
    assert f"1 of fwd-d128-dv128-8k.json, stale: {FWD}" in page
    assert "Build cuda_12.9" in page and '<td class="name">document *</td>' in page
    bars = drawn["gpu-forward-d128-8k.svg"]
    assert bars.count("flashmask (plan included):") == 2 and "causal," not in bars


def test_report_of_both_directions_and_grouped_heads(file, reported):
    forward = invented.slice_of(file)
    forward["cases"].append(invented.case(file, "causal", heads_kv=8, flashmask_v3=1.3, fa3=1.0))
    page, drawn = reported(forward, invented.slice_of(file, "bwd"))
    for words in (
        "time, deterministic",
        "Forward, d=128 S=8192 full: over cuDNN",
        "Backward, d=128 S=8192 full: over cuDNN",
        "<h2>Forward and backward, head dim 128, 8K</h2>",
        "<h2>Forward, head dim 128, 8K, 32 heads for 8 key heads</h2>",
        "over FlashAttention-3",
        "Forward and backward, d=128 S=8192: geometric mean over V3",
    ):
        assert words in page
    assert "Forward and backward, d=128 S=8192 full: over cuDNN" not in page
    assert set(drawn) == {
        f"gpu-{name}.svg"
        for name in ("forward-d128-8k", "forward-d128-8k-kv8", "backward-d128-8k", "total-d128-8k", "mask-memory")
    }
    assert [
        drawn[f"gpu-{name}-d128-8k.svg"].count("flashmask, deterministic:") for name in ("forward", "backward")
    ] == [0, 12]
    grouped = drawn["gpu-forward-d128-8k-kv8.svg"]
    assert "in a run of its own" not in grouped and "FlashMask V3:" in grouped


def test_masks_are_shown_in_the_papers_order(file):
    cases = invented.slice_of(file)["cases"]
    (alike,) = shapes.by_shape(cases[5:] + cases[:5])
    assert [case["mask"] for case in alike] == paper_masks.NAMES


def test_report_without_receipts_says_so(reported):
    page, drawn = reported()
    assert "computed, not measured" in page and "Memory of one mask" in page and "<h2>Bars" not in page
    assert len(drawn) == 1


def test_report_names_a_malformed_receipt_and_a_library_that_cannot_judge(file, tmp_path):
    invented.put(tmp_path / "r", {"what": "broken", "schema": 2})
    words = ["--results", str(tmp_path / "r"), "--html", str(tmp_path / "page.html"), "--library", str(file)]
    with pytest.raises(SystemExit, match="broken.json"):
        report.main(words)
    file.write_text(json.dumps({"toolkit": "", "kernels": {}}))
    with pytest.raises(SystemExit, match="holds no GPU kernels"):
        report.main(words)
    with pytest.raises(SystemExit, match="no library to judge"):
        report.main(words[:-2])


def test_peers_without_receipts_count_by_the_librarys_kernels(file, tmp_path, monkeypatch):
    path = peers_file(tmp_path / "peers.json", file)
    monkeypatch.setattr(
        unreceipted_peers, "counted", lambda library, counted=unreceipted_peers.counted: counted(library, path)
    )
    ((title, about, head, rows),) = unreceipted_peers.tables(receipts.library_of(file))
    assert (title, head) == ("T", ["", "mask", "FA3", "det"])
    assert rows == [[f"d = {d}, 8K", "causal", "0.94 / 1.02", "1.47"] for d in (128, 64)]
    peers_file(path, file, kernel_hashes={**fake_kernels.hashes(file)["kernels"], BWD: "old"})
    assert [row[0] for *_, rows in unreceipted_peers.tables(receipts.library_of(file)) for row in rows] == [
        "d = 64, 8K"
    ]


def test_a_legend_fits_in_its_chart():
    series = [(str(n), "a contender of some length", "#000000", "box") for n in range(6)]
    svg = ElementTree.fromstring(charts.bar_chart("", "", [("full", {"0": 1.0})], series, "TFLOP/s"))
    ends = [
        float(text.get("x")) + 6.6 * len(text.text)
        for text in svg.iter("{http://www.w3.org/2000/svg}text")
        if (text.text or "").startswith("a contender")
    ]
    assert len(ends) == 6 and max(ends) <= float(svg.get("width"))


def test_ticks_of_an_axis():
    assert charts.ticks(576) == [0, 200, 400, 600] and charts.ticks(101)[-1] >= 101 and charts.ticks(0.7)[-1] >= 0.7
