# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu/turn.py: of processes that share a GPU one runs on it, while others compile."""

import multiprocessing
import sys
import time
from pathlib import Path

import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(BENCHMARKS))

SECONDS = 0.3  # of "measuring"


def product(x, y):
    return (x @ y).sin()


def compile_and_measure(semaphore, spans):
    """A process of its own: compiles out of turn, forward and backward, then measures for a while."""
    import turn

    turn.share(semaphore)
    x, y = (torch.eye(8).requires_grad_() for _ in range(2))
    compiled = torch.compile(product)
    with turn.given_up():
        assert not turn._has_turn
        out = compiled(x, y)
        assert turn._has_turn  # since it ran
    with turn.given_up():
        assert not turn._has_turn
        torch.autograd.grad(out, (x, y), torch.ones_like(out))
        assert turn._has_turn
    begin = time.monotonic()
    time.sleep(SECONDS)
    spans.put((begin, time.monotonic()))
    try:
        with turn.given_up():
            pass
        spans.put("a block in which nothing ran was not refused")
    except RuntimeError:
        pass
    turn.give()


def test_one_measures_at_a_time():
    context = multiprocessing.get_context("spawn")
    semaphore, spans = context.Semaphore(1), context.Queue()
    processes = [context.Process(target=compile_and_measure, args=(semaphore, spans)) for _ in range(2)]
    for process in processes:
        process.start()
    first, second = sorted(spans.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0] and spans.empty()
    assert first[1] <= second[0] and second[1] - first[0] >= 2 * SECONDS


def test_without_others_it_is_always_ones_turn():
    import turn

    with turn.given_up():
        assert torch.compile(product, backend="eager")(torch.eye(2), torch.eye(2)).shape == (2, 2)
    turn.give()
    assert turn._has_turn
