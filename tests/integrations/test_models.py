# SPDX-License-Identifier: Apache-2.0
"""transformers' model classes against their own eager attention, in float32: logits and gradients."""

import warnings

import pytest
import torch
import transformers
from flashmask import Mask, UnsupportedError, masks
from flashmask.integrations import transformers as integration
from small_models import ENCODERS, MODELS

BATCH, LENGTH = 2, 128
TOLERANCE = 1e-5  # relative to the largest element, or to 1


def tokens(batch=BATCH, length=LENGTH):
    return torch.randint(3, 250, (batch, length))


def model_of(name, **config):
    model = MODELS[name](**config).eval()
    for parameter in model.parameters():
        if not parameter.any():  # as the biases, sinks and norms of some begin
            torch.nn.init.normal_(parameter)
    return model


def results(model, implementation, ids, weight, **inputs):
    """Logits, and the gradients of all parameters of a sum of log probabilities with `weight` for each token."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(ids, **inputs).logits
    (logits.log_softmax(-1)[..., 7] * weight).sum().backward()
    return logits.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def assert_close(got, want, what):
    error, largest = (got - want).abs().max().item(), want.abs().max().item()
    assert error <= TOLERANCE * max(1, largest), f"{what}: {error}"


def check(model, attention, ids, weight=None, theirs=None, **inputs):
    """Ours against eager, where weight is not 0; `theirs`: what eager is given in place of `inputs`."""
    weight = torch.ones(ids.shape) if weight is None else weight
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not understood")
        logits, gradients = results(model, attention, ids, weight, **inputs)
    want, want_gradients = results(model, "eager", ids, weight, **(inputs if theirs is None else theirs))
    assert_close(logits[weight != 0], want[weight != 0], "logits")
    assert gradients.keys() == want_gradients.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, want_gradients[name], name)
    return logits


def extra(name, ids):
    """Inputs of a model beside tokens: for Gemma 3 images, two and one at the end."""
    if name != "gemma3":
        return {}
    types = torch.zeros_like(ids)
    types[:, 50:80] = types[:, 84:99] = types[0, 120:] = 1
    return {"token_type_ids": types}


@pytest.mark.parametrize("name", MODELS)
def test_model(name, attention):
    model, ids = model_of(name), tokens()
    check(model, attention, ids, **extra(name, ids))


@pytest.mark.parametrize("name", MODELS)
def test_padding(name, attention):
    model, ids = model_of(name), tokens()
    shown = torch.ones(ids.shape, dtype=torch.long)
    shown[1, LENGTH - 41 :] = 0
    if name not in ENCODERS:
        shown = shown.flip(1)
    check(model, attention, ids, shown, attention_mask=shown, **extra(name, ids))


@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*ENCODERS, "gemma3", "gpt_oss")])
def test_packed_documents(name, attention):
    model, ids = model_of(name), tokens()
    lengths = ([40, 1, 87], [64, 64])
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    check(model, attention, ids, position_ids=positions, use_cache=False)


def test_documents_that_the_model_does_not_keep_apart(attention):
    """gpt-oss makes its masks without positions, and a model with a cache does not look for documents."""
    positions = torch.cat([torch.arange(40), torch.arange(LENGTH - 40)])[None]
    for name in ("gpt_oss", "llama"):
        model, ids = model_of(name), tokens(1)
        with pytest.raises(UnsupportedError, match="position_ids begin anew.*cu_seq_lens_q"):
            results(model, attention, ids, 1, position_ids=positions)
        ends = torch.tensor([0, 40, LENGTH], dtype=torch.int32)
        logits, _ = results(model, attention, ids, 1, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends)
        for document, part in zip(ids.split([40, LENGTH - 40], 1), logits.split([40, LENGTH - 40], 1)):
            assert_close(part, results(model, "eager", document, 1)[0], "logits")
        results(model, attention, ids, 1, position_ids=torch.arange(LENGTH)[None] + 7)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_documents_by_their_ends(name, attention):
    """Ends as flash-attn's varlen functions take them, without positions."""
    model, ids = model_of(name), tokens(1)
    ends = torch.tensor([0, 40, 41, LENGTH], dtype=torch.int32)
    inputs = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=87, max_length_k=87, use_cache=False)
    dense = torch.full((LENGTH, LENGTH), False)
    for begin, end in zip(ends[:-1], ends[1:]):
        dense[begin:end, begin:end] = True
    place = torch.arange(LENGTH)
    dense &= place[:, None] >= place
    near = dense & (place[:, None] - place < 24)
    bias = {
        kind: torch.where(x, 0.0, torch.finfo(torch.float32).min)[None, None]
        for kind, x in (("full_attention", dense), ("sliding_attention", near))
    }
    theirs = {"llama": bias["full_attention"], "mistral": bias["sliding_attention"], "gemma2": bias}[name]
    check(model, attention, ids, theirs=dict(attention_mask=theirs, use_cache=False), **inputs)


# --- Masks given by the caller --------------------------------------------------------------------


def tree():
    """A prompt with two answers."""
    return masks.shared_question([(40, [50, 38])])


LOOKS_INTO_IT = ("llama4",)  # as if it were a tensor


def as_bias(mask):
    return torch.where(mask.to_dense(), 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("argument", ["mask", "attention_mask"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_mask_of_the_caller_wins(name, argument, attention):
    """Over padding, positions and windows."""
    model, ids, mask = model_of(name), tokens(), tree()
    bias = as_bias(mask)
    positions = torch.cat([torch.arange(90), torch.arange(40, 78)])[None]
    theirs = {"full_attention": bias, "sliding_attention": bias} if name == "gpt_oss" else bias
    theirs = dict(attention_mask=theirs, position_ids=positions, use_cache=False)
    inputs = {argument: mask, "position_ids": positions, "use_cache": False}
    check(model, attention, ids, theirs=theirs, **inputs)


@pytest.mark.parametrize("argument", ["mask", "attention_mask"])
@pytest.mark.parametrize("name", MODELS)
def test_mask_of_the_caller_reaches_every_layer(name, argument, attention, monkeypatch):
    """The mask is attention_mask if the model hands it on; if the model looks into it, the call fails."""
    model, ids, mask, seen = model_of(name), tokens(1), tree(), []
    original = integration.flashmask_attention
    monkeypatch.setattr(
        integration,
        "flashmask_attention",
        lambda q, k, v, given, **others: (seen.append(given is mask), original(q, k, v, given, **others))[1],
    )
    if name in LOOKS_INTO_IT and argument == "attention_mask":
        with pytest.raises(AttributeError, match="'Mask' object"):
            results(model, attention, ids, 1, attention_mask=mask, **extra(name, ids))
    else:
        results(model, attention, ids, 1, **{argument: mask}, **extra(name, ids))
        assert seen == [True, True]


def test_masks_by_kind_of_layer(attention):
    model, ids = model_of("gemma2"), tokens()
    by_kind = {"full_attention": tree(), "sliding_attention": masks.sliding_window(LENGTH, LENGTH, 9)}
    theirs = {kind: as_bias(mask) for kind, mask in by_kind.items()}
    check(model, attention, ids, theirs=dict(attention_mask=theirs), mask=by_kind)
    with pytest.raises(ValueError, match="no entry 'sliding_attention'"):
        results(model, attention, ids, 1, mask={"full_attention": tree()})
    with pytest.raises(TypeError, match="mask is 'causal'"):
        results(model, attention, ids, 1, mask="causal")


@pytest.mark.parametrize("form", [torch.Tensor.bool, lambda x: torch.where(x, 0.0, torch.finfo(torch.float32).min)])
def test_dense_mask_of_the_caller(form, attention):
    model, ids, mask = model_of("llama"), tokens(), tree()
    check(model, attention, ids, theirs=dict(attention_mask=as_bias(mask)), attention_mask=form(mask.to_dense()))


def test_layers_share_the_mask_and_its_plan(attention, monkeypatch):
    seen = []
    original = integration.flashmask_attention
    monkeypatch.setattr(
        integration,
        "flashmask_attention",
        lambda q, k, v, mask, **others: (seen.append(mask), original(q, k, v, mask, **others))[1],
    )
    dense = tree().to_dense()
    ends = torch.tensor([0, 40, LENGTH], dtype=torch.int32)
    for inputs in ({}, {"attention_mask": dense}, {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}):
        seen.clear()
        results(model_of("llama"), attention, tokens(1), 1, **inputs)
        assert len(seen) == 2 and seen[0] is seen[1] and seen[0]._plans
    seen.clear()
    results(
        model_of("gemma2", num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
        attention,
        tokens(),
        1,
    )
    assert len({id(mask) for mask in seen}) == 2


# --- What is not implemented ----------------------------------------------------------------------


def test_refusals(attention):
    model, ids = model_of("llama"), tokens()
    bias = torch.zeros(1, 1, LENGTH, LENGTH)
    bias[..., 0] = 0.5
    with pytest.raises(UnsupportedError, match="a bias of the scores"):
        results(model, attention, ids, 1, attention_mask=bias)
    with pytest.raises(UnsupportedError, match="output_attentions"):
        results(model, attention, ids, 1, output_attentions=True)
    with pytest.raises(UnsupportedError, match="position_bias is not implemented"):
        results(model, attention, ids, 1, position_bias=bias)
    ends = torch.tensor([0, LENGTH])
    with pytest.raises(ValueError, match="given together"):
        results(model, attention, ids, 1, cu_seq_lens_q=ends)
    with pytest.raises(ValueError, match="the mask is for 5 query rows"):
        results(model, attention, ids, 1, mask=Mask(5, 5))


@pytest.mark.parametrize("name", ["flash", "my_flashmask", "", "a|b", "org/kernel", None])
def test_names(name):
    with pytest.raises(ValueError, match="it must be a string without 'flash'"):
        integration.register(name)


def test_a_second_call_and_another_name(attention):
    assert integration.register() == attention == integration.NAME
    model, ids = model_of("llama"), tokens()
    check(model, integration.register("columns"), ids)


def test_tower_without_a_mask(attention):
    """Vision models make none: everything is seen."""
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, image_size=64, patch_size=8)).eval()
    pixels = torch.randn(2, 3, 64, 64)
    outputs = []
    for implementation in (attention, "eager"):
        model.set_attn_implementation(implementation)
        outputs.append(model(pixels).last_hidden_state)
    assert_close(*outputs, "hidden states")


def test_dropout_arrives(attention):
    """Another draw, another result; the same again after the same seed, also in a checkpointed layer's second run."""
    model, ids = model_of("llama", attention_dropout=0.5).train(), tokens()

    def run(seed):
        torch.manual_seed(seed)
        return results(model, attention, ids, 1)

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first[0], again[0]) and not torch.allclose(first[0], other[0])
    model.activation_checkpointing_enable()
    checkpointed = run(1)
    assert torch.equal(first[0], checkpointed[0])
    for name, gradient in first[1].items():
        assert_close(checkpointed[1][name], gradient, name)
