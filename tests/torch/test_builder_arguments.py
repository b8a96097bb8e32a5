# SPDX-License-Identifier: Apache-2.0
"""Builders: refused arguments, arguments in place of lists, and no look at values of tensors."""

import numpy as np
import pytest
import torch
from builder_calls import LISTS, TRACED
from flashmask import Mask, masks


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: masks.causal_document(), "nothing is given; it must be one of cu_seqlens"),
        (
            lambda: masks.causal_document([0, 2], seqlens=[2]),
            "cu_seqlens, seqlens are given; it must be one of cu_seqlens, seqlens",
        ),
        (lambda: masks.document(seqlens=[2, -1, 3]), r"seqlens\[1\] is -1"),
        (lambda: masks.causal_document([3, 1]), r"cu_seqlens\[0\] is 3; .* lengths go in as seqlens"),
        (lambda: masks.document(seqlens=[[3, 4], [7]]), "seqlens must be integers, nested lists of one length"),
        (
            lambda: masks.document(cu_seqlens=[0, 3, 2]),
            r"cu_seqlens\[2\] is 2; cu_seqlens must begin with 0 and ascend",
        ),
        (lambda: masks.document(cu_seqlens=[1, 3]), r"cu_seqlens\[0\] is 1"),
        (lambda: masks.document(cu_seqlens=[]), "cu_seqlens is empty"),
        (lambda: masks.eagle3_ttt(2, seqlen=-1), "seqlen is -1; it must be between 0 and 2147483647"),
        (lambda: masks.document(doc_ids=[1, 1], seqlen=3), "seqlen is 3, but doc_ids has 2 tokens"),
        (lambda: masks.document(doc_ids=[[1, 1, 2], [2, 7, 2]]), r"document id 2 comes back at doc_ids\[1, 2\]"),
        (lambda: masks.document(doc_ids=[4, 4, 2, 4, 2]), r"document id 4 comes back at doc_ids\[3\]"),
        (
            lambda: masks.document(seqlens=torch.tensor([2], device="meta")),
            "seqlen is missing; seqlens is not read on the host",
        ),
        (lambda: masks.prefix_lm_causal(5, 6), "prefix.* is 6; it must be between 0 and seqlen, 5"),
        (
            lambda: masks.prefix_lm_document(seqlens=[2, 2], prefix=[1]),
            "prefix has 1 entries; it needs one for each of the 2",
        ),
        (lambda: masks.prefix_lm_document(seqlens=[2, 2], prefix=[1, 3]), "between 0 and the document's length"),
        (lambda: masks.qk_sparse(9, [(4, 6), (5, 7)]), "ascending, disjoint"),
        (lambda: masks.qk_sparse(9, [(4, 10)]), "ascending, disjoint"),
        (lambda: masks.padding(4, 4, [5]), r"key_lengths\[0\] is 5; it must be between 0 and seqlen_k, 4"),
        (
            lambda: masks.padding(4, 4, [5, 1], [1]),
            r"query_lengths has shape \[1\]; it must be \[batch\], one entry for each batch entry",
        ),
        (lambda: masks.padding(4, 4, []), "one entry for each batch entry"),
        (lambda: masks.shared_question(), "give groups, or both"),
        (lambda: masks.prefix_tree([-1, 0], [1]), "lengths has 1 entries; it needs one for each of the 2 nodes"),
        (lambda: masks.global_sliding_window(4, -1, 2), "global_tokens is -1"),
        (lambda: masks.attention_sink_window(-1, 2, seqlen=4), "sink is -1; it must be at least 0"),
        (lambda: masks.attention_sink_window(1, 0, seqlen=4), "window is 0; it must be at least 1, or -1 for all"),
        (lambda: masks.attention_sink_window(1, 2), "nothing is given"),
        (lambda: masks.block_causal(0, seqlen=4), "blocks is 0; a block must have at least 1 token"),
        (
            lambda: masks.block_causal([2, 3], seqlens=[4]),
            "the sum of blocks is 5; it must be at most the length .*, 4",
        ),
        (lambda: masks.block_causal([2, -1], seqlens=[4]), r"blocks\[1\] is -1; a length must be at least 0"),
        (lambda: masks.block_causal(2, seqlen=4, window=0), "window is 0; it must be at least 1, or -1 for all"),
        (
            lambda: masks.causal_with_blocks([1, 1, -1, 1]),
            r"block id 1 comes back at block_ids\[3\]; the tokens of a block must be contiguous",
        ),
        (
            lambda: masks.causal_with_blocks([[0, 1], [4, 4]], doc_ids=[1, 1, 1]),
            "seqlen is 2, but doc_ids has 3 tokens",
        ),
        (lambda: masks.causal_with_blocks(3), "block_ids is a single number"),
        (lambda: masks.causal_with_blocks([1, 1], window=0), "window is 0; it must be at least 1, or -1 for all"),
        (lambda: masks.block_diffusion(0, seqlen=4), "blocks is 0; a block must have at least 1 token"),
        (
            lambda: masks.block_diffusion(2, seqlen=4, order="sorted"),
            "order is 'sorted'; it must be 'interleaved' or 'concatenated'",
        ),
        (
            lambda: masks.block_diffusion([2, 3], seqlens=[4]),
            "the sum of blocks is 5; it must be at most the length .*, 4",
        ),
        (lambda: masks.eagle3_ttt(0, seqlen=4), "steps is 0; it must be at least 1"),
        (lambda: masks.eagle3_ttt(2), "nothing is given"),
        (lambda: masks.dflash([1], 0, seqlen=4), "block is 0; it must be at least 1"),
        (lambda: masks.dflash(1, 2, seqlen=4), "anchors is a single number"),
        (
            lambda: masks.dflash([1, 5], 2, seqlen=4),
            r"anchors\[1\] is 5; it must be between 0 and the length of the context, 4",
        ),
        (
            lambda: masks.dflash([2, 3, 1], 2, seqlen=4),
            r"anchors\[2\] is 1, less than the one before it, 3; sort the blocks by anchor",
        ),
        (
            lambda: masks.dflash([-1, 3], 2, seqlen=4),
            r"anchors\[1\] is 3, after a negative one; sort the blocks by anchor, negative ones last",
        ),
        (lambda: masks.sliding_window(4, 4, -2), r"window is \(-2, 0\)"),
        (
            lambda: masks.from_dense(torch.ones(2, 2)),
            r"visible is a tensor, torch.float32 \[2, 2\]; it must be bool or uint8",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Every builder that takes documents, blocks or a tree together with a length.
WITH_A_LENGTH = {
    "causal_document": lambda **given: masks.causal_document(**given),
    "document": lambda **given: masks.document(**given),
    "causal_blockwise": lambda **given: masks.causal_blockwise(**given),
    "prefix_lm_document": lambda **given: masks.prefix_lm_document(prefix=[1, 2], **given),
    "attention_sink_window": lambda **given: masks.attention_sink_window(1, 2, **given),
    "block_causal": lambda **given: masks.block_causal(2, **given),
    "block_diffusion": lambda **given: masks.block_diffusion(2, **given)[0],
    "eagle3_ttt": lambda **given: masks.eagle3_ttt(2, **given),
    "dflash": lambda **given: masks.dflash([1], 2, **given),
    "causal_with_blocks": lambda seqlen, **given: masks.causal_with_blocks([-1] * seqlen, **given),
}
BEYOND = {"seqlens": ([5, 6], "the sum of seqlens is 11"), "cu_seqlens": ([0, 5, 11], "the end of cu_seqlens is 11")}


@pytest.mark.parametrize("form", [list, np.array, torch.tensor])
@pytest.mark.parametrize("given", BEYOND)
@pytest.mark.parametrize("name", WITH_A_LENGTH)
def test_documents_that_go_beyond_the_length_are_refused(name, given, form):
    """None is cut silently; what is on a device cannot be looked at."""
    values, message = BEYOND[given]
    with pytest.raises(ValueError, match=f"{message}; it must be at most the length of the sequence, 10"):
        WITH_A_LENGTH[name](**{given: form(values)}, seqlen=10)
    for seqlen in (11, 12):
        WITH_A_LENGTH[name](**{given: form(values)}, seqlen=seqlen)
    if name not in ("causal_with_blocks", "dflash"):  # whose other tensors are lists here
        assert WITH_A_LENGTH[name](**{given: torch.tensor(values, device="meta")}, seqlen=10).device.type == "meta"


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: masks.causal_document(seqlens=[[5, 5], [5, 6]], seqlen=10),
            r"the sum of seqlens\[1\] is 11; it must be at most",
        ),
        (
            lambda: masks.document([[0, 10], [0, 11]], seqlen=10),
            r"the end of cu_seqlens\[1\] is 11; it must be at most",
        ),
        (lambda: masks.shared_question([(5, [3, 3])], seqlen=10), "the sum of seqlens is 11; it must be at most"),
        (
            lambda: masks.shared_question(seqlens=[5, 6], is_question=[True, False], seqlen=10),
            "the sum of seqlens is 11; it must be at most",
        ),
        (lambda: masks.prefix_tree([-1, 0], [5, 6], seqlen=10), "the sum of lengths is 11; it must be at most"),
        (lambda: masks.prefix_tree([-1] * 11, seqlen=10), "the sum of lengths is 11; it must be at most"),
        (lambda: masks.block_causal([5, 6], seqlen=10), "the sum of blocks is 11; it must be at most"),
        (lambda: masks.block_causal([5, 6], seqlens=[10]), "the sum of blocks is 11; it must be at most"),
        (lambda: masks.block_diffusion([5, 6], seqlen=10), "the sum of blocks is 11; it must be at most"),
    ],
)
def test_what_else_goes_beyond_the_length_is_refused(call, message):
    with pytest.raises(ValueError, match=f"{message} the length of the sequence, 10"):
        call()


def test_intervals_that_go_beyond_the_length_are_refused():
    with pytest.raises(ValueError, match=r"node 0 has the interval \[0, 11\); .* end in \[0, 10\]"):
        masks.prefix_tree_from_intervals([0, 5], [11, 11], seqlen=10)


@pytest.mark.parametrize("lengths", [torch.ones(3), [3.5, 1], np.array([3.0, 1.0])])
def test_float_lengths_are_refused(lengths):
    with pytest.raises(TypeError, match="seqlens is torch.float(32|64); it must be integers"):
        masks.document(seqlens=lengths)


@pytest.mark.parametrize("lengths", ["12", {"a": 1}, [4, None]])
def test_what_is_no_number_is_named(lengths):
    with pytest.raises(TypeError, match="seqlens must be integers"):
        masks.document(seqlens=lengths)


@pytest.mark.parametrize(
    "given",
    [
        {"seqlens": [3, 0, 4]},
        {"cu_seqlens": [0, 3, 3, 7]},
        {"doc_ids": [0] * 3 + [2] * 4},
        {"seqlens": [[3, 4], [7, 0]]},
    ],
)
def test_numpy_is_as_good_as_lists(given):
    ((name, values),) = given.items()
    assert torch.equal(
        masks.causal_document(**{name: np.array(values)}).to_dense(), masks.causal_document(**given).to_dense()
    )


@pytest.mark.parametrize("name", TRACED)
def test_nothing_waits_for_the_values(name):
    """A meta tensor has no values: whatever looked at them would raise."""
    mask = TRACED[name](torch.empty(9, dtype=torch.int64, device="meta"))
    assert isinstance(mask, Mask) and mask.device.type == "meta"


@pytest.mark.parametrize("name", LISTS)
def test_lists_go_to_the_device_and_compile(name):
    build = LISTS[name]
    assert build("meta").device.type == "meta" and build("meta").bounds.shape == build(None).bounds.shape
    torch._dynamo.reset()
    assert torch.equal(torch.compile(build, fullgraph=True, backend="eager")("cpu").bounds, build(None).bounds)


def test_the_order_of_block_diffusion_compiles():
    compiled = torch.compile(lambda x: masks.block_diffusion(x, seqlen=30)[1], fullgraph=True, backend="eager")
    for values in (torch.tensor([4, 0, 9]), torch.tensor([1, 20, 9])):
        assert torch.equal(compiled(values), masks.block_diffusion(values, seqlen=30)[1])


@pytest.mark.parametrize("name", TRACED)
def test_builders_compile(name):
    torch._dynamo.reset()
    build = TRACED[name]
    compiled = torch.compile(build, fullgraph=True, backend="eager")
    for seed in range(2):
        values = torch.randint(0, 4, (9,), generator=torch.Generator().manual_seed(seed)) + (name == "qk_sparse")
        assert torch.equal(compiled(values).bounds, build(values).bounds)


OF_NUMBERS = {"random_eviction", "from_startend"}  # torch draws them or takes them as they are


@pytest.mark.parametrize("name", sorted(TRACED.keys() - OF_NUMBERS))
def test_a_builder_is_one_operator(name):
    """Beside what the call does to its arguments: that is left out here."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    values = torch.ones(9, dtype=torch.int64)
    torch.compile(TRACED[name], fullgraph=True, backend=backend)(values)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("build_mask" in target for target in called) == 1
    assert not any("searchsorted" in target or "scatter" in target for target in called)


def test_builders_of_any_length_compile_once():
    torch._dynamo.reset()

    def build(ids, blocks, seqlen):
        mask = masks.causal_document(doc_ids=ids)
        eagle = masks.eagle3_ttt(3, seqlens=blocks, seqlen=seqlen)
        diffusion, order = masks.block_diffusion(blocks, seqlen=seqlen)
        return mask.bounds, eagle.bounds, eagle.seqlen_q, diffusion.bounds, order

    compiled = torch.compile(build, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens, documents in ((20, 3), (31, 5), (57, 4)):
            given = (torch.arange(tokens) // 4, torch.arange(documents) + 2, tokens)
            for got, want in zip(compiled(*given), build(*given)):
                assert torch.equal(got, want) if isinstance(want, torch.Tensor) else got == want


@pytest.mark.parametrize("name", ["seqlens", "position_ids", "eviction", "prefix_tree"])
def test_builders_map(name):
    values = torch.ones(3, 9, dtype=torch.int64) * torch.arange(1, 4)[:, None]
    got = torch.func.vmap(lambda x: TRACED[name](x).bounds)(values)
    assert torch.equal(got, torch.stack([TRACED[name](x).bounds for x in values]))


def test_builders_export_with_any_length():
    class Builder(torch.nn.Module):
        def forward(self, ids):
            return masks.causal_document(doc_ids=ids).bounds

    tokens = torch.export.Dim("tokens", min=2, max=1000)
    program = torch.export.export(Builder(), (torch.arange(12) // 4,), dynamic_shapes={"ids": {0: tokens}})
    ids = torch.arange(30) // 7
    assert torch.equal(program.module()(ids), masks.causal_document(doc_ids=ids).bounds)


OPERATOR = torch.ops.flashmask.build_mask.default
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "arguments",
    [
        ("causal_document", [torch.tensor([[3, 4], [5, 2]])], "seqlens,seqlen", [9], [9, 1, 0, 0], False, CPU),
        ("prefix_lm_causal", [torch.tensor([[1, 2], [3, 4]])], "prefix,seqlen", [9], [9, 2, 0, 0], False, CPU),
        ("qk_sparse", [torch.tensor([[[1, 2], [3, 4]]])], "dropped,seqlen", [9], [9, 2, 0, 0], False, CPU),
        (
            "hash_sparse",
            [torch.arange(5), torch.arange(2, 9)],
            "query_buckets,key_buckets",
            [],
            [7, 4, 0, 0],
            True,
            CPU,
        ),
        ("block_diffusion", [torch.tensor([[3, 4]] * 2)], "blocks,seqlen", [8], [16, 2, 1, 0], False, CPU),
        ("global_sliding_window", [], "global_tokens,window,seqlen", [1, 2, 9], [9, 4, 0, 0], False, CPU),
    ],
    ids=lambda arguments: arguments[0],
)
def test_opcheck_of_the_operator(arguments):
    torch.library.opcheck(OPERATOR, arguments)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("none_such", [], "", [], [4, 1, 0, 0], False, CPU), "unknown mask family 'none_such'"),
        (
            ("eviction", [torch.arange(4)], "evicted_at,extra", [], [4, 1, 0, 0], False, CPU),
            "names are 2, for 1 vectors",
        ),
        (("eviction", [torch.arange(4)], "evicted", [], [4, 1, 0, 0], False, CPU), "evicted_at is missing"),
        (("eviction", [torch.ones(4)], "evicted_at", [], [4, 1, 0, 0], False, CPU), "evicted_at is float32"),
        (("full", [], "seqlen_q", [4], [4, 1, 0, 0], False, CPU), "full is only a band"),
    ],
)
def test_what_the_operator_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        OPERATOR(*arguments)


def test_hash_sparse_that_does_not_fit_is_noticed_in_compiled_code():
    compiled = torch.compile(lambda q: masks.hash_sparse(q, q, False), fullgraph=True, backend="eager")
    compiled(torch.tensor([0, 0, 1, 1, 2]))
    with pytest.raises(RuntimeError, match="does not fit two row intervals"):
        compiled(torch.tensor([0, 1, 0, 1, 0]))
