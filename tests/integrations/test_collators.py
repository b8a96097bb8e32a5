# SPDX-License-Identifier: Apache-2.0
"""Batches of the collators: losses and gradients equal those of padded batches of the same examples."""

import random

import numpy as np
import pytest
import torch
from flashmask import UnsupportedError
from flashmask.integrations.collators import PackedCollator, SharedPrefixCollator, log_probs, prefix_tree
from flashmask.integrations.transformers import share_prefixes
from small_models import MODELS
from test_models import assert_close


def examples(lengths=(5, 31, 1, 62)):
    drawn = [torch.randint(3, 250, (n,)).tolist() for n in lengths]
    return [{"input_ids": ids, "completion_mask": [int(k > 2) for k in range(len(ids))]} for ids in drawn]


def padded(rows, value):
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def assert_same(model, loss, want):
    assert_close(loss.detach(), want.detach(), "loss")
    got = gradients(model, loss)
    for name, gradient in gradients(model, want).items():
        assert_close(got[name], gradient, name)


@pytest.mark.parametrize("length", [None, 99, 128])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_packed_loss_is_the_padded_one(name, length, attention):
    model, batch = MODELS[name](attn_implementation=attention).eval(), examples()
    packed = PackedCollator(length)(batch)
    assert packed["input_ids"].shape == (1, length or 99)
    ids = padded([x["input_ids"] for x in batch], 0)
    labels = padded([[i if on else -100 for i, on in zip(*x.values())] for x in batch], -100)
    shown = padded([[1] * len(x["input_ids"]) for x in batch], 0)
    loss = model(**packed).loss
    model.set_attn_implementation("eager")
    want = model(ids, labels=labels, attention_mask=shown).loss
    assert_same(model, loss, want)


def test_packed_labels():
    collate = PackedCollator(length=8, pad_token_id=9)
    batch = collate([{"input_ids": [4, 5, 6]}, {"input_ids": torch.tensor([7, 8]), "labels": [7, -100]}])
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7, 8, 9, 9, 9]]
    assert batch["labels"].tolist() == [[-100, 5, 6, -100, -100, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert batch["use_cache"] is False
    with pytest.raises(ValueError, match="the batch has 9 tokens; length is 8"):
        collate([{"input_ids": [1] * 9}])
    with pytest.raises(ValueError, match=r"labels of example 1 has \[1\] elements; its input_ids \[2\]"):
        collate([{"input_ids": [1]}, {"input_ids": [1, 2], "labels": [1]}])
    with pytest.raises(ValueError, match="input_ids of example 0 is torch.float32"):
        collate([{"input_ids": [1.5]}])


def only(examples, length=None):
    batch = PackedCollator(length)(examples)
    return {name: x.tolist() for name, x in batch.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("length", [None, 4, 9])
def test_documents_without_tokens(length):
    for empty in ([], torch.tensor([]), torch.empty(0, dtype=torch.int64), np.zeros(0, np.int32)):
        batch = only([{"input_ids": [5, 6]}, *[{"input_ids": empty}] * 12, {"input_ids": [7, 8]}], length)
        assert batch["labels"][0][:4] == [-100, 6, -100, 8]
        if length is None:
            assert batch["cu_seq_lens_q"] == [0, *[2] * 13, 4]
        else:
            assert batch["cu_seq_lens_q"] == [0, 2] + [4] * (length - 1)
    assert only([{"input_ids": [], "labels": [], "completion_mask": [], "attention_mask": []}])["labels"] == [[]]


def test_padding_of_examples_is_left_out():
    right, left = {"input_ids": [5, 6, 7, 0, 0], "attention_mask": [1, 1, 1, 0, 0]}, {"input_ids": [0, 8, 9]}
    batch = only([right, {**left, "attention_mask": torch.tensor([False, True, True]), "labels": [1, 2, 3]}])
    assert batch["input_ids"] == [[5, 6, 7, 8, 9]] and batch["cu_seq_lens_q"] == [0, 3, 5]
    assert batch["labels"] == [[-100, 6, 7, -100, 3]]
    assert only([{**right, "attention_mask": [0] * 5}])["input_ids"] == [[]]


def test_documents_of_an_example():
    """Documents come as TRL's packing leaves them."""
    batch = only([{"input_ids": [1, 2, 3, 4, 5], "seq_lengths": [2, 0, 3]}, {"input_ids": [6, 7], "seq_lengths": [2]}])
    assert batch["cu_seq_lens_q"] == [0, 2, 2, 5, 7] and batch["position_ids"] == [[0, 1, 0, 1, 2, 0, 1]]
    assert batch["labels"] == [[-100, 2, -100, 4, 5, -100, 7]]
    padded = {"input_ids": [0, 1, 2, 3], "attention_mask": [0, 1, 1, 1], "seq_lengths": [1, 2]}
    assert only([padded])["cu_seq_lens_k"] == [0, 1, 3]


def test_what_is_trained_on_is_in_all_masks():
    example = {"input_ids": [1, 2, 3, 4, 5], "labels": [1, -100, 3, 4, 5], "completion_mask": [0, 1, 1, 1, 1]}
    assert only([example])["labels"] == [[-100, -100, 3, 4, 5]]
    example["assistant_masks"] = np.array([1, 1, 0, 1, 1])
    assert only([example])["labels"] == [[-100, -100, -100, 4, 5]]
    assert only([{"input_ids": [1, 2, 3], "assistant_masks": [False, False, True]}])["labels"] == [[-100, -100, 3]]
    none = dict.fromkeys(("labels", "completion_mask", "assistant_masks", "attention_mask", "seq_lengths", "text"))
    assert only([{"input_ids": [1, 2, 3], **none}])["labels"] == [[-100, 2, 3]]


@pytest.mark.parametrize(
    "change, raised, words",
    [
        ({"input_ids": None}, ValueError, "input_ids of example 1 is missing; it has input_ids"),
        ({"input_ids": [[1, 2, 3]]}, ValueError, r"input_ids of example 1 is torch.int64 \[1, 3\]"),
        ({"input_ids": [True, False, True]}, ValueError, "input_ids of example 1 is torch.bool"),
        ({"input_ids": "abc"}, TypeError, "input_ids of example 1 is 'abc'"),
        ({"input_ids": [1, 2**70, 3]}, TypeError, "input_ids of example 1"),
        ({"labels": [1.0, 2.0, 3.0]}, ValueError, "labels of example 1 is torch.float32"),
        ({"labels": 3}, ValueError, r"labels of example 1 is torch.int64 \[\]"),
        (
            {"completion_mask": [1, 1]},
            ValueError,
            r"completion_mask of example 1 has \[2\] elements; its input_ids \[3\]",
        ),
        ({"assistant_masks": [0, 0.5, 1]}, ValueError, "assistant_masks of example 1 has other values than 0 and 1"),
        ({"attention_mask": [1, 1, 2]}, ValueError, "attention_mask of example 1 has other values than 0 and 1"),
        ({"attention_mask": [1, 0, 1]}, ValueError, "attention_mask of example 1 is 0 between tokens that it shows"),
        ({"attention_mask": [1, 1, 1, 1]}, ValueError, r"attention_mask of example 1 has \[4\] elements"),
        ({"seq_lengths": [2, 2]}, ValueError, r"seq_lengths of example 1 is \[2, 2\]; they must .* its 3 tokens"),
        ({"seq_lengths": [4, -1]}, ValueError, "seq_lengths of example 1"),
        ({"seq_lengths": 3}, ValueError, "seq_lengths of example 1"),
        ({"position_ids": [0, 1, 0]}, ValueError, "position_ids of example 1 has a number for each token"),
        ({"token_type_ids": torch.zeros(3)}, ValueError, "token_type_ids of example 1 has a number for each token"),
        ({"weights": (0.5, 1.0, 1.0)}, ValueError, "weights of example 1 has a number for each token"),
        ({"special_tokens_mask": np.ones(3)}, ValueError, "special_tokens_mask of example 1 has a number for each"),
    ],
)
def test_what_packing_refuses(change, raised, words):
    with pytest.raises(raised, match=words):
        PackedCollator()([{"input_ids": [4]}, {"input_ids": [1, 2, 3], **change}])


def test_what_describes_an_example_is_no_number_of_its_tokens():
    described = {"text": "abc", "length": 3, "messages": [{"role": "user"}] * 3, "names": ["a", "b", "c"]}
    assert only([{"input_ids": [1, 2, 3], **described}])["input_ids"] == [[1, 2, 3]]
    with pytest.raises(TypeError, match=r"example 0 is \[1, 2\] .*; it must be a dict with input_ids"):
        PackedCollator()([[1, 2]])


def test_packed_loss_of_every_key(attention):
    """A batch of all that an example may have trains as one that a loop would make of its documents."""
    model, ids = MODELS["llama"](attn_implementation=attention).eval(), torch.randint(3, 250, (20,)).tolist()
    example = {
        "input_ids": [*ids, 0, 0],
        "attention_mask": [1] * 20 + [0] * 2,
        "seq_lengths": [8, 12],
        "labels": [-100, *ids[1:], 0, 0],
        "completion_mask": [0] * 5 + [1] * 17,
        "assistant_masks": [1] * 15 + [0] * 7,
    }
    loss = model(**PackedCollator()([example])).loss
    documents = [ids[:8], ids[8:]]
    trained = [[-100] * 5 + ids[5:8], [-100, *ids[9:15], *[-100] * 5]]
    shown = padded([[1] * len(x) for x in documents], 0)
    want = model(padded(documents, 0), labels=padded(trained, -100), attention_mask=shown).loss
    assert_same(model, loss, want)


# --- Prefix trees ---------------------------------------------------------------------------------


def rollouts(rng, turns=3):
    """Two prompts, each with answers that branch again, and one rollout twice."""
    drawn = lambda: [rng.randrange(3, 250) for _ in range(rng.randrange(1, 9))]  # noqa: E731

    def branch(prefix, left):
        prefix = prefix + drawn()
        return [prefix] if not left else [x for _ in range(rng.randrange(1, 4)) for x in branch(prefix, left - 1)]

    found = branch([1, 5], turns) + branch([1, 6], turns)
    rng.shuffle(found)
    return [*found, found[0]]


@pytest.mark.parametrize("seed", range(5))
def test_tree_is_what_its_sequences_see(seed):
    sequences = rollouts(random.Random(seed))
    ids, shown = padded(sequences, 0), padded([[1] * len(x) for x in sequences], 0)
    tree = prefix_tree(ids, shown)
    assert torch.equal(tree["input_ids"][0, tree["places"]][shown == 1], ids[shown == 1])
    # As many tokens as different prefixes.
    assert tree["input_ids"].numel() == len({tuple(x[: k + 1]) for x in sequences for k in range(len(x))})
    visible = tree["mask"].to_dense()[0, 0]
    for places, sequence in zip(tree["places"], sequences):
        path = places[: len(sequence)]
        assert tree["position_ids"][0, path].tolist() == list(range(len(sequence)))
        for k, place in enumerate(path):
            assert visible[place].nonzero()[:, 0].tolist() == path[: k + 1].tolist()
    left = prefix_tree(ids.flip(1), shown.flip(1))  # padding before: the sequences are those read backwards
    assert torch.equal(left["places"][shown.flip(1) == 0], torch.zeros((shown == 0).sum(), dtype=torch.int64))


def grpo_loss(new, old, advantages, trained, clip=0.2):
    """arXiv:2402.03300, without its KL term."""
    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -((surrogate * trained).sum(1) / trained.sum(1)).mean()


@pytest.mark.parametrize("length", [None, 128])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_grpo_loss_is_that_of_separate_sequences(name, length, attention):
    model, rng = MODELS[name](attn_implementation=attention).eval(), random.Random(3)
    prompt = [rng.randrange(3, 250) for _ in range(20)]
    sequences = [prompt + [rng.randrange(3, 250) for _ in range(rng.randrange(5, 30))] for _ in range(4)]
    sequences.append(sequences[0][:30] + [3, 4, 5])
    ids, shown = padded(sequences, 0), padded([[1] * len(x) for x in sequences], 0)
    trained = shown[:, 1:] * (torch.arange(1, ids.shape[1]) >= len(prompt))
    advantages = torch.randn(len(sequences), 1)

    tree = prefix_tree(ids, shown, length=length)
    logits = model(tree["input_ids"], position_ids=tree["position_ids"], mask=tree["mask"], use_cache=False).logits
    new = log_probs(logits, tree, ids)
    old = (new + 0.3 * torch.randn_like(new)).detach()
    loss = grpo_loss(new, old, advantages, trained)

    model.set_attn_implementation("eager")
    each = model(ids, attention_mask=shown).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    assert_same(model, loss, grpo_loss(each, old, advantages, trained))
    if length is None:
        assert tree["input_ids"].numel() < 0.65 * shown.sum()


@pytest.mark.parametrize("head", ["ForCausalLM", "ForSequenceClassification"])
def test_model_on_a_tree_gives_the_sequences_outputs(head, attention):
    import transformers

    config = MODELS["llama"](num_labels=1).config
    model = getattr(transformers, f"Llama{head}")._from_config(config, attn_implementation=attention).eval()
    share_prefixes(model)
    sequences = rollouts(random.Random(0))
    ids, shown = padded(sequences, 0), padded([[1] * len(x) for x in sequences], 0)
    collate = SharedPrefixCollator(lambda batch: {"input_ids": ids, "attention_mask": shown})
    seen = []
    model.base_model.layers[0].register_forward_hook(lambda layer, inputs, out: seen.append(inputs[0].shape[:2]))
    got = model(**collate([])).logits
    assert seen == [collate([])["shared_prefixes"]["input_ids"].shape]
    want = model(ids, attention_mask=shown).logits
    weight = shown[..., None] if head == "ForCausalLM" else 1
    assert_same(model, (got * weight).square().sum(), (want * weight).square().sum())


def test_tree_refusals(attention):
    ids = torch.randint(3, 250, (2, 30))
    with pytest.raises(ValueError, match="length is 7"):
        prefix_tree(ids, length=7)
    with pytest.raises(ValueError, match=r"both must be \[sequences, tokens\]"):
        prefix_tree(ids, torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(TypeError, match="collator is 3"):
        SharedPrefixCollator(3)
    with pytest.raises(ValueError, match="attention_mask has other values than 0 and 1"):
        prefix_tree(ids, torch.tensor([[1] * 10 + [2] * 20, [1] * 30]))
    with pytest.raises(ValueError, match="attention_mask is 0 between tokens that it shows"):
        prefix_tree(ids, torch.tensor([[1] * 10 + [0] + [1] * 19, [1] * 30]))
    for batch, words in (
        ({"attention_mask": ids}, "input_ids is missing in the collator's batch; it has attention_mask"),
        ({"input_ids": None}, "input_ids is missing"),
        ({"input_ids": ids, "position_ids": ids}, "position_ids is in the collator's batch"),
        ({"input_ids": ids, "token_type_ids": ids}, "token_type_ids is in the collator's batch"),
    ):
        with pytest.raises(ValueError, match=words):
            SharedPrefixCollator(lambda _, batch=batch: dict(batch))([])
    tree = prefix_tree(ids)
    for name in ("position_ids", "inputs_embeds", "mask", "token_type_ids"):
        model = share_prefixes(MODELS["llama"](attn_implementation=attention))
        with pytest.raises(UnsupportedError, match=f"it came with {name}"):
            model(input_ids=ids, shared_prefixes=tree, **{name: ids})
    with pytest.raises(ValueError, match="the tree has 60 tokens"):
        log_probs(torch.zeros(1, 30, 7), tree, ids)
    window = share_prefixes(MODELS["mistral"](attn_implementation=attention))
    with pytest.raises(UnsupportedError, match="sliding_window 24 are not implemented for sequences of 30 tokens"):
        window(input_ids=ids, shared_prefixes=tree)
    window(input_ids=ids[:, :24], shared_prefixes=prefix_tree(ids[:, :24]))
    chunks = share_prefixes(MODELS["llama4"](attn_implementation=attention, attention_chunk_size=16))
    with pytest.raises(UnsupportedError, match="attention_chunk_size 16"):
        chunks(input_ids=ids, shared_prefixes=tree)
    with pytest.raises(ValueError, match="attn_implementation is 'eager'"):
        share_prefixes(MODELS["llama"](attn_implementation="eager"))(input_ids=ids, shared_prefixes=tree)
