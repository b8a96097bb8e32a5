# SPDX-License-Identifier: Apache-2.0
"""One cell of the paper's kernel benchmark, backward, on the GPU: gradients of the forward cell's call, checked against float64."""

import torch
import torch._functorch.config

import oracle
import turn
from flashmask_torch import Backward
from paper_gpu import PLANS_IN_GRAPH, FlexPeer, GpuCell, cudnn_call
from timing import Contender, graph_of, interleaved

NAMES = ("dq", "dk", "dv")
AGREEMENT = 0.02  # of the norm


class TorchBackward:
    """The backward of a recorded call, again and again."""

    def __init__(self, out, inputs, dout):
        self.arguments = out, inputs, dout

    def __call__(self):
        return torch.autograd.grad(*self.arguments, retain_graph=True)


def flex_backward(inputs, dout, mask_mod):
    """(FlexAttention's backward, its first gradients, what is known of its BlockMask)."""
    torch._functorch.config.donated_buffer = False  # what the forward saved is read by more than one backward
    forward = FlexPeer(*inputs, mask_mod)
    call = TorchBackward(forward.result, inputs, dout)
    with turn.given_up():
        result = call()
    return call, result, forward.record


class GpuBackwardCell(GpuCell):
    def __init__(self, cell, arguments):
        super().__init__(cell, arguments)
        self.ours.run()
        self.dout = torch.randn_like(self.ours.out)
        self.fast = Backward(self.ours, self.dout, plan=self.plan)
        self.deterministic = Backward(self.ours, self.dout, plan=self.plan, deterministic=True)

    def verify(self):
        """Both modes on one random (batch, head) against float64, with the mask_mod as the rule."""
        pick = torch.Generator().manual_seed(self.seed)
        b, h = (int(torch.randint(n, (1,), generator=pick)) for n in (self.cell.batch, self.cell.heads))
        modes = {"fast": self.fast, "deterministic": self.deterministic}
        for call in modes.values():
            self.run_poisoned(call)
        errors = self.errors_of(modes.values(), b, h)
        self.same_bits_again()
        return {"batch_entry": b, "head": h, **dict(zip(modes, errors))}

    @staticmethod
    def run_poisoned(call):
        call.poison().run()
        if not all(bool(torch.isfinite(x).all()) for x in call.gradients()):
            raise AssertionError("a gradient has a NaN or an infinity")

    def errors_of(self, calls, b, h):
        """{gradient: errors} of each call."""
        def of_head(x):
            return x[b : b + 1, :, h : h + 1]

        q, k, v, dout, out = map(of_head, (self.q, self.k, self.v, self.dout, self.ours.out))
        found = oracle.gradient_errors_of(q, k, v, dout, None, out, [[of_head(x) for x in call.gradients()] for call in calls], self.visible)
        wrong = [complaint for errors in found for complaint in oracle.gradient_complaints(errors)]
        if wrong:
            raise AssertionError("; ".join(wrong))
        return [{name: {"ours": float(ours), "plain": float(plain), "allowed": 2 * float(plain) + oracle.FINITE_SLACK} for name, (ours, plain) in errors.items()}
                for errors in found]

    def same_bits_again(self):
        """The deterministic mode, run once more over poisoned memory."""
        first = [x.clone() for x in self.deterministic.gradients()]
        self.deterministic.poison().run()
        if not all(torch.equal(a, b) for a, b in zip(first, self.deterministic.gradients())):
            raise AssertionError("two deterministic runs differ")

    def peer_tensors(self):
        """((q, k, v) that want gradients, dout), as [batch, heads, seqlen, d] contiguous."""
        if not hasattr(self, "backward_inputs"):
            self.backward_inputs = [x.requires_grad_() for x in self.heads_first()], self.dout.transpose(1, 2).contiguous()
        return self.backward_inputs

    def add_flex(self, contenders):
        call, result, self.record["flex"] = flex_backward(*self.peer_tensors(), self.mask_mod)
        self.gradients_agree("flex", result)
        contenders["flex"] = Contender(call)

    def add_cudnn(self, contenders):
        if self.cell.mask in ("full", "causal"):
            inputs, dout = self.peer_tensors()
            call = TorchBackward(cudnn_call(*inputs, self.cell.causal)(), inputs, dout)
            self.gradients_agree("cudnn", call())
            contenders["cudnn"] = Contender(call)

    def add_deterministic(self, contenders):
        contenders["deterministic"] = Contender(self.deterministic.launch)

    def gradients_agree(self, name, theirs):
        """A peer that computes something else would make a ratio without meaning."""
        norm, pick = torch.linalg.vector_norm, self.seed % self.cell.batch
        for what, their, our in zip(NAMES, theirs, self.fast.gradients()):
            want = our[pick].transpose(0, 1).float()
            off = float(norm(their[pick].float() - want) / norm(want))
            if not off < AGREEMENT:
                raise AssertionError(f"{name}'s {what} differs from ours by {off:.4f} of the norm")

    def samples(self):
        self.plan.build()
        self.fast.run()
        contenders = {"ours": Contender(self.fast.launch), "plan": Contender(graph_of(self.plan.build, PLANS_IN_GRAPH), calls=PLANS_IN_GRAPH)}
        self.record["plan"] = {"measured": f"graph of {PLANS_IN_GRAPH} plans"}
        adders = {"deterministic": self.add_deterministic, "flex": self.add_flex, "cudnn": self.add_cudnn}
        for name, add in adders.items():
            if name in self.arguments.contenders:
                add(contenders)
        return interleaved(contenders, self.arguments.rounds, self.arguments.target_ms, self.seed), self.record
