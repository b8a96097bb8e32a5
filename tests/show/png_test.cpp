// SPDX-License-Identifier: Apache-2.0
// PNG drawings, decoded and compared with every element and every tile.
#include "show/png.h"

#include <gtest/gtest.h>
#include <png.h>

#include <string>
#include <vector>

#include "draw/svg_cells.h"
#include "families/families.h"
#include "flashmask/builders.h"
#include "flashmask/status.h"
#include "support/brute_force.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "support/random_masks.h"

namespace flashmask::test {
namespace {

using show::to_png;

Pixels decoded(const std::string& file) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  EXPECT_TRUE(png_image_begin_read_from_memory(&image, file.data(), file.size())) << image.message;
  image.format = PNG_FORMAT_RGB;
  Pixels pixels{.width = image.width, .height = image.height, .rgb = std::vector<uint8_t>(PNG_IMAGE_SIZE(image))};
  EXPECT_TRUE(png_image_finish_read(&image, nullptr, pixels.rgb.data(), 0, nullptr)) << image.message;
  return pixels;
}

std::string colour_at(Pixels& pixels, int64_t x, int64_t y) {
  const uint8_t* pixel = pixels.at(x, y);
  return hex({pixel[0], pixel[1], pixel[2]});
}

/// The colour in the middle of element (i, j), where no line is.
std::string element_colour(Pixels& pixels, const Mask& mask, int64_t i, int64_t j) {
  const int64_t width = pixels.width / mask.seqlen_k(), height = pixels.height / mask.seqlen_q();
  return colour_at(pixels, j * width + width - 1, i * height + height - 1);
}

Colour expected_colour(const Dense& dense, TileShape tile, int64_t i, int64_t j) {
  switch (class_of(dense, tile, i / tile.rows, j / tile.keys)) {
    case TileClass::kEmpty:
      return colours::kSkipped;
    case TileClass::kFull:
      return colours::kFull;
    default:
      return dense.at(i, j) ? colours::kPartialVisible : colours::kPartialHidden;
  }
}

TEST(DrawPng, EveryElementHasItsColour) {
  Random random(11);
  for (int64_t n = 0; n < scaled(40); ++n) {
    const MaskParts parts = random_parts(random, random_kind(random), random.integer(2, 60), random.integer(2, 60),
                                         random.integer(1, 2), random.integer(1, 2));
    const Mask mask(parts);
    const DrawOptions options{.batch = random.integer(0, mask.batch() - 1),
                              .head = random.integer(0, mask.heads() - 1),
                              .tile = {random.integer(2, 40), random.integer(2, 40)}};
    const auto all = dense_by_rule(parts);
    const Dense dense = matrix(all, options.batch * mask.heads() + options.head, mask.seqlen_q(), mask.seqlen_k());
    Pixels pixels = decoded(to_png(draw_pixels(mask, options)));
    ASSERT_EQ(pixels.width % mask.seqlen_k(), 0);
    ASSERT_EQ(pixels.height % mask.seqlen_q(), 0);
    for (int64_t i = 0; i < mask.seqlen_q(); ++i) {
      for (int64_t j = 0; j < mask.seqlen_k(); ++j) {
        ASSERT_EQ(element_colour(pixels, mask, i, j), hex(expected_colour(dense, options.tile, i, j)))
            << "case " << n << " (" << i << ", " << j << ")";
      }
    }
  }
}

TEST(DrawPng, TilesAndElementsAreOutlined) {
  // 64 elements of 8 pixels in tiles of 8: an element's first pixel is paler than the rest, a tile's first one is
  // darker.
  Pixels pixels = draw_pixels(masks::full(64, 64), {.tile = {8, 8}});
  ASSERT_EQ(pixels.width, 512);
  ASSERT_EQ(pixels.height, 512);
  EXPECT_EQ(colour_at(pixels, 9, 9), hex(colours::kFull));
  for (const auto& [line, clear] : {std::pair{8, 9}, {504, 505}}) {
    EXPECT_GT(*pixels.at(line, 12), *pixels.at(clear, 12)) << line;
    EXPECT_GT(*pixels.at(12, line), *pixels.at(12, clear)) << line;
  }
  EXPECT_LT(*pixels.at(64, 12), *pixels.at(8, 12));
  EXPECT_LT(*pixels.at(12, 64), *pixels.at(12, 8));
  EXPECT_EQ(colour_at(pixels, 0, 4), hex(colours::kFull)) << "no line around the picture";
}

TEST(DrawPng, TheSameBytesForTheSameMask) {
  for (const Family& family : families()) {
    const Mask mask = make_family(family.name, 300, {}, 2);
    const Pixels pixels = draw_pixels(mask);
    const std::string file = to_png(pixels);
    EXPECT_EQ(to_png(draw_pixels(mask)), file) << family.name;
    EXPECT_EQ(decoded(file).rgb, pixels.rgb) << family.name;
  }
}

TEST(DrawPng, AMillionTokensInCellsOfMany) {
  const Mask mask = make_family("causal_document", 1 << 20, {{"lengths", "524288,524288"}});
  Pixels pixels = decoded(to_png(draw_pixels(mask)));
  ASSERT_EQ(pixels.width, 512);
  ASSERT_EQ(pixels.height, 512);
  EXPECT_EQ(colour_at(pixels, 10, 200), hex(colours::kFull));
  EXPECT_EQ(colour_at(pixels, 200, 10), hex(colours::kSkipped));
  EXPECT_EQ(colour_at(pixels, 10, 300), hex(colours::kSkipped)) << "another document";
  EXPECT_NE(colour_at(pixels, 100, 100), hex(colours::kFull)) << "the diagonal";
  EXPECT_NE(colour_at(pixels, 100, 100), hex(colours::kSkipped)) << "the diagonal";
}

TEST(DrawPng, ASideIsNeverThin) {
  for (const auto& [q, k] : {std::pair<int64_t, int64_t>{1, 1}, {1, 5000}, {5000, 1}, {100, 1000000}, {3, 4}}) {
    const Pixels pixels = draw_pixels(masks::full(q, k));
    const auto [shorter, longer] = std::minmax(pixels.width, pixels.height);
    EXPECT_GE(8 * shorter, longer) << q << " x " << k;
    EXPECT_GE(longer, 384) << q << " x " << k;
    EXPECT_LE(longer, 1024) << q << " x " << k;
  }
}

TEST(DrawPng, AMaskWithoutElementsIsAnError) {
  try {
    draw_pixels(masks::full(0, 7));
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("0 query rows and 7 keys"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace flashmask::test
