// SPDX-License-Identifier: Apache-2.0

// The machine itself: what collectives compute, and that it reports what a kernel must not do.

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "backends/cuda/device/shared_memory.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/cp_async.cuh"
#include "backends/cuda/ptx/ldmatrix.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/reduction.cuh"
#include "backends/cuda/ptx/registers.cuh"
#include "backends/cuda/ptx/swizzle.cuh"

namespace flashmask::test {
namespace {

using Word = uint32_t;

/// Runs `kernel` under some seeds.
template <typename Kernel>
void with_seeds(Kernel&& kernel) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    simt::set_seed(seed);
    kernel();
  }
  simt::set_seed(0);
}

/// The machine's complaint about a kernel; "" if none.
template <typename... Parameters, typename... Args>
std::string complaint(void (*kernel)(Parameters...), int threads, int shared_bytes, Args... args) {
  try {
    simt::launch(kernel, 1, threads, shared_bytes, args...);
  } catch (const simt::Error& e) {
    return e.what();
  }
  return "";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

std::vector<Word> random_words(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Word> words(count);
  for (Word& word : words) word = static_cast<Word>(random());
  return words;
}

// --- Collectives -----------------------------------------------------------------------------------

constexpr int kShuffles = 14;

void all_collectives(const Word* in, Word* out) {
  const Word own = in[threadIdx.x];
  Word* to = out + threadIdx.x * kShuffles;
  int alike = 0;
  *to++ = __shfl_sync(0xffffffff, own, 5);
  *to++ = __shfl_sync(0xffffffff, own, 3, 8);
  *to++ = __shfl_xor_sync(0xffffffff, own, 9);
  *to++ = __shfl_up_sync(0xffffffff, own, 3);
  *to++ = __shfl_down_sync(0xffffffff, own, 4);
  *to++ = __ballot_sync(0xffffffff, own % 3 == 0);
  *to++ = static_cast<Word>(__any_sync(0xffffffff, own % 64 == 0));
  *to++ = static_cast<Word>(__all_sync(0xffffffff, own % 64 != 0));
  *to++ = __reduce_add_sync(0xffffffff, own);
  *to++ = __reduce_min_sync(0xffffffff, own);
  *to++ = static_cast<Word>(__reduce_max_sync(0xffffffff, static_cast<int>(own)));
  *to++ = __reduce_or_sync(0xffffffff, own % 16);
  *to++ = __match_all_sync(0xffffffff, own % 2, &alike);
  *to++ = static_cast<Word>(__shfl_xor_sync(0xffffffff, uint64_t{own} << 32, 1) >> 32);
}

TEST(Machine, ComputesCollectives) {
  const std::vector<Word> in = random_words(64, 1);
  std::vector<Word> out(64 * kShuffles);
  with_seeds([&] {
    simt::launch(all_collectives, 1, 64, 0, in.data(), out.data());
    for (Word thread = 0; thread < 64; ++thread) {
      const Word lane = thread % 32;
      const Word* warp = &in[thread - lane];
      Word ballot = 0, sum = 0, least = ~0u, any_of_16 = 0;
      int greatest = INT32_MIN;
      bool any = false;
      for (Word l = 0; l < 32; ++l) {
        ballot |= Word{warp[l] % 3 == 0} << l;
        any |= warp[l] % 64 == 0;
        sum += warp[l];
        least = std::min(least, warp[l]);
        greatest = std::max(greatest, static_cast<int>(warp[l]));
        any_of_16 |= warp[l] % 16;
      }
      const std::array<Word, kShuffles> want{warp[5],
                                             warp[lane / 8 * 8 + 3],
                                             warp[lane ^ 9],
                                             warp[lane < 3 ? lane : lane - 3],
                                             warp[lane + 4 > 31 ? lane : lane + 4],
                                             ballot,
                                             Word{any},
                                             Word{!any},
                                             sum,
                                             least,
                                             static_cast<Word>(greatest),
                                             any_of_16,
                                             0,
                                             warp[lane ^ 1]};
      for (int n = 0; n < kShuffles; ++n) EXPECT_EQ(out[thread * kShuffles + n], want[n]) << thread << ", value " << n;
    }
  });
}

void half_warp_collective(const Word* in, Word* out) {
  const Word lane = threadIdx.x;
  if (lane < 16) {
    out[lane] = __reduce_add_sync(0x0000ffff, in[lane]);
  } else {
    out[lane] = __shfl_sync(0xffff0000, in[lane], 20);
  }
}

TEST(Machine, LetsPartsOfAWarpMeet) {
  const std::vector<Word> in = random_words(32, 2);
  std::vector<Word> out(32);
  with_seeds([&] {
    simt::launch(half_warp_collective, 1, 32, 0, in.data(), out.data());
    Word sum = 0;
    for (int n = 0; n < 16; ++n) sum += in[n];
    for (int n = 0; n < 32; ++n) EXPECT_EQ(out[n], n < 16 ? sum : in[20]);
  });
}

void add_up(float* sum, int* count) {
  atomicAdd(sum, 1.0F);
  atomicAdd(count, static_cast<int>(blockIdx.x));
  const float four[4] = {1, 2, 3, 4};
  ptx::add_four(sum + 4, four);
}

TEST(Machine, RunsEveryThreadOfEveryBlock) {
  alignas(16) float sums[8] = {};
  int count = 0;
  simt::launch(add_up, 10, 96, 0, &sums[0], &count);
  EXPECT_EQ(sums[0], 960);
  EXPECT_EQ(sums[7], 4 * 960);
  EXPECT_EQ(count, 45 * 96);
}

// --- Matrices --------------------------------------------------------------------------------------

/// out = a * b: 16 x 16 by 16 x 8, rows of 16 elements of shared memory, b's by rows of the inner dimension.
template <typename T>
void multiply(const T* a, const T* b, float* out) {
  auto* shared = reinterpret_cast<T*>(cuda::dynamic_shared_memory());
  const uint32_t lane = ptx::lane();
  for (uint32_t n = lane; n < 256; n += 32) {
    shared[n] = a[n];
    shared[256 + n] = n % 16 < 8 ? b[n / 16 * 8 + n % 16] : a[0];
  }
  __syncwarp();
  uint32_t of_a[4], of_b[4];
  // a: matrices of rows 0 and 8, then of columns 8; b: matrices of inner 0 and 8, transposed, twice.
  ptx::ldmatrix_x4(ptx::shared_address(shared + lane % 16 * 16 + lane / 16 * 8), of_a);
  ptx::ldmatrix_x4_transposed(ptx::shared_address(shared + 256 + lane % 16 * 16), of_b);
  float d[4] = {100, 100, 100, 100};
  ptx::mma<T>(d, of_a, of_b[0], of_b[1]);
  const uint32_t g = lane / 4, c = lane % 4;
  for (uint32_t h = 0; h < 2; ++h) {
    for (uint32_t e = 0; e < 2; ++e) out[(g + 8 * h) * 8 + 2 * c + e] = d[2 * h + e];
  }
}

template <typename T>
void test_product() {
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<T> a(256), b(128);
  for (T& x : a) x = static_cast<T>(normal(random));
  for (T& x : b) x = static_cast<T>(normal(random));
  a[17] = static_cast<T>(3e-7f);  // a denormal number of fp16
  std::vector<float> out(128);
  simt::launch(multiply<T>, 1, 32, 1024, a.data(), b.data(), out.data());
  for (std::size_t row = 0; row < 16; ++row) {
    for (std::size_t column = 0; column < 8; ++column) {
      double want = 100;
      for (std::size_t inner = 0; inner < 16; ++inner)
        want += double{static_cast<float>(a[row * 16 + inner])} * double{static_cast<float>(b[inner * 8 + column])};
      EXPECT_NEAR(out[row * 8 + column], want, 1e-4) << row << ", " << column;
    }
  }
}

TEST(Matrices, AreMultipliedInBf16) { test_product<__nv_bfloat16>(); }
TEST(Matrices, AreMultipliedInFp16) { test_product<__half>(); }

template <typename T>
void pack_all(const float* in, Word* out) {
  out[threadIdx.x] = ptx::pack<T>(in[2 * threadIdx.x], in[2 * threadIdx.x + 1]);
}

/// Every 16-bit number, to float and back.
template <typename T>
void test_conversion() {
  for (Word bits = 0; bits < 1 << 16; ++bits) {
    const float x = ptx::simulated::to_float<T>(bits);
    const auto half = static_cast<uint16_t>(bits);
    const float want = static_cast<float>(std::bit_cast<T>(half));
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(x)) << bits;
    } else {
      EXPECT_EQ(std::bit_cast<Word>(x), std::bit_cast<Word>(want)) << bits;
      EXPECT_EQ(ptx::pack<T>(x, 1.0F) & 0xffff, bits);
    }
  }
}

TEST(Matrices, ConvertBf16) { test_conversion<__nv_bfloat16>(); }
TEST(Matrices, ConvertFp16) { test_conversion<__half>(); }

template <uint32_t swizzle>
void load_rows() {
  const uint32_t lane = ptx::lane(), row = lane % 8, chunk = lane / 8;
  const uint32_t base = ptx::shared_address(cuda::dynamic_shared_memory());
  uint32_t r[4];
  ptx::cp_async_16(base + lane * 16, nullptr, false);
  ptx::cp_async_wait<0>();
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncwarp();
  ptx::ldmatrix_x4(base + row * 128 + (swizzle ? ptx::Swizzle128::chunk(row, chunk) : chunk * 16), r);
}

TEST(Matrices, CountConflicts) {
  const simt::Counts plain = simt::launch(load_rows<0>, 1, 32, 1024),
                     swizzled = simt::launch(load_rows<1>, 1, 32, 1024);
  EXPECT_EQ(plain.matrix_loads, 1);
  EXPECT_EQ(plain.matrix_load_conflicts, 4 * 7);
  EXPECT_EQ(swizzled.matrix_load_conflicts, 0);
  EXPECT_EQ(swizzled.copies, 1);
  EXPECT_EQ(swizzled.copy_conflicts, 0);
}

// --- Copies and barriers --------------------------------------------------------------------------

/// Each thread copies 16 bytes and reads those of another warp's thread.
template <bool waits, bool meets>
void copy_over(const Word* in, Word* out) {
  auto* shared = reinterpret_cast<Word*>(cuda::dynamic_shared_memory());
  const Word thread = threadIdx.x, other = thread ^ 32;
  ptx::cp_async_16(ptx::shared_address(shared + 4 * thread), in + 4 * thread, thread % 3 != 0);
  ptx::cp_async_commit();
  if constexpr (waits) ptx::cp_async_wait<0>();
  if constexpr (meets) __syncthreads();
  for (Word n = 0; n < 4; ++n) out[4 * thread + n] = shared[4 * other + n];
  if constexpr (!waits) ptx::cp_async_wait<0>();
}

bool copied_right(void (*kernel)(const Word*, Word*)) {
  const std::vector<Word> in = random_words(256, 4);
  std::vector<Word> out(256);
  simt::launch(kernel, 1, 64, 1024, in.data(), out.data());
  bool right = true;
  for (Word n = 0; n < 256; ++n) {
    const Word from = n ^ 128;
    right &= out[n] == (from / 4 % 3 != 0 ? in[from] : 0);
  }
  return right;
}

TEST(Copies, ArriveAfterAWaitAndABarrier) {
  int without_wait = 0, without_barrier = 0;
  with_seeds([&] {
    EXPECT_TRUE(copied_right(copy_over<true, true>));
    without_wait += copied_right(copy_over<false, true>);
    without_barrier += copied_right(copy_over<true, false>);
  });
  EXPECT_EQ(without_wait, 0);
  EXPECT_EQ(without_barrier, 0);
}

void copy_in_groups(const Word* in, Word* out) {
  auto* shared = reinterpret_cast<Word*>(cuda::dynamic_shared_memory());
  const uint32_t to = ptx::shared_address(shared);
  if (threadIdx.x == 0) {
    for (uint32_t group = 0; group < 3; ++group) {
      ptx::cp_async_16(to + 16 * group, in + 4 * group, true);
      ptx::cp_async_commit();
    }
    ptx::cp_async_wait<1>();
    for (uint32_t n = 0; n < 12; ++n) out[n] = shared[n];
    ptx::cp_async_wait<0>();
    for (uint32_t n = 0; n < 12; ++n) out[12 + n] = shared[n];
  }
}

TEST(Copies, OfTheNewestGroupsAreLate) {
  const std::vector<Word> in = random_words(12, 5);
  std::vector<Word> out(24);
  simt::launch(copy_in_groups, 1, 32, 48, in.data(), out.data());
  for (Word n = 0; n < 12; ++n) {
    EXPECT_EQ(out[n], n < 8 ? in[n] : ~0u);
    EXPECT_EQ(out[12 + n], in[n]);
  }
}

void leave_a_copy(const Word* in) {
  ptx::cp_async_16(ptx::shared_address(cuda::dynamic_shared_memory()), in, true);
  ptx::cp_async_commit();
}
void copy_beyond(const Word* in) {
  ptx::cp_async_16(ptx::shared_address(cuda::dynamic_shared_memory()) + 16 * threadIdx.x, in, true);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
}
void load_beyond() {
  uint32_t r[4];
  ptx::ldmatrix_x4(ptx::shared_address(cuda::dynamic_shared_memory()) + 16 * threadIdx.x, r);
}
void load_askew() {
  uint32_t r[4];
  ptx::ldmatrix_x4(ptx::shared_address(cuda::dynamic_shared_memory()) + 8 * threadIdx.x, r);
}

TEST(Complaints, OfCopiesAndLoads) {
  alignas(16) const Word in[4] = {};
  EXPECT_SAYS(complaint(leave_a_copy, 32, 16, &in[0]), "of its copies are under way");
  EXPECT_EQ(complaint(copy_beyond, 32, 512, &in[0]), "");
  EXPECT_SAYS(complaint(copy_beyond, 32, 496, &in[0]), "(cp.async): byte 496 of dynamic shared memory, which has 496");
  EXPECT_SAYS(complaint(copy_beyond, 32, 512, reinterpret_cast<const Word*>(&in[1])), "not aligned to 16 bytes");
  EXPECT_EQ(complaint(load_beyond, 32, 512), "");
  EXPECT_SAYS(complaint(load_beyond, 32, 496), "(ldmatrix): byte 496 of dynamic shared memory, which has 496");
  EXPECT_SAYS(complaint(load_askew, 32, 512), "(ldmatrix): address");
}

/// Warp 0 copies, warp 1 loads; or each loads what it copied.
template <bool meets, bool meets_again, bool own>
void copy_and_load(const Word* in) {
  const uint32_t base = ptx::shared_address(cuda::dynamic_shared_memory()), lane = ptx::lane(), warp = threadIdx.x / 32;
  for (int n = 0; n < 2; ++n) {
    if (own || warp == 0) {
      ptx::cp_async_16(base + 512 * warp + 16 * lane, in, true);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
    }
    if constexpr (meets && own) __syncwarp();
    if constexpr (meets && !own) __syncthreads();
    uint32_t r[4];
    if (own || warp == 1) ptx::ldmatrix_x4(base + 512 * (own ? warp : 0) + 16 * (31 - lane), r);
    if constexpr (meets_again && own) __syncwarp();
    if constexpr (meets_again && !own) __syncthreads();
  }
}

TEST(Complaints, OfMissingBarriersUnderAnySeed) {
  alignas(16) const Word in[4] = {};
  with_seeds([&] {
    EXPECT_EQ(complaint(copy_and_load<true, true, false>, 64, 1024, &in[0]), "");
    EXPECT_SAYS(complaint(copy_and_load<false, true, false>, 64, 1024, &in[0]), "no barrier is between");
    EXPECT_SAYS(complaint(copy_and_load<true, false, false>, 64, 1024, &in[0]), "no barrier is between");
    EXPECT_EQ(complaint(copy_and_load<true, true, true>, 64, 1024, &in[0]), "");
    EXPECT_NE(complaint(copy_and_load<false, true, true>, 64, 1024, &in[0]), "");
  });
}

void diverge() {
  if (threadIdx.x == 7) {
    __syncwarp();
  } else {
    __shfl_sync(0xffffffff, 1, 0);
  }
}
void diverge_from_mma() {
  float d[4] = {};
  const uint32_t a[4] = {};
  if (threadIdx.x < 16) {
    ptx::mma<__half>(d, a, 0, 0);
  } else {
    ptx::mma<__half>(d, a, 0, 0);
  }
}
void end_early() {
  if (threadIdx.x != 3) __syncwarp();
}
void wait_for_others() {
  if (threadIdx.x < 64) {
    __syncthreads();
  } else {
    ptx::named_barrier_sync(3, 64);
  }
}
void spin(const uint32_t* flag) {
  while (ptx::load_acquire(flag) == 0) {
  }
}

TEST(Complaints, OfThreadsThatDoNotMeet) {
  with_seeds([&] {
    const std::string diverged = complaint(diverge, 32, 0);
    EXPECT_SAYS(diverged, "(__syncwarp)");
    EXPECT_SAYS(diverged, "(__shfl_sync)");
    EXPECT_SAYS(diverged, "machine_test.cpp:");
    EXPECT_SAYS(diverged, "thread 7 of block 0");
    EXPECT_SAYS(complaint(diverge_from_mma, 32, 0), "(mma)");
    EXPECT_SAYS(complaint(end_early, 32, 0), "waits for thread 3 of block 0, which has ended");
    const std::string deadlock = complaint(wait_for_others, 96, 0);
    EXPECT_SAYS(deadlock, "deadlock in block 0: threads 0 to 63 at machine_test.cpp:");
    EXPECT_SAYS(deadlock, "(__syncthreads, barrier 0); threads 64 to 95 at machine_test.cpp:");
    EXPECT_SAYS(deadlock, "(bar.sync, barrier 3)");
  });
  const uint32_t flag = 0;
  EXPECT_SAYS(complaint(spin, 32, 0, &flag), "threads wait for memory that nobody writes in block 0: threads 0 to 31");
}

/// Warp 0 gives numbers to warp 1 through one word, in turns at two named barriers.
void hand_over(Word* out) {
  auto* word = reinterpret_cast<Word*>(cuda::dynamic_shared_memory());
  for (Word n = 0; n < 10; ++n) {
    if (threadIdx.x < 32) {
      if (n > 0) ptx::named_barrier_sync(2, 64);
      if (threadIdx.x == 0) *word = n;
      __syncwarp();
      ptx::named_barrier_arrive(1, 64);
    } else {
      ptx::named_barrier_sync(1, 64);
      if (threadIdx.x == 32) out[n] = *word;
      if (n < 9) ptx::named_barrier_arrive(2, 64);
    }
  }
}

TEST(Machine, HasNamedBarriers) {
  with_seeds([&] {
    std::vector<Word> out(10);
    simt::launch(hand_over, 1, 64, 4, out.data());
    for (Word n = 0; n < 10; ++n) EXPECT_EQ(out[n], n);
  });
}

void set_flag(uint32_t* flag, Word* out) {
  if (threadIdx.x < 32) {
    while (ptx::load_acquire(flag) == 0) {
    }
    out[threadIdx.x] = *flag;
  } else {
    __syncwarp();
    if (threadIdx.x == 32) ptx::add_release(flag, 5);
  }
}

TEST(Machine, LetsThreadsWaitForMemory) {
  with_seeds([&] {
    uint32_t flag = 0;
    std::vector<Word> out(32);
    simt::launch(set_flag, 1, 64, 0, &flag, out.data());
    EXPECT_EQ(out, std::vector<Word>(32, 5));
  });
}

/// Threads own something when another one fails.
void own_something(std::vector<int>* alive) {
  struct Owner {
    explicit Owner(std::vector<int>* all) : alive(all) { ++(*alive)[0]; }
    ~Owner() { --(*alive)[0]; }
    std::vector<int>* alive;
  } owner(alive);
  if (threadIdx.x == 40) simt::shared_row("test", 3, simt::Place::current());
  __syncthreads();
}

TEST(Machine, FreesWhatThreadsOwnWhenOneFails) {
  std::vector<int> alive(1);
  with_seeds([&] {
    EXPECT_SAYS(complaint(own_something, 64, 0, &alive), "thread 40 of block 0");
    EXPECT_EQ(alive[0], 0);
  });
}

void approximate(float* out) {
  out[0] = ptx::exp2_approx(-INFINITY);
  out[1] = ptx::exp2_approx(-140);
  out[2] = ptx::exp2_approx(3);
  out[3] = ptx::inverse_approx(INFINITY);
  out[4] = ptx::inverse_approx(0);
  out[5] = ptx::min_or_nan(NAN, 1);
  out[6] = ptx::tanh_approx(0.5F);
  out[7] = ptx::tanh_approx(-INFINITY);
}

TEST(Machine, ApproximatesAsTheInstructionsDo) {
  std::vector<float> out(8);
  simt::launch(approximate, 1, 32, 0, out.data());
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(out[1], 0);
  EXPECT_EQ(out[2], 8);
  EXPECT_EQ(out[3], 0);
  EXPECT_EQ(out[4], INFINITY);
  EXPECT_TRUE(std::isnan(out[5]));
  EXPECT_NEAR(out[6], std::tanh(0.5), std::tanh(0.5) / 2048);
  EXPECT_EQ(out[7], -1);
  EXPECT_EQ(ptx::double_plus_carry(5, 0xffffffff, 1), 11u);
  EXPECT_EQ(ptx::double_plus_carry(5, 0xfffffffe, 1), 10u);
}

}  // namespace
}  // namespace flashmask::test
