# SPDX-License-Identifier: Apache-2.0
"""Messages between ranks: torch.distributed's all-to-all, one collective for everything that a rank sends."""

import weakref
from typing import Any

import torch.distributed as dist

_sizes: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


def size_and_rank(group):
    """(ranks of a group, this process's own); torch looks both up in several tables."""
    group = dist.group.WORLD if group is None else group
    if group is None:  # nothing is initialized; torch says so
        return dist.get_world_size(), dist.get_rank()
    found = _sizes.get(group)
    if found is None:
        found = _sizes[group] = dist.get_world_size(group), dist.get_rank(group)
    return found


class Arrival:
    """Rows on their way. wait() returns them when they are there, or, on a GPU, will be before what the current stream
    gets next."""

    def __init__(self, received, sent, work):
        self._received, self._sent, self._work = received, sent, work  # sent has to live until all is done

    def wait(self):
        if self._work is not None:
            self._work.wait()
            self._sent = self._work = None
        return self._received


def send(x, rows_out, rows_in, group, into=None, wait=True):
    """The Arrival of [sum(rows_in), ...] from x [sum(rows_out), ...], as many rows for and from each rank as the lists
    say. into: the tensor to receive into. wait: at once; otherwise what the current stream gets next may run before."""
    x = x.contiguous()
    received = x.new_empty((sum(rows_in), *x.shape[1:])) if into is None else into
    work = dist.all_to_all_single(received, x, rows_in, rows_out, group=group, async_op=not wait)
    return Arrival(received, x, work)


def all_to_all(x, rows_out, rows_in, group):
    """x [sum(rows_out), ...] to [sum(rows_in), ...]."""
    return send(x, rows_out, rows_in, group).wait()
