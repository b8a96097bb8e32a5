// SPDX-License-Identifier: Apache-2.0
#include "run/projections.h"

#include <cmath>
#include <numbers>
#include <random>

#include "run/parallel_for.h"

namespace flashmask::run {
namespace {

constexpr int64_t kHidden = 128;  ///< width of a token's embedding

std::size_t index(int64_t value) { return static_cast<std::size_t>(value); }

/// `count` draws from a normal distribution, the same on every platform's standard library.
std::vector<float> normal(int64_t count, double deviation, std::mt19937_64& engine) {
  const auto uniform = [&] { return (static_cast<double>(engine() >> 11) + 0.5) * 0x1p-53; };
  std::vector<float> values(index(count));
  for (float& value : values) {
    const double radius = std::sqrt(-2 * std::log(uniform()));
    value = static_cast<float>(deviation * radius * std::cos(2 * std::numbers::pi * uniform()));
  }
  return values;
}

/// The splitmix64 step: a well mixed word for every counter.
uint64_t mixed(uint64_t counter) {
  counter += 0x9e3779b97f4a7c15u;
  counter = (counter ^ counter >> 30) * 0xbf58476d1ce4e5b9u;
  counter = (counter ^ counter >> 27) * 0x94d049bb133111ebu;
  return counter ^ counter >> 31;
}

}  // namespace

Projections::Projections(const AttentionShape& shape, int64_t max_position, uint64_t seed)
    : shape_(shape), columns_((shape.heads + 2 * shape.kv_heads) * shape.head_dim) {
  std::mt19937_64 engine(seed);
  const std::vector<float> embedding = normal(kVocabulary * kHidden, 1, engine);
  const std::vector<float> weights = normal(kHidden * columns_, 1 / std::sqrt(static_cast<double>(kHidden)), engine);
  projected_.assign(index(kVocabulary * columns_), 0);
  for (int64_t token = 0; token < kVocabulary; ++token) {
    float* row = projected_.data() + token * columns_;
    for (int64_t h = 0; h < kHidden; ++h) {
      const float x = embedding[index(token * kHidden + h)];
      const float* w = weights.data() + h * columns_;
      for (int64_t c = 0; c < columns_; ++c) row[c] += x * w[c];
    }
  }
  const int64_t pairs = shape.head_dim / 2;
  for (int64_t position = 0; position <= max_position; ++position) {
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const double angle =
          static_cast<double>(position) * std::pow(10000.0, -static_cast<double>(pair) / static_cast<double>(pairs));
      cosine_.push_back(static_cast<float>(std::cos(angle)));
      sine_.push_back(static_cast<float>(std::sin(angle)));
    }
  }
}

void Projections::rotate(const float* from, int64_t position, float* to) const {
  const int64_t pairs = shape_.head_dim / 2;
  const float* cosine = cosine_.data() + position * pairs;
  const float* sine = sine_.data() + position * pairs;
  for (int64_t p = 0; p < pairs; ++p) {
    to[p] = from[p] * cosine[p] - from[p + pairs] * sine[p];
    to[p + pairs] = from[p] * sine[p] + from[p + pairs] * cosine[p];
  }
  if (shape_.head_dim % 2 != 0) to[shape_.head_dim - 1] = from[shape_.head_dim - 1];
}

void Projections::fill(const Packed& packed, int64_t first, int64_t count, int threads, Tensor& q, Tensor& k,
                       Tensor& v) const {
  const int64_t d = shape_.head_dim;
  parallel_for(count * packed.seqlen, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> rotated(index(d));
    for (int64_t t = begin; t < end; ++t) {
      const std::size_t at = index(first * packed.seqlen + t);
      const float* row = projected_.data() + packed.input_ids[at] * columns_;
      const auto write_rotated = [&](Tensor& to, int64_t heads) {
        for (int64_t h = 0; h < heads; ++h, row += d) {
          rotate(row, packed.position_ids[at], rotated.data());
          for (int64_t x = 0; x < d; ++x) to.set((t * heads + h) * d + x, rotated[index(x)]);
        }
      };
      write_rotated(q, shape_.heads);
      write_rotated(k, shape_.kv_heads);
      for (int64_t x = 0; x < shape_.kv_heads * d; ++x) v.set(t * shape_.kv_heads * d + x, row[x]);
    }
  });
}

void fill_gradient(uint64_t seed, int64_t first, int64_t count, int threads, Tensor& dout) {
  const uint64_t start = mixed(seed);
  const float scale = std::sqrt(12.0f) * 0x1p-24f;  // for a uniform draw's top 24 bits
  parallel_for(count * dout.stride(), threads, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; ++at) {
      const uint64_t word = mixed(start + static_cast<uint64_t>(first * dout.stride() + at));
      dout.set(at, (static_cast<float>(word >> 40) - 0x1p23f) * scale);
    }
  });
}

}  // namespace flashmask::run
