# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning in which training computes the very bits that the rollout did.

    python examples/rl/on_policy.py [--tokens 24] [--steps 2] [--device cuda]

A small model samples rollouts from a paged KV cache, with chunked prefill and a batch that thins out, and is then
trained on them, one sequence a batch entry. With one split_size in both, attention's outputs have equal bits, and so do
the log probabilities, as all else of the model is computed row by row: the ratio of the two policies is exactly 1, and
no correction is needed. The same rollouts packed as a prefix tree, where each prompt stands once, are fewer tokens and
differ by rounding.
"""

import argparse
from typing import NamedTuple

import torch
from flashmask import append_kv, flashmask_attention, flashmask_with_kvcache
from flashmask.inference import CachePlan, KvCache
from flashmask.integrations.collators import log_probs as log_probs_of_tree
from flashmask.integrations.collators import prefix_tree
from row_model import RowModel
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

SPLIT_SIZE = 128  # of the rollout's sums and of training's
PAGE_SIZE = 16
CHUNK = 48  # tokens of a prompt that one step takes
GROUP = 3  # rollouts of a prompt
END = 0  # the token that ends a rollout


class Rollouts(NamedTuple):
    """Sequences that begin with a prompt of so many tokens, and what the policy computed while it sampled them."""

    sequences: list[torch.Tensor]
    prompts: list[int]
    log_probs: list[torch.Tensor]  # of each sequence's sampled tokens
    attention: list[torch.Tensor]  # of each layer, the outputs of all sequences' rows, one after the other


class PagedCache:
    """Keys and values of all layers, and the attention outputs that calls returned. A step: begin(), then attend()."""

    def __init__(self, model, batch, most_tokens, device):
        pages = -(-most_tokens // PAGE_SIZE)
        shape = len(model.layers), 2, batch * pages, PAGE_SIZE, model.heads_kv, model.head_dim
        table = torch.randperm(batch * pages, device=device, dtype=torch.int32).view(batch, pages)
        self.seqlens = torch.zeros(batch, dtype=torch.int32, device=device)
        stored = torch.zeros(shape, dtype=model.attention_dtype, device=device)
        self.layers = [KvCache(k, v, table, self.seqlens) for k, v in stored]
        sizes = batch, batch * CHUNK, most_tokens, model.heads, model.heads_kv, model.head_dim
        self.plan = CachePlan(*sizes, batch_invariant=True, split_size=SPLIT_SIZE, device=device)
        self.outputs = [[[] for _ in range(batch)] for _ in self.layers]

    def begin(self, counts: list[int]) -> None:
        """Begins a step of counts[b] new tokens of each request."""
        self._counts = torch.tensor(counts, dtype=torch.int32, device=self.seqlens.device)
        self.seqlens += self._counts
        self._ends = pad(self._counts.cumsum(0, dtype=torch.int32), (1, 0))
        self.plan.update(None, self.layers[0], self._ends)

    def attend(self, layer, q, k, v):
        """Writes the step's keys and values and attends over all of each request."""
        cache, options = self.layers[layer], dict(batch_invariant=True, split_size=SPLIT_SIZE)
        append_kv(k, v, cache, cu_seqlens=self._ends)
        out = flashmask_with_kvcache(q, cache, None, self.plan, self._ends, **options)
        for kept, part in zip(self.outputs[layer], out.split(self._counts.tolist())):
            kept.append(part)
        return out


@torch.no_grad()
def sample(model, prompts, most):
    """Rollouts of at most `most` tokens after each prompt. A step takes a chunk of a prompt, or one token of a rollout;
    rollouts that have ended have no rows."""
    device = model.turns.device
    sequences, log_probs = [x.tolist() for x in prompts], [[] for _ in prompts]
    cache = PagedCache(model, len(prompts), max(map(len, prompts)) + most, device)
    begins = [0] * len(prompts)
    limits = [len(x) + most for x in prompts]

    def is_running(b):
        return len(sequences[b]) < limits[b] and (len(sequences[b]) == len(prompts[b]) or sequences[b][-1] != END)

    while any(map(is_running, range(len(prompts)))):
        ends = [min(n + CHUNK, len(x)) if is_running(b) else n for b, (n, x) in enumerate(zip(begins, sequences))]
        rows = [(b, n) for b, (begin, end) in enumerate(zip(begins, ends)) for n in range(begin, end)]
        cache.begin([end - begin for begin, end in zip(begins, ends)])
        tokens = torch.tensor([sequences[b][n] for b, n in rows], device=device)
        found = model(tokens, torch.tensor([n for _, n in rows], device=device), cache.attend)
        for (b, n), row in zip(rows, found):
            if n == len(sequences[b]) - 1:
                sequences[b].append(row.exp().multinomial(1).item())
                log_probs[b].append(row[sequences[b][-1]])
        begins = ends
    return Rollouts(
        [torch.tensor(x, device=device) for x in sequences],
        list(map(len, prompts)),
        list(map(torch.stack, log_probs)),
        [torch.cat([part for parts in layer for part in parts]) for layer in cache.outputs],
    )


def evaluate(model, rollouts, split_size):
    """Log probabilities of each sequence's sampled tokens, and each layer's attention outputs, as in Rollouts.

    One sequence is one batch entry; padding follows it, where the causal mask hides it.
    """
    inputs = [x[:-1] for x in rollouts.sequences]
    lengths, outputs = list(map(len, inputs)), []

    def attend(layer, q, k, v):
        q, k, v = (pad_sequence(x.split(lengths), batch_first=True) for x in (q, k, v))
        out = flashmask_attention(q, k, v, causal=True, split_size=split_size)
        outputs.append(torch.cat([rows[:n] for rows, n in zip(out, lengths)]))
        return outputs[-1]

    positions = torch.cat([torch.arange(n, device=x.device) for n, x in zip(lengths, inputs)])
    found = model(torch.cat(inputs), positions, attend).split(lengths)
    return [
        rows[n - 1 :].gather(1, x[n:, None])[:, 0] for rows, x, n in zip(found, rollouts.sequences, rollouts.prompts)
    ], outputs


def evaluate_tree(model, rollouts):
    """Log probabilities as evaluate() has them, of one sequence in which each common prefix stands once; its tokens."""
    ids = pad_sequence(rollouts.sequences, batch_first=True)
    shown = pad_sequence([torch.ones_like(x) for x in rollouts.sequences], batch_first=True)
    tree = prefix_tree(ids.cpu(), shown.cpu())
    tree = {name: x.to(ids.device) for name, x in tree.items()}

    def attend(layer, q, k, v):
        return flashmask_attention(q[None], k[None], v[None], tree["mask"])[0]

    found = model(tree["input_ids"][0], tree["position_ids"][0], attend)
    all_tokens = log_probs_of_tree(found[None], tree, ids)
    sampled = [x[n - 1 : len(s) - 1] for x, s, n in zip(all_tokens, rollouts.sequences, rollouts.prompts)]
    return sampled, tree["input_ids"].numel()


def differing_bits(tensors, others):
    """How many bits of two lists of float32 tensors differ."""
    words = [x.detach().view(torch.int32) ^ y.detach().view(torch.int32) for x, y in zip(tensors, others, strict=True)]
    return sum((x & 0xFFFFFFFF).bit_count() for word in words for x in word[word != 0].tolist())


def policy_loss(new, old, rollouts):
    """The policy gradient's loss, with the share of even tokens for a reward, compared within each prompt's group."""
    rewards = torch.stack([(x[n:] % 2 == 0).float().mean() for x, n in zip(rollouts.sequences, rollouts.prompts)])
    advantages = (rewards.view(-1, GROUP) - rewards.view(-1, GROUP).mean(1, keepdim=True)).flatten()
    ratios = [(x - y).exp() for x, y in zip(new, old)]
    return -torch.stack([a * x.mean() for a, x in zip(advantages, ratios)]).mean(), torch.cat(ratios).detach()


class Report(NamedTuple):
    tokens: int  # of all rollouts
    bits: list[int]  # that differ between rollout and training, of each layer's attention outputs
    log_prob_bits: int  # and of the log probabilities
    ratios: tuple[float, float]  # least and greatest, of the policy that trains to the one that sampled
    plain_ratios: tuple[float, float]  # without split_size
    tree_tokens: int
    tree_error: float  # the largest difference of a log probability in the prefix tree


def step(model, optimizer, prompts, most):
    """Samples, trains once, and reports."""
    rollouts = sample(model, [x for x in prompts for _ in range(GROUP)], most)
    log_probs, attention = evaluate(model, rollouts, SPLIT_SIZE)
    loss, ratios = policy_loss(log_probs, rollouts.log_probs, rollouts)
    with torch.no_grad():
        plain, _ = evaluate(model, rollouts, None)
        of_tree, tree_tokens = evaluate_tree(model, rollouts)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    _, plain_ratios = policy_loss(plain, rollouts.log_probs, rollouts)
    return Report(
        sum(map(len, rollouts.sequences)),
        [differing_bits([x], [y]) for x, y in zip(attention, rollouts.attention, strict=True)],
        differing_bits(log_probs, rollouts.log_probs),
        (ratios.min().item(), ratios.max().item()),
        (plain_ratios.min().item(), plain_ratios.max().item()),
        tree_tokens,
        max((x - y).abs().max().item() for x, y in zip(of_tree, log_probs)),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=24, help="after each prompt, at most")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = RowModel().to(given.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    prompts = [torch.randint(1, 64, (n,), device=given.device) for n in (150, 70)]
    for n in range(given.steps):
        found = step(model, optimizer, prompts, given.tokens)
        print(f"step {n + 1}: {GROUP * len(prompts)} rollouts of {len(prompts)} prompts, {found.tokens} tokens")
        for layer, bits in enumerate(found.bits):
            print(f"  layer {layer}: {bits} differing bits of attention between rollout and training")
        print(f"  log probabilities: {found.log_prob_bits} differing bits")
        print("  ratio of the policies: {:.9g} to {:.9g}".format(*found.ratios), end="")
        print("; without split_size {:.9g} to {:.9g}".format(*found.plain_ratios))
        saved = 1 - found.tree_tokens / found.tokens
        print(f"  as a prefix tree: {found.tree_tokens} tokens, {saved:.0%} saved; ", end="")
        print(f"log probabilities differ by at most {found.tree_error:.1g}")


if __name__ == "__main__":
    main()
