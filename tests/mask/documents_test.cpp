// SPDX-License-Identifier: Apache-2.0
// Documents from lengths, cu_seqlens, ids and position ids.
#include <gtest/gtest.h>

#include <limits>

#include "common/random.h"
#include "flashmask/builders.h"
#include "support/expect_error.h"

namespace flashmask::test {
namespace {

using Numbers = std::vector<int64_t>;

Numbers begins(const Documents& documents) {
  Numbers all;
  for (int64_t n = 0; n < documents.count(); ++n) all.push_back(documents.begin(n));
  all.push_back(documents.total());
  return all;
}

TEST(Documents, FromLengths) {
  const Documents documents = Documents::from_lengths(Numbers{3, 0, 1, 4});
  EXPECT_EQ(documents.count(), 4);
  EXPECT_EQ(documents.total(), 8);
  EXPECT_EQ(begins(documents), (Numbers{0, 3, 3, 4, 8}));
  EXPECT_EQ(documents.end(0), 3);
  EXPECT_EQ(documents.length(0), 3);
  EXPECT_EQ(documents.length(1), 0);
  EXPECT_EQ(documents.length(3), 4);
  EXPECT_EQ(Documents::from_lengths({}).count(), 0);
  EXPECT_EQ(Documents::from_lengths({}).total(), 0);
  EXPECT_EQ(Documents::from_lengths(Numbers{kMaxSeqlen}).total(), kMaxSeqlen);
}

TEST(Documents, FromLengthsErrors) {
  expect_invalid({"lengths[1] is -2", "at least 0"}, [] { Documents::from_lengths(Numbers{3, -2}); });
  expect_invalid({"more than 2147483647"}, [] { Documents::from_lengths(Numbers{kMaxSeqlen, 1}); });
  expect_invalid({"more than 2147483647"}, [] { Documents::from_lengths(Numbers{5, INT64_MAX}); });
}

TEST(Documents, FromCuSeqlens) {
  EXPECT_EQ(begins(Documents::from_cu_seqlens(Numbers{0, 3, 3, 4, 8})), (Numbers{0, 3, 3, 4, 8}));
  EXPECT_EQ(Documents::from_cu_seqlens(Numbers{0}).count(), 0);
}

TEST(Documents, FromCuSeqlensErrors) {
  expect_invalid({"cu_seqlens", "begin with 0"}, [] { Documents::from_cu_seqlens({}); });
  expect_invalid({"cu_seqlens", "begin with 0"}, [] { Documents::from_cu_seqlens(Numbers{1, 2}); });
  expect_invalid({"cu_seqlens[2] is 2", "3"}, [] { Documents::from_cu_seqlens(Numbers{0, 3, 2}); });
  expect_invalid({"cu_seqlens[1] is -1"}, [] { Documents::from_cu_seqlens(Numbers{0, -1}); });
  expect_invalid({"more than 2147483647"}, [] { Documents::from_cu_seqlens(Numbers{0, kMaxSeqlen + 1}); });
}

TEST(Documents, FromIds) {
  EXPECT_EQ(begins(Documents::from_ids(Numbers{7, 7, 7, -1, 0, 0})), (Numbers{0, 3, 4, 6}));
  EXPECT_EQ(begins(Documents::from_ids(Numbers{0})), (Numbers{0, 1}));
  EXPECT_EQ(Documents::from_ids({}).count(), 0);
}

TEST(Documents, FromIdsThatComeBack) {
  expect_invalid({"document id 4 comes back at position 3", "contiguous"},
                 [] { Documents::from_ids(Numbers{4, 4, 5, 4}); });
}

TEST(Documents, FromPositionIds) {
  // A new document wherever pos[i] != pos[i - 1] + 1, whatever it begins with.
  EXPECT_EQ(begins(Documents::from_position_ids(Numbers{0, 1, 2, 0, 1, 0})), (Numbers{0, 3, 5, 6}));
  EXPECT_EQ(begins(Documents::from_position_ids(Numbers{5, 6, 7})), (Numbers{0, 3}));
  EXPECT_EQ(begins(Documents::from_position_ids(Numbers{0, 0, 0})), (Numbers{0, 1, 2, 3}));
  EXPECT_EQ(begins(Documents::from_position_ids(Numbers{0, 1, 3, 4})), (Numbers{0, 2, 4}))
      << "a gap begins a document too";
  EXPECT_EQ(begins(Documents::from_position_ids(Numbers{3, 2, 1})), (Numbers{0, 1, 2, 3}));
  EXPECT_EQ(Documents::from_position_ids({}).count(), 0);
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();
  EXPECT_EQ(begins(Documents::from_position_ids(Numbers{kMost, kLeast, kLeast + 1})), (Numbers{0, 1, 3}))
      << "the successor of the largest is not the smallest";
}

TEST(Documents, AllFourWaysAgree) {
  Random random(1);
  for (int n = 0; n < 300; ++n) {
    Numbers lengths, cu{0}, ids, positions;
    const int64_t count = random.integer(0, 6);
    for (int64_t d = 0; d < count; ++d) {
      lengths.push_back(random.integer(1, 9));
      cu.push_back(cu.back() + lengths.back());
      for (int64_t t = 0; t < lengths.back(); ++t) {
        ids.push_back(100 - d);
        positions.push_back(t);
      }
    }
    const Numbers expected = begins(Documents::from_lengths(lengths));
    EXPECT_EQ(begins(Documents::from_cu_seqlens(cu)), expected);
    EXPECT_EQ(begins(Documents::from_ids(ids)), expected);
    EXPECT_EQ(begins(Documents::from_position_ids(positions)), expected);
  }
}

}  // namespace
}  // namespace flashmask::test
