// SPDX-License-Identifier: Apache-2.0
#include "flashmask/mask.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "common/arithmetic.h"
#include "common/host_memory.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "mask/content_hash.h"
#include "mask/host_only.h"
#include "mask/interval_lists.h"
#include "mask/mask_tensors.h"
#include "mask/view.h"

namespace flashmask {
namespace {

/// The interval vectors, shared between masks that differ only in band or block mask.
struct Bounds {
  int64_t batch = 1, heads = 1;
  std::vector<int32_t> lts, lte, uts, ute;
  std::vector<int32_t> column_ptr, intervals;  ///< in place of these
  uint64_t hash = 0;
  /// On a device: the caller's vectors, in place of the members above.
  std::optional<MaskView> borrowed{};
};

template <typename T>
uint64_t elements_hash(content_hash::Source source, const std::vector<T>& values) {
  return content_hash::sum(source, static_cast<int64_t>(values.size()),
                           [&values](int64_t at) { return values[static_cast<std::size_t>(at)]; });
}

void check_count(const char* argument, int64_t count) {
  if (count < 1) throw_invalid(argument, " is ", count, "; it must be at least 1 (1 is broadcast)");
}

void check_size(const char* argument, std::size_t got, std::optional<int64_t> expected, const char* shape) {
  if (got == 0 && (!expected || *expected != 0)) return;  // absent
  if (!expected || static_cast<int64_t>(got) != *expected) {
    throw_invalid(argument, " has ", got, " elements; ", shape, " needs ",
                  expected ? message(*expected) : "more than 2^63", " (or 0: absent)");
  }
}

const int32_t* data_or_null(const std::vector<int32_t>& v) { return v.empty() ? nullptr : v.data(); }

}  // namespace

struct Mask::BlockMask {
  int64_t batch = 1, heads = 1;
  std::vector<uint8_t> keep;
  uint64_t hash = 0;
  /// On a device: the caller's, in place of `keep`.
  const uint8_t* borrowed = nullptr;
  Device device{};

  static std::shared_ptr<const BlockMask> make(int64_t seqlen_q, int64_t seqlen_k, int64_t batch, int64_t heads,
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
    block->hash = elements_hash(content_hash::Source::kBlockMask, block->keep);
    return block;
  }
  /// The caller's, on a device.
  static std::shared_ptr<const BlockMask> borrow(const TensorView& t) {
    auto block = std::make_shared<BlockMask>();
    if (t.num_elements() == 0) return block;
    block->batch = t.shape[0];
    block->heads = t.shape[1];
    block->borrowed = static_cast<const uint8_t*>(t.data);
    block->device = t.device;
    return block;
  }
};

/// Positions of a mask; none, in one batch entry, if it has no elements or no positions.
struct Mask::Positions {
  int64_t q_batch = 1, k_batch = 1;
  std::vector<int32_t> q, k;
  uint64_t hash = 0;
  /// On a device: the caller's, in place of q and k.
  const int32_t *borrowed_q = nullptr, *borrowed_k = nullptr;
  Device device{};

  bool is_set() const { return borrowed_q || !q.empty(); }

  static std::shared_ptr<const Positions> make(int64_t seqlen_q, int64_t seqlen_k, int64_t batch,
                                               std::vector<int32_t> q, std::vector<int32_t> k) {
    check_count("position_batch", batch);
    if (q.empty() && k.empty()) return std::make_shared<Positions>();
    for (const auto& [argument, vector, seqlen, shape] :
         {std::tuple{"q_pos", &q, seqlen_q, "[position_batch, seqlen_q]"},
          {"k_pos", &k, seqlen_k, "[position_batch, seqlen_k]"}}) {
      if (vector->empty() && seqlen > 0)
        throw_invalid(argument, " is absent and ", vector == &q ? "k_pos" : "q_pos",
                      " is given; positions of rows and of keys come together");
      check_size(argument, vector->size(), checked_product(batch, seqlen), shape);
    }
    return copied(batch, batch, std::move(q), std::move(k));
  }
  static std::shared_ptr<const Positions> copied(int64_t q_batch, int64_t k_batch, std::vector<int32_t> q,
                                                 std::vector<int32_t> k) {
    auto positions = std::make_shared<Positions>();
    if (q.empty() || k.empty()) return positions;
    using enum content_hash::Source;
    positions->hash = elements_hash(kQPos, q) + elements_hash(kKPos, k);
    positions->q_batch = q_batch;
    positions->k_batch = k_batch;
    positions->q = std::move(q);
    positions->k = std::move(k);
    return positions;
  }
  /// The caller's, on a device.
  static std::shared_ptr<const Positions> borrow(const MaskView& view) {
    auto positions = std::make_shared<Positions>();
    positions->q_batch = view.q_pos_batch;
    positions->k_batch = view.k_pos_batch;
    positions->borrowed_q = view.q_pos;
    positions->borrowed_k = view.k_pos;
    positions->device = view.device;
    return positions;
  }
};

struct Mask::Data {
  int64_t seqlen_q = 0, seqlen_k = 0;
  Band band;
  int64_t q_offset = 0;
  std::shared_ptr<const Bounds> bounds;
  std::shared_ptr<const BlockMask> block;
  std::shared_ptr<const Positions> positions = std::make_shared<Positions>();
  MaskView view;

  /// Checks q_offset and where everything lies, and fills `view` from the rest.
  void finish() {
    view = {};
    view.seqlen_q = seqlen_q;
    view.seqlen_k = seqlen_k;
    view.bounds_batch = bounds->batch;
    view.bounds_heads = bounds->heads;
    view.block_batch = block->batch;
    view.block_heads = block->heads;
    set_positions();
    set_band(view, band, q_offset);
    check_broadcast(view);
    set_vectors();
    view.block_mask = block->borrowed ? block->borrowed : block->keep.empty() ? nullptr : block->keep.data();
    if (block->borrowed) view.device = block->device;
    if (positions->borrowed_q) view.device = positions->device;
    if (view.device.kind == Device::Kind::kCpu)
      view.content_hash = content_hash::finish(content_hash::frame(view), bounds->hash + block->hash + positions->hash);
  }

  /// In place of q_offset or of other positions.
  void set(std::shared_ptr<const Positions> other) {
    if (other->is_set()) {
      q_offset = 0;
    } else if (positions->is_set()) {
      q_offset = seqlen_k - seqlen_q;
    }
    positions = std::move(other);
  }

  /// The mask with other data.
  template <typename Change>
  static Mask changed(Mask mask, Change&& change) {
    auto data = std::make_shared<Data>(*mask.data_);
    change(*data);
    data->finish();
    mask.data_ = std::move(data);
    return mask;
  }

  void check_positions_device() const;

  void set_positions() {
    view.has_positions = positions->is_set();
    view.q_pos_batch = positions->q_batch;
    view.k_pos_batch = positions->k_batch;
    view.q_pos = positions->borrowed_q ? positions->borrowed_q : data_or_null(positions->q);
    view.k_pos = positions->borrowed_k ? positions->borrowed_k : data_or_null(positions->k);
  }

  void set_vectors() {
    if (!bounds->borrowed) {
      view.lts = data_or_null(bounds->lts);
      view.lte = data_or_null(bounds->lte);
      view.uts = data_or_null(bounds->uts);
      view.ute = data_or_null(bounds->ute);
      view.column_ptr = data_or_null(bounds->column_ptr);
      view.intervals = data_or_null(bounds->intervals);
      view.listed_intervals = static_cast<int64_t>(bounds->intervals.size() / 2);
      return;
    }
    const MaskView& from = *bounds->borrowed;
    view.lts = from.lts;
    view.lte = from.lte;
    view.uts = from.uts;
    view.ute = from.ute;
    view.bounds_stride = from.bounds_stride;
    view.column_ptr = from.column_ptr;
    view.intervals = from.intervals;
    view.listed_intervals = from.listed_intervals;
    view.device = from.device;
  }
};

namespace {

/// The elements of a block mask in host memory as bytes.
std::vector<uint8_t> read_block_mask(const TensorView& t) {
  std::vector<uint8_t> keep = room_for<uint8_t>("block_mask", t.num_elements());
  for (int64_t b = 0; b < t.shape[0] && t.num_elements() > 0; ++b) {
    for (int64_t h = 0; h < t.shape[1]; ++h) {
      for (int64_t r = 0; r < t.shape[2]; ++r) {
        for (int64_t c = 0; c < t.shape[3]; ++c) {
          const int64_t at = b * t.stride[0] + h * t.stride[1] + r * t.stride[2] + c * t.stride[3];
          keep.push_back(t.dtype == DataType::kInt32 ? static_cast<const int32_t*>(t.data)[at] != 0
                                                     : static_cast<const uint8_t*>(t.data)[at] != 0);
        }
      }
    }
  }
  return keep;
}

bool has_vectors(const MaskView& view) { return view.lts || view.lte || view.uts || view.ute || view.column_ptr; }

/// The kernels read all contents, so all must be where the call is: `added` ("block mask") beside what `view` has.
void check_same_device(const MaskView& view, const char* added, const Device& of_added) {
  if (!has_contents(view) || view.device == of_added) return;
  const char* const has = has_vectors(view) ? "vectors are" : view.block_mask ? "block mask is" : "positions are";
  throw_invalid("the mask's ", has, " on ", describe(view.device), " and its ", added, " on ", describe(of_added),
                "; copy one of them to where the other is");
}

/// The elements of positions [batch, seqlen] in host memory.
std::vector<int32_t> read_positions(const char* argument, const TensorView& t) {
  std::vector<int32_t> positions = room_for<int32_t>(argument, t.num_elements());
  for (int64_t b = 0; b < t.shape[0]; ++b) {
    for (int64_t n = 0; n < t.shape[1]; ++n)
      positions.push_back(static_cast<const int32_t*>(t.data)[b * t.stride[0] + n * t.stride[1]]);
  }
  return positions;
}

}  // namespace

void Mask::Data::check_positions_device() const {
  MaskView others = view;
  others.q_pos = nullptr;
  if (positions->is_set()) check_same_device(others, "positions", positions->device);
}

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
  for (auto [argument, vector] :
       {std::pair{"lts", &parts.lts}, {"lte", &parts.lte}, {"uts", &parts.uts}, {"ute", &parts.ute}}) {
    check_size(argument, vector->size(), expected, "[batch, heads, seqlen_k]");
  }
  settle_interval_lists(parts);
  auto bounds = std::make_shared<Bounds>();
  const bool any =
      !parts.lts.empty() || !parts.lte.empty() || !parts.uts.empty() || !parts.ute.empty() || !parts.column_ptr.empty();
  bounds->batch = any ? parts.batch : 1;
  bounds->heads = any ? parts.heads : 1;
  bounds->lts = std::move(parts.lts);
  bounds->lte = std::move(parts.lte);
  bounds->uts = std::move(parts.uts);
  bounds->ute = std::move(parts.ute);
  bounds->column_ptr = std::move(parts.column_ptr);
  bounds->intervals = std::move(parts.intervals);
  using enum content_hash::Source;
  bounds->hash = elements_hash(kLts, bounds->lts) + elements_hash(kLte, bounds->lte) +
                 elements_hash(kUts, bounds->uts) + elements_hash(kUte, bounds->ute) +
                 content_hash::of_lists(bounds->column_ptr, bounds->intervals);

  auto data = std::make_shared<Data>();
  data->seqlen_q = parts.seqlen_q;
  data->seqlen_k = parts.seqlen_k;
  data->band = parts.band;
  data->q_offset = parts.q_offset.value_or(parts.seqlen_k - parts.seqlen_q);
  data->block = BlockMask::make(parts.seqlen_q, parts.seqlen_k, parts.block_batch, parts.block_heads,
                                std::move(parts.block_mask));
  data->bounds = std::move(bounds);
  const bool positions = !parts.q_pos.empty() || !parts.k_pos.empty();
  if (positions && parts.q_offset)
    throw_invalid("q_offset is ", *parts.q_offset, "; it must be absent with q_pos and k_pos, which take its place");
  data->set(Positions::make(parts.seqlen_q, parts.seqlen_k, parts.position_batch, std::move(parts.q_pos),
                            std::move(parts.k_pos)));
  data->finish();
  data_ = std::move(data);
}

Mask::Mask(const MaskView& vectors, const Band& band, std::optional<int64_t> q_offset) {
  auto bounds = std::make_shared<Bounds>();
  bounds->batch = vectors.bounds_batch;
  bounds->heads = vectors.bounds_heads;
  if (has_contents(vectors)) bounds->borrowed = vectors;
  auto data = std::make_shared<Data>();
  data->seqlen_q = vectors.seqlen_q;
  data->seqlen_k = vectors.seqlen_k;
  data->band = band;
  data->q_offset = q_offset.value_or(vectors.seqlen_k - vectors.seqlen_q);
  data->bounds = std::move(bounds);
  data->block = std::make_shared<BlockMask>();
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
  if (v.column_ptr) require_host(v, "Mask::num_intervals");
  const std::vector<int32_t>& ptr = data_->bounds->column_ptr;
  int32_t most = 0;  // from one entry's end to the next one's beginning it is 0
  for (std::size_t n = 1; n < ptr.size(); ++n) most = std::max(most, ptr[n] - ptr[n - 1]);
  if (most > 0) return most;
  return (v.lts || v.lte ? 1 : 0) + (v.uts || v.ute ? 1 : 0);
}
bool Mask::has_interval_lists() const { return data_->view.column_ptr != nullptr; }
bool Mask::has_block_mask() const { return data_->view.block_mask != nullptr; }
bool Mask::has_positions() const { return data_->view.has_positions; }
std::span<const int32_t> Mask::lts() const {
  require_host(data_->view, "Mask::lts");
  return data_->bounds->lts;
}
std::span<const int32_t> Mask::lte() const {
  require_host(data_->view, "Mask::lte");
  return data_->bounds->lte;
}
std::span<const int32_t> Mask::uts() const {
  require_host(data_->view, "Mask::uts");
  return data_->bounds->uts;
}
std::span<const int32_t> Mask::ute() const {
  require_host(data_->view, "Mask::ute");
  return data_->bounds->ute;
}
std::span<const int32_t> Mask::column_ptr() const {
  require_host(data_->view, "Mask::column_ptr");
  return data_->bounds->column_ptr;
}
std::span<const int32_t> Mask::intervals() const {
  require_host(data_->view, "Mask::intervals");
  return data_->bounds->intervals;
}
std::span<const uint8_t> Mask::block_mask() const {
  require_host(data_->view, "Mask::block_mask");
  return data_->block->keep;
}
std::span<const int32_t> Mask::q_pos() const {
  require_host(data_->view, "Mask::q_pos");
  return data_->positions->q;
}
std::span<const int32_t> Mask::k_pos() const {
  require_host(data_->view, "Mask::k_pos");
  return data_->positions->k;
}
const MaskView& Mask::view() const { return data_->view; }
Device Mask::device() const { return data_->view.device; }

int64_t Mask::memory_bytes() const {
  const Bounds& b = *data_->bounds;
  const Positions& p = *data_->positions;
  return static_cast<int64_t>((b.lts.size() + b.lte.size() + b.uts.size() + b.ute.size() + b.column_ptr.size() +
                               b.intervals.size() + p.q.size() + p.k.size()) *
                                  sizeof(int32_t) +
                              data_->block->keep.size());
}

bool Mask::visible(int64_t b, int64_t h, int64_t i, int64_t j) const {
  const MaskView& v = data_->view;
  require_host(v, "Mask::visible");
  if (b < 0 || b >= v.batch() || h < 0 || h >= v.heads() || i < 0 || i >= v.seqlen_q || j < 0 || j >= v.seqlen_k) {
    throw_invalid("element (batch ", b, ", head ", h, ", row ", i, ", key ", j, ") is outside of the mask [", v.batch(),
                  ", ", v.heads(), ", ", v.seqlen_q, ", ", v.seqlen_k, "]");
  }
  return is_visible(v, b, h, i, j);
}

Mask Mask::with_q_offset(int64_t q_offset) const {
  if (has_positions())
    throw_invalid("q_offset is ", q_offset, "; the mask has positions, which take its place: remove or change these");
  return Data::changed(*this, [&](Data& data) { data.q_offset = q_offset; });
}

Mask Mask::with_band(const Band& band) const {
  return Data::changed(*this, [&](Data& data) { data.band = band; });
}

Mask Mask::with_block_mask(std::vector<uint8_t> keep, int64_t batch, int64_t heads) const {
  return with_block(BlockMask::make(seqlen_q(), seqlen_k(), batch, heads, std::move(keep)));
}

Mask Mask::with_block_tensor(const TensorView& keep) const {
  check_block_mask(keep, seqlen_q(), seqlen_k());
  check_data("block_mask", keep);
  MaskView changed = view();
  changed.block_batch = keep.shape[0];
  changed.block_heads = keep.shape[1];
  check_broadcast(changed);  // before it is read
  if (keep.device.kind == Device::Kind::kCpu)
    return with_block_mask(read_block_mask(keep), keep.shape[0], keep.shape[1]);
  return with_block(BlockMask::borrow(keep));
}

Mask Mask::with_block(std::shared_ptr<const BlockMask> block) const {
  return Data::changed(*this, [&](Data& data) {
    MaskView others = data.view;
    others.block_mask = nullptr;
    if (block->borrowed || !block->keep.empty()) check_same_device(others, "block mask", block->device);
    data.block = std::move(block);
  });
}

Mask Mask::with_positions(std::vector<int32_t> q_pos, std::vector<int32_t> k_pos, int64_t batch) const {
  return Data::changed(*this, [&](Data& data) {
    data.set(Positions::make(seqlen_q(), seqlen_k(), batch, std::move(q_pos), std::move(k_pos)));
    data.check_positions_device();
  });
}

Mask Mask::with_position_tensors(const TensorView& q_pos, const TensorView& k_pos) const {
  const MaskTensors tensors{.seqlen_q = seqlen_q(), .seqlen_k = seqlen_k(), .q_pos = q_pos, .k_pos = k_pos};
  const MaskView view = view_of(tensors);
  check_contents(tensors);
  return Data::changed(*this, [&](Data& data) {
    if (q_pos.device.kind != Device::Kind::kCpu) {
      data.set(view.q_pos ? Positions::borrow(view) : std::make_shared<Positions>());
    } else {
      data.set(Positions::copied(q_pos.shape[0], k_pos.shape[0], read_positions("q_pos", q_pos),
                                 read_positions("k_pos", k_pos)));
    }
    data.check_positions_device();
  });
}

std::vector<Finding> Mask::validate(int64_t limit) const {
  require_host(data_->view, "Mask::validate");
  std::vector<Finding> findings;
  const Bounds& bounds = *data_->bounds;
  const auto check = [&](const char* begin_name, const std::vector<int32_t>& begin, const char* end_name,
                         const std::vector<int32_t>& end) {
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
