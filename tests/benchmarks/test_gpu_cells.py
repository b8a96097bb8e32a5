# SPDX-License-Identifier: Apache-2.0
"""The cells of the GPU benchmark on the CPU backend: their checks, their contenders, and what is handed to FlashMask V3
and FlashAttention-3, for which functions of their interfaces in plain PyTorch stand in. Nothing is timed."""

import ctypes as C
import types

import pytest

torch = pytest.importorskip("torch")
from harness.calls import Mask  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

from benchmarks import peers  # noqa: E402
from benchmarks.instruments import matmul  # noqa: E402
from benchmarks.masks import paper_masks  # noqa: E402
from benchmarks.measure.gpu import backward_cell, forward_cell, paper  # noqa: E402
from benchmarks.peers import fa3, fa3_xla, flashmask_v3, xla_ffi  # noqa: E402

SEQLEN, TOKENS, HIDDEN, HEAD_DIM = 1024, 2048, 64, 64
EVERY_FORM = ("document", "qk_sparse", "global_sliding_window")  # all bounds, with a causal document's one vector
EVERYWHERE = ("ours", "plan", "deterministic", "flashmask_v3", "fa3", "dense", "matmul")


class OnTheCpu(TorchFunctionMode):
    """Gives host memory to calls that ask for the device "cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


# --- FlashMask V3's two functions -------------------------------------------------------------------

FORWARD = "q k v o lse B S Sk H Hk D lts lte uts ute Hm causal scale sem scratch stream".split()
BACKWARD = (
    "dout q k v o lse dq dk dv B S Sk H Hk D lts lte uts ute Hm causal scale sem dqs scratch dsum l2 "
    "dqa dka dva deterministic stream"
).split()


def memory(pointer, *shape, dtype=torch.bfloat16):
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.frombuffer((C.c_char * size).from_address(pointer), dtype=dtype).view(shape)


def attention(q, k, v, visible, scale):
    """[batch, seqlen, heads, d]; out and lse in float32."""
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf"))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2), torch.logsumexp(scores, -1)


class V3:
    """Reads its arguments by the order that its interface names them in."""

    def visible(self, a):
        lts, lte, uts, ute = (
            memory(a[n], a["B"], a["Hm"], 1, a["Sk"], dtype=torch.int32) if a[n] else None
            for n in ("lts", "lte", "uts", "ute")
        )
        rows, keys = torch.arange(a["S"])[:, None], torch.arange(a["Sk"])
        hidden = (rows >= lts) & (rows < (a["S"] if lte is None else lte))
        if ute is not None:
            hidden |= (rows >= (0 if uts is None else uts)) & (rows < ute)
        return ~hidden & (keys <= rows) if a["causal"] else ~hidden

    def fmv3_fwd(self, *arguments):
        a = dict(zip(FORWARD, arguments, strict=True))
        out, lse = attention(*self.inputs(a))
        memory(a["o"], *out.shape).copy_(out)
        memory(a["lse"], *lse.shape, dtype=torch.float32).copy_(lse)
        return 0

    def inputs(self, a):
        q = memory(a["q"], a["B"], a["S"], a["H"], a["D"])
        k, v = (memory(a[n], a["B"], a["Sk"], a["Hk"], a["D"]) for n in ("k", "v"))
        return q, k, v, self.visible(a), a["scale"]

    def fmv3_bwd(self, *arguments):
        a = dict(zip(BACKWARD, arguments, strict=True))
        assert a["deterministic"] == 0
        q, k, v, visible, scale = self.inputs(a)
        with torch.enable_grad():
            leaves = [x.float().requires_grad_() for x in (q, k, v)]
            out, lse = attention(*leaves, visible, scale)
        assert torch.allclose(memory(a["o"], *out.shape).float(), out, atol=0.05)
        assert torch.allclose(memory(a["lse"], *lse.shape, dtype=torch.float32), lse, atol=0.01)
        for name, x in zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, memory(a["dout"], *out.shape).float())):
            memory(a[name], *x.shape).copy_(x)
        return 0


# --- FlashAttention-3's two operators ---------------------------------------------------------------


def sequences(q, cu, longest):
    """Slices of the tokens, and whether there are batch entries in place of them."""
    if cu is None:
        return [slice(n, n + 1) for n in range(q.shape[0])], False
    edges = cu.tolist()
    parts = [slice(*pair) for pair in zip(edges, edges[1:])]
    assert cu.dtype == torch.int32 and edges[0] == 0 and edges[-1] == q.shape[0]
    assert longest == max(part.stop - part.start for part in parts)
    return parts, True


class Fa3:
    def fwd(
        self,
        q,
        k,
        v,
        *,
        softmax_scale,
        is_causal,
        num_splits,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
    ):
        assert num_splits == 1 and cu_seqlens_k is cu_seqlens_q and max_seqlen_k == max_seqlen_q
        out, (parts, packed) = torch.empty_like(q), sequences(q, cu_seqlens_q, max_seqlen_q)
        for part in parts:
            out[part] = self.of_sequence(q[part], k[part], v[part], softmax_scale, is_causal, packed).to(out.dtype)
        return out, torch.empty(1), torch.empty(0), torch.empty(0)

    @staticmethod
    def of_sequence(q, k, v, scale, causal, packed):
        q, k, v = (x[None] if packed else x for x in (q, k, v))
        rows = torch.arange(q.shape[1])
        visible = rows <= rows[:, None] if causal else torch.ones(1, 1, dtype=torch.bool)
        out = attention(q, k, v, visible, scale)[0]
        return out[0] if packed else out

    def bwd(
        self,
        dout,
        q,
        k,
        v,
        out,
        lse,
        dq,
        dk,
        dv,
        *,
        softmax_scale,
        is_causal,
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        max_seqlen_q=None,
        max_seqlen_k=None,
    ):
        parts, packed = sequences(q, cu_seqlens_q, max_seqlen_q)
        for part in parts:
            with torch.enable_grad():
                leaves = [x[part].float().requires_grad_() for x in (q, k, v)]
                result = self.of_sequence(*leaves, softmax_scale, is_causal, packed)
            for x, found in zip((dq, dk, dv), torch.autograd.grad(result, leaves, dout[part].float())):
                x[part] = found.to(x.dtype)


# --- FlashAttention-3's handlers of XLA -------------------------------------------------------------
#
# Structures are read word by word, as xla/ffi/api/c_api.h lays them out.

XLA_DTYPES = {4: torch.int32, 11: torch.float32, 16: torch.bfloat16}
XLA_SCALARS = {1: C.c_bool, 5: C.c_int64, 12: C.c_double}


def words(address, count):
    return list((C.c_uint64 * count).from_address(address)) if count else []


def items(kind, count, types, addresses):
    assert all(found == kind for found in (C.c_int * count).from_address(types))
    return words(addresses, count)


def tensors_at(*where):
    for address in items(1, *where):
        size, _, dtype, data, rank, dims = words(address, 6)
        assert size == 8 * 6
        yield memory(data, *words(dims, rank), dtype=XLA_DTYPES[dtype])


def attributes_at(count, types, names, scalars):
    named = [C.string_at(*words(address, 2)).decode() for address in words(names, count)]
    assert named == sorted(named)
    for name, address in zip(named, items(3, count, types, scalars)):
        dtype, value = words(address, 2)
        yield name, XLA_SCALARS[dtype].from_address(value).value


def frame_at(address):
    """(the address of the host's functions, tensors, results, attributes)"""
    size, _, api, _, stage, *lists = words(address, 21)
    assert (size, stage) == (8 * 21, 3)
    return api, [*tensors_at(*lists[2:5])], [*tensors_at(*lists[7:10])], dict(attributes_at(*lists[12:]))


def handler(function):
    return C.CFUNCTYPE(C.c_void_p, C.c_void_p)(function)


class XlaFa3:
    def __init__(self):
        for prefix in ("", "varlen_"):
            setattr(self, f"dew_flash3_mha_{prefix}fwd", handler(self.fwd))
            setattr(self, f"dew_flash3_mha_{prefix}bwd", handler(self.bwd))

    @staticmethod
    def mask(cu_seqlens, attributes):
        assert attributes.pop("window_size_left") == attributes.pop("window_size_right") == -1
        if cu_seqlens:
            assert cu_seqlens[0].data_ptr() == cu_seqlens[1].data_ptr()
            attributes |= {"cu_seqlens_q": cu_seqlens[0], "cu_seqlens_k": cu_seqlens[0]}
            attributes["max_seqlen_q"] = attributes.pop("max_seqlen")
        return attributes

    def fwd(self, frame):
        _, (q, k, v, *cu), (out, lse, *splits), attributes = frame_at(frame)
        assert lse.shape == (*q.shape[:-3], q.shape[-2], q.shape[-3]) and [x.dim() for x in splits] == [4, 3]
        out.copy_(Fa3().fwd(q, k, v, num_splits=1, **self.mask(cu, attributes))[0])

    def bwd(self, frame):
        _, (dout, q, k, v, out, lse, *cu), (dq, dk, dv, *scratch), attributes = frame_at(frame)
        count = len(cu[0]) - 1 if cu else q.shape[0]
        enough = q.shape[-2] * (q.shape[:-2].numel() + 128 * (count + 1))
        assert [x.shape for x in scratch] == [(enough,)] * 2
        Fa3().bwd(dout, q, k, v, out, lse, dq, dk, dv, **self.mask(cu, attributes))


# --- Cells ------------------------------------------------------------------------------------------


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The device cells, over a library with a CPU backend; V3 and FA3 are stand-ins."""

    def device_mask(indices, causal, seqlen):
        bounds = None if indices is None else torch.from_numpy(indices)
        return Mask(seqlen, seqlen, bounds=bounds, causal=causal, device="cpu")

    def interleaved(contenders, rounds, target_ms, seed):
        for contender in contenders.values():
            contender.call()
        return {name: [1.0] * rounds for name in contenders}

    monkeypatch.setattr(forward_cell, "interleaved", interleaved)
    monkeypatch.setattr(forward_cell, "device_mask", device_mask)
    monkeypatch.setattr(forward_cell, "to_device", torch.from_numpy)
    monkeypatch.setattr(forward_cell, "graph_of", lambda call, calls: call)
    monkeypatch.setattr(matmul, "SIZE", 64)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(flashmask_v3, "load", V3)
    monkeypatch.setattr(fa3, "load", lambda: (Fa3(), "stand-in"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the library's threads are enough
    with OnTheCpu():
        yield
    torch.set_num_threads(threads)


def measured(op, mask, heads_kv=None, contenders=EVERYWHERE, verify=True):
    """(the device cell, its error, its samples); four query heads if they are grouped, else one"""
    cell = paper.Cell(mask, SEQLEN, HEAD_DIM, op, heads_kv, tokens=TOKENS, hidden=4 * HIDDEN if heads_kv else HIDDEN)
    arguments = types.SimpleNamespace(contenders=contenders, rounds=2, target_ms=1.0)
    made = (backward_cell.GpuBackwardCell if op == "bwd" else forward_cell.GpuCell)(cell, arguments)
    return made, made.verify() if verify else None, made.samples()[0]


@pytest.mark.parametrize(
    "op, mask",
    [
        *(("fwd", mask) for mask in paper_masks.NAMES),
        *(("bwd", mask) for mask in ("full", "causal_document", *EVERY_FORM)),
    ],
)
def test_every_mask_is_handed_to_v3_as_it_takes_it(on_the_cpu, op, mask):
    cell, _, samples = measured(op, mask, contenders=("ours", "plan", "flashmask_v3", "fa3"), verify=False)
    assert "flashmask_v3" in samples and ("fa3" in samples) == (mask in fa3.MASKS) and cell.left_out == {}
    assert cell.record == ({"fa3": {"library": "stand-in"}} if mask in fa3.MASKS else {})


@pytest.mark.parametrize("op, more", [("fwd", {"dense", "plain"}), ("bwd", {"deterministic"})])
def test_a_cell_has_its_contenders(on_the_cpu, op, more):
    cell, error, samples = measured(op, "causal", contenders=(*EVERYWHERE, "plain"))
    assert set(samples) == {"ours", "plan", "flashmask_v3", "fa3", "matmul"} | more
    if op == "fwd":
        assert error["out"] <= error["allowed"] and cell.record["dense"]["same_bits"]
    else:
        of_each = [error[mode][name] for mode in ("fast", "deterministic") for name in ("dq", "dk", "dv")]
        assert all(found["ours"] <= found["allowed"] for found in of_each)


@pytest.mark.parametrize("op", ["fwd", "bwd"])
@pytest.mark.parametrize("mask", ["full", "shared_question"])
def test_grouped_heads(on_the_cpu, op, mask):
    """A key head is checked with all query heads that share it."""
    cell, error, samples = measured(op, mask, heads_kv=2)
    assert cell.k.shape[2] == 2 and cell.q.shape[2] == 4 and error["key_head"] in (0, 1)
    expected = {"ours", "plan", "flashmask_v3", "matmul"} | ({"deterministic"} if op == "bwd" else set())
    assert set(samples) == expected | ({"fa3"} if mask == "full" else set()) and cell.left_out == {}


@pytest.mark.parametrize("op", ["fwd", "bwd"])
@pytest.mark.parametrize("mask", fa3.MASKS)
def test_fa3_is_called_by_handlers_of_xla(on_the_cpu, monkeypatch, op, mask):
    operators = fa3_xla.Operators(XlaFa3(), torch.device("cpu"))
    monkeypatch.setattr(fa3, "load", lambda: (operators, "stand-in"))
    cell, _, samples = measured(op, mask, contenders=("ours", "plan", "fa3"), verify=False)
    assert "fa3" in samples and cell.left_out == {}


def test_a_handler_of_xla_asks_its_host(monkeypatch):
    """For the stream, the device, scratch memory, and an error that becomes an exception."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: types.SimpleNamespace(cuda_stream=0x1234))
    asked = {}

    def ask(api, place, *fields):
        """Calls a function of the host's; (what it returned, the fields after it)"""
        arguments = (C.c_uint64 * (2 + len(fields)))(8 * (2 + len(fields)), 0, *fields)
        function = C.CFUNCTYPE(C.c_void_p, C.c_void_p)(words(api, 7 + place)[-1])
        return function(C.addressof(arguments)), arguments[2:]

    def refuse(frame):
        api = frame_at(frame)[0]
        asked["stream"], asked["ordinal"] = ask(api, 4, 0, 0)[1][1], ask(api, 17, 0, 7)[1][1]
        asked["scratch"] = ask(api, 9, 0, 4096, 256, 0)[1][3]
        memory(asked["scratch"], 2048).fill_(1)
        asked["held"] = len(host.scratch)
        ask(api, 10, 0, 4096, asked["scratch"])
        first, message = (ask(api, 0, C.cast(text, C.c_void_p).value, 3)[0] for text in (b"another", b"no such mask"))
        asked["message"] = C.string_at(ask(api, 1, first, 0)[1][1])
        ask(api, 2, first)
        return message

    host = xla_ffi.Host(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="^no such mask$"):
        host.call(handler(refuse), [torch.zeros(2, 3)], [], is_causal=True)
    scratch = asked.pop("scratch")
    assert scratch and asked == {"stream": 0x1234, "ordinal": 0, "held": 1, "message": b"another"}
    assert host.scratch == {} and host.errors == {}
    with pytest.raises(ValueError, match="contiguous tensors alone"):
        host.call(handler(refuse), [torch.zeros(2, 3).T], [])


def test_what_a_build_of_fa3_has_not_is_left_out(on_the_cpu, monkeypatch):
    class ForwardAlone(Fa3):
        def bwd(self, *_, **__):
            raise RuntimeError("This flash attention build does not support backward.")

    monkeypatch.setattr(fa3, "load", lambda: (ForwardAlone(), "stand-in"))
    assert "fa3" in measured("fwd", "full", contenders=("ours", "plan", "fa3"), verify=False)[2]
    cell, _, samples = measured("bwd", "full", contenders=("ours", "plan", "fa3"), verify=False)
    assert "fa3" not in samples and "does not support backward" in cell.left_out["fa3"]


def test_a_wrong_key_head_is_seen(on_the_cpu):
    """The check of grouped heads can fail: one query head of a group, computed with another group's keys."""
    cell = measured("fwd", "full", heads_kv=2, contenders=("ours", "plan"))[0]
    _, head = cell.picked()
    poison = cell.ours.poison

    def spoiled():
        poison().run()
        cell.ours.out[:, :, 2 * head] = cell.ours.out[:, :, 2 * (1 - head)].clone()
        return types.SimpleNamespace(run=lambda: None)

    cell.ours.poison = spoiled
    with pytest.raises(AssertionError, match="out is off by"):
        cell.verify()


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_a_peer_that_computes_something_else_is_not_timed(on_the_cpu, monkeypatch, op):
    class Wrong(V3):
        def visible(self, a):
            return super().visible({**a, "causal": 1 - a["causal"]})

    monkeypatch.setattr(flashmask_v3, "load", Wrong)
    if op == "bwd":  # its own forward would be found first
        monkeypatch.setattr(flashmask_v3.Forward, "__call__", lambda self: V3().fmv3_fwd(*self.arguments))

        def ones(_, *arguments):
            for name in ("dq", "dk", "dv"):
                memory(arguments[BACKWARD.index(name)], TOKENS * HIDDEN).fill_(1)
            return 0

        monkeypatch.setattr(Wrong, "fmv3_bwd", ones)
    with pytest.raises(AssertionError, match="flashmask_v3's (out|dq) differs from ours"):
        measured(op, "causal")


def test_a_peer_whose_second_call_is_wrong_is_not_timed(on_the_cpu, monkeypatch):
    class Once(V3):
        calls = 0

        def fmv3_fwd(self, *arguments):
            self.calls += 1
            return super().fmv3_fwd(*arguments) if self.calls == 1 else 0

    monkeypatch.setattr(flashmask_v3, "load", Once)
    with pytest.raises(AssertionError, match="flashmask_v3's out differs from ours by nan"):
        measured("fwd", "causal")


def test_a_peer_that_is_not_there_is_named(on_the_cpu, monkeypatch, tmp_path):
    def missing():
        return peers.library("flashmask_v3")

    monkeypatch.setenv("FLASHMASK_PEERS", str(tmp_path))
    monkeypatch.setattr(flashmask_v3, "load", missing)
    cell, _, samples = measured("fwd", "document")
    assert "flashmask_v3" not in samples and cell.left_out == {"flashmask_v3": f"there is no libfmv3.so in {tmp_path}"}


def test_a_call_that_v3_refuses_fails_the_cell(on_the_cpu, monkeypatch):
    monkeypatch.setattr(V3, "fmv3_fwd", lambda self, *_: 7)
    with pytest.raises(RuntimeError, match="FlashMask V3's forward refused the call with status 7"):
        measured("fwd", "full")


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_a_backend_of_pytorch_agrees_or_is_left_out(on_the_cpu, op):
    """On a CPU there is FA2's of PyTorch, as it calls it, and none of cuDNN's."""
    cell, _, samples = measured(op, "causal", contenders=("ours", "plan", "cudnn", "fa2"), verify=False)
    assert "fa2" in samples and "cudnn" not in samples
    assert cell.left_out["cudnn"].startswith("PyTorch's cudnn backend does not take it: No viable backend")


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_sdpa_has_the_mask_as_a_dense_matrix_and_no_grouped_heads(on_the_cpu, monkeypatch, op):
    monkeypatch.setitem(forward_cell.SDPA_BACKENDS, "sdpa", forward_cell.SDPBackend.MATH)  # the one that CPUs have
    asked = ("ours", "plan", "sdpa")
    assert "sdpa" in measured(op, "document", contenders=asked, verify=False)[2]  # it agrees with ours
    assert "sdpa" not in measured(op, "causal", heads_kv=2, contenders=asked, verify=False)[2]


def test_a_refusal_is_one_of_grouped_heads_or_of_all_kernels():
    with pytest.raises(peers.LeftOut, match="cudnn backend does not take it: no plan for this graph"):
        with forward_cell.refusals_of("cudnn", True):
            raise RuntimeError("no plan for this graph\nand more")
    with pytest.raises(RuntimeError, match="an illegal address"):
        with forward_cell.refusals_of("cudnn", False):
            raise RuntimeError("an illegal address")


def test_v3_s_scratch_memory_is_as_large_as_it_asks_for(on_the_cpu):
    q, k = torch.empty(2, 1000, 4, 64, dtype=torch.bfloat16), torch.empty(2, 1000, 2, 64, dtype=torch.bfloat16)
    forward = flashmask_v3.Forward(q, k, k, None, True)
    assert forward.scratch.numel() == 2 * 8 * (1000 // 32 + 1024) and forward.scratch.dtype == torch.int32
    call = flashmask_v3.Backward(forward, q, (q, k, k), None, True)
    _, _, order, sums = call.kept
    assert order.numel() == (1000 // 64 + 2) * 2 * 4 and not order.any()
    rows = 1024 + 128
    of_rows, of_keys = 2 * 4 * rows, 2 * 2 * rows * 64
    assert [x.numel() for x in sums] == [of_rows, of_rows, of_rows * 64, of_keys, of_keys]
    ungrouped = flashmask_v3.Backward(flashmask_v3.Forward(q, q, q, None, True), q, (q, q, q), None, True)
    assert [x.numel() for x in ungrouped.kept[3]][3:] == [1, 1]


def test_the_functions_of_v3_take_what_they_are_declared_to_take():
    """Compares the number of arguments, and the places of pointers, integers and the scale."""
    for names, types_ in ((FORWARD, flashmask_v3.FORWARD), (BACKWARD, flashmask_v3.BACKWARD)):
        integers = ("B", "S", "Sk", "H", "Hk", "D", "Hm", "causal", "deterministic")
        assert types_ == [C.c_float if n == "scale" else C.c_int if n in integers else C.c_void_p for n in names]
