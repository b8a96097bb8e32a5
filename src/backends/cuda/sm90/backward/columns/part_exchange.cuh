// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/device/delay.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/cluster.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/sm90/backward/traits.cuh"

namespace flashmask::sm90::bwd {

/// The exchange that ends a work tile whose rows two CTAs share. Each CTA has a part of dk and dv, the sum over its own
/// rows. In each, the consumer with the CTA's number adds the other CTA's part of its 64 keys to its own, and the other
/// consumer sends its part: so both CTAs add and store half of the keys, and a sum has one order.
///
/// A part arrives in dS and the staging tiles, which are free between work tiles. A CTA waits for the other one's
/// consumers at the end of the same work tile alone, and neither begins another before that.
template <typename Traits>
class PartExchange {
 public:
  using Shared = SharedStorage<Traits>;

  /// warp: the warp's number in its warpgroup.
  __device__ __forceinline__ PartExchange(Shared& shared, uint32_t warp)
      : shared_(shared),
        other_(1 - ptx::cluster_rank()),
        offset_(static_cast<uint32_t>(offsetof(Shared, ds)) +
                static_cast<uint32_t>((warp * kSlabFloats + 4 * ptx::lane()) * sizeof(float))),
        is_first_warp_(warp == 0) {}

  /// Sends the warp's values of dk and dv.
  template <int kDkValues, int kDvValues>
  __device__ __forceinline__ void send(const float (&dk)[kDkValues], const float (&dv)[kDvValues],
                                       uint32_t phase) const {
    delay<Role::kConsumer>();
    ptx::wait_cluster(shared_.pair.part_empty, phase);
    const uint32_t to = ptx::shared_address_in(&shared_, other_) + offset_,
                   full = ptx::shared_address_in(&shared_.pair.part_full, other_);
    send(dk, to, full);
    send(dv, to + kDkBytes, full);
  }

  /// Asks for the other CTA's values of dk and dv, and adds them to the warp's own. No warp of this CTA reads its dS or
  /// staging tiles any longer, nor do their stores.
  template <int kDkValues, int kDvValues>
  __device__ __forceinline__ void add(float (&dk)[kDkValues], float (&dv)[kDvValues], uint32_t phase) const {
    if (is_first_warp_ && ptx::is_leader()) {
      ptx::arrive_expect(shared_.pair.part_full, kPartBytes);
      ptx::arrive_remote(ptx::shared_address_in(&shared_.pair.part_empty, other_));
    }
    delay<Role::kConsumer>();
    ptx::wait_cluster(shared_.pair.part_full, phase);
    const unsigned char* from = reinterpret_cast<const unsigned char*>(&shared_) + offset_;
    add(dk, from);
    add(dv, from + kDkBytes);
  }

 private:
  /// 16 keys of a part: dk, and behind it dv, each as in KeyFragments.
  static constexpr int kSlabFloats = 16 * (Traits::kQkDim + Traits::kVDim);
  static constexpr uint32_t kPartBytes = 4 * kSlabFloats * sizeof(float),
                            kDkBytes = 16 * Traits::kQkDim * sizeof(float);
  static constexpr uint32_t kVectorStep = 32 * sizeof(float4);
#ifndef __CUDACC_RTC__  // whose offsetof is no constant
  static_assert(offsetof(Shared, staging) == offsetof(Shared, ds) + sizeof(Shared::ds));
#endif
  static_assert(kPartBytes <= sizeof(Shared::ds) + sizeof(Shared::staging));

  template <int kValues>
  __device__ __forceinline__ static void send(const float (&values)[kValues], uint32_t to, uint32_t full) {
#pragma unroll
    for (int e = 0; e < kValues / 4; ++e) ptx::store_four_remote(to + e * kVectorStep, values + 4 * e, full);
  }
  template <int kValues>
  __device__ __forceinline__ static void add(float (&values)[kValues], const unsigned char* from) {
#pragma unroll
    for (int e = 0; e < kValues / 4; ++e) {
      const float4 other = *reinterpret_cast<const float4*>(from + e * kVectorStep);
      values[4 * e] += other.x;
      values[4 * e + 1] += other.y;
      values[4 * e + 2] += other.z;
      values[4 * e + 3] += other.w;
    }
  }

  Shared& shared_;
  const uint32_t other_;   ///< the other CTA's number
  const uint32_t offset_;  ///< place of the lane's values in shared memory, in either CTA's
  const bool is_first_warp_;
};

}  // namespace flashmask::sm90::bwd
