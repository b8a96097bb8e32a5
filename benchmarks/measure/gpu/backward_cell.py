# SPDX-License-Identifier: Apache-2.0
"""One cell of the paper's benchmark, backward, on the GPU: the forward cell's gradients, checked against float64."""

import torch
import torch._functorch.config
from harness import oracle
from harness.calls import Backward

from benchmarks import receipts
from benchmarks.instruments import gpu_lock
from benchmarks.instruments.timing import Contender
from benchmarks.measure.gpu.forward_cell import FlexPeer, GpuCell, refusals_of, sdpa_call
from benchmarks.peers import fa3, flashmask_v3

NAMES = ("dq", "dk", "dv")
FORWARD_ALONE = ("dense", "plain")


class TorchBackward:
    """A repeatable backward of a recorded call."""

    def __init__(self, out, inputs, dout):
        self.arguments = out, inputs, dout

    def __call__(self):
        return torch.autograd.grad(*self.arguments, retain_graph=True)


def flex_backward(inputs, dout, mask_mod):
    """(FlexAttention's backward, its first gradients, what is known of its BlockMask)."""
    torch._functorch.config.donated_buffer = False  # what the forward saved is read by more than one backward
    forward = FlexPeer(*inputs, mask_mod)
    call = TorchBackward(forward.result, inputs, dout)
    with gpu_lock.given_up():
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
        """Both modes on one random batch entry and key head against float64, with the mask_mod as the rule."""
        b, head = self.picked()
        modes = {"fast": self.fast, "deterministic": self.deterministic}
        for call in modes.values():
            self.run_poisoned(call)
        errors = self.errors_of(modes.values(), b, head)
        self.same_bits_again()
        return {"batch_entry": b, "key_head": head, **dict(zip(modes, errors))}

    @staticmethod
    def run_poisoned(call):
        call.poison().run()
        if not all(bool(torch.isfinite(x).all()) for x in call.gradients()):
            raise AssertionError("a gradient has a NaN or an infinity")

    def errors_of(self, calls, b, head):
        """{gradient: errors} of each call: of a key head and all query heads that share it, the one that is worst."""
        q, k, v, dout, out = (self.of_key_head(x, b, head) for x in (self.q, self.k, self.v, self.dout, self.ours.out))
        gradients = [[self.of_key_head(x, b, head) for x in call.gradients()] for call in calls]
        found = oracle.gradient_errors_of(q, k, v, dout, None, out, gradients, self.visible)
        wrong = [complaint for errors in found for complaint in oracle.gradient_complaints(errors)]
        if wrong:
            raise AssertionError("; ".join(wrong))
        return [{name: self.worst(*pair) for name, pair in errors.items()} for errors in found]

    @staticmethod
    def worst(ours, plain):
        at = int((ours / (2 * plain + oracle.FINITE_SLACK)).argmax())
        ours, plain = float(ours.flatten()[at]), float(plain.flatten()[at])
        return {"ours": ours, "plain": plain, "allowed": 2 * plain + oracle.FINITE_SLACK}

    def same_bits_again(self):
        """The deterministic mode, run once more over poisoned memory."""
        first = [x.clone() for x in self.deterministic.gradients()]
        self.deterministic.poison().run()
        if not all(torch.equal(a, b) for a, b in zip(first, self.deterministic.gradients())):
            raise AssertionError("two deterministic runs differ")

    # --- Contenders --------------------------------------------------------------------------------

    def adders(self):
        others = {name: add for name, add in super().adders().items() if name not in FORWARD_ALONE}
        return {"deterministic": lambda: Contender(self.deterministic.launch), **others}

    def peer_tensors(self):
        """((q, k, v) that want gradients, dout), as [batch, heads, seqlen, d] contiguous."""
        if not hasattr(self, "backward_inputs"):
            self.backward_inputs = (
                [x.requires_grad_() for x in self.heads_first()],
                self.dout.transpose(1, 2).contiguous(),
            )
        return self.backward_inputs

    def peer_gradients(self):
        """Memory for the gradients of the peers that write where they are told: checked before the next one does."""
        if not hasattr(self, "gradients_of_peers"):
            self.gradients_of_peers = [torch.empty_like(x) for x in (self.q, self.k, self.v)]
        return self.gradients_of_peers

    def add_flashmask_v3(self):
        forward = flashmask_v3.Forward(self.q, self.k, self.v, self.cell.indices, self.cell.causal)
        forward()
        call = flashmask_v3.Backward(forward, self.dout, self.peer_gradients(), self.cell.indices, self.cell.causal)
        return self.of_peer("flashmask_v3", call)

    def add_fa3(self):
        if self.cell.mask in fa3.MASKS:
            forward = fa3.Forward(self.cell.mask, self.q, self.k, self.v)
            forward()
            call = fa3.Backward(self.cell.mask, forward, self.q, self.k, self.v, self.dout, self.peer_gradients())
            return self.of_fa3(call)

    def add_flex(self):
        call, result, self.record["flex"] = flex_backward(*self.peer_tensors(), self.mask_mod)
        self.agrees("flex", [x.transpose(1, 2) for x in result])
        return Contender(call)

    def add_sdpa(self, backend):
        if mask := self.sdpa_mask(backend):
            inputs, dout = self.peer_tensors()
            call = TorchBackward(sdpa_call(backend, *inputs, **mask)(), inputs, dout)
            with refusals_of(backend, self.cell.group > 1):
                result = call()
            self.agrees(backend, [x.transpose(1, 2) for x in result])
            return Contender(call)

    def add_small(self):
        call = Backward(self.ours, self.dout, plan=self.plan, kernels=receipts.SMALL).run()
        self.agrees(receipts.SMALL, call.gradients())
        return Contender(call.launch)

    def our_results(self):
        return dict(zip(NAMES, self.fast.gradients(), strict=True))

    def samples(self):
        return self.timed(self.contenders(self.fast))
