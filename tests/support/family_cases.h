// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/random.h"
#include "flashmask/c_api.h"
#include "support/library_families.h"

/// Random parameters of every family that fm_mask_build knows, for tests.
namespace flashmask::test {

/// A vector of a family, int64 [batch, heads, n] or, with pairs, [batch, heads, n, 2].
struct FamilyVector {
  std::string name;
  std::vector<int64_t> values;
  int64_t batch = 1, heads = 1, count = 0;
  bool pairs = false;
  bool is_single = false;  ///< [batch, heads]

  /// The tensor of these values, wherever they were copied to.
  fm_tensor tensor(const void* data, fm_dtype dtype) const {
    fm_tensor t{};
    t.data = const_cast<void*>(data);
    t.dtype = dtype;
    std::vector<int64_t> shape{batch, heads};
    if (!is_single) shape.push_back(count);
    if (pairs) shape.push_back(2);
    t.ndim = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (std::size_t d = shape.size(); d-- > 0;) {
      t.shape[d] = shape[d];
      t.stride[d] = stride;
      stride *= std::max<int64_t>(shape[d], 1);
    }
    return t;
  }
};

struct FamilyCase {
  std::string family;
  std::vector<FamilyVector> vectors;
  std::vector<std::pair<std::string, int64_t>> numbers;
};

class FamilyCases {
 public:
  FamilyCases(uint64_t seed, int64_t longest) : random_(seed), longest_(longest) {}

  FamilyCase next(const std::string& family) {
    seqlen_ = random_.integer(0, 3) == 0 ? random_.integer(0, 3) : random_.integer(0, longest_);
    batch_ = random_.integer(0, 2) == 0 ? random_.integer(2, 3) : 1;
    heads_ = random_.integer(0, 2) == 0 ? random_.integer(2, 3) : 1;
    FamilyCase c{family, {}, {}};
    const auto number = [&c](const char* name, int64_t value) { c.numbers.push_back({name, value}); };
    const int64_t window = random_.integer(0, 2) == 0 ? -1 : random_.integer(1, longest_);
    if (family == "causal_document" || family == "document" || family == "causal_blockwise") {
      documents(c);
    } else if (family == "prefix_lm_document") {
      c.vectors.push_back(lengths("seqlens", seqlen_));
      FamilyVector prefix = c.vectors[0];
      prefix.name = "prefix";
      for (int64_t& value : prefix.values) value = random_.integer(0, value);
      c.vectors.push_back(prefix);
      number("seqlen", seqlen_);
    } else if (family == "shared_question") {
      c.vectors.push_back(lengths("seqlens", seqlen_));
      c.vectors.push_back(drawn("is_question", c.vectors[0].count, [this] { return random_.integer(0, 2) == 0; }));
      number("seqlen", seqlen_);
    } else if (family == "global_sliding_window") {
      number("seqlen", seqlen_);
      number("global_tokens", random_.integer(0, 9));
      number("window", random_.integer(0, longest_));
    } else if (family == "prefix_lm_causal") {
      number("seqlen", seqlen_);
      c.vectors.push_back(single("prefix", seqlen_));
    } else if (family == "qk_sparse") {
      number("seqlen", seqlen_);
      c.vectors.push_back(spans());
    } else if (family == "eviction") {
      c.vectors.push_back(drawn("evicted_at", seqlen_, [this] { return random_.integer(-2, seqlen_ + 2); }));
    } else if (family == "hash_sparse") {
      c.vectors.push_back(
          drawn("query_buckets", random_.integer(0, longest_), [this] { return random_.integer(0, 5); }));
      sort_rows(c.vectors[0]);
      c.vectors.push_back(drawn("key_buckets", seqlen_, [this] { return random_.integer(0, 6); }));
      number("causal", random_.integer(0, 1));
    } else if (family == "prefix_tree") {
      c.vectors.push_back(tree(random_.integer(0, std::min<int64_t>(longest_, 3000))));
      const int64_t nodes = c.vectors[0].count;
      c.vectors.push_back(drawn("lengths", nodes, [this] { return random_.integer(0, 3); }));
      number("seqlen", 3 * nodes);
      if (heads_ == 1) number("window", window);
    } else if (family == "prefix_tree_from_intervals") {
      intervals(c);
      number("window", window);
    } else if (family == "padding") {
      const int64_t rows = random_.integer(0, longest_);
      number("seqlen_q", rows);
      number("seqlen_k", seqlen_);
      c.vectors.push_back(single("key_lengths", seqlen_));
      if (random_.integer(0, 1)) c.vectors.push_back(single("query_lengths", rows));
    } else if (family == "attention_sink_window") {
      number("sink", random_.integer(0, 5));
      number("window", window);
      documents(c);
    } else if (family == "block_causal" || family == "block_diffusion") {
      documents(c);
      if (random_.integer(0, 1))
        number("blocks", random_.integer(1, 9));
      else
        c.vectors.push_back(lengths("blocks", seqlen_));
      if (family == "block_causal") number("window", window);
    } else if (family == "causal_with_blocks") {
      number("window", window);
      int64_t id = -1, left = 0;
      c.vectors.push_back(drawn("block_ids", seqlen_, [&] {
        if (left-- == 0) left = random_.integer(0, 9), id = random_.integer(0, 1) ? -1 : used_++;
        return id;
      }));
      if (random_.integer(0, 2)) documents(c);
      std::erase_if(c.numbers, [](const auto& given) { return given.first == "seqlen"; });
    } else if (family == "eagle3_ttt") {
      number("steps", random_.integer(1, 4));
      documents(c);
    } else if (family == "dflash") {
      documents(c);
      number("block", random_.integer(1, 5));
      c.vectors.push_back(drawn("anchors", random_.integer(0, 40), [this] { return random_.integer(0, seqlen_); }));
      sort_rows(c.vectors.back());
    } else if (family == "dilated_window") {
      number("seqlen", seqlen_);
      number("window", window);
      number("dilation", random_.integer(1, 9));
    }
    return c;
  }

 private:
  template <typename Draw>
  FamilyVector drawn(const std::string& name, int64_t count, Draw&& draw) {
    FamilyVector v{name, {}, batch_, heads_, count};
    for (int64_t n = 0; n < batch_ * heads_ * count; ++n) v.values.push_back(static_cast<int64_t>(draw()));
    return v;
  }
  FamilyVector single(const std::string& name, int64_t most) {
    FamilyVector v = drawn(name, 1, [&] { return random_.integer(0, most); });
    v.is_single = true;
    return v;
  }
  void sort_rows(FamilyVector& v) {
    for (auto at = v.values.begin(); at != v.values.end(); at += v.count) {
      std::sort(at, at + v.count);
      if (v.count == 0) break;
    }
  }
  /// Lengths, zeros among them, whose sum is `total` or less.
  FamilyVector lengths(const std::string& name, int64_t total) {
    const int64_t count = random_.integer(1, 12);
    FamilyVector v{name, {}, batch_, heads_, count};
    for (int64_t lead = 0; lead < batch_ * heads_; ++lead) {
      std::vector<int64_t> ends;
      for (int64_t n = 0; n < count; ++n) ends.push_back(random_.integer(0, total));
      std::sort(ends.begin(), ends.end());
      if (random_.integer(0, 1)) ends.back() = total;
      for (std::size_t n = 0; n < ends.size(); ++n) v.values.push_back(ends[n] - (n ? ends[n - 1] : 0));
    }
    return v;
  }
  /// Documents in a form of its own.
  void documents(FamilyCase& c) {
    FamilyVector v = lengths("seqlens", seqlen_);
    const int64_t form = random_.integer(0, 3);
    if (form < 2) c.numbers.push_back({"seqlen", seqlen_});
    if (form == 0) return c.vectors.push_back(v);
    FamilyVector other{form == 1   ? "cu_seqlens"
                       : form == 2 ? "doc_ids"
                                   : "position_ids",
                       {},
                       batch_,
                       heads_,
                       form == 1 ? v.count + 1 : seqlen_};
    for (int64_t lead = 0; lead < batch_ * heads_; ++lead) {
      int64_t end = 0;
      if (form == 1) other.values.push_back(0);
      for (int64_t n = 0; n <= v.count; ++n) {
        const int64_t length = n < v.count ? v.values[static_cast<std::size_t>(lead * v.count + n)] : seqlen_ - end;
        end += length;
        if (form == 1 && n < v.count) other.values.push_back(end);
        for (int64_t at = 0; form > 1 && at < length; ++at) other.values.push_back(form == 2 ? n * 7 - 3 : at);
      }
    }
    c.vectors.push_back(other);
  }
  FamilyVector spans() {
    FamilyVector v{"dropped", {}, batch_, heads_, random_.integer(0, 6), true};
    for (int64_t lead = 0; lead < batch_ * heads_; ++lead) {
      std::vector<int64_t> ends;
      for (int64_t n = 0; n < 2 * v.count; ++n) ends.push_back(random_.integer(0, seqlen_));
      std::sort(ends.begin(), ends.end());
      v.values.insert(v.values.end(), ends.begin(), ends.end());
    }
    return v;
  }
  /// Nodes in depth-first order: trees of every kind, chains and leaves among them.
  FamilyVector tree(int64_t nodes) {
    FamilyVector v{"parents", {}, batch_, heads_, nodes};
    for (int64_t lead = 0; lead < batch_ * heads_; ++lead) {
      const int64_t deep = random_.integer(0, 3);
      std::vector<int64_t> path;
      for (int64_t n = 0; n < nodes; ++n) {
        const auto depth = static_cast<int64_t>(path.size());
        const int64_t up = random_.integer(0, 9) < 3 * deep ? depth : random_.integer(0, depth);
        path.resize(static_cast<std::size_t>(up));
        v.values.push_back(path.empty() ? -1 : path.back());
        path.push_back(n);
      }
    }
    return v;
  }
  /// One tree for all: a root, its children one after the other.
  void intervals(FamilyCase& c) {
    batch_ = heads_ = 1;
    const int64_t own = random_.integer(0, 4), children = random_.integer(0, 5);
    FamilyVector tin{"tin", {0}, 1, 1, children + 1}, tout{"tout", {0}, 1, 1, children + 1};
    int64_t end = own;
    for (int64_t n = 0; n < children; ++n) {
      tin.values.push_back(end);
      tout.values.push_back(end += random_.integer(0, 6));
    }
    tout.values[0] = end;
    c.vectors = {tin, tout};
    c.numbers.push_back({"seqlen", end + random_.integer(0, 3)});
  }

  Random random_;
  int64_t longest_, seqlen_ = 0, batch_ = 1, heads_ = 1, used_ = 0;
};

/// Prefix trees of as many nodes as asked for: a chain, a root and its children, and one of which no branch is alike.
inline std::vector<FamilyCase> long_trees(int64_t nodes) {
  Random random(static_cast<uint64_t>(nodes));
  FamilyVector chain{"parents", {}, 1, 1, nodes}, star = chain, any = chain;
  for (int64_t n = 0; n < nodes; ++n) {
    chain.values.push_back(n - 1);
    star.values.push_back(n > 0 ? 0 : -1);
    int64_t parent = n - 1;
    while (parent >= 0 && random.integer(0, 1)) parent = any.values[static_cast<std::size_t>(parent)];
    any.values.push_back(parent);
  }
  std::vector<FamilyCase> cases;
  for (const FamilyVector& parents : {chain, star, any}) {
    FamilyVector lengths = parents;
    lengths.name = "lengths";
    for (int64_t& length : lengths.values) length = random.integer(0, 2);
    cases.push_back({"prefix_tree", {parents, lengths}, {{"seqlen", 2 * nodes}}});
  }
  return cases;
}

}  // namespace flashmask::test
