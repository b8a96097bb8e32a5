// SPDX-License-Identifier: Apache-2.0

// A mask of any parts: refused if and only if the contract refuses it; otherwise its elements, tile classes and plan
// match a dense matrix by the tests' own rule, and attention under it is close to the oracle under that matrix and
// equal, bit for bit, to a run that is given the matrix.

#include "flashmask/mask.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "attention/call.h"
#include "flashmask/plan.h"
#include "flashmask/tiles.h"
#include "fuzz/byte_reader.h"
#include "fuzz/check.h"
#include "support/brute_force.h"
#include "support/independent_rule.h"

namespace flashmask::fuzz {
namespace {

using test::Call;
using test::Dense;

/// The parts of a mask and the sizes of a call that it goes with.
struct Drawn {
  MaskParts parts;
  int64_t batch = 1, heads_q = 1, heads_kv = 1;
  bool backward = false, with_plan = false;
  TileShape shape;
};

int64_t draw_size(ByteReader& bytes) {
  const uint8_t size = bytes.byte();
  return size < 128 ? size % 24 : size;  // small ones, and those of several granules
}

template <typename Element, typename Draw>
std::vector<Element> draw_vector(int64_t size, Draw&& draw) {
  std::vector<Element> values(static_cast<std::size_t>(size));
  for (Element& value : values) value = static_cast<Element>(draw());
  return values;
}

/// Interval lists of up to seven in each column.
void draw_lists(ByteReader& bytes, MaskParts& parts) {
  const auto end_column = [&] { parts.column_ptr.push_back(static_cast<int32_t>(parts.intervals.size() / 2)); };
  for (int64_t bh = 0; bh < parts.batch * parts.heads; ++bh) {
    end_column();
    for (int64_t j = 0; j < parts.seqlen_k; ++j, end_column()) {
      for (int n = bytes.byte() % 8; n > 0; --n) {
        parts.intervals.push_back(bytes.bound());
        parts.intervals.push_back(bytes.bound());
      }
    }
  }
}

/// Draws parts whose sizes and vectors fit together. Band and q_offset may still be out of range.
Drawn draw_fitting(ByteReader& bytes) {
  Drawn drawn;
  MaskParts& parts = drawn.parts;
  const uint8_t present = bytes.byte(), sizes = bytes.byte();
  drawn.batch = 1 + (sizes & 1);
  drawn.heads_kv = 1 + (sizes >> 1 & 1);
  drawn.heads_q = drawn.heads_kv * (1 + (sizes >> 2 & 1));
  drawn.with_plan = sizes >> 3 & 1;
  drawn.backward = (sizes >> 4 & 3) == 0;
  parts.seqlen_q = draw_size(bytes);
  parts.seqlen_k = draw_size(bytes);
  const int64_t batches[] = {1, drawn.batch}, heads[] = {1, drawn.heads_kv, drawn.heads_q};
  parts.batch = bytes.one_of(batches);
  parts.heads = bytes.one_of(heads);
  parts.block_batch = bytes.one_of(batches);
  parts.block_heads = bytes.one_of(heads);
  if (present & 1) parts.band.lo = bytes.position();
  if (present & 2) parts.band.hi = bytes.position();
  if (present & 4) parts.q_offset = bytes.position();
  drawn.shape = {1 + bytes.byte() % 160, 1 + bytes.byte() % 160};
  std::vector<int32_t>* vectors[] = {&parts.lts, &parts.lte, &parts.uts, &parts.ute};
  for (int n = 0; n < 4; ++n) {
    if (present & (8 << n))
      *vectors[n] = draw_vector<int32_t>(parts.batch * parts.heads * parts.seqlen_k, [&] { return bytes.bound(); });
  }
  const int64_t blocks = (parts.seqlen_q + 127) / 128 * ((parts.seqlen_k + 127) / 128);
  if (present & 128)
    parts.block_mask =
        draw_vector<uint8_t>(parts.block_batch * parts.block_heads * blocks, [&] { return bytes.byte() % 3; });
  constexpr int kVectors = 8 | 16 | 32 | 64;
  if (!(present & kVectors) && bytes.byte() % 2 == 1) draw_lists(bytes, parts);
  return drawn;
}

/// Any sizes, whether or not the vectors fit.
MaskParts draw_any(ByteReader& bytes) {
  MaskParts parts;
  const uint8_t present = bytes.byte();
  const auto count = [&] { return bytes.flip() ? 1 + bytes.byte() % 3 : bytes.position(); };
  parts.seqlen_q = bytes.position();
  parts.seqlen_k = bytes.position();
  parts.batch = count();
  parts.heads = count();
  parts.block_batch = count();
  parts.block_heads = count();
  if (present & 1) parts.band.lo = bytes.position();
  if (present & 2) parts.band.hi = bytes.position();
  if (present & 4) parts.q_offset = bytes.position();
  std::vector<int32_t>* vectors[] = {&parts.lts, &parts.lte, &parts.uts, &parts.ute};
  for (int n = 0; n < 4; ++n) {
    if (present & (8 << n)) *vectors[n] = draw_vector<int32_t>(bytes.byte(), [&] { return bytes.bound(); });
  }
  if (present & 128) parts.block_mask = draw_vector<uint8_t>(bytes.byte() % 16, [&] { return bytes.byte() % 3; });
  return parts;
}

// --- What the contract accepts ---------------------------------------------------------------------

using Wide = __int128;

/// Absent, or of exactly this many elements.
template <typename Element>
bool fits(const std::vector<Element>& vector, std::optional<Wide> size) {
  return vector.empty() || (size && static_cast<Wide>(vector.size()) == *size);
}

/// The product of non-negative numbers; nothing beyond 2^62, where no vector is that long.
std::optional<Wide> product(std::initializer_list<int64_t> factors) {
  if (std::find(factors.begin(), factors.end(), 0) != factors.end()) return 0;
  Wide all = 1;
  for (const int64_t factor : factors) {
    all *= factor;
    if (all > Wide{1} << 62) return std::nullopt;
  }
  return all;
}

/// draw_fitting draws lists that fit, draw_any none.
bool is_valid(const MaskParts& parts) {
  for (const int64_t n : {parts.seqlen_q, parts.seqlen_k})
    if (n < 0 || n > kMaxSeqlen) return false;
  for (const int64_t n : {parts.batch, parts.heads, parts.block_batch, parts.block_heads})
    if (n < 1) return false;
  if (parts.q_offset && std::abs(static_cast<double>(*parts.q_offset)) > 0x1p40) return false;
  bool vectors = false;
  for (const auto* vector : {&parts.lts, &parts.lte, &parts.uts, &parts.ute}) {
    if (!fits(*vector, product({parts.batch, parts.heads, parts.seqlen_k}))) return false;
    vectors |= !vector->empty();
  }
  const int64_t rows = (parts.seqlen_q + 127) / 128, keys = (parts.seqlen_k + 127) / 128;
  if (!fits(parts.block_mask, product({parts.block_batch, parts.block_heads, rows, keys}))) return false;
  vectors |= !parts.column_ptr.empty();
  if (!vectors || parts.block_mask.empty()) return true;
  const auto [fewer, more] = std::minmax(parts.heads, parts.block_heads);
  return (parts.batch == parts.block_batch || parts.batch == 1 || parts.block_batch == 1) && more % fewer == 0;
}

std::optional<Mask> make_mask(const MaskParts& parts) {
  std::optional<Mask> mask;
  const bool made = succeeds([&] { mask.emplace(parts); });
  require(made == is_valid(parts), "a mask is refused if and only if the contract refuses it");
  return mask;
}

// --- Elements, tiles and plan ----------------------------------------------------------------------

/// Checks the corners alone, as the mask may be long.
void check_corners(const Mask& mask, const MaskParts& parts) {
  for (const int64_t i : {int64_t{0}, parts.seqlen_q / 2, parts.seqlen_q - 1}) {
    for (const int64_t j : {int64_t{0}, parts.seqlen_k / 2, parts.seqlen_k - 1}) {
      if (i >= 0 && i < parts.seqlen_q && j >= 0 && j < parts.seqlen_k)
        require(mask.visible(0, 0, i, j) == test::sees(parts, 0, 0, 0, i, j), "a corner is as the rule says");
    }
  }
}

void check_classes(const Mask& mask, int64_t m, const Dense& dense, TileShape shape) {
  const TileGrid grid = classify_tiles(mask, m / mask.heads(), m % mask.heads(), shape);
  require(grid.classes == test::classes_of(dense, shape), "tile classes are those of the dense matrix");
}

void check_plan(const PlanView& plan, int64_t m, const Dense& dense) {
  const PlanLayout& layout = plan.layout();
  for (int64_t r = 0; r < layout.row_granules; ++r) {
    int32_t live = 0;
    for (int64_t c = 0; c < layout.key_blocks; ++c) {
      const TileClass expected = test::class_of(dense, {kGranuleRows, kGranuleKeys}, r, c);
      require(plan.granule(m, r, c) == expected, "a granule of the plan is that of the dense matrix");
      const bool in_column = (plan.key_live(m, c)[static_cast<std::size_t>(r / 64)] >> (r % 64) & 1) != 0;
      require(in_column == (expected != TileClass::kEmpty), "rows and columns of the plan agree");
      live += expected != TileClass::kEmpty;
    }
    require(plan.row_counts(m)[static_cast<std::size_t>(r)] == live, "the plan counts its live granules");
  }
}

void check_structure(const Mask& mask, const PlanView& plan, const Drawn& drawn) {
  const std::vector<uint8_t> visible = test::dense_by_rule(drawn.parts);
  require(to_dense(mask) == visible, "the mask's elements are as the rule says");
  for (int64_t m = 0; m < mask.batch() * mask.heads(); ++m) {
    const Dense dense = test::matrix(visible, m, mask.seqlen_q(), mask.seqlen_k());
    check_classes(mask, m, dense, {kGranuleRows, kGranuleKeys});
    check_classes(mask, m, dense, drawn.shape);
    check_plan(plan, m, dense);
  }
}

/// Reads the dense matrix back, unchanged.
void check_read_back(const Mask& mask) {
  const std::vector<uint8_t> visible = to_dense(mask);
  const auto view = TensorView::contiguous(visible.data(), DataType::kUInt8,
                                           {mask.batch(), mask.heads(), mask.seqlen_q(), mask.seqlen_k()});
  // Equal matrices may come back as one, which is broadcast.
  require(test::dense_by_rule(test::parts_of(from_dense(view)), mask.batch(), mask.heads()) == visible,
          "a mask of a dense matrix says what the matrix says");
}

// --- Attention -------------------------------------------------------------------------------------

template <typename Real>
void run(Call<Real>& call, bool backward) {
  call.forward();
  if (backward) call.backward();
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

/// Limits errors by the rule of the exhaustive tests: a sum can cancel, so the yardstick is the largest value.
void require_close(const std::vector<float>& got, const std::vector<double>& want, const char* what) {
  require(test::max_error(got, want) <= 1e-5 * std::max(1.0, test::max_value(want)), what);
}

void check_against(const Call<float>& call, const Call<double>& oracle, bool backward) {
  require_close(call.out, oracle.out, "out is close to the oracle's");
  require_close(call.lse, oracle.lse, "lse is close to the oracle's");
  if (!backward) return;
  require_close(call.dq, oracle.dq, "dq is close to the oracle's");
  require_close(call.dk, oracle.dk, "dk is close to the oracle's");
  require_close(call.dv, oracle.dv, "dv is close to the oracle's");
}

void check_bits(const Call<float>& call, const Call<float>& dense, bool backward) {
  require(same_bits(call.out, dense.out) && same_bits(call.lse, dense.lse),
          "skipping tiles changes no bit of the forward");
  if (!backward) return;
  require(same_bits(call.dq, dense.dq) && same_bits(call.dk, dense.dk) && same_bits(call.dv, dense.dv),
          "skipping tiles changes no bit of the backward");
}

void check_attention(const Mask& mask, const PlanView& plan, const Drawn& drawn) {
  const std::vector<uint8_t> visible = test::dense_by_rule(drawn.parts, drawn.batch, drawn.heads_q);
  Call<float> call({.batch = drawn.batch,
                    .seqlen_q = drawn.parts.seqlen_q,
                    .seqlen_k = drawn.parts.seqlen_k,
                    .heads_q = drawn.heads_q,
                    .heads_kv = drawn.heads_kv,
                    .head_dim = 3,
                    .head_dim_v = 2});
  call.options.backend = "cpu";
  call.options.threads = 1;
  Call<float> dense = call;
  dense.dense = visible;
  dense.dense_batch = drawn.batch;
  dense.dense_heads = drawn.heads_q;
  run(dense, drawn.backward);
  call.mask = mask;
  if (drawn.with_plan) call.plan = plan;
  run(call, drawn.backward);
  check_bits(call, dense, drawn.backward);
  Call<double> oracle = call.oracle(visible, drawn.batch, drawn.heads_q);
  run(oracle, drawn.backward);
  check_against(call, oracle, drawn.backward);
}

void check(std::span<const uint8_t> input) {
  ByteReader bytes(input);
  if (bytes.byte() % 4 == 0) {
    const MaskParts parts = draw_any(bytes);
    if (const std::optional<Mask> mask = make_mask(parts)) check_corners(*mask, parts);
    return;
  }
  const Drawn drawn = draw_fitting(bytes);
  const std::optional<Mask> mask = make_mask(drawn.parts);
  if (!mask) return;
  const Plan plan(*mask);
  check_structure(*mask, plan.view(), drawn);
  check_read_back(*mask);
  check_attention(*mask, plan.view(), drawn);
}

}  // namespace
}  // namespace flashmask::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  flashmask::fuzz::check({data, size});
  return 0;
}
