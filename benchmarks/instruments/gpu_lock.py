# SPDX-License-Identifier: Apache-2.0
"""Turns on the GPU for several measuring processes: one runs on it while others trace and compile.

A process that shares nothing always has the turn. One that calls share() has it except within given_up(): graphs
that torch.compile makes there run when the turn is back.
"""

import contextlib
import functools

import torch

_semaphore, _has_turn = None, True


def share(semaphore):
    """Takes turns with the processes that share this multiprocessing semaphore of value 1. Waits for the first turn."""
    global _semaphore, _has_turn
    from torch._inductor.output_code import CompiledFxGraph

    _semaphore, _has_turn = semaphore, False
    CompiledFxGraph.__call__ = _in_turn(CompiledFxGraph.__call__)
    take()


def take():
    global _has_turn
    if not _has_turn:
        _semaphore.acquire()
        _has_turn = True


def give():
    """Waits for this process's work on the GPU and gives the turn to another."""
    global _has_turn
    if _semaphore is not None and _has_turn:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        _has_turn = False
        _semaphore.release()


@contextlib.contextmanager
def given_up():
    """Gives the turn up for a block that has to run graphs of torch.compile on the GPU, and nothing else there."""
    give()
    try:
        yield
        if not _has_turn:
            raise RuntimeError(
                "what was compiled ran without the turn: "
                "this torch runs its graphs in another way than gpu_lock.py knows"
            )
    finally:
        take()


def _in_turn(run):
    """Wraps the function that runs a compiled graph, forward or backward, to take the turn first."""

    @functools.wraps(run)
    def lock_and_run(graph, inputs):
        take()
        return run(graph, inputs)

    return lock_and_run
