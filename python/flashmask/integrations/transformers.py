# SPDX-License-Identifier: Apache-2.0
"""Attention of Hugging Face models by name:

    from flashmask.integrations.transformers import register

    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation=register())

Needs transformers (written for version 5). A model's mask (padding, packed documents, windows, chunks, image blocks,
caches) becomes a flashmask.Mask once per forward and kind of layer, and the layers share its plan.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface

from .._core import arguments
from .._core.errors import UnsupportedError
from ..torch import tensor_arguments
from ..torch._torch_internals import assert_async
from ..torch.annotations import Device
from ..torch.attention import flashmask_attention
from ..torch.mask import Mask
from . import _mask_functions, _model_arguments, _paged_cache
from ._context_parallel import ContextParallel, RankMask
from .collators import NOT_OF_TREES

AnyModel = TypeVar("AnyModel", bound=torch.nn.Module)
__all__ = ["NAME", "ContextParallel", "attention", "attention_mask", "register", "share_prefixes"]
# Without "flash", which transformers takes for the flash-attn package.
NAME = "column_mask"
_names: set[str] = set()  # names that attention is registered by


def register(name: str = NAME) -> str:
    """Registers attention and its masks with transformers; returns the name, for `attn_implementation=`.

    name: the name to register; it must not contain "flash", by which transformers recognises the flash-attn package. A
    second call does nothing more.

    Continuous batching (`generate_batch`, `transformers serve`) then attends over its paged cache in place.

    The models' calls also take `mask=`: a flashmask.Mask for all layers, or a dict of one for each kind of layer
    (`config.layer_types`). It is the whole mask and replaces the model's own from padding, positions and windows.
    ContextParallel makes the arguments of calls in which it is a rank's part of one.
    """
    if not isinstance(name, str) or not name or "flash" in name or any(c in name for c in "|/:"):
        raise ValueError(
            f"name is {name!r}; it must be a string without 'flash', which transformers takes for flash-attn, "
            "and without '|', '/' and ':'"
        )
    _names.add(name)
    _mask_functions.make_traceable()
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, attention_mask)
    _paged_cache.register(name)
    return name


def share_prefixes(model: AnyModel) -> AnyModel:
    """Makes a model run on the prefix tree in its inputs: see collators.SharedPrefixCollator. Returns the model.

    The layers of a call with `shared_prefixes=` get the tree's tokens instead of input_ids, and their outputs are
    copied to the places of the sequences' tokens. So heads, losses and trainers see the batch unchanged. Calls without
    it do not change. Use it on a reference model too.

    Its attention must be registered here. A call raises UnsupportedError for layers with windows or chunks shorter than
    the sequences, because such a window in a tree is no interval.
    """
    layers = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = layers.base_model
    layers.register_forward_pre_hook(_to_tree, with_kwargs=True)
    layers.register_forward_hook(_from_tree, with_kwargs=True)
    return model


def _to_tree(layers, arguments, inputs):
    tree = inputs.get("shared_prefixes")
    if tree is None:
        return None
    if layers.config._attn_implementation not in _names:
        raise ValueError(
            f"the model's attn_implementation is {layers.config._attn_implementation!r}; shared prefixes need "
            f"one of {sorted(_names)}, from flashmask.integrations.transformers.register()"
        )
    _check_reach(layers.config, tree["places"].shape[1])
    others = [name for name in (*NOT_OF_TREES, "past_key_values", "mask") if inputs.get(name) is not None]
    if len(arguments) > 1 or others:
        raise UnsupportedError(
            "shared_prefixes takes input_ids and attention_mask alone, by name; it came with "
            f"{', '.join(others) or f'{len(arguments)} arguments without names'}"
        )
    replaced = {name: tree[name] for name in ("input_ids", "position_ids", "mask")}
    return (), {**inputs, **replaced, "attention_mask": None, "use_cache": False}


def _check_reach(config, tokens):
    config = config.get_text_config()
    for name in ("sliding_window", "attention_chunk_size"):
        reach = getattr(config, name, None)
        if reach is not None and reach < tokens and getattr(config, "use_sliding_window", True):
            raise UnsupportedError(
                f"shared prefixes in layers with {name} {reach} are not implemented for sequences of {tokens} tokens"
            )


def _from_tree(layers, arguments, inputs, output):
    tree = inputs.get("shared_prefixes")
    if tree is not None:
        output.last_hidden_state = output.last_hidden_state[0, tree["places"]]
    return output


# Attribute of a mask that keeps no documents apart: rows that are not padding, bool [batch, rows]; None: all.
_SHOWN = "_shown_rows"

# --- The mask interface ---------------------------------------------------------------------------


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: Device = "cpu",
    **others: Any,
) -> Mask:
    """The flashmask.Mask of what transformers' mask interfaces are given: sizes, a mask function and padding.

    Functions made by transformers' own factories are read and cost O(kv_length). Others are evaluated for every
    element, a few rows at a time, up to a number of elements, with a warning that says how long it took. Raises
    UnsupportedError beyond that number or if torch.compile traces. The other arguments are hints for other
    implementations.
    """
    if isinstance(attention_mask, Mask):  # given by the caller, or made before a compiled step of generate()
        return attention_mask
    if mask_function is None:
        mask_function = _mask_functions.masking_utils.causal_mask_function
    mask = _mask_functions.mask_of(
        mask_function, batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, use_vmap, device
    )
    if q_length > 1 and not _mask_functions.separates_documents(mask_function):
        padding = attention_mask
        shown = None if padding is None else _mask_functions.shown_rows(padding, q_length, q_offset)
        object.__setattr__(mask, _SHOWN, shown)  # so that positions which say otherwise are noticed
    return mask


# --- The attention interface ----------------------------------------------------------------------


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    mask: Mask | RankMask | dict[str, Mask] | dict[str, RankMask] | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    output_attentions: bool | None = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' models call it: query, key and value [batch, heads, seqlen, head_dim].

    Returns (out [batch, seqlen_q, heads_q, head_dim_v], None). mask: see register(). s_aux: gpt-oss' sinks. Raises
    UnsupportedError for arguments that would change the result and are not implemented.
    """
    _model_arguments.refuse(others, output_attentions)
    lengths = query.shape[2], key.shape[2]
    if mask is not None:
        whole = _of_layer(mask, module)
    else:
        whole = _made_by_model(attention_mask, module, lengths, is_causal, sliding_window)
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            whole = _within_documents(whole, cu_seq_lens_q, cu_seq_lens_k, query.shape[0])
        elif position_ids is not None:
            _check_positions(position_ids, whole, module)
    options = {"dropout": dropout, **_model_arguments.score_options(scaling, softcap, s_aux)}
    if isinstance(whole, RankMask):
        return whole.attend(query, key, value, options), None
    out = flashmask_attention(query, key, value, whole, layout="bhsd", **options)
    return out.transpose(1, 2), None


def _of_layer(mask, module):
    """The caller's mask for a layer."""
    if isinstance(mask, dict):
        kind = module.config.layer_types[module.layer_idx]
        if kind not in mask:
            raise ValueError(f"mask has no entry {kind!r}, the kind of layer {module.layer_idx}; it has {list(mask)}")
        mask = mask[kind]
    if not isinstance(mask, (Mask, RankMask)):
        raise TypeError(
            f"mask is {arguments.describe(mask)}; it must be a flashmask.Mask, or a dict of them by kind of layer"
        )
    return mask


def _made_by_model(given, module, lengths, is_causal, sliding_window):
    """The mask of what the model hands to a layer."""
    if isinstance(given, Mask):
        return given
    if isinstance(given, torch.Tensor):
        return _of_tensor(given, lengths)
    if given is not None:
        raise arguments.not_a_mask("attention_mask", given)
    # Models whose layers all see everything, or everything before, make none.
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    rows, keys = lengths
    if is_causal and rows not in (1, keys) or sliding_window is not None:
        raise UnsupportedError(
            f"the model made no mask for {rows} query rows and {keys} keys, is_causal={is_causal}, "
            f"sliding_window={sliding_window}; give one as mask="
        )
    mask = Mask(rows, keys, causal=is_causal and rows > 1)
    if mask.causal:
        object.__setattr__(mask, _SHOWN, None)
    return mask


_within = WeakIdKeyDictionary()  # key: mask; the ends it was put within, their version counts, and the result


def _within_documents(mask, cu_seq_lens_q, cu_seq_lens_k, batch):
    """The mask within the documents; made once for all layers that share the mask, and kept as long as it lives."""
    if cu_seq_lens_q is None or cu_seq_lens_k is None:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given together, of one length")
    ends = cu_seq_lens_q, cu_seq_lens_k
    for name, x in zip(("cu_seq_lens_q", "cu_seq_lens_k"), ends):
        tensor_arguments.check_dense(name, x, "[documents + 1]")
    if torch.compiler.is_compiling() or any(x.is_inference() for x in ends):  # inference tensors count no changes
        _check_ends(*ends, batch, mask.seqlen_q)
        return _mask_functions.within_documents(mask, cu_seq_lens_q, batch)
    key = (batch, *((id(x), x._version) for x in ends))
    if mask not in _within or _within[mask][0] != key:
        _check_ends(*ends, batch, mask.seqlen_q)
        made = _mask_functions.within_documents(mask, cu_seq_lens_q, batch)
        _within[mask] = key, ends, made  # with the ends, whose ids are no others' then
    return _within[mask][2]


def _check_ends(cu_seq_lens_q, cu_seq_lens_k, batch, seqlen):
    """ValueError or TypeError unless they are the ends of documents in all batch entries, one after the other.

    On a device, and in a trace, what they hold is an assertion in its work.
    """
    if cu_seq_lens_q.shape != cu_seq_lens_k.shape:
        raise ValueError("cu_seq_lens_q and cu_seq_lens_k must be given together, of one length")
    ends = tensor_arguments.integers("cu_seq_lens_q", cu_seq_lens_q)
    if ends.ndim != 1 or len(ends) == 0:
        raise ValueError(
            f"cu_seq_lens_q has shape {list(ends.shape)}; it must be [documents + 1]: 0, then the end of each document"
        )
    tokens = batch * seqlen
    tensor_arguments.check_cu_seqlens("cu_seq_lens_q", ends, tokens, f"the number of tokens, {batch} x {seqlen}")
    if cu_seq_lens_k is not cu_seq_lens_q:
        keys_ends = tensor_arguments.integers("cu_seq_lens_k", cu_seq_lens_k)
        _require((ends == keys_ends).all(), "cu_seq_lens_q and cu_seq_lens_k differ; they must be the same")
    if batch > 1:
        rows = torch.arange(1, batch + 1, device=ends.device) * seqlen
        _require(
            torch.isin(rows, ends).all(),
            f"cu_seq_lens_q has no end at each multiple of {seqlen} up to {tokens}, where a sequence of the batch of "
            f"{batch} ends; it must have those of all sequences, one after the other, and no document crosses them",
        )


def _require(fits, message, error=ValueError):
    """Raises, or makes it an assertion in a device's or a trace's work."""
    if not tensor_arguments.is_readable(fits):
        assert_async(fits, message)
    elif not fits:
        raise error(message)


def _check_positions(position_ids, mask, module):
    """Raises if packed documents, which positions that begin anew are, would see each other.

    Padding is not looked at. Positions that ascend, with gaps or without, are those of one document.
    """
    if position_ids.ndim != 2 or position_ids.shape[1] != mask.seqlen_q or not hasattr(mask, _SHOWN):
        return
    if torch.compiler.is_compiling():
        if getattr(module, "layer_idx", 0) not in (0, None):  # all layers have them
            return
        shown = getattr(mask, _SHOWN)
    else:
        shown = mask.__dict__.pop(_SHOWN)  # once for all layers that share the mask
    if shown is None:
        ascends = position_ids.diff(dim=1) > 0
    else:
        # Compared with the last token before that is shown.
        before = position_ids.masked_fill(~shown, torch.iinfo(position_ids.dtype).min).cummax(1).values[:, :-1]
        ascends = ~shown[:, 1:] | (position_ids[:, 1:] > before)
    _require(
        ascends.all(),
        "position_ids begin anew, as those of packed documents, but the model's mask does not keep them apart: pass "
        "cu_seq_lens_q and cu_seq_lens_k, or mask=; or leave out attention_mask and pass use_cache=False, with which "
        "many models look for documents in positions",
        UnsupportedError,
    )


# --- Dense masks given by the caller --------------------------------------------------------------


def _of_tensor(given, lengths):
    """The mask of a caller's tensor, which transformers hands on as it is."""
    rows, keys = lengths
    if given.ndim != 4 or given.shape[2] not in (1, rows) or given.shape[3] < keys:
        raise ValueError(
            f"attention_mask has shape {list(given.shape)}; it must be [batch or 1, heads or 1, {rows}, {keys}]"
        )
    if torch.compiler.is_compiling():
        raise UnsupportedError("a dense attention_mask cannot be converted in a trace; give a flashmask.Mask as mask=")
    return _once(given, lengths, lambda: _converted(given, rows, keys))


def _converted(given, rows, keys):
    if (elements := given.shape[0] * given.shape[1] * rows * keys) > _mask_functions.MOST_ELEMENTS:
        raise UnsupportedError(
            f"the dense attention_mask has {elements} elements, more than {_mask_functions.MOST_ELEMENTS}, up to "
            "which they are looked at; give a flashmask.Mask as mask="
        )
    given = given[..., :keys].expand(-1, -1, rows, -1)

    def visible(begin, end):
        part = given[:, :, begin:end]
        if part.dtype == torch.bool:
            return part
        hidden = part <= torch.finfo(part.dtype).min if part.dtype.is_floating_point else None
        if hidden is None or not (hidden | (part == 0)).all():
            raise UnsupportedError(
                f"attention_mask is {given.dtype} with other elements than 0 and {part.dtype}'s lowest number; a bias "
                "of the scores is not implemented"
            )
        return ~hidden

    return _mask_functions.mask_from_rows(visible, rows, keys)


_made = WeakIdKeyDictionary()  # key: tensor; its version count, and the results made from it
_MOST_MADE = 4  # results of one tensor, by lengths: the layers of a forward have one or two


def _once(tensor, of, make):
    """make(), or what it made for another layer from the same tensor, unchanged since, and the same `of`."""
    if torch.compiler.is_compiling() or tensor.is_inference():  # inference tensors count no changes
        return make()
    version, made = _made.get(tensor, (None, None))
    if version != tensor._version:
        version, made = _made[tensor] = (tensor._version, {})
    if of not in made:
        if len(made) == _MOST_MADE:
            del made[next(iter(made))]  # the oldest
        made[of] = make()
    return made[of]
