// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks of models and training methods.

#include "common/message.h"
#include "mask/families/block_diffusion.h"
#include "mask/families/contents.h"
#include "mask/families/steps.h"

namespace flashmask::build {

struct AttentionSinkWindow : OfColumns<AttentionSinkWindow> {
  static constexpr Declared kParameters[] = {
      {"sink", Kind::kNumber, "first keys of a document, which its rows always see", 0}, kWindow, kDocumentsOrOne};
  static constexpr Family kFamily{"attention_sink_window", kParameters, {kLts, Edges::kCausal}};

  struct Columns {
    Segments documents;
    int64_t sink, reach;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const Place own = documents.place(lead, j);
      return {.lts = j - own.begin < sink ? own.end : smaller(j + reach, own.end)};
    }
  };
  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    return {build::documents(run, a), a.number("sink"), reach_of(a)};
  }
};

struct BlockCausal : OfColumns<BlockCausal> {
  static constexpr Declared kParameters[] = {kBlocks, kDocumentsOrOne, kWindow};
  static constexpr Family kFamily{"block_causal", kParameters, {kLts | kUte}};

  struct Columns {
    Segments documents;
    Blocks blocks;
    int64_t reach;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const Blocks::Bounds own = blocks.bounds(lead, documents.place(lead, j), j, reach);
      return seen_by(own.begin, own.until);
    }
  };
  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    const Segments documents = build::documents(run, a);
    return {documents, build::blocks(run, a), reach_of(a)};
  }
};

struct CausalWithBlocks : OfColumns<CausalWithBlocks> {
  static constexpr Declared kParameters[] = {
      {"block_ids", Kind::kTokens, "the block of each token, negative outside of blocks"},
      kWindow,
      {"documents", Kind::kDocumentsOfTokens, "packed one after the other"}};
  static constexpr Family kFamily{"causal_with_blocks", kParameters, {kLts | kUte}};

  static void check(const Arguments& a, const Leads& leads) {
    const Integers& block_ids = a.vector("block_ids");
    each_lead(leads, [&](const Lead& lead) {
      const std::vector<int64_t> ends = document_ends(a.documents, lead);
      auto end = ends.begin();
      SeenIds seen;
      each_run(block_ids, lead, 0, [&](int64_t begin, int64_t run_end) {
        const int64_t id = block_ids(lead, begin);
        for (int64_t n = begin; n < run_end; n = end != ends.end() ? std::min(*end, run_end) : run_end) {
          for (; end != ends.end() && *end <= n; ++end) seen.clear();  // ids may be used again in another document
          if (id >= 0 && !seen.insert(id))
            throw_invalid("block id ", id, " comes back at block_ids", at(leads, lead, n),
                          "; the tokens of a block must be contiguous, as a block in parts may need more than two row "
                          "intervals per key column (from_dense takes it if it does not)");
        }
      });
    });
  }

  struct Columns {
    Segments documents, runs;  ///< runs of equal ids, which may go on in the next document
    Integers block_ids;
    int64_t reach;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const bool inside = block_ids(lead, j) >= 0;
      const Place document = documents.place(lead, j), run = inside ? runs.place(lead, j) : alone(j);
      return column(document, run, inside, j);
    }
    /// inside: whether the token is in a block, the run of ids as far as it is in the document; otherwise it is alone.
    FLASHMASK_COLUMN Column column(const Place& document, const Place& run, bool inside, int64_t j) const {
      const int64_t begin = inside ? larger(run.begin, document.begin) : j;
      return seen_by(begin, smaller(larger(run.end, j + reach), document.end));
    }
    FLASHMASK_COLUMN static Place alone(int64_t j) { return {0, j, j + 1}; }
  };

  /// The columns of causal_with_blocks, a stretch of tokens of one document and one run of ids after the other.
  struct WriteInOrder {
    Columns columns;
    Writer write;
    void operator()(const Lead& lead, int64_t) const {
      const int64_t tokens = write.seqlen_k;
      for (int64_t begin = 0, end; begin < tokens; begin = end) {
        const Place document = columns.documents.place(lead, begin), run = columns.runs.place(lead, begin);
        end = document.end > begin ? smaller(run.end, document.end) : run.end;  // there may be tokens past the last one
        if (columns.block_ids(lead, begin) >= 0)
          for (int64_t j = begin; j < end; ++j) write(lead, j, columns.column(document, run, true, j));
        else
          for (int64_t j = begin; j < end; ++j) write(lead, j, columns.column(document, columns.alone(j), false, j));
      }
    }
  };

  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    const Integers& block_ids = a.vector("block_ids");
    const SegmentForm form = a.documents.form;
    if constexpr (!Run::kInOrder) {
      if (is_per_token(form)) {  // both in one scan
        const RunsOfTokens documents = runs_to_find(run, a.documents.values, step_of(form));
        const RunsOfTokens blocks = runs_to_find(run, block_ids, 0);
        run.scan(a.seqlen, FindRuns<2>{{documents, blocks}, a.seqlen});
        return {segments_of(documents, run.leads()), segments_of(blocks, run.leads()), block_ids, reach_of(a)};
      }
    }
    const Segments documents = build::documents(run, a);
    return {documents, runs(run, block_ids, 0), block_ids, reach_of(a)};
  }
  template <typename Run>
  static void write(Run& run, const Arguments& a, const Output& output) {
    if constexpr (Run::kInOrder)
      run.each(1, WriteInOrder{columns(run, a), writer_of(a, output)});
    else
      write_columns(run, a, output, columns(run, a));
  }
};

struct Eagle3Ttt : OfColumns<Eagle3Ttt> {
  static constexpr Declared kParameters[] = {{"steps", Kind::kNumber, "passes, this one included", 1}, kDocumentsOrOne};
  static constexpr Family kFamily{"eagle3_ttt", kParameters, {kLts | kUte}};

  static void measure(Arguments& a) {
    const int64_t steps = a.number("steps");
    if (a.seqlen > 0 && steps > kMaxSeqlen / a.seqlen)
      throw_invalid("steps is ", steps, "; with ", a.seqlen, " tokens that is more than ", kMaxSeqlen, " keys");
    a.shape.seqlen_q = a.seqlen;
    a.shape.seqlen_k = a.seqlen > 0 ? steps * a.seqlen : 0;
  }

  struct Columns {
    Segments documents;
    int64_t seqlen;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const int64_t token = remainder(j, seqlen), end = documents.place(lead, token).end;
      return seen_by(token, j < seqlen ? end : end > token ? token + 1 : 0);
    }
  };
  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    return {build::documents(run, a), a.seqlen};
  }
};

struct Dflash : OfColumns<Dflash> {
  static constexpr Declared kParameters[] = {
      {"anchors", Kind::kVector, "the place of each block's first token, ascending; negative: there is no block"},
      {"block", Kind::kNumber, "tokens of a block", 1},
      kDocumentsOrOne};
  static constexpr Family kFamily{"dflash", kParameters, {kLts | kUte}};

  static void measure(Arguments& a) {
    const int64_t count = a.vector("anchors").count, block = a.number("block");
    if (count > 0 && block > (kMaxSeqlen - a.seqlen) / count)
      throw_invalid("block is ", block, "; ", count, " of them and ", a.seqlen, " tokens of context are more than ",
                    kMaxSeqlen, " keys");
    a.shape.seqlen_q = count * block;
    a.shape.seqlen_k = a.seqlen + a.shape.seqlen_q;
  }
  static void check(const Arguments& a, const Leads& leads) {
    const Integers& anchors = a.vector("anchors");
    each_lead(leads, [&](const Lead& lead) {
      for (int64_t n = 0; n < anchors.count; ++n) {
        const int64_t anchor = anchors(lead, n), before = n > 0 ? anchors(lead, n - 1) : 0;
        if (anchor > a.seqlen)
          throw_invalid("anchors", at(leads, lead, n), " is ", anchor,
                        "; it must be between 0 and the length of the context, ", a.seqlen,
                        ", or negative where there is no block");
        if (anchor >= 0 && (before < 0 || anchor < before))
          throw_invalid(
              "anchors", at(leads, lead, n), " is ", anchor, ", ",
              before < 0 ? "after a negative one" : message("less than the one before it, ", before),
              "; sort the blocks by anchor, negative ones last: only then do those that see a key follow each "
              "other, and the mask fits two row intervals");
      }
    });
  }

  struct Columns {
    Segments documents;
    Integers anchors;
    int64_t context, block;
    Search before, until;  ///< blocks anchored up to a key, and before a document's end

    /// Blocks that are not there have no key of the context before them and no document after.
    FLASHMASK_COLUMN int64_t anchor(const Lead& lead, int64_t n) const {
      const int64_t at = anchors(lead, n);
      return at >= 0 ? at : context + 1;
    }
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      if (j >= context) {
        const int64_t row = j - context, number = static_cast<uint32_t>(row) / static_cast<uint32_t>(block);
        return seen_by(number * block, anchors(lead, number) >= 0 ? (number + 1) * block : 0);
      }
      const auto at = [this](const Lead& l, int64_t n) { return anchor(l, n); };
      // The place after the context belongs to the document of the last token.
      const auto in_document = [this](const Lead& l, int64_t n) {
        const int64_t x = anchor(l, n);
        return x == context ? context - 1 : x;
      };
      const int64_t end = documents.place(lead, j).end;
      return seen_by(before(at, lead, anchors.count, j) * block,
                     until(in_document, lead, anchors.count, end - 1) * block);
    }
  };
  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    return {build::documents(run, a), a.vector("anchors"), a.seqlen, a.number("block"), {}, {}};
  }
};

/// A sliding window over every dilation-th token, in the order in which tokens of equal remainder lie side by side:
/// there the rows that see a key are one run.
struct DilatedWindow : OfColumns<DilatedWindow> {
  static constexpr Declared kParameters[] = {
      kSeqlen, kWindow, {"dilation", Kind::kNumber, "distance between neighbouring keys of a window", 1}};
  static constexpr Family kFamily{
      .name = "dilated_window", .parameters = kParameters, .form = {kLts, Edges::kCausal}, .has_order = true};

  struct Columns {
    int64_t dilation, reach;
    int64_t shortest, longer;  ///< the least tokens of a remainder, and how many remainders have one more
    FLASHMASK_COLUMN Place place(int64_t j) const {
      const int64_t of_longer = longer * (shortest + 1);
      const int64_t length = j < of_longer ? shortest + 1 : shortest, first = j < of_longer ? 0 : of_longer;
      const int64_t begin = j - remainder(j - first, length);
      return {(j < of_longer ? 0 : longer) + (begin - first) / length, begin, begin + length};
    }
    FLASHMASK_COLUMN Column operator()(const Lead&, int64_t j) const {
      return {.lts = smaller(j + reach, place(j).end)};
    }
  };
  template <typename Run>
  static Columns columns(Run&, const Arguments& a) {
    const int64_t dilation = a.number("dilation");
    return {dilation, reach_of(a), a.seqlen / dilation, a.seqlen % dilation};
  }

  struct WriteOrdered {
    Columns columns;
    Writer write;
    int64_t* order;
    FLASHMASK_COLUMN void operator()(const Lead& lead, int64_t j) const {
      write(lead, j, columns(lead, j));
      if (!order) return;
      const Place own = columns.place(j);
      order[j] = own.index + (j - own.begin) * columns.dilation;
    }
  };
  template <typename Run>
  static void write(Run& run, const Arguments& a, const Output& output) {
    run.each(a.seqlen, WriteOrdered{columns(run, a), writer_of(a, output), a.order});
  }
};

using OfModels =
    FamilyList<AttentionSinkWindow, BlockCausal, CausalWithBlocks, BlockDiffusion, Eagle3Ttt, Dflash, DilatedWindow>;

}  // namespace flashmask::build
