# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding with trees of drafts, greedy: the tokens of plain decoding, in fewer steps of the large model.

    python examples/speculative/speculate.py [--tokens 64] [--device cuda --dtype bfloat16]

A small model grows a tree of 32 drafts, level by level. The large model looks at all of them in one call, in which each
draft sees the sequence and the drafts that it follows. The longest path of drafts that the large model would have
chosen is kept, and its next choice is the root of the next tree.
"""

import argparse
import copy

import torch
from decoder import Decoder
from flashmask import masks
from flashmask.inference import SequenceMask

LEVELS = (1, 4, 8, 8, 8, 3)  # drafts of each depth; the first is the last token that is sure
DRAFTS = sum(LEVELS)


@torch.no_grad()
def decode(model, prompts, count):
    """`count` tokens after each prompt, one step each; and the number of steps."""
    cache = model.cache(len(prompts), max(map(len, prompts)) + count, sum(map(len, prompts)))
    chosen = [prefill(model, cache, prompts)]
    one = torch.ones_like(cache.seqlens)
    while len(chosen) < count:
        positions = cache.seqlens.clone()
        cache.begin(one)
        chosen.append(model(chosen[-1], positions, cache).argmax(-1))
    return torch.stack(chosen, dim=1).tolist(), count - 1


@torch.no_grad()
def speculate(target, draft, prompts, count):
    """Plain decoding's tokens, by trees of `draft`; and the number of steps of `target`."""
    longest, batch = max(map(len, prompts)), len(prompts)
    rows = max(sum(map(len, prompts)), batch * DRAFTS)
    caches = [model.cache(batch, longest + count + DRAFTS, rows) for model in (target, draft)]
    roots = prefill(target, caches[0], prompts)
    prefill(draft, caches[1], prompts)
    outputs, steps = [[x] for x in roots.tolist()], 0
    while min(map(len, outputs)) < count:
        for cache in caches:
            cache.begin_drafts()
        tokens, parents = grow(draft, caches[1], roots)
        chosen = look(target, caches[0], tokens, parents).argmax(-1)
        found = [path_of(*x) for x in zip(tokens.tolist(), parents.tolist(), chosen.tolist())]
        paths = [[] if len(output) >= count else path for output, path in zip(outputs, found)]
        for output, path, choices in zip(outputs, paths, chosen.tolist()):
            output.extend(choices[n] for n in path)
        for cache in caches:
            cache.keep(paths)
        roots = torch.tensor([output[-1] for output in outputs], device=roots.device)
        steps += 1
    return [output[:count] for output in outputs], steps


def prefill(model, cache, prompts):
    """The choices after the prompts."""
    device = cache.seqlens.device
    counts = torch.tensor([len(x) for x in prompts], dtype=torch.int32, device=device)
    cache.begin(counts)
    tokens = torch.tensor([token for x in prompts for token in x], device=device)
    positions = torch.cat([torch.arange(len(x), device=device) for x in prompts])
    return model(tokens, positions, cache)[counts.cumsum(0) - 1].argmax(-1)


def grow(draft, cache, roots):
    """Trees of drafts: tokens and parents [batch, DRAFTS], a level after the other, the likeliest first."""
    tokens, parents = roots[:, None], torch.full_like(roots[:, None], -1)
    likelihood = torch.zeros(tokens.shape, device=roots.device)  # of the last level, log
    for level, after in zip(LEVELS, LEVELS[1:]):
        next_token = look(draft, cache, tokens, parents, level).float().log_softmax(-1)
        many = min(after, next_token.shape[-1])
        best = next_token.topk(many)
        likelihood, place = (likelihood[..., None] + best.values).flatten(1).topk(after)
        parents = torch.cat([parents, tokens.shape[1] - level + place // many], dim=1)
        tokens = torch.cat([tokens, best.indices.flatten(1).gather(1, place)], dim=1)
    look(draft, cache, tokens, parents, LEVELS[-1])  # so that the cache has all drafts
    return tokens, parents


def look(model, cache, tokens, parents, rows=DRAFTS):
    """Logits [batch, rows, vocab] of the last `rows` drafts, the others being in the cache."""
    batch, count = tokens.shape
    tail, depth = masks.draft_tree(parents)
    positions = (cache.seqlens - (count - rows))[:, None] + depth[:, -rows:]
    mask = SequenceMask(tail=tail, tail_depth=depth, tail_lens=torch.full_like(cache.seqlens, count))
    cache.begin(torch.full_like(cache.seqlens, rows), mask)
    return model(tokens[:, -rows:].flatten(), positions.flatten(), cache).unflatten(0, (batch, rows))


def path_of(tokens, parents, chosen):
    """Drafts from the root on, each the choice after the one before."""
    path = [0]
    while True:
        follows = (n for n, parent in enumerate(parents) if parent == path[-1] and tokens[n] == chosen[path[-1]])
        if (found := next(follows, None)) is None:
            return path
        path.append(found)


def small_copy(model, layers):
    """The model's first layers, with its embedding: a draft model that needs no training."""
    small = copy.deepcopy(model)
    small.layers = small.layers[:layers]
    return small


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=64, help="after each prompt")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.manual_seed(0)
    target = Decoder().to(given.device, getattr(torch, given.dtype))
    prompts = [torch.randint(512, (n,)).tolist() for n in (5, 130, 48)]
    plain, plain_steps = decode(target, prompts, given.tokens)
    ours, steps = speculate(target, small_copy(target, 1), prompts, given.tokens)
    print(f"{len(prompts)} requests of {given.tokens} tokens, random weights; the draft model is the first of 4 layers")
    print(f"plain decoding   {plain_steps:4} steps of the large model")
    print(f"trees of {DRAFTS}      {steps:4} steps, {plain_steps / steps:.2f} times as few")
    print(f"equal tokens     {ours == plain}")


if __name__ == "__main__":
    main()
