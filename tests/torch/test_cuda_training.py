# SPDX-License-Identifier: Apache-2.0
"""Training steps of benchmarks/end_to_end on a GPU: the attentions agree there, and the host waits for nothing.

Needs FLASHMASK_TEST_DEVICE=cuda and transformers.
"""

import os

import pytest
import torch
from cuda_checks import profiled
from devices import DEVICE, ON_CUDA

if not ON_CUDA:
    pytest.skip("needs a CUDA device: FLASHMASK_TEST_DEVICE=cuda", allow_module_level=True)
pytest.importorskip("transformers")
from benchmarks.end_to_end import contenders, models, recipe

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at cuBLAS' first call
# FlexAttention's kernels take minutes to compile; run.py compares the losses that it measures.
QUICK = [name for name in contenders.CONTENDERS if name != "flex"]
LENGTH = 2048
VOCABULARY = models.SHAPES["tiny"]["vocab_size"]


def batches_of(task):
    """Two, whose documents are of other lengths."""
    found = recipe.chosen(task, LENGTH, 20)[:2]
    return [recipe.batch_of(layout, VOCABULARY, n).to(DEVICE) for n, (_, layout) in enumerate(found)]


def trainer_of(task, name):
    if task == "lora":
        pytest.importorskip("peft")
    return models.trainer("tiny", task, name, DEVICE)


@pytest.mark.parametrize("task", recipe.TASKS)
def test_contenders_agree(task):
    found = {}
    for name in QUICK:
        if not contenders.refusal(name, task, DEVICE):
            trainer, batches = trainer_of(task, name), batches_of(task)
            found[name] = torch.stack([trainer.step(batches[n % 2]) for n in range(4)])
    ours = found.pop("ours")
    assert (ours - found.pop("nothing")).abs().max() > 1e-3
    assert {"sdpa", "dense", "vanilla"} <= set(found) and ("varlen" in found) == (task in ("sft", "lora"))
    for name, losses in found.items():
        torch.testing.assert_close(losses, ours, rtol=5e-3, atol=1e-2, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("task", recipe.TASKS)
def test_skipping_changes_no_bit_in_deterministic_mode(task):
    torch.use_deterministic_algorithms(True)
    try:
        trainers = [trainer_of(task, name) for name in ("ours", "dense")]
        for batch in batches_of(task) * 2:
            assert torch.equal(*(trainer.step(batch) for trainer in trainers))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(map(torch.equal, *(trainer.parameters for trainer in trainers)))


@pytest.mark.parametrize("task", recipe.TASKS)
def test_a_step_waits_for_nothing(task):
    """A profiler's trace of one step, mask to optimiser, has no copy to the host and no wait."""
    trainer, batches = trainer_of(task, "ours"), batches_of(task)
    for batch in batches:
        trainer.step(batch)
    device, host = profiled(lambda: trainer.step(batches[0]))
    assert sum("_fwd_" in name for name in device) >= 2  # it trained
    copies = [name for name in device if "Memcpy" in name and "DtoD" not in name]
    waits = [name for name in host if "Synchronize" in name and name != "cudaDeviceSynchronize"]
    assert not copies and not waits and host.count("cudaDeviceSynchronize") <= 2, (copies, waits)
    torch.cuda.set_sync_debug_mode("error")
    try:
        trainer.step(batches[1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
