# SPDX-License-Identifier: Apache-2.0
"""benchmarks/end_to_end at its smallest, on the CPU: the recipe, the losses of every attention, processes and receipts.

What needs no torch is tested in tests/benchmarks/test_end_to_end_page.py, what needs a GPU in
tests/torch/test_cuda_training.py.
"""

import gc
import json
import re
import types
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_models import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import receipts
from benchmarks.end_to_end import contenders, figures, models, recipe, run, worker
from benchmarks.report import end_to_end_page

LENGTH, VOCABULARY = 256, models.SHAPES["tiny"]["vocab_size"]


def batch_for(task, length=LENGTH):
    return recipe.batch_of(recipe.chosen(task, length, 20)[0][1], VOCABULARY, 1)


# --- The recipe -------------------------------------------------------------------------------------


# From appendix A.2.1: answers, and the fewest tokens of a document, which are also the most of padding.
PAPER = {"sft": (1, 128), "lora": (1, 128), "dpo": (2, 128), "rm": (6, 512)}
PAPER_DOCUMENTS = {4096: 3, 8192: 4}  # most documents of reward models; all others have 10


@pytest.mark.parametrize("task", PAPER)
@pytest.mark.parametrize("seqlen", [4096, 8192, 16384])
def test_sequences_follow_the_recipe(task, seqlen):
    rng, (k, least), counts, padding, places = np.random.default_rng(0), PAPER[task], set(), [], []
    low, high = 0.1 / (1 + 0.1 * k), 0.2 / (1 + 0.2 * k)  # bounds of an answer's length over its document's
    for _ in range(150):
        layout = recipe.draw(rng, task, seqlen)
        counts.add(len(layout.documents))
        padding.append(layout.padding)
        lengths = [question + sum(answers) for question, answers in layout.documents]
        assert sum(lengths) + layout.padding == seqlen and min(lengths) >= least
        for length, (question, answers) in zip(lengths, layout.documents):
            assert len(answers) == k
            assert all(low * length - 1 < n <= high * length and 0.09 < n / question <= 0.2 for n in answers)
            places += [(n / length - low) / (high - low) for n in answers]
    assert counts == set(range(1, (PAPER_DOCUMENTS.get(seqlen, 10) if task == "rm" else 10) + 1))
    assert 0 <= min(padding) < least / 10 and least * 0.9 < max(padding) <= least
    assert min(places) < 0.05 and max(places) > 0.95


def test_sequences_of_the_tests_follow_it_at_their_size():
    for task in PAPER:
        layouts = [recipe.draw(np.random.default_rng(n), task, LENGTH) for n in range(20)]
        assert all(recipe.batch_of(layout, VOCABULARY, 1).seqlen == LENGTH for layout in layouts)
        assert len({len(layout.documents) for layout in layouts}) > 3 or task == "rm"


def test_sparsity_is_the_share_of_empty_tiles():
    """The paper's rho, of 240 sequences for each length, in ten bins."""
    every = recipe.layouts("dpo", 2048)
    assert len(every) == 240 == sum(count for _, _, count, _ in figures.bins([(share, 1.0) for share, _ in every]))
    for share, layout in every[::80]:
        dense = contenders.dense_matrix(recipe.batch_of(layout, VOCABULARY, 1))[0, 0]
        empty = ~dense.view(16, 128, 16, 128).any(3).any(1)
        assert share == empty.float().mean().item()


@pytest.mark.parametrize("task", ["sft", "dpo", "rm"])
def test_batch_and_mask_are_of_one_layout(task):
    for _, layout in recipe.chosen(task, LENGTH, 20):
        batch = recipe.batch_of(layout, VOCABULARY, 1)
        dense = contenders.dense_matrix(batch)
        assert torch.equal(layout.mask().to_dense(), dense)
        assert torch.equal(contenders.Ours("cpu").mask(batch).to_dense(), dense)
        assert batch.seqlen == LENGTH and (batch.position_ids[0] == dense[0, 0].sum(1) - 1).all()
        assert torch.equal(batch.input_ids[0] % recipe.VOCABULARY_PARTS, batch.answer.long())
        following = batch.sources + 1  # places of all but an answer's first token
        inside = batch.answer[batch.sources] > 0
        assert torch.equal(batch.input_ids[0, following[inside]], batch.targets[inside])
        assert (~inside).sum() == batch.last.numel() == batch.of_answer[-1] + 1


def test_chosen_sequences_stand_for_all():
    every = [share for share, _ in recipe.layouts("sft", 2048, 40)]
    assert every == sorted(every)
    middle, *others = [share for share, _ in recipe.chosen("sft", 2048, 40)]
    assert others[0] <= middle <= others[1] and others[2] <= others[0] and others[1] <= others[3]


# --- Losses -----------------------------------------------------------------------------------------


def separate(model, batch):
    """[(log probabilities of an answer, the hidden state of its last token)], each answer in a sequence of its own."""
    ids, found = batch.input_ids[0], []
    for end in batch.last.flatten().tolist():
        document, answer = batch.document[end], batch.answer[end]
        mine = (batch.document == document) & ((batch.answer == 0) | (batch.answer == answer))
        sequence, of_answer = ids[mine], (batch.answer == answer)[mine]
        hidden = model.model(sequence[None], use_cache=False).last_hidden_state[0]
        each = model.lm_head(hidden).log_softmax(-1)[:-1].gather(1, sequence[1:, None])[:, 0]
        found.append((each[of_answer[1:]], hidden[-1]))
    return found


@pytest.mark.parametrize("task", recipe.TASKS)
def test_losses_are_those_of_separate_sequences(task):
    batch = batch_for(task)
    trainer = models.trainer("tiny", task, "ours", "cpu")
    trainer.step(batch)  # so that DPO's model is no longer its reference
    with torch.no_grad():
        loss = trainer.loss(batch)
        plain = models.make("tiny", "cpu", "eager")
        if task == "lora":
            models.Trainer(task, plain, contenders.Vanilla("cpu"))  # puts adapters into it
        plain.load_state_dict(trainer.model.state_dict())
        answers = separate(plain.eval(), batch)
        if task in ("sft", "lora"):
            want = -torch.cat([each for each, _ in answers]).mean()
        elif task == "rm":
            rewards = trainer.score(torch.stack([hidden for _, hidden in answers]))[:, 0].view(batch.last.shape)
            pairs = [(a, b) for a in range(6) for b in range(a + 1, 6)]
            want = torch.stack([-F.logsigmoid(rewards[:, a] - rewards[:, b]) for a, b in pairs]).mean()
        else:
            plain.load_state_dict(trainer.reference.state_dict())
            reference = [each.sum() for each, _ in separate(plain, batch)]
            gain = torch.stack([each.sum() - x for (each, _), x in zip(answers, reference)]).view(batch.last.shape)
            want = -F.logsigmoid(models.DPO_BETA * (gain[:, 0] - gain[:, 1])).mean()
    assert_close(loss, want, "loss")


# LoRA sees what SFT does, and reward models share prompts as DPO does.
@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=[pytest.mark.long] * (task in ("lora", "rm"))) for task in recipe.TASKS]
)
def test_contenders_agree(task):
    batch, found = batch_for(task), {}
    for name in contenders.CONTENDERS:
        why = contenders.refusal(name, task, "cpu")
        if name == "varlen" or name == "flex" and task != "dpo":  # flex is slow unless compiled
            assert why
            continue
        trainer = models.trainer("tiny", task, name, "cpu")
        with torch.no_grad():
            losses = [trainer.loss(batch)]
        losses += [trainer.step(batch) for _ in range(0 if why else 2)]
        found[name] = torch.stack(losses)
    ours = found.pop("ours")
    assert torch.equal(ours, found["dense"]) and ours[-1] < ours[0]
    assert (ours - found.pop("nothing")).abs().max() > 1e-3
    for name, losses in found.items():
        assert_close(losses, ours[: len(losses)], name)


class Reads(TorchDispatchMode):
    """Operations that would wait for a device."""

    names = ("_local_scalar_dense", "nonzero", "masked_select", "aten.equal", "is_nonzero", "unique")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), by_name=None):
        if any(name in str(function) for name in self.names):
            self.found.append(str(function))
        return function(*arguments, **(by_name or {}))


@pytest.mark.parametrize("task", recipe.TASKS)
def test_a_step_reads_nothing_back(task):
    trainer, batch = models.trainer("tiny", task, "ours", "cpu"), batch_for(task)
    trainer.step(batch)
    with Reads() as reads:
        trainer.step(batch)
        assert not reads.found
        batch.targets.sum().item()
    assert reads.found


# --- Processes and receipts -------------------------------------------------------------------------


def results(job, capsys):
    worker.main([json.dumps(job)])
    return [json.loads(line[1:]) for line in capsys.readouterr().out.splitlines() if line.startswith("@")]


def job_of(name, contender=None):
    """The first job of a figure, or a contender's, as run.py makes it."""
    found = figures.FIGURES[name].jobs(figures.TINY)
    return next(j for j in found if contender is None or j.words["contender"] == contender).words | {"device": "cpu"}


def receipt_of(name, found):
    figure = figures.FIGURES[name]
    header = {"date": "2026-01-01", "device": "CPU", "torch": "2", "transformers": "5", "complete": True}
    held = {"settings": {}, "results": found, "checks": figure.checks(found)}
    return {"what": figures.topic(name), "figures": held, **header}


@pytest.mark.long
def test_figures_of_a_tiny_model_make_receipts_and_a_page(capsys):
    found = {
        "throughput": [
            {**r, "compiler_cache": "empty"}
            for contender in ("ours", "sdpa", "flex")
            for r in results(job_of("throughput", contender) | {"tasks": ["lora", "sft"]}, capsys)
        ],
        "memory": results(job_of("memory", "ours"), capsys) + results(job_of("memory", "varlen"), capsys),
        "losses": [
            r
            for contender, deterministic in (("ours", True), ("dense", True))
            for r in results(
                job_of("losses", contender) | {"deterministic": deterministic, "tasks": ["sft", "rm"]}, capsys
            )
        ],
        "sparsity": results(job_of("sparsity"), capsys),
    }
    torch.use_deterministic_algorithms(False)
    for name, of_figure in found.items():
        receipt = receipt_of(name, of_figure)
        assert not figures.problems(name, receipt["figures"])
        assert all(c["passed"] for c in receipt["figures"]["checks"])
    assert [r["task"] for r in found["throughput"]] == ["lora", "sft"] * 3
    assert len({round(r["first_loss"], 4) for r in found["throughput"] if "first_loss" in r}) == 1  # one model for all
    assert ["refused" in r for r in found["throughput"]] == [False] * 4 + [True] * 2
    (ours, refused) = found["memory"]
    assert ours["longest"] == 256 and ours["ended"] == "limit" and "CUDA alone" in refused["refused"]
    assert len(figures.FIGURES["losses"].checks(found["losses"])) == 6

    topics = {figures.topic(name): receipt_of(name, of_figure) for name, of_figure in found.items()}
    text = end_to_end_page.page([], topics, "COMMAND")
    assert "| tiny SFT, 256 |" in text and "| SFT | 6." in text and "5 of 5" in text
    assert text.count("Not measured yet") == 6  # tables 4 to 9
    for task in ("sft", "dpo", "rm"):
        assert end_to_end_page.IN_WORDS[task] + ", 20 sequences" in text
    del ours["lengths"][0]["peak_bytes"], ours["lengths"][1]["peak_bytes"]  # none on a CPU
    for n, x in enumerate(ours["lengths"]):
        x["peak_bytes"] = 2**30 * (n + 1)
    drawn = end_to_end_page.drawings(topics)
    names = ("sft", "lora", "memory", "losses", "preferences", "sparsity")
    assert set(drawn) == {f"end-to-end-{name}" for name in names}
    shown = set(re.findall(r"img/gpu-([\w-]+)\.svg", end_to_end_page.page([], topics, "COMMAND")))
    assert shown == set(drawn)
    for svg in drawn.values():
        ElementTree.fromstring(svg)


@pytest.mark.long
def test_the_command_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    settings = figures.TINY._replace(throughput=(("tiny", 128, ("sft", "dpo")),))
    monkeypatch.setattr(figures, "TINY", settings)
    words = ["throughput", "--tiny", "--only", "tiny ours 128"]
    path = tmp_path / "end-to-end-throughput.json"
    assert run.main(words) == 0
    said = capsys.readouterr()
    assert "1 processes" in said.err and "[100%" in said.err and "tokens/s" in said.err
    receipt = json.loads(path.read_text())
    assert len(receipt["figures"]["results"]) == 2 and not receipt["complete"] and receipt["kind"] == "cpu"
    assert not figures.problems("throughput", receipt["figures"])

    header = {name: receipt[name] for name in (*receipts.RUN_TEXTS[1:-1], "transformers", "kernel_hashes")}
    monkeypatch.setattr(run, "surroundings", lambda *_: dict(header))  # it takes a process
    first = receipt["figures"]["results"][0]
    first |= {"failed": "it did"}
    receipt["figures"]["results"][1]["step_ms"] = 7.0
    path.write_text(json.dumps(receipt))
    assert run.main(words) == 0
    assert "1 processes, about 4 s" in capsys.readouterr().err  # half of them
    again = json.loads(path.read_text())["figures"]["results"]
    assert len(again) == 2 and again[-1]["task"] == first["task"] and "failed" not in again[-1]
    assert again[0]["step_ms"] == 7.0  # kept

    path.write_text(json.dumps(receipt))
    assert run.main([*words, "--seconds", "3"]) == run.LEFT_TO_DO
    said = capsys.readouterr()
    assert "1 processes are left" in said.out and len(json.loads(path.read_text())["figures"]["results"]) == 1

    path.write_text(json.dumps({**receipt, "torch": "1.0"}))
    with pytest.raises(SystemExit, match=r"end-to-end-throughput.json is of another torch \(1.0; here"):
        run.main(words)


def test_only_memory_that_runs_out_is_a_result():
    assert worker.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB"))
    assert worker.is_out_of_memory(RuntimeError("flashmask: the device is out of memory"))
    assert not worker.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.long
def test_a_process_that_fails_says_why():
    taken = []
    why, last = run.Worker(job_of("throughput") | {"model": "huge"}).results(60, taken.append)
    assert "KeyError: 'huge'" in why and last is None and not taken
    why, _ = run.Worker(job_of("throughput")).results(0.3, taken.append)
    assert why == "stopped after 0 s" and not taken
    why, _ = run.Worker({"figure": "speed", "tasks": ["speed"], "seqlen": 128, "sequences": 20}).results(60)
    assert "KeyError: 'speed'" in why  # before it was told to begin


def test_the_next_process_starts_while_one_measures(monkeypatch):
    started = []
    make = run.Worker
    monkeypatch.setattr(run, "Worker", lambda *words: started.append(make(*words)) or started[-1])
    words, clock = job_of("memory", "ours"), types.SimpleNamespace(left=lambda: 9)
    jobs = [figures.Job(words, (), seconds) for seconds in (5, 50, 5)]  # there is no time for the second
    seen = []
    for job, process in run.workers_of(jobs, clock):
        seen.append((job.seconds, len(started), started.index(process)))
        process.end()
    assert seen == [(5, 2, 0), (5, 3, 2)]
    next(run.workers_of(jobs, clock))  # a caller that goes no further
    gc.collect()
    started.pop(3).end()
    assert len(started) == 4 and all(x.process.poll() is not None for x in started)


def test_gpus_share_the_work_and_what_is_compared_shares_a_gpu():
    settings = figures.Settings()
    for name, figure in figures.FIGURES.items():
        jobs = list(figure.jobs(settings))
        assert run.lanes_of(jobs, 1) == [jobs]
        lanes = run.lanes_of(jobs, 3)
        assert sorted(map(jobs.index, sum(lanes, []))) == list(range(len(jobs)))
        assert all(lane == sorted(lane, key=jobs.index) for lane in lanes)
        if name == "throughput":
            places = [
                {(job.words["model"], job.words["seqlen"]) for job in lane if not job.beside[2]} for lane in lanes
            ]
            assert sum(map(len, places)) == len(set.union(*places)) == len(settings.throughput)
            lengths = [sum(job.seconds for job in lane) for lane in lanes]
            assert max(lengths) < 1.3 * min(lengths)


def test_each_gpu_has_its_own_processes(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert [run.environment_of(gpu)["CUDA_VISIBLE_DEVICES"] for gpu in (0, 1)] == ["2", "5"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert run.environment_of(1)["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.parametrize(
    "words, text",
    [
        (["throughput", "--device", "cpu"], "without --tiny it must be cuda"),
        (["throughput", "--tiny"], "set OUT"),
        (["speed"], "invalid choice"),
    ],
)
def test_wrong_words(words, text, monkeypatch, capsys):
    monkeypatch.delenv("OUT", raising=False)
    with pytest.raises(SystemExit):
        run.parse(words)
    assert text in capsys.readouterr().err
