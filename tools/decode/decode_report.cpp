// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "decode/decode.h"
#include "draw/svg_markup.h"
#include "draw/words.h"
#include "flashmask/version.h"
#include "run/figures.h"
#include "run/html.h"

namespace flashmask::decode {
namespace {

using run::bytes_text;
using run::seconds_text;
using run::table;

std::string bytes(int64_t count) { return bytes_text(static_cast<double>(count)); }

std::string line(std::string_view name, const std::string& text) { return fmt::format("{:<11}{}\n", name, text); }

int32_t deepest(const DecodeFigures& f) { return *std::ranges::max_element(f.depth); }

std::string section(std::string_view title, std::string_view about, const std::string& content) {
  return fmt::format("<section>\n<h2>{}</h2>\n<p>{}</p>\n{}</section>\n", title, about, content);
}

std::string figure(std::string_view value, std::string_view what) {
  return fmt::format("<div class=\"figure\"><b>{}</b><span>{}</span></div>\n", value, what);
}

/// The cache as it lies: a box for each page, dark for the prompt's, and framed for those with drafts.
std::string pages_picture(const DecodeFigures& f) {
  constexpr int64_t kColumns = 32;
  constexpr double kSide = 27, kGap = 3;
  std::vector<int64_t> place(static_cast<std::size_t>(f.pages), -1);
  for (std::size_t n = 0; n < f.table.size(); ++n)
    place[static_cast<std::size_t>(f.table[n])] = static_cast<int64_t>(n);
  const int64_t lines = (f.pages + kColumns - 1) / kColumns;
  std::string svg =
      fmt::format("<svg class=\"chart\" viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"Pages of the cache\">\n",
                  kColumns * (kSide + kGap), static_cast<double>(lines) * (kSide + kGap));
  for (int64_t page = 0; page < f.pages; ++page) {
    const int64_t n = place[static_cast<std::size_t>(page)];
    const double x = static_cast<double>(page % kColumns) * (kSide + kGap),
                 y = static_cast<double>(page / kColumns) * (kSide + kGap);
    const bool has_drafts = n >= 0 && (n + 1) * f.options.page_size > f.options.prompt;
    svg += fmt::format(
        "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" rx=\"4\" fill=\"var({})\" fill-opacity=\"{}\"><title>page "
        "{}: {}</title></rect>\n",
        x, y, kSide, kSide,
        n < 0        ? "--pad"
        : has_drafts ? "--d2"
                     : "--d0",
        n < 0 || has_drafts ? 1.0 : 0.25 + 0.5 * static_cast<double>(n) / static_cast<double>(f.table.size()), page,
        n < 0 ? "of no sequence, NaN" : fmt::format("the sequence's {}th", n));
    if (n >= 0)
      svg += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"middle\" style=\"font-size:10px\">{}</text>\n",
                         x + kSide / 2, y + kSide / 2 + 4, n);
  }
  return svg + "</svg>\n";
}

/// The mask of the verification: a column for the prompt, which all rows see, and one for each draft.
std::string tree_picture(const DecodeFigures& f) {
  constexpr double kLeft = 150, kTop = 20;
  const int64_t count = f.options.drafts;
  const double cell = std::min(24.0, 780.0 / static_cast<double>(count)), side = cell * static_cast<double>(count);
  std::string svg = fmt::format(
      "<svg class=\"chart\" viewBox=\"0 0 960 {}\" role=\"img\" aria-label=\"The mask of the drafts\">\n"
      "<text class=\"faded\" x=\"0\" y=\"12\">prompt, {} keys</text><text class=\"faded\" x=\"{}\" "
      "y=\"12\">drafts</text>\n"
      "<rect x=\"0\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"var(--d0)\" fill-opacity=\"0.6\"><title>every draft "
      "sees "
      "the prompt</title></rect>\n",
      kTop + side + 8, grouped(f.options.prompt), kLeft, kTop, kLeft - 6, side);
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t u = 0; u < count; ++u) {
      const bool visible = f.is_ancestor(u, t);
      svg +=
          fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" fill=\"var({})\">{}</rect>\n",
                      kLeft + static_cast<double>(u) * cell, kTop + static_cast<double>(t) * cell, cell - 1, cell - 1,
                      visible ? "--d2" : "--pad",
                      visible ? fmt::format("<title>draft {} at position {} sees draft {}</title>", t,
                                            f.options.prompt + f.depth[static_cast<std::size_t>(t)], u)
                              : "");
    }
  }
  return svg + "</svg>\n";
}

std::string times_table(const DecodeFigures& f) {
  const auto row = [](std::string_view what, int64_t count, double seconds) {
    return std::vector<std::string>{std::string(what), grouped(count), seconds_text(seconds)};
  };
  return table({"", "rows", "time"}, {row("append the prompt", f.options.prompt, f.append_prompt),
                                      row("attend from all of it", f.options.prompt, f.prefill),
                                      row("attend from its last row", 1, f.one_row),
                                      row("append the drafts", f.options.drafts, f.append_drafts),
                                      row("attend from the drafts", f.options.drafts, f.verify)});
}

std::string memory_table(const DecodeFigures& f) {
  return table({"verification", "size"}, {{"keys and values read", bytes(f.bytes_read)},
                                          {"the tree's bits and depths", bytes(f.mask_bytes)},
                                          {"a dense mask in their place, one byte an element", bytes(f.dense_bytes)},
                                          {"plan", bytes(f.plan_bytes)},
                                          {"workspace", bytes(static_cast<int64_t>(f.workspace_bytes))}});
}

std::string check_table(const DecodeFigures& f) {
  std::vector<std::vector<std::string>> rows;
  for (const run::Accuracy& a : f.accuracy)
    rows.push_back(
        {a.tensor, fmt::format("{:.1e}", a.max_error), fmt::format("{:.1e}", a.limit),
         fmt::format("<span class=\"{}\">{}</span>", a.passed() ? "good" : "bad", a.passed() ? "ok" : "FAILED")});
  return table({"", "largest error", "allowed", ""}, rows);
}

}  // namespace

std::string to_text(const DecodeFigures& f) {
  const DecodeOptions& o = f.options;
  std::string text =
      line("cache", fmt::format("{} pages of {} tokens out of {}, in permuted order; {} heads, {} key and "
                                "value heads, head dim {}, {}",
                                grouped(static_cast<int64_t>(f.table.size())), o.page_size, grouped(f.pages), o.heads,
                                o.kv_heads, o.head_dim, name(o.dtype)));
  text += line("prompt", fmt::format("{} tokens appended in {}, attended in {}; one row in {}", grouped(o.prompt),
                                     seconds_text(f.append_prompt), seconds_text(f.prefill), seconds_text(f.one_row)));
  text += line("drafts", fmt::format("a tree of {}, {} deep, appended in {}, verified in {}", o.drafts, deepest(f) + 1,
                                     seconds_text(f.append_drafts), seconds_text(f.verify)));
  text += line("memory", fmt::format("{} of keys and values read; the mask is {}, in place of {} of a dense one",
                                     bytes(f.bytes_read), bytes(f.mask_bytes), bytes(f.dense_bytes)));
  text += line("backend", fmt::format("{}: {}", f.backend, f.kernel));
  for (const run::Accuracy& a : f.accuracy)
    text += line("check", fmt::format("{:<18} {:.1e} of {:.1e}  {}", a.tensor, a.max_error, a.limit,
                                      a.passed() ? "ok" : "FAILED"));
  return text;
}

std::string report_html(const DecodeFigures& f) {
  const DecodeOptions& o = f.options;
  std::string body = fmt::format(
      "<h1>A tree of drafts over a paged cache</h1>\n<div class=\"faded\">{} heads, {} key and value heads, head dim "
      "{}, "
      "{}; backend {}: {}</div>\n<div class=\"verdict {}\">{}</div>\n<div class=\"figures\">\n",
      o.heads, o.kv_heads, o.head_dim, name(o.dtype), escaped(f.backend), escaped(f.kernel),
      f.passed() ? "good" : "bad", f.passed() ? "all checks passed" : "a check failed");
  body += figure(grouped(o.prompt), "tokens of the prompt") + figure(grouped(o.drafts), "drafts verified at once") +
          figure(grouped(deepest(f) + 1), "levels of the tree") +
          figure(seconds_text(f.verify), "for the verification") + figure(bytes(f.mask_bytes), "of mask") + "</div>\n";
  body += section("Pages",
                  fmt::format("The cache has {} pages of {} tokens. The sequence's, by their number in it, lie in any "
                              "order; brown ones hold drafts, grey ones belong to nobody and are NaN.",
                              grouped(f.pages), o.page_size),
                  pages_picture(f));
  body += section("Mask",
                  "A draft sees the prompt, its ancestors and itself: one bit for each pair of drafts. Its position is "
                  "that of its depth, so siblings share one.",
                  tree_picture(f));
  body += section("Times", "The verification is the median of five calls; the keys are read once for all drafts.",
                  times_table(f));
  body += section("Memory", "", memory_table(f));
  body += section("Check",
                  "All drafts and sampled rows of the prompt, against sums in float64 over the tokens that the nodes' "
                  "parents say.",
                  check_table(f));
  body += fmt::format("<footer>Made by flashmask {}.{}.{} decode, seed {}.</footer>\n", FLASHMASK_VERSION_MAJOR,
                      FLASHMASK_VERSION_MINOR, FLASHMASK_VERSION_PATCH, o.seed);
  return run::page("flashmask decode", body);
}

}  // namespace flashmask::decode
