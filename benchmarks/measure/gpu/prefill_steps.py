# SPDX-License-Identifier: Apache-2.0
"""Steps of a run of prefill: what each measures, as the receipt's figures have it."""

import torch
from flashmask import flashmask_attention, masks
from flashmask.inference import SequenceMask

from benchmarks.measure.gpu import decode_shapes
from benchmarks.measure.gpu.decode_cell import Cell, Contender, check_agreement, contender_of, time_figures
from benchmarks.measure.gpu.decode_steps import PEERS, float8_times
from benchmarks.peers import vllm_triton

CHUNK_PEERS = {name: PEERS[name] for name in ("fa3", "flashinfer")}
IMAGE = 1024  # tokens of an image, and of the text before it


def row_of(cell, times, left_out, rows_seen):
    """`rows_seen`: the keys that all rows of a request see together."""
    found = {"cell": cell.name, "mb": cell.bytes / 1e6, **time_figures(times), "left_out": left_out}
    flops = 4 * cell.batch * cell.heads_q * cell.dim * rows_seen
    return found | {"tflops": flops / found["us"]["ours"] / 1e6}


def causal_keys(cell):
    return cell.rows * (cell.keys - cell.rows) + cell.rows * (cell.rows + 1) // 2


def contiguous(cell, mask):
    """Our forward on K and V as they lie in cache n of a contiguous cell."""
    caches = [cell.cache(n)[:2] for n in range(cell.count)]
    return lambda n: flashmask_attention(cell.q, *caches[n], mask)


def without_pages(session, cell):
    """The cell's rows over contiguous caches."""
    sizes = cell.batch, cell.keys, cell.heads_q, cell.heads_kv, cell.dim, cell.rows
    other = Cell(session.pools, decode_shapes.Shape(*sizes), decode_shapes.CONTIGUOUS)
    other.q = cell.q
    return other


def chunk(session, shape, page):
    """A causal chunk, and with batch_invariant."""
    cell = Cell(session.pools, shape, page)
    calls, left_out = session.contenders(cell, peers=CHUNK_PEERS)
    made = {name: contender_of(cell, call) for name, call in calls.items()}
    for size in decode_shapes.PREFILL_SPLITS:
        made[str(size)] = contender_of(cell, cell.ours(batch_invariant=True, split_size=size))
    plain = without_pages(session, cell)
    mask = masks.causal(shape.rows, shape.keys)
    call = contiguous(plain, mask)
    check_agreement(f"{cell.name}: contiguous", call(0), plain.ours()(0))
    made["contiguous"] = contender_of(plain, call)
    return [row_of(cell, session.turns(made), left_out, causal_keys(cell))]


def drafts(session):
    """64 drafts of each request: causal, and a random tree."""
    shape = decode_shapes.DRAFTS
    parents = torch.tensor([random_tree(shape.rows) for _ in range(shape.batch)], device="cuda")
    tail, depth = masks.draft_tree(parents)
    cell, calls, left_out = session.drafts(shape, SequenceMask(tail=tail, tail_depth=depth))
    times = session.turns({name: contender_of(cell, call) for name, call in calls.items()})
    return [row_of(cell, times, left_out, causal_keys(cell))]


def random_tree(nodes):
    """Parents, each before its child; the first is the root."""
    return [-1, *(int(torch.randint(0, n, ())) for n in range(1, nodes))]


def float8(session):
    """Causal chunks and drafts over float8 caches, beside bfloat16 ones and a peer whose queries are float8, too."""
    found = float8_times(session, decode_shapes.FLOAT8_CHUNKS, {"fa3": PEERS["fa3"]})
    return [row_of(cell, times, left_out, causal_keys(cell)) for cell, times, left_out in found]


def walk_of(cell, call):
    """A contender whose calls take so long that each cache once is enough."""
    return Contender(call, cell.count, cell.count)


def images(session):
    """A causal prompt whose images see all of themselves, as a mask's intervals; FlexAttention without pages."""
    cell = Cell(session.pools, decode_shapes.IMAGES, 16)
    length = cell.keys
    key = torch.arange(length, device="cuda")
    of_image = (key // IMAGE) % 2 == 1
    first_seen = torch.where(of_image, key // IMAGE * IMAGE, key).int()  # the row before which a key is hidden
    bounds = torch.stack([torch.full_like(first_seen, length), first_seen], -1)  # hidden from, and hidden up to
    mask = SequenceMask(causal=False, bounds=bounds[None, None], key_layout="sequences")
    begins = torch.arange(IMAGE, length, 2 * IMAGE, device="cuda")
    spans = torch.stack([begins, begins + IMAGE - 1], -1)
    peers = {"vllm_triton": lambda cell, tail: vllm_triton.Prefill(cell, spans)}
    calls, left_out = session.contenders(cell, mask, peers=peers)
    made = {name: walk_of(cell, call) for name, call in (calls | {"causal": cell.ours()}).items()}
    plain = without_pages(session, cell)
    flex = flex_of(plain, of_image, key)
    check_agreement(f"{cell.name}: flex", flex(0), plain.ours(mask)(0))
    made["flex"] = walk_of(plain, flex)
    seen = int((length - first_seen).sum())
    return [row_of(cell, session.turns(made), left_out, seen)]


def flex_of(cell, of_image, key):
    """FlexAttention on contiguous tensors, with its block mask ready."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(b, h, row, column):
        return (row >= column) | (of_image[column] & (row // IMAGE == column // IMAGE))

    block_mask = create_block_mask(visible, None, None, cell.rows, cell.keys, device="cuda")
    run = torch.compile(flex_attention, fullgraph=True)
    q = cell.q.transpose(1, 2)
    caches = [[x.transpose(1, 2) for x in cell.cache(n)[:2]] for n in range(cell.count)]
    return lambda n: run(q, *caches[n], block_mask=block_mask, enable_gqa=True).transpose(1, 2)
