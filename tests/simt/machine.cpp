// SPDX-License-Identifier: Apache-2.0
#include "simt/machine.h"

#include <vector_types.h>

#include <algorithm>
#include <array>
#include <boost/context/fiber.hpp>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "simt/fiber_stacks.h"
#include "simt/shared_accesses.h"

// As CUDA C++ names them; set whenever a thread goes on.
constinit thread_local uint3 threadIdx{}, blockIdx{};
constinit thread_local dim3 blockDim{}, gridDim{};

namespace simt {
namespace {

constexpr int kLanes = 32;
constexpr int kPoison = 0xff;  // NaN in every floating type
/// Offset of dynamic shared memory in the shared window, and its alignment.
constexpr std::size_t kWindow = 1024;
constexpr std::size_t kCopyBytes = 16;
constexpr int kBarriers = 16;
/// Turns in which nothing but paused threads ran, until they are taken to wait forever.
constexpr int64_t kPatience = 100'000;

/// Xorshift, seeded through splitmix.
class Random {
 public:
  explicit Random(uint64_t seed) {
    uint64_t z = seed + 0x9E3779B97F4A7C15;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
    z = (z ^ z >> 27) * 0x94D049BB133111EB;
    state_ = (z ^ z >> 31) | 1;
  }
  uint32_t below(uint32_t n) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>((state_ >> 32) * n >> 32);
  }

 private:
  uint64_t state_;
};

/// Thrown into a thread that is not to go on, so that what it owns is freed.
struct Abandoned {};

enum class State { kReady, kMeeting, kBarrier, kPaused, kDone };

struct Copy {
  unsigned char* to;
  const void* from;  ///< null: zeros
};

struct Thread {
  context::fiber fiber, scheduler;
  context::stack_context stack;
  Switch on_fiber;
  uint3 index{};
  State state = State::kReady;
  // The place and the reason of its wait:
  const char* what = "";
  Place place{};
  uint32_t lanes = 0;
  void* operand = nullptr;
  void (*complete)(Operands) = nullptr;
  int barrier = 0;
  // Copies that are under way, oldest first, of which `committed` are in groups:
  std::vector<Copy> copies;
  std::vector<std::size_t> groups;  ///< their sizes, oldest first
  std::size_t committed = 0;
  /// The shared addresses that it has copied to since its warp last met.
  std::vector<uint32_t> copied_to;
};

struct Barrier {
  int arrived = 0;
  int expected = 0;  ///< 0: all that have not ended
};

std::string describe(Place place) {
  std::string_view file = place.file_name();
  if (const std::size_t slash = file.rfind('/'); slash != std::string_view::npos) file.remove_prefix(slash + 1);
  return std::string(file) + ":" + std::to_string(place.line());
}

/// Passes over the 32 banks beyond one, of up to eight accesses of 16 bytes in a phase; equal addresses are one access.
int64_t phase_conflicts(const uint32_t* addresses) {
  std::array<int, 8> rows{};
  for (int n = 0; n < 8; ++n) {
    if (std::find(addresses, addresses + n, addresses[n]) == addresses + n) ++rows[addresses[n] / kCopyBytes % 8];
  }
  return std::max(*std::max_element(rows.begin(), rows.end()) - 1, 0);
}

int64_t warp_conflicts(const uint32_t* addresses) {
  int64_t conflicts = 0;
  for (int phase = 0; phase < kLanes / 8; ++phase) conflicts += phase_conflicts(addresses + 8 * phase);
  return conflicts;
}

class Block;
constinit thread_local Block* current_block = nullptr;
constinit thread_local Thread* current_thread = nullptr;

/// Memory of exactly so many bytes, so that the address sanitizer sees what lies beyond them.
struct AlignedDelete {
  void operator()(unsigned char* p) const { ::operator delete(p, std::align_val_t{kWindow}); }
};
using SharedMemory = std::unique_ptr<unsigned char, AlignedDelete>;

class Block {
 public:
  Block(const Grid& grid, unsigned char* shared, Random& random, Counts& counts, void (*thread)(const void*),
        const void* of_kernel)
      : shared_(shared),
        shared_bytes_(static_cast<std::size_t>(grid.shared_bytes)),
        random_(random),
        counts_(counts),
        thread_(thread),
        of_kernel_(of_kernel),
        threads_(static_cast<std::size_t>(grid.threads)),
        accesses_(shared_bytes_, grid.threads / kLanes),
        live_(grid.threads) {
    if (shared_bytes_ > 0) std::memset(shared_, kPoison, shared_bytes_);
    for (std::size_t n = 0; n < threads_.size(); ++n) {
      Thread& t = threads_[n];
      t.index = {static_cast<unsigned>(n), 0, 0};
      t.fiber = context::fiber(std::allocator_arg, StackAllocator{&t.stack}, [this, &t](context::fiber&& from) {
        t.on_fiber.arrive(&scheduler_bottom_, &scheduler_size_);
        t.scheduler = std::move(from);
        body(t);
        t.on_fiber.leave(scheduler_bottom_, scheduler_size_, /*ends=*/true);
        return std::move(t.scheduler);
      });
    }
  }

  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  ~Block() {
    abandoned_ = true;
    for (Thread& t : threads_) {
      if (t.fiber) resume(t);
    }
    current_block = nullptr;
    current_thread = nullptr;
  }

  void run() {
    current_block = this;
    int64_t idle_turns = 0;
    while (live_ > 0) {
      const std::optional<std::size_t> warp = choose();
      if (!warp) throw Error("deadlock in " + name() + ": " + waiting());
      constexpr std::array<int, 6> kTurns{1, 1, 4, 16, 64, 1 << 30};
      const int turns = kTurns[random_.below(kTurns.size())];
      bool progress = step(*warp);
      for (int turn = 1; turn < turns && progress && is_ready(*warp); ++turn) progress = step(*warp);
      idle_turns = progress ? 0 : idle_turns + 1;
      if (idle_turns > kPatience)
        throw Error("threads wait for memory that nobody writes in " + name() + ": " + waiting());
    }
  }

  // --- For the running thread ---

  void meet(const char* what, uint32_t lanes, Place place, void* operand, void (*when_all_are_there)(Operands)) {
    Thread& t = *current_thread;
    t.lanes = lanes;
    t.operand = operand;
    t.complete = when_all_are_there;
    yield(t, State::kMeeting, what, place);
  }

  void barrier(const char* what, int id, int threads, bool waits, Place place) {
    if (id < 0 || id >= kBarriers) fail(what, place, "barrier " + std::to_string(id) + " of 16");
    if (threads % kLanes != 0) fail(what, place, std::to_string(threads) + " threads are not whole warps");
    Barrier& b = barriers_[static_cast<std::size_t>(id)];
    if (b.arrived > 0 && b.expected != threads)
      fail(what, place,
           "barrier " + std::to_string(id) + " for " + std::to_string(threads) + " threads, at which others wait for " +
               std::to_string(b.expected));
    b.expected = threads;
    ++b.arrived;
    if (threads > 0 && b.arrived > threads)
      fail(what, place, "more than " + std::to_string(threads) + " threads at barrier " + std::to_string(id));
    Thread& t = *current_thread;
    t.barrier = id;
    accesses_.arrive(id, warp_of(t));
    // The last to come lets all go on.
    if (waits) t.state = State::kBarrier;
    t.what = what;
    t.place = place;
    if (release_if_complete(id) || !waits) return;
    yield(t, State::kBarrier, what, place);
  }

  void pause(const char* what, Place place) { yield(*current_thread, State::kPaused, what, place); }

  unsigned char* shared() const { return shared_; }
  std::size_t shared_bytes() const { return shared_bytes_; }
  Counts& counts() { return counts_; }

  void begin_copy(unsigned char* to, Place place) {
    const std::string wrong = accesses_.begin_write(offset(to), static_cast<int>(current_thread->index.x));
    if (!wrong.empty()) fail("cp.async", place, wrong);
  }
  void end_copy(unsigned char* to) { accesses_.end_write(offset(to), static_cast<int>(current_thread->index.x)); }
  void read(const char* what, const unsigned char* from, Place place) {
    const std::string wrong = accesses_.read(offset(from), static_cast<int>(current_thread->index.x));
    if (!wrong.empty()) fail(what, place, wrong);
  }

  /// Name of a thread, for messages.
  std::string name_of(const Thread& t) const { return "thread " + std::to_string(t.index.x) + " of " + name(); }

 private:
  std::size_t offset(const unsigned char* p) const { return static_cast<std::size_t>(p - shared_); }
  static int warp_of(const Thread& t) { return static_cast<int>(t.index.x) / kLanes; }
  std::string name() const { return "block " + std::to_string(blockIdx.x); }

  void body(Thread& t) {
    try {
      if (!abandoned_) thread_(of_kernel_);
      if (!abandoned_ && !t.copies.empty())
        throw Error(name_of(t) + " ends while " + std::to_string(t.copies.size()) + " of its copies are under way");
    } catch (const Abandoned&) {
    } catch (...) {
      if (!failure_) failure_ = std::current_exception();
    }
    t.state = State::kDone;
    --live_;
    for (int id = 0; id < kBarriers && !abandoned_; ++id) release_if_complete(id);
  }

  void resume(Thread& t) {
    current_thread = &t;
    threadIdx = t.index;
    on_scheduler_.leave(static_cast<const char*>(t.stack.sp) - t.stack.size, t.stack.size);
    t.fiber = std::move(t.fiber).resume();
    on_scheduler_.arrive();
  }

  void yield(Thread& t, State state, const char* what, Place place) {
    t.state = state;
    t.what = what;
    t.place = place;
    t.on_fiber.leave(scheduler_bottom_, scheduler_size_);
    t.scheduler = std::move(t.scheduler).resume();
    t.on_fiber.arrive(&scheduler_bottom_, &scheduler_size_);
    if (abandoned_) throw Abandoned{};
  }

  Thread& lane_of(std::size_t warp, std::size_t lane) { return threads_[warp * kLanes + lane]; }

  bool is_ready(std::size_t warp) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if (const State s = lane_of(warp, lane).state; s == State::kReady || s == State::kPaused) return true;
    }
    return false;
  }

  /// One of the warps that can go on.
  std::optional<std::size_t> choose() {
    const auto warps = static_cast<uint32_t>(threads_.size() / kLanes);
    const uint32_t first = random_.below(warps);
    for (uint32_t n = 0; n < warps; ++n) {
      if (is_ready((first + n) % warps)) return (first + n) % warps;
    }
    return std::nullopt;
  }

  /// Each lane of a warp that can go on does until it waits, in some order; then those that met go on. Returns whether
  /// there was anything but looking at memory once more.
  bool step(std::size_t warp) {
    const uint32_t first = random_.below(kLanes), direction = random_.below(2) ? 1 : kLanes - 1;
    bool progress = false;
    for (uint32_t n = 0; n < kLanes; ++n) {
      Thread& t = lane_of(warp, (first + n * direction) % kLanes);
      if (t.state != State::kReady && t.state != State::kPaused) continue;
      const bool was_ready = t.state == State::kReady;
      t.state = State::kReady;
      resume(t);
      if (failure_) std::rethrow_exception(failure_);
      progress |= was_ready || t.state != State::kPaused;
    }
    count_copies(warp);
    complete_meetings(warp);
    return progress;
  }

  /// Completes the collectives that all of their lanes have come to.
  void complete_meetings(std::size_t warp) {
    uint32_t meeting = 0;
    for (std::size_t lane = 0; lane < kLanes; ++lane)
      meeting |= static_cast<uint32_t>(lane_of(warp, lane).state == State::kMeeting) << lane;
    for (uint32_t rest = meeting; rest != 0;) {
      const auto lane = static_cast<std::size_t>(__builtin_ctz(rest));
      Thread& first = lane_of(warp, lane);
      if (!(first.lanes >> lane & 1)) fail_at(first, "its mask has not the calling lane");
      rest &= ~first.lanes;
      if (all_have_come(warp, first, meeting)) complete(warp, first);
    }
  }

  bool all_have_come(std::size_t warp, const Thread& first, uint32_t meeting) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if (!(first.lanes >> lane & 1)) continue;
      const Thread& t = lane_of(warp, lane);
      if (t.state == State::kDone) fail_at(first, "it waits for " + name_of(t) + ", which has ended");
      if (!(meeting >> lane & 1)) return false;
      const bool same = t.complete == first.complete && t.lanes == first.lanes &&
                        t.place.line() == first.place.line() && t.place.file_name() == first.place.file_name() &&
                        t.place.column() == first.place.column();
      if (!same) fail_at(first, "but " + name_of(t) + " at " + describe(t.place) + " (" + t.what + ")");
    }
    return true;
  }

  void complete(std::size_t warp, Thread& first) {
    void* operands[kLanes] = {};
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      if (!(first.lanes >> lane & 1)) continue;
      Thread& t = lane_of(warp, lane);
      operands[lane] = t.operand;
      t.state = State::kReady;
    }
    ++counts_.collectives;
    if (!first.complete) {
      if (first.lanes == kWholeWarp) accesses_.sync_lanes(static_cast<int>(warp));
      return;
    }
    current_thread = &first;
    first.complete(operands);
  }

  bool release_if_complete(int id) {
    Barrier& b = barriers_[static_cast<std::size_t>(id)];
    if (b.arrived == 0 || b.arrived < (b.expected == 0 ? live_ : b.expected)) return false;
    b = {};
    ++counts_.barriers;
    release_threads(id);
    return true;
  }

  void release_threads(int id) {
    const Thread* first_of_warp = nullptr;
    for (Thread& t : threads_) {
      if (t.index.x % kLanes == 0) first_of_warp = nullptr;
      if (t.state != State::kBarrier || t.barrier != id) continue;
      if (!first_of_warp) first_of_warp = &t;
      if (t.place.line() != first_of_warp->place.line() || t.place.file_name() != first_of_warp->place.file_name())
        fail_at(t, "but " + name_of(*first_of_warp) + " at " + describe(first_of_warp->place));
      t.state = State::kReady;
      accesses_.leave(id, warp_of(t));
    }
    accesses_.clear(id);
  }

  /// The n-th copies of a warp's lanes between two of its collectives are one instruction.
  void count_copies(std::size_t warp) {
    const std::size_t each = lane_of(warp, 0).copied_to.size();
    bool equal = true;
    std::size_t most = 0;
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      equal &= lane_of(warp, lane).copied_to.size() == each;
      most = std::max(most, lane_of(warp, lane).copied_to.size());
    }
    if (most == 0) return;
    counts_.copies += static_cast<int64_t>(most);
    for (std::size_t n = 0; equal && n < each; ++n) {
      uint32_t addresses[kLanes];
      for (std::size_t lane = 0; lane < kLanes; ++lane) addresses[lane] = lane_of(warp, lane).copied_to[n];
      counts_.copy_conflicts += warp_conflicts(addresses);
    }
    for (std::size_t lane = 0; lane < kLanes; ++lane) lane_of(warp, lane).copied_to.clear();
  }

  [[noreturn]] void fail_at(const Thread& t, const std::string& why) const {
    throw Error(name_of(t) + " at " + describe(t.place) + " (" + t.what + "): " + why);
  }

  /// Who waits for what, neighbours that wait at the same place together.
  std::string waiting() const {
    std::string text;
    for (std::size_t n = 0; n < threads_.size();) {
      const Thread& t = threads_[n];
      std::size_t end = n + 1;
      while (end < threads_.size() && threads_[end].state == t.state && threads_[end].what == t.what &&
             threads_[end].place.line() == t.place.line())
        ++end;
      if (t.state != State::kDone) {
        text += text.empty() ? "" : "; ";
        text += end == n + 1 ? "thread " + std::to_string(n)
                             : "threads " + std::to_string(n) + " to " + std::to_string(end - 1);
        text += " at " + describe(t.place) + " (" + t.what;
        if (t.state == State::kBarrier) text += ", barrier " + std::to_string(t.barrier);
        text += ")";
      }
      n = end;
    }
    return text;
  }

  unsigned char* const shared_;
  const std::size_t shared_bytes_;
  Random& random_;
  Counts& counts_;
  void (*const thread_)(const void*);
  const void* const of_kernel_;
  std::vector<Thread> threads_;
  SharedAccesses accesses_;
  int live_;
  std::array<Barrier, kBarriers> barriers_{};
  std::exception_ptr failure_;
  bool abandoned_ = false;
  Switch on_scheduler_;
  const void* scheduler_bottom_ = nullptr;
  std::size_t scheduler_size_ = 0;
};

uint64_t environment_seed() {
  const char* text = std::getenv("FLASHMASK_SIMT_SEED");
  return text ? std::strtoull(text, nullptr, 10) : 0;
}

uint64_t& stored_seed() {
  static thread_local uint64_t value = environment_seed();
  return value;
}

void land(const Copy& copy) {
  if (copy.from) {
    std::memcpy(copy.to, copy.from, kCopyBytes);
  } else {
    std::memset(copy.to, 0, kCopyBytes);
  }
}

}  // namespace

Counts& Counts::operator+=(const Counts& other) {
  collectives += other.collectives;
  barriers += other.barriers;
  matrix_loads += other.matrix_loads;
  matrix_load_conflicts += other.matrix_load_conflicts;
  copies += other.copies;
  copy_conflicts += other.copy_conflicts;
  return *this;
}

void set_seed(uint64_t seed) { stored_seed() = seed; }
uint64_t seed() { return stored_seed(); }

Counts detail::run(const Grid& grid, void (*thread)(const void*), const void* of_kernel) {
  if (current_block) throw Error("a kernel launches a kernel");
  if (grid.blocks <= 0 || grid.blocks > INT32_MAX)
    throw Error("a launch of " + std::to_string(grid.blocks) + " blocks; there may be 1 to 2^31 - 1");
  if (grid.threads <= 0 || grid.threads > 1024 || grid.threads % kLanes != 0)
    throw Error("a launch of " + std::to_string(grid.threads) + " threads a block; it takes whole warps, up to 1024");
  Counts counts;
  Random random(seed());
  const SharedMemory shared(static_cast<unsigned char*>(
      ::operator new(static_cast<std::size_t>(grid.shared_bytes), std::align_val_t{kWindow})));
  blockDim = {static_cast<unsigned>(grid.threads), 1, 1};
  gridDim = {static_cast<unsigned>(grid.blocks), 1, 1};
  for (int64_t n = 0; n < grid.blocks; ++n) {
    blockIdx = {static_cast<unsigned>(n), 0, 0};
    Block(grid, shared.get(), random, counts, thread, of_kernel).run();
  }
  return counts;
}

void meet(const char* what, uint32_t lanes, Place place, void* operand, void (*complete)(Operands)) {
  current_block->meet(what, lanes, place, operand, complete);
}

void barrier(const char* what, int id, int threads, bool waits, Place place) {
  current_block->barrier(what, id, threads, waits, place);
}

void pause(const char* what, Place place) { current_block->pause(what, place); }

unsigned char* shared_memory() { return current_block->shared(); }

uint32_t shared_address(const void* p, Place place) {
  const auto* byte = static_cast<const unsigned char*>(p);
  const unsigned char* begin = current_block->shared();
  if (byte < begin || byte > begin + current_block->shared_bytes())
    fail("shared_address", place, "the address is not in dynamic shared memory");
  return static_cast<uint32_t>(kWindow + static_cast<std::size_t>(byte - begin));
}

unsigned char* shared_row(const char* what, uint32_t address, Place place) {
  if (address % kCopyBytes != 0)
    fail(what, place, "address " + std::to_string(address) + " is not aligned to 16 bytes");
  if (address < kWindow || address + kCopyBytes > kWindow + current_block->shared_bytes())
    fail(what, place,
         "byte " + std::to_string(static_cast<int64_t>(address) - static_cast<int64_t>(kWindow)) +
             " of dynamic shared memory, which has " + std::to_string(current_block->shared_bytes()));
  return current_block->shared() + (address - kWindow);
}

unsigned char* matrix_row(const char* what, uint32_t address, Place place) {
  unsigned char* const row = shared_row(what, address, place);
  current_block->read(what, row, place);
  return row;
}

void copy_async(uint32_t shared, const void* global, bool inside, Place place) {
  unsigned char* const to = shared_row("cp.async", shared, place);
  if (inside && reinterpret_cast<std::uintptr_t>(global) % kCopyBytes != 0)
    fail("cp.async", place, "the global address is not aligned to 16 bytes");
  current_block->begin_copy(to, place);
  std::memset(to, kPoison, kCopyBytes);
  current_thread->copies.push_back({to, inside ? global : nullptr});
  current_thread->copied_to.push_back(shared);
}

void commit_copies() {
  Thread& t = *current_thread;
  t.groups.push_back(t.copies.size() - t.committed);
  t.committed = t.copies.size();
}

void wait_for_copies(std::size_t pending) {
  Thread& t = *current_thread;
  if (t.groups.size() <= pending) return;
  const auto landed_groups = static_cast<std::ptrdiff_t>(t.groups.size() - pending);
  std::size_t landed = 0;
  for (auto group = t.groups.begin(); group != t.groups.begin() + landed_groups; ++group) landed += *group;
  for (std::size_t n = 0; n < landed; ++n) {
    land(t.copies[n]);
    current_block->end_copy(t.copies[n].to);
  }
  t.copies.erase(t.copies.begin(), t.copies.begin() + static_cast<std::ptrdiff_t>(landed));
  t.groups.erase(t.groups.begin(), t.groups.begin() + landed_groups);
  t.committed -= landed;
}

void count_matrix_load(const uint32_t (&addresses)[32]) {
  ++current_block->counts().matrix_loads;
  current_block->counts().matrix_load_conflicts += warp_conflicts(addresses);
}

void fail(const char* what, Place place, const std::string& why) {
  throw Error(current_block->name_of(*current_thread) + " at " + describe(place) + " (" + what + "): " + why);
}

}  // namespace simt
