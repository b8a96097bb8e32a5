# SPDX-License-Identifier: Apache-2.0
"""One cell of the paper's benchmark, forward, on the GPU: inputs, contenders, and the check against float64."""

import contextlib
import functools
import time
import zlib
from statistics import median

import torch
from harness import oracle
from harness.calls import Forward, Mask, Plan
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import receipts
from benchmarks.instruments import gpu_lock, matmul
from benchmarks.instruments.timing import Contender, graph_of, interleaved
from benchmarks.masks.flex_masks import flex_mask
from benchmarks.peers import LeftOut, fa3, flashmask_v3

PLANS_IN_GRAPH = 10
AGREEMENT = 0.02  # of the norm
PLAIN_HEADS = 4  # of one batch element: what materialised attention fits in memory
PLAIN_SEQLEN = 8192
DENSE_SEQLEN = 32768  # beyond it a dense matrix takes gibibytes


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
        try:
            with gpu_lock.given_up():
                if mask_mod is not None:
                    self.block_mask = build()
                gpu_lock.give()
                self.result = self()
        except torch._dynamo.exc.TorchDynamoException as error:  # its tiles need not fit every device
            raise LeftOut(f"torch.compile of FlexAttention: {str(error).splitlines()[0][:200]}") from error
        if mask_mod is not None:
            self.record["block_mask_ms"] = median(synchronised_seconds(build)[0] for _ in range(3)) * 1e3

    def __call__(self):
        q, k, _ = self.inputs
        return self.compiled(*self.inputs, block_mask=self.block_mask, enable_gqa=q.shape[1] != k.shape[1])


SDPA_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "fa2": SDPBackend.FLASH_ATTENTION,
    "sdpa": SDPBackend.EFFICIENT_ATTENTION,  # the only one but cuDNN's that takes a dense mask
}
NO_KERNEL = ("No available kernel", "No viable backend")  # how PyTorch says it


@contextlib.contextmanager
def refusals_of(backend, grouped):
    """LeftOut if the backend does not take the call in the block. Which of PyTorch's take grouped heads, and in which
    direction, depends on its version."""
    try:
        yield
    except RuntimeError as error:
        if not grouped and not any(text in str(error) for text in NO_KERNEL):
            raise
        raise LeftOut(f"PyTorch's {backend} backend does not take it: {str(error).splitlines()[0][:200]}") from error


def sdpa_call(backend, q, k, v, **mask):
    """PyTorch's scaled_dot_product_attention by one of its backends; LeftOut if that one does not take it. `mask`: its
    is_causal or attn_mask."""
    grouped = q.shape[1] != k.shape[1]

    def call():
        with sdpa_kernel(SDPA_BACKENDS[backend]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=grouped, **mask)

    with refusals_of(backend, grouped):
        call()
    return call


@functools.cache
def matmul_call():
    """One large product: its speed says what the card gives just now."""
    a, b = (torch.randn((matmul.SIZE, matmul.SIZE), dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


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
    """The inputs of a cell, our call and its check, and the contenders that take part."""

    def __init__(self, cell, arguments):
        self.cell, self.arguments = cell, arguments
        self.seed = zlib.crc32(f"{cell.mask} {cell.seqlen} {cell.head_dim} {cell.heads_kv}".encode())
        torch.manual_seed(self.seed)
        widths = (cell.heads, cell.head_dim), (cell.heads_kv, cell.head_dim), (cell.heads_kv, cell.head_dim_v)
        shapes = [(cell.batch, cell.seqlen, *width) for width in widths]
        self.q, self.k, self.v = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
        self.mask = device_mask(cell.indices, cell.causal, cell.seqlen)
        self.plan = Plan(self.mask)
        self.ours = Forward(self.q, self.k, self.v, self.mask, plan=self.plan)
        self.mask_mod = flex_mask(cell.mask, cell.seqlen, to_device)
        self.record, self.left_out = {}, {}

    def visible(self, rows):
        keys = torch.arange(self.cell.seqlen, device="cuda")[None]
        if self.mask_mod is None:
            return torch.ones((1, 1, len(rows), self.cell.seqlen), dtype=torch.bool, device="cuda")
        return self.mask_mod(0, 0, rows[:, None], keys)[None, None]

    def picked(self):
        """A random (batch entry, key head)."""
        pick = torch.Generator().manual_seed(self.seed)
        return tuple(int(torch.randint(n, (1,), generator=pick)) for n in (self.cell.batch, self.cell.heads_kv))

    def of_key_head(self, x, b, head):
        """x [batch, seqlen, heads, d] of one batch entry and key head, and of the query heads that share it."""
        each = x.shape[2] // self.cell.heads_kv
        return x[b : b + 1, :, head * each : (head + 1) * each]

    def verify(self):
        """Ours on one random batch entry and key head against float64, with the mask_mod as the rule."""
        self.ours.poison().run()
        if not (torch.isfinite(self.ours.out).all() and torch.isfinite(self.ours.lse).all()):
            raise AssertionError(
                "out or lse has a NaN or an infinity; every row of these masks sees itself or its window"
            )
        b, head = self.picked()
        q, k, v, out = (self.of_key_head(x, b, head) for x in (self.q, self.k, self.v, self.ours.out))
        lse = self.of_key_head(self.ours.lse.transpose(1, 2), b, head).transpose(1, 2)
        found = oracle.errors(q, k, v, out, lse, self.visible)
        wrong = list(oracle.complaints(found))
        if wrong:
            raise AssertionError("; ".join(wrong))
        worst = int((found["out"] / (2 * found["plain"] + oracle.FINITE_SLACK)).argmax())
        out_error, plain_error = (float(found[name].flatten()[worst]) for name in ("out", "plain"))
        return {
            "batch_entry": b,
            "key_head": head,
            "out": out_error,
            "plain": plain_error,
            "allowed": 2 * plain_error + oracle.FINITE_SLACK,
            "lse": float(found["lse"].max()),
        }

    # --- Contenders: each adder gives a checked Contender, or None where the cell is none of its --------

    def adders(self):
        return {
            "flashmask_v3": self.add_flashmask_v3,
            "fa3": self.add_fa3,
            "flex": self.add_flex,
            "cudnn": lambda: self.add_sdpa("cudnn"),
            "fa2": lambda: self.add_sdpa("fa2"),
            "sdpa": lambda: self.add_sdpa("sdpa"),
            receipts.SMALL: self.add_small,
            "dense": self.add_dense,
            "plain": self.add_plain,
            "matmul": self.add_matmul,
        }

    def add_all(self, contenders):
        for name, add in self.adders().items():
            if name not in self.arguments.contenders:
                continue
            try:
                if found := add():
                    contenders[name] = found
            except (LeftOut, torch.OutOfMemoryError) as why:
                self.left_out[name] = str(why).split("\n")[0][:300]

    def of_peer(self, name, call):
        """A peer that writes [batch, seqlen, heads, d] as ours does. It runs twice: what a call leaves may be wrong for
        the next."""
        call()
        for x in call.results():
            x.fill_(float("nan"))
        call()
        self.agrees(name, call.results())
        return Contender(call)

    def add_flashmask_v3(self):
        call = flashmask_v3.Forward(self.q, self.k, self.v, self.cell.indices, self.cell.causal)
        return self.of_peer("flashmask_v3", call)

    def add_fa3(self):
        if self.cell.mask in fa3.MASKS:
            return self.of_fa3(fa3.Forward(self.cell.mask, self.q, self.k, self.v))

    def of_fa3(self, call):
        self.record["fa3"] = {"library": call.file}
        return self.of_peer("fa3", call)

    def add_flex(self):
        peer = FlexPeer(*self.heads_first(), self.mask_mod)
        self.agrees("flex", [peer.result.transpose(1, 2)])
        self.record["flex"] = peer.record
        return Contender(peer)

    def add_sdpa(self, backend):
        if mask := self.sdpa_mask(backend):
            call = sdpa_call(backend, *self.heads_first(), **mask)
            self.agrees(backend, [call().transpose(1, 2)])
            return Contender(call)

    def sdpa_mask(self, backend):
        """The mask as a backend of PyTorch's has it; None where it does not take part."""
        if backend == "sdpa":
            few = self.cell.group == 1 and self.cell.seqlen <= DENSE_SEQLEN
            return {"attn_mask": dense_matrix(self.visible, self.cell.seqlen)} if few else None
        return {"is_causal": self.cell.causal} if self.cell.mask in ("full", "causal") else None

    def add_small(self):
        out = torch.empty_like(self.ours.out)
        call = Forward(self.q, self.k, self.v, self.mask, plan=self.plan, out=out, kernels=receipts.SMALL).run()
        self.agrees(receipts.SMALL, [call.out])
        return Contender(call.launch)

    def add_dense(self):
        # Its time does not depend on the mask, nor on how the heads are grouped.
        if self.cell.group > 1 or self.cell.seqlen > DENSE_SEQLEN and self.cell.mask != "causal_document":
            return None
        dense = dense_matrix(self.visible, self.cell.seqlen)
        call = Forward(self.q, self.k, self.v, dense=dense, out=torch.empty_like(self.ours.out)).run()
        same = bool(torch.equal(call.out, self.ours.out) and torch.equal(call.lse, self.ours.lse))
        self.record["dense"] = {"mask_bytes": dense.numel(), "same_bits": same}
        if not same:
            raise AssertionError("the dense-mask run has other bits than the masked run")
        return Contender(call.launch)

    def add_plain(self):
        if self.cell.group > 1 or self.cell.seqlen > PLAIN_SEQLEN:
            return None
        q, k, v = (x[:1, :PLAIN_HEADS] for x in self.heads_first())
        visible = dense_matrix(self.visible, self.cell.seqlen)
        additive = torch.zeros_like(visible, dtype=torch.bfloat16).masked_fill_(~visible, float("-inf"))
        scale = self.cell.batch * self.cell.heads / PLAIN_HEADS
        self.record["plain"] = {
            "measured": f"{PLAIN_HEADS} heads of one batch element; the time is that times {scale:g}",
            "scale": scale,
        }
        return Contender(plain_call(q, k, v, additive), scale=scale)

    def add_matmul(self):
        return Contender(matmul_call())

    def heads_first(self):
        if not hasattr(self, "peer_inputs"):
            self.peer_inputs = [x.transpose(1, 2).contiguous() for x in (self.q, self.k, self.v)]
        return self.peer_inputs

    def our_results(self):
        return {"out": self.ours.out}

    def agrees(self, name, theirs):
        """A peer that computes something else would make a ratio without meaning. `theirs`: [batch, seqlen, heads, d]
        each."""
        norm, pick = torch.linalg.vector_norm, self.seed % self.cell.batch
        for (what, our), their in zip(self.our_results().items(), theirs, strict=True):
            want = our[pick].float()
            off = float(norm(their[pick].float() - want) / norm(want))
            if not off < AGREEMENT:
                raise AssertionError(f"{name}'s {what} differs from ours by {off:.4f} of the norm")

    def contenders(self, ours):
        """Ours, its plan, and all peers that take part."""
        self.plan.build()
        plans = Contender(graph_of(self.plan.build, PLANS_IN_GRAPH), calls=PLANS_IN_GRAPH)
        found = {"ours": Contender(ours.launch), "plan": plans}
        ours.run()
        self.add_all(found)
        return found

    def timed(self, contenders):
        return interleaved(contenders, self.arguments.rounds, self.arguments.target_ms, self.seed), self.record

    def samples(self):
        with torch.no_grad():
            return self.timed(self.contenders(self.ours))
