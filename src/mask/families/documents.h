// SPDX-License-Identifier: Apache-2.0
#pragma once

// Packed documents.

#include "common/message.h"
#include "mask/families/contents.h"
#include "mask/families/steps.h"

namespace flashmask::build {

inline constexpr Declared kDocumentsAlone[] = {kDocuments};

struct CausalDocument : OfColumns<CausalDocument> {
  static constexpr Family kFamily{"causal_document", kDocumentsAlone, {kLts, Edges::kCausal}};

  struct Columns {
    Segments documents;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      return {.lts = documents.place(lead, j).end};
    }
  };
  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    return {build::documents(run, a)};
  }
};

struct Document : OfColumns<Document> {
  static constexpr Family kFamily{"document", kDocumentsAlone, {kLts | kUte}};

  struct Columns {
    Segments documents;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const Place own = documents.place(lead, j);
      return seen_by(own.begin, own.end);
    }
  };
  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    return {build::documents(run, a)};
  }
};

struct PrefixLmDocument : OfColumns<PrefixLmDocument> {
  static constexpr Declared kParameters[] = {
      kDocuments, {"prefix", Kind::kVector, "of each document, the first tokens that all of its rows see"}};
  static constexpr Family kFamily{"prefix_lm_document", kParameters, {kLts | kUte}};

  static void measure(Arguments& a) {
    OfColumns::measure(a);
    const Integers &prefix = a.vector("prefix"), &documents = a.documents.values;
    if (a.documents.form == SegmentForm::kCuSeqlens) expect_count("prefix", prefix, documents.count - 1, "documents");
    if (a.documents.form == SegmentForm::kSeqlens) expect_count("prefix", prefix, documents.count, "documents");
  }
  static void check(const Arguments& a, const Leads& leads) {
    const Integers& prefix = a.vector("prefix");
    each_lead(leads, [&](const Lead& lead) {
      const std::vector<int64_t> ends = document_ends(a.documents, lead);
      const auto count = smaller(static_cast<int64_t>(ends.size()), prefix.count);
      for (int64_t n = 0, begin = 0; n < count; begin = ends[static_cast<std::size_t>(n++)]) {
        const int64_t own = prefix(lead, n), length = ends[static_cast<std::size_t>(n)] - begin;
        if (own < 0 || own > length)
          throw_invalid("prefix", at(leads, lead, n), " is ", own, "; it must be between 0 and the document's length, ",
                        length);
      }
    });
  }

  struct Columns {
    Segments documents;
    Integers prefix;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const Place own = documents.place(lead, j);
      const int64_t length = own.index < prefix.count ? prefix(lead, own.index) : 0;
      return seen_by(j - own.begin < length ? own.begin : j, own.end);
    }
  };
  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    return {build::documents(run, a), a.vector("prefix")};
  }
};

struct CausalBlockwise : OfColumns<CausalBlockwise> {
  static constexpr Family kFamily{"causal_blockwise", kDocumentsAlone, {kLts | kLte, Edges::kCausal}};

  struct Columns {
    Segments blocks;
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const int64_t last_begin = blocks.last_begin(lead);
      if (j >= last_begin) return {};
      return {.lts = blocks.place(lead, j).end, .lte = last_begin};
    }
  };
  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    return {build::documents(run, a)};
  }
};

struct SharedQuestion : OfColumns<SharedQuestion> {
  static constexpr Declared kParameters[] = {
      {"seqlens", Kind::kVector, "lengths of all questions and answers in their order"},
      {"is_question", Kind::kFlags, "of each of them, whether a group begins"},
      kOptionalSeqlen};
  static constexpr Family kFamily{"shared_question", kParameters, {kLts, Edges::kCausal}};

  static void measure(Arguments& a) {
    a.documents = {SegmentForm::kSeqlens, "seqlens", a.vector("seqlens")};
    expect_count("is_question", a.vector("is_question"), a.documents.values.count, "segments");
    a.seqlen = tokens_of(a.documents, a.optional_number("seqlen"), a.leads(), a.device);
    OfColumns::measure(a);
  }

  /// Numbers the groups of shared questions and finds where they end, the last with the segments.
  struct GroupsOfSegments {
    Segments segments;
    Integers is_question;
    int32_t *group, *group_end;
    FLASHMASK_COLUMN void prepare(const Lead& lead, int64_t n) const {
      group_end[lead.index * segments.count() + n] = static_cast<int32_t>(segments.total(lead));
    }
    FLASHMASK_COLUMN int64_t value(const Lead& lead, int64_t n) const { return is_question(lead, n) != 0; }
    FLASHMASK_COLUMN void store(const Lead& lead, int64_t n, int64_t is_begin, int64_t number) const {
      const int64_t first = lead.index * segments.count();
      group[first + n] = static_cast<int32_t>(number);
      if (number > 1 && is_begin) group_end[first + number - 2] = static_cast<int32_t>(segments.end_after(lead, n));
    }
  };

  /// A question's keys are seen to the end of its group, an answer's to its own.
  struct Columns {
    Segments segments;
    Integers is_question;
    Integers group;      ///< each segment's, counted from 1
    Integers group_end;  ///< end of each group
    FLASHMASK_COLUMN Column operator()(const Lead& lead, int64_t j) const {
      const Place own = segments.place(lead, j);
      const bool to_group_end = own.index < segments.count() && is_question(lead, own.index) != 0;
      return {.lts = to_group_end ? group_end(lead, group(lead, own.index) - 1) : own.end};
    }
  };
  template <typename Run>
  static Columns columns(Run& run, const Arguments& a) {
    const Segments all = build::documents(run, a);
    const Integers& is_question = a.vector("is_question");
    int32_t* const group = run.template array<int32_t>(all.count());
    int32_t* const group_end = run.template array<int32_t>(all.count());
    run.scan(all.count(), GroupsOfSegments{all, is_question, group, group_end});
    return {all, is_question, integers_of(group, run.leads(), all.count()),
            integers_of(group_end, run.leads(), all.count())};
  }
};

using OfDocuments = FamilyList<CausalDocument, Document, PrefixLmDocument, CausalBlockwise, SharedQuestion>;

}  // namespace flashmask::build
