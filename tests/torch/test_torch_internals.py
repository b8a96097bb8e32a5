# SPDX-License-Identifier: Apache-2.0
"""The substitutes for torch's private API: calls made with them give the results of those made without."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

# Writes the results of calls that go each of the ways through _torch_internals.
PROGRAM = """
import re, sys
import torch
from devices import DEVICE, DTYPE
from flashmask import UnsupportedError, flashmask_attention, masks

torch.manual_seed(0)
q, k, v = ((torch.randn(2, 70, heads, 16) / 2).to(DEVICE, DTYPE) for heads in (4, 2, 2))
sink = torch.randn(4).to(DEVICE)
mask = masks.causal_document(seqlens=[30, 40], device=DEVICE)
leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
options = {"softcap": 5.0, "sink": leaves[3], "deterministic": True}


def attend(*tensors, **others):
    return flashmask_attention(*tensors, mask, return_softmax_lse=True, **others)


results = list(attend(q, k, v))  # without gradients
out, lse = attend(*leaves[:3])
results += [out, lse, *torch.autograd.grad(out.float().sum() + lse.sum(), leaves[:3])]
out, lse = attend(*leaves[:3], **options)
results += [out, lse, *torch.autograd.grad(out.float().sum() + lse.sum(), leaves)]
results += torch.vmap(attend)(*(torch.stack([x, 2 * x]) for x in (q, k, v)))
with torch.autocast(DEVICE.type, torch.bfloat16):
    results += attend(q.float(), k.float(), v.float())
for wrong, text in (
    (lambda: torch.func.grad(lambda x: attend(x, k, v)[0].sum())(q), "torch.func|functorch"),
    (lambda: torch.func.jvp(lambda x: attend(x, k, v)[0], (q,), (q,)), "forward mode|functorch|jvp"),
):
    try:
        wrong()
    except (UnsupportedError, RuntimeError) as error:
        assert re.search(text, str(error)), error
    else:
        raise AssertionError("a derivative that is not there")
torch.save([x.detach().cpu() for x in results], sys.argv[1])
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By whether the substitutes were taken."""
    folder, found = tmp_path_factory.mktemp("results"), {}
    for public in ("", "1"):
        file = folder / f"of{public}.pt"
        path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(file)],
            env={**os.environ, "FLASHMASK_PUBLIC_TORCH": public, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        found[public] = torch.load(file)
    return found


def test_results_are_equal(results):
    private, public = results[""], results["1"]
    assert len(private) == len(public) == 17
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(private, public))


def test_every_substitute_is_taken(monkeypatch):
    monkeypatch.setenv("FLASHMASK_PUBLIC_TORCH", "1")
    spec = importlib.util.find_spec("flashmask.torch._torch_internals")
    internals = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(internals)
    assert internals.is_any_autocast_enabled() and internals.is_dual_level_active()
    assert not internals.are_transforms_active() and internals.pytree is None
    fake = torch._subclasses.FakeTensorMode().from_tensor(torch.ones(3))
    assert internals.is_fake(fake) and not internals.is_fake(torch.ones(3)) and not internals.is_fake(torch.ones(0))
    seen = []
    torch.vmap(lambda x: seen.append(internals.is_wrapped_by_transforms(x)) or x)(torch.ones(2, 3))
    assert seen == [True] and not internals.is_wrapped_by_transforms(torch.ones(3))
    internals.assert_async(torch.tensor(True), "no")
    with pytest.raises(RuntimeError, match="it does not hold"):
        internals.assert_async(torch.tensor(False), "it does not hold")

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dx):
            return 2 * dx

    x = torch.ones(3, requires_grad=True)
    internals.apply_of(Double)(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
