// SPDX-License-Identifier: Apache-2.0
#include "verify/random_cases.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "flashmask/status.h"
#include "verify/features.h"
#include "verify/random.h"

namespace flashmask::verify {
namespace {

/// Multiply-adds of the forward's products that a case may take.
constexpr int64_t kLargestCost = 24'000'000;

template <typename T, std::size_t N>
T pick(Random& random, const std::array<T, N>& values) {
  return values[static_cast<std::size_t>(random.integer(0, static_cast<int64_t>(N) - 1))];
}

/// True in `percent` of the draws.
bool chance(Random& random, int64_t percent) { return random.integer(0, 99) < percent; }

/// Short ones, ones around the edges of tiles, any up to 600, and now and then a longer or an empty one.
int64_t draw_length(Random& random) {
  const int64_t kind = random.integer(0, 99);
  if (kind < 2) return 0;
  if (kind < 25) return random.integer(1, 40);
  if (kind < 60) return 64 * random.integer(1, 8) + random.integer(-2, 2);
  if (kind < 92) return random.integer(1, 600);
  return random.integer(600, 1100);
}

int64_t draw_head_dim(Random& random) {
  constexpr std::array<int64_t, 12> kCommon{8, 16, 24, 32, 40, 64, 72, 80, 96, 128, 192, 256};
  return random.flip() ? pick(random, kCommon) : random.integer(8, 256);
}

void draw_shape(Random& random, Case& c) {
  c.seqlen_q = draw_length(random);
  c.seqlen_k = chance(random, 40) ? c.seqlen_q : draw_length(random);
  c.batch = random.integer(1, 4);
  c.heads_kv = random.integer(1, 4);
  c.heads_q = c.heads_kv * pick(random, std::array<int64_t, 5>{1, 1, 2, 3, 7});
  c.head_dim = draw_head_dim(random);
  c.head_dim_v = chance(random, 60) ? c.head_dim : draw_head_dim(random);
}

/// Fewer batch entries, then fewer heads, then shorter sequences, until the case is small enough.
void shrink(Case& c) {
  while (c.cost() > kLargestCost) {
    if (c.batch > 1) {
      --c.batch;
    } else if (c.heads_kv > 1) {
      c.heads_q -= c.heads_q / c.heads_kv;
      --c.heads_kv;
    } else if (c.heads_q > 2) {
      c.heads_q = 2;
    } else {
      c.seqlen_q = c.seqlen_q * 3 / 4;
      c.seqlen_k = c.seqlen_k * 3 / 4;
    }
  }
}

int64_t draw_reach(Random& random, int64_t seqlen) {
  return chance(random, 20) ? -1 : random.integer(0, std::max<int64_t>(seqlen / 2, 1));
}

void draw_mask(Random& random, Case& c) {
  c.mask_heads = pick(random, std::array{MaskHeads::kOne, MaskHeads::kKv, MaskHeads::kQuery});
  c.mask_per_batch = random.flip();
  c.block_mask = pick(random, std::array{BlockMask::kNone, BlockMask::kNone, BlockMask::kShared, BlockMask::kEach});
  if (chance(random, 20)) c.window = Window{draw_reach(random, c.seqlen_k), draw_reach(random, c.seqlen_k)};
  if (chance(random, 20)) c.q_offset = random.integer(-c.seqlen_q / 2, c.seqlen_k);
}

void draw_options(Random& random, Case& c) {
  c.dtype = pick(random, std::array{DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16});
  c.layout = pick(random, std::array{Layout::kBshd, Layout::kBhsd, Layout::kPadded});
  c.expanded_dout = chance(random, 15);
  c.dlse = random.flip();
  c.ready_plan = random.flip();
  // Not far from the usual: much larger scales saturate the softmax, and rounding then is all that is left of dS.
  if (chance(random, 25)) c.given_scale = (0.4 + random.real()) / std::sqrt(static_cast<double>(c.head_dim));
}

void draw_features(Random& random, const std::vector<std::string>& refused, Case& c) {
  for (const CaseFeature& feature : case_features()) {
    if ((feature.fits && !feature.fits(c)) || !chance(random, feature.percent)) continue;
    CaseFeatures drawn = c.features;
    feature.draw(random, drawn);
    if (!asks_for_any(drawn, refused)) c.features = drawn;
  }
}

}  // namespace

Case random_case(uint64_t seed, int64_t index, std::span<const std::string> families,
                 const std::vector<std::string>& refused) {
  if (families.empty()) throw Error(ErrorCode::kInvalidArgument, "no mask families to draw cases from");
  Random random(mix(seed, static_cast<uint64_t>(index)));
  Case c;
  c.seed = mix(mix(seed, static_cast<uint64_t>(index)), 1);
  c.family = families[static_cast<std::size_t>(random.integer(0, static_cast<int64_t>(families.size()) - 1))];
  draw_shape(random, c);
  shrink(c);
  draw_mask(random, c);
  draw_options(random, c);
  draw_features(random, refused, c);
  return c;
}

}  // namespace flashmask::verify
