# SPDX-License-Identifier: Apache-2.0
"""flashmask.jax.dot_product_attention beside jax.nn's: time of a call, forward and with its gradient, full and causal,
and what a call costs the host.

jax.nn's implementation is cuDNN's on a GPU, and XLA's own elsewhere. Both are jitted. flashmask is also timed with
deterministic=False, as cuDNN's gradients may differ from run to run. A batch of calls is timed until
its last result is there; with the shape HOST, which keeps the device busy for less time than the call takes the host,
that is the host's time. All contenders in every round, in an order shuffled anew; medians of the times, and of the
ratios within a round.

On a GPU the exit status says whether each ratio of speed is at least BAR.
FLASHMASK_LIBRARY and FLASHMASK_JAX_LIBRARY name the libraries.
"""

import argparse
import functools
import json
import random
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from flashmask.jax import dot_product_attention

ON_GPU = jax.default_backend() == "gpu"
IMPLEMENTATION = "cudnn" if ON_GPU else "xla"
BAR = 1.0
FAST = "deterministic=False"
HOST = {"seqlen": 64, "calls": 100}


def inputs(seqlen, heads, head_dim):
    """q, k, v and a gradient of out."""
    dtype = jnp.bfloat16 if ON_GPU else jnp.float32
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (1, seqlen, heads, head_dim), dtype) for key in keys]


def forward(attention, q, k, v, dout):
    return attention(q, k, v)


def with_gradient(attention, q, k, v, dout):
    out, vjp = jax.vjp(attention, q, k, v)
    return out, vjp(dout)


def contenders(is_causal):
    """{(direction, whose): a jitted function of q, k, v and dout}"""
    ours = functools.partial(dot_product_attention, is_causal=is_causal)
    theirs = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation=IMPLEMENTATION)
    attentions = {"flashmask": ours, "jax.nn": theirs}
    functions = {
        (direction.__name__, name): functools.partial(direction, attention)
        for direction in (forward, with_gradient)
        for name, attention in attentions.items()
    }
    functions[with_gradient.__name__, FAST] = functools.partial(
        with_gradient, functools.partial(ours, deterministic=False)
    )
    return {name: jax.jit(function) for name, function in functions.items()}


def microseconds(function, arrays, calls):
    """Microseconds a call, averaged over `calls` calls."""
    begin = time.perf_counter()
    for _ in range(calls):
        results = function(*arrays)
    jax.block_until_ready(results)
    return (time.perf_counter() - begin) / calls * 1e6


def measured(functions, arrays, calls, rounds):
    """{contender: its time in each round}"""
    times = {name: [] for name in functions}
    for function in functions.values():
        microseconds(function, arrays, 2)  # compiles
    for _ in range(rounds):
        for name in random.sample(list(functions), len(functions)):
            times[name].append(microseconds(functions[name], arrays, calls))
    return times


def compared(times):
    """Medians of each direction's times and of the ratio of jax.nn's time to ours."""
    rows = []
    for direction in (forward.__name__, with_gradient.__name__):
        ours, fast, theirs = (times.get((direction, name)) for name in ("flashmask", FAST, "jax.nn"))
        row = {
            "direction": direction,
            "flashmask_us": round(statistics.median(ours), 2),
            "jax_nn_us": round(statistics.median(theirs), 2),
            "ratio": ratio(ours, theirs),
        }
        rows.append(row | ({"fast_ratio": ratio(fast, theirs)} if fast else {}))
    return rows


def ratio(ours, theirs):
    return round(statistics.median(y / x for x, y in zip(ours, theirs)), 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqlens", type=int, nargs="+", default=[8192, 32768] if ON_GPU else [512, 2048])
    parser.add_argument("--heads", type=int, default=16 if ON_GPU else 4)
    parser.add_argument("--head-dim", type=int, default=128 if ON_GPU else 64)
    parser.add_argument("--calls", type=int, default=10 if ON_GPU else 1, help="of a batch of the long shapes")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true", help="the rows as JSON")
    options = parser.parse_args()
    random.seed(0)
    rows = []
    shapes = [("host", HOST["seqlen"], 1, HOST["calls"])]
    shapes += [("speed", seqlen, options.heads, options.calls) for seqlen in options.seqlens]
    for what, seqlen, heads, calls in shapes:
        arrays = inputs(seqlen, heads, options.head_dim)
        for mask, is_causal in (("full", False), ("causal", True)):
            times = measured(contenders(is_causal), arrays, calls, options.rounds)
            rows += [{"what": what, "seqlen": seqlen, "mask": mask, **row} for row in compared(times)]
    if options.json:
        shape = {"heads": options.heads, "head_dim": options.head_dim}
        print(json.dumps({"device": str(jax.devices()[0]), "jax": jax.__version__, **shape, "bar": BAR, "rows": rows}))
    else:
        print(f"{jax.devices()[0]}, JAX {jax.__version__}; jax.nn with implementation={IMPLEMENTATION!r}")
        for row in rows:
            print("{what:5} {seqlen:6} {mask:6} {direction:13} flashmask {flashmask_us:10.1f} us".format(**row), end="")
            print("   jax.nn {jax_nn_us:10.1f} us   {ratio:6.2f}x".format(**row), end="")
            print(f"   {FAST} {row['fast_ratio']:6.2f}x" if "fast_ratio" in row else "")
    return ON_GPU and any(row["what"] == "speed" and row["ratio"] < BAR for row in rows)


if __name__ == "__main__":
    sys.exit(main())
