# SPDX-License-Identifier: Apache-2.0
"""Whose turn it is on the GPU, where several processes measure: one runs on it while others trace and compile.

A process that shares nothing always has the turn. One that calls share() has it but within given_up(): what torch.compile compiles there runs
for the first time when the turn is back.
"""

import contextlib
import functools

import torch

_semaphore, _has_turn = None, True


def share(semaphore):
    """Takes turns with the other processes that share this multiprocessing semaphore, whose value is 1, from now on. Waits for the first."""
    global _semaphore, _has_turn
    import torch._inductor.compile_fx as inductor

    _semaphore, _has_turn = semaphore, False
    inductor.compile_fx = _taking_turns(inductor.compile_fx)
    take()


def take():
    global _has_turn
    if not _has_turn:
        _semaphore.acquire()
        _has_turn = True


def give():
    """Nothing of this process runs on the GPU after it."""
    global _has_turn
    if _semaphore is not None and _has_turn:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        _has_turn = False
        _semaphore.release()


@contextlib.contextmanager
def given_up():
    """Nothing but what torch.compile makes may run on the GPU in the block."""
    give()
    try:
        yield
    finally:
        take()


def _taking_turns(compile_fx):
    """torch.compile's default compiler; what it returns takes the turn before it runs."""

    @functools.wraps(compile_fx)
    def compile_and_wait(*arguments, **options):
        compiled = compile_fx(*arguments, **options)

        @functools.wraps(compiled)
        def run(*inputs):
            take()
            return compiled(*inputs)

        return run

    return compile_and_wait
