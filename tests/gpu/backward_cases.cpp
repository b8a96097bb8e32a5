// SPDX-License-Identifier: Apache-2.0
// Every instantiation of the backward kernels on small problems through the public interface, against float64 on the
// host: a program of its own, to be run under a memory or race checker or with a library that has delays in it.
//
// One mask gets more work tiles than there are multiprocessors, and so the kernel whose work tiles have all query heads
// that share a key head; the others get the kernel that splits these heads. That mask's heads repeat a few patterns of
// values and bounds, so that every element is checked while float64 is computed once for each pattern.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
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

/// Four row tiles of 64 rows, two of 128, the last one short; three key tiles, the last one short.
constexpr int64_t kSeqlenQ = 200, kSeqlenK = 333;
/// So many rows that kernels which can have two CTAs share those of a key tile.
constexpr int64_t kManyRows = 1100;
/// Key heads that differ.
constexpr int64_t kPatterns = 2;
/// Scores have this standard deviation.
constexpr double kSharpness = 1.5;
/// Errors of a sum's terms are independent and below their rounding: this many times the square root of their squares
/// is far off.
constexpr double kFarOff = 4;
/// Error of float32 when terms cancel.
constexpr double kSlack = 5e-5;

enum class MaskKind { kFull, kWindow, kTwoIntervals, kEmpty, kDocuments, kPerHead };
constexpr std::pair<MaskKind, const char*> kMasks[] = {{MaskKind::kFull, "full"},
                                                       {MaskKind::kWindow, "causal window"},
                                                       {MaskKind::kTwoIntervals, "two intervals"},
                                                       {MaskKind::kEmpty, "empty rows, columns"},
                                                       {MaskKind::kDocuments, "documents, many heads"},
                                                       {MaskKind::kPerHead, "four bounds per head"}};
constexpr std::size_t kQuickMasks = 5;

enum class Mode { kPlanInCall, kDeterministic, kDense };
constexpr std::pair<Mode, const char*> kModes[] = {{Mode::kPlanInCall, "plan made in the call"},
                                                   {Mode::kDeterministic, "deterministic"},
                                                   {Mode::kDense, "dense mask"}};
constexpr std::size_t kQuickModes = 2;

struct Case {
  Instance instance;
  MaskKind kind;
  const char* mask_name;
  int64_t heads_kv;
  int64_t group = 2;  ///< query heads of a key head
  int64_t seqlen_q = kSeqlenQ;

  int64_t heads() const { return group * heads_kv; }
  int64_t head_patterns() const { return group * kPatterns; }
  int64_t dim() const { return instance.head_dim; }
  int64_t dim_v() const { return instance.head_dim_v; }
  double scale() const { return kSharpness / std::sqrt(static_cast<double>(dim())); }
};

std::string describe(const Case& c, const char* mode) {
  return describe(c.instance, c.mask_name, 1, c.heads(), c.heads_kv, c.seqlen_q, kSeqlenK, mode);
}

/// True if the instance has a kernel whose CTAs share rows.
bool may_share_rows(const Instance& instance) {
  return std::ranges::any_of(kernels(), [&](const KernelInfo& kernel) {
    return kernel.id.ends_with(".shared") && kernel.dtype == instance.dtype && kernel.head_dim == instance.head_dim;
  });
}

std::vector<Case> all_cases(int multiprocessors, bool quick) {
  const int64_t many = round_up(ceil_div(multiprocessors + 1, ceil_div(kSeqlenK, 128)), kPatterns);
  std::vector<Case> cases;
  for (const Instance& instance : instances("bwd")) {
    for (std::size_t n = 0; n < (quick ? kQuickMasks : std::size(kMasks)); ++n) {
      const auto& [kind, name] = kMasks[n];
      cases.push_back({instance, kind, name, kind == MaskKind::kDocuments ? many : kPatterns});
    }
    if (runs_hopper_kernels() && may_share_rows(instance))
      cases.push_back({instance, MaskKind::kTwoIntervals, "two intervals", kPatterns, 1, kManyRows});
  }
  for (const Instance& padded : padded_instances()) {
    for (const MaskKind kind : {MaskKind::kTwoIntervals, MaskKind::kDocuments}) {
      if (quick && kind == MaskKind::kDocuments) continue;
      const char* name = kMasks[static_cast<std::size_t>(kind)].second;
      cases.push_back({padded, kind, name, kind == MaskKind::kDocuments ? many : kPatterns});
    }
  }
  return cases;
}

// --- Masks -------------------------------------------------------------------------------------------

/// Differs by key tile: one interval for all keys; two for each key; exactly one granule's rows.
Column two_intervals(Random& random, int64_t j, int64_t seqlen_q) {
  if (j < 128) return {40, 150, 0, 0};
  if (j >= 256) return {64, 128, 190, seqlen_q};
  const int64_t first = random.integer(0, seqlen_q), second = random.integer(0, seqlen_q);
  return {first, first + random.integer(0, 60), second, second + random.integer(0, 60)};
}

/// Some rows that see nothing; the middle key tile and some other keys that no row sees.
Column empty_rows_and_columns(int64_t j) {
  if ((j >= 128 && j < 256) || (j > 300 && j < 310)) return {0, kSeqlenQ, 0, 0};
  return {0, 70, 120, kSeqlenQ};
}

/// The last pattern of key heads sees nothing.
Column per_head(Random& random, int64_t kv_head) {
  if (kv_head % kPatterns == kPatterns - 1) return {0, kSeqlenQ, 0, 0};
  const auto any = [&] { return random.integer(-2, kSeqlenQ + 2); };
  return {any(), any(), any(), any()};
}

int64_t document_length(int64_t kv_head) { return kv_head % kPatterns == 0 ? 70 : 130; }

void add_columns(const Case& c, int64_t head, MaskParts& parts) {
  Random random(static_cast<uint64_t>(head + 1));
  for (int64_t j = 0; j < kSeqlenK; ++j) {
    if (c.kind == MaskKind::kDocuments) {
      parts.lts.push_back(static_cast<int32_t>(document_end(document_length(head), j, kSeqlenQ, kSeqlenK)));
      continue;
    }
    const Column column = c.kind == MaskKind::kTwoIntervals ? two_intervals(random, j, c.seqlen_q)
                          : c.kind == MaskKind::kPerHead    ? per_head(random, head / c.group)
                                                            : empty_rows_and_columns(j);
    add_column(column, parts);
  }
}

MaskParts make_parts(const Case& c) {
  MaskParts parts{.seqlen_q = c.seqlen_q, .seqlen_k = kSeqlenK};
  if (c.kind == MaskKind::kWindow) parts.band = Band::window(kSeqlenK / 3, 0);
  if (c.kind == MaskKind::kDocuments) parts.band = Band::causal();
  if (c.kind == MaskKind::kFull || c.kind == MaskKind::kWindow) return parts;
  parts.heads = c.kind == MaskKind::kPerHead ? c.heads() : c.kind == MaskKind::kDocuments ? c.heads_kv : 1;
  for (int64_t head = 0; head < parts.heads; ++head) add_columns(c, head, parts);
  return parts;
}

// --- Numbers -----------------------------------------------------------------------------------------

/// A [seqlen, heads, head_dim] tensor whose heads repeat those of [patterns, seqlen, head_dim].
struct Repeated {
  int64_t patterns, seqlen, dim;
  Numbers numbers;

  const double* row(int64_t head, int64_t i) const { return numbers.values.data() + place(head, i); }
  /// Rows of all heads, followed by the columns beyond them.
  std::vector<uint16_t> bits(int64_t heads) const {
    std::vector<uint16_t> all;
    for (int64_t i = 0; i < seqlen; ++i) {
      for (int64_t head = 0; head < heads; ++head) {
        const auto from = numbers.bits.begin() + place(head, i);
        all.insert(all.end(), from, from + dim);
      }
    }
    return with_columns_beyond(all, dim);
  }

 private:
  int64_t place(int64_t head, int64_t i) const { return (head % patterns * seqlen + i) * dim; }
};

Repeated random_rows(const Case& c, int64_t dim, Random& random) {
  const int64_t heads = c.head_patterns();
  return {heads, c.seqlen_q, dim, Numbers(random, c.instance.dtype, heads * c.seqlen_q * dim)};
}
Repeated random_keys(const Case& c, int64_t dim, Random& random) {
  return {kPatterns, kSeqlenK, dim, Numbers(random, c.instance.dtype, kPatterns * kSeqlenK * dim)};
}

/// Expected value of an element, and the limit of its error.
struct Sum {
  double value = 0, squares = 0;
  void add(double term) { value += term, squares += term * term; }
  double limit(DataType dtype) const {
    return squares == 0 ? 0 : rounding(dtype) * (kFarOff * std::sqrt(squares) + std::abs(value)) + kSlack;
  }
};

/// The gradients of the heads that differ: dq [head_patterns(), seqlen_q, dim], dk [kPatterns, kSeqlenK, dim]
/// and dv [kPatterns, kSeqlenK, dim_v].
struct Expected {
  std::vector<Sum> dq, dk, dv;
};

/// A problem on the host: inputs, what a forward gives for them in float64 with its out rounded, and the gradients.
class Problem {
 public:
  Problem(const Case& of, Random random)
      : c(of),
        mask(make_parts(of)),
        q(random_rows(of, of.dim(), random)),
        dout(random_rows(of, of.dim_v(), random)),
        k(random_keys(of, of.dim(), random)),
        v(random_keys(of, of.dim_v(), random)) {
    const auto dim = static_cast<std::size_t>(c.dim()), dim_v = static_cast<std::size_t>(c.dim_v());
    expected.dq.resize(c.head_patterns() * c.seqlen_q * dim);
    expected.dk.resize(kPatterns * kSeqlenK * dim);
    expected.dv.resize(kPatterns * kSeqlenK * dim_v);
    out = {c.head_patterns(), c.seqlen_q, c.dim_v(), {}};
    for (int64_t head = 0; head < c.head_patterns(); ++head) {
      for (int64_t i = 0; i < c.seqlen_q; ++i) run_row(random, head, i);
    }
  }

  const Case& c;
  MaskParts mask;
  Repeated q, dout, k, v, out;
  std::vector<float> lse, dlse;  ///< for the heads that differ, [head, row]
  Expected expected;

 private:
  bool visible(int64_t head, int64_t i, int64_t j) const {
    return sees(mask, head * mask.heads / c.heads(), 0, 0, i, j);
  }

  /// One row's out and lse, and what it adds to the gradients.
  void run_row(Random& random, int64_t head, int64_t i) {
    std::vector<double> p(kSeqlenK), row(static_cast<std::size_t>(c.dim_v()));
    double sum = 0;
    // Scores are far from where exp overflows, so there is no maximum to take off.
    for (int64_t j = 0; j < kSeqlenK; ++j) {
      if (!visible(head, i, j)) continue;
      sum += p[j] = std::exp(dot(q.row(head, i), k.row(head / c.group, j), c.dim()) * c.scale());
    }
    for (int64_t j = 0; j < kSeqlenK; ++j) {
      if (sum > 0) p[j] /= sum;
      for (int64_t d = 0; d < c.dim_v(); ++d) row[d] += p[j] * v.row(head / c.group, j)[d];
    }
    for (const double x : row) out.numbers.add(c.instance.dtype, x);
    lse.push_back(static_cast<float>(std::log(sum)));
    dlse.push_back(static_cast<float>((2 * random.real() - 1) * kLargest));
    if (sum > 0) add_gradients(head, i, p);
  }

  void add_gradients(int64_t head, int64_t i, const std::vector<double>& p) {
    const int64_t kv = head / c.group, dim = c.dim(), dim_v = c.dim_v();
    const double *go = dout.row(head, i), delta = dot(go, out.row(head, i), dim_v) - dlse.back();
    for (int64_t j = 0; j < kSeqlenK; ++j) {
      if (!visible(head, i, j)) continue;
      const double ds = p[j] * (dot(go, v.row(kv, j), dim_v) - delta) * c.scale();
      const int64_t key = kv * kSeqlenK + j, of_row = (head * c.seqlen_q + i) * dim, of_key = key * dim;
      for (int64_t d = 0; d < dim; ++d) {
        expected.dq[of_row + d].add(ds * k.row(kv, j)[d]);
        expected.dk[of_key + d].add(ds * q.row(head, i)[d]);
      }
      for (int64_t d = 0; d < dim_v; ++d) expected.dv[key * dim_v + d].add(p[j] * go[d]);
    }
  }
};

// --- Runs --------------------------------------------------------------------------------------------

struct Results {
  std::vector<std::byte> dq, dk, dv;
};

/// A problem on the device.
class DeviceRun {
 public:
  DeviceRun(const Problem& problem, bool poison)
      : c_(problem.c),
        poison_(poison),
        q_(problem.q.bits(c_.heads())),
        k_(problem.k.bits(c_.heads_kv)),
        v_(problem.v.bits(c_.heads_kv)),
        out_(problem.out.bits(c_.heads())),
        dout_(problem.dout.bits(c_.heads())),
        lse_(repeated(problem.lse)),
        dlse_(repeated(problem.dlse)),
        vectors_(interleave(problem.mask)),
        dense_(dense_by_rule(problem.mask)),
        dq_(q_.size()),
        dk_(k_.size()),
        dv_(v_.size()),
        plan_(0),
        mask_(make_mask(problem.mask, vectors_)),
        mask_heads_(problem.mask.heads) {}

  /// Outputs and workspace begin as NaN.
  Results run(Mode mode) {
    const BackwardArgs args = make_args(mode);
    const Options options{.softmax_scale = c_.scale(), .deterministic = mode != Mode::kPlanInCall, .backend = "cuda"};
    for (DeviceBytes* result : {&dq_, &dk_, &dv_}) result->fill(0xff);
    DeviceBytes workspace(backward_workspace(args, options));
    if (poison_) workspace.fill(0xff);
    backward(args, {workspace.data(), workspace.size()}, options);
    require(cudaDeviceSynchronize(), "backward");
    return {dq_.read(), dk_.read(), dv_.read()};
  }

 private:
  std::vector<float> repeated(const std::vector<float>& patterns) const {
    std::vector<float> all;
    for (int64_t head = 0; head < c_.heads(); head += c_.head_patterns())
      all.insert(all.end(), patterns.begin(), patterns.end());
    return all;
  }
  TensorView of_rows(const DeviceBytes& bytes, int64_t dim) const {
    return on_device_with_columns_beyond(bytes, c_.instance.dtype, {1, c_.seqlen_q, c_.heads(), dim});
  }
  TensorView of_keys(const DeviceBytes& bytes, int64_t dim) const {
    return on_device_with_columns_beyond(bytes, c_.instance.dtype, {1, kSeqlenK, c_.heads_kv, dim});
  }
  TensorView row_vector(const DeviceBytes& bytes) const {
    return on_device(bytes, DataType::kFloat32, {1, c_.heads(), c_.seqlen_q});
  }

  BackwardArgs make_args(Mode mode) {
    BackwardArgs args;
    const int64_t dim = c_.dim(), dim_v = c_.dim_v();
    args.q = of_rows(q_, dim), args.k = of_keys(k_, dim), args.v = of_keys(v_, dim_v);
    args.out = of_rows(out_, dim_v), args.dout = of_rows(dout_, dim_v);
    args.lse = row_vector(lse_), args.dlse = row_vector(dlse_);
    args.dq = of_rows(dq_, dim), args.dk = of_keys(dk_, dim), args.dv = of_keys(dv_, dim_v);
    if (mode == Mode::kDense) {
      args.dense_mask = on_device(dense_, DataType::kUInt8, {1, mask_heads_, c_.seqlen_q, kSeqlenK});
    } else {
      args.mask = mask_;
    }
    if (mode == Mode::kDeterministic) args.plan = make_plan(mask_, plan_, poison_);
    return args;
  }

  const Case& c_;
  const bool poison_;
  DeviceBytes q_, k_, v_, out_, dout_, lse_, dlse_, vectors_, dense_, dq_, dk_, dv_, plan_;
  Mask mask_;
  const int64_t mask_heads_;
};

/// One result, [seqlen, heads, dim and beyond], whose heads repeat `patterns` heads.
Difference compare(const char* name, const Case& c, const std::vector<std::byte>& result, int64_t seqlen, int64_t heads,
                   int64_t patterns, const std::vector<Sum>& expected) {
  const auto dim = static_cast<int64_t>(expected.size()) / (patterns * seqlen);
  Difference difference;
  std::vector<uint16_t> bits(result.size() / 2);
  std::memcpy(bits.data(), result.data(), result.size());
  const uint16_t* row = bits.data();
  for (int64_t i = 0; i < seqlen; ++i) {
    for (int64_t head = 0; head < heads; ++head, row += dim + kBeyond) {
      const Sum* sum = expected.data() + (head % patterns * seqlen + i) * dim;
      for (int64_t d = 0; d < dim; ++d)
        difference.add(name, from_bits(c.instance.dtype, row[d]), sum[d].value, sum[d].limit(c.instance.dtype), 0, head,
                       i, d);
      expect_untouched(name, row + dim, difference, 0, head, i);
    }
  }
  return difference;
}

bool judge(const Problem& problem, const Results& results) {
  const Case& c = problem.c;
  const Difference dq = compare("dq", c, results.dq, c.seqlen_q, c.heads(), c.head_patterns(), problem.expected.dq);
  const Difference dk = compare("dk", c, results.dk, kSeqlenK, c.heads_kv, kPatterns, problem.expected.dk);
  const Difference dv = compare("dv", c, results.dv, kSeqlenK, c.heads_kv, kPatterns, problem.expected.dv);
  const std::string& wrong = !dq.wrong.empty() ? dq.wrong : !dk.wrong.empty() ? dk.wrong : dv.wrong;
  return verdict(wrong, within({{"dq", dq}, {"dk", dk}, {"dv", dv}}));
}

/// Without the deterministic mode dq is added up in any order.
bool same_bits(Mode mode, const Results& a, const Results& b) {
  return a.dk == b.dk && a.dv == b.dv && (mode == Mode::kPlanInCall || a.dq == b.dq);
}

auto modes(const Arguments& arguments) {
  return std::span(kModes).first(arguments.quick ? kQuickModes : std::size(kModes));
}

int run_all(const Arguments& arguments, int multiprocessors) {
  return run_cases(all_cases(multiprocessors, arguments.quick), modes(arguments),
                   [&](const Case& c, auto in_all_modes) {
                     const Problem problem(c, Random(1));
                     DeviceRun device(problem, arguments.poison);
                     in_all_modes([&](Mode mode, const char* name) {
                       return run_and_judge(
                           describe(c, name), arguments.repeat, [&] { return device.run(mode); },
                           [&](const Results& a, const Results& b) { return same_bits(mode, a, b); },
                           [&](const Results& results) { return judge(problem, results); });
                     });
                   });
}

}  // namespace
}  // namespace flashmask::test

int main(int count, char** words) {
  using namespace flashmask::test;
  return run_program(
      count, words, usage("gpu_backward_cases", "four masks, in the two ways that add up dq"),
      [](const Arguments& arguments, int multiprocessors) {
        return list_cases(all_cases(multiprocessors, arguments.quick), modes(arguments));
      },
      run_all);
}
