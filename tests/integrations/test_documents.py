# SPDX-License-Identifier: Apache-2.0
"""Documents packed into sequences, by positions and by ends: kept apart or refused, never seen by each other."""

import gc

import pytest
import torch
from flashmask import Mask, UnsupportedError, masks
from small_models import ENCODERS, MODELS
from test_models import assert_close, check, model_of, results, tokens

# Llama 4 hands its attention no positions: a limit that the page names.
CAUSAL = [name for name in MODELS if name not in (*ENCODERS, "gemma3", "llama4")]
LENGTHS = [12, 18]
S = sum(LENGTHS)
ANEW = "position_ids begin anew.*cu_seq_lens_q"


def positions_of(*rows):
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def ends_of(*lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def alone(model, ids, lengths):
    """Logits of documents that are each a sequence."""
    return torch.cat([model(document, use_cache=False).logits for document in ids.split(lengths, 1)], 1)


def ours(name, attention):
    model = model_of(name)
    model.set_attn_implementation(attention)
    return model


# --- By positions ---------------------------------------------------------------------------------

PADDINGS = {
    "ones": [1] * S,
    "right": [1] * (S - 5) + [0] * 5,
    "left": [0] * 5 + [1] * (S - 5),
    "numbers": [1] * LENGTHS[0] + [2] * (LENGTHS[1] - 5) + [0] * 5,
    "hole": [1] * (LENGTHS[0] - 2) + [0] * 4 + [1] * (S - LENGTHS[0] - 2),
}


@pytest.mark.parametrize("cache", [None, False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
@pytest.mark.parametrize("padding", PADDINGS)
def test_packed_positions_beside_a_mask_of_padding(padding, dtype, cache, attention):
    model, shown = ours("llama", attention), torch.tensor([PADDINGS[padding]]).to(dtype)
    with pytest.raises(UnsupportedError, match=ANEW):
        model(tokens(1, S), attention_mask=shown, position_ids=positions_of(LENGTHS), use_cache=cache)


@pytest.mark.parametrize("name", CAUSAL)
def test_every_model_keeps_documents_apart_or_says_so(name, attention):
    model, ids, positions = ours(name, attention), tokens(2, S), positions_of(LENGTHS, [7, 1, 22])
    apart = torch.cat([alone(model, ids[:1], LENGTHS), alone(model, ids[1:], [7, 1, 22])])
    for inputs in ({}, {"use_cache": False}, {"attention_mask": torch.ones(2, S)}):
        try:
            logits = model(ids, position_ids=positions, **inputs).logits
        except UnsupportedError as error:
            assert "position_ids begin anew" in str(error)
        else:
            assert_close(logits, apart, "logits")


def test_packed_positions_in_a_cache(attention):
    """A cache of either kind, at its beginning and later."""
    import transformers

    model, ids = ours("llama", attention), tokens(1, S)
    for cache in (transformers.DynamicCache(), transformers.StaticCache(model.config, max_cache_len=64)):
        with torch.no_grad(), pytest.raises(UnsupportedError, match=ANEW):
            model(ids, position_ids=positions_of(LENGTHS), past_key_values=cache)
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(ids[:, :10], past_key_values=cache)
        with pytest.raises(UnsupportedError, match=ANEW):
            model(ids[:, 10:], position_ids=positions_of([12, 8]), past_key_values=cache)


def test_one_row_of_the_batch_is_enough(attention):
    model, shown = ours("llama", attention), torch.ones(2, S, dtype=torch.long)
    with pytest.raises(UnsupportedError, match=ANEW):
        model(tokens(2, S), attention_mask=shown, position_ids=positions_of([S], LENGTHS))
    shown[1, LENGTHS[0] :] = 0  # its second document is padding
    model(tokens(2, S), attention_mask=shown, position_ids=positions_of([S], LENGTHS))


ONE_DOCUMENT = {
    "doubled": torch.arange(0, 2 * S, 2),
    "gap": torch.cat([torch.arange(5), torch.arange(9, S + 4)]),
    "offset": torch.arange(7, S + 7),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("positions", ONE_DOCUMENT)
def test_positions_with_gaps_are_of_one_document(positions, padded, attention):
    ids, inputs, weight = tokens(2, S), {"position_ids": ONE_DOCUMENT[positions][None]}, torch.ones(2, S)
    if padded:
        weight[0, :6] = weight[1, -6:] = 0
        inputs["attention_mask"] = weight.long()
    check(model_of("llama"), attention, ids, weight, **inputs)


def test_positions_of_padding_are_not_looked_at(attention):
    """Positions as generate and trainers number them: 1 or 0 at the padding, from 0 at the first token."""
    shown = torch.tensor([[0] * 6 + [1] * (S - 6), [1] * (S - 6) + [0] * 6])
    positions = shown.cumsum(1) - 1
    for filled in (0, 1):
        inputs = {"attention_mask": shown, "position_ids": positions.masked_fill(shown == 0, filled)}
        check(model_of("llama"), attention, tokens(2, S), shown.float(), **inputs)


def test_positions_on_meta_give_shapes(attention):
    with torch.device("meta"):
        model = MODELS["llama"](attn_implementation=attention)
        ids, positions, ends = torch.ones(2, S, dtype=torch.long), torch.arange(S)[None], torch.arange(2 * S + 1)
        by_ends = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone()}
        for inputs in ({}, {"attention_mask": torch.ones(2, S)}, by_ends):
            assert model(ids, position_ids=positions, **inputs).logits.is_meta


# --- By ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "llama4"])
@pytest.mark.parametrize("is_one_tensor", [True, False])
def test_ends_of_a_batch_are_those_of_its_rows(name, is_one_tensor, attention):
    model, ids, rows = ours(name, attention), tokens(2, S), (LENGTHS, [7, 3, 20])
    ends = ends_of(*rows[0], *rows[1])
    logits = model(
        ids,
        position_ids=positions_of(*rows),
        cu_seq_lens_q=ends,
        cu_seq_lens_k=ends if is_one_tensor else ends.clone(),
        use_cache=False,
    ).logits
    assert_close(logits, torch.cat([alone(model, x[None], row) for x, row in zip(ids, rows)]), "logits")


@pytest.mark.parametrize(
    "batch, ends, keys_ends, raised, words",
    [
        (2, [0, 12, 30], None, ValueError, "cu_seq_lens_q has no end at each multiple of 30 up to 60"),
        (2, [0, 12, 40, 60], None, ValueError, "cu_seq_lens_q has no end at each multiple of 30 up to 60"),
        (2, [0, 30, 50], None, ValueError, "cu_seq_lens_q has no end at each multiple of 30 up to 60"),
        (
            1,
            [0, 12, 31],
            None,
            ValueError,
            r"cu_seq_lens_q\[2\] is 31; it must be at most the number of tokens, 1 x 30",
        ),
        (1, [0, 20, 12, 30], None, ValueError, "must begin with 0 and ascend"),
        (1, [1, 30], None, ValueError, "must begin with 0 and ascend"),
        (1, [0, 12, 30], [0, 13, 30], ValueError, "cu_seq_lens_q and cu_seq_lens_k differ"),
        (1, [0, 12, 30], [0, 30], ValueError, "must be given together, of one length"),
        (1, [[0, 12, 30]], None, ValueError, r"cu_seq_lens_q has shape \[1, 3\]; it must be \[documents \+ 1\]"),
        (1, [], None, TypeError, "cu_seq_lens_q is torch.float32; it must be integers"),
        (1, [0.0, 30.0], None, TypeError, "cu_seq_lens_q is torch.float32; it must be integers"),
    ],
)
def test_wrong_ends(batch, ends, keys_ends, raised, words, attention):
    ends = torch.tensor(ends)
    keys_ends = ends if keys_ends is None else torch.tensor(keys_ends)
    with pytest.raises(raised, match=words):
        ours("llama", attention)(tokens(batch, S), cu_seq_lens_q=ends, cu_seq_lens_k=keys_ends, use_cache=False)


def test_ends_are_tensors(attention):
    with pytest.raises(TypeError, match=r"cu_seq_lens_q is \[0, 30\] .*; it must be a torch.Tensor \[documents \+ 1\]"):
        ours("llama", attention)(tokens(1, S), cu_seq_lens_q=[0, S], cu_seq_lens_k=[0, S], use_cache=False)


def test_ends_are_checked_in_the_graph(attention):
    compiled = torch.compile(ours("llama", attention), fullgraph=True, backend="aot_eager")

    def call(ends, keys_ends):
        return compiled(tokens(2, S), cu_seq_lens_q=ends, cu_seq_lens_k=keys_ends, use_cache=False)

    right = ends_of(*LENGTHS, 20, 10)
    call(right, right.clone())
    with pytest.raises(RuntimeError, match="cu_seq_lens_q and cu_seq_lens_k differ"):
        call(right, ends_of(*LENGTHS, 21, 9))
    with pytest.raises(RuntimeError, match="cu_seq_lens_q has no end at each multiple of 30"):
        call(ends_of(12, 17, 21, 10), ends_of(12, 17, 21, 10))


def masks_alive():
    gc.collect()
    return sum(type(x) is Mask for x in gc.get_objects())


@pytest.mark.parametrize("change", ["none", "in place", "own mask", "lengths", "inference"])
def test_memory_does_not_grow_with_forwards(change, attention):
    """All of which get one tensor of ends, or one dense mask."""
    model, ids, ends = ours("gemma2", attention), tokens(1, S), ends_of(*LENGTHS)
    own, dense = masks.causal(S), torch.ones(1, 1, S, S, dtype=torch.bool).tril()

    def forward(n):
        if change == "in place":
            ends[1] = first = 5 + n % 10
        else:
            first = LENGTHS[0]
        if change == "lengths":
            return model(ids[:, : n + 2], attention_mask=dense[:, :, : n + 2], use_cache=False)
        inputs = {"attention_mask": own} if change == "own mask" else {}
        logits = model(ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=False, **inputs).logits
        assert_close(logits[:, first:], model(ids[:, first:], use_cache=False).logits, "logits")

    with torch.inference_mode() if change == "inference" else torch.no_grad():
        for n in range(6):
            forward(n)
        before = masks_alive()
        for n in range(6, 26):
            forward(n)
    assert masks_alive() <= before


def test_layers_share_the_mask_within_the_ends(attention, monkeypatch):
    from flashmask.integrations import _mask_functions

    made, within = [], _mask_functions.within_documents
    monkeypatch.setattr(_mask_functions, "within_documents", lambda *given: made.append(given) or within(*given))
    ends = ends_of(*LENGTHS)
    results(model_of("llama"), attention, tokens(1, S), 1, cu_seq_lens_q=ends, cu_seq_lens_k=ends, use_cache=False)
    assert len(made) == 1
