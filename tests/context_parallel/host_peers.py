# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what way="arrive" needs of a GPU: memory in shared files, a thread for the stream of copies, and a
forward that reads each block of keys as soon as it may. They pause at random before every step."""

import concurrent.futures
import ctypes as C
import random
import tempfile
import time

import torch
from flashmask._core import capi
from flashmask.torch import ops
from torch.utils._python_dispatch import _disable_current_modes

_LONGEST_PAUSE = 2e-4  # seconds


class Late(Exception):
    """Something did not come in time."""


def pause():
    if random.random() < 0.5:
        time.sleep(random.uniform(0, _LONGEST_PAUSE))


def word(address):
    return C.c_uint32.from_address(address)


def wait(done, timeout=60.0):
    end = time.monotonic() + timeout
    while not done():
        if time.monotonic() > end:
            raise Late
        time.sleep(1e-5)


def has_come(address, value):
    return (word(address).value - value) % (1 << 32) < 1 << 31


class HostPeers:
    """flashmask.context_parallel.exchange.CudaPeers, on a CPU."""

    def __init__(self, device):
        self._missing = 0
        self._memory, self._files, self._stream = {}, {}, concurrent.futures.ThreadPoolExecutor(1)
        self._work = None

    def create(self, size):
        file = tempfile.NamedTemporaryFile(prefix="flashmask-peer-")
        file.truncate(size)
        address = self.open(file.name.encode())
        self._files[address] = file
        return address, file.name.encode()

    def open(self, handle):
        with open(handle, "rb") as file:
            size = file.seek(0, 2)
        memory = torch.from_file(handle.decode(), shared=True, size=size, dtype=torch.uint8)
        self._memory[memory.data_ptr()] = memory
        return memory.data_ptr()

    def release(self, address, is_opened):
        del self._memory[address]
        if not is_opened:
            self._files.pop(address).close()

    def tensor(self, address, size):
        assert self._memory[address].numel() == size
        return self._memory[address]

    def synchronize(self):
        if self._work is not None:
            self._work.result()

    def report(self):
        return self._missing

    def begin(self):
        pause()

    def early(self):
        return 0, 0

    def copy(self, transfers, after_early=False):
        for t in transfers:  # what is read too early is NaN
            if t.kind == capi.COPY and t.size > 4:  # no flag
                C.memset(t.to, 0xFF, t.size)
        self._work = self._stream.submit(self._transfer, transfers)

    def _transfer(self, transfers):
        for t in transfers:
            pause()
            if t.kind == capi.COPY:
                C.memmove(t.to, t.source, t.size)
            elif t.kind == capi.WRITE_FLAG:
                word(t.to).value = t.value
            else:
                wait(lambda t=t: has_come(t.to, t.value))

    def join(self):
        self.synchronize()

    def signal(self, flags, value):
        for flag in flags:
            pause()
            word(flag).value = value

    @_disable_current_modes()  # a GPU has no operators of torch here
    def settle(self, epoch, pieces, state, read_by_peers, read_flags, out, lse, timeout):
        wait_for_pieces(state, pieces, timeout)
        if state[1] == 0:
            self.signal(read_flags, epoch)
            wait_for_readers(state, read_by_peers, len(read_flags), epoch - 1, timeout)
        if state[1] != 0:
            out.fill_(torch.nan)
            lse.fill_(torch.nan)
            self._missing = int(state[1])


def wait_for_readers(state, read_by_peers, peers, epoch, timeout):
    for rank in range(peers):
        try:
            wait(lambda rank=rank: has_come(read_by_peers + 4 * rank, epoch), timeout)
        except Late:
            state[1] = (1 << 30) + rank
            return


def wait_for_pieces(state, needed, timeout):
    try:
        wait(lambda: state[0] >= needed, 0 if state[1] else timeout)
    except Late:
        if state[1] == 0:
            state[1] = needed


def arriving_attention(q, k, v, mask, arrivals, *options, **features):
    """The forward, of keys as they are when each block of 128 may be read."""
    needed, state, timeout = arrivals
    assert needed.shape[0] in (1, q.shape[0]) and needed.shape[1] == -(-k.shape[1] // 128)
    read_k, read_v = _as_read(k, v, needed, state, timeout)
    return ops.forward(q, read_k, read_v, mask, *options, **features)


@_disable_current_modes()
def _as_read(k, v, needed, state, timeout):
    """Copies of k and v, each block as it is when it may be read."""
    read_k, read_v = torch.empty_like(k), torch.empty_like(v)
    for block in range(needed.shape[1]):
        for entry in range(k.shape[0]):
            wait_for_pieces(state, int(needed[entry % needed.shape[0], block]), timeout)
            keys = slice(block * 128, (block + 1) * 128)
            read_k[entry, keys], read_v[entry, keys] = k[entry, keys], v[entry, keys]
    return read_k, read_v


def early_backward(dout, dlse, q, k, v, out, lse, mask, early, *options, **features):
    """The backward, whose early keys' gradients are there as soon as the others'."""
    dk, dv, _, _ = early
    call = dout, dlse, q, k, v, out, lse, mask, *options
    dq, *gradients, dsink = ops.backward_with_features(*call, partial_out=True, **features)
    return dq, _apart(gradients, dk, dv), dsink


@_disable_current_modes()
def _apart(gradients, dk, dv):
    """Puts those of the early keys into dk and dv, and returns the others', one after the other."""
    first = gradients[0].shape[1] - dk.shape[1]
    assert first % 128 == 0
    for to, gradient in zip((dk, dv), gradients):
        to.copy_(gradient[:, first:])
    return torch.cat([gradient[:, :first].flatten() for gradient in gradients])
