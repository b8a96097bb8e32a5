// SPDX-License-Identifier: Apache-2.0
#include "draw/words.h"

#include <charconv>

namespace flashmask {
namespace {

/// i + d, with the sign written out.
std::string row_position(int64_t d) {
  if (d == 0) return "i";
  return d > 0 ? "i + " + grouped(d) : "i - " + grouped(-d);
}

}  // namespace

std::string grouped(int64_t number) {
  const std::string digits = std::to_string(number);
  std::string text;
  for (std::size_t at = 0; at < digits.size(); ++at) {
    const bool after_digit = at > 0 && digits[at - 1] != '-';
    if (after_digit && (digits.size() - at) % 3 == 0) text += ',';
    text += digits[at];
  }
  return text;
}

std::string percent(int64_t part, int64_t whole) {
  if (part == 0 || whole == 0) return "0 %";
  if (part == whole) return "100 %";
  const double value = 100 * (static_cast<double>(part) / static_cast<double>(whole));
  if (value < 0.1) return "<0.1 %";
  if (value > 99.9) return ">99.9 %";
  char text[16];
  const auto written = std::to_chars(text, text + sizeof(text), value, std::chars_format::fixed, 1);
  return std::string(text, written.ptr) + " %";
}

std::string binary_units(int64_t number) {
  constexpr int64_t kKilo = 1024, kMega = kKilo * 1024;
  if (number == 0 || number % kKilo != 0) return grouped(number);
  return number % kMega == 0 ? grouped(number / kMega) + "M" : grouped(number / kKilo) + "K";
}

std::string describe_band(const Mask& mask) {
  const Band& band = mask.band();
  if (band.unbounded()) return "no band";
  std::string text = "j";
  if (band.lo) text = row_position(*band.lo + mask.q_offset()) + " ≤ " + text;
  if (band.hi) text += " ≤ " + row_position(*band.hi + mask.q_offset());
  return text;
}

std::string describe_intervals(const Mask& mask) {
  const int n = mask.num_intervals();
  std::string text = n == 0   ? "no hidden intervals"
                     : n == 1 ? "1 hidden interval per key"
                     : n == 2 ? "2 hidden intervals per key"
                              : "up to " + grouped(n) + " hidden intervals per key";
  if (mask.has_block_mask()) text += ", block mask";
  return text;
}

std::string describe_entry(const Mask& mask, int64_t batch, int64_t head) {
  std::string text;
  if (mask.batch() > 1) text += ", batch entry " + grouped(batch) + " of " + grouped(mask.batch());
  if (mask.heads() > 1) text += ", head " + grouped(head) + " of " + grouped(mask.heads());
  return text;
}

}  // namespace flashmask
