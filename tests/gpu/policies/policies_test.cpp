// SPDX-License-Identifier: Apache-2.0
//
// Kernels of other policies than the library's (kernels.h) against the library's own: where the policy only says
// otherwise where something lies, or scales by powers of two, bit for bit; else by the accuracy rule, errors of at most
// twice the library's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "backends/cuda/common/launch_chain.h"
#include "backends/cuda/sm90/backward/row_params.h"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "common/arithmetic.h"
#include "common/random.h"
#include "flashmask/attention.h"
#include "gpu/device_vector.h"
#include "gpu/kernel_cases.h"
#include "gpu/policies/kernels.h"
#include "mask/view.h"

namespace flashmask::test {
namespace {

/// Two query tiles and seven key tiles of 128, the last ones short; two query heads share a key head.
constexpr int64_t kBatch = 2, kHeads = 4, kHeadsKv = 2, kSeqlenQ = 200, kSeqlenK = 845, kDim = 64;
/// Fewer than there are work tiles, so that every CTA takes several.
constexpr int64_t kCtas = 5;
constexpr double kScale = 0.25, kLog2E = 1.4426950408889634;
constexpr DataType kType = DataType::kBFloat16;
constexpr double kAccuracyFactor = 2, kAccuracySlack = 1e-5, kLseLimit = 2e-4;
/// Powers of two: scaling Q by them rounds nothing.
constexpr float kFactors[kHeads] = {0.5f, 0.25f, 2.f, 1.f};

/// A tensor [batch, seqlen, heads, dim] on the host, as bits and as values.
struct Tensor {
  int64_t seqlen, heads;
  Numbers numbers;

  Tensor(Random& random, int64_t rows, int64_t of_heads)
      : seqlen(rows), heads(of_heads), numbers(random, kType, kBatch * rows * of_heads * kDim) {}

  /// Times kFactors of each head.
  Tensor scaled() const {
    Tensor result = *this;
    result.numbers = {};
    for (std::size_t n = 0; n < numbers.values.size(); ++n)
      result.numbers.add(kType, numbers.values[n] * kFactors[n / kDim % static_cast<std::size_t>(heads)]);
    return result;
  }
  TensorView values() {
    return TensorView::contiguous(numbers.values.data(), DataType::kFloat64, {kBatch, seqlen, heads, kDim});
  }
};

/// Memory of the device for a tensor, which begins as NaN.
struct DeviceTensor {
  DeviceBytes bytes;
  TensorView view;

  DeviceTensor(int64_t seqlen, int64_t heads)
      : bytes(static_cast<std::size_t>(kBatch * seqlen * heads * kDim) * 2),
        view(on_device(bytes, kType, {kBatch, seqlen, heads, kDim})) {
    bytes.fill(0xff);
  }
  explicit DeviceTensor(const Tensor& host) : DeviceTensor(host.seqlen, host.heads) {
    bytes.copy_from(host.numbers.bits);
  }

  std::vector<uint16_t> bits() const {
    std::vector<uint16_t> bits(bytes.size() / 2);
    std::memcpy(bits.data(), bytes.read().data(), bytes.size());
    return bits;
  }
  std::vector<double> values() const {
    std::vector<double> values;
    for (const uint16_t bits : this->bits()) values.push_back(from_bits(kType, bits));
    return values;
  }
};

/// lse [batch, heads, seqlen_q], which begins as NaN.
struct DeviceLse {
  DeviceVector<float> values{std::vector<float>(kBatch * kHeads * kSeqlenQ, NAN)};
  TensorView view = device_view();

 private:
  TensorView device_view() const {
    TensorView all = TensorView::contiguous(values.data(), DataType::kFloat32, {kBatch, kHeads, kSeqlenQ});
    all.device = kDevice;
    return all;
  }
};

/// Keys that alone are seen from row kAlone on.
constexpr int64_t kAlone = 150;
bool seen_alone(int64_t j) { return j * 7 % 11 < 4; }

/// A causal band, in which every third stretch of 70 keys is hidden from some row on, and from row kAlone on all keys
/// but those seen alone. `keys`: which keys exist; the others are hidden from every row.
template <typename Keys>
MaskParts make_parts(Keys keys) {
  MaskParts parts{.seqlen_q = kSeqlenQ, .seqlen_k = kSeqlenK, .band = Band::causal()};
  for (int64_t j = 0; j < kSeqlenK; ++j) {
    const int64_t end = std::min(j / 70 % 3 == 1 ? 50 + j % 100 : kSeqlenQ, seen_alone(j) ? kSeqlenQ : kAlone);
    parts.lts.push_back(static_cast<int32_t>(keys(j) ? end : 0));
  }
  return parts;
}
/// All rows see keys of all tiles: so many that the schedule for long rows runs.
MaskParts all_keys() {
  return make_parts([](int64_t) { return true; });
}
/// Four tiles' keys: the schedule for short rows.
MaskParts last_keys() {
  return make_parts([](int64_t j) { return j >= 400; });
}

/// A mask and its plan on the device.
struct DeviceMaskAndPlan {
  DeviceBytes vectors, buffer{0};
  Mask mask;
  PlanView plan;

  explicit DeviceMaskAndPlan(const MaskParts& parts)
      : vectors(interleave(parts)), mask(make_mask(parts, vectors)), plan(make_plan(mask, buffer, true)) {}

  template <typename T>
  const T* at(int64_t offset) const {
    return reinterpret_cast<const T*>(plan.data() + offset);
  }
  cuda::MaskColumns columns() const { return {flashmask::columns(mask.view(), 0, 0), {everywhere(), 0, 0}}; }
  /// One mask for all batch entries and heads.
  static cuda::Sharing everywhere() { return {kBatch, kHeads}; }
};

void launch(const Kernel& kernel, int64_t blocks, void* params) {
  check(cudaFuncSetAttribute(kernel.entry, cudaFuncAttributeMaxDynamicSharedMemorySize, kernel.shared_bytes));
  void* arguments[] = {params};
  cuda::LaunchChain(nullptr).launch("launch of a test's kernel", kernel.entry, blocks, kernel.threads,
                                    kernel.shared_bytes, arguments);
}

void launch_on_rows(const void* entry, int64_t blocks, int threads, sm90::bwd::RowParams& params) {
  void* arguments[] = {&params};
  cuda::LaunchChain(nullptr).launch("launch of a test's kernel", entry, blocks, threads, 0, arguments);
}

/// K or V in pages of 128 keys, in an order of their own; the pages are a tensor [pages, 128, heads_kv, dim].
struct Pages {
  static constexpr int64_t kKeys = 128, kOfEntry = ceil_div(kSeqlenK, kKeys), kPages = kBatch * kOfEntry + 1;
  DeviceBytes bytes;

  /// The last page belongs to no sequence and is NaN; keys past a sequence's last are any finite numbers.
  explicit Pages(const Tensor& t) : bytes(filled(t)) {}

  /// [batch, kOfEntry]: the pages of an entry are neither in order nor together.
  static std::vector<int32_t> table() {
    std::vector<int32_t> pages;
    for (int64_t n = 0; n < kBatch * kOfEntry; ++n)
      pages.push_back(static_cast<int32_t>((5 * n + 4) % (kBatch * kOfEntry)));
    return pages;
  }
  TensorView view() const { return on_device(bytes, kType, {kPages, kKeys, kHeadsKv, kDim}); }

 private:
  static std::vector<uint16_t> filled(const Tensor& t) {
    constexpr int64_t kKey = kHeadsKv * kDim, kPage = kKeys * kKey;
    std::vector<uint16_t> bits(kPages * kPage, to_bits(kType, 7));
    std::fill(bits.end() - kPage, bits.end(), to_bits(kType, NAN));
    const std::vector<int32_t> pages = table();
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t j = 0; j < kSeqlenK; ++j) {
        const int64_t page = pages[static_cast<std::size_t>(b * kOfEntry + j / kKeys)];
        std::copy_n(t.numbers.bits.begin() + (b * kSeqlenK + j) * kKey, kKey,
                    bits.begin() + page * kPage + j % kKeys * kKey);
      }
    }
    return bits;
  }
};

class Policies : public ::testing::Test {
 protected:
  void SetUp() override { FLASHMASK_NEEDS_GPU(); }
};

/// Inputs, the library's results, and those in float64.
struct Attention {
  Random random{1};
  Tensor q{random, kSeqlenQ, kHeads}, k{random, kSeqlenK, kHeadsKv}, v{random, kSeqlenK, kHeadsKv};

  /// The library's kernel, with this Q.
  void run(const Tensor& with_q, const Mask& mask, DeviceTensor& out, DeviceLse& lse) const {
    const DeviceTensor device_q(with_q), device_k(k), device_v(v);
    ForwardArgs args;
    args.q = device_q.view, args.k = device_k.view, args.v = device_v.view;
    args.out = out.view, args.lse = lse.view, args.mask = mask;
    const Options options{.softmax_scale = kScale, .backend = "cuda"};
    DeviceBytes workspace(forward_workspace(args, options));
    forward(args, {workspace.data(), workspace.size()}, options);
    check(cudaDeviceSynchronize());
  }
};

/// What a forward kernel reads, and its results.
struct ForwardRun {
  DeviceTensor q, k, v, out{kSeqlenQ, kHeads};
  DeviceLse lse;
  DeviceVector<uint32_t> counter{{0}};

  explicit ForwardRun(const Attention& a) : q(a.q), k(a.k), v(a.v) {}

  int64_t row_tiles(const Kernel& kernel) const { return ceil_div(kSeqlenQ, kernel.rows); }

  void set(sm90::ForwardParams& p, const Kernel& kernel, const DeviceMaskAndPlan& mask) const {
    const PlanLayout& layout = mask.plan.layout();
    p.q = sm90::tensor_map(q.view, kernel.rows, 1);
    p.k = sm90::tensor_map(k.view, kernel.keys, 1);
    p.v = sm90::tensor_map(v.view, kernel.keys, 1);
    p.out = sm90::tensor_map(out.view, 16, 1);
    p.lse = lse.values.data();
    p.lse_batch_stride = lse.view.stride[0];
    p.lse_head_stride = lse.view.stride[1];
    p.lse_row_stride = lse.view.stride[2];
    p.seqlen_q = kSeqlenQ;
    p.seqlen_k = kSeqlenK;
    p.key_blocks = static_cast<int32_t>(ceil_div(kSeqlenK, kernel.keys));
    p.heads_q = kHeads;
    p.query_heads_per_kv_head = kHeads / kHeadsKv;
    p.scale_log2 = static_cast<float>(kScale * kLog2E);
    p.score_of_bit = 1 / p.scale_log2;
    p.plan = {.row_live = mask.at<uint32_t>(layout.row_live_bits),
              .row_full = mask.at<uint32_t>(layout.row_full_bits),
              .row_tile_order = mask.at<int32_t>(layout.row_tile_order_128),
              .words_per_row = static_cast<int32_t>(2 * layout.words_per_row),
              .row_granules = static_cast<int32_t>(layout.row_granules),
              .mask_heads = 1,
              .sharing = DeviceMaskAndPlan::everywhere()};
    p.element_mask = sm90::ElementMask::kColumns;
    p.mask = mask.columns();
    p.schedule = {.work_tiles = static_cast<uint32_t>(kBatch * kHeads * row_tiles(kernel)),
                  .heads = kBatch * kHeads,
                  .heads_per_l2_group = kHeads,
                  .tiles = static_cast<uint32_t>(row_tiles(kernel)),
                  .next = counter.data()};
  }
};

/// Asserts that a kernel's out and lse are the library's, bit for bit.
void expect_same_bits(const ForwardRun& got, const DeviceTensor& out, const DeviceLse& lse) {
  EXPECT_EQ(got.out.bits(), out.bits());
  const auto a = got.lse.values.to_host(), b = lse.values.to_host();
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
}

/// The largest error of a head's elements; `values` [batch, seqlen, heads, dim].
std::vector<double> errors_of_heads(const std::vector<double>& values, const std::vector<double>& exact,
                                    int64_t heads) {
  std::vector<double> errors(static_cast<std::size_t>(heads), 0.);
  for (std::size_t n = 0; n < values.size(); ++n) {
    double& largest = errors[n / kDim % errors.size()];
    const double error = std::abs(values[n] - exact[n]);
    largest = std::isnan(error) ? error : std::max(largest, error);  // once a NaN, it stays
    if (std::isnan(error)) return std::vector<double>(errors.size(), error);
  }
  return errors;
}

/// The accuracy rule.
void expect_accurate(const char* what, const std::vector<double>& got, const std::vector<double>& library,
                     const std::vector<double>& exact, int64_t heads) {
  const auto errors = errors_of_heads(got, exact, heads), allowed = errors_of_heads(library, exact, heads);
  for (std::size_t head = 0; head < errors.size(); ++head)
    EXPECT_LE(errors[head], kAccuracyFactor * allowed[head] + kAccuracySlack) << what << " of head " << head;
}

// --- Epilogue ----------------------------------------------------------------------------------------

/// fp32 rows and lse of the keys that a mask leaves, on the host.
struct Partial {
  std::vector<float> out, lse;

  Partial(ForwardRun& run, const MaskParts& parts) {
    const DeviceMaskAndPlan mask(parts);
    const Kernel kernel = partial_rows_kernel();
    const DeviceVector<float> rows(std::vector<float>(kBatch * kHeads * kSeqlenQ * kDim, NAN));
    PartialRowsParams params{};
    check(cudaMemset(run.counter.data(), 0, sizeof(uint32_t)));
    run.set(params, kernel, mask);
    params.partial = rows.data();
    launch(kernel, kCtas, &params);
    out = rows.to_host();
    lse = run.lse.values.to_host();
  }
  float element(int64_t b, int64_t i, int64_t head, int64_t d) const {
    return out[static_cast<std::size_t>(((b * kHeads + head) * kSeqlenQ + i) * kDim + d)];
  }
  double weight(std::size_t row, double of) const {
    return lse[row] == -INFINITY ? 0 : std::exp(static_cast<double>(lse[row]) - of);
  }
};

/// merge_attention of two parts, in float64: out [batch, seqlen_q, heads, dim], lse [batch, heads, seqlen_q].
struct Merged {
  std::vector<double> out, lse;

  Merged(const Partial& a, const Partial& b) {
    for (std::size_t row = 0; row < a.lse.size(); ++row) {
      const double most = std::max(a.lse[row], b.lse[row]);
      lse.push_back(most == -INFINITY ? most : most + std::log(a.weight(row, most) + b.weight(row, most)));
    }
    for (int64_t entry = 0; entry < kBatch; ++entry) {
      for (int64_t i = 0; i < kSeqlenQ; ++i) {
        for (int64_t head = 0; head < kHeads; ++head) {
          const auto row = static_cast<std::size_t>((entry * kHeads + head) * kSeqlenQ + i);
          for (int64_t d = 0; d < kDim; ++d)
            out.push_back(a.weight(row, lse[row]) * a.element(entry, i, head, d) +
                          b.weight(row, lse[row]) * b.element(entry, i, head, d));
        }
      }
    }
  }
};

/// The library's out and lse, and those of the oracle.
struct Expected {
  DeviceTensor out{kSeqlenQ, kHeads};
  DeviceLse lse;
  std::vector<double> exact_out = std::vector<double>(kBatch * kSeqlenQ * kHeads * kDim),
                      exact_lse = std::vector<double>(kBatch * kHeads * kSeqlenQ);

  Expected(Attention& a, const MaskParts& parts) {
    const DeviceMaskAndPlan mask(parts);
    a.run(a.q, mask.mask, out, lse);
    ForwardArgs args;
    args.q = a.q.values(), args.k = a.k.values(), args.v = a.v.values(), args.mask = Mask(parts);
    args.out = TensorView::contiguous(exact_out.data(), DataType::kFloat64, {kBatch, kSeqlenQ, kHeads, kDim});
    args.lse = TensorView::contiguous(exact_lse.data(), DataType::kFloat64, {kBatch, kHeads, kSeqlenQ});
    forward(args, {}, {.softmax_scale = kScale, .backend = "reference"});
  }
};

TEST_F(Policies, PartialRowsRoundToTheFinalOnes) {
  Attention a;
  for (const MaskParts& parts : {all_keys(), last_keys()}) {
    const DeviceMaskAndPlan mask(parts);
    DeviceTensor out(kSeqlenQ, kHeads);
    DeviceLse lse;
    a.run(a.q, mask.mask, out, lse);
    ForwardRun run(a);
    const Partial partial(run, parts);
    std::vector<uint16_t> rounded;
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t i = 0; i < kSeqlenQ; ++i) {
        for (int64_t head = 0; head < kHeads; ++head) {
          for (int64_t d = 0; d < kDim; ++d) rounded.push_back(to_bits(kType, partial.element(b, i, head, d)));
        }
      }
    }
    EXPECT_EQ(rounded, out.bits());
    const auto expected = lse.values.to_host();
    EXPECT_EQ(std::memcmp(partial.lse.data(), expected.data(), expected.size() * sizeof(float)), 0);
  }
}

/// The rows from kAlone on see nothing of the second part.
TEST_F(Policies, PartialRowsOfTwoPartsMergeToAll) {
  Attention a;
  const Expected expected(a, all_keys());
  ForwardRun run(a);
  const Partial first(run, make_parts(seen_alone)), second(run, make_parts([](int64_t j) { return !seen_alone(j); }));
  const Merged merged(first, second);
  expect_accurate("out", merged.out, expected.out.values(), expected.exact_out, kHeads);
  for (std::size_t row = 0; row < merged.lse.size(); ++row) {
    if (expected.exact_lse[row] == -INFINITY) {
      EXPECT_EQ(merged.lse[row], -INFINITY) << "row " << row;
    } else {
      EXPECT_NEAR(merged.lse[row], expected.exact_lse[row], kLseLimit) << "row " << row;
    }
  }
}

// --- Score -------------------------------------------------------------------------------------------

TEST_F(Policies, HeadFactorIsAScaledQ) {
  Attention a;
  const DeviceVector<float> factors(std::vector<float>(std::begin(kFactors), std::end(kFactors)));
  for (const MaskParts& parts : {all_keys(), last_keys()}) {
    const DeviceMaskAndPlan mask(parts);
    DeviceTensor out(kSeqlenQ, kHeads);
    DeviceLse lse;
    a.run(a.q.scaled(), mask.mask, out, lse);
    ForwardRun run(a);
    const Kernel kernel = head_factor_kernel();
    HeadFactorParams params{};
    run.set(params, kernel, mask);
    params.factors = factors.data();
    launch(kernel, kCtas, &params);
    expect_same_bits(run, out, lse);
  }
}

/// dq, dk and dv in float64.
struct Gradients {
  std::vector<double> dq, dk, dv;

  /// Of a q that was scaled by kFactors: dq of the q before.
  void chain() {
    for (std::size_t n = 0; n < dq.size(); ++n) dq[n] *= kFactors[n / kDim % kHeads];
  }
};

sm90::bwd::Rows rows_of(const TensorView& t) { return {t.data, t.stride[0], t.stride[1], t.stride[2]}; }

/// The backward of a Q that is scaled by kFactors: by the library, by the oracle, and by the kernels of other policies.
class Backward {
 public:
  explicit Backward(Attention& a) : a_(a), scaled_q_(a.q.scaled()), random_(2), dout_(random_, kSeqlenQ, kHeads) {
    a.run(scaled_q_, mask_.mask, out_, lse_);
    device_dout_.bytes.copy_from(dout_.numbers.bits);
  }

  Gradients library() {
    const DeviceTensor q(scaled_q_), k(a_.k), v(a_.v);
    DeviceTensor dq(kSeqlenQ, kHeads), dk(kSeqlenK, kHeadsKv), dv(kSeqlenK, kHeadsKv);
    BackwardArgs args;
    args.q = q.view, args.k = k.view, args.v = v.view, args.mask = mask_.mask;
    args.out = out_.view, args.lse = lse_.view, args.dout = device_dout_.view;
    args.dq = dq.view, args.dk = dk.view, args.dv = dv.view;
    const Options options{.softmax_scale = kScale, .backend = "cuda"};
    DeviceBytes workspace(backward_workspace(args, options));
    backward(args, {workspace.data(), workspace.size()}, options);
    check(cudaDeviceSynchronize());
    Gradients gradients{dq.values(), dk.values(), dv.values()};
    gradients.chain();
    return gradients;
  }

  Gradients oracle() {
    const auto of = [](std::vector<double>& values, int64_t seqlen, int64_t heads) {
      values.resize(static_cast<std::size_t>(kBatch * seqlen * heads * kDim));
      return TensorView::contiguous(values.data(), DataType::kFloat64, {kBatch, seqlen, heads, kDim});
    };
    Gradients gradients;
    std::vector<double> out, lse(kBatch * kHeads * kSeqlenQ);
    ForwardArgs fwd;
    fwd.q = scaled_q_.values(), fwd.k = a_.k.values(), fwd.v = a_.v.values(), fwd.mask = Mask(all_keys());
    fwd.out = of(out, kSeqlenQ, kHeads);
    fwd.lse = TensorView::contiguous(lse.data(), DataType::kFloat64, {kBatch, kHeads, kSeqlenQ});
    const Options options{.softmax_scale = kScale, .backend = "reference"};
    forward(fwd, {}, options);
    BackwardArgs args;
    static_cast<AttentionInputs&>(args) = fwd;
    args.out = fwd.out, args.lse = fwd.lse, args.dout = dout_.values();
    args.dq = of(gradients.dq, kSeqlenQ, kHeads);
    args.dk = of(gradients.dk, kSeqlenK, kHeadsKv);
    args.dv = of(gradients.dv, kSeqlenK, kHeadsKv);
    backward(args, {}, options);
    gradients.chain();
    return gradients;
  }

  Gradients head_factor() {
    const DeviceVector<float> factors(std::vector<float>(std::begin(kFactors), std::end(kFactors)));
    HeadFactorBackwardParams params{};
    params.factors = factors.data();
    return run(backward_kernels().head_factor, a_.q, params, [](auto&) {});
  }

  /// K and V in pages; with the Q that is scaled.
  Gradients page_table() {
    const Pages k(a_.k), v(a_.v);
    const DeviceVector<int32_t> table(Pages::table());
    PageTableBackwardParams params{};
    params.pages = table.data();
    params.pages_of_entry = Pages::kOfEntry;
    Gradients gradients = run(backward_kernels().page_table, scaled_q_, params, [&](auto& p) {
      p.k = sm90::tensor_map(k.view(), Pages::kKeys, 1);
      p.v = sm90::tensor_map(v.view(), Pages::kKeys, 1);
    });
    gradients.chain();
    return gradients;
  }

 private:
  static constexpr int64_t kKeyTiles = ceil_div(kSeqlenK, 128);

  /// `adjust` changes the parameters last.
  template <typename Params, typename Adjust>
  Gradients run(const Kernel& kernel, const Tensor& with_q, Params& params, Adjust adjust) {
    const BackwardKernels kernels = backward_kernels();
    const int64_t row_tiles = ceil_div(kSeqlenQ, kernel.rows), tiles = kBatch * kHeads * row_tiles;
    const auto rows_of_tiles = static_cast<std::size_t>(tiles * kernel.rows);
    const DeviceTensor q(with_q), k(a_.k), v(a_.v);
    const DeviceTensor dq(kSeqlenQ, kHeads), dk(kSeqlenK, kHeadsKv), dv(kSeqlenK, kHeadsKv);
    const DeviceVector<float> sums(std::vector<float>(rows_of_tiles * kDim, NAN));
    const DeviceVector<uint32_t> biases(std::vector<uint32_t>(rows_of_tiles * 4, ~0u));
    const DeviceVector<uint32_t> progress(std::vector<uint32_t>(static_cast<std::size_t>(tiles), ~0u)), next({~0u});
    sm90::bwd::RowParams rows = row_params(row_tiles);
    rows.biases = reinterpret_cast<sm90::bwd::RowBias*>(biases.data());
    rows.dq_sums = {.out = rows_of(dq.view), .sums = sums.data(), .progress = progress.data(), .deterministic = false};
    rows.next = next.data();
    set(params, rows);
    params.q = sm90::tensor_map(q.view, kernel.rows, 1);
    params.dout = sm90::tensor_map(device_dout_.view, kernel.rows, 1);
    params.dq = sm90::tensor_map(dq.view, 16, 1);
    params.k = sm90::tensor_map(k.view, kernel.keys, 1);
    params.v = sm90::tensor_map(v.view, kernel.keys, 1);
    params.dk = sm90::tensor_map(dk.view, 16, 1);
    params.dv = sm90::tensor_map(dv.view, 16, 1);
    adjust(params);
    launch_on_rows(kernels.preprocess, tiles, kernels.row_threads, rows);
    launch(kernel, kCtas, &params);
    launch_on_rows(kernels.convert_dq, tiles, kernels.row_threads, rows);
    check(cudaDeviceSynchronize());
    return {dq.values(), dk.values(), dv.values()};
  }

  sm90::bwd::RowParams row_params(int64_t row_tiles) const {
    const PlanLayout& layout = mask_.plan.layout();
    sm90::bwd::RowParams rows{};
    rows.out = rows_of(out_.view);
    rows.dout = rows_of(device_dout_.view);
    rows.lse = {lse_.view.data, lse_.view.stride[0], lse_.view.stride[2], lse_.view.stride[1]};
    rows.plan = {.key_live = mask_.at<uint32_t>(layout.key_live_bits),
                 .key_full = mask_.at<uint32_t>(layout.key_full_bits),
                 .row_live = mask_.at<uint32_t>(layout.row_live_bits),
                 .key_order = mask_.at<int32_t>(layout.key_order),
                 .words_per_key = static_cast<int32_t>(2 * layout.words_per_key),
                 .words_per_row = static_cast<int32_t>(2 * layout.words_per_row),
                 .row_granules = static_cast<int32_t>(layout.row_granules),
                 .mask_heads = 1,
                 .sharing = DeviceMaskAndPlan::everywhere()};
    rows.seqlen_q = kSeqlenQ;
    rows.row_tiles = static_cast<uint32_t>(row_tiles);
    rows.key_tiles = kKeyTiles;
    rows.heads = kHeads;
    rows.scale = rows.score_scale = static_cast<float>(kScale);
    return rows;
  }

  void set(sm90::bwd::BackwardParams& p, const sm90::bwd::RowParams& rows) const {
    p.biases = rows.biases;
    p.dq_sums = rows.dq_sums;
    p.seqlen_q = kSeqlenQ;
    p.seqlen_k = kSeqlenK;
    p.row_tiles = static_cast<int32_t>(rows.row_tiles);
    p.heads_q = kHeads;
    p.head_groups = kHeadsKv;
    p.query_heads_per_group = kHeads / kHeadsKv;
    p.splits = 1;
    p.scale = rows.scale;
    p.scale_log2 = static_cast<float>(kScale * kLog2E);
    p.plan = rows.plan;
    p.mask = mask_.columns();
    p.schedule = {.work_tiles = kBatch * kHeadsKv * kKeyTiles,
                  .heads = kBatch * kHeadsKv,
                  .heads_per_l2_group = kHeadsKv,
                  .tiles = kKeyTiles,
                  .next = rows.next};
  }

  Attention& a_;
  Tensor scaled_q_;
  Random random_;
  Tensor dout_;
  DeviceMaskAndPlan mask_{all_keys()};
  DeviceTensor out_{kSeqlenQ, kHeads}, device_dout_{kSeqlenQ, kHeads};
  DeviceLse lse_;
};

void expect_accurate_gradients(const Gradients& got, Backward& backward) {
  const Gradients exact = backward.oracle(), library = backward.library();
  expect_accurate("dq", got.dq, library.dq, exact.dq, kHeads);
  expect_accurate("dk", got.dk, library.dk, exact.dk, kHeadsKv);
  expect_accurate("dv", got.dv, library.dv, exact.dv, kHeadsKv);
}

TEST_F(Policies, HeadFactorsGradientIsThatOfAScaledQ) {
  Attention a;
  Backward backward(a);
  expect_accurate_gradients(backward.head_factor(), backward);
}

// --- KvSource ----------------------------------------------------------------------------------------

TEST_F(Policies, PagesGiveTheBitsOfRows) {
  Attention a;
  const Pages k(a.k), v(a.v);
  const DeviceVector<int32_t> table(Pages::table());
  for (const MaskParts& parts : {all_keys(), last_keys()}) {
    const DeviceMaskAndPlan mask(parts);
    DeviceTensor out(kSeqlenQ, kHeads);
    DeviceLse lse;
    a.run(a.q, mask.mask, out, lse);
    ForwardRun run(a);
    const Kernel kernel = page_table_kernel();
    PageTableParams params{};
    run.set(params, kernel, mask);
    params.k = sm90::tensor_map(k.view(), kernel.keys, 1);
    params.v = sm90::tensor_map(v.view(), kernel.keys, 1);
    params.pages = table.data();
    params.pages_of_entry = Pages::kOfEntry;
    launch(kernel, kCtas, &params);
    expect_same_bits(run, out, lse);
  }
}

TEST_F(Policies, PagesGiveTheGradientsOfRows) {
  Attention a;
  Backward backward(a);
  expect_accurate_gradients(backward.page_table(), backward);
}

}  // namespace
}  // namespace flashmask::test
