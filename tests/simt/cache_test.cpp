// SPDX-License-Identifier: Apache-2.0

// Tests of what devices do for calls over KV caches beside attention. The plan of a call is walked as the attention
// kernels walk it and compared with every pair of row and key, by Sequence::sees; appended rows are compared with the
// host's, byte for byte.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "backends/cuda/cache/work_plan.h"
#include "cache/cached_case.h"
#include "cache/check_cache.h"
#include "cache/sequence.h"
#include "call/workspace.h"
#include "common/arithmetic.h"
#include "common/random.h"
#include "simt/machine.h"

namespace flashmask::test {
namespace {

using cuda::kBlockKeys, cuda::kBlocksOfWord, cuda::kPackedRows, cuda::RowTile, cuda::Share, cuda::WorkPlan;

constexpr Device kDevice{Device::Kind::kCuda, 0};

template <typename T, std::size_t kCount>
T one_of(Random& random, const T (&values)[kCount]) {
  return values[static_cast<std::size_t>(random.integer(0, kCount - 1))];
}
bool one_in(Random& random, int64_t n) { return random.integer(1, n) == 1; }

template <typename F>
Storage int32s(std::initializer_list<int64_t> shape, const F& value, Device device = kDevice) {
  Storage s(DataType::kInt32, shape);
  s.view.device = device;
  auto* const data = reinterpret_cast<int32_t*>(s.bytes.data());
  for (int64_t n = 0; n < s.view.num_elements(); ++n) data[n] = static_cast<int32_t>(value(n));
  return s;
}

// --- Plans ----------------------------------------------------------------------------------------

/// Limits of what is drawn.
struct Limits {
  int64_t least_batch = 1, most_batch = 5, least_rows = 0, most_rows = 30, most_keys = 700;
  int64_t group = 0;  ///< 0: drawn
  bool may_have_classes = true;
  bool batch_invariant = false;
};

/// A random call. Keys and rows have no memory, as no plan reads them.
class DrawnCall {
 public:
  DrawnCall(Random& random, const Limits& limits) : random_(random), limits_(limits) {
    batch_ = random.integer(limits.least_batch, limits.most_batch);
    group_ = limits.group > 0 ? limits.group : one_of(random, {1, 3, 4, 8, 65, 100});
    heads_kv_ = random.integer(1, group_ > kPackedRows ? 2 : 3);
    draw_keys();
    draw_rows();
    draw_cache();
    draw_band();
    if (limits.may_have_classes && random.flip()) draw_bounds();
    if (one_in(random, 3)) draw_tail();
    if (limits.may_have_classes && one_in(random, 4)) draw_positions();
    if (limits.may_have_classes && one_in(random, 4)) draw_blocks();
    args.batch_invariant = limits.batch_invariant;
    if (limits.batch_invariant) args.split_size = one_of(random, {128, 256, 384, 1024, 5120});
  }

  CachedForwardArgs args;

  /// Gives lengths, tables and masks any values.
  void scramble() {
    for (Storage* s :
         {&cu_seqlens_, &table_, &indptr_, &seqlens_, &bounds_, &tail_, &tail_lens_, &depth_, &q_pos_, &k_pos_}) {
      auto* const data = reinterpret_cast<int32_t*>(s->bytes.data());
      for (std::size_t n = 0; n < s->bytes.size() / sizeof(int32_t); ++n) {
        const int64_t any = random_.integer(INT32_MIN, INT32_MAX), small = random_.integer(-2, 2 * limits_.most_keys);
        data[n] = static_cast<int32_t>(one_in(random_, 3) ? any : small);
      }
    }
  }

 private:
  void draw_keys() {
    for (int64_t b = 0; b < batch_; ++b) {
      const int64_t keys = one_in(random_, 8) ? 0 : random_.integer(1, one_in(random_, 4) ? 20 : limits_.most_keys);
      keys_.push_back(one_in(random_, 4) ? round_up(keys, kBlockKeys) + random_.integer(0, 3) : keys);
    }
    longest_ = std::max<int64_t>(std::ranges::max(keys_), 1);
  }
  void draw_rows() {
    const int64_t heads_q = group_ * heads_kv_;
    const int64_t most = limits_.group > 0 || group_ <= kPackedRows ? limits_.most_rows : limits_.most_rows / 4;
    const auto draw = [&] {
      return one_in(random_, 6) ? limits_.least_rows : random_.integer(limits_.least_rows, most);
    };
    if (random_.flip()) {
      rows_ = std::max<int64_t>(draw(), 1);
      args.q = contiguous({batch_, rows_, heads_q, 8});
      args.out = args.q;
      return;
    }
    is_packed_ = true;
    std::vector<int64_t> begins{random_.integer(0, 2)};  // rows before and after are no request's
    for (int64_t b = 0; b < batch_; ++b) begins.push_back(begins.back() + draw());
    rows_ = begins.back() + random_.integer(0, 2);
    cu_seqlens_ = int32s({batch_ + 1}, [&](int64_t n) { return begins[static_cast<std::size_t>(n)]; });
    args.cu_seqlens_q = cu_seqlens_.view;
    args.q = contiguous({rows_, heads_q, 8});
    args.out = args.q;
  }
  void draw_cache() {
    const int64_t layout = random_.integer(0, 2);
    page_size_ = layout == 0 ? longest_ + random_.integer(0, 50) : one_of(random_, {1, 3, 16, 64, 100, 128, 200});
    const int64_t most_pages = ceil_div(longest_, page_size_);
    pages_ = layout == 0 ? batch_ : most_pages + random_.integer(0, 5);
    const bool in_order = random_.flip();
    const auto page = [&](int64_t n) {
      if (one_in(random_, 30)) return one_of(random_, {int64_t{-1}, pages_});
      return in_order ? n % pages_ : random_.integer(0, pages_ - 1);
    };
    if (layout == 1) {
      table_ = int32s({batch_, most_pages + random_.integer(0, 2)}, page);
      args.cache.page_table = table_.view;
    } else if (layout == 2) {
      std::vector<int64_t> begins{0};
      for (const int64_t keys : keys_) begins.push_back(begins.back() + ceil_div(keys, page_size_));
      indptr_ = int32s({batch_ + 1}, [&](int64_t n) { return begins[static_cast<std::size_t>(n)]; });
      table_ = int32s({begins.back() + random_.integer(1, 3)}, page);
      args.cache.page_indptr = indptr_.view;
      args.cache.page_indices = table_.view;
    }
    args.cache.k = args.cache.v = contiguous({pages_, page_size_, heads_kv_, 8});
    if (one_in(random_, 6)) return;
    seqlens_ = int32s({batch_}, [&](int64_t b) {
      if (one_in(random_, 12)) return one_of(random_, {int64_t{-3}, int64_t{1} << 20});
      return keys_[static_cast<std::size_t>(b)];
    });
    args.cache.seqlens = seqlens_.view;
  }
  void draw_band() {
    SequenceMaskView& m = args.mask;
    m.causal = random_.flip();
    if (one_in(random_, 3)) m.window_left = random_.integer(0, 300);
    if (one_in(random_, 3)) m.window_right = random_.integer(0, 300);
    m.key_layout = random_.flip() ? KeyLayout::kPages : KeyLayout::kSequences;
  }
  /// Vectors are the same for some keys in a row, which may see all or nothing, so that blocks are full or dead.
  void draw_bounds() {
    const bool in_pages = args.mask.key_layout == KeyLayout::kPages;
    const int64_t vectors = args.mask.causal ? random_.integer(1, 2) : one_of(random_, {2, 4}),
                  heads = random_.flip() ? heads_kv_ : 1, entries = random_.flip() ? batch_ : 1,
                  columns = std::max<int64_t>(longest_ - one_of(random_, {0, 0, 100}), 1);
    const int64_t run = one_of(random_, {1, 40, 128, 500}), visible = random_.integer(0, 9),
                  hidden = random_.integer(visible, 10);
    // Keys lie one after the other with all heads, or each head's.
    const int64_t keys_of_run = vectors * (in_pages ? heads * run : run);
    int64_t kind = 0;
    std::array<int64_t, 4> drawn{};
    const auto value = [&](int64_t n) -> int64_t {
      if (n % keys_of_run == 0) {
        kind = random_.integer(0, 9);
        for (int64_t& x : drawn) x = one_in(random_, 5) ? kForGood : random_.integer(-3, longest_ + 3);
        if (const int64_t row = longest_ - random_.integer(0, 30); vectors > 1 && one_in(random_, 3))
          drawn = {row, vectors == 2 ? row : kForGood, 0, row};  // intervals that meet there
      }
      const bool is_end = n % vectors % 2 == 1;
      if (kind < visible) return is_end ? 0 : kForGood;
      if (kind < hidden) return is_end ? kForGood : 0;
      return drawn[static_cast<std::size_t>(n % vectors)] + (in_pages ? n / vectors % heads : 0) % 2;
    };
    bounds_ = in_pages ? int32s({pages_, page_size_, heads, vectors}, value)
                       : int32s({entries, heads, columns, vectors}, value);
    args.mask.bounds = bounds_.view;
  }
  void draw_tail() {
    const int64_t t = one_of(random_, {1, 5, 31, 33, 64, 128}), words = ceil_div(t, int64_t{32});
    tail_ = int32s({batch_, t, words},
                   [&](int64_t) { return one_in(random_, 3) ? 0 : random_.integer(INT32_MIN, INT32_MAX); });
    args.mask.tail = tail_.view;
    if (random_.flip()) {
      tail_lens_ = int32s({batch_}, [&](int64_t) { return random_.integer(-2, t + 5); });
      args.mask.tail_lens = tail_lens_.view;
    }
    if (limits_.may_have_classes && random_.flip()) {
      depth_ = int32s({batch_, t}, [&](int64_t n) { return random_.integer(0, n % t); });
      args.mask.tail_depth = depth_.view;
    }
  }
  void draw_positions() {
    SequenceMaskView& m = args.mask;
    if (m.tail_depth.defined()) return;
    const int64_t far = one_in(random_, 3) ? longest_ : 4;
    const auto around = [&](int64_t at) { return at + random_.integer(-far, far); };
    const auto last_row = [&](int64_t) { return around(longest_); };
    q_pos_ = is_packed_ ? int32s({rows_}, last_row) : int32s({batch_, rows_}, last_row);
    m.q_pos = q_pos_.view;
    if (!m.tail.defined() && random_.flip()) return;
    const int64_t columns = std::max<int64_t>(longest_ - 10, 1);
    k_pos_ = m.key_layout == KeyLayout::kPages
                 ? int32s({pages_, page_size_}, around)
                 : int32s({random_.flip() ? batch_ : 1, columns}, [&](int64_t n) { return around(n % columns); });
    m.k_pos = k_pos_.view;
  }

  void draw_blocks() {
    const int64_t blocks = ceil_div(longest_, kBlockKeys), visible = random_.integer(1, 9);
    blocks_ = Storage(DataType::kBool, {random_.flip() ? batch_ : 1, random_.flip() ? heads_kv_ : 1,
                                        random_.integer(1, blocks + 1), random_.integer(1, blocks + 1)});
    for (std::byte& x : blocks_.bytes) x = std::byte{random_.integer(0, 9) < visible};
    blocks_.view.device = kDevice;
    args.mask.block_mask = blocks_.view;
  }

  static TensorView contiguous(std::initializer_list<int64_t> shape) {
    TensorView t = TensorView::contiguous(nullptr, DataType::kBFloat16, shape);
    t.device = kDevice;
    return t;
  }

  Random& random_;
  const Limits limits_;
  std::vector<int64_t> keys_;
  int64_t batch_, group_, heads_kv_, longest_ = 0, rows_ = 0, page_size_ = 0, pages_ = 0;
  bool is_packed_ = false;
  Storage cu_seqlens_, table_, indptr_, seqlens_, bounds_, tail_, tail_lens_, depth_, q_pos_, k_pos_, blocks_;
};

/// Which keys of each block every row of a request sees, by looking at each.
class Sight {
 public:
  Sight(const CachedProblem& p, const Sequence& s)
      : rows_(s.rows().count),
        blocks_(ceil_div(s.keys(), int64_t{kBlockKeys})),
        counts_(static_cast<std::size_t>(p.heads_kv * rows_ * blocks_)) {
    for (int64_t h = 0; h < p.heads_kv; ++h) {
      for (int64_t i = std::max<int64_t>(-s.first_row(), 0); i < rows_; ++i) {
        for (int64_t j = 0; j < s.keys(); ++j) counts_[at(h, i, j / kBlockKeys)] += s.sees(s.first_row() + i, j, h);
      }
    }
  }

  int64_t blocks() const { return blocks_; }
  struct Seen {
    bool any = false, all = true;
  };
  /// How much of a block the rows of a tile see.
  Seen of(const RowTile& tile, int64_t head, int64_t block) const {
    Seen seen;
    for (int64_t i = tile.first_row; i < tile.first_row + tile.row_count; ++i) {
      seen.any |= counts_[at(head, i, block)] > 0;
      seen.all &= counts_[at(head, i, block)] == kBlockKeys;
    }
    return seen;
  }

 private:
  std::size_t at(int64_t head, int64_t row, int64_t block) const {
    return static_cast<std::size_t>((head * rows_ + row) * blocks_ + block);
  }

  int64_t rows_, blocks_;
  std::vector<int32_t> counts_;
};

/// A block that a share has.
struct Walked {
  int64_t block;
  bool full;
};

/// A plan in memory that held something else.
class MadePlan {
 public:
  MadePlan(const CachedProblem& p, const CachedCapacities& capacities, const cuda::WorkPlaces& places)
      : p_(p), layout_(capacities, places) {
    memory_.resize(static_cast<std::size_t>(layout_.bytes()) + kWorkspaceAlignment, std::byte{0xa5});
    plan = layout_.at(aligned(memory_), p);
    cuda::LaunchChain chain(nullptr);
    cuda::launch_work_plan(plan, p, chain);
  }

  void expect_right() {
    for (int64_t b = 0; b < p_.batch; ++b) sequences_.emplace_back(p_, b);
    for (const Sequence& s : sequences_) sights_.emplace_back(p_, s);
    expect_tiles();
    if (testing::Test::HasFatalFailure()) return;
    if (plan.shares[0].dealt > 0) {
      expect_dealt();
    } else if (plan.invariant_blocks > 0) {
      expect_split_shares();
    } else {
      expect_shares();
    }
    if (testing::Test::HasFatalFailure()) return;
    for (int64_t n = 0; n < tiles_; n += std::max(plan.tiles[n].parts, 1)) {
      for (int64_t head = 0; head < p_.heads_kv; ++head) expect_units(n, head);
    }
  }

  WorkPlan plan;

 private:
  /// Every row and head is in one tile; tiles say the sizes of their requests.
  void expect_tiles() {
    int64_t missing = 0;
    std::vector<std::vector<bool>> covered;
    for (const Sequence& s : sequences_) {
      covered.emplace_back(static_cast<std::size_t>(s.rows().count * plan.group));
      missing += s.rows().count * plan.group;
    }
    for (; missing > 0; ++tiles_) {
      ASSERT_LT(tiles_, plan.tile_slots * plan.splits) << missing << " rows are in no tile";
      const RowTile& tile = plan.tiles[tiles_];
      ASSERT_GE(tile.request, 0);
      ASSERT_LT(tile.request, p_.batch);
      const SequenceSizes& sizes = sequences_[static_cast<std::size_t>(tile.request)].sizes();
      ASSERT_EQ(tile.rows_begin, sizes.rows.begin);
      ASSERT_EQ(tile.rows_count, sizes.rows.count);
      ASSERT_EQ(tile.keys, sizes.keys);
      ASSERT_EQ(tile.tail, sizes.tail);
      ASSERT_EQ(tile.first_entry, sizes.first_entry);
      ASSERT_GT(tile.row_count * tile.head_count, 0);
      ASSERT_LE(tile.row_count * tile.head_count, plan.packed_rows);
      ASSERT_GE(tile.first_row, 0);
      ASSERT_LE(tile.first_row + tile.row_count, tile.rows_count);
      ASSERT_GE(tile.first_head, 0);
      ASSERT_LE(tile.first_head + tile.head_count, plan.group);
      for (int64_t i = tile.first_row; i < tile.first_row + tile.row_count; ++i) {
        for (int64_t g = tile.first_head; g < tile.first_head + tile.head_count; ++g) {
          auto is_covered =
              covered[static_cast<std::size_t>(tile.request)][static_cast<std::size_t>(i * plan.group + g)];
          ASSERT_FALSE(is_covered) << "request " << tile.request << " row " << i << " head " << g;
          is_covered = true;
          --missing;
        }
      }
      expect_splits();
      if (testing::Test::HasFatalFailure()) return;
    }
  }
  /// A tile is listed for each of its splits, in ascending order; a sequence of one has a final result.
  void expect_splits() {
    const RowTile first = plan.tiles[tiles_];
    ASSERT_EQ(first.part, 0);
    ASSERT_EQ(first.parts > 0, plan.invariant_blocks > 0 && !plan.folds() && first.keys > p_.split_size);
    for (int32_t part = 1; part < first.parts; ++part) {
      const RowTile& before = plan.tiles[tiles_++];
      ASSERT_LT(tiles_, plan.tile_slots * plan.splits);
      RowTile tile = plan.tiles[tiles_];
      ASSERT_EQ(tile.part, part);
      ASSERT_GT(split_of(tile), split_of(before));
      tile.blocks_before = first.blocks_before;
      tile.first_block = first.first_block;
      tile.live_blocks = first.live_blocks;
      tile.live_list = first.live_list;
      tile.part = 0;
      ASSERT_EQ(std::memcmp(&tile, &first, sizeof tile), 0);
    }
    for (int64_t h = 0; h < p_.heads_kv && plan.invariant_blocks > 0 && !plan.folds(); ++h)
      ASSERT_EQ(plan.arrived[first.list / plan.mask_heads * p_.heads_kv + h], 0u);
  }
  int64_t split_of(const RowTile& tile) const {
    return std::min(tile.first_block / plan.invariant_blocks, plan.splits - 1);
  }

  int64_t live_of(const RowTile& tile, int64_t head) const {
    return plan.mask_heads == 1 ? tile.live_blocks : plan.live[tile.live_list + head];
  }

  /// Every unit is dealt to one CTA of any number, and to those of the plan about equally.
  void expect_dealt() {
    ASSERT_GT(plan.packed_rows, kPackedRows);
    ASSERT_EQ(plan.shares[0].dealt, tiles_);
    const auto units = static_cast<int32_t>(tiles_ * p_.heads_kv);
    int64_t all = 0, most = 0;
    for (const int32_t ctas : {plan.most_shares, 3}) {
      units_.assign(static_cast<std::size_t>(units), {});
      all = most = 0;
      for (int32_t own = 0; own < ctas; ++own) {
        int64_t blocks = 0;
        for (cuda::DealtUnits dealt(units, ctas, own); dealt.is_left(); dealt.advance()) {
          if (dealt.has_unit()) blocks += deal(dealt.unit());
          if (testing::Test::HasFatalFailure()) return;
        }
        all += blocks;
        most = std::max(most, blocks);
      }
      if (ctas == plan.most_shares && !plan.folds()) {
        ASSERT_LE(6 * most, 7 * (all / ctas));
      }
    }
    ASSERT_TRUE(std::ranges::none_of(units_, [](const auto& walked) { return walked.empty(); }));
  }
  int64_t deal(int32_t unit) {
    const int64_t index = cuda::dealt_tile(static_cast<int32_t>(tiles_), unit, static_cast<int32_t>(p_.heads_kv)),
                  head = unit % p_.heads_kv, blocks = live_of(plan.tiles[index], head);
    auto& walked = units_[static_cast<std::size_t>(index * p_.heads_kv + head)];
    EXPECT_TRUE(walked.empty()) << "a unit is dealt twice";
    walk(plan.tiles[index], head, 0, blocks, walked);
    return blocks;
  }

  /// Shares are the whole units that begin in equal stretches of all units' blocks.
  void expect_split_shares() {
    units_.resize(static_cast<std::size_t>(tiles_ * p_.heads_kv));
    int64_t at = 0, tile_index = 0, head = 0;
    for (int32_t n = 0; n < plan.most_shares; ++n) {
      const Share& share = plan.shares[n];
      if (share.blocks == 0) continue;
      ASSERT_GE(at, cuda::first_block_of(n, share.all_blocks, share.shares));
      ASSERT_LE(share.shares, plan.most_shares);
      ASSERT_EQ(share.tile_index, tile_index);
      ASSERT_EQ(share.kv_head, head);
      ASSERT_EQ(share.skipped, 0);
      ASSERT_EQ(std::memcmp(&share.tile, &plan.tiles[tile_index], sizeof share.tile), 0);
      for (int64_t left = share.blocks; left > 0;) {
        ASSERT_LT(tile_index, tiles_);
        ASSERT_LT(at, cuda::first_block_of(n + 1, share.all_blocks, share.shares));
        const RowTile& tile = plan.tiles[tile_index];
        if (head == 0) {
          ASSERT_EQ(tile.blocks_before, at);
        }
        const int64_t blocks = live_of(tile, head);
        ASSERT_LE(blocks, left) << "a unit is cut";
        walk(tile, head, 0, blocks, units_[static_cast<std::size_t>(tile_index * p_.heads_kv + head)]);
        left -= blocks;
        at += blocks;
        if (++head == p_.heads_kv) head = 0, ++tile_index;
      }
      if (tile_index == tiles_) {
        ASSERT_EQ(at, share.all_blocks);
      }
    }
    ASSERT_EQ(tile_index, tiles_);
  }

  /// Shares are equal stretches of all units' blocks in order, which are handed to units_.
  void expect_shares() {
    int64_t all = 0, share_count = 0;
    for (int64_t n = 0; n < tiles_; ++n) {
      ASSERT_EQ(plan.tiles[n].blocks_before, all);
      for (int64_t h = 0; h < p_.heads_kv; ++h) all += live_of(plan.tiles[n], h);
    }
    for (int32_t n = 0; n < plan.most_shares; ++n) {
      ASSERT_EQ(plan.arrived[n], 0u);
      if (plan.shares[n].blocks == 0) continue;
      ASSERT_EQ(share_count, n) << "an earlier share is empty";
      ++share_count;
    }
    ASSERT_EQ(share_count > 0, all > 0);
    units_.resize(static_cast<std::size_t>(tiles_ * p_.heads_kv));
    int64_t at = 0, tile_index = 0, head = 0, skipped = 0;
    for (int64_t n = 0; n < share_count; ++n) {
      const Share& share = plan.shares[n];
      ASSERT_EQ(share.all_blocks, all);
      ASSERT_EQ(share.shares, share_count);
      ASSERT_EQ(cuda::first_block_of(n, all, share_count), at);
      ASSERT_EQ(cuda::first_block_of(n + 1, all, share_count), at + share.blocks);
      ASSERT_GE(share.blocks, std::min<int64_t>(plan.least_blocks, all));
      ASSERT_LE(std::abs(share.blocks - plan.shares[0].blocks), 1);
      for (int64_t block = at; block < at + share.blocks; ++block)
        ASSERT_EQ(cuda::share_of(block, all, share_count), n) << "block " << block << " of " << all;
      ASSERT_EQ(share.tile_index, tile_index);
      ASSERT_EQ(share.kv_head, head);
      ASSERT_EQ(share.skipped, skipped);
      ASSERT_EQ(share.tile.request, plan.tiles[tile_index].request);
      ASSERT_EQ(share.tile.blocks_before, plan.tiles[tile_index].blocks_before);
      for (int64_t left = share.blocks; left > 0;) {
        ASSERT_LT(tile_index, tiles_);
        const RowTile& tile = plan.tiles[tile_index];
        const int64_t blocks = std::min(live_of(tile, head) - skipped, left);
        walk(tile, head, skipped, blocks, units_[static_cast<std::size_t>(tile_index * p_.heads_kv + head)]);
        left -= blocks;
        skipped += blocks;
        if (skipped < live_of(tile, head)) continue;
        skipped = 0;
        if (++head == p_.heads_kv) head = 0, ++tile_index;
      }
      at += share.blocks;
    }
    ASSERT_EQ(at, all);
    ASSERT_EQ(tile_index, tiles_);
  }

  /// A unit's live blocks from the skipped-th on, as the attention kernels find them.
  void walk(const RowTile& tile, int64_t head, int64_t skipped, int64_t blocks, std::vector<Walked>& to) const {
    if (!plan.has_classes) {
      for (int64_t n = 0; n < blocks; ++n) to.push_back({tile.first_block + skipped + n, false});
      return;
    }
    const int64_t list = tile.list + (plan.mask_heads == 1 ? 0 : head), end = ceil_div(tile.keys, kBlockKeys);
    const auto is_set = [&](const uint32_t* bits, int64_t block) {
      return (bits[list * plan.words + block / kBlocksOfWord] >> block % kBlocksOfWord & 1) != 0;
    };
    const bool is_last = plan.invariant_blocks == 0 || plan.folds() || split_of(tile) + 1 == plan.splits;
    const int64_t stop = is_last ? end : std::min<int64_t>(end, tile.first_block + plan.invariant_blocks),
                  known = int64_t{plan.words} * kBlocksOfWord;
    int64_t left = blocks;
    for (int64_t block = tile.first_block; block < std::min(known, stop) && left > 0; ++block) {
      if (!is_set(plan.live_bits, block) || skipped-- > 0) continue;
      skipped = 0;
      to.push_back({block, is_set(plan.full_bits, block)});
      --left;
    }
    for (int64_t block = std::max<int64_t>(known, tile.first_block) + std::max<int64_t>(skipped, 0); left > 0;
         ++block, --left)
      to.push_back({block < stop ? block : end, false});
  }

  /// The blocks of a tile's units under a head, which lie in a split each. One that stands for none is left out where
  /// other splits have some.
  std::vector<Walked> blocks_of(int64_t n, int64_t head) const {
    const RowTile& first = plan.tiles[n];
    std::vector<Walked> all;
    for (int64_t part = 0; part < std::max(first.parts, 1); ++part) {
      const RowTile& tile = plan.tiles[n + part];
      for (const Walked& walked : units_[static_cast<std::size_t>((n + part) * p_.heads_kv + head)]) {
        if (first.parts > 0 && walked.block == ceil_div(tile.keys, kBlockKeys)) continue;
        if (first.parts > 0) {
          EXPECT_EQ(std::min(walked.block / plan.invariant_blocks, int64_t{plan.splits} - 1), split_of(tile))
              << where(tile, head);
        }
        all.push_back(walked);
      }
    }
    return all;
  }

  void expect_units(int64_t n, int64_t head) const {
    const RowTile& tile = plan.tiles[n];
    const std::vector<Walked> walked = blocks_of(n, head);
    const Sequence& s = sequences_[static_cast<std::size_t>(tile.request)];
    const Sight& sight = sights_[static_cast<std::size_t>(tile.request)];
    const bool is_exact = tile.tail == 0 || s.has_band_positions();
    const int64_t known = plan.has_classes ? int64_t{plan.words} * kBlocksOfWord : INT32_MAX;
    std::size_t next = 0, needed = 0;
    for (int64_t block = 0; block < sight.blocks(); ++block) {
      const auto [any, all] = sight.of(tile, head, block);
      const bool is_live = next < walked.size() && walked[next].block == block;
      const bool is_full = is_live && walked[next].full;
      next += is_live;
      needed += any || block >= known;
      if (any || block >= known) {
        ASSERT_TRUE(is_live) << where(tile, head) << ", block " << block << " is not live";
      }
      if (is_full) {
        ASSERT_TRUE(all) << where(tile, head) << ", block " << block << " is not full";
      }
      if (plan.has_classes && is_exact && all && block < known) {
        ASSERT_TRUE(is_full) << where(tile, head) << ", block " << block << " is full";
      }
    }
    // One that stands for none is the first without vectors, else past the last key.
    if (needed == 0 && walked.size() <= 1) return;
    ASSERT_EQ(next, walked.size()) << where(tile, head) << ": blocks out of order or of no keys";
    if (is_exact) {
      ASSERT_EQ(walked.size(), std::max<std::size_t>(needed, 1)) << where(tile, head) << ": blocks that none sees";
    }
  }
  std::string where(const RowTile& tile, int64_t head) const {
    return "request " + std::to_string(tile.request) + ", rows from " + std::to_string(tile.first_row) +
           ", heads from " + std::to_string(tile.first_head) + ", key head " + std::to_string(head);
  }

  const CachedProblem& p_;
  const cuda::WorkPlanLayout layout_;
  std::vector<std::byte> memory_;
  std::vector<Sequence> sequences_;
  std::vector<Sight> sights_;
  int64_t tiles_ = 0;
  std::vector<std::vector<Walked>> units_;
};

cuda::WorkPlaces draw_places(Random& random) {
  const int32_t rows = one_of(random, {kPackedRows / 2, kPackedRows, cuda::kTallPackedRows});
  return {.shares = one_of(random, {1, 2, 7, 40, 132}),
          .least_blocks = static_cast<int32_t>(random.integer(1, 4)),
          .split_blocks = static_cast<int32_t>(random.integer(1, 8)),
          .packed_rows = rows,
          .tile_rows = std::max(rows, kPackedRows),
          .head_dim_v = 8};
}

void expect_plan(uint64_t seed, const Limits& limits) {
  Random random(seed);
  const DrawnCall call(random, limits);
  const CachedProblem p = check_cached(call.args, {}, false);
  CachedCapacities capacities = cuda::capacities_of(p);
  if (one_in(random, 3)) {
    capacities.max_batch += random.integer(0, 9);
    capacities.max_rows += random.integer(0, 99);
    capacities.max_keys += random.integer(0, 9000);
  } else if (p.cache.page_indptr.defined() && random.flip()) {
    capacities.max_keys = random.integer(0, p.capacity / 2);
  }
  simt::set_seed(seed);
  MadePlan(p, capacities, draw_places(random)).expect_right();
}

TEST(CachePlan, RandomCalls) {
  for (uint64_t n = 0; n < 800; ++n) {
    SCOPED_TRACE("case " + std::to_string(n));
    expect_plan(n, {});
    if (HasFailure()) return;
  }
}

TEST(CachePlan, WholeSplits) {
  for (uint64_t n = 0; n < 400; ++n) {
    SCOPED_TRACE("case " + std::to_string(n));
    expect_plan(6000 + n, {.batch_invariant = true});
    if (HasFailure()) return;
  }
  for (uint64_t n = 0; n < 40; ++n) {
    SCOPED_TRACE("case " + std::to_string(n) + " of many keys");
    expect_plan(7000 + n, {.most_batch = 3, .most_rows = 6, .most_keys = 13000, .batch_invariant = true});
    if (HasFailure()) return;
  }
  expect_plan(8000, {.least_batch = 3000,
                     .most_batch = 3100,
                     .most_rows = 3,
                     .most_keys = 400,
                     .group = 30,
                     .may_have_classes = false,
                     .batch_invariant = true});
}

TEST(CachePlan, KeysOfSeveralWordsOfBits) {
  for (uint64_t n = 0; n < 40; ++n) {
    SCOPED_TRACE("case " + std::to_string(n));
    expect_plan(1000 + n, {.most_batch = 3, .most_rows = 6, .most_keys = 13000});
    if (HasFailure()) return;
  }
}

TEST(CachePlan, MoreRowsThanKeys) {
  for (uint64_t n = 0; n < 60; ++n) {
    SCOPED_TRACE("case " + std::to_string(n));
    expect_plan(5000 + n,
                {.most_batch = 3, .least_rows = 100, .most_rows = 300, .most_keys = 260, .group = n % 2 ? 1 : 8});
    if (HasFailure()) return;
  }
}

TEST(CachePlan, MoreRequestsAndTilesThanSharedMemoryHolds) {
  for (uint64_t n = 0; n < 4; ++n) {
    SCOPED_TRACE("case " + std::to_string(n));
    expect_plan(2000 + n, {.least_batch = 5000,
                           .most_batch = 5100,
                           .most_rows = 3,
                           .most_keys = 200,
                           .group = n % 2 ? 65 : 30,
                           .may_have_classes = false});
    if (HasFailure()) return;
  }
  for (uint64_t n = 0; n < 4; ++n) {
    SCOPED_TRACE("case " + std::to_string(n) + " of many rows");
    expect_plan(3000 + n, {.most_batch = 2, .least_rows = 1700, .most_rows = 1800, .most_keys = 300, .group = 65});
    if (HasFailure()) return;
  }
}

TEST(CachePlan, AnyLengthsAndTables) {
  // Sanitizers see what lies outside the tensors.
  for (uint64_t n = 0; n < 100; ++n) {
    SCOPED_TRACE("case " + std::to_string(n));
    Random random(4000 + n);
    DrawnCall call(random, {.batch_invariant = n % 3 == 0});
    call.scramble();
    const CachedProblem p = check_cached(call.args, {}, false);
    const MadePlan made(p, cuda::capacities_of(p), draw_places(random));
    for (int32_t share = 0; share < made.plan.most_shares; ++share) {
      if (made.plan.shares[share].blocks == 0) continue;
      ASSERT_GE(made.plan.shares[share].tile_index, 0);
      ASSERT_LT(made.plan.shares[share].tile_index, made.plan.tile_slots * made.plan.splits);
    }
  }
}

// --- Plans of forests -----------------------------------------------------------------------------

/// A random call of one sequence, whose rows are those of several requests.
class MadeForest {
 public:
  MadeForest(const CachedProblem& p, const CachedCapacities& capacities, const cuda::WorkPlaces& places)
      : p_(p), made_(p, capacities, places), plan_(made_.plan), sequence_(p, 0), sight_(p, sequence_) {}

  void expect_right() {
    ASSERT_TRUE(plan_.is_forest());
    ASSERT_EQ(plan_.shares[0].dealt, 0);
    expect_levels();
    for (int64_t i = 0; i < sequence_.rows().count; ++i) {
      for (int64_t head = 0; head < p_.heads_kv; ++head) expect_row(i, head);
    }
    expect_results();
  }

 private:
  /// Tiles of a size are whole tiles of the next.
  void expect_levels() const {
    for (int n = 0; n < cuda::kTileLevels; ++n) {
      const cuda::TileLevel& level = plan_.levels[n];
      ASSERT_GE(level.slots * level.rows, sequence_.rows().count);
      ASSERT_LE(level.packed_rows, n == 0 ? plan_.packed_rows : cuda::kMiddlePackedRows);
      ASSERT_EQ(level.packed_rows, level.rows * plan_.group);
      ASSERT_TRUE(n == 0 || plan_.levels[n - 1].rows % level.rows == 0);
    }
  }
  struct Seen {
    bool live, full;
  };
  Seen bits_of(int64_t slot, int64_t head, int64_t block) const {
    const int64_t list = slot * plan_.mask_heads + (plan_.mask_heads == 1 ? 0 : head),
                  word = list * plan_.words + block / kBlocksOfWord;
    const auto is_set = [&](const uint32_t* bits) { return (bits[word] >> block % kBlocksOfWord & 1) != 0; };
    return {is_set(plan_.live_bits), is_set(plan_.full_bits)};
  }

  /// A row meets each block that it sees in one of its tiles, and those tiles are listed. A block is full where all
  /// rows of the tile see all of it.
  void expect_row(int64_t i, int64_t head) const {
    for (int64_t block = 0; block < sight_.blocks(); ++block) {
      RowTile row{};
      row.first_row = static_cast<int32_t>(i);
      row.row_count = 1;
      int met = 0;
      for (const cuda::TileLevel& level : plan_.levels) {
        const int64_t t = i / level.rows, slot = level.first_slot + t;
        const Seen seen = bits_of(slot, head, block);
        met += seen.live;
        if (seen.live) {
          ASSERT_GT(plan_.results[slot * p_.heads_kv + head].count, 0) << "row " << i << ", block " << block;
        }
        RowTile tile{};
        tile.first_row = static_cast<int32_t>(t * level.rows);
        tile.row_count = static_cast<int32_t>(std::min<int64_t>(level.rows, sequence_.rows().count - tile.first_row));
        if (seen.full) {
          ASSERT_TRUE(seen.live && sight_.of(tile, head, block).all) << "row " << i << ", block " << block;
        }
        if (seen.live && sequence_.sizes().tail == 0) {
          ASSERT_EQ(seen.full, sight_.of(tile, head, block).all) << "row " << i << ", block " << block;
        }
      }
      ASSERT_LE(met, 1) << "row " << i << ", block " << block;
      if (sight_.of(row, head, block).any) {
        ASSERT_EQ(met, 1) << "row " << i << ", block " << block;
      }
    }
  }

  /// Shares have all blocks of all units in order, and no two results lie in one place.
  void expect_results() const {
    std::vector<bool> taken(static_cast<std::size_t>(plan_.split_rows));
    int32_t share = 0;
    int64_t left = plan_.shares[0].blocks, all = 0;
    for (int32_t index = 0; all < plan_.shares[0].all_blocks; ++index) {
      const RowTile& tile = plan_.tiles[index];
      ASSERT_EQ(tile.blocks_before, all);
      for (int32_t head = 0; head < p_.heads_kv; ++head) {
        const int32_t live = plan_.mask_heads == 1 ? tile.live_blocks : plan_.live[tile.live_list + head];
        ASSERT_GT(live, 0);
        all += live;
        const cuda::UnitResults& results = plan_.results[tile.list / plan_.mask_heads * p_.heads_kv + head];
        int32_t count = 0;
        for (int64_t rest = live; rest > 0; ++count) {
          while (left == 0) expect_begin(plan_.shares[++share], index, head, live - rest, left);
          const int64_t first = cuda::result_row(tile, head, share);
          ASSERT_EQ(first, results.first_row + count * tile.parts);
          ASSERT_LE(tile.row_count * tile.head_count, tile.parts);
          ASSERT_LE(first + tile.parts, plan_.split_rows);
          for (int64_t n = first; n < first + tile.parts; ++n) {
            ASSERT_FALSE(taken[static_cast<std::size_t>(n)]) << "tile " << index << ", share " << share;
            taken[static_cast<std::size_t>(n)] = true;
          }
          const int64_t blocks = std::min(rest, left);
          rest -= blocks;
          left -= blocks;
        }
        ASSERT_EQ(count, results.count);
      }
    }
    ASSERT_EQ(all, plan_.shares[0].all_blocks);
  }
  /// A share begins at the word of its first block.
  void expect_begin(const Share& share, int32_t index, int32_t head, int64_t skipped, int64_t& left) const {
    left = share.blocks;
    if (left == 0) return;
    EXPECT_EQ(share.tile_index, index);
    EXPECT_EQ(share.kv_head, head);
    EXPECT_EQ(share.skipped, skipped);
    const int64_t list = share.tile.list + (plan_.mask_heads == 1 ? 0 : head);
    const auto live_in = [&](int64_t word) { return std::popcount(plan_.live_bits[list * plan_.words + word]); };
    int64_t before = 0;
    for (int64_t word = 0; word < share.first_word; ++word) before += live_in(word);
    EXPECT_EQ(share.passed, before);
    if (share.first_word < plan_.words) {
      EXPECT_LE(share.passed, skipped);
      EXPECT_GT(share.passed + live_in(share.first_word), skipped);
    }
  }

  const CachedProblem& p_;
  const MadePlan made_;
  const WorkPlan& plan_;
  const Sequence sequence_;
  const Sight sight_;
};

void expect_forest(uint64_t seed, const Limits& limits) {
  Random random(seed);
  DrawnCall call(random, limits);
  const CachedProblem p = check_cached(call.args, {}, false);
  if (p.cache.page_indptr.defined() || p.total_rows() == 0) return;  // refused
  CachedCapacities capacities = cuda::capacities_of(p);
  capacities.forest = true;
  capacities.max_keys = p.capacity + random.integer(0, 1) * 5000;
  capacities.max_batch = random.integer(1, p.total_rows());
  capacities.max_rows += random.integer(0, 1) * random.integer(0, 99);
  simt::set_seed(seed);
  MadeForest(p, capacities, draw_places(random)).expect_right();
}

TEST(CachePlan, Forests) {
  for (uint64_t n = 0; n < 400; ++n) {
    SCOPED_TRACE("case " + std::to_string(n));
    const int64_t groups[] = {1, 3, 4, 8, 11, 17, 32};
    expect_forest(9000 + n, {.most_batch = 1, .most_rows = 200, .most_keys = 1500, .group = groups[n % 7]});
    if (HasFailure()) return;
  }
}

/// Rows of 64 requests, of which each sees 256 keys that all do, and 128 of its own: tall tiles have the former alone.
TEST(CachePlan, AForestReadsSharedKeysForManyRowsAndOwnKeysForFew) {
  constexpr int64_t kRequests = 64, kShared = 256, kOwn = 128, kKeys = kShared + kRequests * kOwn;
  const int64_t sequence_keys = kKeys + kRequests;  // row i is row kKeys + i of the sequence
  const Storage bounds = int32s({1, 1, sequence_keys, 2}, [&](int64_t n) -> int64_t {
    const int64_t key = n / 2, request = (key - kShared) / kOwn;
    const bool is_end = n % 2 == 1;
    if (key < kShared) return is_end ? 0 : kForGood;
    if (key >= kKeys) return is_end ? kForGood : 0;
    return kKeys + request + (is_end ? 0 : 1);
  });
  const Storage seqlens = int32s({1}, [&](int64_t) { return sequence_keys; });
  CachedForwardArgs args;
  args.q = TensorView::contiguous(nullptr, DataType::kBFloat16, {1, kRequests, 8, 8});
  args.cache.k = TensorView::contiguous(nullptr, DataType::kBFloat16, {1, sequence_keys, 2, 8});
  args.q.device = args.cache.k.device = kDevice;
  args.out = args.q;
  args.cache.v = args.cache.k;
  args.cache.seqlens = seqlens.view;
  args.mask = {.causal = false, .bounds = bounds.view};
  const CachedProblem p = check_cached(args, {}, false);
  CachedCapacities capacities = cuda::capacities_of(p);
  capacities.forest = true;
  capacities.max_keys = p.capacity;
  capacities.max_batch = kRequests;
  MadePlan made(p, capacities,
                {.shares = 132,
                 .least_blocks = 1,
                 .split_blocks = 2,
                 .packed_rows = cuda::kTallPackedRows,
                 .tile_rows = cuda::kTallPackedRows,
                 .head_dim_v = 8});
  const WorkPlan& plan = made.plan;
  ASSERT_EQ(plan.shares[0].all_blocks, 2 * (2 * kShared / kBlockKeys + kRequests));
  for (int64_t index = 0; index < 2 + kRequests; ++index) {
    const RowTile& tile = plan.tiles[index];
    EXPECT_EQ(tile.row_count, index < 2 ? 32 : 1);
    EXPECT_EQ(tile.live_blocks, index < 2 ? kShared / kBlockKeys : 1);
    for (int64_t word = 0; word < plan.words; ++word)
      EXPECT_EQ(plan.live_bits[tile.list * plan.words + word], plan.full_bits[tile.list * plan.words + word]);
  }
}

// --- Appending ------------------------------------------------------------------------------------

/// Random rows for a random cache, equal for equal seeds wherever they are.
class DrawnAppend {
 public:
  DrawnAppend(uint64_t seed, Device device, int64_t most_rows = 9)
      : random_(seed), device_(device), most_rows_(most_rows) {
    dtype_ = one_of(random_, {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16, DataType::kFloat64});
    is_float8_ = dtype_ != DataType::kFloat64 && random_.flip();
    float8_ = random_.flip() ? DataType::kFloat8E4M3 : DataType::kUInt8;
    batch_ = random_.integer(1, 5);
    heads_ = random_.integer(1, 3);
    const bool has_slots = random_.flip(), is_packed = random_.flip(), is_loose = has_slots && one_in(random_, 3);
    const bool has_three = is_packed || is_loose;  // dimensions
    draw_rows(is_packed && !is_loose, is_loose);
    draw_cache(has_slots);
    if (has_slots) draw_slots(has_three);
    if (random_.flip()) draw_bounds(has_slots, has_three);
    args.k = draw_elements(k_, has_three, random_.integer(1, 70));
    args.v = draw_elements(v_, has_three, random_.integer(1, 70));
    args.cache.k = new_cache(cache_k_, args.k);
    args.cache.v = new_cache(cache_v_, args.v);
    args.write_scales = is_float8_ && one_in(random_, 3);
    if (is_float8_ && (args.write_scales || random_.flip())) args.cache.k_scale = draw_scale(k_scale_);
    if (is_float8_ && (args.write_scales || random_.flip())) args.cache.v_scale = draw_scale(v_scale_);
    before_ = {cache_k_.bytes, cache_v_.bytes};
    append_kv(args);
  }

  AppendArgs args;

  bool operator==(const DrawnAppend& other) const {
    return cache_k_.bytes == other.cache_k_.bytes && cache_v_.bytes == other.cache_v_.bytes &&
           mask_bounds_.bytes == other.mask_bounds_.bytes && k_scale_.bytes == other.k_scale_.bytes &&
           v_scale_.bytes == other.v_scale_.bytes;
  }
  /// True if something was written.
  bool has_written() const { return cache_k_.bytes != before_[0] || cache_v_.bytes != before_[1]; }
  /// True if a page's scale was written that is a float.
  bool has_page_scales() const { return has_page_scales_; }

 private:
  static constexpr float kScales[] = {1, 0.37f, 0.011f, 2.93f};

  template <typename F>
  TensorView integers(Storage& to, std::initializer_list<int64_t> shape, const F& value) {
    to = int32s(shape, value, device_);
    return to.view;
  }

  void draw_rows(bool has_cu, bool is_loose) {
    rows_ = random_.integer(most_rows_ / 20, most_rows_);
    total_ = is_loose ? rows_ : batch_ * rows_;
    if (!has_cu) return;
    std::vector<int64_t> begins{random_.integer(0, 2)};
    for (int64_t b = 0; b < batch_; ++b)
      begins.push_back(begins.back() + (one_in(random_, 3) ? 0 : random_.integer(1, most_rows_)));
    rows_ = total_ = begins.back() + random_.integer(0, 2);
    args.cu_seqlens =
        integers(cu_seqlens_, {batch_ + 1}, [&](int64_t n) { return begins[static_cast<std::size_t>(n)]; });
  }
  /// Pages are one request's, each once: else the last of several writers were any of them.
  void draw_cache(bool has_slots) {
    const int64_t layout = random_.integer(0, 2), most_pages = random_.integer(1, 4);
    page_size_ = layout == 0 ? random_.integer(1, 60) : one_of(random_, {1, 3, 16, 64});
    pages_ = layout == 0 ? batch_ : batch_ * most_pages + 2;
    std::vector<int64_t> order(static_cast<std::size_t>(pages_));
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t n = order.size(); n > 1; --n)
      std::swap(order[n - 1], order[static_cast<std::size_t>(random_.integer(0, static_cast<int64_t>(n) - 1))]);
    const auto page = [&](int64_t n) {
      return one_in(random_, 8) ? one_of(random_, {int64_t{-1}, pages_}) : order[static_cast<std::size_t>(n)];
    };
    if (layout == 1) args.cache.page_table = integers(table_, {batch_, most_pages}, page);
    if (layout == 2) {
      args.cache.page_indptr = integers(indptr_, {batch_ + 1}, [&](int64_t b) { return b * most_pages; });
      args.cache.page_indices = integers(table_, {batch_ * most_pages}, page);
    }
    const int64_t room = layout == 0 ? page_size_ : most_pages * page_size_;
    if (!has_slots || random_.flip())
      args.cache.seqlens = integers(seqlens_, {batch_}, [&](int64_t) { return random_.integer(-1, room + 2); });
  }
  void draw_slots(bool has_three) {
    std::vector<int64_t> free(static_cast<std::size_t>(pages_ * page_size_));
    std::iota(free.begin(), free.end(), 0);
    const auto slot = [&]() -> int64_t {
      if (one_in(random_, 6) || free.empty())
        return one_of(random_, {int64_t{-1}, pages_ * page_size_, int64_t{INT32_MAX}});
      std::swap(free.back(), free[static_cast<std::size_t>(random_.integer(0, static_cast<int64_t>(free.size()) - 1))]);
      const int64_t at = free.back();
      free.pop_back();
      return at;
    };
    const bool is_long = random_.flip();
    const DataType dtype = is_long ? DataType::kInt64 : DataType::kInt32;
    slots_ = has_three ? Storage(dtype, {rows_}) : Storage(dtype, {batch_, rows_});
    for (int64_t n = 0; n < total_; ++n) {
      const int64_t at = slot();
      if (is_long)
        reinterpret_cast<int64_t*>(slots_.bytes.data())[n] = at == INT32_MAX ? INT64_MAX : at;
      else
        reinterpret_cast<int32_t*>(slots_.bytes.data())[n] = static_cast<int32_t>(at);
    }
    slots_.view.device = device_;
    args.slots = slots_.view;
  }
  void draw_bounds(bool has_slots, bool has_three) {
    const bool in_pages = has_slots || random_.flip();
    args.mask.causal = random_.flip();
    args.mask.key_layout = in_pages ? KeyLayout::kPages : KeyLayout::kSequences;
    const int64_t vectors = args.mask.causal ? random_.integer(1, 2) : one_of(random_, {2, 4}),
                  heads = random_.flip() ? heads_ : 1, columns = random_.integer(1, 100);
    const auto before = [](int64_t n) { return -n; };
    args.mask.bounds = in_pages ? integers(mask_bounds_, {pages_, page_size_, heads, vectors}, before)
                                : integers(mask_bounds_, {batch_, heads, columns, vectors}, before);
    const auto value = [&](int64_t) { return random_.integer(1, INT32_MAX); };
    args.bounds = has_three ? integers(bounds_, {rows_, heads, vectors}, value)
                            : integers(bounds_, {batch_, rows_, heads, vectors}, value);
  }

  /// Rows whose heads lie apart from each other.
  TensorView draw_elements(Storage& to, bool has_three, int64_t dim) {
    const int64_t gap = random_.integer(0, 5);
    to = has_three ? Storage(dtype_, {rows_, heads_, dim + gap}) : Storage(dtype_, {batch_, rows_, heads_, dim + gap});
    for (int64_t n = 0; n < to.view.num_elements(); ++n) {
      double x = (2 * random_.real() - 1) * one_of(random_, {1e-3, 1.0, 30.0, 1000.0});
      // Numbers that the scales make midpoints of e4m3, and those beside them.
      if (random_.flip())
        x = std::ldexp(static_cast<double>(random_.integer(16, 31)), static_cast<int>(random_.integer(-14, 5))) *
            one_of(random_, kScales);
      if (random_.flip()) x = std::nextafter(static_cast<float>(x), one_of(random_, {-1e9f, 1e9f}));
      if (one_in(random_, 50)) x = one_of(random_, {0.0, -0.0, 1e30, -1e30, HUGE_VAL, -HUGE_VAL, std::nan("")});
      to.set(n, x);
    }
    TensorView view = to.view;
    view.shape[static_cast<std::size_t>(view.rank - 1)] = dim;
    view.device = device_;
    return view;
  }
  TensorView new_cache(Storage& to, const TensorView& rows) {
    const int64_t dim = rows.shape[static_cast<std::size_t>(rows.rank - 1)];
    const DataType dtype = is_float8_ ? float8_ : dtype_;
    const bool heads_first = random_.flip();
    to = heads_first ? Storage(dtype, {pages_, heads_, page_size_, dim})
                     : Storage(dtype, {pages_, page_size_, heads_, dim});
    TensorView view = to.view;
    if (heads_first) std::swap(view.shape[1], view.shape[2]), std::swap(view.stride[1], view.stride[2]);
    view.device = device_;
    // Numbers that are stored already; else bytes of 0xff, which are NaN.
    if (is_float8_ && random_.flip())
      for (std::byte& x : to.bytes) x = static_cast<std::byte>(random_.integer(0, 255));
    return view;
  }
  /// Scales of the tensor, of pages, of tokens, of heads, of all of these, or of pages and heads.
  TensorView draw_scale(Storage& to) {
    const int64_t kind = args.write_scales ? one_of(random_, {1, 2, 4, 5}) : random_.integer(0, 5);
    has_page_scales_ |= args.write_scales && page_size_ > 1 && (kind == 1 || kind == 5);
    const DataType dtype = DataType::kFloat32;
    to = kind == 0   ? Storage(dtype, {1})
         : kind == 1 ? Storage(dtype, {pages_, 1, 1})
         : kind == 2 ? Storage(dtype, {pages_, page_size_, 1})
         : kind == 3 ? Storage(dtype, {heads_})
         : kind == 4 ? Storage(dtype, {pages_, page_size_, heads_})
                     : Storage(dtype, {pages_, 1, heads_});
    // Scales that are written may have held no number.
    for (int64_t n = 0; n < to.view.num_elements(); ++n)
      to.set(n, args.write_scales && one_in(random_, 4)
                    ? one_of(random_, {0.0, -1.0, 1e-42, 1e-6, 3e38, HUGE_VAL, std::nan("")})
                    : one_of(random_, kScales));
    to.view.device = device_;
    return to.view;
  }

  Random random_;
  const Device device_;
  const int64_t most_rows_;  ///< a request's
  DataType dtype_, float8_;
  bool is_float8_, has_page_scales_ = false;
  std::array<std::vector<std::byte>, 2> before_;
  int64_t batch_, heads_, rows_ = 0, total_ = 0, page_size_ = 0, pages_ = 0;
  Storage k_, v_, cache_k_, cache_v_, k_scale_, v_scale_, cu_seqlens_, slots_, bounds_, mask_bounds_, table_, indptr_,
      seqlens_;
};

TEST(CachePlan, TooLargeAPlanIsRefused) {
  CachedCapacities c{.max_batch = 64, .max_rows = 4096, .max_keys = 1 << 20, .heads_q = 32, .heads_kv = 8};
  EXPECT_EQ(cuda::WorkPlanLayout::refusal(c), "");
  for (int64_t CachedCapacities::* each :
       {&CachedCapacities::max_batch, &CachedCapacities::max_rows, &CachedCapacities::max_keys}) {
    for (const int64_t much : {int64_t{1} << 40, INT64_MAX}) {
      CachedCapacities large = c;
      large.*each = much;
      EXPECT_NE(cuda::WorkPlanLayout::refusal(large).find(std::to_string(much)), std::string::npos);
    }
  }
  c.batch_invariant = true;
  EXPECT_EQ(cuda::WorkPlanLayout::refusal(c), "");
  c.split_size = 128;
  EXPECT_NE(cuda::WorkPlanLayout::refusal(c).find("8192 splits of 128 keys"), std::string::npos);
}

TEST(CacheAppend, SameBytesAsTheHost) {
  int64_t written = 0, of_pages = 0;
  for (uint64_t n = 0; n < 800; ++n) {
    SCOPED_TRACE("case " + std::to_string(n));
    simt::set_seed(n);
    const DrawnAppend on_host(n, {}), on_device(n, kDevice);
    ASSERT_TRUE(on_host == on_device);
    written += on_host.has_written();
    of_pages += on_host.has_written() && on_host.has_page_scales();
  }
  EXPECT_GT(written, 550);
  EXPECT_GT(of_pages, 50);
}

TEST(CacheAppend, MoreRowsThanBlocks) {
  int64_t of_pages = 0;
  for (uint64_t n = 0; n < 200; ++n) {
    SCOPED_TRACE("case " + std::to_string(n));
    simt::set_seed(n);
    const DrawnAppend on_host(n, {}, 500), on_device(n, kDevice, 500);
    ASSERT_TRUE(on_host == on_device);
    of_pages += on_host.has_written() && on_host.has_page_scales();
  }
  EXPECT_GT(of_pages, 10);
}

}  // namespace
}  // namespace flashmask::test
