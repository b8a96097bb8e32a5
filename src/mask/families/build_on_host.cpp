// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "mask/families/families.h"

namespace flashmask::build {
namespace {

/// Does the steps one after the other.
class HostRun {
 public:
  static constexpr bool kInOrder = true;
  explicit HostRun(const Leads& leads) : leads_(leads) {}
  const Leads& leads() const { return leads_; }

  template <typename T>
  T* array(int64_t count) {
    return keep<T>(std::malloc(bytes<T>(count)));
  }
  /// Pages that nothing is written to cost nothing.
  template <typename T>
  T* zeros(int64_t count) {
    return keep<T>(std::calloc(bytes<T>(count), 1));
  }
  template <typename F>
  void each(int64_t count, F f) const {
    for (int64_t l = 0; l < leads_.count(); ++l) {
      const Lead lead = leads_[l];
      for (int64_t n = 0; n < count; ++n) f(lead, n);
    }
  }
  template <typename F>
  void scan(int64_t count, F f) const {
    for (int64_t l = 0; l < leads_.count(); ++l) {
      const Lead lead = leads_[l];
      int64_t sum = 0;
      for (int64_t n = 0; n < count; ++n) f.prepare(lead, n);
      for (int64_t n = 0; n < count; ++n) {
        const int64_t value = f.value(lead, n);
        f.store(lead, n, value, sum += value);
      }
    }
  }

 private:
  template <typename T>
  std::size_t bytes(int64_t count) const {
    return std::max<std::size_t>(static_cast<std::size_t>(leads_.count() * count) * sizeof(T), 1);
  }
  template <typename T>
  T* keep(void* memory) {
    if (!memory) throw std::bad_alloc();
    memory_.emplace_back(memory, std::free);
    return static_cast<T*>(memory);
  }

  Leads leads_;
  std::vector<std::unique_ptr<void, decltype(&std::free)>> memory_;
};

}  // namespace

void build_on_host(const Arguments& arguments, const Output& output) {
  HostRun run({arguments.shape.batch, arguments.shape.heads});
  Arguments own = arguments;
  int32_t unfit = 0;
  own.unfit = &unfit;
  build(run, own, output);
  if (unfit) with_family(*arguments.family, [&](auto family) { family.throw_first_misfit(run, arguments); });
  if (arguments.unfit) *arguments.unfit = 0;
}

Mask build_mask(std::string_view family, const std::vector<Parameter>& parameters) {
  const Arguments a = read_arguments(family, parameters, {});
  check_contents(a);
  const Shape& shape = a.shape;
  MaskParts parts{.seqlen_q = shape.seqlen_q,
                  .seqlen_k = shape.seqlen_k,
                  .band = shape.band,
                  .q_offset = shape.q_offset,
                  .batch = shape.batch,
                  .heads = shape.heads};
  if (shape.form.has_positions) {
    parts.position_batch = shape.batch;
    parts.q_pos.resize(static_cast<std::size_t>(shape.batch * shape.seqlen_k));
  }
  const auto vector = [&](uint32_t which, std::vector<int32_t>& entries) -> int32_t* {
    if (!(shape.form.vectors & which)) return nullptr;
    entries.resize(static_cast<std::size_t>(shape.batch * shape.heads * shape.seqlen_k));
    return entries.data();
  };
  const VectorOutput vectors{vector(kLts, parts.lts), vector(kLte, parts.lte), vector(kUts, parts.uts),
                             vector(kUte, parts.ute)};
  build_on_host(a, {vectors, parts.q_pos.data()});
  parts.k_pos = parts.q_pos;
  return Mask(std::move(parts));
}

}  // namespace flashmask::build
