// SPDX-License-Identifier: Apache-2.0
#include "placement/exchange.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "common/arithmetic.h"

namespace flashmask::placement {
namespace {

/// Chunks of a rank that the search begins with.
constexpr int64_t kFirstChunks = 4;
/// Words that a search may look at, over all its sizes of chunks: a bound of its time, about a second, which only
/// hundreds of ranks reach.
constexpr int64_t kMostWork = int64_t{1} << 28;
/// Gains of load below this share of a mean load are none.
constexpr double kLeastGain = 1e-9;

/// Most ranks that one exchanges with, the ones with the least load.
constexpr std::size_t kMostPartners = 32;

using Index = std::size_t;

/// A run of units of one rank.
struct Chunk {
  int32_t begin, end;
  int32_t size() const { return end - begin; }
};

/// Chunks with their owners, their weights and the key chunks that each sees, as bits. The keys of several batch
/// entries and masks lie one after the other in a chunk's bits.
struct Chunks {
  std::vector<Chunk> chunk;
  std::vector<int32_t> owner;  // each chunk's
  Index masks = 0, words = 0;  // words: of one entry
  Index entries = 0;
  std::vector<double> weight;  // [chunks, masks], in mean loads
  std::vector<uint64_t> sees;  // [chunks, entries, words]

  Index count() const { return chunk.size(); }
  Index row_words() const { return entries * words; }
  const uint64_t* seen_by(Index x) const { return sees.data() + x * row_words(); }
};

void set_weights(std::span<const Visibility> masks, int64_t ranks, Chunks& c) {
  c.masks = masks.size();
  c.weight.assign(c.count() * c.masks, 0);
  for (Index m = 0; m < masks.size(); ++m) {
    int64_t total = 0;
    for (const int64_t tiles : masks[m].tiles) total += tiles;
    const double mean = static_cast<double>(std::max<int64_t>(total, 1)) / static_cast<double>(ranks);
    for (Index x = 0; x < c.count(); ++x) {
      int64_t tiles = 0;
      for (int32_t u = c.chunk[x].begin; u < c.chunk[x].end; ++u) tiles += masks[m].tiles[static_cast<Index>(u)];
      c.weight[x * c.masks + m] = static_cast<double>(tiles) / mean;
    }
  }
}

void set_seen(std::span<const Visibility> masks, Chunks& c) {
  c.entries = 0;
  for (const Visibility& mask : masks) c.entries += mask.entries.size();
  c.words = static_cast<Index>(ceil_div(static_cast<int64_t>(c.count()), 64));
  c.sees.assign(c.count() * c.row_words(), 0);
  std::vector<Index> chunk_of;
  for (Index x = 0; x < c.count(); ++x) chunk_of.insert(chunk_of.end(), static_cast<Index>(c.chunk[x].size()), x);
  Index entry = 0;
  for (const Visibility& mask : masks) {
    for (const SeenKeys& keys : mask.entries) {
      for (const KeyGroup& group : keys.groups) {
        const Index k = chunk_of[static_cast<Index>(group.unit)];
        for (const UnitRange& range : keys.seeing(group)) {
          const Index last = chunk_of[static_cast<Index>(range.end - 1)];
          for (Index x = chunk_of[static_cast<Index>(range.begin)]; x <= last; ++x)
            c.sees[x * c.row_words() + entry * c.words + k / 64] |= uint64_t{1} << (k % 64);
        }
      }
      ++entry;
    }
  }
}

/// Each run of units of one rank in pieces of nearly one size: sizes differ by one at most where `pieces` are as many
/// for equal runs, so that there are many of each size to exchange.
std::vector<Chunk> cut(std::span<const int32_t> owner, int64_t chunk_units) {
  std::vector<Chunk> chunks;
  const auto units = static_cast<int32_t>(owner.size());
  for (int32_t begin = 0, end; begin < units; begin = end) {
    end = begin + 1;
    while (end < units && owner[static_cast<Index>(end)] == owner[static_cast<Index>(begin)]) ++end;
    const int64_t length = end - begin, pieces = ceil_div(length, chunk_units);
    for (int64_t p = 0; p < pieces; ++p)
      chunks.push_back(
          {begin + static_cast<int32_t>(length * p / pieces), begin + static_cast<int32_t>(length * (p + 1) / pieces)});
  }
  return chunks;
}

/// An exchange of chunk x of one rank for chunk y of another.
struct Exchange {
  Index x = 0, y = 0;
  double score = 0;
  bool found = false;
};

class Search {
 public:
  Search(std::span<const Visibility> masks, std::span<const int32_t> owner, int64_t chunk_units, int64_t ranks,
         double load_slack, int64_t work)
      : ranks_(static_cast<Index>(ranks)), limit_(1 + load_slack), work_(work) {
    c_.chunk = cut(owner, chunk_units);
    for (const Chunk& chunk : c_.chunk) c_.owner.push_back(owner[static_cast<Index>(chunk.begin)]);
    set_weights(masks, ranks, c_);
    set_seen(masks, c_);
    load_.assign(ranks_ * c_.masks, 0);
    times_.assign(ranks_ * c_.row_words() * 64, 0);
    any_.assign(ranks_ * c_.row_words(), 0);
    once_ = any_;
    own_ = any_;
    for (Index x = 0; x < c_.count(); ++x) put(x, c_.owner[x]);
    for (Index r = 0; r < ranks_; ++r) received_.push_back(count_received(r));
  }

  int64_t work_left() const { return work_; }

  bool balanced() const { return heaviest_load() <= limit_; }

  /// Levels loads: from the heaviest rank to any other, at the fewest keys for the load.
  void balance() {
    while (work_ > 0 && !balanced()) {
      if (!apply(best_for(heaviest_rank(), true), true)) return;
    }
  }

  /// Saves keys that the rank with most of them receives, within the slack.
  void save_keys() {
    std::vector<bool> done(ranks_, false);
    while (work_ > 0) {
      Index most = ranks_;
      for (Index r = 0; r < ranks_; ++r) {
        if (!done[r] && (most == ranks_ || received(r) > received(most))) most = r;
      }
      if (most == ranks_) return;
      if (apply(best_for(most, false), false)) {
        std::fill(done.begin(), done.end(), false);
      } else {
        done[most] = true;
      }
    }
  }

  std::vector<int32_t> unit_owners() const {
    std::vector<int32_t> owner;
    for (Index x = 0; x < c_.count(); ++x)
      owner.insert(owner.end(), static_cast<Index>(c_.chunk[x].size()), c_.owner[x]);
    return owner;
  }

 private:
  // --- State of a rank: its loads, and of each key chunk whether it is its own, and how many of its chunks see it ---

  double& load(Index rank, Index mask) { return load_[rank * c_.masks + mask]; }
  double load_of(Index rank) const {
    return *std::max_element(load_.begin() + static_cast<std::ptrdiff_t>(rank * c_.masks),
                             load_.begin() + static_cast<std::ptrdiff_t>((rank + 1) * c_.masks));
  }
  double heaviest_load() const { return load_.empty() ? 0 : *std::max_element(load_.begin(), load_.end()); }
  Index heaviest_rank() const {
    return static_cast<Index>(std::max_element(load_.begin(), load_.end()) - load_.begin()) / c_.masks;
  }

  void put(Index x, int32_t rank) { change(x, rank, 1); }
  void take(Index x, int32_t rank) { change(x, rank, -1); }
  void change(Index x, int32_t to, int by) {
    const auto rank = static_cast<Index>(to);
    for (Index m = 0; m < c_.masks; ++m) load(rank, m) += by * c_.weight[x * c_.masks + m];
    uint64_t* any = any_.data() + rank * c_.row_words();
    uint64_t* once = once_.data() + rank * c_.row_words();
    int32_t* times = times_.data() + rank * c_.row_words() * 64;
    for (Index w = 0; w < c_.row_words(); ++w) {
      for (uint64_t bits = c_.seen_by(x)[w]; bits; bits &= bits - 1) {
        const auto bit = static_cast<Index>(std::countr_zero(bits));
        const int32_t now = times[w * 64 + bit] += by;
        const uint64_t one = uint64_t{1} << bit;
        any[w] = now > 0 ? any[w] | one : any[w] & ~one;
        once[w] = now == 1 ? once[w] | one : once[w] & ~one;
      }
    }
    for (Index e = 0; e < c_.entries; ++e)
      own_[rank * c_.row_words() + e * c_.words + x / 64] ^= uint64_t{1} << (x % 64);
  }

  int64_t received(Index rank) const { return received_[rank]; }
  int64_t count_received(Index rank) const {
    int64_t count = 0;
    for (Index w = rank * c_.row_words(); w < (rank + 1) * c_.row_words(); ++w)
      count += std::popcount(any_[w] & ~own_[w]);
    return count;
  }

  /// How many key chunks fewer `rank` receives without its chunk x; negative if more: x itself then comes from another.
  int64_t saved_without(Index x, Index rank) const {
    const Index first = rank * c_.row_words();
    const uint64_t* sees = c_.seen_by(x);
    int64_t saved = 0;
    for (Index w = 0; w < c_.row_words(); ++w) saved += std::popcount(sees[w] & once_[first + w] & ~own_[first + w]);
    for (Index e = 0; e < c_.entries; ++e) {
      const Index w = e * c_.words + x / 64;
      const uint64_t others = any_[first + w] & ~(sees[w] & once_[first + w]);
      saved -= static_cast<int64_t>(others >> (x % 64) & 1);
    }
    return saved;
  }

  /// How many key chunks more `rank` receives with chunk y of another rank.
  int64_t added_with(Index y, Index rank) const {
    const Index first = rank * c_.row_words();
    const uint64_t* sees = c_.seen_by(y);
    int64_t added = 0;
    for (Index w = 0; w < c_.row_words(); ++w) added += std::popcount(sees[w] & ~any_[first + w] & ~own_[first + w]);
    for (Index e = 0; e < c_.entries; ++e) {
      const Index w = e * c_.words + y / 64;
      added -= static_cast<int64_t>((sees[w] | any_[first + w]) >> (y % 64) & 1);
    }
    return added;
  }

  // --- Exchanges ------------------------------------------------------------------------------------

  /// The larger of the two ranks' loads after chunk x of rank a was exchanged for chunk y of rank b.
  double load_after(Index x, Index a, Index y, Index b) const {
    double most = 0;
    for (Index m = 0; m < c_.masks; ++m) {
      const double moved = c_.weight[x * c_.masks + m] - c_.weight[y * c_.masks + m];
      most = std::max({most, load_[a * c_.masks + m] - moved, load_[b * c_.masks + m] + moved});
    }
    return most;
  }

  /// The best exchange of a chunk of `rank`: the most load for the keys that it costs, or the most keys within the
  /// slack. An exchange is taken to cost the sum of its four parts, even if both chunks see the same keys. Of equal
  /// exchanges the first.
  Exchange best_for(Index rank, bool levels) {
    std::vector<Index> own;
    std::vector<int64_t> saved;
    for (Index x = 0; x < c_.count(); ++x) {
      if (static_cast<Index>(c_.owner[x]) != rank) continue;
      own.push_back(x);
      saved.push_back(saved_without(x, rank));
    }
    const std::vector<bool> partner = partners(rank);
    std::vector<int64_t> added(own.size() * ranks_);  // by each chunk of `rank` to each partner
    for (Index n = 0; n < own.size(); ++n) {
      for (Index b = 0; b < ranks_; ++b) added[n * ranks_ + b] = partner[b] ? added_with(own[n], b) : 0;
    }
    work_ -= static_cast<int64_t>(own.size() * std::min(ranks_, kMostPartners) * c_.row_words() + c_.count());
    Exchange best;
    for (Index y = 0; y < c_.count(); ++y) {
      const auto b = static_cast<Index>(c_.owner[y]);
      if (!partner[b]) continue;
      const int64_t cost_y = added_with(y, rank) - saved_without(y, b);
      work_ -= static_cast<int64_t>(2 * c_.row_words());
      for (Index n = 0; n < own.size(); ++n) {
        const Index x = own[n];
        if (c_.chunk[x].size() != c_.chunk[y].size()) continue;
        const int64_t cost = cost_y + added[n * ranks_ + b] - saved[n];
        const double after = load_after(x, rank, y, b);
        const double score = levels ? levelling(rank, after, cost) : saving(rank, b, after, cost);
        if (score > best.score) best = {x, y, score, true};
      }
    }
    return best;
  }

  /// The ranks that `rank` may exchange with.
  std::vector<bool> partners(Index rank) const {
    std::vector<std::pair<double, Index>> others;
    for (Index b = 0; b < ranks_; ++b) {
      if (b != rank) others.emplace_back(load_of(b), b);
    }
    const Index count = std::min(others.size(), kMostPartners);
    std::partial_sort(others.begin(), others.begin() + static_cast<std::ptrdiff_t>(count), others.end());
    std::vector<bool> result(ranks_, false);
    for (Index n = 0; n < count; ++n) result[others[n].second] = true;
    return result;
  }

  /// Load taken off the heaviest rank, down to the limit, for each key chunk that it costs.
  double levelling(Index rank, double after, int64_t cost) const {
    const double gain = load_of(rank) - std::max(after, 1.0);
    if (gain <= kLeastGain) return 0;
    return gain / static_cast<double>(std::max<int64_t>(cost, 0) + 1);
  }

  double saving(Index a, Index b, double after, int64_t cost) const {
    if (after > std::max({limit_, load_of(a), load_of(b)}) + kLeastGain) return 0;
    return static_cast<double>(-cost);
  }

  /// Makes the exchange, and takes it back if it gains nothing: its cost was an estimate.
  bool apply(const Exchange& e, bool levels) {
    if (!e.found) return false;
    const int32_t a = c_.owner[e.x], b = c_.owner[e.y];
    const auto both = [&](auto f) { return std::pair(f(static_cast<Index>(a)), f(static_cast<Index>(b))); };
    const auto load = [&] {
      const auto [of_a, of_b] = both([this](Index r) { return load_of(r); });
      return std::max(of_a, of_b);
    };
    const auto keys = [&] {
      const auto [of_a, of_b] = both([this](Index r) { return received(r); });
      return of_a + of_b;
    };
    const double load_before = load();
    const int64_t keys_before = keys();
    swap(e, a, b);
    if (levels ? load() < load_before - kLeastGain : keys() < keys_before) return true;
    swap(e, b, a);
    return false;
  }

  void swap(const Exchange& e, int32_t a, int32_t b) {
    take(e.x, a), take(e.y, b);
    put(e.x, b), put(e.y, a);
    for (const int32_t rank : {a, b}) received_[static_cast<Index>(rank)] = count_received(static_cast<Index>(rank));
    c_.owner[e.x] = b, c_.owner[e.y] = a;
  }

  Index ranks_;
  double limit_;
  int64_t work_;
  Chunks c_;
  std::vector<double> load_;                // [ranks, masks], in mean loads
  std::vector<int64_t> received_;           // [ranks], in key chunks
  std::vector<int32_t> times_;              // [ranks, entries, words * 64]
  std::vector<uint64_t> any_, once_, own_;  // [ranks, entries, words]
};

}  // namespace

std::vector<int32_t> exchange(std::span<const Visibility> masks, std::vector<int32_t> owner, int64_t ranks,
                              double load_slack) {
  const auto units = static_cast<int64_t>(owner.size());
  int64_t chunk_units = std::max<int64_t>(1, units / (ranks * kFirstChunks));
  for (int64_t work = kMostWork;;) {
    Search search(masks, owner, chunk_units, ranks, load_slack, work);
    search.balance();
    search.save_keys();
    owner = search.unit_owners();
    work = search.work_left();
    if (search.balanced() || chunk_units == 1 || work <= 0) return owner;
    chunk_units = std::max<int64_t>(1, chunk_units / 2);
  }
}

}  // namespace flashmask::placement
