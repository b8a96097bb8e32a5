// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "mask/families/arguments.h"

namespace flashmask::build {

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

/// Writes the vectors of arguments whose contents are checked. Returns false if these make no mask of the family that
/// vectors say.
bool write_vectors(HostRun& run, const Arguments& arguments, const Output& output);

}  // namespace flashmask::build
