# SPDX-License-Identifier: Apache-2.0
"""A forked process after torch, and not this library, has used OpenMP's threads."""

import subprocess
import sys

from devices import cpu_only

PROGRAM = """
import os, signal, torch
from flashmask import flashmask_attention

torch.set_num_threads(2)
torch.ones(1 << 22).exp()  # starts the threads
q, k, v = (torch.randn(1, 300, 2, 32, requires_grad=True) for _ in range(3))
child = os.fork()
if child == 0:
    signal.alarm(60)
    flashmask_attention(q, k, v, causal=True).backward(v.detach())
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@cpu_only("a process that has used CUDA cannot be forked")
def test_a_fork_after_torch_used_threads():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)
