// SPDX-License-Identifier: Apache-2.0
#include "verify/features.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <initializer_list>
#include <iterator>

#include "flashmask/builders.h"
#include "numerics/device_copies.h"
#include "verify/case.h"
#include "verify/problem.h"
#include "verify/random.h"

namespace flashmask::verify {
namespace {

TensorView undefined_memory(DataType dtype, std::initializer_list<int64_t> shape, const Device& device) {
  TensorView view = TensorView::contiguous(nullptr, dtype, shape);
  view.device = device;
  return view;
}

/// A call that every backend takes; it is never run.
ForwardArgs plain_call(const Device& device) {
  ForwardArgs args;
  args.q = args.k = args.v = args.out = undefined_memory(DataType::kBFloat16, {1, 1, 1, 64}, device);
  args.lse = undefined_memory(DataType::kFloat32, {1, 1, 1}, device);
  return args;
}

ForwardArgs call_with_positions(ForwardArgs args, const Device& device) {
  static int32_t position;
  TensorView positions = TensorView::contiguous(&position, DataType::kInt32, {1, 1});
  positions.device = device;
  args.mask = masks::causal(1, 1).with_positions(positions, positions);
  return args;
}

constexpr Words<SinkKind, 3> kSink{
    {{SinkKind::kNone, "none"}, {SinkKind::kFloat32, "float32"}, {SinkKind::kOwn, "own"}}};
constexpr Words<Positions, 3> kPositions{
    {{Positions::kNone, "none"}, {Positions::kShared, "shared"}, {Positions::kEach, "each"}}};
constexpr Words<Part, 3> kPart{{{Part::kNone, "none"}, {Part::kShared, "shared"}, {Part::kEach, "each"}}};
constexpr Words<AlibiKind, 3> kAlibi{
    {{AlibiKind::kNone, "none"}, {AlibiKind::kShared, "shared"}, {AlibiKind::kEach, "each"}}};

using Text = std::string_view;

/// Slopes between 2^-8 and 1, as the paper has them.
Tensor draw_slopes(const Case& c, Random& random) {
  const bool each = c.features.alibi == AlibiKind::kEach;
  Tensor slopes = each ? Tensor::contiguous(DataType::kFloat32, {c.batch, c.heads_q})
                       : Tensor::contiguous(DataType::kFloat32, {c.heads_q});
  slopes.fill([&] { return std::exp2(-8 * random.real()); });
  return slopes;
}

Tensor draw_sink(const Case& c, Random& random) {
  Tensor sink = Tensor::contiguous(c.sink_dtype(), {c.heads_q});
  sink.fill([&] { return random.normal(); });
  return sink;
}

constexpr CaseFeature kCaseFeatures[] = {
    {"sink", "sink", [](const CaseFeatures& f) { return static_cast<int>(f.sink); },
     [](const CaseFeatures& f) { return std::string(word(kSink, f.sink)); },
     [](CaseFeatures& f, Text key, Text value) { f.sink = value_of(kSink, key, value); }, 25, false,
     [](Random& random, CaseFeatures& f) { f.sink = random.flip() ? SinkKind::kFloat32 : SinkKind::kOwn; }, nullptr,
     &Features::sink, draw_sink},
    {"softcap", "softcap", [](const CaseFeatures& f) { return int{f.softcap != 0}; },
     [](const CaseFeatures& f) { return fmt::format("{}", f.softcap); },
     [](CaseFeatures& f, Text key, Text value) { f.softcap = finite(key, value); }, 20, true,
     [](Random& random, CaseFeatures& f) { f.softcap = 5 + 45 * random.real(); }},
    {"dropout", "dropout", [](const CaseFeatures& f) { return int{f.dropout != 0}; },
     [](const CaseFeatures& f) { return fmt::format("{}", f.dropout); },
     [](CaseFeatures& f, Text key, Text value) { f.dropout = finite(key, value); }, 20, false,
     [](Random& random, CaseFeatures& f) { f.dropout = 0.9 * random.real(); }},
    {"alibi", "alibi_slopes", [](const CaseFeatures& f) { return static_cast<int>(f.alibi); },
     [](const CaseFeatures& f) { return std::string(word(kAlibi, f.alibi)); },
     [](CaseFeatures& f, Text key, Text value) { f.alibi = value_of(kAlibi, key, value); }, 20, true,
     [](Random& random, CaseFeatures& f) { f.alibi = random.flip() ? AlibiKind::kShared : AlibiKind::kEach; },
     // The oracle's mask is dense, in which rows stand at the bottom right; a causal one is drawn with a q_offset.
     [](const Case& c) { return !c.q_offset && c.seqlen_q == c.seqlen_k && c.family != "causal"; },
     &Features::alibi_slopes, draw_slopes},
    {"positions", "positions", [](const CaseFeatures& f) { return static_cast<int>(f.positions); },
     [](const CaseFeatures& f) { return std::string(word(kPositions, f.positions)); },
     [](CaseFeatures& f, Text key, Text value) { f.positions = value_of(kPositions, key, value); }, 25, false,
     [](Random& random, CaseFeatures& f) { f.positions = random.flip() ? Positions::kShared : Positions::kEach; },
     [](const Case& c) { return !c.q_offset && c.features.alibi == AlibiKind::kNone; }},
    // Not every backend has partial results beside scores or weights of another kind.
    {"partial", "partial_out", [](const CaseFeatures& f) { return int{f.partial}; },
     [](const CaseFeatures&) { return std::string(word(kYesNo, true)); },
     [](CaseFeatures& f, Text key, Text value) { f.partial = value_of(kYesNo, key, value); }, 20, false,
     [](Random&, CaseFeatures& f) { f.partial = true; },
     [](const Case& c) {
       return c.features.softcap == 0 && c.features.dropout == 0 && c.features.alibi == AlibiKind::kNone;
     }},
    {"split_size", "split_size", [](const CaseFeatures& f) { return int{f.split_size != 0}; },
     [](const CaseFeatures& f) { return fmt::format("{}", f.split_size); },
     [](CaseFeatures& f, Text key, Text value) { f.split_size = integer(key, value, 0, kMaxSeqlen); }, 20, false,
     [](Random& random, CaseFeatures& f) { f.split_size = 128 * random.integer(1, 3); },
     [](const Case& c) { return c.features.dropout == 0; }},
    {"part", "dropout", [](const CaseFeatures& f) { return static_cast<int>(f.part); },
     [](const CaseFeatures& f) { return std::string(word(kPart, f.part)); },
     [](CaseFeatures& f, Text key, Text value) { f.part = value_of(kPart, key, value); }, 50, false,
     [](Random& random, CaseFeatures& f) { f.part = random.flip() ? Part::kShared : Part::kEach; },
     [](const Case& c) { return c.features.dropout != 0; }},
};

}  // namespace

std::span<const CaseFeature> case_features() { return kCaseFeatures; }

std::span<const CaseFeature> score_features() {
  static const std::vector<CaseFeature> rows = [] {
    std::vector<CaseFeature> taken;
    std::ranges::copy_if(kCaseFeatures, std::back_inserter(taken), &CaseFeature::of_scores);
    return taken;
  }();
  return rows;
}

std::string describe(const CaseFeatures& features, std::span<const CaseFeature> rows) {
  std::string text;
  for (const CaseFeature& row : rows) {
    if (row.kind(features) != 0) text += fmt::format(" {}={}", row.key, row.write(features));
  }
  return text;
}

const std::vector<CaseFeatures>& covering_combinations() {
  static const std::vector<CaseFeatures> all{{},
                                             {.sink = SinkKind::kFloat32},
                                             {.softcap = 20},
                                             {.sink = SinkKind::kOwn, .softcap = 50},
                                             {.dropout = 0.1, .part = Part::kEach},
                                             {.sink = SinkKind::kFloat32, .softcap = 30, .dropout = 0.5},
                                             {.positions = Positions::kShared},
                                             {.softcap = 40, .positions = Positions::kEach},
                                             {.partial = true},
                                             {.sink = SinkKind::kOwn, .positions = Positions::kEach, .partial = true},
                                             {.split_size = 128},
                                             {.sink = SinkKind::kOwn, .softcap = 30, .split_size = 256}};
  return all;
}

namespace {

/// A head's slope; 0 without any.
float slope_of(const Problem& problem, int64_t b, int64_t h) {
  const auto found = std::ranges::find(problem.tensors, &Features::alibi_slopes, &FeatureTensor::member);
  if (found == problem.tensors.end()) return 0;
  const TensorView& slopes = found->tensor.view();
  return static_cast<const float*>(
      slopes.data)[(slopes.rank == 2 ? b * slopes.stride[0] : 0) + h * slopes.stride[slopes.rank - 1]];
}

}  // namespace

Features numbers(const CaseFeatures& features) {
  constexpr int64_t kFirstHead = 3;
  return {.softcap = features.softcap,
          .dropout = {.p = features.dropout, .first_head = features.part == Part::kNone ? 0 : kFirstHead},
          .partial_out = features.partial,
          .split_size = features.split_size};
}

std::function<numerics::PlainScore(float, int64_t, int64_t)> plain_score(const Problem& problem, int64_t b, int64_t h) {
  const Case& c = problem.c;
  const CaseFeatures& features = c.features;
  if (features.scores_are_products()) return {};
  const float slope = slope_of(problem, b, h);
  return [features, slope, offset = c.seqlen_k - c.seqlen_q](float scaled, int64_t row, int64_t key) {
    const float score = features.capped(scaled) - slope * static_cast<float>(std::abs(row + offset - key));
    if (features.softcap == 0) return numerics::PlainScore{score, 1};
    const float cosh = std::cosh(scaled / static_cast<float>(features.softcap));
    return numerics::PlainScore{score, 1 / (cosh * cosh)};
  };
}

double dropout_scale(double p) { return 65536 / (65536 - std::min(std::round(p * 65536), 65535.0)); }

std::vector<std::string> refused_features(const std::string& backend) {
  const Device device = backend == "cuda" ? numerics::kDevice : Device{};
  const ForwardArgs args = plain_call(device);
  std::vector<std::string> refused;
  const auto ask = [&](const ForwardArgs& of, const Features& asked) {
    const Explanation explanation = explain(of, Options{.features = asked, .backend = backend});
    if (explanation.backend.empty())
      refused.insert(refused.end(), explanation.features.begin(), explanation.features.end());
  };
  ask(args, {.softcap = 30});
  ask(args, {.sink = undefined_memory(DataType::kFloat32, {1}, device)});
  ask(args, {.dropout = {.p = 0.1}});
  ask(args, {.alibi_slopes = undefined_memory(DataType::kFloat32, {1}, device)});
  ask(args, {.split_size = 128});
  ForwardArgs partial = args;
  partial.out.dtype = DataType::kFloat32;
  ask(partial, {.partial_out = true});
  ask(call_with_positions(args, device), {});
  return refused;
}

bool asks_for_any(const CaseFeatures& features, const std::vector<std::string>& names) {
  return std::ranges::any_of(kCaseFeatures, [&](const CaseFeature& feature) {
    return feature.kind(features) != 0 && std::ranges::find(names, feature.name) != names.end();
  });
}

}  // namespace flashmask::verify
