// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "numerics/accuracy.h"
#include "numerics/device_copies.h"
#include "verify/cached_draw.h"
#include "verify/cached_tensors.h"
#include "verify/device_views.h"
#include "verify/run_case.h"

namespace flashmask::verify {
namespace {

/// Bits of a request's results.
struct RequestBits {
  std::vector<std::byte> out, lse;
  bool operator==(const RequestBits&) const = default;
};

double largest_magnitude(std::span<const double> values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::fabs(value));
  return largest;
}

double largest_error(std::span<const double> got, std::span<const double> exact) {
  double largest = 0;
  for (std::size_t n = 0; n < got.size(); ++n) {
    const double error = std::fabs(got[n] - exact[n]);
    if (std::isnan(error)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, error);
  }
  return largest;
}

std::string_view tables_text(CacheTables tables) {
  return tables == CacheTables::kContiguous ? "contiguous" : tables == CacheTables::kTable ? "by a table" : "by lists";
}

class CachedRun {
 public:
  CachedRun(const CachedCase& c, const RunOptions& options, Verdict& verdict)
      : c_(c), options_(options), verdict_(verdict), draw_(c), placement_(c) {}

  void run() {
    CachedTensors tensors(draw_, placement_);
    if (!is_taken(tensors)) return;
    check_validation(tensors);
    const std::vector<RequestBits> bits = run_once(draw_, tensors, options_.threads, "first run");
    for (std::size_t b = 0; b < draw_.requests.size(); ++b) {
      exact_.push_back(run_cached_oracle(draw_, draw_.requests[b]));
      check_request(b, tensors.results(b));
    }
    check_explanation(tensors);
    check_threads(tensors, bits);
    check_plan(tensors, bits);
    if (may_be_forest()) check_forest(tensors);
    check_placements(bits);
    if (!on_device_ || c_.batch_invariant) check_alone(bits);
    if (!on_device_) check_last_rows(bits);
    check_append();
  }

 private:
  template <typename... Arguments>
  void fail(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
    verdict_.failures.push_back(fmt::format(format, std::forward<Arguments>(arguments)...));
  }

  Options call_options(const Features& features, int threads) const {
    return {.softmax_scale = c_.given_scale,
            .threads = threads,
            .max_ctas = on_device_ && threads != options_.threads ? threads : 0,
            .features = features,
            .backend = options_.backend};
  }

  /// True if the backend takes the call; otherwise the verdict says why not.
  bool is_taken(const CachedTensors& tensors) {
    const CachedExplanation explanation = explanation_of(tensors);
    if (!explanation.backend.empty()) return true;
    for (const std::string& line : explanation.rejected)
      verdict_.skipped += (verdict_.skipped.empty() ? "" : "; ") + line;
    return false;
  }
  /// Reads no tensor where they are said to be on a device.
  CachedExplanation explanation_of(const CachedTensors& tensors, const CachedPlan* plan = nullptr) const {
    CachedForwardArgs args = tensors.args();
    args.plan = plan;
    Options call = call_options(tensors.features(), 1);
    if (on_device_) {
      for (TensorView* t : every_tensor(args, call.features)) t->device = numerics::kDevice;
    }
    return explain_cached(args, call);
  }

  /// Throws on no good call; a case's bad values need not be among those that the call has.
  void check_validation(const CachedTensors& tensors) {
    if (!c_.bad) return validate_cached(tensors.args());
    const bool lost = std::ranges::any_of(draw_.requests, [](const DrawnRequest& request) {
      return std::ranges::any_of(request.missing, [](uint8_t missing) { return missing != 0; });
    });
    if (!lost) return;
    try {
      validate_cached(tensors.args());
      fail("validate_cached: says nothing of a page that is not there");
    } catch (const Error&) {
    }
  }

  void call(const CachedForwardArgs& args, const Options& options, std::string_view which) {
    if (on_device_) return call_on_device(args, options, which);
    PoisonedBytes workspace(cached_forward_workspace(args, options), static_cast<std::size_t>(c_.seed % 64));
    options_.implementation.cached_forward(args, workspace.bytes(), options);
    if (!workspace.guards_intact()) fail("workspace: the {} wrote outside of it", which);
  }

  void call_on_device(CachedForwardArgs args, Options options, std::string_view which) {
    const DeviceViews copies(every_tensor(args, options.features));
    numerics::DeviceWorkspace workspace(cached_forward_workspace(args, options),
                                        static_cast<std::size_t>(c_.seed % 64));
    options_.implementation.cached_forward(args, workspace.bytes(), options);
    if (!workspace.guards_intact()) fail("workspace: the {} wrote outside of it", which);
    copies.copy_back(args.out);
    if (args.lse.defined()) copies.copy_back(args.lse);
  }

  std::vector<RequestBits> run_once(const CachedDraw& draw, CachedTensors& tensors, int threads,
                                    std::string_view which) {
    tensors.poison_outputs();
    call(tensors.args(), call_options(tensors.features(), threads), which);
    return bits_after(draw, tensors, which);
  }
  std::vector<RequestBits> bits_after(const CachedDraw& draw, const CachedTensors& tensors, std::string_view which) {
    if (tensors.has_stray_writes()) fail("out or lse: the {} wrote outside of its requests' rows", which);
    std::vector<RequestBits> bits;
    for (std::size_t b = 0; b < draw.requests.size(); ++b) bits.push_back({tensors.out_bits(b), tensors.lse_bits(b)});
    return bits;
  }

  void check_equal(const RequestBits& got, const RequestBits& wanted, std::size_t b, std::string_view which) {
    if (got.out != wanted.out) fail("out of request {}: other bits {}", b, which);
    if (got.lse != wanted.lse) fail("lse of request {}: other bits {}", b, which);
  }
  void check_equal(const std::vector<RequestBits>& got, const std::vector<RequestBits>& wanted,
                   std::string_view which) {
    for (std::size_t b = 0; b < wanted.size(); ++b) check_equal(got[b], wanted[b], b, which);
  }

  void check_request(std::size_t b, const RequestResults& got) {
    const DrawnRequest& request = draw_.requests[b];
    const RequestResults& exact = exact_[b];
    std::optional<HeadArray> plain;
    if (c_.dtype != DataType::kFloat32) plain = run_cached_plain(draw_, request, exact.visible);
    for (int64_t h = 0; h < c_.heads_q; ++h) {
      check_head(b, h, got.out.head(0, h), exact, plain);
      for (int64_t i = 0; i < request.rows; ++i) check_lse(b, h, i, got, exact);
    }
  }

  /// The accuracy rule, and never less than what roundings alone can make: of a few rows, or of one, the plain
  /// implementation's error is a matter of luck, sums may cancel, and scores may be large under ALiBi.
  double limit(const RequestResults& exact, int64_t h, const std::optional<HeadArray>& plain) const {
    const double largest = largest_magnitude(exact.out.head(0, h)), sum = exact.sums[static_cast<std::size_t>(h)];
    if (!plain) {
      const double score = exact.scores[static_cast<std::size_t>(h)];
      return std::max(numerics::float32_limit(largest, sum), numerics::rounded_scores_limit(score, sum));
    }
    const double error =
        std::max(largest_error(plain->head(0, h), exact.out.head(0, h)), numerics::rounding(c_.dtype, largest));
    return std::max(numerics::plain_limit(error), numerics::rounded_weights_limit(c_.dtype, sum, largest));
  }
  void check_head(std::size_t b, int64_t h, std::span<const double> got, const RequestResults& exact,
                  const std::optional<HeadArray>& plain) {
    const double error = largest_error(got, exact.out.head(0, h)), most = limit(exact, h, plain);
    if (error == 0) return;
    double& worst = verdict_.figures["out"];
    worst = std::max(worst, error / most);
    if (error > most) fail("out of request {}, head {}: off by {:.3g}; the limit is {:.3g}", b, h, error, most);
  }
  void check_lse(std::size_t b, int64_t h, int64_t i, const RequestResults& results, const RequestResults& exact) {
    const auto at = static_cast<std::size_t>(i);
    const double got = results.lse.head(0, h)[at], want = exact.lse.head(0, h)[at];
    if (got == want) return;
    const double ratio = std::fabs(got - want) / (numerics::lse_limit(c_.dtype) * numerics::lse_unit(want));
    if (std::isfinite(ratio)) {
      double& worst = verdict_.figures["lse"];
      worst = std::max(worst, ratio);
    }
    if (!(ratio <= 1)) fail("lse of request {}, head {}, row {}: got {}, oracle {}", b, h, i, got, want);
  }

  /// Compares the bytes that the mask leaves to be read with those counted one by one.
  void check_explanation(const CachedTensors& tensors) {
    int64_t keys = 0;
    for (std::size_t b = 0; b < draw_.requests.size(); ++b) {
      const DrawnRequest& request = draw_.requests[b];
      for (int64_t hk = 0; hk < c_.heads_kv; ++hk) {
        for (int64_t j = 0; j < request.keys; ++j) {
          bool seen = false;
          for (int64_t i = 0; i < request.rows; ++i)
            seen |= exact_[b].visible[static_cast<std::size_t>((hk * request.rows + i) * request.keys + j)] != 0;
          keys += seen;
        }
      }
    }
    const int64_t wanted = keys * static_cast<int64_t>(element_size(c_.cache_dtype())) * (c_.head_dim + c_.head_dim_v);
    if (on_device_) return;  // lengths are there
    const CachedExplanation said = explain_cached(tensors.args(), call_options(tensors.features(), 1));
    if (said.bytes_read != wanted)
      fail("explain_cached: {} bytes to be read; counted there are {}", said.bytes_read, wanted);
  }

  /// Threads of a CPU, or CTAs of a GPU.
  void check_threads(CachedTensors& tensors, const std::vector<RequestBits>& bits) {
    for (const int threads : {1, 3})
      check_equal(run_once(draw_, tensors, threads, "run with other threads"), bits,
                  fmt::format("with {} threads", threads));
  }

  /// A ready plan changes nothing, nor does an lse that nobody wants.
  void check_plan(CachedTensors& tensors, const std::vector<RequestBits>& bits) {
    CachedForwardArgs args = tensors.args();
    args.lse = {};
    CachedCapacities roomy = capacities();
    if (!c_.batch_invariant) keep_tiles(tensors, roomy);
    const std::vector<RequestBits> got = run_planned(tensors, args, roomy, options_.threads);
    for (std::size_t b = 0; b < bits.size(); ++b) check_equal({got[b].out, bits[b].lse}, bits[b], b, "with a plan");
  }
  std::vector<RequestBits> run_planned(CachedTensors& tensors, CachedForwardArgs args, const CachedCapacities& roomy,
                                       int threads) {
    const Options options = call_options(tensors.features(), threads);
    CachedPlan plan{.capacities = roomy, .buffer = {}, .device = {}};
    tensors.poison_outputs();
    if (on_device_) {
      run_planned_on_device(args, options, plan);
    } else {
      PoisonedBytes buffer(cached_plan_bytes(plan.capacities, plan.device));
      plan.buffer = buffer.bytes();
      build_cached_plan(args, plan, options);
      args.plan = &plan;
      call(args, options, "run with a plan");
      if (!buffer.guards_intact()) fail("plan: something was written outside of its buffer");
    }
    return bits_after(draw_, tensors, "run with a plan");
  }
  void run_planned_on_device(CachedForwardArgs args, Options options, CachedPlan& plan) {
    const DeviceViews copies(every_tensor(args, options.features));
    plan.device = numerics::kDevice;
    numerics::DeviceWorkspace buffer(cached_plan_bytes(plan.capacities, plan.device), 0);
    plan.buffer = buffer.bytes();
    build_cached_plan(args, plan, options);
    args.plan = &plan;
    options_.implementation.cached_forward(args, {}, options);
    options_.implementation.cached_forward(args, {}, options);  // the plan serves all layers of a model
    if (!buffer.guards_intact()) fail("plan: something was written outside of its buffer");
    copies.copy_back(args.out);
    if (args.lse.defined()) copies.copy_back(args.lse);
  }

  /// True if the call may be that of a forest: one sequence in a table, or without one.
  bool may_be_forest() const {
    return draw_.requests.size() == 1 && !c_.batch_invariant && placement_.tables != CacheTables::kLists;
  }
  /// Takes the rows as those of a forest's requests, so that keys are read for few at once or for many: that changes
  /// results by roundings alone, and max_ctas no bit of them.
  void check_forest(CachedTensors& tensors) {
    const CachedForwardArgs args = tensors.args();
    CachedCapacities roomy = capacities();
    roomy.forest = true;
    roomy.max_batch = 1 + static_cast<int64_t>(c_.seed % static_cast<uint64_t>(roomy.max_rows));
    const TensorView& table = args.cache.page_table;
    roomy.max_keys = args.cache.k.shape[1] * (table.defined() ? table.shape[1] : 1);
    const CachedPlan plan{.capacities = roomy, .buffer = {}, .device = on_device_ ? numerics::kDevice : Device{}};
    if (on_device_ && explanation_of(tensors, &plan).backend.empty()) return;
    const std::vector<RequestBits> bits = run_planned(tensors, args, roomy, options_.threads);
    check_request(0, tensors.results(0));
    check_equal(run_planned(tensors, args, roomy, 2), bits, "of a forest with other threads");
  }

  /// Takes the room for more rows away where a plan with it has other tiles, and bits of its own.
  void keep_tiles(const CachedTensors& tensors, CachedCapacities& roomy) const {
    const CachedPlan plan{.capacities = roomy, .buffer = {}, .device = on_device_ ? numerics::kDevice : Device{}};
    const CachedExplanation with = explanation_of(tensors, &plan), without = explanation_of(tensors);
    if (with.kernel != without.kernel || with.splits != without.splits) roomy.max_rows = rows_of(tensors);
  }
  /// Rows of q, those of no request counted.
  int64_t rows_of(const CachedTensors& tensors) const {
    const TensorView q = tensors.args().q;
    return c_.packed ? q.shape[0] : q.shape[0] * q.shape[1];
  }
  CachedCapacities capacities() const {
    int64_t rows = 0, keys = 0;
    for (const DrawnRequest& request : draw_.requests) {
      rows += request.rows;
      keys = std::max(keys, request.keys);
    }
    // Room as the tables have it, not as lengths.
    return {.max_batch = c_.batch(),
            .max_rows = rows + 8,
            .max_keys = (keys + c_.page_size + 4) * (c_.tables == CacheTables::kLists ? c_.batch() : 2),
            .heads_q = c_.heads_q,
            .heads_kv = c_.heads_kv,
            .head_dim = c_.head_dim,
            .head_dim_v = c_.head_dim_v,
            .batch_invariant = c_.batch_invariant,
            .split_size = c_.split_size,
            .float8 = c_.float8};
  }

  /// Pages in another order, layout and table, then of another size.
  void check_placements(const std::vector<RequestBits>& bits) {
    CachedPlacement moved = placement_;
    moved.order = 1;
    moved.layout = placement_.layout == Layout::kBshd ? Layout::kBhsd : Layout::kBshd;
    if (placement_.tables == CacheTables::kTable) moved.tables = CacheTables::kLists;
    if (placement_.tables == CacheTables::kLists) moved.tables = CacheTables::kTable;
    check_placement(moved, bits);
    CachedPlacement resized = placement_;
    resized.shared = 0;
    resized.broadcasts = c_.bad;  // a page that is not there has no factor of its own
    constexpr int64_t kSizes[] = {1, 3, 16, 64, 128};
    resized.page_size = c_.bad ? 1 : kSizes[c_.seed % 5];
    if (!c_.bad) {
      resized.tables = static_cast<CacheTables>((c_.seed / 5) % 3);
      resized.key_layout = c_.seed % 2 == 0 ? KeyLayout::kPages : KeyLayout::kSequences;
    }
    check_placement(resized, bits);
  }
  void check_placement(const CachedPlacement& placement, const std::vector<RequestBits>& bits) {
    CachedTensors tensors(draw_, placement);
    if (on_device_ && explanation_of(tensors).backend.empty()) return;
    const std::string which = fmt::format("{}, in pages of {}", tables_text(placement.tables), placement.page_size);
    check_equal(run_once(draw_, tensors, options_.threads, which), bits, which);
  }

  void check_alone(const std::vector<RequestBits>& bits) {
    for (std::size_t b = 0; b < draw_.requests.size() && draw_.requests.size() > 1; ++b) {
      const CachedDraw one = draw_.alone(b);
      CachedTensors tensors(one, placement_);
      check_equal(run_once(one, tensors, options_.threads, "run of one request")[0], bits[b], b, "without the others");
    }
  }

  /// A row's bits do not depend on how many rows the call has. Without tail_lens the tail does.
  void check_last_rows(const std::vector<RequestBits>& bits) {
    if (c_.tail > 0 && !c_.tail_lens) return;
    const auto row_bits = [&](const std::vector<std::byte>& all, int64_t columns, DataType dtype) {
      const auto size =
          static_cast<std::ptrdiff_t>(static_cast<std::size_t>(c_.heads_q * columns) * element_size(dtype));
      return std::vector<std::byte>(all.end() - size, all.end());
    };
    for (std::size_t b = 0; b < draw_.requests.size(); ++b) {
      if (draw_.requests[b].rows < 2) continue;
      const CachedDraw one = draw_.last_row(b);
      CachedTensors tensors(one, placement_);
      const RequestBits last{row_bits(bits[b].out, c_.head_dim_v, c_.dtype),
                             row_bits(bits[b].lse, 1, DataType::kFloat32)};
      check_equal(run_once(one, tensors, options_.threads, "run of one row")[0], last, b, "in a call of the last row");
    }
  }

  /// A cache that lacks the call's tokens, with them appended, is the cache that has them.
  void check_append() {
    CachedTensors tensors(draw_, placement_, /*has_new_tokens=*/false);
    const bool may_name_slots = c_.vectors == 0 || c_.in_pages();
    const bool by_slots = !tensors.args().cache.seqlens.defined() || c_.seed % 3 == 0;
    const bool loses_vectors = c_.bad && c_.vectors > 0 && !c_.in_pages();  // with the rows of pages that are not there
    if ((by_slots && !may_name_slots) || loses_vectors) return;
    append(tensors.append_args(by_slots));
    if (tensors.cache_bits() != CachedTensors(draw_, placement_).cache_bits())
      fail("append_kv: the cache has other bytes than one with the tokens in it{}", by_slots ? ", by slots" : "");
  }

  void append(AppendArgs args) {
    const Options options = call_options({}, options_.threads);
    if (!on_device_) return append_kv(args, options);
    KvCacheView& cache = args.cache;
    const DeviceViews copies({&args.k, &args.v, &args.cu_seqlens, &args.slots, &args.bounds, &cache.k, &cache.v,
                              &cache.page_table, &cache.page_indptr, &cache.page_indices, &cache.seqlens,
                              &cache.k_scale, &cache.v_scale, &args.mask.bounds});
    append_kv(args, options);
    for (const TensorView* written : {&cache.k, &cache.v, &args.mask.bounds}) copies.copy_back(*written);
  }

  const CachedCase& c_;
  const RunOptions& options_;
  const bool on_device_ = options_.backend == "cuda";
  Verdict& verdict_;
  const CachedDraw draw_;
  const CachedPlacement placement_;
  std::vector<RequestResults> exact_;
};

}  // namespace

Verdict run_case(const CachedCase& c, const RunOptions& options) {
  Verdict verdict;
  catching(verdict, [&] { CachedRun(c, options, verdict).run(); });
  return verdict;
}

}  // namespace flashmask::verify
