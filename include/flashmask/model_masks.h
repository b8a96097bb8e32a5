// SPDX-License-Identifier: Apache-2.0
#pragma once

// More builders, for the masks of particular models.

#include <cstdint>
#include <span>
#include <vector>

#include "flashmask/builders.h"

namespace flashmask {

/// How the two copies of a text lie in a sequence of block diffusion.
enum class BlockDiffusionOrder {
  kInterleaved,   ///< each block's noisy copy, then its clean one
  kConcatenated,  ///< [x_t | x_0]: the noisy copy of everything, then the clean one
};

/// A mask over both copies of a text and where its tokens come from.
struct BlockDiffusion {
  Mask mask;
  /// For each place of the sequence, its token of [x_t | x_0], a permutation of 0 ... 2 * total - 1: gather the two
  /// concatenated copies by it. A token's position in the text is order[n] % total, and n is noisy if order[n] < total.
  std::vector<int64_t> order;
};

/// A mask of a sequence whose order differs from its text's.
struct OrderedMask {
  Mask mask;
  std::vector<int64_t> order;  ///< the token of the text at each place, a permutation
};

}  // namespace flashmask

/// i is a query row, j a key; all masks are for one batch entry and one head, to be broadcast. Documents are packed one
/// after the other and do not see each other; Documents::from_lengths of one length is a single sequence.
namespace flashmask::masks {

/// StreamingLLM (arXiv:2309.17453): the last `window` keys, the row's own included, and the document's first `sink`
/// keys. Same document, j <= i, and i - j < window or j among the first `sink` tokens of the document. Shape: square,
/// documents.total(). sink >= 0; window >= 1, or -1 for all keys before. kInvalidArgument otherwise.
FLASHMASK_API Mask attention_sink_window(const Documents& documents, int64_t sink, int64_t window);

/// Cuts each document into blocks of `length` tokens, its last block being shorter if need be, for block_causal and
/// block_diffusion. length >= 1, kInvalidArgument otherwise.
FLASHMASK_API Documents equal_blocks(const Documents& documents, int64_t length);

/// Frames of a video, chunks of a stream (block-causal attention, as in MAGI-1, arXiv:2505.13211): a token sees its
/// whole block and the earlier blocks of its document, `window` blocks in all, its own included. Same document,
/// block(j) <= block(i), and block(i) - block(j) < window. Shape: square, documents.total(), which blocks.total() must
/// equal. A block that crosses a document's end is cut there. window >= 1, or -1 for all blocks before.
/// kInvalidArgument otherwise.
FLASHMASK_API Mask block_causal(const Documents& blocks, const Documents& documents, int64_t window = -1);

/// Images among the text of a vision-language model: causal, except that inside a block tokens see each other both
/// ways, as in Gemma 3 (arXiv:2503.19786), in its layers with and without a window. `window` counts the last keys that
/// a row sees, its own included; a row sees the whole of its own block even so. Same document, and j <= i and i - j <
/// window, or j in i's own block. Shape: square, documents.total(). Blocks must be ascending, disjoint and each in one
/// document; window >= 1, or -1 for all keys before. kInvalidArgument otherwise. A block is one run of tokens: if text
/// separates the parts of an image that see each other, a key is hidden from the rows between them, one interval for
/// each gap. from_dense takes such a mask if it fits; a block around all of the parts always does.
FLASHMASK_API Mask causal_with_blocks(const Documents& documents, std::span<const Span> blocks, int64_t window = -1);

/// Training of block diffusion language models (BD3-LM, arXiv:2503.09573, appendix B.6): a noisy and a clean copy of a
/// text in one sequence. A noisy token sees its own block's noisy copy, to denoise it, and the clean copy of the blocks
/// before; a clean token sees the clean copy of its own block and of those before. Same document, and j clean and
/// block(j) < block(i), or block(j) = block(i) and i and j of the same copy. Shape: square, 2 * documents.total();
/// blocks.total() must be documents.total(). A block that crosses a document's end is cut there. kInvalidArgument
/// otherwise. Interleaved, every packing fits two intervals: a clean key is seen by the rows from its own copy to the
/// end of its document, which are one run. Concatenated, these rows are a run in each half: where a document of several
/// blocks is followed by another, the mask has interval lists.
FLASHMASK_API BlockDiffusion block_diffusion(const Documents& blocks, const Documents& documents,
                                             BlockDiffusionOrder order = BlockDiffusionOrder::kInterleaved);

/// The last of `steps` passes of EAGLE-3's training-time test (arXiv:2503.01840, section 3.2), in which the draft model
/// reads its own predictions: each pass appends a key for every token, and a token sees only its own chain of
/// predictions. j < total: same document and j <= i; keys of later passes: j % total = i. Shape: documents.total()
/// rows, steps * documents.total() keys, the first pass's first; steps = 1 is causal_document. steps >= 1,
/// kInvalidArgument otherwise.
FLASHMASK_API Mask eagle3_ttt(const Documents& documents, int64_t steps);

/// Training of DFlash's draft model (arXiv:2602.06036, section 4.2): each block of `block` tokens is denoised at once
/// from the target model's states of the tokens before its anchor, the block's first token. The context has only keys.
/// Rows and the last keys are the blocks', in order; j in the context: same document as the anchor and j < anchor of
/// i's block; otherwise: j in i's own block. Shape: anchors.size() * block rows, documents.total() + anchors.size() *
/// block keys, the context's first. anchors: positions in the context in ascending order, which may repeat;
/// documents.total(), right after it, belongs to the last document that has tokens. block >= 1. kInvalidArgument
/// otherwise. The order makes the mask fit: the blocks that see a key of the context then follow each other.
FLASHMASK_API Mask dflash(const Documents& documents, std::span<const int64_t> anchors, int64_t block);

/// Dilated sliding windows (Longformer, arXiv:2004.05150): row i sees key j if j <= i, i - j is a multiple of
/// `dilation` and less than window * dilation. In the order of the text a key would be hidden from the rows between
/// each two that see it. So the mask is for tokens ordered by their remainder by `dilation`, and then by place; `order`
/// has the token at each place. Gather the embeddings by it; positions are also `order`. Shape: square, seqlen. window
/// >= 1, or -1 for all; dilation >= 1. kInvalidArgument otherwise.
FLASHMASK_API OrderedMask dilated_window(int64_t seqlen, int64_t window, int64_t dilation);

// Columns of the masks that follow are hidden from any number of row intervals. Where two do not do they have interval
// lists, which CPUs and the reference take.

/// Neighbourhood attention over a grid of height x width tokens, row by row (NATTEN, arXiv:2204.07143): token i sees
/// the kernel_height x kernel_width tokens around it. In each dimension these are the places p - kernel / 2 + n, n <
/// kernel, shifted inwards as far as they lie outside; with a dilation (arXiv:2209.15001), among the places that have
/// p's remainder by it. Shape: square, height * width. height and width >= 0; 1 <= kernel and kernel * dilation <= its
/// side unless the grid is empty; dilation >= 1. kInvalidArgument otherwise.
FLASHMASK_API Mask neighborhood_2d(int64_t height, int64_t width, int64_t kernel_height, int64_t kernel_width,
                                   int64_t dilation = 1);

/// Dilated sliding windows (Longformer, arXiv:2004.05150) in the order of the text: i - j is a multiple of `dilation`
/// and |i - j| < window * dilation, so that a row sees up to `window` keys to either side, its own included; with
/// `causal` also j <= i, which is dilated_window without its order. Shape: square, seqlen. window >= 1, or -1 for all;
/// dilation >= 1. kInvalidArgument otherwise.
FLASHMASK_API Mask dilated(int64_t seqlen, int64_t window, int64_t dilation, bool causal = false);

/// BigBird (arXiv:2007.14062, section 2), in blocks of `block` tokens, of which the last may be shorter. A row of block
/// b sees the keys of block c if b or c is among the first `global_blocks`, or |b - c| <= window, or b drew c: each
/// block after the global ones draws `random_blocks` different blocks, or all, of those that it does not see anyway.
/// One seed, the same blocks everywhere. Shape: square, seqlen. block >= 1; global_blocks, window and
/// random_blocks >= 0. kInvalidArgument otherwise. global_sliding_window is the mask without the random part, by
/// tokens.
FLASHMASK_API Mask bigbird(int64_t seqlen, int64_t block, int64_t global_blocks, int64_t window, int64_t random_blocks,
                           uint64_t seed = 0);

}  // namespace flashmask::masks
