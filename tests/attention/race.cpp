// SPDX-License-Identifier: Apache-2.0

// Has a data race. A run in which the thread sanitizer keeps silent about it proves nothing.

#include <cstdio>

int main() {
  int unguarded = 0;
#pragma omp parallel num_threads(2)
  ++unguarded;
  std::printf("%d\n", unguarded);
}
