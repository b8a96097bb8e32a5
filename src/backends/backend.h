// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "backends/problem.h"

namespace flashmask {

/// What computes attention. Backends are stateless singletons.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;
  virtual BackendInfo info() const = 0;
  /// Why this backend does not take the call, ending with what would do; empty if it takes it.
  virtual std::string refusal(const Problem& problem) const = 0;
  /// Chosen by "auto" when it takes the call; otherwise only by name.
  virtual bool automatic() const { return true; }
  virtual std::string configuration(const Problem& problem) const = 0;
  virtual TileShape tile(const Problem& problem) const = 0;
  virtual std::size_t workspace(const Problem& problem) const = 0;
  virtual void forward(const Problem& problem, std::span<std::byte> workspace) const = 0;
  virtual void backward(const Problem& problem, std::span<std::byte> workspace) const = 0;
};

/// The compiled-in backends, the preferred first.
std::span<const Backend* const> backend_list();

const Backend& reference_backend();
#ifdef FLASHMASK_WITH_CPU
const Backend& cpu_backend();
#endif

}  // namespace flashmask
