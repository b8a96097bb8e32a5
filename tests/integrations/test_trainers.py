# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers: the same losses, step by step, and the same weights as with eager attention on padded batches."""

import copy

import pytest
import torch
import trl
from datasets import Dataset
from flashmask.integrations.collators import PackedCollator, SharedPrefixCollator
from flashmask.integrations.transformers import share_prefixes
from small_models import MODELS
from test_models import assert_close
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl.trainer import dpo_trainer, reward_trainer

STEPS = 3


@pytest.fixture(scope="module")
def tokenizer():
    special = dict(pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")
    vocabulary = [*special.values(), *(f"w{n}" for n in range(4, 256))]
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **special)


@pytest.fixture
def arguments(tmp_path):
    return dict(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        logging_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=0,
    )


def drawn(n):
    return torch.randint(4, 250, (n,)).tolist()


def trained(make, model):
    """(losses, parameters, the shapes that the first layer saw) of a trainer that make(model) returns."""
    shapes = []
    base = model.base_model
    base.layers[0].register_forward_hook(lambda layer, inputs, out: shapes.append(tuple(inputs[0].shape[:2])))
    trainer = make(model)
    trainer.train()
    losses = torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses) == STEPS
    return losses, dict(model.named_parameters()), shapes


def assert_same_training(got, want):
    assert_close(got[0], want[0], "losses")  # as they are logged
    for name, parameter in want[1].items():
        # Adam's first steps divide by the gradient's own size, so where that is rounding, the step is, too.
        error = (got[1][name] - parameter).abs()
        assert error.mean() < 1e-6 and error.max() < 2e-3, name


def with_attention(model, implementation):
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.long)])
def test_sft_with_packing(name, attention, arguments, tokenizer):
    """TRL's own packing, by positions, and our collator, against TRL's padded batches of the same documents."""
    documents = [drawn(n) for n in (30, 34, 10, 54, 64, 20, 24, 20, 60, 4, 63, 1)]
    data = Dataset.from_dict({"input_ids": documents})
    packed = Dataset.from_dict({"input_ids": documents})
    model = MODELS[name]()

    def trainer(model, data=data, collator=None, **options):
        options = {
            **arguments,
            "max_length": 64,
            "shuffle_dataset": False,
            "train_sampling_strategy": "sequential",
            **options,
        }
        config = trl.SFTConfig(**options)
        return trl.SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer, data_collator=collator)

    ours = trained(lambda m: trainer(m, packed, packing=True), with_attention(model, attention))
    theirs = trained(lambda m: trainer(m, packed, packing=True), with_attention(model, "eager"))
    assert_same_training(ours, theirs)
    assert ours[2][0][0] == 1

    collated = dict(per_device_train_batch_size=4, max_length=None)
    ours = trained(lambda m: trainer(m, collator=PackedCollator(), **collated), with_attention(model, attention))
    theirs = trained(lambda m: trainer(m, **collated), with_attention(model, "eager"))
    assert_same_training(ours, theirs)
    assert ours[2][0] == (1, 128) and theirs[2][0] == (4, 54)


def text(n):
    return "".join(f"w{id} " for id in drawn(n))


def pairs():
    lengths = ((40, 9, 20), (25, 30, 3), (50, 8, 8), (1, 5, 5), (31, 17, 12), (44, 2, 20))
    return Dataset.from_list([dict(zip(("prompt", "chosen", "rejected"), map(text, row))) for row in lengths])


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen3", marks=pytest.mark.long)])
def test_dpo_with_shared_prompts(name, attention, arguments, tokenizer):
    data, model = pairs(), MODELS[name]()
    plain = dpo_trainer.DataCollatorForPreference(pad_token_id=0)

    def trainer(model, collator):
        reference = copy.deepcopy(model)
        for parameter in reference.parameters():
            torch.manual_seed(1)
            parameter.data += 0.02 * torch.randn_like(parameter)
        config = trl.DPOConfig(**arguments, max_length=None)
        return trl.DPOTrainer(
            model, reference, config, train_dataset=data, processing_class=tokenizer, data_collator=collator
        )

    shared = share_prefixes(with_attention(model, attention))
    ours = trained(lambda m: trainer(m, SharedPrefixCollator(plain)), shared)
    theirs = trained(lambda m: trainer(m, plain), with_attention(model, "eager"))
    assert_same_training(ours, theirs)
    assert all(rows == 1 for rows, _ in ours[2]) and all(rows == 4 for rows, _ in theirs[2])
    assert sum(tokens for _, tokens in ours[2]) < 0.6 * sum(4 * tokens for _, tokens in theirs[2])


def test_reward_model_with_shared_prompts(attention, arguments, tokenizer):
    data = pairs()
    model = LlamaForSequenceClassification(MODELS["llama"](num_labels=1).config)
    plain = reward_trainer.DataCollatorForPreference(pad_token_id=0)

    def trainer(model, collator):
        config = trl.RewardConfig(**arguments, max_length=None)
        return trl.RewardTrainer(model, config, train_dataset=data, processing_class=tokenizer, data_collator=collator)

    shared = share_prefixes(with_attention(model, attention))
    ours = trained(lambda m: trainer(m, SharedPrefixCollator(plain)), shared)
    theirs = trained(lambda m: trainer(m, plain), with_attention(model, "eager"))
    assert_same_training(ours, theirs)
    assert all(rows == 1 for rows, _ in ours[2])
