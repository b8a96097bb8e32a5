# SPDX-License-Identifier: Apache-2.0
"""GPU kernels of a library, their machine code, and the kernels that it would run for a call. Needs no GPU.

A kernel is known by its id, such as "sm90.bwd.bf16.d128.dv128.c2", which stays what it is when code is renamed or moved
(KernelInfo in attention.h says how ids are made). Its hash changes when its machine code does, or how it is launched.
"""

import ctypes as C
import hashlib
import json
import os
from pathlib import Path

from flashmask import capi

from . import cubin

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("build/gpu-carry/libflashmask.so", "build/gpu/src/libflashmask.so", "build/release/src/libflashmask.so")
SETS = ("sm90", "sm80", "sm86")  # sets of kernels, in the order in which "auto" takes them
SET_VARIABLE = "FLASHMASK_KERNELS"
NOWHERE = 1 << 12  # the address of tensors that are described and never read


def default_library():
    """$FLASHMASK_LIBRARY, else the first that was carried or built here; None if there is none."""
    named = os.environ.get("FLASHMASK_LIBRARY")
    if named:
        return Path(named)
    return next((ROOT / place for place in PLACES if (ROOT / place).exists()), None)


def hashes(library):
    """{"toolkit": nvcc's full build string, "kernels": {id: hash}} of a library.

    A hash is of the kernel's code and attributes as they lie in the library, and of what the library launches it with:
    threads, shared memory, tile. The kernels that build masks have one together, "sm90.masks". Raises cubin.CubinError
    where the library's table names a kernel whose code it does not hold.
    """
    digests = cubin.kernel_digests(library)
    table = table_of(library)
    if not table:
        raise cubin.CubinError(f"{library}: holds no GPU kernels; build it with -DFLASHMASK_CUDA=ON")
    of_table = {info["id"]: _hash(info, digests, library) for info in table}
    return {"toolkit": cubin.toolkit(library), "kernels": {**of_table, **_builders(digests)}}


def _builders(digests):
    """{id: hash} of the code of all kernels that build masks, which are many and have no ids of their own."""
    found = {}
    for (arch, symbol), digest in sorted(digests.items()):
        if "flashmask4cuda5masks" in symbol:
            found.setdefault(f"{arch}.masks", hashlib.sha256()).update(digest.encode())
    return {name: code.hexdigest()[:16] for name, code in found.items()}


def _hash(info, digests, library):
    code = digests.get((info["arch"], info["symbol"]))
    if code is None:
        raise cubin.CubinError(
            f"{library}: its table has {info['id']}, but its code has no {info['symbol']} for {info['arch']}"
        )
    launch = {name: info[name] for name in ("threads", "shared_bytes", "tile")}
    return hashlib.sha256((code + json.dumps(launch, sort_keys=True)).encode()).hexdigest()[:16]


def table_of(library):
    """The kernels in a library, as fm_kernels_json has them."""
    return json.loads(_text(_load(library).fm_kernels_json))["kernels"]


def head_dims(library, op):
    """[(head_dim, head_dim_v)] that a library has attention kernels of for an op, "fwd" or "bwd", in order; none of a
    build without CUDA."""
    found = {(info["head_dim"], info["head_dim_v"]) for info in table_of(library) if info["op"] == op}
    return sorted(found - {(0, 0)})  # (0, 0): kernels for any head dims


def dtypes(library):
    """Names of the element types that a library has attention kernels of."""
    return sorted({info["dtype"] for info in table_of(library) if info["op"] != "plan"})


def kernels_of(library, case, arch="sm90", multiprocessors=132, deterministic=False):
    """Ids of the kernels that a library runs for a receipt's case, those of the plan first. `arch`: the kernel set, of
    SETS, on a GPU that it is meant for.

    `case` has op ("fwd" or "bwd"), dtype, batch, seqlen, heads, heads_kv, head_dim, head_dim_v, and may have partial:
    "float32", partial results, or "rounded", those whose out and dq are of the case's dtype (backward). ValueError if
    it takes no such call.
    """
    explanation = explain(library, case, arch, multiprocessors, deterministic)
    if explanation["backend"] != "cuda":
        raise ValueError(f"{library} does not run {case_text(case)} on {arch}: {'; '.join(explanation['rejected'])}")
    return explanation["kernels"]


def sets_on(library, capability):
    """Members of SETS that a library has and a GPU of a compute capability, such as (8, 6), takes."""
    case = dict(op="fwd", dtype="bfloat16", batch=1, seqlen=128, heads=1, heads_kv=1, head_dim=64, head_dim_v=64)

    def is_taken(name):
        try:
            return explain(library, case, name, capability=capability)["backend"] == "cuda"
        except ValueError:  # the library does not know it
            return False

    return [name for name in SETS if is_taken(name)]


def set_in_use(library, capability):
    """The kernel set of calls that name none, on a GPU of a compute capability: $FLASHMASK_KERNELS, or the first that
    the GPU takes."""
    named = os.environ.get(SET_VARIABLE) or "auto"
    if named != "auto":
        return named
    taken = sets_on(library, capability)
    if not taken:
        raise ValueError(f"{library} has no kernels for compute capability {capability[0]}.{capability[1]}")
    return taken[0]


def set_on(device):
    """The kernel set of the default library's calls that name none, on a CUDA device of torch's."""
    import torch

    return set_in_use(default_library(), torch.cuda.get_device_capability(device))


def explain(library, case, arch="sm90", multiprocessors=132, deterministic=False, capability=None):
    """Reads fm_explain_json's explanation of a receipt's case. `capability`: the GPU's; default: `arch`'s own."""
    handle, backward = _load(library), case["op"] == "bwd"
    # Libraries that predate other kernels do not understand a name.
    named = {"kernels": arch.encode()} if arch != "sm90" or _has_others(library) else {}
    flags = capi.DETERMINISTIC if deterministic else 0
    named["partial_out"] = "partial" in case
    options = capi.make(capi.Options, device=capi.cuda_device(), flags=flags, backend=b"cuda", **named)
    major, minor = capability or divmod(int(arch.removeprefix("sm")), 10)
    gpu = capi.make(capi.GpuModel, compute_major=major, compute_minor=minor, multiprocessors=multiprocessors)
    return json.loads(
        _text(handle.fm_explain_json, C.byref(_arguments(case)), C.c_int(backward), C.byref(options), C.byref(gpu))
    )


def _has_others(library):
    """Tells if a library has kernels besides Hopper's."""
    return any(info["arch"] != "sm90" for info in table_of(library))


def case_text(case):
    return (
        f"{case['op']} {case['dtype']} batch {case['batch']}, seqlen {case['seqlen']}, "
        f"heads {case['heads']} / {case['heads_kv']}, head_dim {case['head_dim']} / {case['head_dim_v']}"
    )


def _arguments(case):
    """fm_forward_args or fm_backward_args of a case: contiguous tensors that lie nowhere, and a causal mask."""
    batch, seqlen, heads, heads_kv = (case[n] for n in ("batch", "seqlen", "heads", "heads_kv"))

    def tensor(heads, dim, dtype=case["dtype"]):
        return capi.device_tensor(NOWHERE, capi.DTYPES[dtype], (batch, seqlen, heads, dim))

    q, k, v = tensor(heads, case["head_dim"]), tensor(heads_kv, case["head_dim"]), tensor(heads_kv, case["head_dim_v"])
    dout, lse = tensor(heads, case["head_dim_v"]), capi.device_tensor(NOWHERE, capi.FLOAT32, (batch, heads, seqlen))
    of_rows = "float32" if case.get("partial") == "float32" else case["dtype"]
    of_keys = "float32" if "partial" in case else case["dtype"]
    out = tensor(heads, case["head_dim_v"], of_rows)
    mask = capi.mask(seqlen, seqlen, flags=capi.CAUSAL)
    fields = dict(q=q, k=k, v=v, out=out, lse=lse, mask=C.pointer(mask))
    if case["op"] == "bwd":
        dq = tensor(heads, case["head_dim"], of_rows)
        dk, dv = tensor(heads_kv, case["head_dim"], of_keys), tensor(heads_kv, case["head_dim_v"], of_keys)
        return capi.make(capi.BackwardArgs, **fields, dout=dout, dq=dq, dk=dk, dv=dv)
    return capi.make(capi.ForwardArgs, **fields)


def _load(library):
    handle = C.CDLL(str(library))
    handle.fm_last_error.restype = C.c_char_p
    if not hasattr(handle, "fm_kernels_json"):
        raise cubin.CubinError(f"{library}: is of before kernels had ids; it has no fm_kernels_json")
    return handle


def _text(function, *arguments):
    status, text = capi.text_of(function, *arguments)
    if status != capi.OK:
        raise ValueError(f"{function.__name__} failed with status {status}")
    return text
