// SPDX-License-Identifier: Apache-2.0

// Every usable backend on the covering list, against the oracle under matrices that come from the families'
// definitions, not from the library's masks. `flashmask verify --covering --list` prints the list.

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "conformance/family_definitions.h"
#include "flashmask/attention.h"
#include "support/extent.h"
#include "support/independent_rule.h"
#include "verify/cached_cases.h"
#include "verify/case_masks.h"
#include "verify/covering_cases.h"
#include "verify/run_case.h"

namespace flashmask::test {
namespace {

using verify::Case;
using verify::DenseMask;

/// Reads the raw vectors by the second rule, for the few draws that a family's parameters leave out, and for cases
/// whose q_offset or positions move the band but not the intervals.
DenseMask dense_from_vectors(const Case& c) {
  const Mask mask = verify::make_mask(c);
  MaskParts parts = parts_of(mask);
  if (c.q_offset) parts.q_offset = c.q_offset;
  return {mask.batch(), mask.heads(), dense_by_rule(parts)};
}

bool in_window(const Case& c, int64_t position, int64_t j) {
  if (!c.window) return true;
  return (c.window->left < 0 || position - c.window->left <= j) &&
         (c.window->right < 0 || j <= position + c.window->right);
}

DenseMask dense_from_definition(const Case& c) {
  const int64_t mask_batch = std::max<int64_t>(c.mask_batch_count(), 1), mask_heads = c.mask_head_count();
  const verify::BlockGrid blocks = verify::draw_block_mask(c);
  const bool blocked = !blocks.keep.empty();
  DenseMask dense{
      std::max(mask_batch, blocked ? blocks.batch : 1), std::max(mask_heads, blocked ? blocks.heads : 1), {}};
  const int64_t shift = c.family == verify::kNoMask
                            ? c.seqlen_k - c.seqlen_q
                            : verify::square_length(c) - c.seqlen_q;  // row 0's row of the square
  const int64_t block_rows = (c.seqlen_q + 127) / 128, block_keys = (c.seqlen_k + 127) / 128;
  for (int64_t b = 0; b < dense.batch; ++b) {
    for (int64_t h = 0; h < dense.heads; ++h) {
      const FamilyParameters parameters =
          verify::draw_parameters(c, b * mask_batch / dense.batch, h * mask_heads / dense.heads);
      const Predicate sees = family_definition(c.family, parameters, verify::square_length(c));
      const int64_t offset = c.family == "causal" ? numbers(parameters, "q_offset").at(0) : 0;
      const int64_t block0 = blocked
                                 ? (b * blocks.batch / dense.batch * blocks.heads + h * blocks.heads / dense.heads) *
                                       block_rows * block_keys
                                 : 0;
      for (int64_t i = 0; i < c.seqlen_q; ++i) {
        for (int64_t j = 0; j < c.seqlen_k; ++j) {
          const bool kept =
              !blocked || blocks.keep[static_cast<std::size_t>(block0 + i / 128 * block_keys + j / 128)] != 0;
          dense.visible.push_back(kept && in_window(c, i + shift + offset, j) && sees(i + shift, j));
        }
      }
    }
  }
  return dense;
}

DenseMask independent_dense(const Case& c) {
  const bool told =
      static_cast<bool>(family_definition(c.family, verify::draw_parameters(c, 0, 0), verify::square_length(c)));
  const bool empty = c.seqlen_q == 0 || c.seqlen_k == 0;
  return told && !c.q_offset && !c.has_positions() && !empty ? dense_from_definition(c) : dense_from_vectors(c);
}

/// The dimensions of the list whose values must meet in pairs.
std::map<std::string, std::string> dimensions(const Case& c) {
  return {{"batch", std::to_string(c.batch)},
          {"lengths", std::to_string(c.seqlen_q) + "," + std::to_string(c.seqlen_k)},
          {"heads", std::to_string(c.heads_q) + "," + std::to_string(c.heads_kv)},
          {"head_dim", std::to_string(c.head_dim)},
          {"family", c.family},
          {"mask_heads", std::to_string(static_cast<int>(c.mask_heads))},
          {"block_mask", c.block_mask == verify::BlockMask::kNone ? "no" : "yes"},
          {"dtype", std::string(name(c.dtype))},
          {"layout", std::to_string(static_cast<int>(c.layout))}};
}

TEST(CoveringList, HasEveryPairOfValues) {
  const std::vector<Case> cases = verify::covering_cases();
  EXPECT_GE(cases.size(), 1500u);
  std::map<std::string, std::set<std::string>> values;
  std::set<std::string> pairs;
  for (const Case& c : cases) {
    const auto own = dimensions(c);
    for (const auto& [dimension, value] : own) {
      values[dimension].insert(value);
      for (const auto& [other, other_value] : own) {
        if (dimension < other) pairs.insert(dimension + "=" + value + " " + other + "=" + other_value);
      }
    }
  }
  for (const char* lengths : {"1,128", "64,192", "128,127", "127,128", "239,203", "799,211", "113,211", "300,300",
                              "1023,1024", "1024,1023", "2048,2048", "0,0"}) {
    EXPECT_TRUE(values["lengths"].count(lengths)) << lengths;
  }
  for (const char* heads : {"1,1", "4,1", "4,4", "6,2", "14,1", "16,4"})
    EXPECT_TRUE(values["heads"].count(heads)) << heads;
  for (const char* dim : {"8", "256"}) EXPECT_TRUE(values["head_dim"].count(dim)) << dim;
  for (const KernelInfo& kernel : kernels()) {
    if (kernel.head_dim == 0) continue;
    EXPECT_TRUE(values["head_dim"].count(std::to_string(kernel.head_dim))) << kernel.id;
  }
  EXPECT_EQ(values["batch"].size(), 9u);
  EXPECT_GT(values["family"].size(), families().size());  // random matrices, too
  for (const auto& [dimension, own] : values) {
    for (const auto& [other, other_values] : values) {
      if (dimension >= other) continue;
      for (const std::string& value : own) {
        for (const std::string& other_value : other_values) {
          const std::string pair = dimension + "=" + value + " " + other + "=" + other_value;
          EXPECT_TRUE(pairs.count(pair)) << pair << " is not covered";
        }
      }
    }
  }
}

TEST(Conformance, EveryBackendOnTheCoveringList) {
  for (const BackendInfo& backend : backends()) {
    if (!backend.usable || backend.name == "reference") continue;  // the reference is the oracle
    std::vector<Case> cases;
    const std::vector<Case> all =
        verify::covering_cases(backend.name == "cuda" ? verify::cuda_values() : verify::CoveringValues{});
    for (std::size_t n = 0; n < all.size(); n += static_cast<std::size_t>(stride())) cases.push_back(all[n]);
    std::size_t passed = 0, skipped = 0;
    const verify::RunOptions options{.backend = backend.name, .dense = independent_dense};
    verify::run_cases(cases, options, 0, [&](std::size_t index, const verify::Verdict& verdict) {
      skipped += verdict.passed() && !verdict.skipped.empty();
      passed += verdict.passed();
      if (verdict.passed()) return;
      std::string text = backend.name + ": case " + describe(cases[index]);
      for (const std::string& failure : verdict.failures) text += "\n  " + failure;
      ADD_FAILURE() << text;
    });
    std::printf("%s: %zu of %zu cases passed, %zu of them skipped\n", backend.name.c_str(), passed, cases.size(),
                skipped);
    EXPECT_EQ(passed, cases.size());
    EXPECT_LE(skipped, cases.size() / 2) << "too little is checked";
  }
}

TEST(Conformance, EveryBackendOnTheCoveringListOfCaches) {
  std::vector<verify::AnyCase> cases;
  for (const verify::CachedCase& c : verify::covering_cached_cases()) cases.emplace_back(c);
  for (const BackendInfo& backend : backends()) {
    if (!backend.usable) continue;
    std::size_t skipped = 0;
    const verify::RunOptions options{.backend = backend.name};
    verify::run_cases(cases, options, 0, [&](std::size_t index, const verify::Verdict& verdict) {
      skipped += !verdict.skipped.empty();
      std::string text = backend.name + ": case " + describe(cases[index]);
      for (const std::string& failure : verdict.failures) text += "\n  " + failure;
      if (!verdict.passed()) ADD_FAILURE() << text;
    });
    std::printf("%s: %zu cases over caches, %zu of them skipped\n", backend.name.c_str(), cases.size(), skipped);
    EXPECT_EQ(skipped, backend.name == "cuda" ? cases.size() : 0) << backend.name;
  }
}

}  // namespace
}  // namespace flashmask::test
