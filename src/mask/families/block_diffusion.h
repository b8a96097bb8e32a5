// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "common/message.h"
#include "mask/families/contents.h"
#include "mask/families/steps.h"

namespace flashmask::build {

/// A token's block in the text of a block diffusion. All are empty and beyond the last for a token that is hidden.
struct DiffusionBlock {
  int64_t begin, end, until;  ///< until: where its document ends
  bool visible;
};

struct DiffusionBlocks {
  Segments documents;
  Blocks blocks;
  int64_t seqlen;
  FLASHMASK_COLUMN DiffusionBlock operator()(const Lead& lead, int64_t token) const {
    const Place document = documents.place(lead, token);
    const Blocks::Bounds own = blocks.bounds(lead, document, token, 1);
    const Blocks::Bounds all = blocks.bounds(lead, document, token, kFarthest);
    return {own.begin, own.until, all.until, own.until > token};
  }
  /// True if a clean key of the block is hidden from at most two runs of rows when all noisy copies come first.
  FLASHMASK_COLUMN bool fits_concatenated(const DiffusionBlock& own) const {
    return !own.visible || own.end == own.until || own.until >= seqlen;
  }
  /// How many tokens are visible: they come first.
  FLASHMASK_COLUMN int64_t visible(const Lead& lead) const {
    const int64_t of_documents = smaller(documents.total(lead), seqlen);
    return blocks.length > 0 ? of_documents : smaller(of_documents, blocks.given.total(lead));
  }
};

/// Writes both columns of a token when each block's noisy copy is followed by its clean one. Hidden tokens come last.
struct WriteInterleaved {
  DiffusionBlocks blocks;
  Writer write;
  int64_t* order;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t token) const {
    const DiffusionBlock own = blocks(lead, token);
    const int64_t total = blocks.seqlen;
    const int64_t noisy = token + (own.visible ? own.begin : blocks.visible(lead));
    const int64_t clean = token + (own.visible ? own.end : total);
    if (noisy < 0 || clean < 0 || noisy >= 2 * total || clean >= 2 * total) return;  // the contents are no documents
    write(lead, noisy, own.visible ? seen_by(2 * own.begin, own.begin + own.end) : seen_by(0, 0));
    write(lead, clean, own.visible ? seen_by(own.begin + own.end, 2 * own.until) : seen_by(0, 0));
    if (!order) return;
    order[lead.index * 2 * total + noisy] = token;
    order[lead.index * 2 * total + clean] = total + token;
  }
};

/// Writes both columns of a token when all noisy copies precede all clean ones. Noisy rows of later blocks and clean
/// rows from its own block on see a clean key: one run of rows only without later blocks. If nothing follows the
/// document, the rows that do not see it are two runs.
struct WriteConcatenated {
  DiffusionBlocks blocks;
  Writer write;
  int64_t* order;
  int32_t* unfit;
  FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t token) const {
    const DiffusionBlock own = blocks(lead, token);
    const int64_t total = blocks.seqlen;
    const bool is_last = own.end == own.until;
    if (unfit && !blocks.fits_concatenated(own)) *unfit = 1;
    const Column hidden{.lts = 0, .lte = kToEnd, .uts = 0, .ute = is_last ? total + own.begin : own.end};
    Column noisy{.lts = own.end, .ute = own.begin}, clean = hidden;
    if (own.visible) {
      clean.lts = is_last ? total + own.until : own.until;
      clean.lte = is_last ? kToEnd : total + own.begin;
    } else {
      noisy.lts = 0;
    }
    write(lead, token, noisy);
    write(lead, total + token, clean);
    if (!order) return;
    order[lead.index * 2 * total + token] = token;
    order[lead.index * 2 * total + total + token] = total + token;
  }
};

struct BlockDiffusion : OfColumns<BlockDiffusion> {
  static constexpr Declared kParameters[] = {kBlocks,
                                             kDocumentsOrOne,
                                             {.name = "concatenated",
                                              .kind = Kind::kFlag,
                                              .doc = "1: all noisy copies before all clean ones",
                                              .otherwise = 0}};
  static constexpr Form kConcatenated{
      .vectors = kLts | kLte | kUts | kUte,
      .misfit =
          "the block-diffusion mask in the order 'concatenated' does not fit two row intervals per key column; "
          "the order 'interleaved' fits every packing",
      .has_lists = true};
  static constexpr Family kFamily{.name = "block_diffusion",
                                  .parameters = kParameters,
                                  .form = {kLts | kUte},
                                  .option = "concatenated",
                                  .other = kConcatenated,
                                  .has_order = true};

  static void measure(Arguments& a) {
    if (a.seqlen > kMaxSeqlen / 2) throw_invalid("two copies of ", a.seqlen, " tokens are more than ", kMaxSeqlen);
    a.shape.seqlen_q = a.shape.seqlen_k = 2 * a.seqlen;
  }

  template <typename Run>
  static void write(Run& run, const Arguments& a, const Output& output) {
    const DiffusionBlocks own = diffusion_blocks(run, a);
    if (a.number("concatenated"))
      run.each(a.seqlen, WriteConcatenated{own, writer_of(a, output), a.order, a.unfit});
    else
      run.each(a.seqlen, WriteInterleaved{own, writer_of(a, output), a.order});
  }

  /// The rows of each half that see a key in the order `concatenated`.
  template <typename Run>
  static auto visible_rows(Run& run, const Arguments& a) {
    return [own = diffusion_blocks(run, a), seqlen = a.seqlen](const Lead& lead, int64_t j, const auto& see) {
      const bool is_noisy = j < seqlen;
      const DiffusionBlock block = own(lead, is_noisy ? j : j - seqlen);
      if (!block.visible) return;
      if (is_noisy) return see(block.begin, block.end);
      see(block.end, block.until);
      see(seqlen + block.begin, seqlen + block.until);
    };
  }

  template <typename Run>
  static void throw_first_misfit(Run& run, const Arguments& a) {
    const DiffusionBlocks own = diffusion_blocks(run, a);
    run.each(a.seqlen, [&](const Lead& lead, int64_t token) {
      if (!own.fits_concatenated(own(lead, token)))
        throw_misfit("the block-diffusion mask in the order 'concatenated'", run.leads(), lead, a.seqlen + token, 3,
                     "as its document has more blocks and another document follows; the order 'interleaved' fits every "
                     "packing");
    });
  }

 private:
  template <typename Run>
  static DiffusionBlocks diffusion_blocks(Run& run, const Arguments& a) {
    const Segments documents = build::documents(run, a);
    return {documents, build::blocks(run, a), a.seqlen};
  }
};

}  // namespace flashmask::build
