# SPDX-License-Identifier: Apache-2.0
"""benchmarks/end_to_end without torch: what is run, what is to be reached, and the page; figures are invented here."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from benchmarks import receipts
from benchmarks.end_to_end import figures, paper_tables
from benchmarks.end_to_end.longest_sequence import longest
from benchmarks.masks import paper_masks
from benchmarks.report import documents, end_to_end_page

K = 1024
STEPS = {"ours": 700.0, "flex": 830.0, "sdpa": 3200.0, "nothing": 580.0}


# --- What is run ------------------------------------------------------------------------------------


def test_processes_are_few_and_short():
    """At most 40 of 40 s each for throughput, and no process longer than a call may be."""
    jobs = {name: list(figure.jobs(figures.Settings())) for name, figure in figures.FIGURES.items()}
    assert len(jobs["throughput"]) <= 40 and sum(job.seconds for job in jobs["throughput"]) <= 1600
    assert all(job.seconds < 400 for of_figure in jobs.values() for job in of_figure)
    keys = [key for job in jobs["throughput"] for key in job.keys]
    assert len(set(keys)) == len(keys)
    ours = {key[:3] for key in keys if key[3] == "ours"}
    assert ours == {("1b", n * K, task) for n in (16, 32, 64) for task in figures.TASKS} | {
        ("3b", 32 * K, "sft"),
        ("8b", 32 * K, "lora"),
    }
    assert {key[:3] for key in keys if key[3] == "flex"} == {key[:3] for key in keys if key[3] == "nothing"} == ours
    assert {key[:3] for key in keys if key[3] == "sdpa"} == {key for key in ours if key[1] <= 32 * K}
    assert {key[2] for key in keys if key[3] == "varlen"} == {"sft", "lora"}


def fitting(limit, tried):
    def fits(length):
        tried.append(length)
        return length <= limit

    return fits


@pytest.mark.parametrize("limit", [4096, 5000, 33000, 262144, 700000, 1048576])
def test_the_search_comes_within_a_sixteenth(limit):
    tried = []
    low, high, why = longest(fitting(limit, tried), 4096, 1048576, 1e9, 1024)
    assert low <= limit and all(length % 1024 == 0 for length in tried) and len(set(tried)) == len(tried) <= 14
    if limit == 1048576:
        assert (low, high, why) == (limit, None, "limit")
    else:
        assert limit < high and high - low <= max(1024, low / 16) and why == "found"


def test_the_search_ends_where_nothing_fits_and_where_time_is_over():
    assert longest(fitting(100, []), 4096, 1048576, 1e9, 1024) == (None, 4096, "found")
    assert longest(fitting(10**9, []), 4096, 1048576, -1.0, 1024) == (4096, None, "time")


@pytest.mark.parametrize("power, reached", [(2, 2048), (1, 8192)])
def test_the_search_tries_what_there_is_time_for(power, reached, monkeypatch):
    """A trial at 1024 takes a second, at others as much more as the length says; there are 16 seconds in all."""
    now = [0.0]
    monkeypatch.setattr("benchmarks.end_to_end.longest_sequence.time.monotonic", lambda: now[0])

    def fits(length):
        now[0] += (length / 1024) ** power
        return True

    assert longest(fits, 1024, 2**20, 16.0, 1024, power) == (reached, None, "time")


def test_lines_and_bins():
    points = [[n / 100, 10 * (1 - n / 100)] for n in range(50, 96)]
    intercept, slope, fit = figures.line_of(points)
    assert (round(intercept, 6), round(slope, 6), round(fit, 6)) == (0, 10, 1)
    found = figures.bins(points)
    assert len(found) == 10 and sum(count for _, _, count, _ in found) == len(points)
    assert found[0][0] == 0.5 and abs(found[-1][1] - 0.95) < 1e-9
    assert all(low <= 1 - ms / 10 <= high + 1e-9 for low, high, _, ms in found)
    assert figures.bins([[0.5, 1.0]])[0] == (0.5, 1.5, 1, 1.0)


# --- What is to be reached --------------------------------------------------------------------------


def cell(contender, task="sft", seqlen=32 * K, model="1b", **changes):
    step = STEPS[contender]
    return {
        **{"model": model, "seqlen": seqlen, "task": task, "contender": contender},
        **{"sparsity": [0.84, 0.77, 0.88, 0.53, 0.91], "parameters": 10, "trained_parameters": 10, "first_loss": 11.7},
        **{"first_step_s": 0.9, "steps": [[0, step]] * 3, "step_ms": step, "tokens_per_second": 1e3 * seqlen / step},
        **{"peak_bytes": 30 * 2**30, "mask_bytes": 200_000, "mask_ms": 0.2, "compiler_cache": "filled"},
        **changes,
    }


def failing(name, results):
    return [c["name"] for c in figures.FIGURES[name].checks(results) if not c["passed"]]


def test_bars_of_throughput():
    cells = [cell(name) for name in STEPS]
    checks = figures.FIGURES["throughput"].checks(cells)
    assert [round(c["got"], 3) for c in checks] == [4.571, 1.186, 1.207, 0] and not failing("throughput", cells)
    cells[0] |= {"step_ms": 720.0}
    assert failing("throughput", cells) == [
        "sft at 32K: sdpa's step over ours",
        "sft at 32K: ours over a step without attention",
    ]
    assert failing("throughput", [cell("ours"), cell("flex", first_loss=11.4)]) == [
        "first losses under all attentions: the furthest from ours, as a share"
    ]
    assert not figures.FIGURES["throughput"].checks([cell("ours"), cell("flex", model="3b")])


def run_of(contender, losses, deterministic=True, weights="w", task="sft"):
    of = {"model": "1b", "seqlen": 8 * K, "task": task, "contender": contender, "deterministic": deterministic}
    return {**of, "losses": losses, "weights": weights, "seconds": 1.0}


def test_bars_of_losses():
    falling = [3.0, 2.5, 2.0]
    assert not failing("losses", [run_of("ours", falling), run_of("dense", falling)])
    assert len(failing("losses", [run_of("ours", falling), run_of("dense", [3.0, 2.5, 2.0000000000000004])])) == 1
    assert len(failing("losses", [run_of("ours", falling, weights="v"), run_of("dense", falling)])) == 1
    assert len(failing("losses", [run_of("ours", falling[::-1]), run_of("dense", falling[::-1])])) == 1
    assert not figures.FIGURES["losses"].checks([run_of("ours", falling), run_of("dense", falling, False)])


def lengths_of(contender, longest_one, ended="found"):
    tried = [4 * K * 2**n for n in range(20) if 4 * K * 2**n <= longest_one]
    lengths = [
        {
            **{"seqlen": n, "fits": True, "kept_bytes": 8 * 2**30, "gradient_bytes": 2 * 2**30, "seconds": 1.0},
            **{"forward_bytes": n * 65536, "mask_bytes": 4 * n, "peak_bytes": 11 * 2**30 + n * 200_000},
        }
        for n in tried
    ]
    failed = None if ended == "time" else 2 * longest_one
    lengths += [{"seqlen": failed, "fits": False, "seconds": 1.0}] if failed else []
    of = {"model": "1b", "task": "sft", "contender": contender}
    return {**of, "longest": longest_one, "shortest_failed": failed, "ended": ended, "lengths": lengths}


def test_bars_of_memory():
    found = [lengths_of("ours", 512 * K), lengths_of("sdpa", 64 * K), lengths_of("varlen", 520 * K)]
    assert not failing("memory", found)
    assert failing("memory", [*found, lengths_of("dense", 600 * K)]) == ["longest length: ours over dense's"]


@pytest.mark.parametrize(
    "change, text",
    [
        ({"step_ms": None}, "1b 32768 sft ours: step_ms is None"),
        ({"step_ms": float("nan")}, "step_ms is not finite"),
        ({"peak_bytes": 1.5}, "peak_bytes is 1.5"),
    ],
)
def test_wrong_results_are_told(change, text):
    held = {"results": [cell("ours", **change)], "checks": []}
    (found,) = figures.problems("throughput", held)
    assert text in found


def test_wrong_receipts_are_told():
    assert figures.problems("throughput", {}) == ["figures has no results or no checks"]
    twice = {"results": [cell("ours"), cell("ours")], "checks": []}
    assert "there twice" in figures.problems("throughput", twice)[0]
    nameless = {"results": [{"task": "sft"}], "checks": []}
    assert figures.problems("throughput", nameless) == ["a result has no model"]
    refused = {"results": [{"model": "1b", "task": "sft", "contender": "flex", "refused": "no"}], "checks": []}
    assert not figures.problems("memory", refused)


# --- The page ---------------------------------------------------------------------------------------


def topics_of(**results):
    header = {"date": "2026-01-02", "device": "NVIDIA X", "torch": "2.0", "transformers": "5.0", "complete": True}
    return {
        figures.topic(name): {
            "what": figures.topic(name),
            "figures": {"results": found, "checks": figures.FIGURES[name].checks(found)},
            **header,
        }
        for name, found in results.items()
    }


EVERYTHING = {
    "throughput": [
        *(cell(name, task, n * K) for name in STEPS for task in ("sft", "rm") for n in (16, 32)),
        {"model": "1b", "task": "sft", "seqlen": 64 * K, "contender": "flex", "out_of_memory": True},
        cell("ours", seqlen=64 * K),
    ],
    "memory": [lengths_of("ours", 512 * K), lengths_of("sdpa", 64 * K, "time")],
    "losses": [run_of("ours", [3.0, 2.0]), run_of("dense", [3.0, 2.0]), run_of("ours", [3.0, 2.1], False)],
    "sparsity": [
        {"task": "sft", "seqlen": 32 * K, "heads": 32, "head_dim": 128}
        | {"points": [[n / 100, 10 - n / 10] for n in range(50, 95)]}
    ],
}


next(r for r in EVERYTHING["throughput"] if r["contender"] == "flex")["compiler_cache"] = "empty"


def test_a_page_without_receipts_says_so():
    text = end_to_end_page.page([], {}, "COMMAND")
    assert text.count("Not measured yet; `scripts/gpu-check end-to-end") == 10
    assert "What was to be reached" not in text and "img/" not in text
    assert "| training over a dense mask | 1.65x to 3.22x | not measured yet |" in text
    assert not end_to_end_page.drawings({})


def test_the_page_has_what_was_measured():
    topics = topics_of(**EVERYTHING)
    text = end_to_end_page.page([], topics, "COMMAND")
    assert "| training over a dense mask | 1.65x to 3.22x | 4.57x to 4.57x |" in text
    assert "512K; 64K (1B SFT, one GPU)" in text
    assert "| 1B SFT, 32K | 46.8 | 39.5 | 10.2 | 56.5 |" in text
    assert "| 1B SFT, 32K | 84.0 % | 1.19x | 4.57x | 0.83x |" in text
    assert "| 1B SFT, 64K | 93.6 | out of memory |  |  |" in text
    # 16 layers, 4 * 32768**2 * 0.16 * 64 * 32 * 4.5 each, in 700 - 580 ms, and in 22 % of 580 ms
    assert "| 1B SFT, 32K | 120 | 101.3 | 844 | 794 |" in text
    assert "The caches were empty for 1B SFT, 16K." in text.replace("\n", " ")
    assert "| SDPA, dense mask | 64K | not tried: too slow | 256 KiB |" in text
    assert "| SFT | 3.0000 | 2.0000 | 2 of 2 | 2.1000 |  |" in text
    assert "SFT, 45 sequences of 32K tokens, 32 heads, d = 128" in text
    assert "| sft at 32K: sdpa's step over ours | 4.571 | at least 4.5 | yes |" in text
    drawn = end_to_end_page.drawings(topics)
    assert set(drawn) == set(re.findall(r"img/gpu-([\w-]+)\.svg", text))
    for svg in drawn.values():
        ElementTree.fromstring(svg)


@pytest.mark.parametrize(
    "count, text",
    [(5, "5 B"), (2048, "2 KiB"), (1023 * 1024, "0.999 MiB"), (3 << 29, "1.5 GiB"), (1 << 40, "1024 GiB")],
)
def test_sizes(count, text):
    assert end_to_end_page.size_text(count) == text


def test_results_that_are_wrong_make_no_page():
    topics = topics_of(throughput=[cell("ours")])
    del topics["end-to-end-throughput"]["figures"]["results"][0]["mask_ms"]
    with pytest.raises(ValueError, match="mask_ms is None"):
        end_to_end_page.page([], topics, "COMMAND")


# --- Tables 4 to 9 ----------------------------------------------------------------------------------


def test_the_papers_tables_are_its_claims():
    held = paper_tables.claims()
    assert [t["table"] for t in held["tables"]] == list(range(4, 10))
    for head_dim in (128, 64):
        ratios = [
            theirs / table["total_tflops"]["flex"][mask]
            for table in held["tables"]
            if table["head_dim"] == head_dim
            for mask, theirs in table["total_tflops"]["flashmask"].items()
        ]
        low, high = held["claims"][f"kernel_over_flex_d{head_dim}"]
        assert len(ratios) == 36 and round(min(ratios), 3) == low and round(max(ratios), 3) == high
    assert all(set(t["total_tflops"]["flex"]) == set(paper_masks.NAMES) for t in held["tables"])


def test_missing_cells_are_found(tmp_path):
    cases = [
        {"op": "fwd", "mask": mask, "heads": 32, "heads_kv": 32, "peers": {"flex": {}}}
        for mask in paper_masks.NAMES
        if mask != "causal"
    ]
    cases.append({**cases[0], "mask": "causal", "peers": {}})
    receipt = {"cases": cases}
    assert set(paper_tables.cells(receipt, ("fwd", 128, 8192))) == set(paper_masks.NAMES) - {"causal"}
    found = paper_tables.missing((tmp_path,), None)
    assert [at[:3] for at in found] == paper_tables.SLICES and all(masks == paper_masks.NAMES for *_, masks in found)
    words = paper_tables.words_of([("bwd", 64, 131072, ["full", "causal"]), ("fwd", 128, 8192, ["full"])])
    assert words == "bwd:64:131072:full+causal:kv64,fwd:128:8192:full:kv32"


def test_cells_of_committed_receipts_are_on_the_page():
    cases, topics = documents.of_receipts(receipts.load_folder())
    text = end_to_end_page.page(cases, topics, documents.COMMAND)
    missing = {at[1:3] for at in paper_tables.missing((receipts.RESULTS,), None)}
    assert text.count("Not measured yet; `scripts/gpu-check end-to-end tables`") <= len(missing)
    assert json.loads(paper_tables.CLAIMS.read_text())["source"].startswith("arXiv:2410.01359")
