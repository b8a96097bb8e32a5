# SPDX-License-Identifier: Apache-2.0
"""What travels between ranks: torch.distributed's point-to-point messages and all-to-all."""

import weakref

import torch
import torch.distributed as dist

_met = weakref.WeakSet()


class Exchange:
    """Messages on their way. wait() returns when those to be received are in their tensors, or, on a GPU, will be
    before what the current stream gets next."""

    def __init__(self, outgoing, incoming, group):
        """outgoing: (peer, tensor); incoming: (peer, tensor to receive into)."""
        self._outgoing, self._incoming = outgoing, incoming  # they have to live until all is done
        operations = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer, x in outgoing]
        operations += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for peer, x in incoming]
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self):
        """What has been received, in the order of `incoming`."""
        for work in self._works:
            work.wait()
        return [x for _, x in self._incoming]


def meet(group, device):
    """The first call of all ranks of a group, which NCCL wants to be of them all: later ones are of some."""
    group = dist.group.WORLD if group is None else group
    if device.type == "cuda" and group not in _met:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _met.add(group)


def all_to_all(x, rows_out, rows_in, group):
    """x [sum(rows_out), ...], as many rows for each rank as rows_out says, to [sum(rows_in), ...]."""
    received = x.new_empty((sum(rows_in), *x.shape[1:]))
    dist.all_to_all_single(received, x.contiguous(), rows_in, rows_out, group=group)
    return received
