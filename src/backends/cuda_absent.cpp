// SPDX-License-Identifier: Apache-2.0

// Stands in for the CUDA backend in a build without it, so that asking for it says what is the matter.

#include "call/backend.h"
#include "call/peers.h"
#include "common/message.h"

namespace flashmask {
namespace {

constexpr const char* kAbsent = "not compiled in; build with CUDA=on (make demo CUDA=on) or -DFLASHMASK_CUDA=ON";

[[noreturn]] void throw_absent(const char* what) {
  throw Error(ErrorCode::kNoDevice, message(what, ": the CUDA backend is ", kAbsent));
}

class AbsentBackend final : public Backend {
 public:
  std::string_view name() const override { return "cuda"; }
  BackendInfo info() const override { return {"cuda", false, kAbsent}; }
  Device::Kind device_kind() const override { return Device::Kind::kCuda; }
  bool has_device(const Device&) const override { return false; }
  Prepared prepare(const Problem&) const override { return Refusal{kAbsent}; }
  PreparedCached prepare_cached(const CachedProblem&) const override { return Refusal{kAbsent}; }
  void build_plan(const MaskView&, const PlanLayout&, std::span<std::byte>, const Device&, void*) const override {
    throw_absent("build_plan");
  }
  int32_t count_runs(const MaskView&, const PlanLayout&, std::span<std::byte>, const Device&, void*) const override {
    throw_absent("count_plan_layout");
  }
  bool is_plan_of(const MaskView&, const PlanView&, std::span<std::byte>, void*) const override {
    throw_absent("validate_plan");
  }
  void append(const AppendProblem&) const override { throw_absent("append_kv"); }
  std::size_t cached_plan_bytes(const CachedCapacities&, const Device&) const override {
    throw_absent("cached_plan_bytes");
  }
  void build_cached_plan(const CachedProblem&, const CachedPlan&) const override { throw_absent("build_cached_plan"); }
  void build_vectors(const build::Arguments&, const build::Output&, const std::function<std::byte*(std::size_t)>&,
                     void*) const override {
    throw_absent("build_mask");
  }
};

}  // namespace

const Backend& cuda_backend() {
  static const AbsentBackend backend;
  return backend;
}

namespace peers {

SharedMemory create(const Device&, std::size_t) { throw_absent("memory for peers"); }
void* open(const Device&, const Handle&) { throw_absent("memory of peers"); }
void release(const Device&, void*, bool) { throw_absent("memory of peers"); }
void enqueue(std::span<const Transfer>, const Device&, void*) { throw_absent("transfers"); }
void signal(std::span<uint32_t* const>, uint32_t, const Device&, void*) { throw_absent("signals to peers"); }
void settle(const Settlement&, const Device&, void*) { throw_absent("the end of an exchange"); }

}  // namespace peers
}  // namespace flashmask
