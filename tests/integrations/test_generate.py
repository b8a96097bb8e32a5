# SPDX-License-Identifier: Apache-2.0
"""generate() with both kinds of cache, against eager: the same tokens, and their logits."""

import pytest
import torch
from small_models import MODELS, WINDOW
from test_models import assert_close, tokens
from torch._dynamo.utils import counters
from transformers import CompileConfig

STEPS = 20  # so that windows and chunks end within


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "llama4"])
def test_generate(name, cache, attention):
    model, prompts = MODELS[name]().eval(), tokens(2, WINDOW + 10)
    shown = torch.ones_like(prompts)
    shown[1, :17] = 0  # the shorter of the prompts
    ours, theirs = (generate(model, implementation, prompts, shown, cache) for implementation in (attention, "eager"))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), "logits")


def generate(model, implementation, prompts, shown, cache, **options):
    model.set_attn_implementation(implementation)
    return model.generate(
        prompts,
        attention_mask=shown,
        do_sample=False,
        min_new_tokens=STEPS,
        max_new_tokens=STEPS,
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.long)])
def test_compiled_steps(name, attention):
    """A static cache compiles the steps, as on a GPU: no more often than with eager attention."""
    model, prompts = MODELS[name]().eval(), tokens(2, WINDOW - 4)
    shown = torch.ones_like(prompts)
    shown[1, :9] = 0
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True
    results, graphs = [], []
    for implementation in (attention, "eager"):
        torch._dynamo.reset()
        counters.clear()
        results.append(generate(model, implementation, prompts, shown, "static", compile_config=config))
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] and (graphs[0] == 1 or name != "llama")
    assert_close(torch.stack(results[0].logits), torch.stack(results[1].logits), "logits")


@pytest.mark.parametrize("implementation", ["ours", "eager"])
def test_prefill_in_parts(implementation, attention):
    """A cache that is continued by several tokens, beyond the window."""
    model, ids = MODELS["mistral"]().eval(), tokens(2, 80)
    model.set_attn_implementation(attention if implementation == "ours" else "eager")
    whole, cache, parts = model(ids).logits, None, []
    for part in ids.split([30, 7, 1, 42], 1):
        out = model(part, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert_close(torch.cat(parts, 1), whole, "logits")
