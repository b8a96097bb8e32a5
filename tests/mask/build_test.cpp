// SPDX-License-Identifier: Apache-2.0
// fm_mask_build: forms of parameters, what it refuses, and that the order of a step's entries does not matter.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "common/message.h"
#include "common/random.h"
#include "flashmask/builders.h"
#include "flashmask/c_api.h"
#include "mask/families/families.h"
#include "support/c_tensor.h"
#include "support/family_cases.h"

namespace flashmask::test {
namespace {

/// Parameters for one call, whose memory it holds.
class Parameters {
 public:
  void add(const char* name, int64_t number) { items_.push_back({name, {}, number}); }
  void add(const char* name, const fm_tensor& vector) { items_.push_back({name, vector, 0}); }
  const fm_mask_parameters* get() {
    all_ = {sizeof(all_), static_cast<uint32_t>(items_.size()), items_.data()};
    return &all_;
  }

 private:
  std::vector<fm_mask_parameter> items_;
  fm_mask_parameters all_{};
};

struct Built {
  fm_status status = FM_OK;
  std::string error;
  fm_mask mask{};
  std::vector<int32_t> bounds;
};

Built built(const char* family, Parameters& parameters) {
  Built b;
  b.mask.struct_size = sizeof(b.mask);
  b.status = fm_mask_shape(family, parameters.get(), &b.mask, nullptr);
  if (b.status == FM_OK) {
    const fm_tensor& t = b.mask.bounds;
    if (t.dtype != FM_NONE)
      b.bounds.assign(static_cast<std::size_t>(t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3]), -7);
    b.mask.bounds.data = b.bounds.data();
    b.status = fm_mask_build(family, parameters.get(), &b.mask, nullptr);
  }
  if (b.status != FM_OK) b.error = fm_last_error();
  return b;
}

template <typename T>
fm_tensor vector_of(const std::vector<T>& values) {
  return tensor(sizeof(T) == 8 ? FM_INT64 : FM_INT32, {static_cast<int64_t>(values.size())}, values.data());
}

void expect_refused(const char* family, Parameters& parameters, const std::string& part,
                    fm_status status = FM_INVALID_ARGUMENT) {
  const Built b = built(family, parameters);
  EXPECT_EQ(b.status, status) << family;
  EXPECT_NE(b.error.find(part), std::string::npos) << "'" << part << "' is not in: " << b.error;
}

TEST(MaskBuild, DocumentsInEveryForm) {
  const std::vector<int32_t> lengths{3, 2, 0, 4}, ends{0, 3, 5, 5, 9};
  const std::vector<int64_t> ids{7, 7, 7, -1, -1, 3, 3, 3, 3}, positions{0, 1, 2, 0, 1, 0, 1, 2, 3};
  const std::vector<int32_t> until{3, 3, 3, 5, 5, 9, 9, 9, 9};
  for (const auto& [name, vector] : {std::pair{"seqlens", vector_of(lengths)},
                                     {"cu_seqlens", vector_of(ends)},
                                     {"doc_ids", vector_of(ids)},
                                     {"position_ids", vector_of(positions)}}) {
    Parameters p;
    p.add(name, vector);
    const Built b = built("causal_document", p);
    EXPECT_EQ(b.status, FM_OK) << b.error;
    EXPECT_EQ(b.bounds, until) << name;
    EXPECT_EQ(b.mask.seqlen_q, 9);
    EXPECT_EQ(b.mask.seqlen_k, 9);
    EXPECT_TRUE(b.mask.flags & FM_CAUSAL);
  }
}

TEST(MaskBuild, TheVectorsOfTheBuilders) {
  const std::vector<int64_t> lengths{5, 1, 0, 6};
  Parameters p;
  p.add("seqlens", vector_of(lengths));
  const Built b = built("document", p);
  const Mask mask = masks::document(Documents::from_lengths(lengths));
  for (std::size_t j = 0; j < 12; ++j) {
    EXPECT_EQ(b.bounds[2 * j], mask.lts()[j]);
    EXPECT_EQ(b.bounds[2 * j + 1], mask.ute()[j]);
  }
}

TEST(MaskBuild, LeadingDimensionsAreTheMasksAndStridesAreHonoured) {
  // [2, 1, 2] of every second entry, and heads from another parameter.
  const std::vector<int64_t> lengths{1, -9, 3, -9, 2, -9, 2, -9};
  fm_tensor seqlens = tensor(FM_INT64, {2, 1, 2}, lengths.data());
  seqlens.stride[0] = 4;
  seqlens.stride[2] = 2;
  const std::vector<int32_t> prefix{0, 1, 1, 0, 1, 2};
  Parameters p;
  p.add("seqlens", seqlens);
  p.add("prefix", tensor(FM_INT32, {1, 3, 2}, prefix.data()));
  const Built b = built("prefix_lm_document", p);
  ASSERT_EQ(b.status, FM_OK) << b.error;
  EXPECT_EQ(b.mask.bounds.shape[0], 2);
  EXPECT_EQ(b.mask.bounds.shape[1], 3);
  EXPECT_EQ(b.mask.seqlen_k, 4);
  for (int64_t batch = 0; batch < 2; ++batch) {
    for (int64_t head = 0; head < 3; ++head) {
      const std::vector<int64_t> own{lengths[static_cast<std::size_t>(4 * batch)],
                                     lengths[static_cast<std::size_t>(4 * batch + 2)]};
      const std::vector<int64_t> its{prefix[static_cast<std::size_t>(2 * head)],
                                     prefix[static_cast<std::size_t>(2 * head + 1)]};
      const Mask mask = masks::prefix_lm_document(Documents::from_lengths(own), its);
      for (std::size_t j = 0; j < 4; ++j) {
        const std::size_t at = 2 * (static_cast<std::size_t>(batch * 3 + head) * 4 + j);
        EXPECT_EQ(b.bounds[at], mask.lts()[j]) << batch << head << j;
        EXPECT_EQ(b.bounds[at + 1], mask.ute()[j]) << batch << head << j;
      }
    }
  }
}

TEST(MaskBuild, BandsHaveNoVectors) {
  Parameters p;
  p.add("seqlen_q", 5);
  p.add("seqlen_k", 7);
  p.add("left", 2);
  const Built b = built("sliding_window", p);
  ASSERT_EQ(b.status, FM_OK) << b.error;
  EXPECT_EQ(b.mask.bounds.dtype, FM_NONE);
  EXPECT_EQ(b.mask.flags, FM_HAS_WINDOW);
  EXPECT_EQ(b.mask.window_left, 2);
  EXPECT_EQ(b.mask.window_right, 0);
}

TEST(MaskBuild, RefusesByName) {
  const std::vector<int64_t> lengths{3, 2}, negative{3, -2}, three{1, 1, 1};
  const std::vector<float> fractions{1.5f};
  const auto with = [&](const char* name, const fm_tensor& vector) {
    Parameters p;
    p.add("seqlens", vector_of(lengths));
    p.add(name, vector);
    return p;
  };
  Parameters none, both = with("doc_ids", vector_of(lengths)), unknown = with("lenghts", vector_of(lengths));
  expect_refused("causal_dokument", none, "unknown mask family 'causal_dokument'; known: full, causal");
  expect_refused("causal_document", none, "nothing is given; it must be one of cu_seqlens, seqlens");
  expect_refused("causal_document", both, "seqlens, doc_ids are given");
  expect_refused("causal_document", unknown, "causal_document has no parameter 'lenghts'; known: seqlen, cu_seqlens");
  Parameters wrong;
  wrong.add("seqlens", vector_of(negative));
  expect_refused("document", wrong, "seqlens[1] is -2; a length must be at least 0");
  Parameters fraction;
  fraction.add("seqlens", tensor(FM_FLOAT32, {1}, fractions.data()));
  expect_refused("document", fraction, "seqlens is float32 [1]; it must be int32 or int64");
  Parameters few = with("prefix", vector_of(three));
  expect_refused("prefix_lm_document", few, "prefix has 3 entries; it needs one for each of the 2 documents");
  Parameters shorter;
  shorter.add("seqlens", vector_of(lengths));
  shorter.add("seqlen", 4);
  expect_refused("document", shorter, "the sum of seqlens is 5; it must be at most the length of the sequence, 4");
  Parameters number;
  number.add("seqlens", 5);
  expect_refused("document", number, "nothing is given");
  Parameters queries;
  const std::vector<int64_t> mixed{0, 1, 0, 1, 0, 1, 0}, keys{0, 1};
  queries.add("query_buckets", vector_of(mixed));
  queries.add("key_buckets", vector_of(keys));
  expect_refused("hash_sparse", queries, "column 0 needs 3", FM_UNREPRESENTABLE);
}

TEST(MaskBuild, OutIsAsTheShapeSays) {
  const std::vector<int64_t> lengths{3, 2};
  Parameters p;
  p.add("seqlens", vector_of(lengths));
  Built b = built("document", p);
  b.mask.bounds.shape[3] = 4;
  EXPECT_EQ(fm_mask_build("document", p.get(), &b.mask, nullptr), FM_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fm_last_error()).find("out->bounds is int32 [1, 1, 5, 4]; it must be int32 [1, 1, 5, 2]"),
            std::string::npos)
      << fm_last_error();
  b.mask.bounds.shape[3] = 2;
  b.mask.bounds.data = nullptr;
  EXPECT_EQ(fm_mask_build("document", p.get(), &b.mask, nullptr), FM_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fm_last_error()).find("pointer is null"), std::string::npos) << fm_last_error();
}

/// Runs a step's entries in an order that no loop has, and a scan without carrying the step before, as a device may.
class AnyOrder {
 public:
  static constexpr bool kInOrder = false;
  explicit AnyOrder(const build::Leads& leads) : leads_(leads) {}
  const build::Leads& leads() const { return leads_; }

  template <typename T>
  T* array(int64_t count) {
    const auto bytes = static_cast<std::size_t>(leads_.count() * count) * sizeof(T);
    memory_.push_back(std::make_unique<unsigned char[]>(bytes));
    std::fill_n(memory_.back().get(), bytes, static_cast<unsigned char>(0xA5));
    return reinterpret_cast<T*>(memory_.back().get());
  }
  template <typename T>
  T* zeros(int64_t count) {
    T* const all = array<T>(count);
    std::fill_n(all, leads_.count() * count, T{});
    return all;
  }
  template <typename F>
  void each(int64_t count, const F& f) {
    for (int64_t l = leads_.count(); l-- > 0;) {
      for (int64_t n = count; n-- > 0;) {
        const F fresh = f;  // it remembers no search
        fresh(leads_[l], n);
      }
    }
  }
  template <typename F>
  void scan(int64_t count, const F& f) {
    for (int64_t l = 0; l < leads_.count(); ++l) {
      std::vector<int64_t> values, sums;
      int64_t sum = 0;
      for (int64_t n = count; n-- > 0;) f.prepare(leads_[l], n);
      for (int64_t n = 0; n < count; ++n) {
        values.push_back(f.value(leads_[l], n));
        sums.push_back(sum += values.back());
      }
      for (int64_t n = count; n-- > 0;)
        f.store(leads_[l], n, values[static_cast<std::size_t>(n)], sums[static_cast<std::size_t>(n)]);
    }
  }
  template <typename F>
  void minima(int64_t count, const F& f) {
    for (int64_t l = 0; l < leads_.count(); ++l) {
      std::map<std::pair<int, int64_t>, int32_t> least;
      for (int64_t n = count; n-- > 0;) {
        const int32_t value = f.value(leads_[l], n);
        for (const int power : {2, 1}) {
          const auto own = least.try_emplace({power, n >> (power * build::Minima::kRunBits)}, value).first;
          own->second = std::min(own->second, value);
        }
      }
      for (const auto& [of, value] : least) f.store(leads_[l], of.first, of.second, value);
    }
  }

 private:
  build::Leads leads_;
  std::vector<std::unique_ptr<unsigned char[]>> memory_;
};

/// A case's vectors by the steps in any order, as in order.
void expect_same_in_any_order(const FamilyCase& c) {
  std::vector<build::Parameter> parameters;
  for (const FamilyVector& v : c.vectors) {
    TensorView view;
    const fm_tensor t = v.tensor(v.values.data(), FM_INT64);
    view.data = t.data;
    view.dtype = DataType::kInt64;
    view.rank = t.ndim;
    std::copy_n(t.shape, 5, view.shape.begin());
    std::copy_n(t.stride, 5, view.stride.begin());
    parameters.push_back({v.name, view, 0});
  }
  for (const auto& [name, number] : c.numbers) parameters.push_back({name, {}, number});
  build::Arguments a = build::read_arguments(c.family, parameters, {});
  build::check_contents(a);
  const auto count = static_cast<std::size_t>(a.shape.batch * a.shape.heads * a.shape.seqlen_k);
  std::vector<int32_t> want(5 * count, -1), got(5 * count, -2);
  const auto output = [count](std::vector<int32_t>& all) {
    int32_t* const first = all.data();
    return build::Output{{first, first + count, first + 2 * count, first + 3 * count}, first + 4 * count};
  };
  if (!a.shape.form.has_positions) std::fill(want.end() - static_cast<int64_t>(count), want.end(), -2);
  std::vector<int64_t> wanted_order(a.family->has_order ? count : 0), got_order = wanted_order;
  if (a.family->has_order) a.order = wanted_order.data();
  build::build_on_host(a, output(want));
  if (a.family->has_order) a.order = got_order.data();
  AnyOrder run({a.shape.batch, a.shape.heads});
  build::build(run, a, output(got));
  ASSERT_EQ(got_order, wanted_order) << c.family;
  for (auto begin = wanted_order.begin(); begin != wanted_order.end(); begin += a.shape.seqlen_k) {
    std::sort(begin, begin + a.shape.seqlen_k);
    for (int64_t n = 0; n < a.shape.seqlen_k; ++n) ASSERT_EQ(begin[n], n) << c.family << ": no permutation";
  }
  ASSERT_TRUE(got == want) << c.family << ", seqlen_k " << a.shape.seqlen_k;
}

TEST(MaskBuild, StepsInAnyOrder) {
  FamilyCases cases(7, 130);
  for (const std::string& family : known_families()) {
    for (int repetition = 0; repetition < 40; ++repetition)
      ASSERT_NO_FATAL_FAILURE(expect_same_in_any_order(cases.next(family)));
  }
}

TEST(MaskBuild, AnOffsetThatNoMaskTakesIsRefusedWithItsShape) {
  constexpr int64_t kFarthest = int64_t{1} << 40;
  for (const char* family : {"causal", "sliding_window"}) {
    for (const int64_t q_offset : {-kFarthest, kFarthest, -kFarthest - 1, kFarthest + 1, INT64_MIN, INT64_MAX}) {
      Parameters p;
      p.add("seqlen_q", 3);
      p.add("q_offset", q_offset);
      if (family == std::string("sliding_window")) p.add("left", 1);
      fm_mask mask{};
      mask.struct_size = sizeof(mask);
      const bool fits = -kFarthest <= q_offset && q_offset <= kFarthest;
      EXPECT_EQ(fm_mask_shape(family, p.get(), &mask, nullptr), fits ? FM_OK : FM_INVALID_ARGUMENT);
      if (fits) continue;
      EXPECT_EQ(fm_last_error(), "q_offset is " + std::to_string(q_offset) + "; it must be between -2^40 and 2^40");
    }
  }
}

TEST(MaskBuild, ListsGoIntoTheSpaceThatOutBrings) {
  const std::vector<int64_t> lengths{4, 2};  // keys 6 and 7, the first block's, are hidden three times
  Parameters p;
  p.add("blocks", 2);
  p.add("seqlens", vector_of(lengths));
  p.add("concatenated", 1);
  expect_refused("block_diffusion", p, "column 6 needs 3", FM_UNREPRESENTABLE);
  std::vector<int32_t> bounds(48), column_ptr(13), intervals(2 * 64, -1);
  fm_mask out{};
  out.struct_size = sizeof(out);
  out.bounds = tensor(FM_INT32, {1, 1, 12, 4}, bounds.data());
  out.column_ptr = tensor(FM_INT32, {1, 1, 13}, column_ptr.data());
  ASSERT_EQ(fm_mask_build("block_diffusion", p.get(), &out, nullptr), FM_OK) << fm_last_error();
  EXPECT_EQ(out.intervals.data, nullptr);
  EXPECT_EQ(out.intervals.shape[0], column_ptr.back());
  out.bounds = tensor(FM_INT32, {1, 1, 12, 4}, bounds.data());
  out.intervals.data = intervals.data();
  ASSERT_EQ(fm_mask_build("block_diffusion", p.get(), &out, nullptr), FM_OK) << fm_last_error();
  EXPECT_EQ(out.bounds.dtype, FM_NONE);
  const auto first = static_cast<std::ptrdiff_t>(2 * column_ptr[6]),
             last = static_cast<std::ptrdiff_t>(2 * column_ptr[7]);
  EXPECT_EQ((std::vector<int32_t>(intervals.begin() + first, intervals.begin() + last)),
            (std::vector<int32_t>{0, 2, 4, 6, 10, 12}));
}

TEST(MaskBuild, ListsAreRefusedOnADevice) {
  Parameters p;
  p.add("seqlen", 9);
  p.add("dilation", 2);
  fm_mask mask{};
  mask.struct_size = sizeof(mask);
  fm_options options{};
  options.struct_size = sizeof(options);
  options.device = 1;  // the first of CUDA
  EXPECT_EQ(fm_mask_shape("dilated", p.get(), &mask, &options), FM_UNSUPPORTED);
  EXPECT_STREQ(fm_last_error(),
               "options->device is CUDA device 0; masks of dilated are built in host memory, as their "
               "columns may need interval lists");
  EXPECT_EQ(fm_mask_shape("dilated", p.get(), &mask, nullptr), FM_OK);
}

TEST(MaskBuild, PositionsOfATreeWithAWindow) {
  const std::vector<int64_t> parents{-1, 0, 0, -1}, lengths{2, 3, 1, 2};
  Parameters p;
  p.add("parents", vector_of(parents));
  p.add("lengths", vector_of(lengths));
  p.add("window", 3);
  fm_mask mask{};
  mask.struct_size = sizeof(mask);
  ASSERT_EQ(fm_mask_shape("prefix_tree", p.get(), &mask, nullptr), FM_OK) << fm_last_error();
  EXPECT_EQ(mask.flags, FM_HAS_WINDOW);
  EXPECT_EQ(mask.window_left, 2);
  EXPECT_EQ(mask.window_right, -1);
  ASSERT_EQ(mask.bounds.shape[3], 2);
  for (const fm_tensor& t : {mask.q_pos, mask.k_pos}) {
    ASSERT_EQ(t.ndim, 2);
    EXPECT_EQ(t.shape[0], 1);
    EXPECT_EQ(t.shape[1], 8);
  }
  std::vector<int32_t> bounds(16), positions(8, -7);
  mask.bounds.data = bounds.data();
  EXPECT_EQ(fm_mask_build("prefix_tree", p.get(), &mask, nullptr), FM_INVALID_ARGUMENT);
  EXPECT_STREQ(fm_last_error(), "out->q_pos has no data: its pointer is null");
  mask.q_pos.data = positions.data();
  mask.k_pos.data = bounds.data();
  EXPECT_EQ(fm_mask_build("prefix_tree", p.get(), &mask, nullptr), FM_INVALID_ARGUMENT);
  mask.k_pos.data = positions.data();
  ASSERT_EQ(fm_mask_build("prefix_tree", p.get(), &mask, nullptr), FM_OK) << fm_last_error();
  EXPECT_EQ(positions, (std::vector<int32_t>{0, 1, 2, 3, 4, 2, 0, 1}));
  EXPECT_EQ(bounds, (std::vector<int32_t>{6, 0, 6, 1, 5, 2, 5, 3, 5, 4, 6, 5, 8, 6, 8, 7}));
}

TEST(MaskBuild, AWindowOfATreeIsThatOfAllHeads) {
  const std::vector<int64_t> parents{-1, 0, -1, 0};
  for (const int64_t window : {0, -2}) {
    Parameters p;
    p.add("parents", vector_of(parents));
    p.add("window", window);
    expect_refused("prefix_tree", p, message("window is ", window, "; it must be at least 1, or -1"));
  }
  Parameters p;
  p.add("parents", tensor(FM_INT64, {1, 2, 2}, parents.data()));
  p.add("window", 3);
  expect_refused("prefix_tree", p, "the tree has 2 heads");
}

TEST(MaskBuild, LongTreesInAnyOrder) {
  // With 32 in a run: one run at the top, several, and two levels more.
  for (const int64_t nodes : {1, 31, 32, 33, 1024, 1025, 33000, 140000}) {
    for (const FamilyCase& c : long_trees(nodes)) ASSERT_NO_FATAL_FAILURE(expect_same_in_any_order(c)) << nodes;
  }
}

/// True if the steps in any order raise the flag for a tree.
bool is_unfit_in_any_order(const std::vector<int64_t>& parents) {
  const auto count = static_cast<int64_t>(parents.size());
  int32_t unfit = 7;
  std::vector<int32_t> until(parents.size());
  build::Arguments a = build::read_arguments(
      "prefix_tree",
      std::vector<build::Parameter>{
          {.name = "parents", .vector = TensorView::contiguous(parents.data(), DataType::kInt64, {count})}},
      {});
  a.unfit = &unfit;
  AnyOrder run({1, 1});
  build::build(run, a, build::Output{.vectors = {.lts = until.data()}});
  EXPECT_TRUE(unfit == 0 || unfit == 1) << unfit;
  return unfit != 0;
}

TEST(MaskBuild, ATreeWithoutNodesFits) { EXPECT_FALSE(is_unfit_in_any_order({})); }

TEST(MaskBuild, LongTreesThatDoNotFit) {
  for (const int64_t nodes : {40, 1100, 140000}) {
    std::vector<int64_t> parents(static_cast<std::size_t>(nodes), 1);  // the root's second child has most others
    parents[0] = -1, parents[1] = 0;
    EXPECT_FALSE(is_unfit_in_any_order(parents)) << nodes;
    parents[20] = 0;  // the subtree ends, and yet others follow
    EXPECT_TRUE(is_unfit_in_any_order(parents)) << nodes;
    std::fill(parents.begin() + 20, parents.end(), 0);
    EXPECT_FALSE(is_unfit_in_any_order(parents)) << nodes;
    for (const int64_t wrong : {nodes - 1, int64_t{-2}, INT64_MIN, INT64_MAX, int64_t{1} << 32}) {
      parents.back() = wrong;
      EXPECT_TRUE(is_unfit_in_any_order(parents)) << nodes << ", " << wrong;
    }
    parents.back() = 1;
    EXPECT_TRUE(is_unfit_in_any_order(parents)) << nodes;
  }
}

TEST(MaskBuild, TreesInDepthFirstOrderAlone) {
  Random random(9);
  int fitting = 0;
  for (int repetition = 0; repetition < 4000; ++repetition) {
    std::vector<int64_t> parents, path;
    bool in_order = true;
    const int64_t nodes = random.integer(1, 7);
    for (int64_t n = 0; n < nodes; ++n) {
      const int64_t parent =
          random.integer(0, 30) ? random.integer(std::max<int64_t>(n - 3, -1), n - 1) : random.integer(-3, 9);
      while (!path.empty() && path.back() != parent) path.pop_back();
      in_order &= parent == -1 || !path.empty();
      path.push_back(n);
      parents.push_back(parent);
    }
    Parameters p;
    p.add("parents", vector_of(parents));
    const Built b = built("prefix_tree", p);
    EXPECT_EQ(b.status, in_order ? FM_OK : FM_INVALID_ARGUMENT) << repetition << b.error;
    EXPECT_EQ(is_unfit_in_any_order(parents), !in_order) << repetition;
    fitting += in_order;
  }
  EXPECT_GT(fitting, 500);
  EXPECT_LT(fitting, 3500);
}

/// Which rows see a key of a hash-sparse mask, and how many runs of rows do not.
struct SeenByBucket {
  std::vector<bool> rows;
  int64_t hidden_runs = 0;
};

SeenByBucket seen_by_bucket(const std::vector<int64_t>& queries, int64_t key, int64_t first) {
  SeenByBucket seen{std::vector<bool>(queries.size()), 0};
  bool was_hidden = false;
  for (auto row = static_cast<std::size_t>(first); row < queries.size(); ++row) {
    seen.rows[row] = queries[row] == key;
    seen.hidden_runs += !seen.rows[row] && !was_hidden;
    was_hidden = !seen.rows[row];
  }
  return seen;
}

TEST(MaskBuild, HashSparseOfUnsortedQueries) {
  Random random(5);
  const std::vector<int64_t> buckets{INT64_MIN, -1, 0, INT64_MAX, int64_t{1} << 32};
  int fitting = 0, unfit = 0;
  for (int repetition = 0; repetition < 4000; ++repetition) {
    const auto draw = [&](int64_t count, int64_t of) {
      std::vector<int64_t> drawn;
      for (int64_t n = 0; n < count; ++n)
        drawn.push_back(n > 0 && random.integer(0, 1) ? drawn.back()
                                                      : buckets[static_cast<std::size_t>(random.integer(0, of))]);
      return drawn;
    };
    const std::vector<int64_t> queries = draw(random.integer(0, 24), 3), keys = draw(random.integer(1, 9), 4);
    const bool causal = random.integer(0, 1) != 0;
    const auto rows = static_cast<int64_t>(queries.size()), count = static_cast<int64_t>(keys.size());
    Parameters p;
    p.add("query_buckets", vector_of(queries));
    p.add("key_buckets", vector_of(keys));
    p.add("causal", causal);
    const Built b = built("hash_sparse", p);
    bool is_unfit = false;
    for (int64_t j = 0; j < count && !is_unfit; ++j) {
      const int64_t first = causal ? std::clamp<int64_t>(j - (count - rows), 0, rows) : 0;
      const SeenByBucket want = seen_by_bucket(queries, keys[static_cast<std::size_t>(j)], first);
      is_unfit = want.hidden_runs > 2;
      if (is_unfit) {
        EXPECT_EQ(b.status, FM_UNREPRESENTABLE);
        EXPECT_NE(b.error.find(message("column ", j, " needs ", want.hidden_runs, ";")), std::string::npos) << b.error;
      }
      for (int64_t row = first; row < rows && b.status == FM_OK; ++row) {
        const int32_t* const c = b.bounds.data() + 4 * j;
        const bool seen = !(row >= c[0] && row < c[1]) && !(row >= c[2] && row < c[3]);
        ASSERT_EQ(seen, want.rows[static_cast<std::size_t>(row)]) << "repetition " << repetition << ", " << row << j;
      }
    }
    (is_unfit ? unfit : fitting) += 1;
    EXPECT_EQ(b.status == FM_OK, !is_unfit) << b.error;
  }
  EXPECT_GT(fitting, 500);
  EXPECT_GT(unfit, 500);
}

}  // namespace
}  // namespace flashmask::test
