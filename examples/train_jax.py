#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small transformer over bytes, in plain JAX, on documents packed into sequences of one length.

    python examples/train_jax.py

No document sees another. The mask is made within the jitted step, from an id for each token: each batch packs other
documents, and the step is compiled once.
"""

import argparse
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flashmask.jax import dot_product_attention, masks

DATA = Path(__file__).parent / "data" / "pretrain.jsonl"
LAYERS, HEADS, KEY_HEADS, HEAD_DIM = 2, 4, 2, 64  # query heads share key heads in pairs
WIDTH = HEADS * HEAD_DIM
DTYPE = jnp.bfloat16 if jax.default_backend() == "gpu" else jnp.float32  # of the attention
UNLABELLED = -1


def packed_batches(seqlen, rows):
    """Batches of (tokens, labels, documents), each [rows, seqlen]: one after the other, the last of a row cut."""
    documents = [list(json.loads(line)["text"].encode()) for line in DATA.read_text(encoding="utf-8").splitlines()]
    batch = []
    while documents:
        tokens, labels, ids = [], [], []
        while documents and len(tokens) < seqlen:
            document = documents.pop(0)[: seqlen - len(tokens)]
            tokens += document
            labels += [*document[1:], UNLABELLED]
            ids += [len(documents)] * len(document)
        if len(tokens) == seqlen:
            batch.append((tokens, labels, ids))
        if len(batch) == rows:
            yield tuple(np.asarray(x, np.int32) for x in zip(*batch))
            batch = []


def initial(key):
    """Parameters as a tree, the layers stacked."""
    shapes = {
        "norm": (LAYERS, 2, WIDTH),
        "q": (LAYERS, WIDTH, HEADS, HEAD_DIM),
        "kv": (LAYERS, WIDTH, 2, KEY_HEADS, HEAD_DIM),
        "out": (LAYERS, HEADS, HEAD_DIM, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
        "embedding": (256, WIDTH),
    }
    keys = jax.random.split(key, len(shapes))
    made = {name: 0.05 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items())}
    return {**made, "norm": jnp.ones(shapes["norm"])}


def normed(x, scale):
    return x * scale * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rotated(x, positions):
    """x [batch, seqlen, heads, head_dim] with rotary positions."""
    frequencies = 1e-4 ** (jnp.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angle = (positions[..., None] * frequencies)[:, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], -1)


@jax.checkpoint
def layer(x, parameters, positions, mask):
    """One block of attention and a perceptron."""
    y = normed(x, parameters["norm"][0])
    q = rotated(jnp.einsum("btw,wnh->btnh", y, parameters["q"]), positions)
    k, v = jnp.moveaxis(jnp.einsum("btw,wcnh->btcnh", y, parameters["kv"]), 2, 0)
    q, k, v = (x.astype(DTYPE) for x in (q, rotated(k, positions), v))
    attended = dot_product_attention(q, k, v, mask).astype(x.dtype)
    x = x + jnp.einsum("btnh,nhw->btw", attended, parameters["out"])
    return x + jax.nn.gelu(normed(x, parameters["norm"][1]) @ parameters["up"]) @ parameters["down"]


def loss_of(parameters, tokens, labels, mask):
    """Mean cross-entropy of the next byte within its document."""
    embedding = parameters["embedding"]
    layers = {name: x for name, x in parameters.items() if name != "embedding"}
    positions = jnp.arange(tokens.shape[1])[None]  # rotary attention reads their differences alone
    step = lambda x, parameters: (layer(x, parameters, positions, mask), None)
    x, _ = jax.lax.scan(step, embedding[tokens], layers)
    scores = jax.nn.log_softmax(normed(x, 1) @ embedding.T)
    loss = -jnp.take_along_axis(scores, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return jnp.where(labels == UNLABELLED, 0, loss).sum() / (labels != UNLABELLED).sum()


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train_step(parameters, moments, rate, tokens, labels, documents):
    """Adam without its correction for the first steps."""
    print("compiling the step")  # runs while JAX traces it
    mask = masks.causal_document(doc_ids=documents)  # once for all layers
    loss, gradients = jax.value_and_grad(loss_of)(parameters, tokens, labels, mask)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], gradients)
    parameters = jax.tree.map(lambda p, a, b: p - rate * a / (jnp.sqrt(b) + 1e-6), parameters, first, second)
    return parameters, (first, second), loss


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=30)
    arguments.add_argument("--seqlen", type=int, default=1024)
    arguments.add_argument("--rows", type=int, default=4, help="of a batch")
    options = arguments.parse_args()
    parameters = initial(jax.random.key(0))
    moments = jax.tree.map(jnp.zeros_like, (parameters, parameters))
    for step, (tokens, labels, documents) in zip(range(options.steps), packed_batches(options.seqlen, options.rows)):
        parameters, moments, loss = train_step(parameters, moments, 1e-3, tokens, labels, documents)
        if step % 5 == 0 or step == options.steps - 1:
            print(f"step {step:3}   loss {loss:.3f}   documents in the first row {len(set(documents[0]))}")


if __name__ == "__main__":
    main()
