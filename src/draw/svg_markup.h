// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace flashmask {

// The few SVG elements a drawing is made of. Coordinates are pixels.

struct Colour {
  int red, green, blue;
};

/// "#e8ecf1"
std::string hex(Colour colour);

inline void append_part(std::string& text, std::string_view part) { text.append(part); }
inline void append_part(std::string& text, int64_t part) { text.append(std::to_string(part)); }
/// With at most two decimals, and a point whatever the locale.
void append_part(std::string& text, double part);

/// The parts one after the other, numbers written out.
template <typename... Parts>
std::string markup(const Parts&... parts) {
  std::string text;
  (append_part(text, parts), ...);
  return text;
}

/// With the characters that mean something in XML and HTML replaced.
std::string escaped(std::string_view text);

struct TextStyle {
  std::string_view anchor = "start";
  std::string_view colour = "#1f2933";
  int64_t size = 12;
  bool bold = false;
  bool upwards = false;
};
std::string text_at(double x, double y, std::string_view text, const TextStyle& style = {});

std::string rectangle_at(double x, double y, double width, double height, std::string_view attributes);

/// A path that is only stroked; nothing if it is empty.
std::string lines(std::string_view path, std::string_view attributes);

}  // namespace flashmask
