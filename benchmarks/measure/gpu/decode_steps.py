# SPDX-License-Identifier: Apache-2.0
"""Steps of a run of decode: what each measures, as the receipt's figures have it."""

import random
import sys
import time
from importlib import metadata
from statistics import median

import torch
from flashmask import masks
from flashmask.inference import KvCache, SequenceMask

from benchmarks.instruments import stream
from benchmarks.instruments.medians import ratio
from benchmarks.measure.gpu import decode_bars, decode_cell, decode_shapes
from benchmarks.measure.gpu.decode_cell import Cell, Contender, contender_of, in_turns, plan_of, time_figures
from benchmarks.peers import LeftOut, fa3_cache, flashinfer_caches

POOL_ELEMENTS = 2 << 30  # of K, and of V: 4 GiB
PEERS = {"fa3": fa3_cache.Decode, "flashinfer": flashinfer_caches.Decode, "xqa": flashinfer_caches.Xqa}
CALLS_OF_STREAM, HOST_CALLS, UPDATES, FOR_GOOD = 3, 300, 100, 2**31 - 1
PACKAGES = {"flashinfer": "flashinfer-python", "vllm": "vllm"}  # of peers that are modules
FEW_ROUNDS = 3  # of cells that read much, and vary less
FEW_KEYS = 128  # among many another tree would make no difference that a check sees
STREAM = (None, "stream")


def said(why):
    kind = "" if isinstance(why, LeftOut) else f"{type(why).__name__}: "
    return kind + f"{why}".split("\n")[0][:300]


class Session:
    """The pools, the stream, and the kernels that ran."""

    def __init__(self, arguments):
        self.arguments, self.seeds, self.kernels = arguments, random.Random(0), set()
        torch.manual_seed(0)
        torch.set_grad_enabled(False)  # as in inference: it costs the host time
        self.pools = [torch.empty(POOL_ELEMENTS, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2)]
        self.stream, self.streams = None, {}

    def versions(self):
        """Versions of the peers that have been imported."""
        return {name: metadata.version(package) for name, package in PACKAGES.items() if sys.modules.get(name)}

    def find_stream(self):
        """The fastest number of stages."""
        made = {n: Contender(stream.Stream(self.pools[0], n), 1, CALLS_OF_STREAM) for n in stream.STAGES}
        times = {n: median(own) for n, own in in_turns(made, self.arguments.rounds, self.seeds.random()).items()}
        self.stream = made[min(times, key=times.get)]
        self.streams |= {str(n): made[n].call.bytes / us / 1e3 for n, us in times.items()}
        return []

    def contenders(self, cell, mask=None, allowed=decode_cell.AGREEMENT, peers=PEERS):
        """({name: call}, {name: why it is left out}) of ours and the wanted `peers`, {name: what makes its call of a
        cell and a tree's tail}; every peer agrees with ours."""
        calls, left_out = {"ours": cell.ours(mask)}, {}
        self.kernels.add(cell.kernel(mask))
        for name in [name for name in self.arguments.peers if name in peers]:
            try:
                call = peers[name](cell, None if mask is None else mask.tail)
                result = call(0)
                torch.cuda.synchronize()
            except Exception as why:  # in whatever way it fails, the run goes on without it
                left_out[name] = said(why)
                continue
            decode_cell.check_agreement(f"{cell.name}: {name}", result, calls["ours"](0), allowed)
            calls[name] = call
        return calls, left_out

    def drafts(self, shape, mask):
        """(a cell, {name: call}, {name: why it is left out}) of drafts, causal and as the tree of a mask."""
        self.contenders(Cell(self.pools, shape._replace(keys=FEW_KEYS), 64), mask)
        cell = Cell(self.pools, shape, 64)
        calls, left_out = self.contenders(cell)
        trees, no_trees = self.contenders(cell, mask)
        calls |= {"tree" if name == "ours" else f"{name}_tree": call for name, call in trees.items()}
        return cell, calls, left_out | {f"{name}_tree": why for name, why in no_trees.items()}

    def turns(self, contenders, rounds=None):
        return in_turns(contenders, rounds or self.arguments.rounds, self.seeds.random())


# --- Cells: every layout of a shape, all contenders in the same rounds ----------------------------------


def of_shape(session, shape, pages):
    contenders, left_out = {}, {}
    cells = [Cell(session.pools, shape, page) for page in pages]
    for cell in cells:
        calls, left_out[cell.page] = session.contenders(cell)
        contenders |= {(cell.page, name): contender_of(cell, call) for name, call in calls.items()}
    large = shape.bytes >= decode_bars.LARGE_MB * 1e6
    if large and session.stream:
        contenders[STREAM] = session.stream
    times = session.turns(contenders, FEW_ROUNDS if large else None)
    return [cell_figures(session, cell, shape, times, left_out[cell.page]) for cell in cells]


def cell_figures(session, cell, shape, times, left_out):
    own = {name: found for (page, name), found in times.items() if page == cell.page}
    record = {"cell": cell.name, **shape._asdict(), "page": cell.page, "mb": cell.bytes / 1e6, **time_figures(own)}
    record |= {"gb_per_s": cell.bytes / record["us"]["ours"] / 1e3, "kernel": cell.kernel(), "left_out": left_out}
    if STREAM in times:
        share = ratio(times[STREAM], own["ours"]) * cell.bytes / session.stream.call.bytes
        record |= {"stream_share": share, "stream_gb_per_s": session.stream.call.bytes / median(times[STREAM]) / 1e3}
    if (64, "ours") in times and cell.page != 64:
        record["over_64"] = ratio(times[64, "ours"], own["ours"])
    return record


# --- Masks, beside our own causal time --------------------------------------------------------------------


def row_of(cell, times, left_out):
    return {"cell": cell.name, "mb": cell.bytes / 1e6, **time_figures(times), "left_out": left_out}


def tree(session):
    """A tree of eight drafts, its bits alone, and the peers' ways to say it."""
    parents = torch.tensor([[-1, 0, 0, 1, 1, 2, 2, 5]] * decode_shapes.TREE.batch, device="cuda")
    tail, depth = masks.draft_tree(parents)
    cell, calls, left_out = session.drafts(decode_shapes.TREE, SequenceMask(tail=tail, tail_depth=depth))
    calls["tail"] = cell.ours(SequenceMask(tail=tail))
    times = session.turns({name: contender_of(cell, call) for name, call in calls.items()})
    return [row_of(cell, times, left_out)]


def far_keys(session):
    """A window, and keys of which nine blocks in ten are evicted."""
    cell = Cell(session.pools, decode_shapes.LONG, 64)
    evicted = torch.full((*cell.k.shape[:2], 1, 1), FOR_GOOD, device="cuda", dtype=torch.int32)
    blocks = cell.tables[0].view(-1, 2).long()  # of 128 keys, which lie in two pages
    evicted[blocks[torch.rand(len(blocks), device="cuda") < 0.9]] = 0
    kinds = {
        "ours": None,
        "window": SequenceMask(window_size=(1023, 0)),
        "evicted": SequenceMask(bounds=evicted, key_layout="pages"),
    }
    made = {name: contender_of(cell, cell.ours(mask)) for name, mask in kinds.items()}
    live = {"window": 1024 / cell.keys, "evicted": float((evicted[cell.tables[0].long()] != 0).float().mean())}
    return [row_of(cell, session.turns(made, FEW_ROUNDS), {}) | {"live": live}]


# --- Float8 caches, and calls whose bits do not depend on the batch, beside our own in bfloat16 and fast ----


def by_tensor(cell):
    return torch.ones(1, device="cuda")


def by_token(cell):
    return torch.ones(*cell.k.shape[:2], cell.heads_kv, device="cuda")


def float8(session):
    """Float8 caches of every shape."""
    return [row_of(*found) for found in float8_times(session, decode_shapes.FLOAT8)]


def float8_times(session, shapes, peers=PEERS):
    """(a cell, its times, who is left out) for each shape: a scale for all, and one for each token and head, beside
    peers over float8."""
    pools = [pool.to(torch.float8_e4m3fn) for pool in session.pools]
    for shape in shapes:
        cell = Cell(pools, shape, 64, by_tensor)
        calls, left_out = session.contenders(cell, allowed=decode_cell.FLOAT8_AGREEMENT, peers=peers)
        made = {name: contender_of(cell, call) for name, call in calls.items()}
        others = {"by_token": Cell(pools, shape, 64, by_token), "bf16": Cell(session.pools, shape, 64)}
        made |= {name: contender_of(other, other.ours()) for name, other in others.items()}
        yield cell, session.turns(made), left_out


def invariance(session):
    """batch_invariant at several split sizes."""
    found = []
    for shape in decode_shapes.shapes_of(decode_shapes.INVARIANT, session.pools[0].numel()):
        cell, left_out = Cell(session.pools, shape, 64), {}
        calls = {"ours": cell.ours()}
        for size in decode_shapes.SPLIT_SIZES:
            calls[str(size)] = cell.ours(batch_invariant=True, split_size=size)
        if shape == decode_shapes.ONE_SPLIT:
            try:
                calls["fa3_one_split"] = fa3_cache.Decode(cell, splits=1)
                calls["fa3_one_split"](0)
            except Exception as why:
                calls.pop("fa3_one_split", None)
                left_out["fa3_one_split"] = said(why)
        made = {name: contender_of(cell, call) for name, call in calls.items()}
        found.append(row_of(cell, session.turns(made, FEW_ROUNDS), left_out))
    return found


# --- Plans, and the host ----------------------------------------------------------------------------------


def plan_updates(session):
    """Microseconds of plan.update, by itself in a graph, and of the host in a call of it."""
    found = []
    for shape in decode_shapes.UPDATED:
        cell = Cell(session.pools, decode_shapes.SMALLEST, 16)
        k, v, _ = cell.cache(0)
        pages = shape.batch, shape.keys // cell.page  # of requests that share some: no update looks at keys
        table = torch.randint(len(k), pages, device="cuda", dtype=torch.int32)
        lengths = torch.full((shape.batch,), shape.keys, device="cuda", dtype=torch.int32)
        cache, plan = KvCache(k, v, table, lengths), plan_of(shape)
        bounds = torch.full((*k.shape[:2], 1, 1), FOR_GOOD, device="cuda", dtype=torch.int32)
        vectors_mb = shape.batch * shape.keys * bounds.element_size() / 1e6
        kinds = {"causal": (None, 0), "vectors": (SequenceMask(bounds=bounds, key_layout="pages"), vectors_mb)}
        for name, (mask, read) in kinds.items():

            def update(_, mask=mask):
                plan.update(mask, cache)

            times = session.turns({"ours": Contender(update, 1, UPDATES)})
            row = {"update": f"{shape.batch} x {shape.keys}, {name}", "us": median(times["ours"]), "vector_mb": read}
            found.append({**row, "host_us": host_us(update)})
    return found


def host_us(call):
    times = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call(0)
        times.append(time.perf_counter() - begin)
    return median(times) * 1e6


def host_times(session):
    """Microseconds that a call takes the host, with nothing before it on the GPU."""
    calls, _ = session.contenders(Cell(session.pools, decode_shapes.SMALLEST, 64))
    return [{"contender": name, "us": host_us(call)} for name, call in calls.items()]
