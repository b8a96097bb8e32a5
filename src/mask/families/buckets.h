// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "mask/families/integers.h"

namespace flashmask::build {

/// Ends and beginnings of the last runs of rows in a bucket, later runs first. Rows are stored plus 1; 0: no run.
struct Bucket {
  /// Rows of a column that fits are hidden in two gaps between runs at most. The fourth run tells that there are more.
  static constexpr int kRuns = 4;
  int32_t owner;                          ///< a row in the bucket, likewise
  int32_t last[kRuns], first[kRuns - 1];  ///< the last and the first row of each

  /// Keeps `row` if it is among the largest. Many threads may call it at once: each place ends up with the largest
  /// value that reached it, and passes all others on.
  template <int kPlaces>
  FLASHMASK_COLUMN static void keep(int32_t (&places)[kPlaces], int64_t row) {
    int32_t value = static_cast<int32_t>(row + 1);
    if (value <= places[kPlaces - 1]) return;
    for (int n = 0; n < kPlaces && value > 0; ++n) {
      const int32_t was = raise(&places[n], value);
      value = was < value ? was : value;
    }
  }
};

/// The buckets of rows, hashed, and the last runs of each.
struct BucketTable {
  Integers buckets;  ///< the rows' buckets
  int64_t most;      ///< how many different ones there are at most
  Bucket* memory;    ///< size(most) zeros for each lead; the last stays a bucket without rows

  static constexpr int64_t size(int64_t most) { return places(most) + 1; }

  /// The bucket, whose owner `row` becomes if it has none; one without rows if it has none and `row` is negative.
  FLASHMASK_COLUMN Bucket* find(const Lead& lead, int64_t bucket, int64_t row = -1) const {
    const int64_t count = places(most);
    Bucket* const all = memory + lead.index * (count + 1);
    // There are fewer buckets than places, so that the search ends.
    for (int64_t place = place_of(bucket, count);; place = place + 1 < count ? place + 1 : 0) {
      int32_t owner = all[place].owner;
      if (owner == 0 && row < 0) return all + count;
      if (owner == 0) owner = claim(&all[place].owner, static_cast<int32_t>(row + 1));
      if (owner == 0) owner = static_cast<int32_t>(row + 1);
      if (buckets(lead, owner - 1) == bucket) return all + place;
    }
  }

 private:
  FLASHMASK_COLUMN static constexpr int64_t places(int64_t most) { return most + most / 2 + 1; }
  FLASHMASK_COLUMN static int64_t place_of(int64_t bucket, int64_t count) {
    // The upper half of a product by an odd number depends on every bit below; the first step mixes the upper ones in.
    const uint64_t x = static_cast<uint64_t>(bucket);
    const uint64_t mixed = (x ^ (x >> 32)) * 0x9E3779B97F4A7C15u;
    return static_cast<int64_t>((mixed >> 32) * static_cast<uint64_t>(count) >> 32);
  }
};

}  // namespace flashmask::build
