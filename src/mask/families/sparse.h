// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks whose keys are seen by rows in many places.

#include <unordered_set>
#include <vector>

#include "common/message.h"
#include "common/random.h"
#include "mask/families/lists.h"

namespace flashmask::build {

/// One dimension of a neighbourhood: `length` places, of which each sees `kernel`, every dilation-th, around it. At the
/// borders these are shifted inwards.
struct Neighbourhood {
  int64_t length, kernel, dilation;

  /// see(place) for the places that see place `at`. A place's window begins at clamp(place - kernel / 2, 0, count -
  /// kernel), counted among the places of its remainder; this is monotone, so its inverse is a run.
  template <typename See>
  void each_that_sees(int64_t at, const See& see) const {
    const int64_t rest = at % dilation, own = at / dilation, count = (length - rest + dilation - 1) / dilation;
    const int64_t begin = own < kernel ? 0 : own - kernel + 1 + kernel / 2;
    const int64_t end = own >= count - kernel ? count : own + kernel / 2 + 1;
    for (int64_t place = begin; place < end; ++place) see(rest + place * dilation);
  }
};

struct Neighborhood2d : OfLists<Neighborhood2d> {
  static constexpr Declared kParameters[] = {
      {"height", Kind::kLength, "rows of the grid"},
      {"width", Kind::kLength, "tokens of each"},
      {"kernel_height", Kind::kNumber, "rows of a neighbourhood", 1},
      {"kernel_width", Kind::kNumber, "tokens of each", 1},
      {.name = "dilation",
       .kind = Kind::kNumber,
       .doc = "distance between neighbouring tokens of a neighbourhood, both ways",
       .least = 1,
       .otherwise = 1}};
  static constexpr Family kFamily{.name = "neighborhood_2d", .parameters = kParameters, .form = {.has_lists = true}};

  static void measure(Arguments& a) {
    const int64_t height = a.number("height"), width = a.number("width");
    if (width > 0 && height > kMaxSeqlen / width)
      throw_invalid("height is ", height, " and width ", width, "; the grid has more than ", kMaxSeqlen, " tokens");
    a.shape.seqlen_q = a.shape.seqlen_k = height * width;
    if (height == 0 || width == 0) return;
    check_fits(a, "kernel_height", "height");
    check_fits(a, "kernel_width", "width");
  }

  template <typename Run>
  static auto visible_rows(Run&, const Arguments& a) {
    const int64_t dilation = a.number("dilation"), width = a.number("width");
    const Neighbourhood down{a.number("height"), a.number("kernel_height"), dilation},
        across{width, a.number("kernel_width"), dilation};
    return [=](const Lead&, int64_t j, const auto& see) {
      down.each_that_sees(j / width, [&](int64_t y) {
        across.each_that_sees(j % width, [&](int64_t x) { see(y * width + x, y * width + x + 1); });
      });
    };
  }

 private:
  static void check_fits(const Arguments& a, const char* kernel, const char* side) {
    const int64_t dilation = a.number("dilation");
    if (a.number(kernel) > a.number(side) / dilation)
      throw_invalid(kernel, " is ", a.number(kernel), " and dilation ", dilation, "; a neighbourhood must fit in ",
                    side, ", ", a.number(side));
  }
};

struct Dilated : OfLists<Dilated> {
  static constexpr Declared kParameters[] = {
      kSeqlen,
      kWindow,
      {"dilation", Kind::kNumber, "distance between neighbouring keys of a window", 1},
      {"causal", Kind::kFlag, "1: only keys up to the row's own"}};
  static constexpr Family kFamily{.name = "dilated", .parameters = kParameters, .form = {.has_lists = true}};

  template <typename Run>
  static auto visible_rows(Run&, const Arguments& a) {
    return [seqlen = a.seqlen, reach = reach_of(a), dilation = smaller(a.number("dilation"), kMaxSeqlen),
            causal = a.number("causal") != 0](const Lead&, int64_t j, const auto& see) {
      const int64_t before = causal ? 0 : smaller(reach - 1, j / dilation);
      const int64_t after = smaller(reach - 1, (seqlen - 1 - j) / dilation);
      for (int64_t n = -before; n <= after; ++n) see(j + n * dilation, j + n * dilation + 1);
    };
  }
};

struct BigBird : OfLists<BigBird> {
  static constexpr Declared kParameters[] = {
      kSeqlen,
      {"block", Kind::kNumber, "tokens of a block", 1},
      {"global_blocks", Kind::kNumber, "first blocks, which see and are seen by all", 0},
      {"window", Kind::kNumber, "blocks to either side that a block sees", 0},
      {"random_blocks", Kind::kNumber, "further blocks that a block sees", 0},
      {.name = "seed", .kind = Kind::kNumber, .doc = "of the random blocks", .otherwise = 0}};
  static constexpr Family kFamily{.name = "bigbird", .parameters = kParameters, .form = {.has_lists = true}};

  template <typename Run>
  static auto visible_rows(Run&, const Arguments& a) {
    const int64_t block = smaller(a.number("block"), larger(a.seqlen, 1)), blocks = (a.seqlen + block - 1) / block;
    const int64_t global = smaller(a.number("global_blocks"), blocks), window = smaller(a.number("window"), blocks);
    return [=, drawn_by = draw(a, blocks, global, window)](const Lead&, int64_t j, const auto& see) {
      const int64_t own = j / block;
      see(0, (own < global ? blocks : global) * block);
      see((own - window) * block, (own + window + 1) * block);
      for (const int64_t of_rows : drawn_by[static_cast<std::size_t>(own)]) see(of_rows * block, (of_rows + 1) * block);
    };
  }

 private:
  using Drawn = std::vector<std::vector<int64_t>>;

  /// For each block of keys the blocks of rows that drew it, among those that they do not see anyway.
  static Drawn draw(const Arguments& a, int64_t blocks, int64_t global, int64_t window) {
    Drawn drawn_by(static_cast<std::size_t>(blocks));
    Random random(static_cast<uint64_t>(a.number("seed")));
    for (int64_t rows = global; rows < blocks; ++rows) {
      const int64_t near = larger(rows - window, global), near_count = smaller(rows + window + 1, blocks) - near;
      for (const int64_t n : sample(random, blocks - global - near_count, a.number("random_blocks"))) {
        const int64_t keys = global + n < near ? global + n : global + n + near_count;
        drawn_by[static_cast<std::size_t>(keys)].push_back(rows);
      }
    }
    return drawn_by;
  }

  /// `size` different numbers below `count`, all if there are no more (R. Floyd, "A sample of brilliance", 1987).
  static std::unordered_set<int64_t> sample(Random& random, int64_t count, int64_t size) {
    std::unordered_set<int64_t> drawn;
    for (int64_t last = larger(count - size, 0); last < count; ++last) {
      if (!drawn.insert(random.integer(0, last)).second) drawn.insert(last);
    }
    return drawn;
  }
};

using Sparse = FamilyList<Neighborhood2d, Dilated, BigBird>;

}  // namespace flashmask::build
