// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "flashmask/kv_cache.h"
#include "verify/cached_draw.h"
#include "verify/random.h"

namespace flashmask::verify {

/// How a drawn call lies in memory: no bit of a result depends on it.
struct CachedPlacement {
  explicit CachedPlacement(const CachedCase& c)
      : tables(c.tables), page_size(c.page_size), layout(c.layout), key_layout(c.key_layout), shared(c.shared) {}

  CacheTables tables;
  int64_t page_size;
  Layout layout;
  KeyLayout key_layout;
  int64_t shared;
  bool broadcasts = true;  ///< scales have the case's shape; otherwise a number for each slot and head
  uint64_t order = 0;      ///< seeds the permutation of pages
};

/// A drawn call in memory. All that it has no use for is NaN, or a number out of range: slots from n on, pages of no
/// request, entries of tables past a request's last page, rows of no request; so are the outputs.
class CachedTensors {
 public:
  /// `has_new_tokens` false: the cache lacks each request's last tokens, as many as it has rows.
  CachedTensors(const CachedDraw& draw, const CachedPlacement& placement, bool has_new_tokens = true);
  CachedTensors(const CachedTensors&) = delete;
  CachedTensors& operator=(const CachedTensors&) = delete;

  const CachedForwardArgs& args() const { return args_; }
  const Features& features() const { return features_; }
  /// Appends the tokens that the cache lacks; by slots, or as the sequences' last ones.
  AppendArgs append_args(bool by_slots);

  /// Bytes of a request's rows in out, or in lse.
  std::vector<std::byte> out_bits(std::size_t b) const;
  std::vector<std::byte> lse_bits(std::size_t b) const;
  RequestResults results(std::size_t b) const;
  /// Bytes of the whole cache, and of the vectors beside it.
  std::vector<std::byte> cache_bits() const;
  /// True if nothing but the elements of out and lse was written, and no row of no request.
  bool has_stray_writes() const;
  /// Makes the outputs poison again.
  void poison_outputs();

 private:
  struct Place {
    int64_t page, slot;
  };

  std::optional<Place> place(std::size_t b, int64_t j) const;
  int64_t first_row(std::size_t b) const;
  int64_t laid_keys(const DrawnRequest& request) const;
  int64_t row_offset(const TensorView& t, int64_t row) const;
  Tensor& own(Tensor tensor) { return tensors_.emplace_back(std::move(tensor)); }
  void append_row(AppendArgs& args, std::size_t b, int64_t i) const;
  TensorView int32_tensor(std::initializer_list<int64_t> shape);
  void order_pages();
  void lay_rows();
  void lay_tables();
  std::vector<int64_t> lay_entries(Random& random);
  void lay_lists();
  void lay_keys();
  void lay_key(std::size_t b, int64_t j);
  TensorView lay_scales(ScaleShape shape, std::vector<float> DrawnRequest::* scales);
  void lay_columns();
  void lay_column(std::size_t b, int64_t j, const std::optional<Place>& at);
  void lay_tail();
  void lay_blocks();
  void lay_features();

  const CachedDraw& draw_;
  const CachedCase& c_;
  const CachedPlacement placement_;
  const bool has_new_tokens_;
  int64_t page_size_ = 0, pages_ = 0, total_rows_ = 0, spare_rows_ = 0;
  std::vector<std::vector<int64_t>> request_pages_;
  std::deque<Tensor> tensors_;  ///< all but the three
  std::optional<Tensor> q_, out_, lse_;
  CachedForwardArgs args_;
  Features features_;
};

/// The tensors of a call, defined or not.
std::vector<TensorView*> every_tensor(CachedForwardArgs& args, Features& features);

}  // namespace flashmask::verify
