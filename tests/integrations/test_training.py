# SPDX-License-Identifier: Apache-2.0
"""Gradient checkpointing and LoRA."""

import pytest
import torch
from flashmask import masks
from flashmask.integrations.collators import prefix_tree
from flashmask.integrations.transformers import share_prefixes
from peft import LoraConfig, get_peft_model
from small_models import MODELS
from test_models import assert_close, check, model_of, results, tokens


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_checkpointing(name, use_reentrant, attention):
    model, ids = model_of(name).train(), tokens()
    shown = torch.ones_like(ids)
    shown[1, :41] = 0
    plain = results(model, attention, ids, shown, attention_mask=shown)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_close(results(model, attention, ids, shown, attention_mask=shown)[0], plain[0], "logits")
    check(model, attention, ids, shown, attention_mask=shown)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_lora(name, attention):
    base = MODELS[name](attn_implementation=attention)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)).eval()
    ids, mask = tokens(), masks.causal_document(seqlens=[60, 68])
    positions = torch.cat([torch.arange(60), torch.arange(68)])[None]
    model.set_attn_implementation = base.set_attn_implementation
    check(model, attention, ids, position_ids=positions, use_cache=False)
    if name == "llama":
        theirs = dict(position_ids=positions, use_cache=False)
        check(model, attention, ids, theirs=theirs, mask=mask, position_ids=positions, use_cache=False)


def test_lora_on_a_prefix_tree(attention):
    adapter = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = share_prefixes(get_peft_model(MODELS["llama"](attn_implementation=attention), adapter)).eval()
    ids = tokens(4, 50)
    ids[:, :30] = ids[0, :30]
    assert_close(model(ids, shared_prefixes=prefix_tree(ids)).logits, model(ids).logits, "logits")
