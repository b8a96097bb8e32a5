// SPDX-License-Identifier: Apache-2.0
#include "run/check.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <random>

#include "numerics/accuracy.h"
#include "run/parallel_for.h"

namespace flashmask::run {
namespace {

constexpr int64_t kRowSamples = 256;
constexpr int64_t kColumnSamples = 16;
constexpr int64_t kColumnTries = 256;
/// One sample of so many is drawn from a whole sequence, the others from what is not padding.
constexpr int64_t kPaddingSamples = 4;
/// Multiplications that the column samples may take together; a long document's first columns take more.
constexpr double kColumnWork = 1e9;

/// Uniform in [0, count), the same with every standard library.
int64_t draw(std::mt19937_64& engine, int64_t count) {
  return static_cast<int64_t>(engine() % static_cast<uint64_t>(count));
}

/// Tokens of a sequence before its padding.
int64_t used_places(const Packed& packed, int64_t sequence) {
  const auto begin = packed.segment_ids.begin() + static_cast<std::ptrdiff_t>(sequence * packed.seqlen);
  return std::find(begin, begin + static_cast<std::ptrdiff_t>(packed.seqlen), -1) - begin;
}

/// The larger one; NaN counts as infinite.
void raise(double& largest, double value) {
  largest = std::max(largest, std::isnan(value) ? std::numeric_limits<double>::infinity() : value);
}

}  // namespace

bool CheckFigures::passed() const {
  return wrong_visibility == 0 && unwritten_or_nan == 0 && dirty_padding == 0 &&
         std::all_of(accuracy.begin(), accuracy.end(), [](const Accuracy& a) { return a.passed(); });
}

SampleCheck::SampleCheck(const Packed& packed, int64_t sequences, const AttentionShape& shape, DataType dtype,
                         uint64_t seed, int threads)
    : packed_(packed), lineage_(std::make_unique<Lineage>(packed)), shape_(shape), dtype_(dtype), threads_(threads) {
  draw_rows(sequences, seed);
  draw_columns(sequences, seed + 1);
  constexpr const char* kNames[kResults] = {"out", "lse", "dq", "dk", "dv"};
  for (int r = 0; r < kResults; ++r) accuracy_[r].tensor = kNames[r];
}

SampleCheck::~SampleCheck() = default;

void SampleCheck::draw_rows(int64_t sequences, uint64_t seed) {
  std::mt19937_64 engine(seed);
  rows_.push_back({0, 0, draw(engine, shape_.heads)});
  for (int64_t n = 1; n < kRowSamples; ++n) {
    const int64_t sequence = draw(engine, sequences);
    rows_.push_back({sequence, draw(engine, n % kPaddingSamples == 0 ? packed_.seqlen : used_places(packed_, sequence)),
                     draw(engine, shape_.heads)});
  }
}

void SampleCheck::draw_columns(int64_t sequences, uint64_t seed) {
  std::mt19937_64 engine(seed);
  double work = 0;
  for (int64_t n = 0; n < kColumnTries && static_cast<int64_t>(columns_.size()) < kColumnSamples; ++n) {
    const int64_t sequence = draw(engine, sequences);
    const ColumnSample sample{sequence,
                              draw(engine, n % kPaddingSamples == 0 ? packed_.seqlen : used_places(packed_, sequence)),
                              draw(engine, shape_.kv_heads)};
    const SequenceRule rule{packed_, *lineage_, sample.sequence};
    double keys = 0;  // summed over the rows that see the column: a row sees as many as its position id, and itself
    for (int64_t i = sample.key; i < packed_.seqlen; ++i) {
      if (rule.sees(i, sample.key))
        keys += packed_.position_ids[static_cast<std::size_t>(sample.sequence * packed_.seqlen + i)] + 1;
    }
    const double own_work = keys * static_cast<double>(shape_.heads / shape_.kv_heads * shape_.head_dim * 4);
    if (work + own_work > kColumnWork) continue;
    work += own_work;
    columns_.push_back(sample);
  }
}

void SampleCheck::compare(Result result, const Tensor& got, int64_t offset, const Expected& expected) {
  Accuracy& accuracy = accuracy_[result];
  for (std::size_t n = 0; n < expected.exact.size(); ++n) {
    const double value = got.at(offset + static_cast<int64_t>(n)), exact = expected.exact[n];
    const double unit = result == kLse ? numerics::lse_unit(exact) : 1.0;
    raise(accuracy.max_error, numerics::difference(value, exact) / unit);
    if (std::isfinite(exact)) raise(accuracy.max_reference, std::abs(exact));
    if (!expected.subtracted.empty())
      raise(accuracy.max_sum, std::max(std::abs(expected.subtracted[n]), std::abs(exact + expected.subtracted[n])));
    raise(accuracy.plain_error, numerics::difference(expected.plain[n], exact) / unit);
    if (!expected.inherited.empty())
      raise(given_out_error_[result], numerics::difference(value, exact + expected.inherited[n]));
  }
}

void SampleCheck::check_row(const RowSample& sample, int64_t entry, const Mask& mask, const Inputs& inputs,
                            const Outputs& outputs) {
  const SequenceRule rule{packed_, *lineage_, sample.sequence};
  for (int64_t j = 0; j < packed_.seqlen; ++j)
    wrong_visibility_ += rule.sees(sample.row, j) != mask.visible(entry, 0, sample.row, j);
  const SampledAttention attention(shape_, dtype_, inputs, outputs);
  const ExpectedRow expected = attention.row(rule, {entry, sample.row, sample.head});
  const int64_t at = ((entry * packed_.seqlen + sample.row) * shape_.heads + sample.head) * shape_.head_dim;
  compare(kOut, outputs.out, at, expected.out);
  compare(kDq, outputs.dq, at, expected.dq);
  compare(kLse, outputs.lse, (entry * shape_.heads + sample.head) * packed_.seqlen + sample.row, expected.lse);
}

void SampleCheck::check_column(const ColumnSample& sample, int64_t entry, const Inputs& inputs,
                               const Outputs& outputs) {
  const SequenceRule rule{packed_, *lineage_, sample.sequence};
  const SampledAttention attention(shape_, dtype_, inputs, outputs);
  const ExpectedColumn expected = attention.column(rule, entry, sample.key, sample.kv_head);
  const int64_t at = ((entry * packed_.seqlen + sample.key) * shape_.kv_heads + sample.kv_head) * shape_.head_dim;
  compare(kDk, outputs.dk, at, expected.dk);
  compare(kDv, outputs.dv, at, expected.dv);
}

void SampleCheck::check_every_element(int64_t first, int64_t count, const Outputs& outputs) {
  std::atomic<int64_t> nan = 0, dirty = 0;
  const auto is_padding = [&](int64_t token) {
    return packed_.segment_ids[static_cast<std::size_t>(first * packed_.seqlen + token)] < 0;
  };
  const auto look = [&](const Tensor& tensor, int64_t element, bool padding, double hidden, int64_t& nan_here,
                        int64_t& dirty_here) {
    const double value = tensor.at(element);
    nan_here += std::isnan(value);
    dirty_here += padding && value != hidden;
  };
  parallel_for(count * packed_.seqlen, threads_, [&](int64_t begin, int64_t end) {
    int64_t nan_here = 0, dirty_here = 0;
    for (int64_t token = begin; token < end; ++token) {
      const bool padding = is_padding(token);
      for (const Tensor* tensor : {&outputs.out, &outputs.dq, &outputs.dk, &outputs.dv}) {
        const int64_t width = tensor->stride() / packed_.seqlen;
        for (int64_t x = 0; x < width; ++x) look(*tensor, token * width + x, padding, 0, nan_here, dirty_here);
      }
      const int64_t entry = token / packed_.seqlen, row = token % packed_.seqlen;
      for (int64_t h = 0; h < shape_.heads; ++h) {
        look(outputs.lse, (entry * shape_.heads + h) * packed_.seqlen + row, padding,
             -std::numeric_limits<double>::infinity(), nan_here, dirty_here);
      }
    }
    nan += nan_here;
    dirty += dirty_here;
  });
  unwritten_or_nan_ += nan;
  dirty_padding_ += dirty;
}

void SampleCheck::check(int64_t first, int64_t count, const Mask& mask, const Inputs& inputs, const Outputs& outputs) {
  const auto loaded = [&](int64_t sequence) { return sequence >= first && sequence < first + count; };
  for (const RowSample& sample : rows_) {
    if (loaded(sample.sequence)) check_row(sample, sample.sequence - first, mask, inputs, outputs);
  }
  for (const ColumnSample& sample : columns_) {
    if (loaded(sample.sequence)) check_column(sample, sample.sequence - first, inputs, outputs);
  }
  check_every_element(first, count, outputs);
}

CheckFigures SampleCheck::figures() const {
  CheckFigures figures{.rows = static_cast<int64_t>(rows_.size()),
                       .columns = static_cast<int64_t>(columns_.size()),
                       .wrong_visibility = wrong_visibility_,
                       .unwritten_or_nan = unwritten_or_nan_,
                       .dirty_padding = dirty_padding_};
  for (int r = 0; r < kResults; ++r) {
    if ((r == kDk || r == kDv) && columns_.empty()) continue;
    Accuracy accuracy = accuracy_[r];
    if (dtype_ != DataType::kFloat32 && (r == kDq || r == kDk))
      accuracy.max_error = std::min(accuracy.max_error, given_out_error_[r]);
    accuracy.limit = r == kLse                      ? numerics::lse_limit(dtype_)
                     : dtype_ == DataType::kFloat32 ? numerics::float32_limit(accuracy.max_reference, accuracy.max_sum)
                                                    : numerics::plain_limit(accuracy.plain_error);
    figures.accuracy.push_back(accuracy);
  }
  return figures;
}

}  // namespace flashmask::run
