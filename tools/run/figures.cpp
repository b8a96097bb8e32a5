// SPDX-License-Identifier: Apache-2.0
#include "run/figures.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string_view>

#include "draw/words.h"
#include "flashmask/version.h"

namespace flashmask::run {
namespace {

using nlohmann::ordered_json;

double ratio(double a, double b) { return b > 0 ? a / b : 0; }

/// JSON has no infinities: they become null.
ordered_json number(double value) { return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr); }

ordered_json seconds_json(const Seconds& seconds, bool with_plan) {
  ordered_json out;
  if (with_plan) out["plan_s"] = seconds.plan;
  out["forward_s"] = seconds.forward;
  out["backward_s"] = seconds.backward;
  return out;
}

ordered_json input_json(const RunFigures& f) {
  ordered_json bad = ordered_json::array();
  for (const io::BadLine& line : f.records.summary.bad_lines)
    bad.push_back({{"line", line.line}, {"reason", line.reason}});
  return {{"file", f.options.input},
          {"task", name(f.options.task)},
          {"lines", f.records.summary.lines},
          {"blank_lines", f.records.summary.blank_lines},
          {"records", f.packed.documents},
          {"text_bytes", f.records.text_bytes},
          {"bad_lines", bad}};
}

/// The nodes column by column: entry n of each is node n's.
ordered_json nodes_json(const std::vector<PackedNode>& nodes) {
  const auto column = [&](int32_t PackedNode::* member) {
    ordered_json values = ordered_json::array();
    for (const PackedNode& node : nodes) values.push_back(node.*member);
    return values;
  };
  ordered_json columns;
  int32_t PackedNode::* const members[] = {&PackedNode::segment,  &PackedNode::node,  &PackedNode::parent,
                                           &PackedNode::sequence, &PackedNode::begin, &PackedNode::end};
  for (std::size_t n = 0; n < std::size(kNodeColumns); ++n) columns[kNodeColumns[n]] = column(members[n]);
  return columns;
}

ordered_json packing_json(const Packed& packed) {
  ordered_json out{{"seqlen", packed.seqlen},
                   {"sequences", packed.sequences},
                   {"documents", packed.documents},
                   {"tokens", packed.tokens},
                   {"padding_share", packed.padding_share()}};
  if (shares_prefix(packed.task)) {
    out["sharing"] = {{"tokens", packed.tokens},
                      {"separate_sequences", packed.separate.count},
                      {"separate_tokens", packed.separate.tokens},
                      {"ratio", packed.sharing_ratio()}};
  }
  if (packed.task == Task::kTree) out["nodes"] = nodes_json(packed.nodes);
  return out;
}

ordered_json masks_json(const MaskedFigures& m) {
  const MaskStatistics& s = m.statistics;
  return {{"visible_share", s.visible_share()},
          {"tile", {s.tile.rows, s.tile.keys}},
          {"tiles", s.tiles},
          {"skipped_tiles", s.tiles - s.live_tiles()},
          {"partial_tiles", s.partial_tiles},
          {"full_tiles", s.full_tiles},
          {"live_share", s.live_share()},
          {"mask_bytes", m.mask_bytes},
          {"plan_bytes", m.plan_bytes},
          {"dense_mask_bytes", m.dense_mask_bytes}};
}

ordered_json check_json(const CheckFigures& check) {
  ordered_json tensors;
  for (const Accuracy& a : check.accuracy) {
    tensors[a.tensor] = {{"max_error", number(a.max_error)},
                         {"limit", number(a.limit)},
                         {"max_reference", number(a.max_reference)},
                         {"plain_error", number(a.plain_error)},
                         {"passed", a.passed()}};
  }
  return {{"rows", check.rows},
          {"columns", check.columns},
          {"tensors", tensors},
          {"wrong_visibility", check.wrong_visibility},
          {"unwritten_or_nan", check.unwritten_or_nan},
          {"dirty_padding", check.dirty_padding},
          {"passed", check.passed()}};
}

ordered_json dense_json(const RunFigures& f) {
  if (f.dense.sequences == 0) return {{"sequences", 0}, {"note", f.dense.note}};
  ordered_json equality;
  for (const auto& e : f.dense.equality) equality[e.tensor] = e.equal;
  return {{"sequences", f.dense.sequences},
          {"note", f.dense.note},
          {"masked", seconds_json(f.dense.masked, true)},
          {"dense", seconds_json(f.dense.dense, false)},
          {"speedup", {{"forward", f.forward_speedup()}, {"backward", f.backward_speedup()}, {"both", f.speedup()}}},
          {"bitwise_equal", equality},
          {"all_equal", f.dense.equal()}};
}

std::string input_text(const RunFigures& f) {
  std::string text = fmt::format("{}: {} record{}, {} bytes of text", f.options.input, grouped(f.packed.documents),
                                 f.packed.documents == 1 ? "" : "s", grouped(f.records.text_bytes));
  const auto bad = f.records.summary.bad_lines.size();
  if (bad > 0) text += fmt::format("; {} bad line{} skipped", bad, bad == 1 ? "" : "s");
  return text;
}

std::string tiles_text(const MaskStatistics& s) {
  return fmt::format("{} of {} tiles of {}x{} skipped ({}), {} partial, {} full", grouped(s.tiles - s.live_tiles()),
                     grouped(s.tiles), s.tile.rows, s.tile.keys, percent_text(1 - s.live_share()),
                     grouped(s.partial_tiles), grouped(s.full_tiles));
}

std::string rates_text(const RunFigures::Rate& rate) {
  return fmt::format("{} on visible elements, {} on whole tiles", rate_text(rate.visible), rate_text(rate.executed));
}

std::string sequences_text(int64_t count) {
  return fmt::format("{} sequence{}", grouped(count), count == 1 ? "" : "s");
}

std::vector<std::string> packing_lines(const Packed& packed) {
  std::vector<std::string> lines{fmt::format("{} tokens in {} of {}, {} padding", grouped(packed.tokens),
                                             sequences_text(packed.sequences), grouped(packed.seqlen),
                                             percent_text(packed.padding_share()))};
  if (shares_prefix(packed.task)) {
    const std::string nodes =
        packed.task == Task::kTree ? fmt::format("{} nodes; ", grouped(static_cast<int64_t>(packed.nodes.size()))) : "";
    lines.push_back(fmt::format("{}{} as a sequence of its own: {} tokens, {:.2f}x; sharing saves {}", nodes,
                                separate_text(packed), grouped(packed.separate.tokens), packed.sharing_ratio(),
                                grouped(packed.separate.tokens - packed.tokens)));
  }
  return lines;
}

/// "the first 3 of 58 sequences", "all 58 sequences".
std::string some_text(int64_t count, int64_t all) {
  if (count == all) return all == 1 ? "the one sequence" : fmt::format("all {}", sequences_text(all));
  return count == 1 ? fmt::format("the first of {}", sequences_text(all))
                    : fmt::format("the first {} of {}", grouped(count), sequences_text(all));
}

/// Adds a section: its name once, then its lines.
void add_section(std::string& text, std::string_view title, const std::vector<std::string>& lines) {
  for (std::size_t n = 0; n < lines.size(); ++n) text += fmt::format("{:<11}{}\n", n == 0 ? title : "", lines[n]);
}

std::vector<std::string> check_lines(const CheckFigures& check) {
  std::vector<std::string> lines{
      fmt::format("{} query rows and {} key columns against an fp64 oracle", check.rows, check.columns)};
  for (const Accuracy& a : check.accuracy) {
    lines.push_back(fmt::format("{:<4} largest error {:.1e}, allowed {:.1e}  {}", a.tensor, a.max_error, a.limit,
                                a.passed() ? "ok" : "FAILED"));
  }
  lines.push_back(check.dirty_padding == 0 && check.unwritten_or_nan == 0
                      ? std::string("every element written, none NaN; padding 0 in out, dq, dk and dv, -inf in lse  ok")
                      : fmt::format("{} elements NaN or not written, {} wrong in the padding  FAILED",
                                    check.unwritten_or_nan, check.dirty_padding));
  if (check.wrong_visibility > 0)
    lines.push_back(fmt::format("{} elements of the sampled rows are masked wrongly  FAILED", check.wrong_visibility));
  return lines;
}

std::vector<std::string> dense_lines(const RunFigures& f) {
  const DenseFigures& d = f.dense;
  if (d.sequences == 0) return {d.note};
  const auto line = [](std::string_view what, double masked, double dense, double speedup) {
    return fmt::format("{:<8} {:>9} masked, {:>9} dense: {:.1f}x", what, seconds_text(masked), seconds_text(dense),
                       speedup);
  };
  std::vector<std::string> lines;
  lines.push_back(some_text(d.sequences, f.masked.sequences) + (d.note.empty() ? "" : fmt::format(" ({})", d.note)));
  lines.push_back(line("forward", d.masked.forward, d.dense.forward, f.forward_speedup()));
  lines.push_back(line("backward", d.masked.backward, d.dense.backward, f.backward_speedup()));
  lines.push_back(line("both", d.masked.attention(), d.dense.attention(), f.speedup()));
  std::string equal, different;
  for (const auto& e : d.equality)
    (e.equal ? equal : different) += (e.equal ? equal : different).empty() ? e.tensor : ", " + e.tensor;
  if (!equal.empty()) lines.push_back(fmt::format("{}: the same bits in both runs  ok", equal));
  if (!different.empty()) lines.push_back(fmt::format("{}: different bits in the two runs  FAILED", different));
  return lines;
}

}  // namespace

AttentionFlops RunFigures::flops(double share) const {
  return attention_flops(masked.sequences, options.shape.heads, packed.seqlen, packed.seqlen, options.shape.head_dim,
                         options.shape.head_dim, share);
}

RunFigures::Rate RunFigures::forward_rate() const {
  const double unit = 1e12 * masked.seconds.forward;
  return {ratio(flops(masked.statistics.visible_share()).forward, unit),
          ratio(flops(masked.statistics.live_share()).forward, unit)};
}

RunFigures::Rate RunFigures::backward_rate() const {
  const double unit = 1e12 * masked.seconds.backward;
  return {ratio(flops(masked.statistics.visible_share()).backward, unit),
          ratio(flops(masked.statistics.live_share()).backward, unit)};
}

double RunFigures::forward_speedup() const { return ratio(dense.dense.forward, dense.masked.forward); }
double RunFigures::backward_speedup() const { return ratio(dense.dense.backward, dense.masked.backward); }
double RunFigures::speedup() const { return ratio(dense.dense.attention(), dense.masked.attention()); }

ordered_json to_json(const RunFigures& f) {
  const AttentionShape& shape = f.options.shape;
  ordered_json times = seconds_json(f.masked.seconds, true);
  times["forward_tflops"] = f.forward_rate().visible;
  times["backward_tflops"] = f.backward_rate().visible;
  times["forward_tile_tflops"] = f.forward_rate().executed;
  times["backward_tile_tflops"] = f.backward_rate().executed;
  return {
      {"command", "run"},
      {"version", fmt::format("{}.{}.{}", FLASHMASK_VERSION_MAJOR, FLASHMASK_VERSION_MINOR, FLASHMASK_VERSION_PATCH)},
      {"passed", f.passed()},
      {"input", input_json(f)},
      {"packing", packing_json(f.packed)},
      {"attention",
       {{"sequences", f.masked.sequences},
        {"batch_size", f.masked.batch_size},
        {"heads", shape.heads},
        {"kv_heads", shape.kv_heads},
        {"head_dim", shape.head_dim},
        {"dtype", name(f.options.dtype)},
        {"seed", f.options.seed},
        {"backend", f.masked.backend},
        {"configuration", f.masked.configuration}}},
      {"masks", masks_json(f.masked)},
      {"times", times},
      {"check", check_json(f.masked.check)},
      {"comparison", dense_json(f)},
      {"files",
       {{"out", f.options.out.empty() ? ordered_json(nullptr) : ordered_json(f.options.out)},
        {"report", f.options.report.empty() ? ordered_json(nullptr) : ordered_json(f.options.report)}}}};
}

std::string to_text(const RunFigures& f) {
  const AttentionShape& shape = f.options.shape;
  const MaskedFigures& m = f.masked;
  std::string text;
  add_section(text, "input", {input_text(f), fmt::format("task {}", name(f.options.task))});
  add_section(text, "packing", packing_lines(f.packed));
  if (m.sequences < f.packed.sequences) {
    add_section(text, "",
                {fmt::format("from here on: {} (--limit-sequences)", some_text(m.sequences, f.packed.sequences))});
  }
  add_section(
      text, "masks",
      {fmt::format("{} of the elements visible", percent_text(m.statistics.visible_share())), tiles_text(m.statistics),
       fmt::format("{} and a plan of {}, in place of {} of dense masks", bytes_text(static_cast<double>(m.mask_bytes)),
                   bytes_text(static_cast<double>(m.plan_bytes)),
                   bytes_text(static_cast<double>(m.dense_mask_bytes)))});
  add_section(text, "attention",
              {fmt::format("{} head{}, {} key and value head{}, head dim {}, {}; {} a call", shape.heads,
                           shape.heads == 1 ? "" : "s", shape.kv_heads, shape.kv_heads == 1 ? "" : "s", shape.head_dim,
                           name(f.options.dtype), sequences_text(m.batch_size)),
               fmt::format("backend {}{}", m.backend, m.configuration.empty() ? "" : ": " + m.configuration)});
  add_section(text, "times",
              {fmt::format("plan     {:>9}", seconds_text(m.seconds.plan)),
               fmt::format("forward  {:>9}  {}", seconds_text(m.seconds.forward), rates_text(f.forward_rate())),
               fmt::format("backward {:>9}  {}", seconds_text(m.seconds.backward), rates_text(f.backward_rate()))});
  add_section(text, "check", check_lines(m.check));
  add_section(text, "dense mask", dense_lines(f));
  return text;
}

std::string separate_text(const Packed& packed) {
  if (packed.separate.count == 1) return "the one path from root to leaf";
  return fmt::format("each of {} {}", grouped(packed.separate.count),
                     packed.task == Task::kTree ? "paths from root to leaf" : "answers with its question");
}

std::string bytes_text(double bytes) {
  constexpr std::array<std::string_view, 5> kUnits{"bytes", "KiB", "MiB", "GiB", "TiB"};
  std::size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024;
  return unit == 0 ? fmt::format("{:.0f} bytes", bytes)
                   : fmt::format("{:.{}f} {}", bytes,
                                 bytes < 10    ? 2
                                 : bytes < 100 ? 1
                                               : 0,
                                 kUnits[unit]);
}

std::string seconds_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.0f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.1f} ms", seconds * 1e3);
  return fmt::format("{:.{}f} s", seconds, seconds < 10 ? 2 : 1);
}

std::string rate_text(double tera) {
  const double giga = 1e3 * tera;
  if (tera >= 1) return fmt::format("{:.{}f} TFLOP/s", tera, tera < 10 ? 2 : tera < 100 ? 1 : 0);
  return fmt::format("{:.{}f} GFLOP/s", giga, giga < 10 ? 2 : giga < 100 ? 1 : 0);
}

std::string percent_text(double share) {
  const double percent = 100 * share;
  return fmt::format("{:.{}f} %", percent, percent != 0 && percent < 1 ? 2 : 1);
}

}  // namespace flashmask::run
