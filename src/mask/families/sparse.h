// SPDX-License-Identifier: Apache-2.0
#pragma once

// Masks whose keys are seen by rows in many places.

#include "common/message.h"
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

using Sparse = FamilyList<Neighborhood2d, Dilated>;

}  // namespace flashmask::build
