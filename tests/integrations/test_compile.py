# SPDX-License-Identifier: Apache-2.0
"""torch.compile of whole models: one graph, which other documents do not compile anew."""

import pytest
import torch
import torch._dynamo
from flashmask import masks
from small_models import ENCODERS, MODELS
from test_models import LENGTH, assert_close, extra, model_of, results, tokens


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield
    torch._dynamo.reset()


def check(name, attention, inputs_of, backend):
    """inputs_of: a function of document lengths; eager mode is what compiled results are compared with."""
    model, eager = model_of(name), model_of(name)
    eager.load_state_dict(model.state_dict())
    model.set_attn_implementation(attention)
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    for lengths in ([30, 50, 48], [100, 20, 8], [1, 1, 126]):
        ids = tokens(1)
        inputs = {**extra(name, ids), **inputs_of(lengths)}
        got = results(model, attention, ids, 1, **inputs)
        want = results(eager, attention, ids, 1, **inputs)
        assert_close(got[0], want[0], "logits")
        for parameter, gradient in want[1].items():
            assert_close(got[1][parameter], gradient, parameter)


def by_positions(lengths):
    return {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None], "use_cache": False}


def by_padding(lengths):
    shown = torch.ones(1, LENGTH, dtype=torch.long)
    shown[:, lengths[0] :] = 0
    return {"attention_mask": shown}


def by_ends(lengths):
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": False}


def by_both(lengths):
    return {**by_positions(lengths), **by_ends(lengths)}


def test_positions_are_checked_in_the_graph(attention):
    model = model_of("gpt_oss")
    model.set_attn_implementation(attention)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(tokens(1), position_ids=torch.arange(LENGTH)[None], use_cache=False)
    with pytest.raises(RuntimeError, match="position_ids begin anew"):
        compiled(tokens(1), **by_positions([30, 98]))


def by_mask(lengths):
    return {"mask": masks.causal_document(seqlens=lengths), "use_cache": False}


def by_attention_mask(lengths):
    return {"attention_mask": masks.causal_document(seqlens=lengths), "use_cache": False}


QUICK = ("llama", "gpt_oss")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.long)
        for name in MODELS
        if name not in (*ENCODERS, "gemma3")
    ],
)
def test_documents(name, attention):
    check(name, attention, by_both if name == "gpt_oss" else by_positions, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name, attention):
    check(name, attention, by_padding, "aot_eager")


@pytest.mark.long
def test_images(attention):
    """Whose masks are of both kinds of parts."""
    check("gemma3", attention, by_padding, "aot_eager")


@pytest.mark.parametrize("inputs_of", [by_padding, by_ends, by_mask, by_attention_mask])
def test_forms(inputs_of, attention):
    check("llama", attention, inputs_of, "aot_eager")


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_inductor(name, attention):
    check(name, attention, by_both if name == "gpt_oss" else by_positions, "inductor")


@pytest.mark.parametrize(("name", "kinds"), [("llama", 1), ("gemma2", 2)])
def test_one_plan_for_each_kind_of_layer(name, kinds, attention):
    """Counts plans in the graph that is run, in which equal calls have become one."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    plans = []

    def compiler(graph, inputs):
        plans.append(sum("flashmask.plan" in str(node.target) for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    model = model_of(name)
    model.set_attn_implementation(attention)
    backend = aot_autograd(fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    torch.compile(model, fullgraph=True, backend=backend)(tokens(1), **by_positions([30, 98]))
    assert plans == [kinds]


def test_functions_of_the_user_are_refused(attention):
    from transformers.masking_utils import create_causal_mask

    model = model_of("llama")
    model.set_attn_implementation(attention)

    def function(ids):
        embeddings = model.get_input_embeddings()(ids)
        return create_causal_mask(
            model.config, embeddings, None, None, and_mask_function=lambda batch, head, row, key: key % 2 == 0
        )

    with pytest.raises(Exception, match="has parts that are not understood, so it cannot be traced"):
        torch.compile(function, fullgraph=True, backend="eager")(tokens(1))
