# SPDX-License-Identifier: Apache-2.0
"""The shapes of caches that decode and prefill are measured with, in the order in which a run takes them."""

from itertools import product
from typing import NamedTuple

CONTIGUOUS = 0  # in place of a page size
PAGES = (64, 16)
#         heads_q, heads_kv, dim: groups of 4, 8, 2 and 1
MODELS = ((32, 8, 128), (64, 8, 64), (16, 8, 256), (32, 32, 128))
BATCHES, LENGTHS = (1, 8, 64, 256), (1024, 8192, 32768, 131072)


class Shape(NamedTuple):
    batch: int
    keys: int
    heads_q: int
    heads_kv: int
    dim: int
    rows: int = 1

    @property
    def elements(self):
        """Elements of K, and of V."""
        return self.batch * self.keys * self.heads_kv * self.dim

    @property
    def bytes(self):
        """Bytes of K and V in bfloat16."""
        return 4 * self.elements

    def name(self, page):
        rows = f", {self.rows} rows" * (self.rows > 1)
        layout = f"page {page}" if page else "contiguous"
        return f"{self.batch} x {self.keys}, {self.heads_q}/{self.heads_kv} d={self.dim} {layout}{rows}"


# Measured with pages of one key and as contiguous caches, too.
EVERY_LAYOUT = [Shape(*size, *MODELS[0]) for size in ((64, 8192), (8, 8192), (1, 32768))]
TREE, LONG = Shape(16, 16384, *MODELS[0], rows=8), Shape(8, 131072, *MODELS[0])
SMALLEST = Shape(1, 1024, *MODELS[0])
FLOAT8 = Shape(64, 8192, *MODELS[0]), Shape(8, 32768, *MODELS[0])
INVARIANT, SPLIT_SIZES = MODELS[0], (1024, 256, 512, 2048)  # the default first
ONE_SPLIT = Shape(1, 32768, *MODELS[0])  # beside FlashAttention-3 without splits
# Shapes, and how many of their first keys all requests share.
SHARED = (
    (Shape(64, 8192 + 512, *MODELS[0]), 8192),
    (Shape(16, 32768 + 1024, *MODELS[0]), 32768),
    (Shape(64, 8192, *MODELS[0]), 0),
    (Shape(256, 8192, *MODELS[0]), 4096),
)
UPDATED = Shape(64, 8192, *MODELS[0]), Shape(256, 32768, *MODELS[0]), Shape(4096, 128, *MODELS[0])

# Prefill: chunks of rows, the last of their keys, and page sizes; drafts; four images among as much text.
CHUNKS = {
    Shape(1, 32768, *MODELS[0], rows=2048): (64, 16, 1, CONTIGUOUS),
    Shape(1, 8192, *MODELS[0], rows=8192): (64, 16),
    Shape(4, 8192, *MODELS[0], rows=8192): (16,),
    Shape(4, 32768, *MODELS[0], rows=2048): (16,),
    Shape(1, 32768, *MODELS[1], rows=2048): (64,),
}
PREFILL_SPLITS = (1024, 4096)
# Over float8 caches: chunks, and 64 drafts of each request.
FLOAT8_CHUNKS = (
    Shape(1, 32768, *MODELS[0], rows=2048),
    Shape(16, 16384, *MODELS[0], rows=64),
    Shape(1, 32768, *MODELS[1], rows=2048),
)
DRAFTS, IMAGES = Shape(16, 16384, *MODELS[0], rows=64), Shape(1, 8192, *MODELS[0], rows=8192)


def shapes_of(model, elements):
    """A model's shapes of which K fits in so many elements."""
    made = [Shape(batch, keys, *model) for batch, keys in product(BATCHES, LENGTHS)]
    return [shape for shape in made if shape.elements <= elements]


def layouts_of(shape):
    """Page sizes."""
    return (*PAGES, 1, CONTIGUOUS) if shape in EVERY_LAYOUT else PAGES
