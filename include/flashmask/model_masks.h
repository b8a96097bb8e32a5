// SPDX-License-Identifier: Apache-2.0
#pragma once

// More builders, for the masks of particular models.

#include <cstdint>
#include <span>

#include "flashmask/builders.h"

/// i is a query row, j a key; all masks are square, for one batch entry and one head, to be broadcast. Documents are packed
/// one after the other and see nothing of each other; Documents::from_lengths of one length is a single sequence.
namespace flashmask::masks {

/// StreamingLLM (arXiv:2309.17453): the last `window` keys, the row's own included, and the document's first `sink` keys.
/// Same document, j <= i, and i - j < window or j among the first `sink` tokens of the document.
/// Shape: square, documents.total(). sink >= 0; window >= 1, or -1 for all keys before. kInvalidArgument otherwise.
FLASHMASK_API Mask attention_sink_window(const Documents& documents, int64_t sink, int64_t window);

/// Each document cut into blocks of `length` tokens, its last block being shorter if need be: for block_causal. length >= 1,
/// kInvalidArgument otherwise.
FLASHMASK_API Documents equal_blocks(const Documents& documents, int64_t length);

/// Frames of a video, chunks of a stream (block-causal attention, as in MAGI-1, arXiv:2505.13211): a token sees its whole block
/// and the earlier blocks of its document, `window` blocks in all, its own included.
/// Same document, block(j) <= block(i), and block(i) - block(j) < window.
/// Shape: square, documents.total(), which blocks.total() must be. Where a block goes on from one document to the next, each has
/// its part. window >= 1, or -1 for all blocks before. kInvalidArgument otherwise.
FLASHMASK_API Mask block_causal(const Documents& blocks, const Documents& documents, int64_t window = -1);

/// Images among the text of a vision-language model: causal, except that inside a block tokens see each other both ways, as
/// in Gemma 3 (arXiv:2503.19786), in its layers with and without a window. `window` counts the last keys that a row sees,
/// its own included; a row sees the whole of its own block even so.
/// Same document, and j <= i and i - j < window, or j in i's own block.
/// Shape: square, documents.total(). Blocks must be ascending, disjoint and each in one document; window >= 1, or -1 for all keys
/// before. kInvalidArgument otherwise.
/// A block is one run of tokens: where the parts of one image are parted by text and still see each other, a key is hidden from the
/// rows between them, one interval for each. from_dense takes such a mask if it fits; a block around all of the parts always does.
FLASHMASK_API Mask causal_with_blocks(const Documents& documents, std::span<const Span> blocks, int64_t window = -1);

}  // namespace flashmask::masks
