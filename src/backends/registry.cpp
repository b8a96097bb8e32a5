// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdlib>
#include <new>

#include "backends/backend.h"
#include "common/arithmetic.h"
#include "common/message.h"

namespace flashmask {
namespace {

constexpr const char* kVariable = "FLASHMASK_BACKEND";

struct Choice {
  const Backend* backend = nullptr;
  std::string reason;
  std::vector<std::string> rejected;
  bool no_device = false;  ///< none takes it because a device or a build is missing
};

std::string known_names() {
  std::string names = "auto";
  for (const Backend* backend : backend_list()) names += message(", ", backend->name());
  return names;
}

const Backend& find_backend(std::string_view wanted, std::string_view source) {
  for (const Backend* backend : backend_list()) {
    if (backend->name() == wanted) return *backend;
  }
  throw_invalid("backend '", wanted, "' (", source, ") is not known; known: ", known_names());
}

/// Whether what is missing is a device, not an ability.
bool lacks_device(const Backend& backend, const Problem& problem) {
  return problem.device.kind == backend.device_kind() && !backend.has_device(problem.device);
}

std::string refusal_of(const Backend& backend, const Problem& problem) {
  std::string refusal = unimplemented(problem.features);
  return refusal.empty() ? backend.refusal(problem) : refusal;
}

/// The first backend that takes the call: the argument decides, then the environment, then the order of the list.
Choice choose(const Problem& problem, const std::string& wanted) {
  Choice choice;
  std::string name = wanted, source = "Options::backend";
  const char* variable = std::getenv(kVariable);
  if (name == "auto" && variable && *variable) {
    name = variable;
    source = kVariable;
  }
  if (name != "auto") {
    const Backend& forced = find_backend(name, source);
    if (std::string refusal = refusal_of(forced, problem); !refusal.empty()) {
      choice.rejected.push_back(message(name, ": ", refusal));
      choice.no_device = !forced.info().usable || lacks_device(forced, problem);
    } else {
      choice.backend = &forced;
      choice.reason = message("asked for by ", source);
    }
    return choice;
  }
  for (const Backend* backend : backend_list()) {
    std::string refusal = refusal_of(*backend, problem);
    if (refusal.empty() && !backend->automatic()) refusal = "only runs when it is asked for by name (it is slow)";
    if (refusal.empty()) {
      choice.backend = backend;
      choice.reason = "the first backend in the order of preference that takes the call";
      break;
    }
    choice.rejected.push_back(message(backend->name(), ": ", refusal));
    choice.no_device |= lacks_device(*backend, problem);
  }
  return choice;
}

const Backend& chosen(const Problem& problem, const std::string& wanted) {
  const Choice choice = choose(problem, wanted);
  if (choice.backend) return *choice.backend;
  std::string reasons;
  for (const std::string& line : choice.rejected) reasons += message(reasons.empty() ? "" : "; ", line);
  throw Error(choice.no_device ? ErrorCode::kNoDevice : ErrorCode::kUnsupported,
              message("no backend takes this call: ", reasons));
}

void check_workspace(const Backend& backend, const Problem& problem, std::span<std::byte> workspace) {
  const std::size_t need = backend.workspace(problem);
  if (workspace.size() < need)
    throw_invalid("workspace has ", workspace.size(), " bytes; this call needs ", need,
                  " (query it with the same arguments and options)");
}

/// Runs f, turning a failed allocation into the library's error.
template <typename F>
auto guarded(F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::kOutOfMemory, "out of memory");
  }
}

Problem on_gpu(Problem problem, const std::optional<GpuModel>& gpu) {
  problem.gpu = gpu;
  return problem;
}

Explanation explain_problem(const Problem& problem, const Options& options) {
  Explanation result;
  result.features = names(problem.features);
  const Choice choice = choose(problem, options.backend);
  result.rejected = choice.rejected;
  if (!choice.backend) return result;
  result.backend = choice.backend->name();
  result.reason = choice.reason;
  choice.backend->describe(problem, result);
  result.workspace_bytes = choice.backend->workspace(problem);
  const auto tiles = checked_product(problem.batch, problem.heads_q, ceil_div(problem.seqlen_q, result.tile.rows),
                                     ceil_div(problem.seqlen_k, result.tile.keys));
  if (!tiles) throw_invalid("the call has more than 2^63 tiles");
  result.tiles = *tiles;
  result.live_tiles = result.tiles;
  if (problem.dense.defined() || problem.batch == 0) return result;
  if (result.tiles == 0) return result;
  result.live_tiles = -1;
  if (problem.mask.view().content_hash == 0) return result;  // not read
  std::optional<Plan> own;
  if (!problem.plan.defined() || problem.plan.device().kind != Device::Kind::kCpu) own.emplace(problem.mask);
  const TiledPlanView plan(own ? own->view() : problem.plan, result.tile);
  // Every mask of the plan serves the same number of (batch entry, query head) pairs.
  result.live_tiles =
      plan.live_tiles() * (problem.batch / problem.mask.batch()) * (problem.heads_q / problem.mask.heads());
  return result;
}

}  // namespace

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

std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> infos;
  for (const Backend* backend : backend_list()) infos.push_back(backend->info());
  return infos;
}

std::size_t forward_workspace(const ForwardArgs& args, const Options& options) {
  return guarded([&] {
    const Problem problem = check(args, options, false);
    return chosen(problem, options.backend).workspace(problem);
  });
}

std::size_t backward_workspace(const BackwardArgs& args, const Options& options) {
  return guarded([&] {
    const Problem problem = check(args, options, false);
    return chosen(problem, options.backend).workspace(problem);
  });
}

void forward(const ForwardArgs& args, std::span<std::byte> workspace, const Options& options) {
  guarded([&] {
    const Problem problem = check(args, options, true);
    const Backend& backend = chosen(problem, options.backend);
    check_workspace(backend, problem, workspace);
    if (!problem.is_empty()) backend.forward(problem, workspace);
  });
}

void backward(const BackwardArgs& args, std::span<std::byte> workspace, const Options& options) {
  guarded([&] {
    const Problem problem = check(args, options, true);
    const Backend& backend = chosen(problem, options.backend);
    check_workspace(backend, problem, workspace);
    if (!problem.is_empty()) backend.backward(problem, workspace);
  });
}

Explanation explain(const ForwardArgs& args, const Options& options, const std::optional<GpuModel>& gpu) {
  return guarded([&] { return explain_problem(on_gpu(check(args, options, false), gpu), options); });
}

Explanation explain(const BackwardArgs& args, const Options& options, const std::optional<GpuModel>& gpu) {
  return guarded([&] { return explain_problem(on_gpu(check(args, options, false), gpu), options); });
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
