// SPDX-License-Identifier: Apache-2.0
#include "flashmask/mask.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/arithmetic.h"
#include "common/message.h"
#include "mask/view.h"

namespace flashmask {
namespace {

/// The interval vectors, shared between masks that differ only in band or block mask.
struct Bounds {
  int64_t batch = 1, heads = 1;
  std::vector<int32_t> lts, lte, uts, ute;
  uint64_t hash = 0;
};

struct BlockMask {
  int64_t batch = 1, heads = 1;
  std::vector<uint8_t> keep;
  uint64_t hash = 0;
};

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

uint64_t hash_of_counts(int64_t batch, int64_t heads) { return mix(mix(1, static_cast<uint64_t>(batch)), static_cast<uint64_t>(heads)); }

template <typename T>
uint64_t mix_all(uint64_t hash, const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
  const std::size_t size = values.size() * sizeof(T);
  hash = mix(hash, size);
  std::size_t at = 0;
  for (uint64_t word; at + 8 <= size; at += 8) {
    std::memcpy(&word, bytes + at, 8);
    hash = mix(hash, word);
  }
  uint64_t rest = 0;
  if (at < size) std::memcpy(&rest, bytes + at, size - at);
  return mix(hash, rest);
}

void check_seqlen(const char* argument, int64_t seqlen) {
  if (seqlen < 0 || seqlen > kMaxSeqlen) throw_invalid(argument, " is ", seqlen, "; it must be between 0 and ", kMaxSeqlen);
}

void check_count(const char* argument, int64_t count) {
  if (count < 1) throw_invalid(argument, " is ", count, "; it must be at least 1 (1 is broadcast)");
}

void check_size(const char* argument, std::size_t got, std::optional<int64_t> expected, const char* shape) {
  if (got == 0 && (!expected || *expected != 0)) return;  // absent
  if (!expected || static_cast<int64_t>(got) != *expected) {
    throw_invalid(argument, " has ", got, " elements; ", shape, " needs ", expected ? message(*expected) : "more than 2^63",
                  " (or 0: absent)");
  }
}

/// Far beyond any sequence, and small enough that sums of two never overflow.
constexpr int64_t kFarthest = int64_t{1} << 40;

void check_position(const char* argument, int64_t position) {
  if (position < -kFarthest || position > kFarthest) throw_invalid(argument, " is ", position, "; it must be between -2^40 and 2^40");
}

void check_band(const Band& band, int64_t q_offset) {
  if (band.lo) check_position("band lo", *band.lo);
  if (band.hi) check_position("band hi", *band.hi);
  check_position("q_offset", q_offset);
}

const int32_t* data_or_null(const std::vector<int32_t>& v) { return v.empty() ? nullptr : v.data(); }

}  // namespace

struct Mask::Data {
  int64_t seqlen_q = 0, seqlen_k = 0;
  Band band;
  int64_t q_offset = 0;
  std::shared_ptr<const Bounds> bounds;
  std::shared_ptr<const BlockMask> block;
  MaskView view;

  /// Checks the band and fills `view` from the rest.
  void finish() {
    view = {};
    view.seqlen_q = seqlen_q;
    view.seqlen_k = seqlen_k;
    check_band(band, q_offset);
    const Diagonals diagonals = absolute_diagonals(band, q_offset);
    view.diagonal_lo = diagonals.lo;
    view.diagonal_hi = diagonals.hi;
    view.bounds_batch = bounds->batch;
    view.bounds_heads = bounds->heads;
    view.lts = data_or_null(bounds->lts);
    view.lte = data_or_null(bounds->lte);
    view.uts = data_or_null(bounds->uts);
    view.ute = data_or_null(bounds->ute);
    view.block_batch = block->batch;
    view.block_heads = block->heads;
    view.block_mask = block->keep.empty() ? nullptr : block->keep.data();
    uint64_t hash = mix(mix(bounds->hash, block->hash), static_cast<uint64_t>(seqlen_q));
    hash = mix(mix(hash, static_cast<uint64_t>(seqlen_k)), static_cast<uint32_t>(view.diagonal_lo));
    view.content_hash = mix(hash, static_cast<uint32_t>(view.diagonal_hi));
  }
};

namespace {

std::shared_ptr<const BlockMask> make_block_mask(int64_t seqlen_q, int64_t seqlen_k, int64_t batch, int64_t heads,
                                                 std::vector<uint8_t> keep) {
  check_count("block_batch", batch);
  check_count("block_heads", heads);
  check_size("block_mask", keep.size(),
             checked_product(batch, heads, ceil_div(seqlen_q, kBlockMaskSize), ceil_div(seqlen_k, kBlockMaskSize)),
             "[block_batch, block_heads, ceil(seqlen_q / 128), ceil(seqlen_k / 128)]");
  auto block = std::make_shared<BlockMask>();
  block->batch = keep.empty() ? 1 : batch;
  block->heads = keep.empty() ? 1 : heads;
  block->keep = std::move(keep);
  block->hash = mix_all(hash_of_counts(block->batch, block->heads), block->keep);
  return block;
}

/// A batch entry of vectors or block mask is its own or everybody's; a head may serve several.
void check_broadcast(int64_t bounds_batch, int64_t block_batch, int64_t bounds_heads, int64_t block_heads) {
  if (bounds_batch != block_batch && bounds_batch != 1 && block_batch != 1) {
    throw_invalid("the mask's vectors have ", bounds_batch, " batch entries and its block mask ", block_batch,
                  "; they must be equal, or one of them 1");
  }
  if (std::max(bounds_heads, block_heads) % std::min(bounds_heads, block_heads) != 0) {
    throw_invalid("the mask's vectors have ", bounds_heads, " heads and its block mask ", block_heads, "; one must divide the other");
  }
}

}  // namespace

Band Band::window(int64_t left, int64_t right) {
  if (left < -1) throw_invalid("window left is ", left, "; it must be -1 (unbounded) or at least 0");
  if (right < -1) throw_invalid("window right is ", right, "; it must be -1 (unbounded) or at least 0");
  Band band;
  if (left >= 0) band.lo = -left;
  if (right >= 0) band.hi = right;
  return band;
}

Mask::Mask(MaskParts parts) {
  check_seqlen("seqlen_q", parts.seqlen_q);
  check_seqlen("seqlen_k", parts.seqlen_k);
  check_count("batch", parts.batch);
  check_count("heads", parts.heads);
  const auto expected = checked_product(parts.batch, parts.heads, parts.seqlen_k);
  for (auto [argument, vector] : {std::pair{"lts", &parts.lts}, {"lte", &parts.lte}, {"uts", &parts.uts}, {"ute", &parts.ute}}) {
    check_size(argument, vector->size(), expected, "[batch, heads, seqlen_k]");
  }
  auto bounds = std::make_shared<Bounds>();
  const bool any = !parts.lts.empty() || !parts.lte.empty() || !parts.uts.empty() || !parts.ute.empty();
  bounds->batch = any ? parts.batch : 1;
  bounds->heads = any ? parts.heads : 1;
  bounds->lts = std::move(parts.lts);
  bounds->lte = std::move(parts.lte);
  bounds->uts = std::move(parts.uts);
  bounds->ute = std::move(parts.ute);
  bounds->hash = hash_of_counts(bounds->batch, bounds->heads);
  for (const auto* vector : {&bounds->lts, &bounds->lte, &bounds->uts, &bounds->ute}) bounds->hash = mix_all(bounds->hash, *vector);

  auto data = std::make_shared<Data>();
  data->seqlen_q = parts.seqlen_q;
  data->seqlen_k = parts.seqlen_k;
  data->band = parts.band;
  data->q_offset = parts.q_offset.value_or(parts.seqlen_k - parts.seqlen_q);
  data->block = make_block_mask(parts.seqlen_q, parts.seqlen_k, parts.block_batch, parts.block_heads, std::move(parts.block_mask));
  check_broadcast(bounds->batch, data->block->batch, bounds->heads, data->block->heads);
  data->bounds = std::move(bounds);
  data->finish();
  data_ = std::move(data);
}

int64_t Mask::seqlen_q() const { return data_->seqlen_q; }
int64_t Mask::seqlen_k() const { return data_->seqlen_k; }
int64_t Mask::batch() const { return data_->view.batch(); }
int64_t Mask::heads() const { return data_->view.heads(); }
const Band& Mask::band() const { return data_->band; }
int64_t Mask::q_offset() const { return data_->q_offset; }
int Mask::num_intervals() const {
  const MaskView& v = data_->view;
  return (v.lts || v.lte ? 1 : 0) + (v.uts || v.ute ? 1 : 0);
}
bool Mask::has_block_mask() const { return data_->view.block_mask != nullptr; }
std::span<const int32_t> Mask::lts() const { return data_->bounds->lts; }
std::span<const int32_t> Mask::lte() const { return data_->bounds->lte; }
std::span<const int32_t> Mask::uts() const { return data_->bounds->uts; }
std::span<const int32_t> Mask::ute() const { return data_->bounds->ute; }
std::span<const uint8_t> Mask::block_mask() const { return data_->block->keep; }
const MaskView& Mask::view() const { return data_->view; }

int64_t Mask::memory_bytes() const {
  const Bounds& b = *data_->bounds;
  return static_cast<int64_t>((b.lts.size() + b.lte.size() + b.uts.size() + b.ute.size()) * sizeof(int32_t) + data_->block->keep.size());
}

bool Mask::visible(int64_t b, int64_t h, int64_t i, int64_t j) const {
  const MaskView& v = data_->view;
  if (b < 0 || b >= v.batch() || h < 0 || h >= v.heads() || i < 0 || i >= v.seqlen_q || j < 0 || j >= v.seqlen_k) {
    throw_invalid("element (batch ", b, ", head ", h, ", row ", i, ", key ", j, ") is outside of the mask [", v.batch(), ", ", v.heads(),
                  ", ", v.seqlen_q, ", ", v.seqlen_k, "]");
  }
  if (!rules::is_visible(columns(v, b, h), static_cast<int32_t>(i), static_cast<int32_t>(j))) return false;
  const uint8_t* keep = flashmask::block_mask(v, b, h);
  return !keep || keep[(i / kBlockMaskSize) * ceil_div(v.seqlen_k, kBlockMaskSize) + j / kBlockMaskSize] != 0;
}

Mask Mask::with_q_offset(int64_t q_offset) const {
  auto data = std::make_shared<Data>(*data_);
  data->q_offset = q_offset;
  data->finish();
  Mask mask = *this;
  mask.data_ = std::move(data);
  return mask;
}

Mask Mask::with_band(const Band& band) const {
  auto data = std::make_shared<Data>(*data_);
  data->band = band;
  data->finish();
  Mask mask = *this;
  mask.data_ = std::move(data);
  return mask;
}

Mask Mask::with_block_mask(std::vector<uint8_t> keep, int64_t batch, int64_t heads) const {
  auto data = std::make_shared<Data>(*data_);
  data->block = make_block_mask(data->seqlen_q, data->seqlen_k, batch, heads, std::move(keep));
  check_broadcast(data->bounds->batch, data->block->batch, data->bounds->heads, data->block->heads);
  data->finish();
  Mask mask = *this;
  mask.data_ = std::move(data);
  return mask;
}

std::vector<Finding> Mask::validate(int64_t limit) const {
  std::vector<Finding> findings;
  const Bounds& bounds = *data_->bounds;
  const auto check = [&](const char* begin_name, const std::vector<int32_t>& begin, const char* end_name, const std::vector<int32_t>& end) {
    const std::size_t n = std::max(begin.size(), end.size());
    for (std::size_t at = 0; at < n && static_cast<int64_t>(findings.size()) < limit; ++at) {
      const auto report = [&](std::string what) {
        const int64_t j = static_cast<int64_t>(at) % seqlen_k(), bh = static_cast<int64_t>(at) / seqlen_k();
        findings.push_back({bh / bounds.heads, bh % bounds.heads, j, std::move(what)});
      };
      const auto outside = [&](int32_t row) { return row < 0 || row > seqlen_q(); };
      if (!begin.empty() && outside(begin[at])) {
        report(message(begin_name, " is ", begin[at], ", outside of [0, ", seqlen_q(), "]: clamped"));
      } else if (!end.empty() && outside(end[at])) {
        report(message(end_name, " is ", end[at], ", outside of [0, ", seqlen_q(), "]: clamped"));
      } else if (!begin.empty() && !end.empty() && begin[at] > end[at]) {
        report(message(begin_name, " ", begin[at], " is greater than ", end_name, " ", end[at], ": an empty interval"));
      }
    }
  };
  check("LTS", bounds.lts, "LTE", bounds.lte);
  check("UTS", bounds.uts, "UTE", bounds.ute);
  return findings;
}

}  // namespace flashmask
