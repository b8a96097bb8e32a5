# SPDX-License-Identifier: Apache-2.0
"""The figures: which processes make each, what a result has, and what is to be reached. Needs no torch.

A receipt's `figures` are {"settings": {...}, "results": [...], "checks": [...]}. Each result names what it is of by the
figure's `key`; a check is {name, got, bar, passed}.
"""

import math
import statistics
from typing import NamedTuple

from benchmarks.instruments.medians import line_fit

NUMBER = (int, float)
TASKS = ("sft", "lora", "dpo", "rm")
CONTENDERS = ("ours", "flex", "varlen", "sdpa", "dense", "vanilla", "nothing")
TAKEN = {"varlen": ("sft", "lora")}  # by a contender that does not take all tasks
QUADRATIC = ("sdpa", "dense", "vanilla")  # whose mask is a matrix
K = 1024


class Job(NamedTuple):
    """A process: what worker.py is given, the keys of the results it makes, and about how many seconds it takes.

    Jobs with the same `beside` have their times compared, so they run on one GPU; None: not compared with any.
    """

    words: dict
    keys: tuple
    seconds: float
    beside: tuple | None = None

    @property
    def label(self):
        names = ("model", "contender", "seqlen")
        text = " ".join(str(self.words[name]) for name in names if name in self.words)
        return f"{text} {'+'.join(self.words['tasks'])}".strip()


class Settings(NamedTuple):
    """The size of everything: as the figures are measured, and as the tests run them on a CPU."""

    device: str = "cuda"
    sequences: int = 240
    seconds: float = 5.0  # of the timed steps of one task
    throughput: tuple = (  # (model, seqlen, tasks), the first ones first
        ("1b", 32 * K, TASKS),
        ("1b", 16 * K, TASKS),
        ("1b", 64 * K, TASKS),
        ("3b", 32 * K, ("sft",)),
        ("8b", 32 * K, ("lora",)),
    )
    quadratic_most: int = 32 * K  # tokens up to which matrices of a mask are timed
    memory_model: str = "1b"
    memory_first: int = 4 * K
    memory_most: int = 2048 * K
    memory_seconds: float = 150.0  # of a contender's search
    memory_granule: int = 4 * K  # and the tokens of a document
    losses_model: str = "1b"
    losses_seqlen: int = 8 * K
    losses_steps: int = 100
    sparsity_seqlen: int = 32 * K
    sparsity_heads: int = 32
    sparsity_head_dim: int = 128
    sparsity_repeats: int = 3


TINY = Settings(
    device="cpu",
    sequences=20,
    seconds=0.0,
    throughput=(("tiny", 256, TASKS), ("tiny", 128, TASKS)),
    quadratic_most=256,
    memory_model="tiny",
    memory_first=128,
    memory_most=256,
    memory_seconds=900.0,  # a test's machine may be busy
    memory_granule=64,
    losses_model="tiny",
    losses_seqlen=128,
    losses_steps=5,
    sparsity_seqlen=256,
    sparsity_heads=2,
    sparsity_head_dim=16,
    sparsity_repeats=1,
)
# head_dim, heads, heads_kv of the models: a receipt names the kernels.
MODEL_LAYERS = {"1b": 16, "3b": 28, "8b": 32, "tiny": 2}
MODEL_HEADS = {"1b": (64, 32, 8), "3b": (128, 24, 8), "8b": (128, 32, 8), "tiny": (16, 4, 2)}


def short_length(seqlen):
    return f"{seqlen // K}K" if seqlen % K == 0 else str(seqlen)


class Throughput:
    """Tokens per second, memory and the first step, of every contender (figure 2; table 2)."""

    name, key = "throughput", ("model", "seqlen", "task", "contender")
    contenders = ("ours", "flex", "sdpa", "nothing", "varlen", "dense")
    fields = {
        "sparsity": list,
        "parameters": int,
        "trained_parameters": int,
        "first_loss": NUMBER,
        "first_step_s": NUMBER,
        "steps": list,
        "step_ms": NUMBER,
        "tokens_per_second": NUMBER,
        "peak_bytes": int,
        "mask_bytes": int,
        "mask_ms": NUMBER,
        "compiler_cache": str,
    }

    def jobs(self, settings):
        found = [self.job(settings, *cell, name, group) for cell, name, group in self.cells(settings)]
        return sorted(found, key=lambda job: job.words["contender"] in ("varlen", "dense"))  # those with bars first

    def cells(self, settings):
        """((model, seqlen), contender, tasks) of each process."""
        for model, seqlen, tasks in settings.throughput:
            for name in self.contenders:
                if name in QUADRATIC and seqlen > settings.quadratic_most:
                    continue
                taken = [task for task in tasks if task in TAKEN.get(name, TASKS)]
                taken = taken[:1] if name == "dense" else taken  # its time hardly depends on the task
                # A process has at most 40 s of steps; those under a matrix are long.
                each = 2 if name in QUADRATIC and seqlen >= 32 * K else len(tasks)
                for first in range(0, len(taken), each):
                    yield (model, seqlen), name, taken[first : first + each]

    def job(self, settings, model, seqlen, contender, tasks):
        words = {"figure": self.name, "model": model, "contender": contender, "seqlen": seqlen, "tasks": list(tasks)}
        words |= {"sequences": settings.sequences, "seconds": settings.seconds}
        keys = tuple((model, seqlen, task, contender) for task in tasks)
        begin = {"8b": 24, "3b": 16}.get(model, 4 + 2 * len(tasks)) + 25 * (contender == "flex")
        longer = 2.5 if contender in QUADRATIC and seqlen >= 32 * K else 1.3
        steps = longer * settings.seconds * len(tasks)
        if contender == "dense":  # which reads the matrix a byte at a time: four or five steps
            steps = max(steps, {"3b": 148, "8b": 228}.get(model, 140) * (seqlen / (32 * K)) ** 2)
        return Job(words, keys, begin + steps, beside=(model, seqlen, contender == "dense"))

    def shapes(self, settings):
        return {(model, seqlen) for model, seqlen, _ in settings.throughput}

    def checks(self, results):
        """The bars at 1B."""
        step = {self.key_of(r): r["step_ms"] for r in results if "step_ms" in r}

        def over(seqlen, task, contender):
            pair = [step.get(("1b", seqlen, task, name)) for name in (contender, "ours")]
            return pair[0] / pair[1] if all(pair) else None

        bars = [("sdpa", 16 * K, 2.7, TASKS), ("sdpa", 32 * K, 4.5, TASKS)]
        bars += [("flex", n * K, 1.09, ("sft", "lora")) for n in (16, 32, 64)]
        bars += [("flex", n * K, 1.16, ("dpo", "rm")) for n in (16, 32, 64)]
        found = []
        for contender, seqlen, bar, tasks in bars:
            for task in tasks:
                if got := over(seqlen, task, contender):
                    found.append(check(f"{task} at {short_length(seqlen)}: {contender}'s step over ours", got, bar))
        for task in TASKS:
            if got := over(32 * K, task, "nothing"):
                name = f"{task} at 32K: ours over a step without attention"
                found.append(check(name, 1 / got, OVER_NOTHING, most=True))
        if apart := first_losses_apart(results, self.key_of):
            found.append(
                check("first losses under all attentions: the furthest from ours, as a share", *apart, most=True)
            )
        return found

    def key_of(self, result):
        return tuple(result[name] for name in self.key)


OVER_NOTHING = 1.22  # at most
LOSSES_APART = 0.02  # of ours: bfloat16, through all layers


def first_losses_apart(results, key_of):
    """(the largest share by which a first loss differs from ours, the bar); None if there is nothing to compare."""
    first = {key_of(r): r["first_loss"] for r in results if "first_loss" in r}
    pairs = [(loss, first.get((*at, "ours"))) for (*at, name), loss in first.items() if name not in ("ours", "nothing")]
    shares = [abs(loss - ours) / ours for loss, ours in pairs if ours]
    return (max(shares), LOSSES_APART) if shares else None


class Memory:
    """Memory against length with its split, and the longest length of every contender (figures 2, 4b, 7; table 2)."""

    name, key = "memory", ("model", "task", "contender")
    contenders = CONTENDERS
    task = "sft"
    fields = {"longest": (int, type(None)), "shortest_failed": (int, type(None)), "ended": str, "lengths": list}

    def jobs(self, settings):
        for name in self.contenders:
            words = {"figure": self.name, "model": settings.memory_model, "contender": name, "tasks": [self.task]}
            words |= {"seqlen": settings.memory_first, "longest": settings.memory_most}
            words |= {"seconds": settings.memory_seconds, "granule": settings.memory_granule}
            if name == "flex":  # which compiles for every length
                words["seqlen"] = min(8 * settings.memory_first, settings.memory_most)
                words["seconds"] *= 3.3
            yield Job(words, ((settings.memory_model, self.task, name),), 20 + 0.7 * words["seconds"])

    def shapes(self, settings):
        return {(settings.memory_model, settings.memory_first)}

    def checks(self, results):
        """Ours goes at least as far as every other attention, FlexAttention and packed sequences within a sixteenth."""
        found = {r["contender"]: r["longest"] for r in results if r.get("longest")}
        return [
            check(
                f"longest length: ours over {name}'s", found["ours"] / found[name], 1 if name in QUADRATIC else 15 / 16
            )
            for name in self.contenders
            if name in found and name not in ("ours", "nothing") and "ours" in found
        ]

    key_of = Throughput.key_of


class Losses:
    """Losses of 100 steps with and without skipping, bit for bit (figure 3)."""

    name, key = "losses", ("model", "seqlen", "task", "contender", "deterministic")
    runs = (("ours", True), ("dense", True), ("ours", False), ("sdpa", False))
    fields = {"losses": list, "weights": str, "seconds": NUMBER}

    def jobs(self, settings):
        for contender, deterministic in self.runs:
            words = {"figure": self.name, "model": settings.losses_model, "contender": contender}
            words |= {"deterministic": deterministic, "seqlen": settings.losses_seqlen}
            words |= {"steps": settings.losses_steps, "sequences": settings.sequences}
            of = (settings.losses_model, settings.losses_seqlen)
            # Contenders that take minutes a task get a process for each task, so that several GPUs share the work.
            for tasks in [[task] for task in TASKS] if contender == "dense" else [list(TASKS)]:
                keys = tuple((*of, task, contender, deterministic) for task in tasks)
                each = {"dense": 1.9, "sdpa": 0.35}.get(contender, 0.22) * settings.losses_steps
                yield Job(words | {"tasks": tasks}, keys, 15 + each * len(tasks))

    def shapes(self, settings):
        return {(settings.losses_model, settings.losses_seqlen)}

    def checks(self, results):
        found, checks = {(r["task"], r["contender"], r["deterministic"]): r for r in results if "losses" in r}, []
        for task in TASKS:
            ours, dense = (found.get((task, name, True)) for name in ("ours", "dense"))
            if ours is None or dense is None:
                continue
            same = sum(a == b for a, b in zip(ours["losses"], dense["losses"])) / len(dense["losses"])
            checks.append(check(f"{task}: steps with the same loss, bit for bit, as the dense mode's", same, 1))
            weights = float(ours["weights"] == dense["weights"])
            checks.append(check(f"{task}: the trained weights have the same bits", weights, 1))
            checks.append(check(f"{task}: the loss falls by", fall(ours["losses"]), 0))
        return checks

    key_of = Throughput.key_of


def fall(losses):
    """From the mean of the first tenth of the steps to that of the last."""
    n = max(1, len(losses) // 10)
    return statistics.fmean(losses[:n]) - statistics.fmean(losses[-n:])


class Sparsity:
    """Our kernels' time against the sparsity of each task's 240 sequences, in ten bins (figure 6)."""

    name, key = "sparsity", ("task",)
    tasks = ("sft", "dpo", "rm")
    fields = {"points": list, "seqlen": int, "heads": int, "head_dim": int}
    R2_BAR, INTERCEPT_BAR = 0.98, 0.03  # those of figure 4a

    def jobs(self, settings):
        words = {"figure": self.name, "tasks": list(self.tasks), "sequences": settings.sequences}
        names = ("seqlen", "heads", "head_dim", "repeats")
        words |= {name: getattr(settings, f"sparsity_{name}") for name in names}
        yield Job(words, tuple((task,) for task in self.tasks), 20 + 0.3 * settings.sequences * len(self.tasks) / 4)

    def shapes(self, settings):
        return set()

    def checks(self, results):
        return [
            check(f"{r['task']}: how well a line over the live tiles fits (R²)", line_of(r["points"])[2], self.R2_BAR)
            for r in results
            if len({share for share, _ in r.get("points", [])}) > 2
        ]

    key_of = Throughput.key_of


def line_of(points):
    """(intercept, slope, R²) of the least squares line of ms over the share of live tiles, 1 - sparsity."""
    return line_fit([1 - share for share, _ in points], [ms for _, ms in points])


def bins(points, count=10):
    """[(low, high, sequences, median ms or None)] of bins of equal width from the least sparsity to the greatest."""
    shares = [share for share, _ in points]
    low, width = min(shares), (max(shares) - min(shares)) / count or 1.0
    held = [[] for _ in range(count)]
    for share, ms in points:
        held[min(int((share - low) / width), count - 1)].append(ms)
    return [
        (low + n * width, low + (n + 1) * width, len(held[n]), statistics.median(held[n]) if held[n] else None)
        for n in range(count)
    ]


def check(name, got, bar, most=False):
    """`got` is at least `bar`, or at most."""
    passed = got <= bar if most else got >= bar
    return {"name": name, "got": got, "bar": bar, "passed": bool(passed), **({"most": True} if most else {})}


FIGURES = {figure.name: figure for figure in (Throughput(), Memory(), Losses(), Sparsity())}
ENDED = ("refused", "out_of_memory", "failed")  # a result in place of the figure's fields


def topic(name):
    """Topic of a figure's receipt."""
    return f"end-to-end-{name}"


def not_measured(name):
    """The page's lines in place of a figure."""
    return [f"Not measured yet; `scripts/gpu-check end-to-end {name}` does.", ""]


def problems(name, figures):
    """Everything that is wrong with a receipt's figures, as sentences."""
    figure = FIGURES[name]
    if not isinstance(figures.get("results"), list) or not isinstance(figures.get("checks"), list):
        return ["figures has no results or no checks"]
    found = []
    for result in figures["results"]:
        if missing := [part for part in figure.key if part not in result]:
            found.append(f"a result has no {missing[0]}")
            continue
        where = " ".join(map(str, figure.key_of(result)))
        if any(word in result for word in ENDED):
            continue
        for field, kind in figure.fields.items():
            value = result.get(field)
            if field not in result or not isinstance(value, kind):
                found.append(f"{where}: {field} is {value!r}")
            elif isinstance(value, float) and not math.isfinite(value):
                found.append(f"{where}: {field} is not finite")
    keys = [figure.key_of(r) for r in figures["results"] if all(part in r for part in figure.key)]
    found += [f"a result is there twice: {key}" for key in {k for k in keys if keys.count(k) > 1}]
    return found
