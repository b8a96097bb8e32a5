// SPDX-License-Identifier: Apache-2.0

// Masks by family through the C interface: any parameters give a mask whose bounds are rows, or an error.

#include <algorithm>
#include <array>
#include <deque>
#include <initializer_list>
#include <iterator>
#include <string_view>
#include <vector>

#include "flashmask/c_api.h"
#include "fuzz/byte_reader.h"
#include "fuzz/check.h"

namespace flashmask::fuzz {
namespace {

/// A family and the parameters that it needs.
struct Family {
  const char* name;
  std::array<const char*, 6> needs;
};
constexpr Family kFamilies[] = {
    {"causal_document", {"seqlens"}},
    {"document", {"cu_seqlens"}},
    {"document", {"doc_ids"}},
    {"causal_blockwise", {"position_ids"}},
    {"prefix_lm_document", {"seqlens", "prefix", "seqlen"}},
    {"prefix_lm_document", {"doc_ids", "prefix"}},
    {"shared_question", {"seqlens", "is_question", "seqlen"}},
    {"qk_sparse", {"seqlen", "dropped"}},
    {"global_sliding_window", {"seqlen", "global_tokens", "window"}},
    {"prefix_lm_causal", {"seqlen", "prefix"}},
    {"hash_sparse", {"query_buckets", "key_buckets", "causal"}},
    {"prefix_tree", {"parents", "lengths"}},
    {"prefix_tree", {"parents", "window"}},
    {"prefix_tree", {"parents"}},
    {"prefix_tree_from_intervals", {"tin", "tout"}},
    {"padding", {"seqlen_q", "seqlen_k", "key_lengths", "query_lengths"}},
    {"eviction", {"evicted_at"}},
    {"block_causal", {"blocks", "window", "seqlens", "seqlen"}},
    {"attention_sink_window", {"sink", "window", "cu_seqlens"}},
    {"causal_with_blocks", {"block_ids", "window"}},
    {"block_diffusion", {"blocks", "seqlen", "concatenated"}},
    {"eagle3_ttt", {"steps", "seqlens"}},
    {"dflash", {"anchors", "block", "seqlen"}},
    {"sliding_window", {"seqlen_q", "seqlen_k", "left", "right", "q_offset"}},
    {"none", {"seqlen"}},
    {"neighborhood_2d", {"height", "width", "kernel_height", "kernel_width", "dilation"}},
    {"dilated", {"seqlen", "window", "dilation", "causal"}},
    {"bigbird", {"seqlen", "block", "global_blocks", "random_blocks", "window", "seed"}},
};
constexpr const char* kMore[] = {"seqlen", "seqlens", "doc_ids", "unfit_out", "order_out", "window", "blocks", ""};
/// Parameters that are numbers unless the input wants otherwise.
constexpr std::string_view kNumbers =
    "seqlen seqlen_q seqlen_k window sink steps block left right q_offset causal "
    "concatenated global_tokens blocks height width kernel_height kernel_width dilation global_blocks random_blocks "
    "seed";
constexpr int64_t kMost = 1 << 16;        // numbers of a mask that is built
constexpr int64_t kMostListedKeys = 512;  // keys of a mask that may get interval lists

class Call {
 public:
  explicit Call(ByteReader& reader) : reader_(reader) {
    const Family& family = kFamilies[reader.byte() % std::size(kFamilies)];
    family_ = family.name;
    const uint8_t odd = reader.byte();  // few inputs are wrong in many ways
    for (const char* const name : family.needs) {
      if (name && !(odd & 1 && reader.byte() % 4 == 0)) add(name, (odd & 2) != 0);
    }
    if (odd & 4) add(kMore[reader.byte() % std::size(kMore)], true);
    takes_lists_ = (odd & 8) != 0;
    parameters_ = {sizeof(parameters_), static_cast<uint32_t>(items_.size()), items_.data()};
  }

  void run() {
    fm_mask mask{};
    mask.struct_size = sizeof(mask);
    if (!judged(fm_mask_shape(family_, &parameters_, &mask, nullptr))) return;
    int64_t count = mask.bounds.dtype == FM_NONE ? 0 : 1;
    for (int d = 0; d < mask.bounds.ndim; ++d) {
      require(mask.bounds.shape[d] >= 0, "no size is negative");
      if (__builtin_mul_overflow(count, mask.bounds.shape[d], &count) || count > kMost) return;
    }
    std::vector<int32_t> bounds(static_cast<std::size_t>(count), -1), positions;
    mask.bounds.data = bounds.data();
    if (mask.q_pos.dtype != FM_NONE) {
      require(mask.q_pos.shape[0] * mask.q_pos.shape[1] <= count, "positions are no more than the bounds");
      positions.assign(static_cast<std::size_t>(mask.q_pos.shape[0] * mask.q_pos.shape[1]), -1);
      mask.q_pos.data = mask.k_pos.data = positions.data();
    }
    if (!build(mask)) return;
    int64_t written = mask.bounds.dtype == FM_NONE ? 0 : 1;
    for (int d = 0; d < mask.bounds.ndim; ++d) written *= mask.bounds.shape[d];
    bounds.resize(static_cast<std::size_t>(written));
    for (const int32_t bound : bounds) require(bound >= 0 && bound <= mask.seqlen_q, "a bound is a row");
    for (const int32_t at : positions) require(at >= 0 && at < mask.seqlen_k, "a position is that of some token");
  }

 private:
  /// Builds the mask, in half of the inputs with space for interval lists, which then ascend with gaps.
  bool build(fm_mask& mask) {
    const int64_t* const shape = mask.bounds.shape;
    std::vector<int32_t> column_ptr, intervals;
    if (takes_lists_ && mask.bounds.ndim == 4) {
      if (shape[2] > kMostListedKeys) return false;
      column_ptr.assign(static_cast<std::size_t>(shape[0] * shape[1] * (shape[2] + 1)), -1);
      mask.column_ptr = contiguous(column_ptr, {shape[0], shape[1], shape[2] + 1});
    }
    const fm_mask given = mask;
    if (!judged(fm_mask_build(family_, &parameters_, &mask, nullptr))) return false;
    if (mask.intervals.dtype == FM_NONE) return true;
    const int64_t count = mask.intervals.shape[0];
    intervals.assign(static_cast<std::size_t>(2 * count), -1);
    mask = given;
    mask.intervals = contiguous(intervals, {count, 2});
    require(judged(fm_mask_build(family_, &parameters_, &mask, nullptr)), "the same mask, with space for its lists");
    require(column_ptr.back() == count, "the last list ends with the intervals");
    for (std::size_t n = 0; n < intervals.size(); n += 2)
      require(intervals[n] >= 0 && intervals[n] < intervals[n + 1] && intervals[n + 1] <= mask.seqlen_q,
              "an interval is rows");
    return true;
  }
  static fm_tensor contiguous(std::vector<int32_t>& data, std::initializer_list<int64_t> shape) {
    fm_tensor t{};
    t.data = data.data();
    t.dtype = FM_INT32;
    t.ndim = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape);
    for (int64_t stride = 1; int d : {2, 1, 0}) {
      if (d >= t.ndim) continue;
      t.stride[d] = stride;
      stride *= std::max<int64_t>(t.shape[d], 1);
    }
    return t;
  }
  void add(const char* name, bool is_odd) {
    bool is_number = kNumbers.find(name) != std::string_view::npos;
    if (is_odd && reader_.byte() % 8 == 0) is_number = !is_number;
    items_.push_back({name, {}, 0});
    if (!is_number)
      items_.back().vector = vector();
    else
      items_.back().number = is_odd ? reader_.position() : reader_.byte() % 60;
  }
  static bool judged(fm_status status) {
    if (status == FM_OK) return true;
    require(status != FM_INTERNAL, "no error is internal");
    require(fm_last_error()[0] != '\0', "an error says what is wrong");
    return false;
  }
  /// Draws a tensor of 1 to 3 dimensions (or 4, for pairs), with memory for all that its shape and strides reach.
  fm_tensor vector() {
    fm_tensor t{};
    constexpr int32_t kTypes[] = {FM_INT64, FM_INT64, FM_INT64, FM_INT32, FM_INT32, FM_INT32, FM_BOOL, FM_FLOAT32};
    t.dtype = kTypes[reader_.byte() % std::size(kTypes)];
    t.ndim = std::max(reader_.byte() % 8 - 3, 1);
    const uint8_t kind = reader_.byte();  // kind of values: small, ascending, or any
    int64_t reach = 1;
    for (int d = t.ndim - 1; d >= 0; --d) {
      t.shape[d] = d == t.ndim - 1 ? reader_.byte() % 40 : reader_.byte() % 3;
      t.stride[d] = reader_.byte() % 4 == 0 ? 0 : reach;
      reach += t.stride[d] * std::max<int64_t>(t.shape[d] - 1, 0);
    }
    memory_.emplace_back();
    for (int64_t n = 0; n < reach; ++n) {
      const int64_t before = n > 0 ? memory_.back().back() : 0;
      memory_.back().push_back(kind % 4 == 0   ? reader_.position()
                               : kind % 4 == 1 ? reader_.byte() % 8 - kind / 128
                                               : std::min<int64_t>(before + reader_.byte() % 4, 1 << 20));
    }
    if (t.dtype == FM_INT32) {
      auto* const narrow = reinterpret_cast<int32_t*>(memory_.back().data());
      for (int64_t n = 0; n < reach; ++n) narrow[n] = static_cast<int32_t>(memory_.back()[static_cast<std::size_t>(n)]);
    }
    t.data = memory_.back().data();
    return t;
  }

  ByteReader& reader_;
  const char* family_;
  bool takes_lists_ = false;
  std::deque<std::vector<int64_t>> memory_;
  std::vector<fm_mask_parameter> items_;
  fm_mask_parameters parameters_{};
};

}  // namespace
}  // namespace flashmask::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  flashmask::fuzz::ByteReader reader({data, size});
  flashmask::fuzz::Call(reader).run();
  return 0;
}
