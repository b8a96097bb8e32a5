// SPDX-License-Identifier: Apache-2.0
// Every instantiation of the forward kernel on small problems through the public interface, against float64 on the
// host: a program of its own, to be run under a memory or race checker or with a library that has delays in it.
//
// The number of heads chooses the kernel with three consumer warpgroups. Heads repeat a few patterns of Q and the mask,
// so that every element is checked while float64 is computed once for each pattern.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "common/arithmetic.h"
#include "common/random.h"
#include "flashmask/attention.h"
#include "gpu/device_mask.h"
#include "gpu/kernel_cases.h"
#include "support/independent_rule.h"

namespace flashmask::test {
namespace {

/// Two row tiles of either size, the last one short.
constexpr int64_t kSeqlenQ = 200;
/// Three key blocks; and so many that the schedule for long rows runs.
constexpr int64_t kShort = 333, kLong = 1100;
constexpr int64_t kHeadsKv = 2;
constexpr int64_t kPatterns = 3;
/// Scores have this standard deviation: enough for the running maximum to rise now and then.
constexpr double kSharpness = 3;
constexpr double kLseLimit = 2e-4;

double softmax_scale(int64_t head_dim) { return kSharpness / std::sqrt(static_cast<double>(head_dim)); }
/// Weights and results are rounded to the type: half a unit in the last place each.
double out_limit(DataType dtype, double expected) { return rounding(dtype) * (1 + std::abs(expected)); }

enum class MaskKind { kFull, kWindow, kTwoIntervals, kEmptyRows, kDocuments, kPerHead };
constexpr std::pair<MaskKind, const char*> kMasks[] = {{MaskKind::kFull, "full"},
                                                       {MaskKind::kWindow, "causal window"},
                                                       {MaskKind::kTwoIntervals, "two intervals"},
                                                       {MaskKind::kEmptyRows, "empty rows"},
                                                       {MaskKind::kDocuments, "documents per kv head"},
                                                       {MaskKind::kPerHead, "four bounds per head"}};
constexpr std::size_t kQuickMasks = 4;

enum class Mode { kPlanInCall, kPlanGiven, kDense };
constexpr std::pair<Mode, const char*> kModes[] = {
    {Mode::kPlanInCall, "plan made in the call"}, {Mode::kPlanGiven, "plan given"}, {Mode::kDense, "dense mask"}};

struct Case {
  Instance instance;
  MaskKind kind;
  const char* mask_name;
  int64_t batch, heads, seqlen_k;

  int64_t dim() const { return instance.head_dim; }
  int64_t dim_v() const { return instance.head_dim_v; }
  int64_t kv_head(int64_t head) const { return head / (heads / kHeadsKv); }
};

std::string describe(const Case& c, const char* mode) {
  return describe(c.instance, c.mask_name, c.batch, c.heads, kHeadsKv, kSeqlenQ, c.seqlen_k, mode);
}

/// Fewest heads for `work_tiles` row tiles of `rows` rows.
int64_t heads_for(int64_t work_tiles, int64_t batch, int64_t rows) {
  return round_up(ceil_div(work_tiles, batch * ceil_div(kSeqlenQ, rows)), kHeadsKv);
}

/// Three consumers from two work tiles of 192 rows for each multiprocessor on. With two, two masks get more of them
/// than there are multiprocessors, so that blocks take several.
Case make_case(const Instance& instance, MaskKind kind, const char* name, int64_t seqlen_k, int multiprocessors) {
  const int64_t batch = kind == MaskKind::kPerHead ? 2 : 1;
  int64_t heads = 2 * kHeadsKv;
  if (instance.consumers == 3) {
    heads = heads_for(2 * multiprocessors, batch, 192);
  } else if (kind == MaskKind::kPerHead || kind == MaskKind::kWindow) {
    heads = heads_for(multiprocessors + 1, batch, 128);
  }
  return {instance, kind, name, batch, heads, seqlen_k};
}

std::vector<Case> all_cases(int multiprocessors, bool quick) {
  std::vector<Case> cases;
  for (const Instance& instance : instances("fwd")) {
    for (std::size_t n = 0; n < (quick ? kQuickMasks : std::size(kMasks)); ++n) {
      const auto& [kind, name] = kMasks[n];
      // In long rows rings of buffers come round, and some head dims have a schedule of their own.
      if (instance.head_dim != 128) cases.push_back(make_case(instance, kind, name, kLong, multiprocessors));
      if (instance.head_dim == 128 || !quick) cases.push_back(make_case(instance, kind, name, kShort, multiprocessors));
    }
  }
  for (const Instance& padded : padded_instances()) {
    const auto& [kind, name] = kMasks[static_cast<std::size_t>(MaskKind::kTwoIntervals)];
    cases.push_back(make_case(padded, kind, name, kShort, multiprocessors));
  }
  return cases;
}

// --- Masks -------------------------------------------------------------------------------------------

/// Differs by key block: nothing hidden; one interval for all keys; two for each key; exactly one warpgroup's rows.
Column two_intervals(Random& random, int64_t j) {
  switch (j / 128 % 4) {
    case 0:
      return {10, 10, 7, 3};
    case 1:
      return {40, 150, 0, 0};
    case 2: {
      const int64_t first = random.integer(0, kSeqlenQ), second = random.integer(0, kSeqlenQ);
      return {first, first + random.integer(0, 60), second, second + random.integer(0, 60)};
    }
    default:
      return {64, 128, 190, kSeqlenQ};
  }
}

/// The third pattern of heads sees nothing.
Column per_head(Random& random, int64_t head) {
  if (head % kPatterns == 2) return {0, kSeqlenQ, 0, 0};
  const auto any = [&] { return random.integer(-2, kSeqlenQ + 2); };
  return {any(), any(), any(), any()};
}

int64_t document_length(int64_t head) { return head == 0 ? 70 : 130; }

void add_columns(const Case& c, int64_t b, int64_t head, MaskParts& parts) {
  Random random(static_cast<uint64_t>(7 * b + head % kPatterns + 1));
  for (int64_t j = 0; j < c.seqlen_k; ++j) {
    if (c.kind == MaskKind::kDocuments) {
      parts.lts.push_back(static_cast<int32_t>(document_end(document_length(head), j, kSeqlenQ, c.seqlen_k)));
      continue;
    }
    const Column column = c.kind == MaskKind::kTwoIntervals ? two_intervals(random, j)
                          : c.kind == MaskKind::kPerHead    ? per_head(random, head)
                                                            : Column{0, 70, 120, kSeqlenQ};
    add_column(column, parts);
  }
}

MaskParts make_parts(const Case& c) {
  MaskParts parts{.seqlen_q = kSeqlenQ, .seqlen_k = c.seqlen_k};
  if (c.kind == MaskKind::kWindow) parts.band = Band::window(c.seqlen_k * 2 / 3, 0);
  if (c.kind == MaskKind::kDocuments) parts.band = Band::causal();
  if (c.kind == MaskKind::kFull || c.kind == MaskKind::kWindow) return parts;
  parts.batch = c.kind == MaskKind::kPerHead ? c.batch : 1;
  parts.heads = c.kind == MaskKind::kPerHead ? c.heads : c.kind == MaskKind::kDocuments ? kHeadsKv : 1;
  for (int64_t b = 0; b < parts.batch; ++b) {
    for (int64_t head = 0; head < parts.heads; ++head) add_columns(c, b, head, parts);
  }
  return parts;
}

// --- Numbers -----------------------------------------------------------------------------------------

/// Inputs on the host. Q's heads repeat: q_patterns [batch, kPatterns, seqlen_q, head_dim].
struct Inputs {
  Numbers q_patterns, k, v;
  std::vector<uint16_t> q;
  MaskParts mask;

  Inputs(const Case& c, Random random)
      : q_patterns(random, c.instance.dtype, c.batch * kPatterns * kSeqlenQ * c.instance.head_dim),
        k(random, c.instance.dtype, c.batch * c.seqlen_k * kHeadsKv * c.instance.head_dim),
        v(random, c.instance.dtype, c.batch * c.seqlen_k * kHeadsKv * c.instance.head_dim_v),
        mask(make_parts(c)) {
    q.reserve(static_cast<std::size_t>(c.batch * kSeqlenQ * c.heads * c.instance.head_dim));
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t i = 0; i < kSeqlenQ; ++i) {
        for (int64_t head = 0; head < c.heads; ++head) {
          const auto row = q_patterns.bits.begin() + pattern_row(c, b, head, i);
          q.insert(q.end(), row, row + c.instance.head_dim);
        }
      }
    }
  }

  static int64_t pattern_row(const Case& c, int64_t b, int64_t head, int64_t i) {
    return ((b * kPatterns + head % kPatterns) * kSeqlenQ + i) * c.instance.head_dim;
  }
};

/// Expected results of one head.
struct Expected {
  std::vector<double> out, lse;
};

/// Attention of one head in float64, by the rule of the tests.
class Oracle {
 public:
  Oracle(const Case& c, const Inputs& inputs)
      : c_(c), inputs_(inputs), known_(static_cast<std::size_t>(c.batch * kHeadsKv * kPatterns)) {}

  const Expected& of(int64_t b, int64_t head) {
    auto& known = known_[static_cast<std::size_t>((b * kHeadsKv + c_.kv_head(head)) * kPatterns + head % kPatterns)];
    if (!known) known = compute(b, head);
    return *known;
  }

 private:
  const double* kv_row(const Numbers& x, int64_t dim, int64_t b, int64_t head, int64_t j) const {
    return x.values.data() + ((b * c_.seqlen_k + j) * kHeadsKv + c_.kv_head(head)) * dim;
  }
  bool visible(int64_t b, int64_t head, int64_t i, int64_t j) const {
    const MaskParts& mask = inputs_.mask;
    const int64_t bounds = (mask.batch == 1 ? 0 : b) * mask.heads + head * mask.heads / c_.heads;
    return sees(mask, bounds, 0, 0, i, j);
  }

  Expected compute(int64_t b, int64_t head) const {
    const auto dim = static_cast<std::size_t>(c_.dim_v());
    Expected expected{std::vector<double>(kSeqlenQ * dim), std::vector<double>(kSeqlenQ)};
    for (int64_t i = 0; i < kSeqlenQ; ++i) {
      const double* q = inputs_.q_patterns.values.data() + Inputs::pattern_row(c_, b, head, i);
      double* out = expected.out.data() + static_cast<std::size_t>(i) * dim;
      double sum = 0;
      // Scores are far from where exp overflows, so there is no maximum to take off.
      for (int64_t j = 0; j < c_.seqlen_k; ++j) {
        if (!visible(b, head, i, j)) continue;
        const double weight =
            std::exp(dot(q, kv_row(inputs_.k, c_.dim(), b, head, j), c_.dim()) * softmax_scale(c_.dim()));
        const double* v = kv_row(inputs_.v, c_.dim_v(), b, head, j);
        for (std::size_t d = 0; d < dim; ++d) out[d] += weight * v[d];
        sum += weight;
      }
      for (std::size_t d = 0; d < dim && sum > 0; ++d) out[d] /= sum;
      expected.lse[static_cast<std::size_t>(i)] = std::log(sum);
    }
    return expected;
  }

  const Case& c_;
  const Inputs& inputs_;
  std::vector<std::optional<Expected>> known_;
};

// --- Runs --------------------------------------------------------------------------------------------

struct Results {
  std::vector<std::byte> out, lse;
  bool operator==(const Results&) const = default;
};

/// A case on the device.
class DeviceRun {
 public:
  DeviceRun(const Case& c, const Inputs& inputs, bool poison)
      : c_(c),
        poison_(poison),
        q_(with_columns_beyond(inputs.q, c.dim())),
        k_(with_columns_beyond(inputs.k.bits, c.dim())),
        v_(with_columns_beyond(inputs.v.bits, c.dim_v())),
        vectors_(interleave(inputs.mask)),
        dense_(0),
        out_(static_cast<std::size_t>(2 * c.batch * kSeqlenQ * c.heads * (c.dim_v() + kBeyond))),
        lse_(static_cast<std::size_t>(4 * c.batch * kSeqlenQ * c.heads)),
        plan_(0),
        mask_(make_mask(inputs.mask, vectors_)) {}

  /// Outputs and workspace begin as NaN.
  Results run(Mode mode, const MaskParts& parts) {
    const ForwardArgs args = make_args(mode, parts);
    const Options options{.softmax_scale = softmax_scale(c_.instance.head_dim), .backend = "cuda"};
    const int64_t rows = explain(args, options).tile.rows;
    if (runs_hopper_kernels() && rows != 64 * c_.instance.consumers)
      throw std::runtime_error("tiles of " + std::to_string(rows) + " rows: another kernel is chosen");
    out_.fill(0xff);
    lse_.fill(0xff);
    DeviceBytes workspace(forward_workspace(args, options));
    if (poison_) workspace.fill(0xff);
    forward(args, {workspace.data(), workspace.size()}, options);
    require(cudaDeviceSynchronize(), "forward");
    return {out_.read(), lse_.read()};
  }

 private:
  TensorView rows_on_device(const DeviceBytes& bytes, int64_t seqlen, int64_t heads, int64_t dim) const {
    return on_device_with_columns_beyond(bytes, c_.instance.dtype, {c_.batch, seqlen, heads, dim});
  }
  ForwardArgs make_args(Mode mode, const MaskParts& parts) {
    ForwardArgs args;
    args.q = rows_on_device(q_, kSeqlenQ, c_.heads, c_.dim());
    args.k = rows_on_device(k_, c_.seqlen_k, kHeadsKv, c_.dim());
    args.v = rows_on_device(v_, c_.seqlen_k, kHeadsKv, c_.dim_v());
    args.out = rows_on_device(out_, kSeqlenQ, c_.heads, c_.dim_v());
    args.lse = on_device(lse_, DataType::kFloat32, {c_.batch, c_.heads, kSeqlenQ});
    if (mode == Mode::kDense) {
      dense_ = DeviceBytes(dense_by_rule(parts));
      args.dense_mask = on_device(dense_, DataType::kUInt8, {parts.batch, parts.heads, kSeqlenQ, c_.seqlen_k});
    } else {
      args.mask = mask_;
    }
    if (mode == Mode::kPlanGiven) args.plan = make_plan(mask_, plan_, poison_);
    return args;
  }

  const Case& c_;
  const bool poison_;
  DeviceBytes q_, k_, v_, vectors_, dense_, out_, lse_, plan_;
  Mask mask_;
};

void compare_row(const Case& c, const Results& results, const Expected& expected, int64_t b, int64_t head, int64_t i,
                 Difference& out, Difference& lse) {
  const int64_t dim = c.dim_v();
  const auto row = static_cast<std::size_t>(i);
  float got_lse;
  std::memcpy(&got_lse, results.lse.data() + 4 * ((b * c.heads + head) * kSeqlenQ + i), sizeof(got_lse));
  lse.add("lse", got_lse, expected.lse[row], kLseLimit, b, head, i);
  const bool sees_nothing = std::isinf(expected.lse[row]);
  std::vector<uint16_t> bits(static_cast<std::size_t>(dim + kBeyond));
  std::memcpy(bits.data(), results.out.data() + 2 * ((b * kSeqlenQ + i) * c.heads + head) * (dim + kBeyond),
              2 * bits.size());
  expect_untouched("out", bits.data() + dim, out, b, head, i);
  for (int64_t d = 0; d < dim; ++d) {
    const double right = expected.out[row * static_cast<std::size_t>(dim) + static_cast<std::size_t>(d)];
    out.add("out", from_bits(c.instance.dtype, bits[static_cast<std::size_t>(d)]), right,
            sees_nothing ? 0 : out_limit(c.instance.dtype, right), b, head, i, d);
  }
}

bool judge(const Case& c, const Results& results, Oracle& oracle) {
  Difference out, lse;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t head = 0; head < c.heads; ++head) {
      for (int64_t i = 0; i < kSeqlenQ; ++i) compare_row(c, results, oracle.of(b, head), b, head, i, out, lse);
    }
  }
  return verdict(out.wrong.empty() ? lse.wrong : out.wrong, within({{"out", out}, {"lse", lse}}));
}

auto modes(const Arguments& arguments) { return std::span(kModes).first(arguments.quick ? 1 : std::size(kModes)); }

int run_all(const Arguments& arguments, int multiprocessors) {
  return run_cases(all_cases(multiprocessors, arguments.quick), modes(arguments),
                   [&](const Case& c, auto in_all_modes) {
                     const Inputs inputs(c, Random(1));
                     Oracle oracle(c, inputs);
                     DeviceRun device(c, inputs, arguments.poison);
                     in_all_modes([&](Mode mode, const char* name) {
                       return run_and_judge(
                           describe(c, name), arguments.repeat, [&] { return device.run(mode, inputs.mask); },
                           std::equal_to<Results>(), [&](const Results& results) { return judge(c, results, oracle); });
                     });
                   });
}

}  // namespace
}  // namespace flashmask::test

int main(int count, char** words) {
  using namespace flashmask::test;
  return run_program(
      count, words, usage("gpu_forward_cases", "four masks, with a plan made in the call"),
      [](const Arguments& arguments, int multiprocessors) {
        return list_cases(all_cases(multiprocessors, arguments.quick), modes(arguments));
      },
      run_all);
}
