// SPDX-License-Identifier: Apache-2.0
#pragma once

// The backend that takes a call, of either kind: over tensors or over a cache.

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "call/backend.h"
#include "plan/mask_memory.h"
#include "plan/plan_buffer.h"

namespace flashmask {

/// The launch of the backend that takes a call.
template <typename Launched>
struct Choice {
  const Backend* backend = nullptr;
  std::optional<Launched> launch;
  const char* asked_for_by = nullptr;  ///< null: the first that takes the call
  std::vector<std::string> rejected;
  bool no_device = false;  ///< none takes it because a device or a build is missing
};

/// kAll: every backend that does not take a call gives its reason; kNone: backends that hardly could are passed over.
enum class Reasons { kNone, kAll };

/// The backend of that name. Throws, naming `source`, if there is none.
const Backend& find_backend(std::string_view wanted, std::string_view source);

/// True if the call makes the plan that its launch reads.
inline bool makes_plan(const Problem& problem, const Launch& launch) {
  return launch.reads_plan() && !problem.plan.defined();
}

namespace choice {

inline Prepared prepare(const Backend& backend, const Problem& problem) {
  if (problem.features.split_size != 0 && !backend.takes_split_size())
    return Refusal{message("split_size is ", problem.features.split_size, "; backends 'cpu' and 'cuda' take it")};
  if (problem.arrivals.defined() && !backend.takes_arrivals())
    return Refusal{"keys arrive while the call runs (arrivals); backend 'cuda' alone takes them"};
  if (problem.early.defined() && !backend.takes_arrivals())
    return Refusal{"gradients of some keys come early (early); backend 'cuda' alone has them"};
  Prepared answer = backend.prepare(problem);
  const auto* launch = std::get_if<Launch>(&answer);
  if (!launch || !makes_plan(problem, *launch)) return answer;
  const int64_t memory = problem.gpu ? 0 : backend.memory_bytes(problem.device);
  std::string why =
      mask_memory_refusal(problem.mask, plan_layout(problem.mask, problem.device), problem.max_mask_bytes, memory);
  return why.empty() ? answer : Refusal{std::move(why)};
}
inline PreparedCached prepare(const Backend& backend, const CachedProblem& problem) {
  return backend.prepare_cached(problem);
}

template <typename P>
using LaunchOf = std::conditional_t<std::is_same_v<P, Problem>, Launch, CachedLaunch>;

/// True if a device is missing, not an ability.
template <typename P>
bool lacks_device(const Backend& backend, const P& problem) {
  return problem.device.kind == backend.device_kind() && !backend.has_device(problem.device);
}

/// Asks `backend` for the call; a slow one takes it only `by_name`.
template <typename P>
void ask(const Backend& backend, bool by_name, const P& problem, Choice<LaunchOf<P>>& choice) {
  auto answer = prepare(backend, problem);
  if (!by_name && !backend.automatic() && std::holds_alternative<LaunchOf<P>>(answer))
    answer = Refusal{"only runs when it is asked for by name (it is slow)"};
  if (const auto* launch = std::get_if<LaunchOf<P>>(&answer)) {
    choice.backend = &backend;
    choice.launch = *launch;
    return;
  }
  choice.rejected.push_back(message(backend.name(), ": ", std::get<Refusal>(answer).why));
  choice.no_device |= lacks_device(backend, problem) || (by_name && !backend.info().usable);
}

}  // namespace choice

/// The first backend that takes the call: the argument decides, then the environment, then the order of the list.
template <typename P>
Choice<choice::LaunchOf<P>> choose(const P& problem, std::string_view wanted, Reasons reasons) {
  constexpr const char* kVariable = "FLASHMASK_BACKEND";
  Choice<choice::LaunchOf<P>> choice;
  const char* source = "Options::backend";
  const char* variable = std::getenv(kVariable);
  if (wanted == "auto" && variable && *variable) {
    wanted = variable;
    source = kVariable;
  }
  if (wanted != "auto") {
    const Backend& forced = find_backend(wanted, source);
    choice.asked_for_by = source;
    choice::ask(forced, true, problem, choice);
    return choice;
  }
  for (const Backend* backend : backend_list()) {
    if (reasons == Reasons::kNone && backend->device_kind() != problem.device.kind) continue;
    choice::ask(*backend, false, problem, choice);
    if (choice.launch) break;
  }
  return choice;
}

template <typename Launched>
[[noreturn]] void throw_rejected(const Choice<Launched>& choice) {
  std::string reasons;
  for (const std::string& line : choice.rejected) reasons += message(reasons.empty() ? "" : "; ", line);
  throw Error(choice.no_device ? ErrorCode::kNoDevice : ErrorCode::kUnsupported,
              message("no backend takes this call: ", reasons));
}

/// The launch of the backend that takes a call. Throws kUnsupported or kNoDevice, with every backend's reason, if none
/// does.
template <typename P>
choice::LaunchOf<P> launch_of(const P& problem, std::string_view wanted) {
  const auto choice = choose(problem, wanted, Reasons::kNone);
  if (!choice.launch) throw_rejected(choose(problem, wanted, Reasons::kAll));
  return *choice.launch;
}

}  // namespace flashmask
