# SPDX-License-Identifier: Apache-2.0
"""Program of each process of test_processes.py; it writes failures to a file."""

import concurrent.futures
import contextlib
import datetime
import faulthandler
import os
import random
import re
import signal
import sys
import time
import traceback
from unittest import mock

import host_peers
import torch
import torch.distributed as dist
from flashmask import Mask, UnsupportedError, context_parallel, masks
from flashmask.context_parallel import by_arrival, exchange
from flashmask.context_parallel.attention import WAYS
from flashmask.torch import ops
from flashmask.torch.dropout import draw_state
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

ON_GPU = os.environ.get("FLASHMASK_TEST_DEVICE") == "cuda"
ARRIVAL_TIMEOUT = 5.0 if ON_GPU else 60.0  # seconds


def families():
    """Masks of 300 to 700 rows: {name: Mask}."""
    n = 421
    generator = torch.Generator().manual_seed(3)

    def bounds(vectors, batch=1, heads=1):
        return torch.randint(0, n + 1, (batch, heads, n, vectors), generator=generator, dtype=torch.int32)

    pos = torch.randint(0, n, (1, n), generator=generator, dtype=torch.int32)
    blocks = torch.rand(1, 2, 4, 4, generator=generator) < 0.6
    made = {
        "full": Mask(n, n),
        "causal": Mask(n, n, causal=True),
        "window": Mask(n, n, window=(70, 20)),
        "causal window": Mask(n, n, causal=True, window=(50, -1)),
        "causal documents": masks.causal_document(seqlens=[100, 17, 204, 100]),
        "documents": masks.document(seqlens=[100, 17, 204, 100]),
        "shared question": masks.shared_question([(150, [60, 50]), (61, [40, 60])]),
        "prefix LM": masks.prefix_lm_causal(n, prefix=90),
        "any columns": Mask(n, n, bounds=bounds(4)),
        "per head": Mask(n, n, bounds=bounds(2, heads=2)),
        "batch": Mask(n, n, bounds=bounds(1, batch=2), causal=True),
        "causal interval in a window": Mask(n, n, bounds=bounds(2), causal=True, window=(200, -1)),
        "positions": Mask(n, n, q_pos=pos, k_pos=pos, causal=True),
        "blocks": Mask(n, n, block_mask=blocks, causal=True),
        "nothing": Mask(n, n, bounds=torch.zeros(1, 1, n, 1, dtype=torch.int32), causal=True),
    }
    dilated = masks.dilated(n, 9, 5)
    made["lists"] = masks.neighborhood_2d(15, 28, 5, 7)
    made["lists of heads"] = masks.from_dense(torch.rand(2, 2, n, n, generator=generator) < 0.95)
    made["lists, positions and blocks"] = dilated.replace(q_pos=pos, k_pos=pos, causal=True, block_mask=blocks)
    return made


def device():
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")


def tensors(mask, dtype=None, heads=(4, 2), dims=(32, 32), batch=2):
    generator = torch.Generator().manual_seed(mask.seqlen_q)
    dtype = dtype or (torch.bfloat16 if ON_GPU else torch.float32)
    (heads_q, heads_kv), (d, dv) = heads, dims
    shapes = ((heads_q, d), (heads_kv, d), (heads_kv, dv), (heads_q, dv))
    return [torch.randn(batch, mask.seqlen_q, *s, generator=generator).to(device(), dtype) for s in shapes]


def whole(mask, q, k, v, dout, sink=None, **features):
    """out, lse and gradients on one process."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v, sink) if x is not None]
    given = {} if sink is None else {"sink": leaves[3]}
    out, lse = ops.attention(*leaves[:3], mask.to(q.device), **given, **features)
    return (out, lse, *torch.autograd.grad(_loss(out, lse, dout), leaves))


def attention(q, k, v, local, **options):
    """The call under test: the same bits in every run, on a GPU too."""
    given = {"deterministic": True, "arrival_timeout": ARRIVAL_TIMEOUT, **options}
    return context_parallel.attention(q, k, v, local.to(q.device), **given)


def _loss(out, lse, dout):
    return (out * dout).sum() + torch.where(lse == -torch.inf, 0, lse).sum()


def shared(placement, rank, mask_index, q, k, v, dout, way="auto", sink=None, **features):
    """Results and gradients of this rank's rows, and this rank's share of the sink's."""
    local = placement.mask(rank, mask_index)
    leaves = [placement.shard(x, rank).requires_grad_() for x in (q, k, v)]
    if sink is not None:
        features["sink"] = sink.clone().requires_grad_()
        leaves.append(features["sink"])
    out, lse = attention(*leaves[:3], local, return_lse=True, way=way, **features)
    return (out, lse, *torch.autograd.grad(_loss(out, lse, placement.shard(dout, rank)), leaves))


def ways(heads_q, heads_kv, world):
    """Ways that these heads allow, or of tests of arrivals, that the GPU does."""
    if OF_ARRIVALS:
        return ("arrive",) if not exchange.refusal(device()) else ("gather",)
    divide = heads_q % world == 0 and (heads_kv % world == 0 or world % heads_kv == 0)
    return ("gather", "overlap", "all_to_all") if divide else ("gather", "overlap")


def check(name, got, want, placement, rank, tolerance):
    tolerance = max(tolerance, 2e-2) if ON_GPU else tolerance
    for what, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, want):
        if x is None:
            continue
        y = placement.shard(y, rank, 2 if what == "lse" else 1)
        assert x.shape == y.shape and x.dtype == y.dtype, (name, what, x.shape, y.shape)
        if x.numel() == 0:
            continue
        error = (x.double() - y.double()).nan_to_num(0).abs().max().item()
        assert torch.equal(x.isinf(), y.isinf()) and not x.isnan().any(), (name, what)
        assert error <= tolerance * max(y.double().nan_to_num(0, 0, 0).abs().max().item(), 1), (name, what, error)


def test_families(rank, world):
    """Forward and gradients are those of one process, twice with the same bits, in each way."""
    for number, (name, mask) in enumerate(families().items()):
        scheme = ("balanced", "zigzag", "contiguous")[number % 3]
        placement = context_parallel.place(mask, world, scheme=scheme)
        heads = (4, 2) if world in (1, 2, 4) else (2 * world, 2)  # and 3 ranks cannot share 2 key heads
        inputs = tensors(mask, heads=heads, dims=((32, 32), (32, 16))[number // 3 % 2])
        want = whole(mask, *inputs)
        for way in ways(*heads, world):
            got = shared(placement, rank, 0, *inputs, way=way)
            check(f"{name}, {way}", got, want, placement, rank, 2e-5)
            again = shared(placement, rank, 0, *inputs, way=way)
            assert all(torch.equal(x, y) for x, y in zip(got, again)), (name, way)


def test_lengths_and_heads(rank, world):
    for n, heads in ((1, (2, 2)), (world, (3, 1)), (129, (6, 3)), (1000, (2, 1))):
        for scheme in ("balanced", "zigzag", "contiguous"):
            mask = Mask(n, n, causal=True)
            placement = context_parallel.place(mask, world, scheme=scheme)
            inputs = tensors(mask, heads=heads, dims=(16, 24) if n % 2 else (16, 16), batch=1)
            want = whole(mask, *inputs)
            for way in ("auto", *ways(*heads, world)):
                got = shared(placement, rank, 0, *inputs, way=way)
                check(f"{n} {scheme} {way}", got, want, placement, rank, 2e-5)


def test_half(rank, world):
    """Parts are not rounded in between: the errors are those of one process' rounding."""
    mask = masks.causal_document(seqlens=[200, 313])
    placement = context_parallel.place(mask, world)
    inputs = tensors(mask, torch.bfloat16, heads=(2 * world, world))
    want = whole(mask, *inputs)
    for way in ways(2 * world, world, world):
        got = shared(placement, rank, 0, *inputs, way=way)
        check(f"bfloat16 {way}", got, want, placement, rank, 1e-2)


def test_several_masks(rank, world):
    """Layers of different kinds on one placement."""
    both = [Mask(500, 500, causal=True), Mask(500, 500, causal=True, window=(60, -1))]
    placement = context_parallel.place(both, world)
    for index, mask in enumerate(both):
        inputs = tensors(mask)
        check(f"mask {index}", shared(placement, rank, index, *inputs), whole(mask, *inputs), placement, rank, 2e-5)


def features(heads, batch, dtype=torch.float32):
    """{name: features of a call}: each alone, and all together."""
    generator = torch.Generator().manual_seed(heads)
    sink = torch.randn(heads, generator=generator).to(device(), dtype)
    slopes = torch.rand(batch, heads, generator=generator).to(device()) / 16
    made = {"sink": {"sink": sink}, "softcap": {"softcap": 2.0}, "slopes": {"alibi_slopes": slopes[0].contiguous()}}
    state = torch.randint(1 << 62, (2,), generator=generator).to(device())
    made["dropout"] = {"dropout": 0.3, "dropout_state": state}
    made["all"] = {"sink": sink, "softcap": 2.0, "alibi_slopes": slopes, **made["dropout"]}
    return made


def check_features(name, mask, placement, rank, inputs, given, ways_, tolerance):
    """Results, gradients and the sum of the ranks' gradients of the sink, in each way, twice with the same bits."""
    want = whole(mask, *inputs, **given)
    for way in ways_:
        several = placement.world_size > 1 and way != "all_to_all"
        if ON_GPU and several and given.keys() >= {"softcap", "alibi_slopes"}:
            continue  # refused
        got = shared(placement, rank, 0, *inputs, way=way, **given)
        check(f"{name}, {way}", got[:5], want[:5], placement, rank, tolerance)
        again = shared(placement, rank, 0, *inputs, way=way, **given)
        assert all(torch.equal(x, y) for x, y in zip(got, again)), (name, way)
        if "sink" in given:
            assert got[5].dtype == given["sink"].dtype
            of_ranks = got[5].double()
            dist.all_reduce(of_ranks)
            error = (of_ranks - want[5].double()).abs().max().item()
            limit = (2e-2 if ON_GPU else tolerance) * max(want[5].abs().max().item(), 1)
            assert error <= limit and of_ranks.abs().max() > 0, (name, way, "dsink", error)


def test_features(rank, world):
    """A sink, a softcap, ALiBi, whose distances are those of the sequence, and dropout, whose rows, keys and heads are:
    under masks that become rows of each form, on ranks whose rows are one run, and several."""
    every = families()
    names = ("causal documents", "window", "batch", "causal interval in a window", "positions", "lists", "blocks")
    for number, name in enumerate((*names, "lists, positions and blocks", "full", "nothing")):
        mask = every[name]
        heads = (4, 2) if world in (1, 2, 4) else (2 * world, 2)
        inputs = tensors(mask, heads=heads, dims=((32, 32), (32, 16))[number % 2])
        of_call = features(heads[0], 2)
        for scheme in ("zigzag", "contiguous") if number % 2 else ("balanced",):
            placement = context_parallel.place(mask, world, scheme=scheme)
            # On a GPU gather takes no more at once.
            for what in of_call if number == 0 else ("slopes", "dropout") if ON_GPU else ("all",):
                case = f"{name}, {scheme}, {what}"
                check_features(case, mask, placement, rank, inputs, of_call[what], ways(*heads, world), 2e-5)


def test_features_of_other_dtypes(rank, world):
    mask = masks.causal_document(seqlens=[200, 113])
    placement = context_parallel.place(mask, world, scheme="zigzag")
    heads = 2 * world, world
    cases = [(torch.bfloat16, "auto", 1e-2), (torch.float16, "auto", 2e-3)]
    for dtype, backend, tolerance in cases if ON_GPU else [*cases, (torch.float64, "reference", 1e-12)]:
        inputs = tensors(mask, dtype, heads=heads)
        given = {"backend": backend, **features(heads[0], 2, dtype)["all"]}
        check_features(str(dtype), mask, placement, rank, inputs, given, ways(*heads, world), tolerance)


def test_what_gpus_lack(rank, world):
    """Under a softcap, slopes and dropout results of parts, dk and dv are rounded before they are added, and what
    cannot be is refused."""
    mask = masks.causal_document(seqlens=[200, 113])
    placement = context_parallel.place(mask, world, scheme="zigzag")
    heads = 2 * world, world
    inputs = tensors(mask, torch.bfloat16, heads=heads)
    every = features(heads[0], 2, torch.bfloat16)
    modules = [sys.modules[f"flashmask.context_parallel.{name}"] for name in ("attention", "by_keys", "by_heads")]
    allowed = {"all": ("all_to_all",)}
    with contextlib.ExitStack() as stack:
        for module in modules:
            patch = mock.patch.object(module, "has_partial_results", lambda q, given: given.keys() <= {"sink"})
            stack.enter_context(patch)
        for what, given in every.items():
            by = allowed.get(what, ("gather", "overlap", "all_to_all", "auto"))
            check_features(f"rounded, {what}", mask, placement, rank, inputs, given, by, 1e-2)
        for way in ("gather", "overlap"):
            try:
                shared(placement, rank, 0, *inputs, way=way, **every["all"])
            except UnsupportedError as error:
                assert f"way is '{way}', with " in str(error) and "take" in str(error)
            else:
                assert world == 1, way


def test_dropout_of_short_sequences(rank, world):
    """Rows that do not begin at multiples of 16 are refused by name; an all-to-all keeps the sequence's."""
    mask = Mask(9 * world, 9 * world, causal=True)
    placement = context_parallel.place(mask, world)
    heads = 2 * world, world
    inputs, given = tensors(mask, heads=heads), features(heads[0], 2)["dropout"]
    for way in ways(*heads, world):
        if way == "all_to_all" or world == 1:
            check_features(f"short, {way}", mask, placement, rank, inputs, given, (way,), 2e-5)
            continue
        try:
            shared(placement, rank, 0, *inputs, way=way, **given)
            raise AssertionError("nothing was raised")
        except UnsupportedError as error:
            assert f"way is '{way}', with dropout, and rows" in str(error) and "multiples of 16" in str(error), error


def test_a_state_for_all(rank, world):
    """Without a state all ranks drop by the one that rank 0 draws."""
    mask, heads = Mask(300, 300, causal=True), (2 * world, world)
    placement, inputs = context_parallel.place(mask, world), tensors(mask, heads=heads)
    torch.manual_seed(0)
    want = whole(mask, *inputs, dropout=0.5, dropout_state=draw_state(device()))
    for way in ways(*heads, world):
        torch.manual_seed(rank)
        got = shared(placement, rank, 0, *inputs, way=way, dropout=0.5)
        check(f"a state for all, {way}", got, want, placement, rank, 2e-5)


def test_states_that_change(rank, world):
    """A backward drops what its forward has dropped, whatever has become of the tensor of the state."""
    mask, heads = Mask(300, 300, causal=True), (2 * world, world)
    placement, inputs = context_parallel.place(mask, world), tensors(mask, heads=heads)
    given = features(heads[0], 2)["dropout"]
    want = whole(mask, *inputs, **given)
    state = given["dropout_state"].clone()
    leaves = [placement.shard(x, rank).requires_grad_() for x in inputs[:3]]
    options = dict(return_lse=True, dropout=given["dropout"], dropout_state=state)
    out, lse = attention(*leaves, placement.mask(rank), way="gather", **options)
    state += 1
    gradients = torch.autograd.grad(_loss(out, lse, placement.shard(inputs[3], rank)), leaves)
    check("a state that changes", (out, lse, *gradients), want, placement, rank, 2e-5)


def test_distances_without_slopes_cost_nothing(rank, world):
    """Masks have positions in calls with slopes alone, where a rank has several runs of rows."""
    mask = Mask(256 * world, 256 * world, causal=True)
    for scheme in ("zigzag", "contiguous"):
        local = context_parallel.place(mask, world, scheme=scheme).mask(rank)
        assert all(m.q_pos is None for m in (local.own, local.gathered, *(piece.mask for piece in local.pieces)))
        placed = local.masks(True, torch.device("cpu"))
        assert placed is local.masks(True, torch.device("cpu")) and placed.own.q_offset == local.own.q_offset
        is_one_run = len(local.placement.segments(rank)) == 1
        assert (placed.own.q_pos is None) == is_one_run, (scheme, placed.own)


def test_only_what_is_seen_travels(rank, world):
    n = 128 * 2 * world
    documents = context_parallel.place(masks.causal_document(seqlens=[256] * world), world, scheme="contiguous")
    local = documents.mask(rank)
    assert local.received_keys == 0 and not local.pieces
    causal = context_parallel.place(Mask(n, n, causal=True), world, scheme="contiguous")
    assert causal.mask(rank).received_keys == 256 * rank
    assert causal.mask(rank).received_keys == causal.received_rows()[rank]


def test_no_part_is_used_before_it_arrives(rank, world):
    """Gradients reach every rank's keys when only one rank's output is used."""
    mask = Mask(300, 300)
    placement = context_parallel.place(mask, world, scheme="contiguous")
    q, k, v, dout = tensors(mask)
    rows = torch.arange(300, device=dout.device)[None, :, None, None]
    dout = torch.where(rows >= placement.segments(world - 1)[0][0], dout, 0)
    leaves = [placement.shard(x, rank).requires_grad_() for x in (q, k, v)]
    full = [x.clone().requires_grad_() for x in (q, k, v)]
    want = torch.autograd.grad((ops.attention(*full, mask)[0] * dout).sum(), full)
    for way in ways(q.shape[2], k.shape[2], world):
        out = attention(*leaves, placement.mask(rank), way=way)
        got = torch.autograd.grad((out * placement.shard(dout, rank)).sum(), leaves)
        check(way, (None, None, *got), (None, None, *want), placement, rank, 2e-5)


def test_checkpointing(rank, world):
    """A layer that is computed again in the backward, and one in a compiled function: the same bits."""
    mask = masks.causal_document(seqlens=[150, 251])
    placement = context_parallel.place(mask, world)
    local = placement.mask(rank)
    heads = (2 * world, world)
    shards = [placement.shard(x, rank) for x in tensors(mask, heads=heads)]

    def gradients(way, wrap):
        leaves = [x.clone().requires_grad_() for x in shards[:3]]
        out = wrap(lambda q, k, v: attention(q * 2, k, v, local, way=way), *leaves)
        return torch.autograd.grad((out * shards[3]).sum(), leaves)

    for way in ways(*heads, world):
        want = gradients(way, lambda call, *leaves: call(*leaves))
        got = gradients(way, lambda call, *leaves: checkpoint(call, *leaves, use_reentrant=False))
        compiled = gradients(way, lambda call, *leaves: torch.compile(call, backend="eager")(*leaves))
        assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(want, got, compiled)), way


def has_arrivals(world):
    return world > 1 and not exchange.refusal(device())


def arrived(placement, rank, inputs, group=None, **options):
    """out of a call whose keys arrive, and the rank's tensors."""
    local = placement.mask(rank).to(device())
    shards = [placement.shard(x, rank) for x in inputs[:3]]
    given = {"arrival_timeout": ARRIVAL_TIMEOUT, **options}
    return context_parallel.attention(*shards, local, group=group, way="arrive", **given)


def test_keys_that_do_not_come(rank, world):
    """A rank that comes too late: the others' results are NaN, and their next call names it."""
    if not has_arrivals(world):
        return
    group = dist.new_group()
    mask = Mask(300, 300)
    placement = context_parallel.place(mask, world, scheme="contiguous")
    inputs = tensors(mask)
    want = arrived(placement, rank, inputs, group)
    dist.barrier()
    if rank == 0:
        out = arrived(placement, rank, inputs, group, arrival_timeout=0.3)
        assert out.isnan().all() and want.isfinite().all()
        try:
            arrived(placement, rank, inputs, group)
            raise AssertionError("nothing was raised")
        except TimeoutError as error:
            late = r"the keys of (rank|one of ranks) [1-7, ]+ did not come within arrival_timeout"
            assert re.search(late, str(error)), error
    dist.barrier()
    if rank != 0:  # who finds all keys there
        assert torch.equal(arrived(placement, rank, inputs, group), want)
    dist.barrier()
    if ON_GPU:
        torch.cuda.synchronize()  # rank 0 has been sent what it no longer waits for


def test_one_registration(rank, world):
    """Registered memory grows with the largest call, and then stays."""
    if not has_arrivals(world):
        return
    group = dist.new_group()
    held = []
    for n in (300, 2000, 300):
        mask = Mask(n, n)
        placement = context_parallel.place(mask, world)
        inputs = tensors(mask)
        check("arrive", (arrived(placement, rank, inputs, group),), whole(mask, *inputs)[:1], placement, rank, 2e-5)
        shared = exchange.of(group, inputs[0].device)
        held.append((shared.registered_bytes, shared.slot_bytes))
    assert held[0] <= held[1] == held[2] and held[0][1] < held[1][1], held


def test_an_arriving_forward_has_a_gathered_backward(rank, world):
    """Also where gradients could leave early, and whether gather keeps received keys or has them travel again."""
    if not has_arrivals(world):
        return
    n, heads = 256 * world, (2 * world, world)
    kept, of_calls = set(), features(heads[0], 2)
    with mock.patch.object(ops, "early_backward", wraps=ops.early_backward) as early:
        for mask, what in ((Mask(n, n), "sink"), (Mask(n, n, causal=True, window=(40, -1)), "dropout")):
            placement = context_parallel.place(mask, world, scheme="contiguous")
            local = placement.mask(rank)
            kept.add(local.keeps_keys)
            assert local.parts_are_whole_tiles
            check_features(what, mask, placement, rank, tensors(mask, heads=heads), of_calls[what], ("arrive",), 2e-5)
    assert early.call_count == 0 and kept == ({True, False} if world > 2 else {True})


def test_gradients_that_leave_early(rank, world):
    """The backward that no way takes: gradients leave early where ranks have whole blocks of keys, under masks of each
    form, and with a sink."""
    if not has_arrivals(world):
        return
    with mock.patch.dict(WAYS, arrive=by_arrival.ArriveAndLeave):
        check_gradients_that_leave_early(rank, world)


def check_gradients_that_leave_early(rank, world):
    n, heads = 256 * world, (2 * world, world)
    generator = torch.Generator().manual_seed(4)
    documents = masks.causal_document(seqlens=[100, n - 230, 130])
    ends, of_heads = (
        torch.randint(1, n + 1, (*shape, n, 1), generator=generator, dtype=torch.int32)
        for shape in ((2, 1), (1, world))
    )
    made = {
        "documents": documents,
        "full": Mask(n, n),
        "entries": Mask(n, n, causal=True, bounds=ends),
        "heads": Mask(n, n, causal=True, bounds=of_heads),
        "window": Mask(n, n, causal=True, window=(40, -1)),
    }
    early = []
    with mock.patch.object(ops, "early_backward", wraps=ops.early_backward) as calls:
        for number, (name, mask) in enumerate(made.items()):
            for scheme in ("contiguous", "zigzag"):
                placement = context_parallel.place(mask, world, scheme=scheme)
                local = placement.mask(rank)
                received = local.by_arrival().gathered.seqlen_k - local.rows
                assert local.parts_are_whole_tiles and local.received_by(rank) == received
                inputs, before = tensors(mask, heads=heads), calls.call_count
                of_call = features(heads[0], 2)["sink"] if number == 0 else {}
                check_features(f"{name} {scheme}", mask, placement, rank, inputs, of_call, ("arrive",), 2e-5)
                early.append(calls.call_count - before)
    assert set(early) <= {0, 2} and 2 in early, early  # twice each, but where nothing travels


def test_settings_of_cuda(rank, world):
    """Keys arrive in tensors of whatever allocator, and through one hardware queue."""
    if not has_arrivals(world):
        return
    test_an_arriving_forward_has_a_gathered_backward(rank, world)
    test_gradients_that_leave_early(rank, world)
    if ON_GPU and "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


class SlowPeers(exchange.CudaPeers):
    """Pauses at random before every step: by a kernel, or where that would wait for the forward, which has all
    multiprocessors, in a thread of the host."""

    def __init__(self, device):
        super().__init__(device)
        self._thread = concurrent.futures.ThreadPoolExecutor(1)

    def copy(self, transfers, after_early=False):
        if after_early:  # whose event the next backward may have recorded anew when the thread comes to it
            self._thread.submit(int).result()
            return super().copy(transfers, after_early=True)
        self._thread.submit(self._one_by_one, self._last.record_event(), transfers)

    def join(self):
        self._thread.submit(int).result()
        super().join()

    def _one_by_one(self, event, transfers):
        self._copies.wait_event(event)
        for transfer in transfers:
            time.sleep(random.choice((0, 0, 1e-3)))
            self._enqueue([transfer])

    def signal(self, *arguments):
        torch.cuda._sleep(random.randrange(2_000_000))
        super().signal(*arguments)

    def settle(self, *arguments):
        torch.cuda._sleep(random.randrange(2_000_000))
        super().settle(*arguments)


def test_delays_beside_collectives(rank, world):
    """Neither pauses nor NCCL's kernels beside the exchange change a bit. On CPUs stand-ins pause in every test."""
    if not (ON_GPU and has_arrivals(world)):
        return
    mask = masks.causal_document(seqlens=[1000, 1700, 2300])
    placement = context_parallel.place(mask, world)
    inputs = tensors(mask, heads=(8, 2), dims=(128, 128), batch=1)
    want = arrived(placement, rank, inputs)
    other = torch.ones(1 << 24, device=device())
    random.seed(rank)
    with mock.patch.dict(exchange.PEERS, cuda=SlowPeers):
        group = dist.new_group()
        for _ in range(50):
            beside = dist.all_reduce(other.clone(), async_op=True)
            outs = [arrived(placement, rank, inputs, group) for _ in range(3)]
            beside.wait()
            assert all(torch.equal(out, want) for out in outs)


class Count(TorchDispatchMode):
    """How many of torch's operators run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.names.append(str(function))
        return function(*arguments, **(named or {}))


def test_calls_of_the_host(rank, world):
    """Operators of torch, each of which costs the host microseconds: as many however many segments the keys lie in."""
    n, heads = 256 * world, (2 * world, world)
    hidden = torch.arange(n) // 2 % 2 == torch.arange(2)[:, None]  # every other pair of keys, others in each entry
    bounds = torch.where(hidden, 0, n).int()
    bounds[1, n // 8 : n // 4] = 0  # and fewer keys in one
    causal, pairs = Mask(n, n, causal=True), Mask(n, n, causal=True, bounds=bounds[:, None, :, None].contiguous())
    once, twice = (
        {"gather": gather, "arrive": arrive, "overlap": overlap, "all_to_all": (33, 34)}
        for gather, arrive, overlap in (((24, 29), (24, 31), (53, 75)), ((39, 52), (39, 52), (93, 148)))
    )
    counts = {}
    # Heads of k and v that are not of one width travel one after the other.
    for mask, dims, most in ((causal, (32, 32), once), (pairs, (32, 32), once), (pairs, (32, 16), twice)):
        placement = context_parallel.place(mask, world, scheme="contiguous")
        local = placement.mask(rank).to(device())
        shards = [placement.shard(x, rank) for x in tensors(mask, heads=heads, dims=dims)]
        leaves = [x.requires_grad_() for x in shards[:3]]
        for way in dict.fromkeys(("gather", *ways(*heads, world))):  # whose calls the others are compared with

            def call(way=way, local=local, leaves=leaves):
                return context_parallel.attention(*leaves, local, way=way, deterministic=True)

            torch.autograd.grad(call(), leaves, shards[3])  # makes index tensors and plans
            with Count() as forward:
                out = call()
            with Count() as backward:
                torch.autograd.grad(out, leaves, shards[3])
            assert len(forward.names) <= most[way][0], (way, forward.names)
            # The keys of gather may have to travel again, by as many calls as in its forward.
            again = counts[("gather", dims)][-1][0] if way == "arrive" else len(forward.names)
            travels = way in ("gather", "arrive") and not local.keeps_keys
            own = len(backward.names) - (again if travels else 0)
            # Each other peer's gradients of a key are added by themselves, in order.
            peers = max(world - 2, 0) * (1 if dims[0] == dims[1] else 2)
            assert own <= most[way][1] + 5 * peers, (way, backward.names)
            counts.setdefault((way, dims), []).append((len(forward.names), own))
    segments = max((len(s) for piece in local.pieces for _, _, s in piece.sends), default=0)
    assert world == 1 or rank == world - 1 or segments >= 16, segments
    # Counts differ because entries have unlike numbers of keys.
    pairs = (of for of in counts.values() if len(of) == 2)
    assert all(abs(a - b) <= 16 for few, many in pairs for a, b in zip(few, many)), counts


def test_infinite_gradients_stay_in_their_column(rank, world):
    """Moving and adding gradients treats each element by itself."""
    mask = Mask(300, 300, causal=True)
    placement = context_parallel.place(mask, world)
    local = placement.mask(rank).to(device())
    q, k, v, dout = (placement.shard(x, rank) for x in tensors(mask))
    dout[..., 1] = 1e38  # summed with the weights of the first keys it overflows
    for way in ways(q.shape[2], k.shape[2], world):
        leaf = v.detach().requires_grad_()
        out = context_parallel.attention(q, k, leaf, local, way=way)
        (dv,) = torch.autograd.grad(out, [leaf], dout)
        others = torch.arange(dv.shape[-1], device=dv.device) != 1
        assert dv[..., others].isfinite().all(), way
        assert placement.segments(rank)[0][0] or dv[..., 1].isinf().any(), way


def test_layouts(rank, world):
    """Views with other strides, as of [batch, heads, rows, head_dim], and no gradient wanted of some."""
    mask = Mask(300, 300, causal=True)
    placement = context_parallel.place(mask, world)
    local = placement.mask(rank)
    q, k, v, dout = (placement.shard(x, rank) for x in tensors(mask))
    want = attention(q, k, v, local)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    v.requires_grad_()
    got = attention(q, k, v, local)
    assert torch.equal(got, want)
    (dv,) = torch.autograd.grad((got * dout).sum(), [v])
    assert dv.shape == v.shape and dv.isfinite().all()


def test_disagreements(rank, world):
    def message_of(call):
        try:
            call()
        except ValueError as error:
            return str(error)
        raise AssertionError("nothing was raised")

    if world == 1:
        return
    masks_ = [Mask(300, 300, causal=True), Mask(300, 300)]
    mine = context_parallel.place(masks_[rank == 1], world, scheme="contiguous")
    q, k, v, _ = (mine.shard(x, rank) for x in tensors(masks_[0]))
    text = message_of(lambda: attention(q, k, v, mine.mask(rank), check=True))
    assert "the mask or the placement of ranks [1] " in text, text
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.INFO)  # turns the check on by itself
    try:
        assert "ranks [1]" in message_of(lambda: attention(q, k, v, mine.mask(rank)))
    finally:
        dist.set_debug_level(before)
    same = context_parallel.place(masks_[0], world, scheme="contiguous").mask(rank)
    sink = torch.full((q.shape[2],), float(rank == 1), device=q.device)
    for name, given in (
        ("sink", {"sink": sink}),
        ("alibi_slopes", {"alibi_slopes": sink if rank == 1 else None}),
        ("options .*softcap", {"softcap": 1.0 + (rank == 1)}),
        ("options .*dropout", {"dropout": 0.1 + 0.1 * (rank == 1)}),
        ("dropout_state", {"dropout": 0.1, "dropout_state": torch.full((2,), rank, device=q.device)}),
    ):
        text = message_of(lambda given=given: attention(q, k, v, same, check=True, **given))
        assert re.search(name + ".* of ranks .1. ", text), text
    q, k, v = (x[:1] if rank == 1 else x for x in (q, k, v))
    text = message_of(lambda: attention(q, k, v, same, check=True))
    assert "shapes of q, k and v of ranks [1]" in text and "(1, " in text, text
    other = context_parallel.place(masks_[0], world).mask((rank + 1) % world)
    text = message_of(lambda: attention(q, k, v, other))
    assert f"this is rank {rank}" in text, text


class Model(torch.nn.Module):
    """Two layers whose masks differ, as of a model of global and windowed layers; attend(layer, q, k, v)."""

    def __init__(self, width=32, heads=(4, 2), words=50):
        super().__init__()
        torch.manual_seed(5)
        self.heads, self.width = heads, width
        self.embedding = torch.nn.Embedding(words, width)
        self.inner = torch.nn.ModuleList(torch.nn.Linear(width, 16 * (heads[0] + 2 * heads[1])) for _ in range(2))
        self.outer = torch.nn.ModuleList(torch.nn.Linear(16 * heads[0], width) for _ in range(2))
        self.head = torch.nn.Linear(width, words)

    def forward(self, ids, positions, attend):
        x = self.embedding(ids) + torch.sin(positions[..., None] / 10)
        for layer in range(2):
            x = x + checkpoint(self.layer, layer, x, attend, use_reentrant=False)
        return self.head(x)

    def layer(self, layer, x, attend):
        q, k, v = self.inner[layer](x).unflatten(-1, (-1, 16)).split([self.heads[0], self.heads[1], self.heads[1]], 2)
        return self.outer[layer](attend(layer, q, k, v).flatten(2))

    def train(self, ids, labels, positions, attend, tokens):
        """The loss's share of these rows, and its gradients."""
        logits = torch.compile(self, backend="eager")(ids, positions, attend)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens
        return loss.detach(), torch.autograd.grad(loss, list(self.parameters()))


def test_training(rank, world):
    """Loss and gradients are the undivided sequence's: ids, labels and positions taken apart, layers of two masks that
    differ between batch entries, checkpointed and compiled."""
    if ON_GPU:  # float32
        return
    documents = [masks.causal_document(seqlens=lengths) for lengths in ([150, 20, 131], [60, 100, 141])]
    bounds = torch.cat([m.bounds for m in documents])
    both = [documents[0].replace(bounds=bounds), documents[0].replace(bounds=bounds, window=(40, -1))]
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, 50, (2, 301), generator=generator)
    labels, positions = torch.roll(tokens, -1, dims=1), torch.arange(301).expand(2, -1)
    model = Model()
    want = model.train(tokens, labels, positions, lambda n, q, k, v: ops.attention(q, k, v, both[n])[0], tokens.numel())

    placement = context_parallel.place(both, world)
    locals_ = [placement.mask(rank, n) for n in range(2)]
    shards = [placement.shard(x, rank) for x in (tokens, labels, positions)]
    for way in ways(4, 2, world):
        loss, gradients = model.train(*shards, lambda n, *qkv: attention(*qkv, locals_[n], way=way), tokens.numel())
        for x in (loss, *gradients):
            dist.all_reduce(x)
        torch.testing.assert_close(loss, want[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(gradients, want[1], atol=1e-5, rtol=1e-4)


OF_ARRIVALS = False
_ARRIVALS = (test_one_registration, test_an_arriving_forward_has_a_gathered_backward)
_ARRIVALS = *_ARRIVALS, test_gradients_that_leave_early, test_delays_beside_collectives, test_keys_that_do_not_come
_IN_ALL_WAYS = (test_families, test_features, test_lengths_and_heads, test_half, test_checkpointing, test_layouts)
_IN_ALL_WAYS = *_IN_ALL_WAYS, test_calls_of_the_host, test_training, test_infinite_gradients_stay_in_their_column
_IN_ALL_WAYS = *_IN_ALL_WAYS, test_dropout_of_short_sequences, test_a_state_for_all
_APART = *_ARRIVALS, test_settings_of_cuda
TESTS = {name: value for name, value in globals().items() if name.startswith("test_") and value not in _APART}
# Tests of way="arrive", apart: a rank may wait for another in vain. Those of a group share a start of the processes.
GROUPS = [[test.__name__ for test in group] for group in (_ARRIVALS, _IN_ALL_WAYS)]
ARRIVALS = {test.__name__: test for test in (*_ARRIVALS, *_IN_ALL_WAYS)}
UNDER_SETTINGS = {test_settings_of_cuda.__name__: test_settings_of_cuda}
LIMIT = 20 if ON_GPU else 240  # seconds that a test of arrivals may take on a rank


def begin(rank):
    """Sets a process up, on its GPU or with stand-ins for what a GPU has."""
    torch.set_num_threads(1)
    if ON_GPU:
        torch.cuda.set_device(rank)
    else:
        exchange.PEERS["cpu"] = host_peers.HostPeers
        ops.arriving_attention = host_peers.arriving_attention
        ops.early_backward = host_peers.early_backward


def run(rank, world, folder, names=()):
    """Runs all tests but those of arrivals, or those of these names."""
    global OF_ARRIVALS
    OF_ARRIVALS = bool(names)
    begin(rank)
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    of_names = ARRIVALS | UNDER_SETTINGS
    for name, test in {n: of_names[n] for n in names}.items() if names else TESTS.items():
        error = ""
        with open(os.path.join(folder, f"{name}.{rank}"), "w") as file:
            if names:  # says where it waits, and ends
                faulthandler.dump_traceback_later(LIMIT, exit=True, file=file)
            try:
                test(rank, world)
            except Exception:
                error = traceback.format_exc()
            faulthandler.cancel_dump_traceback_later()
            file.write(error)
        if error:  # the others may wait for this rank
            os._exit(1)
    dist.barrier()
    if names:
        os._exit(0)  # whatever streams may still wait for
    dist.destroy_process_group()


def run_beside_a_killed_rank(rank, folder):
    """Rank 0 of two calls attention when the other one has been killed. What it is told, and what its result is."""
    begin(rank)
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mask = Mask(300, 300)
    placement = context_parallel.place(mask, 2)
    inputs = tensors(mask)
    said = [f"{arrived(placement, rank, inputs).isfinite().all().item()}"]
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    said.append(f"{arrived(placement, rank, inputs, arrival_timeout=0.5).isnan().all().item()}")
    try:
        arrived(placement, rank, inputs)
    except TimeoutError as error:
        said.append(str(error))
    with open(os.path.join(folder, "told"), "w") as file:
        file.write("\n".join(said))
    os._exit(0)


def run_without_the_other(rank, folder, other):
    """Rank 0 of two calls attention, and the other one ends first, or does something else. What rank 0 is told."""
    limit = datetime.timedelta(seconds=4)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=limit)
    dist.barrier()
    if rank == 1:
        if other == "late":
            time.sleep(20)
        os._exit(0)
    mask = Mask(300, 300)
    placement = context_parallel.place(mask, 2)
    shards = [placement.shard(x, rank) for x in tensors(mask)[:3]]
    told = "nothing"
    try:
        attention(*shards, placement.mask(rank), way="gather")
    except RuntimeError as error:
        told = str(error)
    with open(os.path.join(folder, "told"), "w") as file:
        file.write(told)
    os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    elif sys.argv[4] == "arrivals":
        run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[5:])
    elif sys.argv[4] == "killed":
        run_beside_a_killed_rank(int(sys.argv[1]), sys.argv[3])
    else:
        run_without_the_other(int(sys.argv[1]), *sys.argv[3:])
