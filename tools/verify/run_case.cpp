// SPDX-License-Identifier: Apache-2.0
#include "verify/run_case.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <numeric>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "flashmask/inspect.h"
#include "flashmask/plan.h"
#include "numerics/device_copies.h"
#include "verify/oracle.h"
#include "verify/problem.h"

namespace flashmask::verify {
namespace {

using numerics::DeviceMask;
using numerics::DeviceMemory;
using numerics::DevicePlan;
using numerics::DeviceTensor;
using numerics::DeviceWorkspace;
using numerics::kDevice;

/// Copies of all tensors of a case on the device.
class DeviceTensors {
 public:
  DeviceTensors(const Problem& problem, const Outputs& outputs)
      : q_(problem.q),
        k_(problem.k),
        v_(problem.v),
        dout_(problem.dout),
        out_(outputs.out),
        lse_(outputs.lse),
        dq_(outputs.dq),
        dk_(outputs.dk),
        dv_(outputs.dv),
        dropout_state_(std::as_bytes(std::span(problem.dropout_state))) {
    if (problem.dlse) dlse_.emplace(*problem.dlse);
    for (const FeatureTensor& of_feature : problem.tensors) of_features_.emplace_back(of_feature.tensor);
    if (outputs.dsink) dsink_.emplace(*outputs.dsink);
    if (problem.q_origin) q_origin_.emplace(*problem.q_origin);
    if (problem.k_origin) k_origin_.emplace(*problem.k_origin);
    features_ = problem.features([this](std::size_t n) { return of_features_[n].view(); },
                                 {.state = reinterpret_cast<const uint64_t*>(dropout_state_.bytes().data()),
                                  .q_origin = q_origin_ ? q_origin_->view() : TensorView{},
                                  .k_origin = k_origin_ ? k_origin_->view() : TensorView{}});
  }

  ForwardArgs forward_args(AttentionInputs inputs) const {
    return {with_tensors(std::move(inputs)), out_.view(), lse_.view()};
  }
  BackwardArgs backward_args(AttentionInputs inputs) const {
    return {with_tensors(std::move(inputs)),       out_.view(), lse_.view(), dout_.view(),
            dlse_ ? dlse_->view() : TensorView{},  dq_.view(),  dk_.view(),  dv_.view(),
            dsink_ ? dsink_->view() : TensorView{}};
  }
  const Features& features() const { return features_; }
  void copy_to(Outputs& outputs) const {
    out_.copy_to(outputs.out);
    lse_.copy_to(outputs.lse);
    dq_.copy_to(outputs.dq);
    dk_.copy_to(outputs.dk);
    dv_.copy_to(outputs.dv);
    if (dsink_) dsink_->copy_to(*outputs.dsink);
  }

 private:
  AttentionInputs with_tensors(AttentionInputs inputs) const {
    inputs.q = q_.view();
    inputs.k = k_.view();
    inputs.v = v_.view();
    return inputs;
  }

  DeviceTensor q_, k_, v_, dout_, out_, lse_, dq_, dk_, dv_;
  std::optional<DeviceTensor> dlse_, dsink_, q_origin_, k_origin_;
  std::deque<DeviceTensor> of_features_;
  DeviceMemory dropout_state_;
  Features features_;
};

/// One case on the backend under test.
class CaseRun {
 public:
  CaseRun(const Case& c, const RunOptions& options, const DenseMask& dense, Verdict& verdict)
      : problem_(c), c_(problem_.c), options_(options), dense_(dense), verdict_(verdict) {
    if (c_.has_mask()) mask_ = make_mask(c_);
    if (c_.ready_plan && !on_device_) {
      const Mask mask = mask_ ? *mask_ : make_mask(c_);
      plan_.emplace(mask.view(), ready_layout(mask));
    }
  }

  void run() {
    if (on_device_ && !taken()) return;
    const auto once = [&](bool dense_mode, std::string_view which) {
      return on_device_ ? run_on_device(dense_mode, which) : run_once(dense_mode, which);
    };
    const Results masked = once(false, "run with the mask");
    if (!has_cached_forward())
      check_identical(masked, once(true, "run with the dense mask"), "with the dense mask", verdict_);
    if (on_device_) check_identical(masked, once(false, "second run with the mask"), "in a second run", verdict_);
    verdict_.forward_only = masked.forward_only;
    const Results oracle = run_oracle(problem_, dense_);
    const Plain plain =
        c_.dtype == DataType::kFloat32 ? Plain(c_) : run_plain(problem_, dense_, masked.out, oracle.out);
    check_accuracy(problem_, dense_, masked, oracle, plain, verdict_);
  }

 private:
  AttentionInputs inputs(bool dense_mode) const {
    AttentionInputs inputs{.q = problem_.q.view(), .k = problem_.k.view(), .v = problem_.v.view()};
    if (plan_) inputs.plan = plan_->view();
    if (dense_mode) {
      inputs.dense_mask = TensorView::contiguous(dense_.visible.data(), DataType::kUInt8,
                                                 {dense_.batch, dense_.heads, c_.seqlen_q, c_.seqlen_k});
    } else {
      inputs.mask = mask_;
    }
    return inputs;
  }

  /// True if the forward is a call over a cache, which takes no dense mask and counts no tiles.
  bool has_cached_forward() const { return on_device_ && c_.features.split_size != 0; }

  Options call_options(bool dense_mode, ExecutedTiles& executed, const Features& features) const {
    Options call{.softmax_scale = c_.given_scale,
                 .deterministic = true,
                 .features = features,
                 .backend = options_.backend,
                 .executed_tiles = has_cached_forward() ? nullptr : &executed};
    call.threads = dense_mode ? 1 : options_.threads;
    return call;
  }

  /// Forward and backward on poisoned outputs.
  Results run_once(bool dense_mode, std::string_view which) {
    Outputs outputs(c_);
    ExecutedTiles executed;
    const Options call = call_options(dense_mode, executed, problem_.features());
    const ForwardArgs to_run = forward_args(inputs(dense_mode), outputs);
    with_workspace(forward_workspace(to_run, call), which,
                   [&](std::span<std::byte> workspace) { options_.implementation.forward(to_run, workspace, call); });
    const BackwardArgs back = backward_args(inputs(dense_mode), problem_, outputs);
    with_workspace(backward_workspace(back, call), which,
                   [&](std::span<std::byte> workspace) { options_.implementation.backward(back, workspace, call); });
    check_gaps(outputs, which, verdict_);
    check_tiles(to_run, back, call, executed, dense_mode, which);
    return results_of(outputs, c_);
  }

  /// True if the device's backend takes such calls; otherwise the verdict says why not.
  bool taken() {
    const DeviceTensors tensors(problem_, Outputs(c_));
    const std::optional<DeviceMask> mask = mask_ ? std::optional<DeviceMask>(*mask_) : std::nullopt;
    AttentionInputs inputs;
    if (mask) inputs.mask = mask->mask();
    ExecutedTiles executed;
    const Explanation explanation =
        explain(tensors.forward_args(inputs), call_options(false, executed, tensors.features()));
    if (!explanation.backend.empty()) return true;
    for (const std::string& line : explanation.rejected)
      verdict_.skipped += (verdict_.skipped.empty() ? "" : "; ") + line;
    return false;
  }

  /// The dense mask with each key's rows one after the other.
  std::vector<uint8_t> dense_columns() const {
    std::vector<uint8_t> columns(dense_.visible.size());
    const auto rows = static_cast<std::size_t>(c_.seqlen_q), keys = static_cast<std::size_t>(c_.seqlen_k);
    for (std::size_t at = 0; at < columns.size(); ++at) {
      const std::size_t row = at / keys % rows, key = at % keys, matrix = at / keys / rows;
      columns[(matrix * keys + key) * rows + row] = dense_.visible[at];
    }
    return columns;
  }

  /// The layout in bits of a plan made ahead; in every third case that in runs, if the mask's plan fits.
  PlanLayout ready_layout(const Mask& mask) const {
    const auto layout = [&](PlanForm form) {
      return PlanLayout(mask.seqlen_q(), mask.seqlen_k(), mask.batch(), mask.heads(), kNoBits, form);
    };
    if (c_.seed % 3 != 0 || mask.has_interval_lists() || mask.has_positions()) return layout(PlanForm::kBits);
    try {
      return Plan(mask.view(), layout(PlanForm::kRuns)).view().layout();
    } catch (const Error&) {  // more runs than there is room for
      return layout(PlanForm::kBits);
    }
  }

  /// Does run_once on copies in device memory. A dense mask may have any strides: every other case's is in columns.
  Results run_on_device(bool dense_mode, std::string_view which) {
    Outputs outputs(c_);
    const DeviceTensors tensors(problem_, outputs);
    const bool by_columns = c_.seed % 2 != 0;
    const DeviceMemory dense(std::as_bytes(std::span(by_columns ? dense_columns() : dense_.visible)));
    std::optional<DeviceMask> mask;
    std::optional<DevicePlan> plan;
    if (mask_) mask.emplace(*mask_);
    if (c_.ready_plan && !dense_mode) {
      const Mask planned = mask ? mask->mask() : make_mask(c_);
      const PlanLayout runs = ready_layout(mask_ ? *mask_ : planned);
      if (runs.in_runs()) {
        plan.emplace(runs).build(planned);
      } else {
        plan.emplace(planned).build(planned);
      }
    }
    AttentionInputs inputs;
    if (plan) inputs.plan = plan->view();
    if (dense_mode) {
      inputs.dense_mask = TensorView::contiguous(dense.bytes().data(), DataType::kUInt8,
                                                 {dense_.batch, dense_.heads, c_.seqlen_q, c_.seqlen_k});
      if (by_columns) inputs.dense_mask.stride[2] = 1, inputs.dense_mask.stride[3] = c_.seqlen_q;
      inputs.dense_mask.device = kDevice;
    } else if (mask) {
      inputs.mask = mask->mask();
    }
    ExecutedTiles executed;
    const Options call = call_options(dense_mode, executed, tensors.features());
    const ForwardArgs to_run = tensors.forward_args(inputs);
    with_device_workspace(forward_workspace(to_run, call), which, [&](std::span<std::byte> workspace) {
      options_.implementation.forward(to_run, workspace, call);
    });
    const BackwardArgs back = tensors.backward_args(inputs);
    const bool forward_only = explain(back, call).backend.empty();
    if (!forward_only) {
      with_device_workspace(backward_workspace(back, call), which, [&](std::span<std::byte> workspace) {
        options_.implementation.backward(back, workspace, call);
      });
    }
    tensors.copy_to(outputs);
    check_gaps(outputs, which, verdict_);
    check_tiles(to_run, back, call, executed, dense_mode, which);
    Results results = results_of(outputs, c_);
    results.forward_only = forward_only;
    return results;
  }

  template <typename Call>
  void with_device_workspace(std::size_t bytes, std::string_view which, Call&& call) {
    DeviceWorkspace workspace(bytes, static_cast<std::size_t>(c_.seed % 64));
    call(workspace.bytes());
    if (!workspace.guards_intact())
      verdict_.failures.push_back(fmt::format("workspace: the {} wrote outside of it", which));
  }

  template <typename Call>
  void with_workspace(std::size_t bytes, std::string_view which, Call&& call) {
    PoisonedBytes workspace(bytes, static_cast<std::size_t>(c_.seed % 64));  // misaligned: no alignment is asked for
    call(workspace.bytes());
    if (!workspace.guards_intact())
      verdict_.failures.push_back(fmt::format("workspace: the {} wrote outside of it", which));
  }

  /// The tiles that a forward and, if there was one, a backward executed, each in its own shape.
  void check_tiles(const ForwardArgs& forward, const BackwardArgs& backward, const Options& call,
                   const ExecutedTiles& executed, bool dense_mode, std::string_view which) {
    if (!call.executed_tiles) return;
    const Explanation of_forward = explain(forward, call), of_backward = explain(backward, call);
    check_passes(of_forward, {{"forward", executed.forward}}, dense_mode, which);
    if (of_backward.backend.empty()) return;
    check_passes(of_backward,
                 {{"backward over rows", executed.backward_rows}, {"backward over keys", executed.backward_keys}},
                 dense_mode, which);
  }

  /// Live tiles, and with positions all that the positions' minima and maxima do not rule out.
  int64_t tiles_to_execute(TileShape tile) {
    const int64_t live = count_live_tiles(c_, dense_, tile);
    if (!c_.has_positions()) return live;
    const int64_t judged =
        statistics(*mask_, tile).live_tiles() * (c_.batch / mask_->batch()) * (c_.heads_q / mask_->heads());
    if (judged < live)
      verdict_.failures.push_back(fmt::format("tiles: {} of {} x {} are live, and {} said to be, by their positions",
                                              live, tile.rows, tile.keys, judged));
    return judged;
  }

  using Pass = std::pair<std::string_view, int64_t>;
  void check_passes(const Explanation& explanation, std::initializer_list<Pass> passes, bool dense_mode,
                    std::string_view which) {
    if (explanation.backend == "reference") return;  // goes by elements, not by tiles
    // The dense mode skips nothing.
    const int64_t expected = dense_mode ? explanation.tiles : tiles_to_execute(explanation.tile);
    const bool unknown = explanation.live_tiles < 0;  // the mask is on a device
    if (!unknown && explanation.live_tiles != expected) {
      verdict_.failures.push_back(
          fmt::format("tiles: the plan has {} live tiles of {} x {} for the {}; counted one by one there are {}",
                      explanation.live_tiles, explanation.tile.rows, explanation.tile.keys, which, expected));
    }
    for (const auto& [pass, count] : passes) {
      if (count == expected) continue;
      verdict_.failures.push_back(
          fmt::format("tiles: the {} executed {} in the {}; {} are live", which, count, pass, expected));
    }
  }

  const Problem problem_;
  const Case& c_;
  const RunOptions& options_;
  const DenseMask& dense_;
  Verdict& verdict_;
  const bool on_device_ = options_.backend == "cuda";
  std::optional<Mask> mask_;
  std::optional<Plan> plan_;
};

}  // namespace

Verdict run_case(const Case& c, const RunOptions& options, const DenseMask& dense) {
  Verdict verdict;
  catching(verdict, [&] { CaseRun(c, options, dense, verdict).run(); });
  return verdict;
}

Verdict run_case(const Case& c, const RunOptions& options) {
  DenseMask dense;
  Verdict verdict;
  catching(verdict, [&] { dense = options.dense ? options.dense(c) : dense_of(make_mask(c)); });
  return verdict.passed() ? run_case(c, options, dense) : verdict;
}

Verdict run_case(const AnyCase& c, const RunOptions& options) {
  return std::visit([&](const auto& of_kind) { return run_case(of_kind, options); }, c);
}

namespace {

/// Runs the cases with these costs, the most expensive first, so that no worker is left with one of them at the end.
template <typename Run>
void run_all(const std::vector<int64_t>& costs, int jobs, const Run& run, const CaseDone& done) {
  std::vector<std::size_t> order(costs.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return costs[a] > costs[b]; });
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  const auto work = [&] {
    for (std::size_t n = next++; n < order.size(); n = next++) {
      const Verdict verdict = run(order[n]);
      const std::lock_guard lock(mutex);
      done(order[n], verdict);
    }
  };
  const auto cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::vector<std::jthread> workers;
  for (int n = 1; n < (jobs > 0 ? jobs : cores); ++n) workers.emplace_back(work);
  work();
}

template <typename C>
void run_all(std::span<const C> cases, const RunOptions& options, int jobs, const CaseDone& done) {
  std::vector<int64_t> costs;
  for (const C& c : cases) costs.push_back(cost(c));
  run_all(costs, jobs, [&](std::size_t n) { return run_case(cases[n], options); }, done);
}

}  // namespace

void run_cases(std::span<const Case> cases, const RunOptions& options, int jobs, const CaseDone& done) {
  run_all(cases, options, jobs, done);
}

void run_cases(std::span<const AnyCase> cases, const RunOptions& options, int jobs, const CaseDone& done) {
  run_all(cases, options, jobs, done);
}

}  // namespace flashmask::verify
