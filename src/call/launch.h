// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <variant>

#include "call/problem.h"
#include "call/workspace.h"
#include "common/message.h"
#include "plan/plan_buffer.h"

namespace flashmask {

/// Result of configuring a call that a backend takes: computed once, from shapes, options and the device alone, and
/// kept until the call runs.
template <typename T>
concept Configuration =
    std::is_trivially_copyable_v<T> && requires(const T& t, const Problem& p, Explanation& e, std::byte* workspace) {
      { t.tile() } -> std::same_as<TileShape>;
      { t.reads_plan(p) } -> std::same_as<bool>;
      /// Beside the plan.
      { t.workspace_bytes() } -> std::same_as<int64_t>;
      /// Fills in configuration and, on a GPU, arch, instance, kernels and padding_share.
      t.explain(p, e);
      /// `p` has a plan if this reads one; no output of the call is without elements.
      t.run(p, workspace);
    };

/// A call that a backend takes, configured. It is a value and lies where it is made: no call allocates for it.
class Launch {
 public:
  /// `problem` has to stay where it is as long as the launch is used.
  template <Configuration T>
  Launch(const Problem& problem, const T& configuration)
      : problem_(&problem),
        functions_(&kFunctions<T>),
        tile_(configuration.tile()),
        reads_plan_(configuration.reads_plan(problem)),
        workspace_bytes_(configuration.workspace_bytes()) {
    static_assert(sizeof(T) <= kCapacity && alignof(T) <= alignof(std::max_align_t));
    std::memcpy(configuration_, &configuration, sizeof(T));
  }

  const TileShape& tile() const { return tile_; }
  /// True if the problem needs a plan before run().
  bool reads_plan() const { return reads_plan_; }
  /// Workspace of run().
  int64_t workspace_bytes() const { return workspace_bytes_; }
  void explain(Explanation& explanation) const { functions_->explain(configuration_, *problem_, explanation); }
  /// `workspace` is aligned to kWorkspaceAlignment, in the memory of the call's device.
  void run(std::byte* workspace) const { functions_->run(configuration_, *problem_, workspace); }

 private:
  static constexpr std::size_t kCapacity = 256;
  struct Functions {
    void (*explain)(const std::byte*, const Problem&, Explanation&);
    void (*run)(const std::byte*, const Problem&, std::byte*);
  };
  template <typename T>
  static const T& as(const std::byte* configuration) {
    return *reinterpret_cast<const T*>(configuration);
  }
  template <typename T>
  static constexpr Functions kFunctions{
      [](const std::byte* c, const Problem& p, Explanation& e) { as<T>(c).explain(p, e); },
      [](const std::byte* c, const Problem& p, std::byte* workspace) { as<T>(c).run(p, workspace); }};

  const Problem* problem_;
  const Functions* functions_;
  TileShape tile_;
  bool reads_plan_;
  int64_t workspace_bytes_;
  alignas(std::max_align_t) std::byte configuration_[kCapacity];
};

/// Why a backend does not take a call, ending with the remedy.
struct Refusal {
  std::string why;
};

using Prepared = std::variant<Refusal, Launch>;

/// Why no backend that runs on the CPU takes tensors there; null if one may.
inline const char* host_refusal(const Device& device, const void* stream) {
  if (device.kind != Device::Kind::kCpu) return "takes CPU tensors only";
  return stream ? "stream must be null on the CPU" : nullptr;
}
/// Why none of them takes the call.
inline const char* host_refusal(const Problem& p) {
  if (const char* why = host_refusal(p.device, p.stream)) return why;
  if (p.kernels != "auto") return "kernels must be 'auto' on the CPU; they are a CUDA device's";
  return nullptr;
}

/// Names the source of a call's plan, its size and its form, for Explanation::configuration.
inline std::string plan_source(const Problem& p) {
  if (p.dense.defined()) return "dense mask: every tile executed";
  const PlanLayout plan = p.plan.defined() ? p.plan.layout() : plan_layout(p.mask, p.device);
  return message(p.plan.defined() ? "plan given" : "plan made in the call", " (", plan.bytes, " bytes, ",
                 plan.in_runs() ? "in runs)" : "in bits)");
}

}  // namespace flashmask
