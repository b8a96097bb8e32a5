// SPDX-License-Identifier: Apache-2.0
#include "run/parallel_for.h"

#include <algorithm>
#include <thread>
#include <vector>

namespace flashmask::run {

void parallel_for(int64_t count, int threads, const std::function<void(int64_t, int64_t)>& f) {
  const int64_t wanted = threads > 0 ? threads : std::max(1u, std::thread::hardware_concurrency());
  const int64_t parts = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(count, 1));
  std::vector<std::jthread> workers;
  for (int64_t part = 1; part < parts; ++part) {
    workers.emplace_back([&, part] { f(count * part / parts, count * (part + 1) / parts); });
  }
  f(0, count / parts);
}

}  // namespace flashmask::run
