# SPDX-License-Identifier: Apache-2.0
"""FlashMask V3 (PaddlePaddle/flash-attention, csrc/flashmask_v2) behind two C functions: bfloat16, head dim 64 and 128,
all masks.

A call prepares the bounds of its blocks itself, so its time includes what ours does in the plan.
"""

import ctypes as C
import functools

import torch

from benchmarks.peers import LeftOut, library

HEAD_DIMS = (64, 128)
POINTER = C.c_void_p
SIZES, VECTORS = [C.c_int] * 6, [POINTER] * 4
FORWARD = [POINTER] * 5 + SIZES + VECTORS + [C.c_int, C.c_int, C.c_float] + [POINTER] * 3
BACKWARD = [POINTER] * 9 + SIZES + VECTORS + [C.c_int, C.c_int, C.c_float] + [POINTER] * 8 + [C.c_int, POINTER]


@functools.cache
def load():
    lib = C.CDLL(str(library("flashmask_v3")))
    lib.fmv3_fwd.argtypes, lib.fmv3_bwd.argtypes = FORWARD, BACKWARD
    lib.fmv3_fwd.restype = lib.fmv3_bwd.restype = C.c_int
    return lib


def check(status, call):
    if status != 0:
        raise RuntimeError(f"FlashMask V3's {call} refused the call with status {status}; its message is on stderr")


def vectors_of(indices, causal, seqlen, batch):
    """(lts, lte, uts, ute), int32 [batch, 1, seqlen] or None each, of `indices` int32 [1, 1, seqlen, n].

    `indices` None: the vectors of a mask that hides nothing, as the interface has no call without vectors.
    """

    def vector(values):
        return values.expand(batch, 1, seqlen).contiguous()

    def constant(value):
        return vector(torch.full((1, 1, seqlen), value, dtype=torch.int32))

    if indices is None:
        return constant(seqlen), None, None, None if causal else constant(0)
    columns = [vector(x) for x in torch.as_tensor(indices).unbind(-1)]
    places = {(True, 1): (0,), (True, 2): (0, 1), (False, 2): (0, 3), (False, 4): (0, 1, 2, 3)}[causal, len(columns)]
    found = [None] * 4
    for place, column in zip(places, columns):
        found[place] = column
    return tuple(found)


def padded(seqlen):
    """Rows of the scratch memory for `seqlen` rows."""
    return -(-seqlen // 128) * 128 + 128


def pointer(x):
    return None if x is None else x.data_ptr()


class Call:
    """State shared by both directions: shapes, bounds, and the scratch memory of their preparation."""

    def __init__(self, q, k, indices, causal):
        self.lib = load()
        self.batch, self.seqlen, self.heads, self.head_dim = q.shape
        self.seqlen_k, self.heads_kv = k.shape[1:3]
        if self.head_dim not in HEAD_DIMS:
            raise LeftOut(f"head dim {self.head_dim} is not in this build")
        vectors = vectors_of(indices, causal, self.seqlen_k, self.batch)
        self.vectors = [None if x is None else x.to(q.device) for x in vectors]
        self.semaphore = self.new(q, 1, torch.int32).zero_()
        self.scratch = self.new(q, self.batch * 8 * (self.seqlen_k // 32 + 1024), torch.int32)
        sizes = self.batch, self.seqlen, self.seqlen_k, self.heads, self.heads_kv, self.head_dim
        scale = self.head_dim**-0.5
        self.shared = (*sizes, *map(pointer, self.vectors), 1, int(causal), scale, pointer(self.semaphore))

    @staticmethod
    def new(like, elements, dtype=torch.float32):
        return torch.empty(elements, dtype=dtype, device=like.device)


class Forward(Call):
    """out [batch, seqlen, heads, d] and lse [batch, heads, seqlen] of q, k and v, contiguous, on the current stream."""

    def __init__(self, q, k, v, indices, causal):
        super().__init__(q, k, indices, causal)
        self.inputs, self.out = (q, k, v), torch.empty_like(q)
        self.lse = self.new(q, (self.batch, self.heads, self.seqlen))
        stream = torch.cuda.current_stream(q.device).cuda_stream
        self.arguments = (*map(pointer, (q, k, v, self.out, self.lse)), *self.shared, pointer(self.scratch), stream)

    def __call__(self):
        check(self.lib.fmv3_fwd(*self.arguments), "forward")

    def results(self):
        return (self.out,)


class Backward(Call):
    """The gradients of a Forward that has run, written to `gradients`."""

    def __init__(self, forward, dout, gradients, indices, causal):
        q, k, v = forward.inputs
        super().__init__(q, k, indices, causal)
        rows, rows_k = padded(self.seqlen), padded(self.seqlen_k)
        of_rows, of_keys = self.batch * self.heads * rows, 1
        if self.heads != self.heads_kv:
            of_keys = self.batch * self.heads_kv * rows_k * self.head_dim
        order = self.new(q, (self.seqlen // 64 + 2) * self.batch * self.heads, torch.int32).zero_()
        sums = [self.new(q, n) for n in (of_rows, of_rows, of_rows * self.head_dim, of_keys, of_keys)]
        self.kept, self.gradients = (forward, dout, order, sums), gradients
        tensors = (dout, q, k, v, forward.out, forward.lse, *gradients)
        self.arguments = (
            *map(pointer, tensors),
            *self.shared,
            *map(pointer, (order, self.scratch, *sums)),
            0,
            torch.cuda.current_stream(q.device).cuda_stream,
        )

    def __call__(self):
        check(self.lib.fmv3_bwd(*self.arguments), "backward")

    def results(self):
        return self.gradients
