# SPDX-License-Identifier: Apache-2.0
"""Memory that there is not: what the operators say on the CPU. On CUDA: test_cuda.py."""

import os
import re
import subprocess
import sys

import pytest
from devices import cpu_only

pytestmark = cpu_only("host memory")

# Inputs that take next to no memory, being expanded, and a limit that leaves 24 MiB.
PROGRAM = """
import re, resource, torch, flashmask
from flashmask import flashmask_attention, masks
torch.set_num_threads(1)
leaf = torch.randn(1, 16, 1, 64, requires_grad=True)
flashmask_attention(leaf, leaf, leaf, causal=True).sum().backward()  # everything is loaded
q = torch.randn(1, 1, 1, 64).expand(1, 8192, 32, 64)
narrow = torch.randn(1, 1, 1, 1).expand(1, 8192, 32, 1)
def backward():
    lse = torch.zeros(1, 1, 1).expand(1, 32, 8192)
    options = (None, None, None, None, False, None, -1, -1, True, "auto")
    torch.ops.flashmask.backward(narrow, None, q, q[:, :64], narrow[:, :64], narrow, lse, *options)
size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + (24 << 20),) * 2)
try:
    CALL
except MemoryError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "call, text",
    [
        ("flashmask_attention(q, q, q)", "out of memory: out [1, 8192, 32, 64] needs 67108864 bytes on cpu"),
        (
            "torch.ops.flashmask.forward(q, q, q, None, None, None, None, False, None, -1, -1, False, 'auto')",
            "out of memory: out [1, 8192, 32, 64] needs 67108864 bytes on cpu",
        ),
        ("masks.causal(1 << 25).plan('cpu')", "out of memory: the plan ["),
        ("backward()", "out of memory: dq [1, 8192, 32, 64] needs 67108864 bytes on cpu"),
    ],
)
def test_what_lacks_memory_says_which_tensor_and_how_much(call, text):
    """A true MemoryError, from the package and from the operators alike."""
    program = PROGRAM.replace("CALL", call)
    run = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True)
    advice = "free memory there or pass less at once (a smaller batch, fewer tokens)"
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(f"{re.escape(text)}[^;]*; {re.escape(advice)}\n", run.stdout), run.stdout
