# SPDX-License-Identifier: Apache-2.0
"""Attention over several processes, through gloo on the CPU. What each runs: ranks.py."""

import os
import pathlib
import subprocess
import sys

import pytest
import ranks
import torch
from flashmask import Mask, context_parallel

WORLDS = [1, 2, 3, *((4, 8) if os.environ.get("FLASHMASK_TEST_LONG") else ())]
SCRIPT = pathlib.Path(__file__).with_name("ranks.py")
_folders = {}


def results(world, tmp_path_factory):
    """The folder with what each rank says of each test: one start of all processes for each world size."""
    if world not in _folders:
        folder = _folders[world] = tmp_path_factory.mktemp(f"ranks{world}")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([sys.executable, SCRIPT, str(rank), str(world), folder], env=environment)
            for rank in range(world)
        ]
        try:
            for process in processes:
                if process.wait(timeout=300):
                    break
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return _folders[world]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ranks.TESTS)
def test_processes(name, world, tmp_path_factory):
    folder = results(world, tmp_path_factory)
    errors = {}
    for rank in range(world):
        said = folder / f"{name}.{rank}"
        errors[rank] = said.read_text() if said.exists() else "it did not come so far"
    errors = {rank: text for rank, text in errors.items() if text}
    assert not errors, "\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items())


@pytest.mark.parametrize("scheme", ["contiguous", "zigzag", "balanced"])
@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", ranks.families())
def test_every_visible_element_is_computed_once(name, world, scheme):
    """Also that what a rank waits for is what another sends, in the same order."""
    mask = ranks.families()[name]
    placement = context_parallel.place(mask, world, scheme=scheme)
    locals_ = [placement.mask(rank) for rank in range(world)]
    total = 0
    for rank, local in enumerate(locals_):
        assert local.digest == locals_[0].digest
        total += local.own.to_dense().sum() + sum(piece.mask.to_dense().sum() for piece in local.pieces)
        for peer in range(world):
            waits = [n for piece in local.pieces for p, n in piece.receives if p == peer]
            sends = [
                sum(end - begin for begin, end in segments)
                for piece in locals_[peer].pieces
                for p, segments in piece.sends
                if p == rank
            ]
            assert waits == sends
        if mask.block_mask is None and mask.q_pos is None and mask.batch == 1:  # of which the least is known
            assert local.received_keys <= 1.05 * placement.received_rows()[rank]
    assert total == mask.to_dense().sum()


def test_arguments():
    placement = context_parallel.place(Mask(300, 300, causal=True), 2)
    with pytest.raises(ValueError, match="rank is 2"):
        placement.mask(2)
    q = torch.zeros(1, 150, 2, 8)
    with pytest.raises(TypeError, match="local is a Mask; .*LocalMask"):
        context_parallel.attention(q, q, q, Mask(150, 150))
