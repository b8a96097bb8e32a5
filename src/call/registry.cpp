// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "call/backend.h"
#include "call/call.h"
#include "call/choice.h"
#include "call/workspace.h"
#include "common/arithmetic.h"
#include "common/host_memory.h"
#include "common/message.h"
#include "plan/mask_memory.h"
#include "plan/plan_buffer.h"

namespace flashmask {
namespace {

/// Size of a call's workspace: the plan that it makes, then the backend's own.
std::size_t total_workspace_bytes(const Launch& launch, int64_t plan_bytes) {
  return padded_workspace(plan_bytes + launch.workspace_bytes());
}

/// Makes the plan of the call's mask in `buffer`.
PlanView make_plan(const Problem& problem, std::span<std::byte> buffer) {
  const PlanLayout layout = plan_layout(problem.mask, problem.device);
  build_plan(problem.mask, layout, buffer, problem.device, problem.stream);
  if (problem.dense.defined()) make_full_tiles_partial(buffer, layout);
  return problem.device.kind == Device::Kind::kCpu ? PlanView(buffer)
                                                   : PlanView::on_device(layout, buffer, problem.device);
}

std::string known_names() {
  std::string names = "auto";
  for (const Backend* backend : backend_list()) names += message(", ", backend->name());
  return names;
}

const MaskView* mask_view(const AttentionInputs& args) { return args.mask ? &args.mask->view() : nullptr; }

template <typename Args>
Explanation explain_args(const Args& args, const Options& options, const std::optional<GpuModel>& gpu) {
  Problem problem = check(args, mask_view(args), options, false);
  problem.gpu = gpu;
  Explanation explanation = explain_problem(problem, options.backend);
  if (lacks_live_tiles(problem, explanation)) count_live_tiles(problem, explanation);
  return explanation;
}

}  // namespace

const Backend& find_backend(std::string_view wanted, std::string_view source) {
  for (const Backend* backend : backend_list()) {
    if (backend->name() == wanted) return *backend;
  }
  throw_invalid("backend '", wanted, "' (", source, ") is not known; known: ", known_names());
}

Launch prepare(const Problem& problem, std::string_view wanted) { return launch_of(problem, wanted); }

int64_t plan_bytes(const Problem& problem, const Launch& launch) {
  return makes_plan(problem, launch) ? round_up(plan_layout(problem.mask, problem.device).bytes, kWorkspaceAlignment)
                                     : 0;
}

std::size_t Call::workspace_bytes() const { return total_workspace_bytes(launch_, plan_bytes_); }

void Call::set_mask(const MaskView& mask) {
  problem_.mask = mask;
  if (problem_.plan.defined()) check_plan_hash(problem_);
}

void Call::run(std::span<std::byte> workspace) {
  check_workspace(workspace, workspace_bytes());
  if (problem_.is_empty()) return;
  std::byte* const base = aligned(workspace);
  if (plan_bytes_ > 0) problem_.plan = make_plan(problem_, {base, static_cast<std::size_t>(plan_bytes_)});
  launch_.run(base + plan_bytes_);
}

Explanation explain_problem(const Problem& problem, std::string_view backend) {
  Explanation result;
  result.features = names(problem.features);
  if (compares_positions(problem.mask)) result.features.emplace_back("positions");
  if (problem.mask.column_ptr) {
    const PlanLayout plan = problem.plan.defined() ? problem.plan.layout() : plan_layout(problem.mask, problem.device);
    result.features.push_back(describe(MaskMemory(problem.mask, plan)));
  }
  Choice<Launch> choice = choose(problem, backend, Reasons::kAll);
  result.rejected = std::move(choice.rejected);
  if (!choice.launch) return result;
  result.backend = choice.backend->name();
  result.reason = choice.asked_for_by ? message("asked for by ", choice.asked_for_by)
                                      : "the first backend in the order of preference that takes the call";
  result.tile = choice.launch->tile();
  result.workspace_bytes = total_workspace_bytes(*choice.launch, plan_bytes(problem, *choice.launch));
  choice.launch->explain(result);
  const auto tiles = checked_product(problem.batch, problem.heads_q, ceil_div(problem.seqlen_q, result.tile.rows),
                                     ceil_div(problem.seqlen_k, result.tile.keys));
  if (!tiles) throw_invalid("the call has more than 2^63 tiles");
  result.tiles = *tiles;
  result.live_tiles = result.tiles;
  if (result.tiles > 0 && !problem.dense.defined()) result.live_tiles = -1;
  return result;
}

void count_live_tiles(const Problem& problem, Explanation& explanation) {
  std::optional<Plan> own;
  if (!problem.plan.defined() || problem.plan.device().kind != Device::Kind::kCpu) own.emplace(problem.mask);
  const TiledPlanView plan(own ? own->view() : problem.plan, explanation.tile);
  // Every mask of the plan serves the same number of (batch entry, query head) pairs.
  explanation.live_tiles =
      plan.live_tiles() * (problem.batch / problem.mask.batch()) * (problem.heads_q / problem.mask.heads());
}

std::span<const Backend* const> backend_list() {
  static const std::array list{
      &cuda_backend(),
#ifdef FLASHMASK_WITH_CPU
      &cpu_backend(),
#endif
      &reference_backend(),
  };
  return list;
}

const Backend& backend_for(Device::Kind kind) {
  return **std::ranges::find(backend_list(), kind, &Backend::device_kind);
}

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> infos;
  for (const Backend* backend : backend_list()) infos.push_back(backend->info());
  return infos;
}

std::size_t forward_workspace(const ForwardArgs& args, const Options& options) {
  return with_memory_errors([&] { return Call(args, mask_view(args), options, false).workspace_bytes(); });
}

std::size_t backward_workspace(const BackwardArgs& args, const Options& options) {
  return with_memory_errors([&] { return Call(args, mask_view(args), options, false).workspace_bytes(); });
}

void forward(const ForwardArgs& args, std::span<std::byte> workspace, const Options& options) {
  with_memory_errors([&] { Call(args, mask_view(args), options, true).run(workspace); });
}

void backward(const BackwardArgs& args, std::span<std::byte> workspace, const Options& options) {
  with_memory_errors([&] { Call(args, mask_view(args), options, true).run(workspace); });
}

Explanation explain(const ForwardArgs& args, const Options& options, const std::optional<GpuModel>& gpu) {
  return with_memory_errors([&] { return explain_args(args, options, gpu); });
}

Explanation explain(const BackwardArgs& args, const Options& options, const std::optional<GpuModel>& gpu) {
  return with_memory_errors([&] { return explain_args(args, options, gpu); });
}

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> all;
  for (const Backend* backend : backend_list()) {
    const std::vector<KernelInfo> own = backend->kernels();
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

}  // namespace flashmask
