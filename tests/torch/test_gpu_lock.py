# SPDX-License-Identifier: Apache-2.0
"""benchmarks/instruments/gpu_lock.py: of processes that share a GPU one runs on it, while others compile."""

import multiprocessing
import time

import pytest
import torch

pytestmark = pytest.mark.long  # several processes that import torch and wait for each other
SECONDS = 3.0  # length of another one's turn; compiling takes less


def product(x, y):
    return (x @ y).sin()


def compile_out_of_turn(semaphore, held, log):
    """A process of its own, which begins to compile when another one has the turn: held.

    Logs when its compiled graphs have run, forward and backward, and what it thinks of a block in which nothing ran.
    """
    from benchmarks.instruments import gpu_lock

    def wait():
        log.put("gave the turn up")
        held.wait()
        held.clear()

    gpu_lock.share(semaphore)
    x, y = (torch.eye(8).requires_grad_() for _ in range(2))
    compiled = torch.compile(product)
    with gpu_lock.given_up():
        wait()
        out = compiled(x, y)
        log.put(time.monotonic())
    with gpu_lock.given_up():
        wait()
        torch.autograd.grad(out, (x, y), torch.ones_like(out))
        log.put(time.monotonic())
    try:
        with gpu_lock.given_up():
            pass
        log.put("accepted")
    except RuntimeError:
        log.put("refused")
    gpu_lock.give()


def test_what_is_compiled_waits_for_the_turn():
    context = multiprocessing.get_context("spawn")
    semaphore, held, log = context.Semaphore(1), context.Event(), context.Queue()
    process = context.Process(target=compile_out_of_turn, args=(semaphore, held, log))
    process.start()
    for _ in ("forward", "backward"):
        assert log.get(timeout=120) == "gave the turn up" and semaphore.acquire(timeout=10)
        held.set()
        time.sleep(SECONDS)
        ends = time.monotonic()
        semaphore.release()
        assert log.get(timeout=120) >= ends
    assert log.get(timeout=120) == "refused"
    process.join(60)
    assert process.exitcode == 0 and semaphore.acquire(timeout=1)


def test_without_others_it_is_always_ones_turn():
    from benchmarks.instruments import gpu_lock

    with gpu_lock.given_up():
        assert torch.compile(product, backend="eager")(torch.eye(2), torch.eye(2)).shape == (2, 2)
    gpu_lock.give()
    assert gpu_lock._has_turn
