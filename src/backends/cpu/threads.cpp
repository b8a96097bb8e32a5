// SPDX-License-Identifier: Apache-2.0
#include "backends/cpu/threads.h"

#include <dirent.h>
#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>

namespace flashmask::cpu {
namespace {

/// Set in a process that was forked off one with several threads. A fork takes only the thread that made it along, and
/// OpenMP's runtime, which other libraries may have used before, would wait for its others forever.
std::atomic<bool> threads_were_lost = false;

/// True if this process has several threads, or if they cannot be counted.
bool has_several_threads() {
  DIR* const tasks = opendir("/proc/self/task");
  if (!tasks) return true;
  int entries = 0;
  while (readdir(tasks)) ++entries;
  closedir(tasks);
  return entries > 3;  // beside "." and ".."
}

/// Watches forks from when the library is loaded.
const int forks_are_watched = [] {
  static bool loses_threads;  // set by the fork under way: prepare and child run in the thread that forks
  return pthread_atfork([] { loses_threads = has_several_threads(); }, nullptr,
                        [] {
                          if (loses_threads) threads_were_lost = true;
                        });
}();

}  // namespace

int default_threads() { return threads_were_lost ? 1 : omp_get_max_threads(); }

int thread_count(int wanted, int64_t items) {
  constexpr int kMost = 1024;
  const int asked = wanted > 0 && !threads_were_lost ? wanted : default_threads();
  return static_cast<int>(std::clamp<int64_t>(items, 1, std::min(asked, std::max(kMost, omp_get_num_procs()))));
}

}  // namespace flashmask::cpu
