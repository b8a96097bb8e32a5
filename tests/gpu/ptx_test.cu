// SPDX-License-Identifier: Apache-2.0
//
// Every instruction wrapper of src/backends/cuda/ptx alone, on a GPU, in each operand form the kernels use.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <vector>

#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/tensor_core.cuh"
#include "backends/cuda/ptx/tma.cuh"
#include "backends/cuda/ptx/wgmma.cuh"
#include "backends/cuda/sm90/common/tensor_map.h"
#include "device_vector.h"

namespace flashmask {
namespace {

using ptx::Major;

/// Element (row, column) of a tile with rows of 64 16-bit elements under the 128-byte swizzle.
__host__ __device__ int swizzled(int row, int column) {
  return row * 64 + (((column / 8) ^ (row % 8)) * 8 + column % 8);
}

constexpr int kInner = 64;

/// C = A B, A [64, 64], B [64, n], one warpgroup; in shared memory B has kFirst columns before these. Operands are laid
/// out by plain stores, so that only the product's reading of them is under test.
template <typename T, int N, bool kFromRegisters, Major kA, Major kB, int kFirst>
__global__ void product(const T* a, const T* b, float* c) {
  __shared__ alignas(1024) T a_tile[64 * kInner];
  __shared__ alignas(1024) T b_tile[(kFirst + N + 63) / 64 * 64 * kInner];
  for (int i = threadIdx.x; i < 64 * kInner; i += blockDim.x) {
    const int m = i / kInner, k = i % kInner;
    a_tile[kA == Major::kInner ? swizzled(m, k) : swizzled(k, m)] = a[i];
  }
  for (int i = threadIdx.x; i < kInner * N; i += blockDim.x) {
    const int k = i / N, n = kFirst + i % N;
    b_tile[kB == Major::kInner ? swizzled(n, k) : n / 64 * kInner * 64 + swizzled(k, n % 64)] = b[i];
  }
  ptx::fence_async_proxy();
  __syncthreads();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float d[N / 2];
  uint32_t fragments[kInner / 16][4];
  for (int step = 0; step < kInner / 16; ++step) {
    for (int word = 0; word < 4; ++word) {
      const int row = 16 * warp + lane / 4 + 8 * (word % 2), k = 16 * step + 2 * (lane % 4) + 8 * (word / 2);
      fragments[step][word] = ptx::pack<T>(float(a[row * kInner + k]), float(a[row * kInner + k + 1]));
    }
  }
  static_assert(kFirst == 0 || kB == Major::kOuter);
  const uint32_t a_at = ptx::shared_address(a_tile), b_at = ptx::shared_address(b_tile + kFirst);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kInner / 16; ++step) {
    const uint64_t b_operand = kB == Major::kInner ? ptx::MatrixDescriptor(b_at).at(32 * step)
                                                   : ptx::MatrixDescriptor(b_at, kInner * 128).at(2048 * step);
    if constexpr (kFromRegisters) {
      ptx::wgmma_rs<T, N, kB>(d, fragments[step], b_operand, step > 0);
    } else {
      ptx::wgmma_ss<T, N, kA, kB>(d, ptx::MatrixDescriptor(a_at).at((kA == Major::kInner ? 32 : 2048) * step),
                                  b_operand, step > 0);
    }
  }
  ptx::wgmma_commit();
  ptx::wgmma_wait<0>();
  ptx::pin(d);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    c[(16 * warp + lane / 4 + 8 * (i / 2 % 2)) * N + i / 4 * 8 + 2 * (lane % 4) + i % 2] = d[i];
  }
}

template <typename T>
std::vector<T> random_values(int n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values(n);
  for (T& x : values) x = T(normal(generator));
  return values;
}

template <typename T, int N, bool kFromRegisters, Major kA, Major kB, int kFirst = 0>
void expect_product(unsigned seed) {
  const auto a = random_values<T>(64 * kInner, seed), b = random_values<T>(kInner * N, seed + 1);
  test::DeviceVector<T> device_a(a), device_b(b);
  test::DeviceVector<float> device_c(std::vector<float>(64 * N, NAN));
  product<T, N, kFromRegisters, kA, kB, kFirst><<<1, 128>>>(device_a.data(), device_b.data(), device_c.data());
  const std::vector<float> c = device_c.to_host();
  double error = 0, norm = 0;
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < N; ++n) {
      double exact = 0;
      for (int k = 0; k < kInner; ++k) exact += double(float(a[m * kInner + k])) * float(b[k * N + n]);
      error += (c[m * N + n] - exact) * (c[m * N + n] - exact);
      norm += exact * exact;
    }
  }
  EXPECT_LT(std::sqrt(error / norm), 1e-6)
      << "N " << N << " registers " << kFromRegisters << " majors " << int(kA) << int(kB);
}

template <typename T, int N>
void expect_products(unsigned seed) {
  expect_product<T, N, false, Major::kInner, Major::kInner>(seed);
  expect_product<T, N, false, Major::kInner, Major::kOuter>(seed + 10);
  expect_product<T, N, false, Major::kOuter, Major::kInner>(seed + 20);
  expect_product<T, N, false, Major::kOuter, Major::kOuter>(seed + 30);
  expect_product<T, N, true, Major::kInner, Major::kInner>(seed + 40);
  expect_product<T, N, true, Major::kInner, Major::kOuter>(seed + 50);
}

class Ptx : public ::testing::Test {
 protected:
  void SetUp() override { FLASHMASK_NEEDS_GPU(); }
};

TEST_F(Ptx, WgmmaBf16) {
  expect_products<__nv_bfloat16, 64>(1);
  expect_products<__nv_bfloat16, 128>(2);
}
/// Across the inner dimension the last block of 64 may be a part of one.
TEST_F(Ptx, WgmmaOfOtherWidths) {
  expect_products<__nv_bfloat16, 32>(9);
  expect_products<__nv_bfloat16, 96>(5);
  expect_products<__half, 96>(6);
  expect_products<__nv_bfloat16, 192>(7);
  expect_products<__nv_bfloat16, 256>(8);
}
/// Across the inner dimension a product may begin in the middle of a block, if it ends with it.
TEST_F(Ptx, WgmmaOfTheSecondHalfOfABlock) {
  expect_product<__nv_bfloat16, 32, false, Major::kInner, Major::kOuter, 32>(11);
  expect_product<__half, 32, false, Major::kInner, Major::kOuter, 32>(12);
}
TEST_F(Ptx, WgmmaF16) {
  expect_products<__half, 64>(3);
  expect_products<__half, 128>(4);
}

/// Loads a box and writes the swizzled tile out as it lies; then stores it back through the other map.
__global__ void copy_box(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
                         ptx::BoxOrigin at, int bytes, uint16_t* seen) {
  extern __shared__ __align__(1024) unsigned char tile[];
  __shared__ uint64_t full;
  if (threadIdx.x == 0) {
    ptx::prefetch(from);
    ptx::barrier_init(full, 1);
    ptx::fence_barrier_init();
    ptx::arrive_expect(full, bytes);
    ptx::tma_load(tile, from, full, at);
  }
  __syncthreads();
  ptx::wait(full, 0);
  for (int i = threadIdx.x; i < bytes / 2; i += blockDim.x) seen[i] = reinterpret_cast<uint16_t*>(tile)[i];
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::tma_store(to, tile, at);
    ptx::bulk_commit();
    ptx::bulk_wait_read();
    ptx::bulk_wait();
  }
}

/// Loads two blocks of 32 rows, writes out how they lie, and stores them, each with a copy of its own if the map has
/// no blocks.
template <bool kOneCopy>
__global__ void copy_blocks(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to,
                            ptx::BoxOrigin at, uint16_t* seen) {
  constexpr int kRows = 32, kBlocks = 2;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto* tile = reinterpret_cast<uint16_t*>(memory);
  __shared__ uint64_t full;
  if (threadIdx.x == 0) {
    ptx::barrier_init(full, 1);
    ptx::fence_barrier_init();
    ptx::arrive_expect(full, kRows * kBlocks * 128);
    ptx::Blocks<kOneCopy>::template load<kBlocks, kRows>(tile, from, full, at);
  }
  __syncthreads();
  ptx::wait(full, 0);
  for (int i = threadIdx.x; i < kRows * kBlocks * 64; i += blockDim.x) seen[i] = tile[i];
  __syncthreads();
  if (threadIdx.x != 0) return;
  if constexpr (kOneCopy) {
    ptx::tma_store(to, tile, at);
  } else {
    for (int block = 0; block < kBlocks; ++block)
      ptx::Blocks<kOneCopy>::store(to, tile + block * kRows * 64, {at.row, at.block + block, at.head, at.batch});
  }
  ptx::bulk_commit();
  ptx::bulk_wait();
}

TEST_F(Ptx, TmaLoadsSwizzledBoxesZeroFillsAndDropsWhatIsOutOfRange) {
  constexpr int kBatch = 2, kSeqlen = 37, kHeads = 3, kDim = 128, kRows = 32, kBlocks = 2,
                kSize = kBatch * kSeqlen * kHeads * kDim;
  std::vector<uint16_t> values(kSize);
  std::iota(values.begin(), values.end(), uint16_t{1});
  test::DeviceVector<uint16_t> source(values), target(std::vector<uint16_t>(kSize, 0xffff)),
      seen(std::vector<uint16_t>(kRows * kDim, 0xffff));
  const auto view = [&](uint16_t* data) {
    return TensorView::contiguous(data, DataType::kBFloat16, {kBatch, kSeqlen, kHeads, kDim});
  };
  const ptx::BoxOrigin at{20, 0, 1, 1};
  copy_box<<<1, 64, kRows * kDim * 2>>>(sm90::tensor_map(view(source.data()), kRows, kBlocks),
                                        sm90::tensor_map(view(target.data()), kRows, kBlocks), at, kRows * kDim * 2,
                                        seen.data());
  const auto index = [&](int b, int s, int h, int d) { return ((b * kSeqlen + s) * kHeads + h) * kDim + d; };
  const std::vector<uint16_t> tile = seen.to_host(), out = target.to_host();
  for (int row = 0; row < kRows; ++row) {
    for (int d = 0; d < kDim; ++d) {
      const int s = at.row + row;
      const uint16_t expected = s < kSeqlen ? values[index(1, s, 1, d)] : 0;
      ASSERT_EQ(tile[d / 64 * kRows * 64 + swizzled(row, d % 64)], expected) << row << " " << d;
    }
  }
  for (int n = 0; n < kSize; ++n) {
    const int h = n / kDim % kHeads, s = n / kDim / kHeads % kSeqlen, b = n / kDim / kHeads / kSeqlen;
    ASSERT_EQ(out[n], b == 1 && h == 1 && s >= at.row ? values[n] : 0xffff) << n;
  }
}

/// Rows that end in the middle of a block: one copy a block in one map, and equal blocks in the other.
TEST_F(Ptx, TmaFillsWithZerosPastTheEndOfRows) {
  constexpr int kSeqlen = 40, kHeads = 2, kDim = 80, kRows = 32, kSize = kSeqlen * kHeads * kDim;
  std::vector<uint16_t> values(kSize);
  std::iota(values.begin(), values.end(), uint16_t{1});
  for (const sm90::ColumnBlocks blocks : {sm90::blocks_to_the_end(kDim), sm90::equal_blocks(kDim, 128)}) {
    const bool to_the_end = blocks.count == 1;
    test::DeviceVector<uint16_t> source(values), target(std::vector<uint16_t>(kSize, 0xffff)),
        seen(std::vector<uint16_t>(kRows * 128, 0xffff));
    const auto map = [&](uint16_t* data) {
      const auto view = TensorView::contiguous(data, DataType::kBFloat16, {1, kSeqlen, kHeads, kDim});
      return sm90::tensor_map(view, blocks, kRows, to_the_end ? 1 : 2);
    };
    const auto copy = to_the_end ? copy_blocks<false> : copy_blocks<true>;
    copy<<<1, 64, kRows * 256>>>(map(source.data()), map(target.data()), {8, 0, 1, 0}, seen.data());
    const std::vector<uint16_t> tile = seen.to_host(), out = target.to_host();
    const auto width = static_cast<int>(to_the_end ? 64 : blocks.width);
    for (int row = 0; row < kRows; ++row) {
      for (int c = 0; c < 128; ++c) {
        const int d = c / 64 * width + c % 64;
        const bool inside = c % 64 < width && d < kDim;
        ASSERT_EQ(tile[c / 64 * kRows * 64 + swizzled(row, c % 64)],
                  inside ? values[((8 + row) * kHeads + 1) * kDim + d] : 0)
            << row << " " << c;
      }
    }
    for (int n = 0; n < kSize; ++n) {
      const bool inside = n / kDim % kHeads == 1 && n / kDim / kHeads >= 8;
      ASSERT_EQ(out[n], inside ? values[n] : 0xffff) << n;
    }
  }
}

/// A ring of two buffers, one producer thread, one consumer warp: every number must arrive once and in order.
__global__ void ring(int count, int* received) {
  __shared__ int buffer[2];
  __shared__ uint64_t full[2], empty[2];
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(full[i], 1);
      ptx::barrier_init(empty[i], 1);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  ptx::RingPosition<2> at;
  if (threadIdx.x == 0) {
    for (int n = 0; n < count; ++n, at.advance()) {
      ptx::wait(empty[at.stage()], at.phase() ^ 1);
      buffer[at.stage()] = n;
      ptx::arrive(full[at.stage()]);
    }
  } else if (threadIdx.x >= 32) {
    for (int n = 0; n < count; ++n, at.advance()) {
      ptx::wait(full[at.stage()], at.phase());
      if (threadIdx.x == 32) received[n] = buffer[at.stage()];
      __syncwarp();
      if (threadIdx.x == 32) ptx::arrive(empty[at.stage()]);
    }
  }
}

TEST_F(Ptx, BarrierRingKeepsOrder) {
  constexpr int kCount = 1001;
  test::DeviceVector<int> received(std::vector<int>(kCount, -1));
  ring<<<1, 64>>>(kCount, received.data());
  const std::vector<int> numbers = received.to_host();
  for (int n = 0; n < kCount; ++n) ASSERT_EQ(numbers[n], n);
}

/// stmatrix: matrix l / 8, row l % 8 goes to the address of lane l.
__global__ void store_matrices(uint16_t* out) {
  __shared__ alignas(128) uint16_t tile[16 * 16];
  const int lane = threadIdx.x;
  uint32_t r[4];
  for (int m = 0; m < 4; ++m) {
    const int row = lane / 4 + 8 * (m % 2), column = 2 * (lane % 4) + 8 * (m / 2);
    r[m] = static_cast<uint32_t>(row * 16 + column) | static_cast<uint32_t>(row * 16 + column + 1) << 16;
  }
  ptx::stmatrix_x4(ptx::shared_address(tile) + (lane % 16) * 32 + lane / 16 * 16, r[0], r[1], r[2], r[3]);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) out[i] = tile[i];
}

TEST_F(Ptx, StmatrixStoresAccumulatorFragments) {
  test::DeviceVector<uint16_t> out(std::vector<uint16_t>(256, 0xffff));
  store_matrices<<<1, 32>>>(out.data());
  const std::vector<uint16_t> tile = out.to_host();
  for (int i = 0; i < 256; ++i) ASSERT_EQ(tile[i], i);
}

/// stmatrix, transposed: the fragments of a [key, row] product as a [row, key] tile.
__global__ void store_transposed(uint16_t* out) {
  __shared__ alignas(128) uint16_t tile[16 * 16];
  const int lane = threadIdx.x;
  uint32_t r[4];
  for (int m = 0; m < 4; ++m) {
    const int key = lane / 4 + 8 * (m % 2), row = 2 * (lane % 4) + 8 * (m / 2);
    r[m] = static_cast<uint32_t>(row * 16 + key) | static_cast<uint32_t>((row + 1) * 16 + key) << 16;
  }
  ptx::stmatrix_x4_transposed(ptx::shared_address(tile) + (lane % 8 + lane / 16 * 8) * 32 + lane / 8 % 2 * 16, r[0],
                              r[1], r[2], r[3]);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) out[i] = tile[i];
}

TEST_F(Ptx, StmatrixTransposesAccumulatorFragments) {
  test::DeviceVector<uint16_t> out(std::vector<uint16_t>(256, 0xffff));
  store_transposed<<<1, 32>>>(out.data());
  const std::vector<uint16_t> tile = out.to_host();
  for (int i = 0; i < 256; ++i) ASSERT_EQ(tile[i], i);
}

constexpr int kBulkFloats = 256, kBulkBytes = kBulkFloats * 4;

/// A chain of blocks, in the order of their numbers whatever order they run in: the first stores its piece, the others
/// add theirs, each when the one before is done.
__global__ void bulk_chain(const float* pieces, float* sum, uint32_t* done) {
  __shared__ alignas(128) float piece[kBulkFloats];
  __shared__ uint64_t full;
  if (threadIdx.x != 0) return;
  ptx::barrier_init(full, 1);
  ptx::fence_barrier_init();
  ptx::arrive_expect(full, kBulkBytes);
  ptx::bulk_load(piece, pieces + blockIdx.x * kBulkFloats, kBulkBytes, full);
  ptx::wait(full, 0);
  while (ptx::load_acquire(done) != blockIdx.x) {
  }
  ptx::fence_async_proxy_global();
  if (blockIdx.x == 0) {
    ptx::bulk_store(sum, piece, kBulkBytes);
  } else {
    ptx::bulk_add(sum, piece, kBulkBytes);
  }
  ptx::bulk_commit();
  ptx::bulk_wait();
  ptx::fence_async_proxy_global();
  ptx::add_release(done, 1);
}

TEST_F(Ptx, BulkCopiesAddInTheOrderOfASemaphore) {
  constexpr int kBlocks = 64;
  const std::vector<float> pieces = random_values<float>(kBlocks * kBulkFloats, 7);
  test::DeviceVector<float> device_pieces(pieces), sum(std::vector<float>(kBulkFloats, NAN));
  test::DeviceVector<uint32_t> done(std::vector<uint32_t>(1, 0));
  bulk_chain<<<kBlocks, 32>>>(device_pieces.data(), sum.data(), done.data());
  const std::vector<float> sums = sum.to_host();
  for (int i = 0; i < kBulkFloats; ++i) {
    float expected = pieces[i];
    for (int block = 1; block < kBlocks; ++block) expected += pieces[block * kBulkFloats + i];
    ASSERT_EQ(sums[i], expected) << i;
  }
}

/// Named barriers between two halves of a block, and register budgets that move from one to the other.
__global__ void __launch_bounds__(256, 1) hand_over(int* out) {
  __shared__ int value;
  if (threadIdx.x < 128) {
    ptx::decrease_registers<40>();
    if (threadIdx.x == 0) value = 7;
    ptx::named_barrier_arrive(3, 256);
  } else {
    ptx::increase_registers<232>();
    ptx::named_barrier_sync(3, 256);
    ptx::named_barrier_sync(1, 128);
    out[threadIdx.x - 128] = value;
  }
}

TEST_F(Ptx, NamedBarriersAndRegisterBudgets) {
  test::DeviceVector<int> out(std::vector<int>(128, 0));
  hand_over<<<1, 256>>>(out.data());
  for (const int value : out.to_host()) ASSERT_EQ(value, 7);
}

__global__ void arithmetic(const float* x, float* y, uint32_t* bf16, uint32_t* f16, int n) {
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    y[i] = ptx::exp2_approx(x[i]);
    bf16[i] = ptx::pack<__nv_bfloat16>(x[i], -x[i]);
    f16[i] = ptx::pack<__half>(x[i], -x[i]);
  }
}

TEST_F(Ptx, Exp2AndPacking) {
  std::vector<float> x{0.f, 1.f, -1.f, 0.5f, -126.f, -200.f, -INFINITY, 8.f};
  for (int i = 0; i < 1000; ++i) x.push_back(-0.037f * static_cast<float>(i));
  const int n = static_cast<int>(x.size());
  test::DeviceVector<float> in(x), y(std::vector<float>(x.size(), NAN));
  test::DeviceVector<uint32_t> bf16(std::vector<uint32_t>(x.size(), 0)), f16(std::vector<uint32_t>(x.size(), 0));
  arithmetic<<<1, 128>>>(in.data(), y.data(), bf16.data(), f16.data(), n);
  const auto values = y.to_host();
  const auto b = bf16.to_host(), h = f16.to_host();
  for (int i = 0; i < n; ++i) {
    const double exact = std::exp2(double(x[i]));
    EXPECT_NEAR(values[i], exact, 1e-6 * exact + 1e-37) << x[i];
    const auto low = __nv_bfloat16_raw(__nv_bfloat16(x[i])).x, high = __nv_bfloat16_raw(__nv_bfloat16(-x[i])).x;
    EXPECT_EQ(b[i], low | uint32_t{high} << 16) << x[i];
    EXPECT_EQ(h[i], __half_raw(__half(x[i])).x | uint32_t{__half_raw(__half(-x[i])).x} << 16) << x[i];
  }
}

}  // namespace
}  // namespace flashmask
