# SPDX-License-Identifier: Apache-2.0
"""Torch tensors through the C interface: masks, plans, forward and backward calls for benchmarks and tests.

FLASHMASK_LIBRARY names the shared library. Nothing here copies a tensor or synchronises, except executed_tiles of a
call. Tensors are on a CUDA device, or all in host memory for the CPU backend.
"""

import ctypes as C
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from flashmask import capi

from harness.features import NONE

ROOT = Path(__file__).resolve().parents[2]

lib = capi.open_library()


class CallError(RuntimeError):
    """A call that the library refused: its status and message."""

    def __init__(self, status):
        super().__init__(lib.fm_last_error().decode())
        self.status = status


def check(status):
    if status != capi.OK:
        raise CallError(status)


def tensor(x):
    """A torch tensor as fm_tensor: no copy, any strides."""
    t = capi.Tensor()
    t.data, t.dtype, t.ndim = x.data_ptr() or None, capi.dtype_of(x.dtype), x.ndim
    for d, (size, stride) in enumerate(zip(x.shape, x.stride())):
        t.shape[d], t.stride[d] = size, stride
    return t


def fill(struct, **fields):
    """`struct`() with struct_size and these fields; torch tensors become fm_tensor."""
    return capi.make(struct, **{name: tensor(x) if isinstance(x, torch.Tensor) else x for name, x in fields.items()})


def stream_of(device):
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


def device_options(device, **fields):
    if device.type != "cuda":
        return fill(capi.Options, **fields)
    index = device.index if device.index is not None else torch.cuda.current_device()
    return fill(capi.Options, device=1 + index, stream=stream_of(device), **fields)


def ask_for(options, features):
    """Fills in fm_options; the tensors of `features` have to live as long as `options`."""
    for name, number in features.numbers().items():
        setattr(options, name, number)
    if features.sink is not None:
        options.sink = tensor(features.sink)
    if features.alibi_slopes is not None:
        options.alibi_slopes = tensor(features.alibi_slopes)
    if features.state is not None:
        options.dropout_state = C.cast(features.state.data_ptr(), C.POINTER(C.c_uint64))


class Mask:
    """A mask with its vectors in device memory.

    bounds int32 [batch or 1, heads, seqlen_k, n] contiguous; window (left, right) with -1 unbounded; block_mask bool,
    uint8 or int32 [batch or 1, heads, ceil(seqlen_q / 128), ceil(seqlen_k / 128)]; q_pos, k_pos int32 [batch or 1,
    seqlen].
    """

    def __init__(
        self,
        seqlen_q,
        seqlen_k,
        *,
        bounds=None,
        causal=False,
        window=None,
        q_offset=None,
        block_mask=None,
        q_pos=None,
        k_pos=None,
        device="cuda",
    ):
        self.device = torch.device(device)
        self.given = SimpleNamespace(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            bounds=bounds,
            causal=causal,
            window=window,
            q_offset=q_offset,
            block_mask=block_mask,
            q_pos=q_pos,
            k_pos=k_pos,
        )
        self.struct = capi.mask_of(self.given, lambda _, x: tensor(x))

    def plan_bytes(self):
        size = C.c_size_t()
        check(lib.fm_plan_bytes(C.byref(self.struct), C.byref(size)))
        return size.value

    def counted_plan_bytes(self):
        """plan_bytes() of a plan whose form follows from the contents. Waits for the device if it has to count."""
        size, options = C.c_size_t(), device_options(self.device)
        check(lib.fm_plan_device_bytes(C.byref(self.struct), C.byref(options), None, C.byref(size)))
        scratch = torch.empty(size.value, dtype=torch.uint8, device=self.device)
        given = (scratch.data_ptr() or None, scratch.numel())
        check(lib.fm_plan_count_bytes(C.byref(self.struct), *given, C.byref(options), C.byref(size)))
        return size.value


class Plan:
    """A plan's device buffer. build() enqueues the planner on the current stream, and waits for one in runs.

    counted: in runs if the mask is long and has few."""

    def __init__(self, mask, build=True, counted=False):
        self.mask = mask
        size = mask.counted_plan_bytes() if counted else mask.plan_bytes()
        self.buffer = torch.empty(size, dtype=torch.uint8, device=mask.device)
        self.options = device_options(mask.device)
        self._arguments = (C.byref(mask.struct), self.buffer.data_ptr(), self.buffer.numel(), C.byref(self.options))
        if build:
            self.build()

    def build(self):
        self.options.stream = stream_of(self.mask.device)
        self.launch()
        return self

    def launch(self):
        """build() on the stream of the last build()."""
        check(lib.fm_plan_build(*self._arguments))


class Call:
    """A call with its outputs and workspace: made once, run often."""

    def _prepare(
        self, struct, fields, mask, plan, dense, scale, deterministic, count, max_ctas, features=NONE, kernels=None
    ):
        """Fills the structs and allocates what the library asks for."""
        if mask is not None and dense is None:
            fields["mask"] = C.pointer(mask.struct)
        if plan is not None:
            fields.update(plan=plan.buffer.data_ptr(), plan_bytes=plan.buffer.numel())
        if dense is not None:
            fields["dense_mask"] = dense
        self.device = fields["q"].device
        self.args = fill(struct, **fields)
        self.options = device_options(self.device, flags=capi.DETERMINISTIC if deterministic else 0, max_ctas=max_ctas)
        if kernels is not None:
            self.options.kernels = kernels.encode()
        if scale is not None:
            self.options.flags, self.options.softmax_scale = self.options.flags | capi.HAS_SCALE, scale
        ask_for(self.options, features)
        if count:
            self.counter = capi.ExecutedTiles()
            self.options.executed_tiles = C.pointer(self.counter)
        size = C.c_size_t()
        check(self._workspace(C.byref(self.args), C.byref(self.options), C.byref(size)))
        self.workspace = torch.empty(size.value, dtype=torch.uint8, device=self.device)
        self._arguments = (C.byref(self.args), self.workspace.data_ptr() or None, size.value, C.byref(self.options))

    def poison(self):
        """NaN in the outputs, 0xFF in the workspace: what is not written shows."""
        for x in self.outputs():
            x.fill_(float("nan"))
        self.workspace.fill_(255)
        return self

    def run(self):
        """Enqueues the call on the current stream."""
        self.options.stream = stream_of(self.device)
        self.launch()
        return self

    def launch(self):
        """run() on the stream of the last run()."""
        check(self._function(*self._arguments))


class Forward(Call):
    """One forward call.

    q [batch, seqlen_q, heads_q, d], k and v [batch, seqlen_k, heads_kv, d], any strides that the library takes.
    mask None: everything is visible. plan None: the call makes its own. dense: bool matrix in place of the mask.
    features: harness.features. kernels: the kernel set, by default the device's or $FLASHMASK_KERNELS.
    """

    _workspace, _function = lib.fm_forward_workspace, lib.fm_forward

    def __init__(
        self,
        q,
        k,
        v,
        mask=None,
        *,
        plan=None,
        dense=None,
        scale=None,
        out=None,
        count=False,
        max_ctas=0,
        features=NONE,
        kernels=None,
    ):
        self.inputs, self.features = (q, k, v, mask, plan, dense), features
        dtype = features.result_dtype(q.dtype)
        self.out = torch.empty((*q.shape[:3], v.shape[3]), dtype=dtype, device=q.device) if out is None else out
        self.lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
        fields = {"q": q, "k": k, "v": v, "out": self.out, "lse": self.lse}
        self._prepare(capi.ForwardArgs, fields, mask, plan, dense, scale, False, count, max_ctas, features, kernels)

    def outputs(self):
        return self.out, self.lse

    def executed_tiles(self):
        """Tiles that one run executes; waits for it."""
        self.counter.forward = 0
        self.run()
        return self.counter.forward

    def tile_rows(self):
        """Query rows of the call's tiles."""
        return tile_rows(self, False)


class Backward(Call):
    """The gradients of one forward call (a Forward that has run), with its features.

    dout [batch, seqlen_q, heads_q, d], dlse [batch, heads_q, seqlen_q] or None. plan, dense and kernels as in Forward.
    `like`: makes dq, dk and dv from q, k and v; default contiguous. dsink: None without a sink.
    """

    _workspace, _function = lib.fm_backward_workspace, lib.fm_backward

    def __init__(
        self,
        forward,
        dout,
        dlse=None,
        *,
        plan=None,
        dense=None,
        scale=None,
        deterministic=False,
        count=False,
        max_ctas=0,
        like=torch.empty_like,
        kernels=None,
    ):
        q, k, v, mask, *_ = forward.inputs
        self.inputs, features = (forward, dout, dlse, plan, dense), forward.features
        self.dq, self.dk, self.dv = (like(x) for x in (q, k, v))
        if features.partial:  # dq may have out's dtype, whichever that is
            self.dq = self.dq.to(forward.out.dtype)
            self.dk, self.dv = self.dk.float(), self.dv.float()
        fields = {"q": q, "k": k, "v": v, "out": forward.out, "lse": forward.lse, "dout": dout}
        fields.update(dq=self.dq, dk=self.dk, dv=self.dv)
        if dlse is not None:
            fields["dlse"] = dlse
        self.dsink = None if features.sink is None else torch.empty_like(features.sink)
        if self.dsink is not None:
            fields["dsink"] = self.dsink
        self._prepare(
            capi.BackwardArgs, fields, mask, plan, dense, scale, deterministic, count, max_ctas, features, kernels
        )

    def gradients(self):
        return self.dq, self.dk, self.dv

    def outputs(self):
        return self.gradients() if self.dsink is None else (*self.gradients(), self.dsink)

    def executed_tiles(self):
        """Tiles that one run executes for dq and for dk and dv; waits for it."""
        self.counter.backward_rows = self.counter.backward_keys = 0
        self.run()
        return self.counter.backward_rows, self.counter.backward_keys

    def tile_rows(self):
        """Query rows of the call's tiles."""
        return tile_rows(self, True)


def explained(call, is_backward):
    """Reads fm_explain_json's explanation of a call."""
    status, text = capi.text_of(
        lib.fm_explain_json, C.byref(call.args), C.c_int(is_backward), C.byref(call.options), None
    )
    check(status)
    return json.loads(text)


def tile_rows(call, is_backward):
    return explained(call, is_backward)["tile"]["rows"]
