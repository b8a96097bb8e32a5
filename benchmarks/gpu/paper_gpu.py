# SPDX-License-Identifier: Apache-2.0
"""One cell of the paper's kernel benchmark, forward, on the GPU: its inputs, its contenders, its check against float64."""

import time
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import oracle
import turn
from flashmask_torch import Forward, Mask, Plan
from flex_masks import flex_mask
from timing import Contender, graph_of, interleaved

PLANS_IN_GRAPH = 10
PLAIN_HEADS = 4  # of one batch element: what materialised attention fits in memory
PLAIN_SEQLEN = 8192


def to_device(array):
    return torch.from_numpy(array).cuda()


def device_mask(indices, causal, seqlen):
    return Mask(seqlen, seqlen, bounds=None if indices is None else to_device(indices), causal=causal)


def synchronised_seconds(function):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = function()
    torch.cuda.synchronize()
    return time.perf_counter() - begin, result


class FlexPeer:
    """FlexAttention under torch.compile with default options, and how long its BlockMask takes once it is compiled."""

    def __init__(self, q, k, v, mask_mod):
        torch._dynamo.reset()
        self.inputs, self.block_mask, self.record = (q, k, v), None, {}
        seqlen = q.shape[2]

        def build():
            return create_block_mask(mask_mod, None, None, seqlen, seqlen, device="cuda", _compile=True)

        self.compiled = torch.compile(flex_attention)
        with turn.given_up():
            if mask_mod is not None:
                self.block_mask = build()
            turn.give()
            self.result = self()
        if mask_mod is not None:
            self.record["block_mask_ms"] = median(synchronised_seconds(build)[0] for _ in range(3)) * 1e3

    def __call__(self):
        return self.compiled(*self.inputs, block_mask=self.block_mask)


def cudnn_call(q, k, v, causal):
    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return call


def plain_call(q, k, v, additive):
    scale = q.shape[-1] ** -0.5

    def call():
        return torch.softmax(q @ k.transpose(-1, -2) * scale + additive, -1) @ v

    return call


def dense_matrix(visible, seqlen):
    """bool [1, 1, seqlen, seqlen] from the rule, some rows at a time."""
    matrix = torch.empty((1, 1, seqlen, seqlen), dtype=torch.bool, device="cuda")
    for rows in oracle.row_blocks(torch.arange(seqlen, device="cuda"), seqlen):
        matrix[:, :, rows] = visible(rows)
    return matrix


class GpuCell:
    def __init__(self, cell, arguments):
        self.cell, self.arguments = cell, arguments
        self.seed = int.from_bytes(f"{cell.mask}{cell.seqlen}{cell.head_dim}".encode(), "little") % 2**31
        torch.manual_seed(self.seed)
        shape = (cell.batch, cell.seqlen, cell.heads, cell.head_dim)
        self.q, self.k, self.v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        self.mask = device_mask(cell.indices, cell.causal, cell.seqlen)
        self.plan = Plan(self.mask)
        self.ours = Forward(self.q, self.k, self.v, self.mask, plan=self.plan)
        self.mask_mod = flex_mask(cell.mask, cell.seqlen, to_device)
        self.record = {}

    def visible(self, rows):
        keys = torch.arange(self.cell.seqlen, device="cuda")[None]
        if self.mask_mod is None:
            return torch.ones((1, 1, len(rows), self.cell.seqlen), dtype=torch.bool, device="cuda")
        return self.mask_mod(0, 0, rows[:, None], keys)[None, None]

    def verify(self):
        """Ours on one random (batch, head) against float64, with the mask_mod as the rule."""
        self.ours.poison().run()
        if not (torch.isfinite(self.ours.out).all() and torch.isfinite(self.ours.lse).all()):
            raise AssertionError("out or lse has a NaN or an infinity; every row of these masks sees itself or its window")
        pick = torch.Generator().manual_seed(self.seed)
        b, h = (int(torch.randint(n, (1,), generator=pick)) for n in (self.cell.batch, self.cell.heads))
        q, k, v, out = (x[b : b + 1, :, h : h + 1] for x in (self.q, self.k, self.v, self.ours.out))
        found = oracle.errors(q, k, v, out, self.ours.lse[b : b + 1, h : h + 1], self.visible)
        wrong = list(oracle.complaints(found))
        if wrong:
            raise AssertionError("; ".join(wrong))
        out_error, plain_error = float(found["out"].max()), float(found["plain"].max())
        return {"batch_entry": b, "head": h, "out": out_error, "plain": plain_error, "allowed": 2 * plain_error + oracle.FINITE_SLACK, "lse": float(found["lse"].max())}

    def add_flex(self, contenders):
        peer = FlexPeer(*self.heads_first(), self.mask_mod)
        self.agrees("flex", peer.result, 0.02)
        self.record["flex"] = peer.record
        contenders["flex"] = Contender(peer)

    def add_cudnn(self, contenders):
        if self.cell.mask in ("full", "causal"):
            call = cudnn_call(*self.heads_first(), self.cell.causal)
            self.agrees("cudnn", call(), 0.02)
            contenders["cudnn"] = Contender(call)

    def add_dense(self, contenders):
        if self.cell.seqlen > 32768 and self.cell.mask != "causal_document":
            return  # its time does not depend on the mask
        dense = dense_matrix(self.visible, self.cell.seqlen)
        call = Forward(self.q, self.k, self.v, dense=dense, out=torch.empty_like(self.ours.out)).run()
        self.record["dense"] = {"mask_bytes": dense.numel(), "same_bits": bool(torch.equal(call.out, self.ours.out) and torch.equal(call.lse, self.ours.lse))}
        if not self.record["dense"]["same_bits"]:
            raise AssertionError("the dense-mask run has other bits than the masked run")
        contenders["dense"] = Contender(call.launch)

    def add_plain(self, contenders):
        if self.cell.seqlen > PLAIN_SEQLEN:
            return
        q, k, v = (x[:1, :PLAIN_HEADS] for x in self.heads_first())
        visible = dense_matrix(self.visible, self.cell.seqlen)
        additive = torch.zeros_like(visible, dtype=torch.bfloat16).masked_fill_(~visible, float("-inf"))
        scale = self.cell.batch * self.cell.heads / PLAIN_HEADS
        self.record["plain"] = {"measured": f"{PLAIN_HEADS} heads of one batch element; the time is that times {scale:g}", "scale": scale}
        contenders["plain"] = Contender(plain_call(q, k, v, additive), scale=scale)

    def heads_first(self):
        if not hasattr(self, "peer_inputs"):
            self.peer_inputs = [x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v)]
        return self.peer_inputs

    def agrees(self, name, theirs, tolerance):
        """A peer that computes something else would make a ratio without meaning."""
        norm = torch.linalg.vector_norm
        pick = self.seed % self.cell.batch
        want = self.ours.out[pick].transpose(0, 1).float()
        off = float(norm(theirs[pick].float() - want) / norm(want))
        if not off < tolerance:
            raise AssertionError(f"{name} differs from ours by {off:.4f} of the norm")
        self.record.setdefault(name, {})

    def samples(self):
        self.plan.build()
        contenders = {"ours": Contender(self.ours.launch), "plan": Contender(graph_of(self.plan.build, PLANS_IN_GRAPH), calls=PLANS_IN_GRAPH)}
        self.record["plan"] = {"measured": f"graph of {PLANS_IN_GRAPH} plans"}
        self.ours.run()
        adders = {"flex": self.add_flex, "cudnn": self.add_cudnn, "dense": self.add_dense, "plain": self.add_plain}
        with torch.no_grad():
            for name, add in adders.items():
                if name in self.arguments.contenders:
                    add(contenders)
            return interleaved(contenders, self.arguments.rounds, self.arguments.target_ms, self.seed), self.record
