# SPDX-License-Identifier: Apache-2.0
"""One process of run.py: a contender, its model, and what is measured of them. Takes a job as JSON, prints a line "@"
with JSON for each result as soon as it is there. It can be run by hand:

    python -m benchmarks.end_to_end.worker '{"figure": "throughput", "device": "cpu", "model": "tiny", "contender":
        "ours", "tasks": ["sft"], "seqlen": 256, "sequences": 20, "seconds": 1}'

A job that "waits" prepares itself and begins when a line comes on standard input.
"""

import gc
import hashlib
import importlib.metadata
import json
import statistics
import sys
import time

import torch

from benchmarks.end_to_end import recipe
from benchmarks.end_to_end.figures import QUADRATIC
from benchmarks.end_to_end.longest_sequence import longest

LEAST_STEPS, MOST_STEPS = 3, 15  # that are timed; the most are three rounds of recipe.PLACES
LONG_STEPS = 60.0  # seconds after which fewer steps than the least will do
WARM_UP_SHARE = 0.03  # of the steps whose losses are compared (the paper's A.3)


def emit(result):
    """Prints a result. A number that is not finite ends the process: no receipt takes one."""
    print(f"@{json.dumps(result, allow_nan=False)}", flush=True)


class Device:
    """Time and memory of the job's device; the CPU has no memory of its own that could be counted."""

    def __init__(self, name):
        self.name, self.is_cuda = name, name == "cuda"

    def synchronize(self):
        if self.is_cuda:
            torch.cuda.synchronize()

    def allocated(self):
        return torch.cuda.memory_allocated() if self.is_cuda else 0

    def forget_peak(self):
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak(self):
        return torch.cuda.max_memory_allocated() if self.is_cuda else 0

    def release(self):
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    def seconds(self, call):
        """(seconds of a call and what it put on the device, its result)."""
        self.synchronize()
        begin = time.perf_counter()
        result = call()
        self.synchronize()
        return time.perf_counter() - begin, result


def is_out_of_memory(error):
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def build(job, device):
    """(model, contender) of a job."""
    from benchmarks.end_to_end import contenders, models

    contender = contenders.CONTENDERS[job["contender"]](device.name)
    return models.make(job["model"], device.name, contender.attention), contender


def batches_of(job, device, layouts):
    from benchmarks.end_to_end.models import SHAPES

    vocabulary = SHAPES[job["model"]]["vocab_size"]
    return [recipe.batch_of(layout, vocabulary, seed).to(device.name) for seed, layout in enumerate(layouts)]


def bytes_of(contender, mask):
    return sum(x.nbytes for x in contender.tensors(mask))


# --- Throughput -------------------------------------------------------------------------------------


def throughput(job, device):
    from benchmarks.end_to_end.contenders import refusal

    for task in job["tasks"]:
        result = {name: job[name] for name in ("model", "seqlen", "contender")} | {"task": task}
        if why := refusal(job["contender"], task, device.name):
            emit({**result, "refused": why})
            continue
        try:
            result |= trained(job, task, device)
        except RuntimeError as error:
            failure = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            result |= {"out_of_memory": True} if is_out_of_memory(error) else failure
        device.release()
        emit(result)


def trained(job, task, device):
    """Times training steps of a task on a new model, which starts alike for every contender, and describes its data."""
    from benchmarks.end_to_end.models import Trainer

    found = recipe.chosen(task, job["seqlen"], job["sequences"])
    batches = batches_of(job, device, [layout for _, layout in found])
    device.release()
    device.forget_peak()
    model, contender = build(job, device)
    trainer = Trainer(task, model, contender)
    first, loss = device.seconds(lambda: trainer.step(batches[0]))
    trainer.step(batches[1])
    times = timed_steps(trainer, batches, job["seconds"], device)
    peak = device.peak()
    builds = [device.seconds(lambda b=batch: contender.tensors(contender.mask(b)))[0] for batch in batches]
    step = statistics.median(seconds for _, seconds in times)
    return {
        "sparsity": [sparsity for sparsity, _ in found],
        "parameters": sum(x.numel() for x in model.parameters()),
        "trained_parameters": sum(x.numel() for x in trainer.parameters),
        "first_loss": loss.item(),
        "first_step_s": first,
        "steps": [[n, 1e3 * seconds] for n, seconds in times],
        "step_ms": 1e3 * step,
        "tokens_per_second": job["seqlen"] / step,
        "peak_bytes": peak,
        "mask_bytes": max(bytes_of(contender, contender.mask(batch)) for batch in batches),
        "mask_ms": 1e3 * statistics.median(builds),
    }


def timed_steps(trainer, batches, limit, device):
    """[(batch, seconds)]: at least LEAST_STEPS, unless they are long, then as many as `limit` seconds take."""
    times, begin, spent = [], time.perf_counter(), 0.0
    while spent < LONG_STEPS if len(times) < LEAST_STEPS else spent < limit and len(times) < MOST_STEPS:
        n = len(times) % len(batches)
        times.append((n, device.seconds(lambda n=n: trainer.step(batches[n]))[0]))
        spent = time.perf_counter() - begin
    return times


# --- Memory -----------------------------------------------------------------------------------------


def memory(job, device):
    """Steps at doubling lengths as long as they fit, then between the last that did and the first that did not."""
    from benchmarks.end_to_end.contenders import refusal
    from benchmarks.end_to_end.models import Trainer

    (task,) = job["tasks"]
    result = {name: job[name] for name in ("model", "contender")} | {"task": task}
    if why := refusal(job["contender"], task, device.name):
        emit({**result, "refused": why})
        return
    trainer, tried = Trainer(task, *build(job, device)), []

    def fits(seqlen):
        begin = time.monotonic()
        try:
            found = {"seqlen": seqlen, "fits": True, **trial(job, trainer, seqlen, device)}
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found = {"seqlen": seqlen, "fits": False}
        trainer.optimizer.zero_grad()
        device.release()
        tried.append({**found, "seconds": time.monotonic() - begin})
        print(f"{job['contender']}: {tried[-1]}", file=sys.stderr, flush=True)
        return found["fits"]

    fits(job["seqlen"])  # makes the optimiser's state, which every other length then has
    tried.clear()
    try:
        power = 2 if job["contender"] in QUADRATIC else 1
        low, high, why = longest(fits, job["seqlen"], job["longest"], job["seconds"], job["granule"], power)
    except RuntimeError as error:  # of another kind than memory; what was found before it counts
        low, high = max((x["seqlen"] for x in tried if x["fits"]), default=None), None
        why = f"error: {str(error).splitlines()[0][:300]}"
    emit({**result, "longest": low, "shortest_failed": high, "ended": why, "lengths": tried})


def trial(job, trainer, seqlen, device):
    """The bytes of a step, by what they are for."""
    (batch,) = batches_of(job, device, [recipe.even(trainer.task, seqlen, job["granule"])])
    device.release()
    kept, after = device.allocated(), []
    device.forget_peak()
    trainer.step(batch, lambda: after.append(device.allocated()))
    device.synchronize()
    mask = trainer.contender.mask(batch)
    return {
        "kept_bytes": kept,  # parameters and the optimiser's state
        "gradient_bytes": sum(x.nbytes for x in trainer.parameters),
        "forward_bytes": after[0] - kept,  # what the backward needs: the layers' inputs, and the mask
        "mask_bytes": bytes_of(trainer.contender, mask),
        "peak_bytes": device.peak(),
    }


# --- Losses -----------------------------------------------------------------------------------------


def losses(job, device):
    """The loss of every step of a training, and what the weights are after the last."""
    from benchmarks.end_to_end.models import RATES, Trainer

    torch.use_deterministic_algorithms(job["deterministic"])
    for task in job["tasks"]:
        begin = time.monotonic()
        trainer = Trainer(task, *build(job, device))
        found = recipe.layouts(task, job["seqlen"], job["sequences"])
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
        seen = []
        for step in range(job["steps"]):
            for group in trainer.optimizer.param_groups:
                group["lr"] = RATES[task] * schedule(step, job["steps"])
            layout = found[order[step % len(order)]][1]
            batch = recipe.batch_of(layout, trainer.vocabulary.weight.shape[0], step).to(device.name)
            seen.append(trainer.step(batch))
        emit(
            {
                **{name: job[name] for name in ("model", "seqlen", "contender", "deterministic")},
                "task": task,
                "losses": torch.stack(seen).tolist(),
                "weights": digest(trainer.parameters),
                "seconds": time.monotonic() - begin,
            }
        )
        del trainer
        device.release()


def schedule(step, steps):
    """The share of the learning rate: a warm-up, then a line down to zero."""
    warm_up = max(1, round(WARM_UP_SHARE * steps))
    return min((step + 1) / warm_up, (steps - step) / (steps - warm_up + 1))


def digest(tensors):
    """SHA-256 of the tensors' bytes."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(x.detach().contiguous().view(torch.uint8).cpu().numpy())
    return found.hexdigest()


# --- Kernels ----------------------------------------------------------------------------------------


def sparsity(job, device):
    """The time of our kernels, forward and backward, under each of a task's masks."""
    from flashmask import flashmask_attention

    dtype = torch.bfloat16 if device.is_cuda else torch.float32
    shape = 1, job["seqlen"], job["heads"], job["head_dim"]
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(shape, dtype=dtype, device=device.name, requires_grad=True) for _ in range(4))
    for task in job["tasks"]:
        points = []
        for share, layout in recipe.layouts(task, job["seqlen"], job["sequences"]):
            mask = layout.mask().to(device.name)

            def call(mask=mask):
                out = flashmask_attention(q, k, v, mask)
                torch.autograd.grad(out, (q, k, v), dout)

            call()
            points.append([share, 1e3 * statistics.median(device.seconds(call)[0] for _ in range(job["repeats"]))])
        emit({**{name: job[name] for name in ("seqlen", "heads", "head_dim")}, "task": task, "points": points})


# --- The process ------------------------------------------------------------------------------------


def environment(job, device):
    """Emits a receipt's header and the hashes of the kernels that the cases of `job` run."""
    more = {"transformers": importlib.metadata.version("transformers"), "kernel_hashes": {}}
    if not device.is_cuda:
        emit({"device": "CPU", "driver": "none", "toolkit": "none", "torch": torch.__version__, **more})
        return
    from benchmarks.instruments import kernels_used, timing

    library = kernels_used.here()
    cases = [kernels_used.case_of(*case) for case in job["cases"]]
    hashes = library.of_all(cases, modes=(False, True))
    emit({**timing.environment(), **more, "toolkit": library.toolkit, "kernel_hashes": hashes})


def prepare(job):
    """Does the slow work that needs no device."""

    for task in job.get("tasks", ()):
        if "sequences" in job:
            recipe.layouts(task, job["seqlen"], job["sequences"])


FIGURES = {f.__name__: f for f in (throughput, memory, losses, sparsity, environment)}


def main(words=None):
    (text,) = sys.argv[1:] if words is None else words
    job = json.loads(text)
    if job.get("waits"):
        prepare(job)
        sys.stdin.readline()
    FIGURES[job["figure"]](job, Device(job["device"]))


if __name__ == "__main__":
    main()
