# SPDX-License-Identifier: Apache-2.0
"""Keys that ranks of one machine copy from each other's memory while their kernels run.

Every rank registers memory of its GPU with the others once: flags and two slots, which its calls fill in turn with the
keys that others see. A call is an epoch, from 1 on, the same on every rank. In it a rank

  1. fills its slot, and sets the flag "ready" of every peer to the epoch;
  2. puts the copies of all pieces on a stream of its own: it waits for a peer's flag "ready", a copy engine reads the
     peer's slot, and then the stream counts the piece;
  3. runs its forward, which waits for pieces as it comes to them;
  4. settles: waits for the last piece, sets the flag "read" of every peer to the epoch, and waits until all peers have
     read its own slot of the epoch before, which the next call fills.

A backward whose gradients leave early is an epoch, too: it fills the slot with gradients of others' keys, an event
tells the stream of copies, and this sets the flags "ready".

docs/context-parallel.md argues why this is right, and why it ends.
"""

import ctypes as C
import itertools
import os
import platform
import struct
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .._core import capi
from . import messages

MOST_RANKS = 64  # flags of each kind in registered memory
_WORD = 4
_TRANSFER = "IIPPQ"  # as struct packs it, which is faster than ctypes
_READY_SETS = 4  # of flags "ready", which epochs use in turn
_FLAG_BYTES = 2048  # "ready" of each rank in each set, then "read" of each
_SLOTS = 2
_GRANULE = 1 << 21  # bytes that registered memory is a multiple of, as CUDA hands it out
_NOT_READ = 1 << 30  # what a report of a rank that has not read begins at


class Copy(NamedTuple):
    """A part of a peer's slot, from byte `begin` on, and its place: byte `to` of one of the call's tensors."""

    peer: int
    begin: int
    tensor: int
    to: int
    size: int


class Transfer(NamedTuple):
    """fm_transfer, a step of the stream of copies, in the order of its fields and of _TRANSFER."""

    kind: int
    value: int
    to: int
    source: int = 0
    size: int = 0


class CudaPeers:
    """A GPU's memory and streams, as an exchange uses them."""

    def __init__(self, device):
        self.device, self._library = device, capi.load()
        self._number = capi.cuda_device(device.index)
        self._copies = torch.cuda.Stream(device, priority=-1)  # which shares no queue of the device with kernels
        self._last = None
        self._early, self._early_stream = torch.cuda.Event(), torch.cuda.Stream(device, priority=-1)
        self._early.record(self._early_stream)  # which makes its handle
        self._pinned = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._report = C.c_int32.from_address(self._pinned.data_ptr())  # read without a call of torch

    def create(self, size):
        """(address, handle) of zeroed memory."""
        data, handle = C.c_void_p(), capi.PeerHandle()
        capi.check(self._library.fm_peer_memory_create(self._number, size, C.byref(data), C.byref(handle)))
        return data.value, bytes(handle)

    def open(self, handle):
        """The address at which this process has another's memory."""
        data = C.c_void_p()
        named = capi.PeerHandle(*handle)
        capi.check(self._library.fm_peer_memory_open(self._number, C.byref(named), C.byref(data)))
        return data.value

    def release(self, address, is_opened):
        capi.check(self._library.fm_peer_memory_release(self._number, address, is_opened))

    def tensor(self, address, size):
        """uint8 [size]: the memory, as long as it is registered."""
        return torch.as_tensor(_DeviceBytes(address, size), device=self.device)

    def synchronize(self):
        torch.cuda.synchronize(self.device)

    def report(self):
        """Tells what settle() has found missing; 0: nothing so far."""
        return self._report.value

    def begin(self):
        """Puts what follows behind the call before, whichever stream that had."""
        current = torch.cuda.current_stream(self.device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def early(self):
        """(event, stream) of a backward's early keys."""
        return self._early.cuda_event, self._early_stream.cuda_stream

    def copy(self, transfers, after_early=False):
        """Puts transfers on the stream of copies, after what the current stream has now, or after early keys."""
        if after_early:
            self._copies.wait_event(self._early)
        else:
            self._copies.wait_stream(self._last)
        self._enqueue(transfers)

    def _enqueue(self, transfers):
        items = struct.pack(_TRANSFER * len(transfers), *itertools.chain.from_iterable(transfers))
        stream = self._copies.cuda_stream
        capi.check(self._library.fm_transfers_enqueue(items, len(transfers), self._number, stream))

    def join(self):
        """Makes the current stream wait for all copies."""
        self._last.wait_stream(self._copies)

    def signal(self, flags, value):
        addresses = (C.c_void_p * len(flags))(*flags)
        stream = self._last.cuda_stream
        capi.check(self._library.fm_peers_signal(addresses, len(flags), value, self._number, stream))

    def settle(self, epoch, pieces, state, read_by_peers, read_flags, out, lse, timeout):
        settlement = capi.Settlement(
            *(C.sizeof(capi.Settlement), epoch, pieces, len(read_flags), state.data_ptr(), read_by_peers),
            *((C.c_void_p * len(read_flags))(*read_flags), out.data_ptr(), out.numel() * out.itemsize),
            *(lse.data_ptr(), lse.numel() * lse.itemsize, self._pinned.data_ptr(), timeout),
        )
        capi.check(self._library.fm_peers_settle(C.byref(settlement), self._number, self._last.cuda_stream))


class _DeviceBytes:
    """Memory of a device as torch.as_tensor takes it without a copy."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


PEERS: dict[str, Any] = {"cuda": CudaPeers}  # by the type of device


class Unreachable(Exception):
    """Why the ranks of a group do not read each other's memory; each has the same text."""


class Exchange:
    """A group's registered memory, and the epoch that it is in. Every rank makes the same calls, in the same order."""

    def __init__(self, group, device):
        self._group, self._peers = group, PEERS[device.type](device)
        self.world, self.rank = messages.size_and_rank(group)
        self.others = [rank for rank in range(self.world) if rank != self.rank]
        self.state = torch.zeros(2, dtype=torch.int32, device=device)  # of fm_arrivals
        self._arrived = self.state[0]
        self.epoch = self.slot_bytes = 0
        self._addresses = {}  # by rank: of its registered memory
        self._memory = None
        self._senders = {}  # by piece: the ranks whose keys it has brought
        self._local = None  # of the call before
        self._why = ""

    @property
    def registered_bytes(self):
        """Bytes of this rank's GPU that are registered."""
        return _registered(self.slot_bytes) if self._memory is not None else 0

    # --- Registered memory ------------------------------------------------------------------------

    def reserve(self, slot_bytes):
        """Makes slots of at least so many bytes, the same on every rank: a collective where they have to grow.

        Raises Unreachable on all ranks if one cannot reach another, and TimeoutError if an earlier call has failed.
        """
        self._raise_if_failed()
        if not self._why and (self._memory is None or slot_bytes > self.slot_bytes):
            self._release()
            self._register(slot_bytes)
        if self._why:
            raise Unreachable(self._why)

    def _register(self, slot_bytes):
        slot_bytes = -(-slot_bytes // _FLAG_BYTES) * _FLAG_BYTES
        made, error = _tried(self._peers.create, _registered(slot_bytes))
        own, handle = made or (None, b"")
        said = self._everyones((_machine(), handle, error))
        self._why = _first_problem([error for _, _, error in said])
        if len({machine for machine, _, _ in said}) > 1:
            self._why = "the group's ranks are on several machines"
        opened = {} if self._why else self._open([handle for _, handle, _ in said])
        if not self._why:
            self._addresses, self.slot_bytes, self.epoch = {**opened, self.rank: own}, slot_bytes, 0
            self._memory = self._peers.tensor(own, _registered(slot_bytes))
            return
        self._unmap(opened)
        if own is not None:
            self._peers.release(own, False)

    def _open(self, handles):
        """{rank: address} of the others' memory; sets _why if a rank cannot open all of it."""
        opened, errors = {}, []
        for rank in self.others:
            address, error = _tried(self._peers.open, handles[rank])
            if error:
                errors.append(f"the memory of rank {rank}: {error}")
            else:
                opened[rank] = address
        self._why = _first_problem(self._everyones("; ".join(errors)))
        return opened

    def _unmap(self, opened):
        """Unmaps the others' memory, and waits until all ranks have."""
        for address in opened.values():
            self._peers.release(address, True)
        self._everyones(None)

    def _release(self):
        """Frees the memory, once all ranks have unmapped it."""
        if self._memory is None:
            return
        self._peers.synchronize()
        self._everyones(None)  # what they still copy is this memory
        own, self._memory = self._addresses.pop(self.rank), None
        self._unmap(self._addresses)
        self._peers.release(own, False)

    def _everyones(self, own):
        every = [None] * self.world
        dist.all_gather_object(every, own, self._group)
        return every

    # --- A call -----------------------------------------------------------------------------------

    def begin(self, local):
        """Begins the next epoch."""
        self._peers.begin()
        self.epoch = (self.epoch + 1) % (1 << 32)
        if local is not self._local:
            self._local = local
            for n, piece in enumerate(local.pieces):
                self._senders.setdefault(n, set()).update(peer for peer, _, _ in piece.receives)
        self._arrived.zero_()

    def slot_part(self, begin, size):
        """uint8 [size]: a part of the rank's slot of this epoch, for its own keys that others see."""
        return self._memory.narrow(0, self._slot_offset() + begin, size)

    def early(self):
        """(event, stream) for a backward that fills the slot early."""
        return self._peers.early()

    def offer_early_and_pull(self, pieces, tensors):
        """offer() and pull(), when the slot has been filled by a backward's early keys: no kernel can say so, as the
        rest of the backward has all multiprocessors."""
        own = self._ready(self.rank, self.rank)
        offers = [Transfer(capi.WRITE_FLAG, self.epoch, own)]
        offers += [Transfer(capi.COPY, 0, self._ready(peer, self.rank), own, _WORD) for peer in self.others]
        self._peers.copy(offers + self._pulls(pieces, tensors), after_early=True)

    def pull(self, pieces, tensors):
        """Puts the copies of all pieces, Copys of each, on their stream. tensors: addresses."""
        self._peers.copy(self._pulls(pieces, tensors))

    def _pulls(self, pieces, tensors):
        transfers, slots = [], {}
        for n, copies in enumerate(pieces):
            for copy in copies:
                if copy.peer not in slots:
                    slots[copy.peer] = self._addresses[copy.peer] + self._slot_offset()
                    transfers.append(Transfer(capi.WAIT_FLAG, self.epoch, self._ready(self.rank, copy.peer)))
                to, source = tensors[copy.tensor] + copy.to, slots[copy.peer] + copy.begin
                transfers.append(Transfer(capi.COPY, 0, to, source, copy.size))
            transfers.append(Transfer(capi.WRITE_FLAG, n + 1, self.state.data_ptr()))
        return transfers

    def offer(self):
        """Tells the others that the slot is filled."""
        self._peers.signal([self._ready(peer, self.rank) for peer in self.others], self.epoch)

    def settle(self, pieces, out, lse, timeout):
        """Ends the call: out and lse are NaN if something did not come in time, and the next call says what.

        Copies that still wait for a flag then stop waiting, and have ended before the call does: a stream that waited
        on could block the host, where it loads a kernel or frees memory.
        """
        self._peers.settle(
            *(self.epoch, pieces, self.state, self._read(self.rank, 0)),
            *([self._read(rank, self.rank) for rank in range(self.world)], out, lse, timeout),  # its own, too: no gap
        )
        # Epochs that use these flags again are offered after this rank's next settlements.
        self._peers.signal([self._ready(self.rank, peer) for peer in self.others], self.epoch)
        self._peers.join()

    def _raise_if_failed(self):
        report = self._peers.report()
        if report == 0:
            return
        if report >= _NOT_READ:
            what = f"rank {report - _NOT_READ} did not read this rank's keys of the call before"
        else:
            ranks = sorted(self._senders[report - 1])
            of = "rank" if len(ranks) == 1 else "one of ranks"
            what = f"the keys of {of} {', '.join(map(str, ranks))} did not come"
        raise TimeoutError(
            f"way is 'arrive': {what} within arrival_timeout seconds, in an earlier call on rank {self.rank}; results "
            "have been NaN since, and the group cannot exchange keys any more: end the process"
        )

    def _slot_offset(self):
        return _FLAG_BYTES + self.epoch % _SLOTS * self.slot_bytes

    def _ready(self, rank, peer):
        """The flag in a rank's memory that its peer sets when it has filled its slot."""
        return self._addresses[rank] + (self.epoch % _READY_SETS * MOST_RANKS + peer) * _WORD

    def _read(self, rank, peer):
        """The flag in a rank's memory that its peer sets when it has read the rank's slot."""
        return self._addresses[rank] + (_READY_SETS * MOST_RANKS + peer) * _WORD


def _registered(slot_bytes):
    return -(-(_FLAG_BYTES + _SLOTS * slot_bytes) // _GRANULE) * _GRANULE


def _tried(function, argument):
    """(result or None, what went wrong)."""
    try:
        return function(argument), ""
    except Exception as error:
        return None, str(error)


def _first_problem(errors):
    """The first rank's, and whose it is; "" if there is none."""
    return next((f"rank {rank} says: {error}" for rank, error in enumerate(errors) if error), "")


def _machine():
    """Names this machine, as it has been since it started."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node(), boot.read_text() if boot.exists() else ""


_exchanges: weakref.WeakKeyDictionary[Any, dict[torch.device, Exchange]] = weakref.WeakKeyDictionary()


def of(group, device):
    """The Exchange of a group, on a device."""
    group = dist.group.WORLD if group is None else group
    of_devices = _exchanges.setdefault(group, {})
    if device not in of_devices:
        of_devices[device] = Exchange(group, device)
    return of_devices[device]


def refusal(device):
    """Why a call on this device cannot have keys that arrive; "" if nothing speaks against it."""
    if device.type not in PEERS:
        return f"tensors are on {device.type}; keys arrive on GPUs alone"
    if device.type != "cuda":
        return ""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "the GPU is not a Hopper one, whose kernels alone wait for keys"
    if (kernels := os.environ.get("FLASHMASK_KERNELS", "")) not in ("", "auto", "sm90"):
        return f"FLASHMASK_KERNELS is '{kernels}', and Hopper's kernels, 'sm90', alone wait for keys"
    if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        return "CUDA_LAUNCH_BLOCKING is set, with which the host waits for a kernel that waits for others"
    if torch.cuda.is_current_stream_capturing():
        return "the stream captures a graph, whose replays would wait for this call's epoch"
    return ""
