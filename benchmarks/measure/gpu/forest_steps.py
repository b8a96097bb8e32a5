# SPDX-License-Identifier: Apache-2.0
"""The step of a run of forests, as the receipt's figures have it."""

import json

from flashmask.inference import Forest, KvCache, explain

from benchmarks.measure.gpu.decode_cell import Cell, Contender, check_agreement, contender_of
from benchmarks.measure.gpu.decode_steps import row_of, said
from benchmarks.peers import flashinfer_caches

OWN_KERNELS = "sm90.cache.levels", "sm90.cache.merge_bf16"


def shared_prefix(session, shape, keys):
    """A Forest of requests whose first `keys` are the same, with rows in any order and in its own, and its update,
    beside the plain call over the same tables and FlashInfer's levels."""
    cell, left_out = Cell(session.pools, shape, 64), {}
    for table in cell.tables:
        table[1:, : keys // cell.page] = table[0, : keys // cell.page]
    forests = [Forest.from_page_table(table, cell.lengths, cell.page) for table in cell.tables]
    calls = {"ours": cell.ours(), "forest": forest_call(cell, forests), "in_order": forest_call(cell, forests, True)}
    session.kernels.update((cell.kernel(), *forest_kernels(cell)))
    if keys and "flashinfer" in session.arguments.peers:
        try:
            calls["cascade"] = flashinfer_caches.Cascade(cell, keys)
            calls["cascade"](0)
        except Exception as why:
            calls.pop("cascade", None)
            left_out["cascade"] = said(why)
    wanted = calls["ours"](0)
    for name, call in calls.items():
        check_agreement(f"{cell.name}: {name}", call(0), wanted[forests[0].order] if name == "in_order" else wanted)
    made = {name: contender_of(cell, call) for name, call in calls.items()}
    made["update"] = Contender(lambda n: forests[n].update(), cell.count, cell.count)
    return [row_of(cell, session.turns(made), left_out) | {"shared": keys}]


def forest_kernels(cell):
    """Ids of the kernels that run a forest of a cell: its tile is that of one request with all rows."""
    k, v, table = cell.cache(0)
    one = KvCache(k, v, table[:1], cell.lengths[:1])
    return (*OWN_KERNELS, json.loads(explain(cell.q.flatten(0, 1)[None], one))["kernel"])


def forest_call(cell, forests, in_order=False):
    """A call on cache n as a forest, with a ready plan of its own, and rows in the forest's order or in any."""
    caches, plans, rows = cell.caches(), [], []
    for forest, cache in zip(forests, caches):
        plans.append(forest.plan(cell.heads_q, cell.heads_kv, cell.dim))
        forest.update_plan(plans[-1], cache)
        rows.append(cell.q[forest.order] if in_order else cell.q)
    return lambda n: forests[n].attention(rows[n], caches[n], plan=plans[n], in_order=in_order)
