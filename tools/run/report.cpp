// SPDX-License-Identifier: Apache-2.0
#include "run/report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <string_view>
#include <vector>

#include "draw/svg_markup.h"
#include "draw/words.h"
#include "flashmask/draw.h"
#include "flashmask/inspect.h"
#include "flashmask/version.h"
#include "run/html.h"

namespace flashmask::run {
namespace {

constexpr int64_t kMaskPictures = 4;
constexpr int64_t kPackedBars = 40;
constexpr int kColours = 6;
constexpr double kFading = 0.6;  // factor of a tree's colour from one level to the next

// Pixels of the charts.
constexpr double kChartWidth = 960, kBarLeft = 56, kBarHeight = 14, kBarDistance = 19;

std::string section(std::string_view title, std::string_view about, const std::string& content) {
  return fmt::format("<section>\n<h2>{}</h2>\n<p>{}</p>\n{}</section>\n", escaped(title), about, content);
}

std::string figure(std::string_view value, std::string_view what) {
  return fmt::format("<div class=\"figure\"><b>{}</b><span>{}</span></div>\n", escaped(value), escaped(what));
}

std::string verdict(bool good, std::string_view text) {
  return fmt::format("<span class=\"{}\">{}</span>", good ? "good" : "bad", text);
}

std::string plural(int64_t count, std::string_view what) {
  return fmt::format("{} {}{}", grouped(count), what, count == 1 ? "" : "s");
}

// --- The head of the page ---------------------------------------------------------------------------

std::string head(const RunFigures& f) {
  const AttentionShape& shape = f.options.shape;
  return fmt::format(
      "<h1>{}</h1>\n<div class=\"faded\">task {}, sequences of {} tokens; {}, {}, head dim {}, {}; backend {}</div>\n"
      "<div class=\"verdict {}\">{}</div>\n",
      escaped(std::filesystem::path(f.options.input).filename().string()), name(f.options.task),
      grouped(f.packed.seqlen), plural(shape.heads, "head"), plural(shape.kv_heads, "key and value head"),
      shape.head_dim, name(f.options.dtype), escaped(f.masked.backend), f.passed() ? "good" : "bad",
      f.passed() ? "all checks passed" : "a check failed");
}

std::string main_figures(const RunFigures& f) {
  std::string text = figure(grouped(f.packed.documents), "documents") + figure(grouped(f.packed.tokens), "tokens") +
                     figure(grouped(f.packed.sequences), "sequences") +
                     figure(percent_text(f.packed.padding_share()), "padding") +
                     figure(percent_text(1 - f.masked.statistics.live_share()), "of the tiles skipped");
  if (shares_prefix(f.packed.task))
    text += figure(fmt::format("{:.2f}×", f.packed.sharing_ratio()), "the tokens without sharing");
  if (f.dense.sequences > 0) text += figure(fmt::format("{:.1f}×", f.speedup()), "as fast as with dense masks");
  return "<div class=\"figures\">\n" + text + "</div>\n";
}

// --- How the documents were packed ------------------------------------------------------------------

/// One bar: the documents of a sequence, each with its parts.
class SequenceBar {
 public:
  SequenceBar(const RunFigures& figures, int64_t sequence, double top)
      : figures_(figures),
        sequence_(sequence),
        top_(top),
        scale_((kChartWidth - kBarLeft) / static_cast<double>(figures.packed.seqlen)) {}

  std::string draw() {
    text_ = fmt::format("<text class=\"faded\" x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text>\n", kBarLeft - 10,
                        top_ + kBarHeight - 2.5, sequence_);
    const int64_t seqlen = figures_.packed.seqlen;
    while (at_ < seqlen) {
      const int32_t number = figures_.packed.segment_ids[static_cast<std::size_t>(sequence_ * seqlen + at_)];
      if (number < 0) {
        part(seqlen - at_, "fill=\"url(#padding)\"", fmt::format("padding, {}", plural(seqlen - at_, "token")));
      } else {
        document(number);
      }
    }
    return text_;
  }

 private:
  void document(int32_t number) {
    const Document& document = figures_.records.documents[static_cast<std::size_t>(number)];
    const auto fill = [&](double opacity) {
      return fmt::format("fill=\"var(--d{})\" fill-opacity=\"{}\"", number % kColours, opacity);
    };
    if (figures_.options.task == Task::kTree) {
      tree(document, number);
      return;
    }
    const bool pretraining = figures_.options.task == Task::kPretrain;
    if (pretraining) {
      part(document.length(), fill(0.85), fmt::format("document {}, {}", number, plural(document.length(), "token")));
      return;
    }
    const bool shared = shares_question(figures_.options.task);
    part(
        document.question, fill(1),
        fmt::format("document {}: {}, {}", number, shared ? "question" : "prompt", plural(document.question, "token")));
    for (std::size_t n = 0; n < document.answers.size(); ++n) {
      const std::string what = shared ? fmt::format("answer {}", n + 1) : "response";
      part(document.answers[n], fill(0.45),
           fmt::format("document {}: {}, {}", number, what, plural(document.answers[n], "token")));
    }
  }

  /// The deeper a node, the paler.
  void tree(const Document& document, int32_t number) {
    std::vector<int> depth;
    for (const TreeNode& node : document.nodes) {
      depth.push_back(node.parent < 0 ? 0 : depth[static_cast<std::size_t>(node.parent)] + 1);
      const std::string where =
          node.parent < 0 ? "the root" : fmt::format("node {} after node {}", depth.size() - 1, node.parent);
      part(node.length,
           fmt::format("fill=\"var(--d{})\" fill-opacity=\"{:.2f}\"", number % kColours,
                       std::pow(kFading, depth.back())),
           fmt::format("tree {}: {}, {}", number, where, plural(node.length, "token")));
    }
  }

  /// A fraction of a pixel stays free between parts, so that they can be told apart.
  void part(int64_t tokens, std::string_view fill, std::string_view tip) {
    const double left = kBarLeft + static_cast<double>(at_) * scale_, width = static_cast<double>(tokens) * scale_;
    text_ += fmt::format("<rect x=\"{:.2f}\" y=\"{:.1f}\" width=\"{:.2f}\" height=\"{}\" {}><title>{}</title></rect>\n",
                         left, top_, std::max(width - 0.8, width * 0.6), kBarHeight, fill, tip);
    at_ += tokens;
  }

  const RunFigures& figures_;
  int64_t sequence_;
  double top_, scale_;
  int64_t at_ = 0;
  std::string text_;
};

std::string packing_key(const RunFigures& f) {
  const auto entry = [](std::string_view style, std::string_view what) {
    return fmt::format("<span><i style=\"{}\"></i>{}</span>", style, what);
  };
  std::string text = "<div class=\"key\">";
  if (f.options.task == Task::kPretrain) {
    text += entry("background:var(--d0)", "a document, in one of six colours");
  } else if (f.options.task == Task::kTree) {
    text += entry("background:var(--d0)", "root of a tree");
    text += entry(fmt::format("background:var(--d0);opacity:{}", kFading), "its branches, paler with depth");
    text += "<span>the next tree has the next of six colours</span>";
  } else {
    const bool shared = shares_question(f.options.task);
    text += entry("background:var(--d0)", shared ? "question" : "prompt");
    text += entry("background:var(--d0);opacity:.45", shared ? "its answers" : "its response");
    text += "<span>the next document has the next of six colours</span>";
  }
  return text + entry("background:var(--pad);border:1px solid var(--pad-line)", "padding") + "</div>\n";
}

/// Table of the savings by sharing; empty if there is nothing to share.
std::string sharing_table(const Packed& packed) {
  if (!shares_prefix(packed.task)) return "";
  const int64_t nodes = static_cast<int64_t>(packed.nodes.size());
  return table({"what is shared is written once", "tokens", "ratio"},
               {{packed.task == Task::kTree ? fmt::format("packed, {}", plural(nodes, "node")) : "packed",
                 grouped(packed.tokens), "1.00×"},
                {separate_text(packed) + " as a sequence of its own", grouped(packed.separate.tokens),
                 fmt::format("{:.2f}×", packed.sharing_ratio())},
                {"saved", grouped(packed.separate.tokens - packed.tokens), ""}});
}

std::string packing_section(const RunFigures& f) {
  const int64_t bars = std::min(f.packed.sequences, kPackedBars);
  const double height = kBarDistance * static_cast<double>(bars) + 24;
  std::string chart = fmt::format(
      "<svg class=\"chart\" viewBox=\"0 0 {0} {1}\" role=\"img\" aria-label=\"Documents in each sequence\">\n"
      "<defs><pattern id=\"padding\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\"><rect width=\"6\" "
      "height=\"6\" "
      "fill=\"var(--pad)\"/>"
      "<path d=\"M0 6L6 0\" stroke=\"var(--pad-line)\"/></pattern></defs>\n",
      kChartWidth, height);
  for (int64_t s = 0; s < bars; ++s) chart += SequenceBar(f, s, kBarDistance * static_cast<double>(s)).draw();
  chart += fmt::format(
      "<text class=\"faded\" x=\"{}\" y=\"{}\">0</text><text class=\"faded\" x=\"{}\" y=\"{}\" "
      "text-anchor=\"end\">token "
      "{}</text>\n</svg>\n",
      kBarLeft, height - 6, kChartWidth, height - 6, grouped(f.packed.seqlen));
  const std::string shown = bars < f.packed.sequences ? fmt::format(" The first {} of {} sequences are shown.", bars,
                                                                    grouped(f.packed.sequences))
                                                      : "";
  return section("Packing",
                 fmt::format("{} in {} of {}, first fit in the input's order; {} of the positions are padding.{} Point "
                             "at a part to see what it is.",
                             plural(f.packed.documents, "document"), plural(f.packed.sequences, "sequence"),
                             plural(f.packed.seqlen, "token"), percent_text(f.packed.padding_share()), shown),
                 packing_key(f) + chart + sharing_table(f.packed));
}

// --- Masks ------------------------------------------------------------------------------------------

std::string_view what_rows_see(Task task) {
  if (task == Task::kTree) return "its own node and those on the way from the root to it, up to itself";
  return shares_question(task) ? "its own question and its own answer, up to itself" : "its own document, up to itself";
}

std::string masks_section(const RunFigures& f) {
  const int64_t pictures = std::min(f.masked.sequences, kMaskPictures);
  std::string text = "<div class=\"masks\">\n";
  for (int64_t s = 0; s < pictures; ++s) {
    text += fmt::format("<figure><figcaption>Sequence {}</figcaption>\n{}</figure>\n", s,
                        draw_svg(f.packed.mask(s, s + 1)));
  }
  text += "</div>\n";
  const MaskStatistics& statistics = f.masked.statistics;
  const auto tiles = [&](std::string_view what, int64_t count) {
    const double share = statistics.tiles ? static_cast<double>(count) / static_cast<double>(statistics.tiles) : 0;
    return std::vector<std::string>{std::string(what), grouped(count), percent_text(share)};
  };
  text += table({fmt::format("tiles of {}×{}, {}", statistics.tile.rows, statistics.tile.keys,
                             plural(f.masked.sequences, "sequence")),
                 "tiles", "share"},
                {tiles("skipped: nothing visible", statistics.tiles - statistics.live_tiles()),
                 tiles("partial: masked element by element", statistics.partial_tiles),
                 tiles("full: everything visible, no mask code", statistics.full_tiles)});
  const auto memory = [&](std::string_view what, int64_t bytes) {
    const double share =
        f.masked.dense_mask_bytes ? static_cast<double>(bytes) / static_cast<double>(f.masked.dense_mask_bytes) : 0;
    return std::vector<std::string>{std::string(what), bytes_text(static_cast<double>(bytes)), percent_text(share)};
  };
  text +=
      table({"memory of the masks", "size", "of dense"},
            {memory("startend_row_indices", f.masked.mask_bytes), memory("plan, both directions", f.masked.plan_bytes),
             memory("dense, one byte an element", f.masked.dense_mask_bytes)});
  return section("Masks",
                 fmt::format("Each row sees {}. {} of the elements are visible. {}", what_rows_see(f.options.task),
                             percent_text(statistics.visible_share()),
                             pictures < f.masked.sequences
                                 ? fmt::format("The first {} of {} sequences:", pictures, grouped(f.masked.sequences))
                                 : ""),
                 text);
}

// --- Times ------------------------------------------------------------------------------------------

/// Two bars, masked above dense, with their times written after them.
std::string time_bars(std::string_view what, double masked, double dense, double longest, double top) {
  const double left = 110, room = kChartWidth - left - 150;
  const auto bar = [&](double y, double seconds, std::string_view colour, const std::string& label) {
    const double width = std::max(longest > 0 ? room * seconds / longest : 0, 1.0);
    return fmt::format(
        "<rect x=\"{}\" y=\"{}\" width=\"{:.1f}\" height=\"18\" rx=\"3\" fill=\"var({})\"/><text x=\"{:.1f}\" "
        "y=\"{}\">{}</text>\n",
        left, y, width, colour, left + width + 8, y + 14, label);
  };
  const double speedup = masked > 0 ? dense / masked : 0;
  return fmt::format("<text x=\"0\" y=\"{}\">{}</text>\n", top + 25, what) +
         bar(top, masked, "--masked", fmt::format("{} ({:.1f}×)", seconds_text(masked), speedup)) +
         bar(top + 22, dense, "--dense", seconds_text(dense));
}

std::string comparison_section(const RunFigures& f) {
  const DenseFigures& d = f.dense;
  if (d.sequences == 0) return section("Against dense masks", escaped("The comparison was " + d.note + "."), "");
  const double longest = d.dense.attention() > d.masked.attention() ? d.dense.attention() : d.masked.attention();
  std::string text =
      "<div class=\"key\"><span><i style=\"background:var(--masked)\"></i>startend_row_indices: hidden tiles are "
      "skipped</span>"
      "<span><i style=\"background:var(--dense)\"></i>dense mask: every tile is worked through</span></div>\n";
  text += fmt::format(
      "<svg class=\"chart\" viewBox=\"0 0 {} 180\" role=\"img\" aria-label=\"Times with both kinds of mask\">\n",
      kChartWidth);
  text += time_bars("forward", d.masked.forward, d.dense.forward, longest, 4);
  text += time_bars("backward", d.masked.backward, d.dense.backward, longest, 66);
  text += time_bars("both", d.masked.attention(), d.dense.attention(), longest, 128);
  text += "</svg>\n";
  std::vector<std::string> header{"results of the two runs"}, row{"the same bits"};
  for (const auto& e : d.equality) {
    header.push_back(e.tensor);
    row.push_back(verdict(e.equal, e.equal ? "yes" : "NO"));
  }
  text += table(header, {row});
  const std::string which = d.note.empty() ? fmt::format("All {}.", plural(d.sequences, "sequence"))
                                           : fmt::format("The first {} of {} sequences: {}.", grouped(d.sequences),
                                                         grouped(f.masked.sequences), escaped(d.note));
  return section(
      "Against dense masks",
      "The same tensors, the same tiled code and the same arithmetic, with the mask given in two ways. " + which, text);
}

std::string times_section(const RunFigures& f) {
  const Seconds& s = f.masked.seconds;
  const auto row = [](std::string_view what, double seconds, const RunFigures::Rate& rate) {
    return std::vector<std::string>{std::string(what), seconds_text(seconds), rate_text(rate.visible),
                                    rate_text(rate.executed)};
  };
  std::vector<std::vector<std::string>> rows{{"plan", seconds_text(s.plan), "", ""},
                                             row("forward", s.forward, f.forward_rate()),
                                             row("backward", s.backward, f.backward_rate())};
  return section("Times",
                 fmt::format("{} in calls of {}; backend {}{}.", plural(f.masked.sequences, "sequence"),
                             f.masked.batch_size, escaped(f.masked.backend),
                             f.masked.configuration.empty() ? "" : ": " + escaped(f.masked.configuration)),
                 table({"", "time", "on visible elements", "on whole tiles"}, rows));
}

// --- Checks -----------------------------------------------------------------------------------------

std::string check_section(const RunFigures& f) {
  const CheckFigures& check = f.masked.check;
  std::vector<std::vector<std::string>> rows;
  for (const Accuracy& a : check.accuracy) {
    rows.push_back({a.tensor, fmt::format("{:.1e}", a.max_error), fmt::format("{:.1e}", a.limit),
                    fmt::format("{:.3g}", a.max_reference), verdict(a.passed(), a.passed() ? "ok" : "FAILED")});
  }
  std::string text = table({"", "largest error", "allowed", "largest value", ""}, rows);
  const auto count = [](std::string_view what, int64_t found) {
    return std::vector<std::string>{std::string(what), grouped(found),
                                    verdict(found == 0, found == 0 ? "ok" : "FAILED")};
  };
  text += table({}, {count("sampled elements that the mask and the documents see differently", check.wrong_visibility),
                     count("elements of the results that are NaN or were not written", check.unwritten_or_nan),
                     count("elements of padding that are not 0 (lse: -inf)", check.dirty_padding)});
  return section("Check",
                 fmt::format("{} and {}, drawn by seed, against an oracle that computes them in fp64 from documents "
                             "and answers, without masks or tiles.",
                             plural(check.rows, "query row"), plural(check.columns, "key column")),
                 text);
}

std::string bad_lines_section(const RunFigures& f) {
  const auto& bad = f.records.summary.bad_lines;
  if (bad.empty()) return "";
  std::vector<std::vector<std::string>> rows;
  for (const io::BadLine& line : bad) rows.push_back({grouped(line.line), escaped(line.reason)});
  return section("Bad lines",
                 fmt::format("{} left out (--skip-bad).", plural(static_cast<int64_t>(bad.size()), "line")),
                 "<div class=\"wrap\">" + table({"line", "reason"}, rows) + "</div>\n");
}

}  // namespace

std::string report_html(const RunFigures& f) {
  const std::string footer =
      fmt::format("<footer>Made by flashmask {}.{}.{} from {}, seed {}.</footer>\n", FLASHMASK_VERSION_MAJOR,
                  FLASHMASK_VERSION_MINOR, FLASHMASK_VERSION_PATCH, escaped(f.options.input), f.options.seed);
  return page(fmt::format("flashmask run: {}", std::filesystem::path(f.options.input).filename().string()),
              head(f) + main_figures(f) + packing_section(f) + masks_section(f) + comparison_section(f) +
                  times_section(f) + check_section(f) + bad_lines_section(f) + footer);
}

}  // namespace flashmask::run
