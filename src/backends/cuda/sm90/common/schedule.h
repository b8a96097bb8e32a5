// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::sm90 {

/// Work items are (batch entry, head, tile). Sequences (batch entry x head) are handed out in sections of whose tensors
/// the L2 cache holds what several items read; inside a section, the same rank of all its sequences first.
struct Schedule {
  uint32_t items, sequences, sequences_per_section, tiles;
  uint32_t* next;  ///< counter of items handed out
};

/// The n-th item in the order of dispatch, `heads` of them in a batch entry.
struct ItemPlace {
  uint32_t batch, head, rank;

#if defined(__CUDACC__)
  __device__ __forceinline__ ItemPlace(const Schedule& s, uint32_t heads, uint32_t n) {
    const uint32_t per_section = s.sequences_per_section * s.tiles;
    const uint32_t section = n / per_section, rest = n - section * per_section;
    const uint32_t first = section * s.sequences_per_section;
    const uint32_t sequences = min(s.sequences_per_section, s.sequences - first);
    rank = rest / sequences;
    const uint32_t sequence = first + rest - rank * sequences;
    batch = sequence / heads;
    head = sequence - batch * heads;
  }
#endif
};

}  // namespace flashmask::sm90
