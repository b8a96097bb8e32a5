# SPDX-License-Identifier: Apache-2.0
"""Attention over several processes, through gloo on the CPU. What each runs: ranks.py."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time

import pytest
import ranks
import torch
from flashmask import Mask, UnsupportedError, context_parallel
from flashmask.context_parallel import exchange
from flashmask.torch import ops

WORLDS = [1, 2, 3, 4, 8] if os.environ.get("FLASHMASK_TEST_LONG") else [2, 3]
if ranks.ON_GPU:  # over NCCL, a GPU for each process
    WORLDS = [world for world in (1, 2, 3, 4, 8) if world <= torch.cuda.device_count()]
SCRIPT = pathlib.Path(__file__).with_name("ranks.py")
_folders = {}


def results(world, tmp_path_factory, names=(), settings=()):
    """The folder with what each rank says of each test: one start of all processes for each world size, and for these
    tests of arrivals. settings: ((variable of the environment, value), ...)."""
    key = world, *names, settings
    if key not in _folders:
        folder = _folders[key] = tmp_path_factory.mktemp(f"ranks{world}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **dict(settings)}
        of_arrivals = ["arrivals", *names] if names else []
        processes = [
            subprocess.Popen([sys.executable, SCRIPT, str(rank), str(world), folder, *of_arrivals], env=environment)
            for rank in range(world)
        ]
        end_all(processes, 60 if names and ranks.ON_GPU else 300)
    return _folders[key]


def end_all(processes, seconds):
    """Waits until all have ended, or one in error, and then ends the others."""
    end = time.monotonic() + seconds
    try:
        for process in processes:
            if process.wait(timeout=max(end - time.monotonic(), 0)):
                break
    except subprocess.TimeoutExpired:
        pass
    for process in processes:
        process.kill()
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):  # a GPU's driver may keep it
            process.wait(timeout=10)


def check(name, world, folder):
    errors = {}
    for rank in range(world):
        said = folder / f"{name}.{rank}"
        errors[rank] = said.read_text() if said.exists() else "it did not come so far"
    errors = {rank: text for rank, text in errors.items() if text}
    assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ranks.TESTS)
def test_processes(name, world, tmp_path_factory):
    check(name, world, results(world, tmp_path_factory))


@pytest.mark.parametrize("world", [world for world in WORLDS if world > 1])
@pytest.mark.parametrize("name", ranks.ARRIVALS)
def test_arrivals(name, world, tmp_path_factory):
    """A rank says where it waits when a test takes longer than ranks.LIMIT."""
    (names,) = (group for group in ranks.GROUPS if name in group)
    check(name, world, results(world, tmp_path_factory, names))


@pytest.mark.skipif(not ranks.ON_GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "settings", [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"), ("CUDA_DEVICE_MAX_CONNECTIONS", "1")]
)
def test_arrivals_under_settings(settings, tmp_path_factory):
    (name,) = ranks.UNDER_SETTINGS
    check(name, 2, results(2, tmp_path_factory, (name,), (settings,)))


@pytest.mark.parametrize("scheme", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ranks.families())
def test_every_visible_element_is_computed_once(name, world, scheme):
    """Also that what a rank waits for is what another sends, in the same order."""
    mask = ranks.families()[name]
    placement = context_parallel.place(mask, world, scheme=scheme)
    locals_ = [placement.mask(rank) for rank in range(world)]
    total = 0
    for rank, local in enumerate(locals_):
        assert local.digest == locals_[0].digest
        assert len(local.pieces) == len(locals_[0].pieces)  # each is a collective
        of_rank = local.own.to_dense().sum() + sum(piece.mask.to_dense().sum() for piece in local.pieces)
        assert of_rank == local.gathered.to_dense().sum()
        total += of_rank
        for peer in range(world):
            waits = [(entry, n) for piece in local.pieces for p, entry, n in piece.receives if p == peer]
            sends = [
                (entry, sum(end - begin for begin, end in segments))
                for piece in locals_[peer].pieces
                for p, entry, segments in piece.sends
                if p == rank
            ]
            assert waits == sends
        if mask.block_mask is None and mask.q_pos is None:  # the least is known then
            assert local.received_keys <= 1.05 * placement.received_rows()[rank]
    assert total == mask.to_dense().sum()


def told_without(other, folder):
    """Runs two ranks, of which 1 does as `other` says, and returns what rank 0 says."""
    command = [sys.executable, SCRIPT]
    processes = [subprocess.Popen([*command, str(rank), "2", folder, other]) for rank in range(2)]
    end_all(processes[:1], ranks.LIMIT + 20 if ranks.ON_GPU else 100)
    end_all(processes[1:], 0)
    return (folder / "told").read_text()


@pytest.mark.skipif(ranks.ON_GPU and torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_killed_rank_makes_nan_and_an_error(tmp_path):
    """The forward ends when it has waited long enough, and the next call names the rank."""
    before, after, told = told_without("killed", tmp_path).split("\n")
    assert (before, after) == ("True", "True")
    assert "the keys of rank 1 did not come within arrival_timeout" in told


@pytest.mark.skipif(ranks.ON_GPU, reason="NCCL's watchdog ends the process")
@pytest.mark.parametrize("other", ["gone", pytest.param("late", marks=pytest.mark.long)])
def test_a_missing_rank_is_an_error(other, tmp_path):
    """The process group's error, at its time-out at the latest."""
    told = told_without(other, tmp_path)
    assert told != "nothing" and ("closed" in told or "reset" in told or "imed out" in told), told


@pytest.mark.long
def test_a_small_measurement(tmp_path):
    """benchmarks.context_parallel.speed in its dry run: results as near as they have to be, and a second run that
    has nothing left to measure."""
    if ranks.ON_GPU:
        return
    environment = {**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.context_parallel.speed", "--device", "cpu", "--rounds", "1"]
    for _ in range(2):
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert said.returncode == 0, said.stdout + said.stderr
        assert "12 of 12 cells; 24 bars held, 0 missed" in said.stdout
    assert "PASS" not in said.stdout


def test_arguments():
    placement = context_parallel.place(Mask(300, 300, causal=True), 2)
    with pytest.raises(ValueError, match="rank is 2"):
        placement.mask(2)
    q = torch.zeros(1, 150, 2, 8)
    with pytest.raises(TypeError, match="local is a Mask; .*LocalMask"):
        context_parallel.attention(q, q, q, Mask(150, 150))
    with pytest.raises(UnsupportedError, match="split_size is .*does not implement it: .* a part of the sequence's"):
        context_parallel.attention(q, q, q, placement.mask(0), split_size=128)
    for error, words, given in (
        (ValueError, r"sink is \[3\]; it must be \[2\]", {"sink": torch.zeros(3)}),
        (ValueError, r"alibi_slopes is \[2, 2\]; it must be \[2\] or \[1, 2\]", {"alibi_slopes": torch.zeros(2, 2)}),
        (UnsupportedError, "alibi_slopes requires a gradient", {"alibi_slopes": torch.zeros(2, requires_grad=True)}),
        (TypeError, "softcap is", {"softcap": "a"}),
        (ValueError, "dropout is 1.0; it must be at least 0 and less than 1", {"dropout": 1.0}),
        (ValueError, "dropout_state is .*; it must be", {"dropout": 0.1, "dropout_state": torch.zeros(3)}),
        (TypeError, "slopes is no argument", {"slopes": torch.zeros(2)}),
    ):
        with pytest.raises(error, match=words):
            context_parallel.attention(q, q, q, placement.mask(0), **given)


def test_cpus_take_no_keys_that_arrive():
    """The operators pass on what they are given, and the backends refuse it by name."""
    q = torch.zeros(1, 256, 2, 16)
    lse, mask, options = torch.zeros(1, 2, 256), Mask(256, 256), ops.KernelOptions(None, False, "auto", 0)
    needed, state = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="cpu: keys arrive while the call runs"):
        ops.arriving_attention(q, q, q, mask, ops.Arrivals(needed, state, 60.0), *options)
    with pytest.raises(ValueError, match=r"needed is int32 \[1, 3\]; .*\[1, 2\]"):
        ops.arriving_attention(q, q, q, mask, ops.Arrivals(torch.zeros(1, 3).int(), state, 60.0), *options)
    early = q[:, 128:].contiguous(), q[:, 128:].contiguous()
    with pytest.raises(UnsupportedError, match="cpu: gradients of some keys come early"):
        ops.early_backward(q, None, q, q, q, q, lse, mask, (*early, 1, 0), *options)
    assert "keys arrive on GPUs alone" in exchange.refusal(q.device)
    with pytest.raises(ValueError, match="event is null"):
        ops.early_backward(q, None, q, q, q, q, lse, mask, (*early, 0, 0), *options)


def test_ranks_that_take_no_keys_that_arrive(monkeypatch):
    """Variables of the environment decide as well as the GPU."""
    gpu, capability = torch.device("cuda", 0), [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for variable, value, words in (
        ("FLASHMASK_KERNELS", "sm80", "FLASHMASK_KERNELS is 'sm80'"),
        ("CUDA_LAUNCH_BLOCKING", "1", "CUDA_LAUNCH_BLOCKING is set"),
    ):
        monkeypatch.delenv(variable, raising=False)
        assert exchange.refusal(gpu) == ""
        monkeypatch.setenv(variable, value)
        assert words in exchange.refusal(gpu)
        monkeypatch.delenv(variable)
    capability[0] = 8
    assert "not a Hopper one" in exchange.refusal(gpu)


def test_wrong_ways_and_groups(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        local = context_parallel.place(Mask(64, 64), 1).mask(0)
        q = torch.zeros(1, 64, 2, 8)
        with pytest.raises(ValueError, match="way is 'ring'; it must be"):
            context_parallel.attention(q, q, q, local, way="ring")
        with pytest.raises(ValueError, match="arrival_timeout is 0.0; it must be above 0"):
            context_parallel.attention(q, q, q, local, arrival_timeout=0.0)
        with pytest.raises(ValueError, match="local was made for rank 0 of 3"):
            context_parallel.attention(q, q, q, context_parallel.place(Mask(64, 64), 3).mask(0))
    finally:
        torch.distributed.destroy_process_group()
