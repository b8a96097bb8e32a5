# SPDX-License-Identifier: Apache-2.0
"""The mask families in Python, once for all frontends: their arguments, and the forms of their masks.

The C library checks arguments and builds masks (fm_mask_build), and describes the form of a family's masks
(fm_mask_families_json). This module names the arguments as the library does, and computes the lengths that a trace has
to know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from . import arguments, capi
from .annotations import Flags, Integers
from .errors import UnsupportedError

_families: dict[str, Any] = {}


def families() -> dict[str, Any]:
    """Every family by its name, as fm_mask_families_json describes it; read once, as no trace can call the library."""
    if not _families:
        status, text = capi.text_of(capi.load().fm_mask_families_json)
        capi.check(status)
        _families.update((family["name"], family) for family in json.loads(text)["families"])
    return _families


def own_dimensions(family: str, name: str) -> int:
    """How many dimensions of a vector are its own: before them come batch and heads."""
    kinds = {parameter["name"]: parameter["kind"] for parameter in families()[family]["parameters"]}
    return {"single": 0, "pairs": 2}.get(kinds.get(name, ""), 1)


def _form_of(family: str, numbers: dict[str, int]) -> dict[str, Any]:
    """The form of the masks of a family with these numbers, which may be more than it needs."""
    described = families()[family]
    option = described["option"]
    default = next((parameter["default"] for parameter in described["parameters"] if parameter["name"] == option), None)
    return described["other_form" if numbers.get(option, default) != default else "form"]


class Form(NamedTuple):
    """Shape-level description of a mask, enough for tracing.

    vectors: numbers per key in `bounds`; 0: the mask is a band, which needs no building. keys: None if only the
    contents of arrays tell it; each row has `copies` of them, unless `rows` is given. misfit: the error if contents on
    a device make no such mask. has_positions: rows and keys share positions. has_order: an order is written beside the
    mask. has_lists: in host memory, what the vectors cannot say becomes interval lists; with 0 vectors it is no band.
    """

    vectors: int
    keys: int | None
    rows: int | None = None
    copies: int = 1
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    q_offset: int | None = None
    misfit: str | None = None
    has_positions: bool = False
    has_order: bool = False
    has_lists: bool = False

    def band(self) -> dict[str, Any]:
        """Arguments of the mask where it is a band alone, whose lengths are known."""
        return {
            "seqlen_q": self.rows,
            "seqlen_k": self.keys,
            "causal": self.causal,
            "window": self.window,
            "q_offset": self.q_offset,
        }

    def rows_of(self, keys: int) -> int:
        """The query rows of a mask of so many keys."""
        return self.rows if self.rows is not None else keys // self.copies if self.copies > 1 else keys


class MaskFrontend(Protocol):
    """The arrays and masks of a frontend. Its attribute has_positions, if it has one, says whether its masks have."""

    def integers(self, name: str, value: Any, device: Any = None, shape: str | None = None) -> Any:
        """The frontend's integer array of a number, lists or an array, on `device` if it is no array of the frontend's.

        shape: what it must be if a number will not do, or None.
        """

    def flags(self, name: str, value: Any, device: Any = None) -> Any:
        """An array of bools, likewise."""

    def build(
        self, family: str, form: Form, vectors: dict[str, Any], numbers: dict[str, int], device: Any = None
    ) -> tuple[Any, Any]:
        """(mask, order) by fm_mask_build; device: as given or the first array's."""


class _Given:
    """A family's arguments as they are collected: vectors are the frontend's arrays, `numbers` ints."""

    def __init__(self, frontend: MaskFrontend, device: object, **numbers: int) -> None:
        self.frontend, self.device = frontend, device
        self.vectors: dict[str, Any] = {}
        self.numbers = numbers
        self.tokens: int | None = None  # tokens of the documents, if known without a look at an array

    def vector(self, name: str, value: Any, shape: str | None = "[..., n]") -> Any:
        """Later lists go to where the first array is."""
        return self._add(name, self.frontend.integers(name, value, self.device, shape))

    def flags(self, name: str, value: Any) -> Any:
        return self._add(name, self.frontend.flags(name, value, self.device))

    def _add(self, name: str, array: Any) -> Any:
        self.vectors[name] = array
        if self.device is None:
            self.device = getattr(array, "device", None)
        return array

    def length(self, name: str, value: Any) -> int:
        self.numbers[name] = arguments.length(name, value)
        return self.numbers[name]

    def documents(self, cu_seqlens: Any, seqlens: Any, doc_ids: Any, position_ids: Any, seqlen: int | None) -> None:
        """Adds the given arguments and sets the length of the sequence."""
        given = {"cu_seqlens": cu_seqlens, "seqlens": seqlens, "doc_ids": doc_ids, "position_ids": position_ids}
        for name, value in given.items():
            if value is not None:
                array = self.vector(name, value)
                self.tokens = array.shape[-1] if "ids" in name else _length_of(value, name == "seqlens")
        self.set_tokens(seqlen, self.tokens)

    def set_tokens(self, seqlen: int | None, known: int | None) -> None:
        """The sequence has `seqlen` tokens or, if that is None, as many as are known."""
        self.tokens = known if seqlen is None else self.length("seqlen", seqlen)
        if self.tokens is not None:
            self.numbers["seqlen"] = self.tokens

    def blocks(self, blocks: Any, documents: tuple[Any, Any, Any, Any], seqlen: int | None) -> None:
        """Adds blocks of one length or of several, and the documents they are in, which may be left out."""
        if hasattr(blocks, "__len__"):
            if self.device is None and hasattr(blocks, "device"):
                self.device = blocks.device
            self.vector("blocks", blocks)
            if seqlen is None and not any(given is not None for given in documents):
                seqlen = _length_of(blocks, True)
        else:
            self.numbers["blocks"] = _count("blocks", blocks)
        self.documents(*documents, seqlen)

    def build(self, family: str, **known: Any) -> tuple[Any, Any]:
        """(mask, order). known: what the arguments say of the mask's lengths and band."""
        described = _form_of(family, self.numbers)
        if described["has_positions"] and not getattr(self.frontend, "has_positions", False):
            raise UnsupportedError(
                f"window is {self.numbers['window']}; it must be -1 (all keys): the masks of this package have no "
                "positions, which a window of a tree needs"
            )
        known.setdefault("keys", self.tokens)
        if described["edges"] == "diagonal":
            known["window"] = (-1, 0)
        elif described["edges"] == "reach":
            known["window"] = (self.numbers["window"] - 1, -1)
        form = Form(
            described["vectors"],
            causal=described["edges"] == "causal",
            misfit=described["misfit"] or None,
            has_positions=described["has_positions"],
            has_order=families()[family]["has_order"],
            has_lists=described["has_lists"],
            **known,
        )
        return self.frontend.build(family, form, self.vectors, self.numbers, self.device)


def _length_of(values: Any, are_lengths: bool) -> int | None:
    """How long a sequence is that lists of lengths or of ends describe; None of arrays, which are not read here."""
    if hasattr(values, "tolist"):
        if type(values).__module__ != "numpy":
            return None
        values = values.tolist()
    if values and isinstance(values[0], (list, tuple)):
        lengths: list[Any] = [_length_of(row, are_lengths) for row in values]
        return max(lengths)
    return max(0, sum(values)) if are_lengths else max([0, *values])


AnyMask = TypeVar("AnyMask")
AnyArray = TypeVar("AnyArray")


class Builders(Generic[AnyMask, AnyArray]):
    """The builders of a frontend."""

    def __init__(self, frontend: MaskFrontend) -> None:
        self._frontend = frontend

    def _given(self, device: object = None, **numbers: int) -> _Given:
        return _Given(self._frontend, device, **numbers)

    # --- Masks that are only a band -------------------------------------------------------------------

    def full(self, seqlen_q: int, seqlen_k: int | None = None) -> AnyMask:
        """Every row sees every key. seqlen_k: default seqlen_q."""
        return self._given().build("full", rows=seqlen_q, keys=seqlen_q if seqlen_k is None else seqlen_k)[0]

    def causal(self, seqlen_q: int, seqlen_k: int | None = None, q_offset: int | None = None) -> AnyMask:
        """j <= i + q_offset. seqlen_k: default seqlen_q. q_offset: default seqlen_k - seqlen_q."""
        keys = seqlen_q if seqlen_k is None else seqlen_k
        return self._given().build("causal", rows=seqlen_q, keys=keys, q_offset=q_offset)[0]

    def sliding_window(
        self, seqlen_q: int, seqlen_k: int, left: int | None, right: int | None = 0, q_offset: int | None = None
    ) -> AnyMask:
        """i + q_offset - left <= j <= i + q_offset + right; -1 (None, sys.maxsize) is unbounded.

        A window of w keys that ends with the row itself is left = w - 1.
        """
        given = self._given()
        return given.build("sliding_window", rows=seqlen_q, keys=seqlen_k, window=(left, right), q_offset=q_offset)[0]

    # --- Documents ------------------------------------------------------------------------------------

    def causal_document(
        self,
        cu_seqlens: Integers | None = None,
        *,
        seqlens: Integers | None = None,
        doc_ids: Integers | None = None,
        position_ids: Integers | None = None,
        seqlen: int | None = None,
        device: object = None,
    ) -> AnyMask:
        """Same document and j <= i: packed pretraining and fine-tuning."""
        given = self._given(device)
        given.documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen)
        return given.build("causal_document")[0]

    def document(
        self,
        cu_seqlens: Integers | None = None,
        *,
        seqlens: Integers | None = None,
        doc_ids: Integers | None = None,
        position_ids: Integers | None = None,
        seqlen: int | None = None,
        device: object = None,
    ) -> AnyMask:
        """Same document, in both directions."""
        given = self._given(device)
        given.documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen)
        return given.build("document")[0]

    def prefix_lm_document(
        self,
        cu_seqlens: Integers | None = None,
        prefix: Integers | None = None,
        *,
        seqlens: Integers | None = None,
        doc_ids: Integers | None = None,
        position_ids: Integers | None = None,
        seqlen: int | None = None,
        device: object = None,
    ) -> AnyMask:
        """Same document, and j <= i or j among its first prefix[document] tokens. prefix: [..., documents]."""
        given = self._given(device)
        given.documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen)
        if prefix is None:
            raise ValueError("prefix is missing; it must be integers, one for each document")
        given.vector("prefix", prefix)
        return given.build("prefix_lm_document")[0]

    def causal_blockwise(
        self,
        cu_seqlens: Integers | None = None,
        *,
        seqlens: Integers | None = None,
        doc_ids: Integers | None = None,
        position_ids: Integers | None = None,
        seqlen: int | None = None,
        device: object = None,
    ) -> AnyMask:
        """j <= i, and j in i's own block or i in the last block: separate examples, and a test example that sees all.

        The blocks are given like documents; tokens past the last block belong to it.
        """
        given = self._given(device)
        given.documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen)
        return given.build("causal_blockwise")[0]

    def shared_question(
        self,
        groups: Iterable[tuple[int, Sequence[int]]] | None = None,
        *,
        seqlens: Integers | None = None,
        is_question: Flags | None = None,
        seqlen: int | None = None,
        device: object = None,
    ) -> AnyMask:
        """DPO and reward models: j <= i, same group, and j in the question or in i's own answer.

        groups: [(question, [answer, ...]), ...] in tokens. Or, as arrays, seqlens [..., segments], the lengths of all
        questions and answers in their order, and is_question bool [..., segments], True where a group begins.
        """
        if groups is not None:
            if seqlens is not None or is_question is not None:
                raise ValueError(
                    "groups is given together with seqlens or is_question; one of the two forms is accepted"
                )
            seqlens, is_question = _segments_of(groups)
        if seqlens is None or is_question is None:
            raise ValueError("give groups, or both seqlens and is_question")
        given = self._given(device)
        given.documents(None, seqlens, None, None, seqlen)
        given.flags("is_question", is_question)
        return given.build("shared_question")[0]

    # --- Masks of one sequence ------------------------------------------------------------------------

    def global_sliding_window(self, seqlen: int, global_tokens: int, window: int, *, device: object = None) -> AnyMask:
        """i < global_tokens, or j < global_tokens, or |i - j| <= window.

        `bigbird` without its random part (arXiv:2007.14062).
        """
        given = self._given(
            device, global_tokens=_count("global_tokens", global_tokens), window=_count("window", window)
        )
        return given.build("global_sliding_window", keys=given.length("seqlen", seqlen))[0]

    def prefix_lm_causal(self, seqlen: int, prefix: int | Integers, *, device: object = None) -> AnyMask:
        """j <= i or j < prefix (T5's prefix LM, arXiv:1910.10683).

        prefix: an int, or an array [...] of one for each batch entry.
        """
        given = self._given(device)
        keys = given.length("seqlen", seqlen)
        _single(given, "prefix", prefix)
        return given.build("prefix_lm_causal", keys=keys)[0]

    def qk_sparse(self, seqlen: int, dropped: Integers, *, device: object = None) -> AnyMask:
        """j <= i, and a dropped span's key j is hidden from row j itself to the span's end (arXiv:2306.01160).

        dropped: [..., spans, 2], the begin and end of each; ascending and disjoint.
        """
        given = self._given(device)
        keys = given.length("seqlen", seqlen)
        spans = given.vector("dropped", dropped, "[..., spans, 2]")
        if spans.shape[-1] == 0:
            given.vectors["dropped"] = spans.reshape(*spans.shape[:-1], 0, 2)
        return given.build("qk_sparse", keys=keys)[0]

    def eviction(self, evicted_at: Integers, *, device: object = None) -> AnyMask:
        """j <= i, and key j is gone from row evicted_at[j] on (eviction from a key-value cache, NACL, ACL 2024).

        evicted_at: [seqlen], [batch, seqlen] or [batch, heads, seqlen].
        """
        given = self._given(device)
        keys = given.vector("evicted_at", evicted_at, "[..., seqlen]").shape[-1]
        return given.build("eviction", keys=keys)[0]

    def hash_sparse(
        self, query_buckets: Integers, key_buckets: Integers, causal: bool, *, device: object = None
    ) -> AnyMask:
        """Row i sees key j if they fell into the same bucket and, if `causal`, j <= i + seqlen_k - seqlen_q.

        Hashing as in Reformer. query_buckets [..., seqlen_q], key_buckets [..., seqlen_k]. Fits two intervals where the
        rows of every bucket are contiguous, as after the usual sort by bucket. If it does not fit:
        UnrepresentableMaskError naming the first column that does not; on a device, an asynchronous assertion.
        """
        given = self._given(device, causal=int(arguments.flag("causal", causal)))
        rows = given.vector("query_buckets", query_buckets, "[..., seqlen_q]").shape[-1]
        keys = given.vector("key_buckets", key_buckets, "[..., seqlen_k]").shape[-1]
        return given.build("hash_sparse", rows=rows, keys=keys)[0]

    # --- Trees ----------------------------------------------------------------------------------------

    def prefix_tree(
        self,
        parents: Integers,
        lengths: Integers | None = None,
        *,
        window: int = -1,
        seqlen: int | None = None,
        device: object = None,
    ) -> AnyMask:
        """A packed prefix tree or forest: row i sees key j if j <= i and j's node is i's node or an ancestor of it.

        parents: [..., nodes] in depth-first order: parents[n] < n is the parent, -1 a root; several trees are several
        roots. lengths: [..., nodes], node n holds lengths[n] consecutive tokens; one token each if left out. A
        conversation that branches at some turn is a tree whose nodes are turns, a prompt with several answers a root
        with leaves. To fill up rows of a batch, add roots of length 0.

        window: an int of at least 1: a row sees only its last `window` keys, its own included, counted along its path
        from the root, as in a model's sliding-window layers. The mask then has positions. -1: all keys.
        seqlen: as for documents. An order that is not depth-first is a ValueError naming the node; on a device, an
        asynchronous assertion.
        """
        given = self._given(device, window=_count("window", window))
        nodes = given.vector("parents", parents, "[..., nodes]").shape[-1]
        if lengths is not None:
            given.vector("lengths", lengths, "[..., nodes]")
        given.set_tokens(seqlen, nodes if lengths is None else _length_of(lengths, True))
        return given.build("prefix_tree")[0]

    def prefix_tree_from_intervals(
        self, tin: Integers, tout: Integers, *, window: int = -1, seqlen: int | None = None, device: object = None
    ) -> AnyMask:
        """Prefix tree from depth-first intervals: node n's tokens begin at tin[n] and its subtree ends before tout[n].

        tin, tout: [..., nodes]. Intervals must nest, and a node's own tokens come before its children.
        """
        given = self._given(device, window=_count("window", window))
        given.vector("tin", tin, "[..., nodes]")
        given.vector("tout", tout, "[..., nodes]")
        given.set_tokens(seqlen, _length_of(tout, False))
        return given.build("prefix_tree_from_intervals")[0]

    # --- Batches --------------------------------------------------------------------------------------

    def padding(
        self,
        seqlen_q: int,
        seqlen_k: int,
        key_lengths: Integers,
        query_lengths: Integers | None = None,
        *,
        device: object = None,
    ) -> AnyMask:
        """One mask per batch entry, of its own lengths.

        Keys at key_lengths[b] and beyond are hidden, and rows at query_lengths[b] and beyond see nothing.
        """
        given = self._given(device)
        rows, keys = given.length("seqlen_q", seqlen_q), given.length("seqlen_k", seqlen_k)
        shapes = {"key_lengths": tuple(given.vector("key_lengths", key_lengths, "[batch]").shape)}
        if query_lengths is not None:
            shapes["query_lengths"] = tuple(given.vector("query_lengths", query_lengths, "[batch]").shape)
        for name, shape in shapes.items():
            if len(shape) != 1 or shape[0] == 0 or shape != shapes["key_lengths"]:
                raise ValueError(f"{name} has shape {list(shape)}; it must be [batch], one entry for each batch entry")
        return given.build("padding", rows=rows, keys=keys)[0]

    # --- Models and training methods ------------------------------------------------------------------

    def attention_sink_window(
        self,
        sink: int,
        window: int,
        cu_seqlens: Integers | None = None,
        *,
        seqlens: Integers | None = None,
        doc_ids: Integers | None = None,
        position_ids: Integers | None = None,
        seqlen: int | None = None,
        device: object = None,
    ) -> AnyMask:
        """The last `window` keys, the row's own included, and the document's first `sink` keys (arXiv:2309.17453).

        StreamingLLM: same document, j <= i, and i - j < window or j among the first `sink` tokens of the document.
        window: an int of at least 1, or -1 for all keys before. seqlen alone is one document of all.
        """
        given = self._given(device, sink=_count("sink", sink), window=_count("window", window))
        given.documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen)
        return given.build("attention_sink_window")[0]

    def block_causal(
        self,
        blocks: int | Integers,
        cu_seqlens: Integers | None = None,
        *,
        window: int = -1,
        seqlens: Integers | None = None,
        doc_ids: Integers | None = None,
        position_ids: Integers | None = None,
        seqlen: int | None = None,
        device: object = None,
    ) -> AnyMask:
        """Frames of a video, chunks of a stream: a token sees its whole block and the earlier ones, `window` in all.

        Same document, block(j) <= block(i), and block(i) - block(j) < window. blocks: an int, the length of every
        block, counted from the document's beginning; or their lengths [..., blocks], tokens past the last being hidden.
        A block that crosses a document's end is cut there. window: an int of at least 1, or -1 for all blocks before.
        Without documents the sequence is one: seqlen tokens, by default the sum of blocks.
        """
        given = self._given(device, window=_count("window", window))
        given.blocks(blocks, (cu_seqlens, seqlens, doc_ids, position_ids), seqlen)
        return given.build("block_causal")[0]

    def causal_with_blocks(
        self,
        block_ids: Integers,
        cu_seqlens: Integers | None = None,
        *,
        window: int = -1,
        seqlens: Integers | None = None,
        doc_ids: Integers | None = None,
        position_ids: Integers | None = None,
        device: object = None,
    ) -> AnyMask:
        """Images in a vision-language model's text: causal, except that a block's tokens see each other both ways.

        Same document, and j <= i and i - j < window, or j in i's own block (Gemma 3, arXiv:2503.19786, in its layers
        with and without a window). block_ids: [..., seqlen], an id per token, negative outside of blocks; ids may be
        used again in another document. window: an int of at least 1, or -1 for all keys before; it does not cut blocks.
        Without documents the sequence is one.

        The tokens of a block must be contiguous: in a block of several parts a key is hidden from the rows between
        them. from_dense takes such a mask if it fits two intervals; one block around all of the parts always does.
        """
        given = self._given(device, window=_count("window", window))
        tokens = given.vector("block_ids", block_ids, "[..., seqlen]").shape[-1]
        given.documents(cu_seqlens, seqlens, doc_ids, position_ids, None)
        given.numbers.pop("seqlen", None)
        return given.build("causal_with_blocks", keys=tokens)[0]

    def block_diffusion(
        self,
        blocks: int | Integers,
        cu_seqlens: Integers | None = None,
        *,
        order: Literal["interleaved", "concatenated"] = "interleaved",
        seqlens: Integers | None = None,
        doc_ids: Integers | None = None,
        position_ids: Integers | None = None,
        seqlen: int | None = None,
        device: object = None,
    ) -> tuple[AnyMask, AnyArray]:
        """Training of block diffusion language models: a noisy and a clean copy of a text of `seqlen` tokens.

        BD3-LM (arXiv:2503.09573, appendix B.6): same document, and j clean in an earlier block than i's, or i and j of
        the same copy of one block. blocks and documents: of one copy, as for block_causal.

        Returns (mask, order): order int64 [..., 2 * seqlen] has the token of [x_t | x_0], the noisy copy and then the
        clean one, at each place of the masked sequence. Gather the embeddings by it; positions are order % seqlen, and
        noisy tokens have order < seqlen.

        order: "interleaved", each block's noisy copy and then its clean one, which fits every packing. Or
        "concatenated", which keeps [x_t | x_0]: a clean key is then seen by a run of rows in each half, and a document
        of several blocks that another one (or hidden tokens) follows needs interval lists. Those are made in host
        memory alone: on a device such a packing is an asynchronous assertion, in traced code an
        UnrepresentableMaskError.
        """
        concatenated = arguments.choice("order", order, ("interleaved", "concatenated")) == "concatenated"
        given = self._given(device, concatenated=int(concatenated))
        given.blocks(blocks, (cu_seqlens, seqlens, doc_ids, position_ids), seqlen)
        mask, places = given.build("block_diffusion", keys=None if given.tokens is None else 2 * given.tokens)
        leading = max([1, *(x.ndim for x in given.vectors.values())]) - 1
        return mask, places[0, 0] if leading == 0 else places[:, 0] if leading == 1 else places

    def eagle3_ttt(
        self,
        steps: int,
        cu_seqlens: Integers | None = None,
        *,
        seqlens: Integers | None = None,
        doc_ids: Integers | None = None,
        position_ids: Integers | None = None,
        seqlen: int | None = None,
        device: object = None,
    ) -> AnyMask:
        """The last of `steps` passes of EAGLE-3's training-time test: the draft model reads its own predictions.

        Each pass appends a key for every token: seqlen rows, steps * seqlen keys (arXiv:2503.01840, section 3.2).
        j < seqlen: same document and j <= i; keys of later passes: i's own token, j % seqlen == i. steps: an int of at
        least 1, which is causal_document. seqlen alone is one document of all.
        """
        steps = arguments.integer("steps", steps, 1)
        given = self._given(device, steps=steps)
        given.documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen)
        tokens = given.tokens
        keys = None if tokens is None else steps * tokens
        return given.build("eagle3_ttt", keys=keys, rows=tokens, copies=steps)[0]

    def dflash(
        self,
        anchors: Integers,
        block: int,
        cu_seqlens: Integers | None = None,
        *,
        seqlens: Integers | None = None,
        doc_ids: Integers | None = None,
        position_ids: Integers | None = None,
        seqlen: int | None = None,
        device: object = None,
    ) -> AnyMask:
        """Training of DFlash's draft model: blocks are denoised from the context before their anchors.

        Rows and the last keys are the blocks', block tokens for each anchor; the first seqlen keys are the context's,
        which has no rows (arXiv:2602.06036, section 4.2). j in the context: j < anchor of i's block, in the anchor's
        document; otherwise: j in i's own block. seqlen alone is one document of all.

        anchors: [..., blocks], ascending, because only then are the blocks that see a key neighbours, and the mask fits
        two intervals. seqlen is the place after the context; it belongs to the document of the last token. Negative
        anchors, after all others, are absent blocks that fill up rows of a batch: they see nothing and are not seen.
        """
        block = arguments.integer("block", block, 1)
        given = self._given(device, block=block)
        rows = given.vector("anchors", anchors, "[..., blocks]").shape[-1] * block
        given.documents(cu_seqlens, seqlens, doc_ids, position_ids, seqlen)
        return given.build("dflash", rows=rows, keys=None if given.tokens is None else given.tokens + rows)[0]

    def dilated_window(
        self, seqlen: int, window: int, dilation: int, *, device: object = None
    ) -> tuple[AnyMask, AnyArray]:
        """Every dilation-th key before the row, `window` in all, its own included (Longformer, arXiv:2004.05150).

        Row i sees key j if j <= i, and i - j is a multiple of `dilation` and less than window * dilation. In the order
        of the text a key would be hidden from the rows between each two that see it, which two intervals cannot
        express. So the mask is for tokens ordered by their remainder by `dilation`, and then by place. window: an int
        of at least 1, or -1 for all keys before. dilation: an int of at least 1.

        Returns (mask, order): order int64 [seqlen] has the token at each place of the masked sequence. Gather the
        embeddings by it; positions are also `order`.
        """
        given = self._given(device, window=_count("window", window), dilation=_count("dilation", dilation))
        mask, places = given.build("dilated_window", keys=given.length("seqlen", seqlen))
        return mask, places[0, 0]

    # --- Masks of any number of intervals per column, which are built in host memory -------------------

    def neighborhood_2d(
        self,
        height: int,
        width: int,
        kernel_height: int,
        kernel_width: int,
        dilation: int = 1,
        *,
        device: object = None,
    ) -> AnyMask:
        """Neighbourhood attention over a grid of height x width tokens, row by row (NATTEN, arXiv:2204.07143).

        A token sees the kernel_height x kernel_width tokens around it, which are shifted inwards at the borders. Of an
        even kernel one place more lies before the token than after it. dilation: distance between neighbouring places
        (arXiv:2209.15001); kernel * dilation must be at most its side.

        Interval lists, made in host memory, unless a kernel is as wide or as high as the grid.
        """
        kernels = {"kernel_height": _count("kernel_height", kernel_height)}
        kernels["kernel_width"] = _count("kernel_width", kernel_width)
        given = self._given(device, **kernels, dilation=_count("dilation", dilation))
        keys = given.length("height", height) * given.length("width", width)
        return given.build("neighborhood_2d", keys=keys)[0]

    def dilated(
        self, seqlen: int, window: int, dilation: int, causal: bool = False, *, device: object = None
    ) -> AnyMask:
        """Every dilation-th key around the row, up to `window` to either side, its own included, in the text's order.

        Longformer (arXiv:2004.05150): i - j is a multiple of `dilation` and |i - j| < window * dilation, and j <= i if
        `causal`, as in `dilated_window`, which reorders tokens and so fits two intervals. window: an int of at least 1,
        or -1 for all keys. dilation: an int of at least 1.

        Interval lists, made in host memory, unless a column has at most two hidden runs.
        """
        numbers = {"window": _count("window", window), "dilation": _count("dilation", dilation)}
        given = self._given(device, **numbers, causal=int(arguments.flag("causal", causal)))
        return given.build("dilated", keys=given.length("seqlen", seqlen))[0]

    def bigbird(
        self,
        seqlen: int,
        block: int,
        global_blocks: int,
        window: int,
        random_blocks: int,
        seed: int = 0,
        *,
        device: object = None,
    ) -> AnyMask:
        """BigBird (arXiv:2007.14062) in blocks of `block` tokens: global, sliding and random blocks.

        A row of block b sees the keys of block c if b or c is among the first `global_blocks`, or |b - c| <= window, or
        b drew c: each block after the global ones draws `random_blocks` different blocks, or all, of those that it does
        not see anyway. The same seed draws the same blocks as everywhere in the library. global_sliding_window is the
        mask without the random part, by tokens.

        Interval lists, made in host memory, unless a column has at most two hidden runs.
        """
        numbers = {"block": block, "global_blocks": global_blocks, "window": window, "random_blocks": random_blocks}
        counts = {name: _count(name, value) for name, value in numbers.items()}
        given = self._given(device, **counts, seed=arguments.integer("seed", seed, -(2**63), 2**63 - 1))
        return given.build("bigbird", keys=given.length("seqlen", seqlen))[0]


def _count(name: str, value: Any) -> int:
    """A number of tokens or blocks, which the library checks; one that is more than any sequence has means all."""
    return min(arguments.integer(name, value, -(2**63)), arguments.MOST_TOKENS)


def _single(given: _Given, name: str, value: Any) -> None:
    """A number, or one for each batch entry."""
    if not hasattr(value, "__len__") and not hasattr(value, "shape"):
        given.numbers[name] = _count(name, value)
        return
    array = given.vector(name, value, None)
    if array.ndim == 0:
        given.vectors[name] = array.reshape(1)


def _segments_of(groups: Any) -> tuple[list[int], list[bool]]:
    """(lengths, is_question) of all questions and answers in their order."""
    try:
        pairs = [(question, list(answers)) for question, answers in groups]
    except (TypeError, ValueError):
        raise TypeError(
            f"groups is {arguments.describe(groups)}; it must be [(question, [answer, ...]), ...], lengths in tokens"
        ) from None
    lengths = [length for question, answers in pairs for length in (question, *answers)]
    return lengths, [flag for _, answers in pairs for flag in (True, *(False for _ in answers))]
