// SPDX-License-Identifier: Apache-2.0
#include "draw/svg_markup.h"

#include <charconv>
#include <cmath>

namespace flashmask {

std::string hex(Colour colour) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text = "#";
  for (const int channel : {colour.red, colour.green, colour.blue}) {
    text += kDigits[static_cast<std::size_t>(channel / 16)];
    text += kDigits[static_cast<std::size_t>(channel % 16)];
  }
  return text;
}

void append_part(std::string& text, double part) {
  char digits[32];
  const auto written = std::to_chars(digits, digits + sizeof(digits), std::round(part * 100) / 100);
  text.append(digits, written.ptr);
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string text_at(double x, double y, std::string_view text, const TextStyle& style) {
  std::string attributes;
  if (style.anchor != "start") attributes += markup(" text-anchor=\"", style.anchor, "\"");
  if (style.bold) attributes += " font-weight=\"600\"";
  if (style.upwards) attributes += markup(" transform=\"rotate(-90 ", x, " ", y, ")\"");
  return markup("<text x=\"", x, "\" y=\"", y, "\" font-size=\"", style.size, "\" fill=\"", style.colour, "\"",
                attributes, ">", escaped(text), "</text>\n");
}

std::string rectangle_at(double x, double y, double width, double height, std::string_view attributes) {
  return markup("<rect x=\"", x, "\" y=\"", y, "\" width=\"", width, "\" height=\"", height, "\" ", attributes, "/>\n");
}

std::string lines(std::string_view path, std::string_view attributes) {
  return path.empty() ? std::string() : markup("<path fill=\"none\" d=\"", path, "\" ", attributes, "/>\n");
}

}  // namespace flashmask
