// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/kernel_sets.h"

#include <array>
#include <cstdlib>
#include <string_view>
#include <variant>

#include "backends/cuda/host/call_params.h"
#include "backends/cuda/host/device.h"
#include "common/message.h"
#if defined(FLASHMASK_HAS_SM80)
#include "backends/cuda/sm80/kernel_set.h"
#endif
#if defined(FLASHMASK_HAS_SM90)
#include "backends/cuda/sm90/kernel_set.h"
#endif

namespace flashmask::cuda {
namespace {

constexpr const char* kVariable = "FLASHMASK_KERNELS";

/// The names of the sets that `fits` holds for.
template <typename Fits>
std::string names_of(Fits&& fits) {
  std::string names;
  for (const KernelSet* set : kernel_sets()) {
    if (fits(*set)) names += message(names.empty() ? "" : ", ", set->name);
  }
  return names;
}

/// The kernels that are asked for, and by what; "auto" if none are.
struct Wanted {
  std::string_view name;
  const char* source = "Options::kernels";
  explicit Wanted(std::string_view of_options) : name(of_options) {
    const char* const variable = std::getenv(kVariable);
    if (name != "auto" || !variable || !*variable) return;
    name = variable;
    source = kVariable;
  }
  bool is_any() const { return name == "auto"; }
};

const KernelSet& find_set(std::string_view wanted, const char* source) {
  for (const KernelSet* set : kernel_sets()) {
    if (set->name == wanted) return *set;
  }
  throw_invalid("kernels '", wanted, "' (", source, ") is not known; known: auto, ",
                names_of([](const KernelSet&) { return true; }));
}

/// The first set that runs on a GPU.
const KernelSet* first_on(Capability gpu) {
  for (const KernelSet* set : kernel_sets()) {
    if (set->runs_on(gpu.major, gpu.minor)) return set;
  }
  return nullptr;
}

std::string capability_refusal(Capability gpu) {
  if (first_on(gpu)) return "";
  return message("has compute capability ", gpu.major, ".", gpu.minor, "; the kernels need ", needed_capabilities());
}

/// Why the call's GPU, or the one that an explanation takes in its place, cannot run any kernels.
std::string gpu_refusal(const Problem& p) {
  if (!p.gpu) return device_refusal(p.device.index);
  const std::string why = capability_refusal(capability_of(p));
  return why.empty() ? "" : message("the GPU ", why);
}

}  // namespace

std::span<const KernelSet* const> kernel_sets() {
  static constexpr std::array kSets{
#if defined(FLASHMASK_HAS_SM90)
      &sm90::kKernelSet,
#endif
#if defined(FLASHMASK_HAS_SM80)
      &sm80::kKernelSet,
      &sm80::kSmallKernelSet,
#endif
  };
  return kSets;
}

std::variant<Refusal, const KernelSet*> kernel_set_for(const Problem& p) {
  const Wanted wanted(p.kernels);
  const KernelSet* const asked_for = wanted.is_any() ? nullptr : &find_set(wanted.name, wanted.source);
  if (std::string why = gpu_refusal(p); !why.empty()) return Refusal{why};
  const Capability gpu = capability_of(p);
  if (!asked_for) return first_on(gpu);
  const auto fits = [gpu](const KernelSet& set) { return set.runs_on(gpu.major, gpu.minor); };
  if (fits(*asked_for)) return asked_for;
  return Refusal{message("kernels '", wanted.name, "' (", wanted.source, ") need compute capability ", asked_for->needs,
                         ", the device has ", gpu.major, ".", gpu.minor, "; it takes auto, ", names_of(fits))};
}

std::variant<Refusal, const KernelSet*> cache_kernel_set_for(const Device& device, std::string_view wanted,
                                                             const CachedCapacities& capacities) {
  Problem where{};
  where.device = device;
  where.kernels = wanted;
  auto found = kernel_set_for(where);
  if (!capacities.float8 || std::holds_alternative<Refusal>(found) || !Wanted(wanted).is_any()) return found;
  const Capability gpu = capability_of(where);
  for (const KernelSet* set : kernel_sets()) {
    if (set->reads_float8(capacities) && set->runs_on(gpu.major, gpu.minor)) return set;
  }
  return found;
}

std::string device_refusal(int32_t index) {
  try {
    const DeviceProperties& d = device(index);
    const std::string why = capability_refusal({d.major, d.minor});
    return why.empty() ? "" : message("CUDA device ", index, " (", d.name, ") ", why);
  } catch (const Error& e) {
    return e.what();
  }
}

std::string needed_capabilities() {
  std::string needed;
  for (const KernelSet* set : kernel_sets()) needed += message(needed.empty() ? "" : " or ", set->needs);
  return needed;
}

}  // namespace flashmask::cuda
