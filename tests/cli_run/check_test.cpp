// SPDX-License-Identifier: Apache-2.0
// The check of `flashmask run` must find what is wrong: here results are spoiled in every way it looks for.
#include "run/check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "run/attention_run.h"
#include "run/dense_comparison.h"

namespace flashmask::run {
namespace {

constexpr int64_t kSeqlen = 150;

Packed packed_answers() {
  std::mt19937_64 engine(6);
  const auto text = [&] { return std::string(5 + engine() % 15, static_cast<char>('a' + engine() % 26)); };
  std::vector<Document> documents;
  for (int n = 0; n < 12; ++n)
    documents.push_back(make_document(Task::kRm, {{"prompt", text()}, {"answers", {text(), text(), text()}}}));
  return pack(Task::kRm, documents, kSeqlen);
}

/// Records of random letters.
Packed packed_words() {
  std::mt19937_64 engine(7);
  std::vector<Document> documents;
  for (int n = 0; n < 6; ++n) {
    std::string text(100, ' ');
    for (char& letter : text) letter = static_cast<char>('a' + engine() % 26);
    documents.push_back(make_document(Task::kPretrain, {{"text", text}}));
  }
  return pack(Task::kPretrain, documents, kSeqlen);
}

/// One long record of a single character for the task: equal tokens have equal values, so dq and dk cancel.
Packed packed_repetition(Task task) {
  const std::string text(kSeqlen / 3, '-');
  const nlohmann::json leaf{{"text", text}};
  const nlohmann::json record{{"text", text},
                              {"prompt", text},
                              {"response", text},
                              {"chosen", text},
                              {"rejected", "-"},
                              {"answers", {text, "-"}},
                              {"branches", {leaf, {{"text", "-"}}}}};
  const std::vector<Document> documents{make_document(task, record)};
  return pack(task, documents, kSeqlen);
}

/// A run of all sequences in one call, to be spoiled and checked.
class CheckedRun {
 public:
  explicit CheckedRun(DataType dtype, Packed packed = packed_answers(), const char* backend = "reference")
      : options_(options(dtype, backend)),
        packed_(std::move(packed)),
        projections_(options_.shape, kSeqlen, 1),
        bench_(options_, packed_, projections_, packed_.sequences),
        outputs_(bench_.make_outputs()) {
    bench_.load(0, packed_.sequences);
    bench_.run(packed_.mask(0, packed_.sequences), outputs_);
  }

  CheckFigures check(const Mask& mask) const {
    SampleCheck check(packed_, packed_.sequences, options_.shape, options_.dtype, 1, 2);
    check.check(0, packed_.sequences, mask, bench_.inputs(), outputs_);
    return check.figures();
  }
  CheckFigures check() const { return check(packed_.mask(0, packed_.sequences)); }
  const Packed& packed() const { return packed_; }
  Outputs& outputs() { return outputs_; }
  Workbench& bench() { return bench_; }

 private:
  static RunOptions options(DataType dtype, const char* backend) {
    RunOptions options;
    options.seqlen = kSeqlen;
    options.shape = {4, 2, 16};
    options.dtype = dtype;
    options.backend = backend;
    return options;
  }

  RunOptions options_;
  Packed packed_;
  Projections projections_;
  Workbench bench_;
  Outputs outputs_;
};

TEST(SampleCheck, PassesOnWhatTheBackendComputes) {
  for (const DataType dtype : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
    const CheckFigures figures = CheckedRun(dtype).check();
    EXPECT_TRUE(figures.passed()) << name(dtype);
    EXPECT_EQ(figures.rows, 256);
    EXPECT_EQ(figures.columns, 16);
    ASSERT_EQ(figures.accuracy.size(), 5u);
    for (const Accuracy& accuracy : figures.accuracy) {
      EXPECT_GT(accuracy.max_reference, 0.1) << accuracy.tensor;
      EXPECT_GT(accuracy.limit, 0) << accuracy.tensor;
    }
  }
}

/// Tensors that fail after `spoil`.
std::vector<std::string> failed_after(DataType dtype, const std::function<void(Outputs&)>& spoil) {
  CheckedRun run(dtype);
  spoil(run.outputs());
  const CheckFigures figures = run.check();
  std::vector<std::string> failed;
  for (const Accuracy& accuracy : figures.accuracy) {
    if (!accuracy.passed()) failed.push_back(accuracy.tensor);
  }
  EXPECT_EQ(figures.passed(), failed.empty());
  return failed;
}

void scale(Tensor& tensor, double factor) {
  for (int64_t at = 0; at < tensor.size(); ++at) tensor.set(at, tensor.at(at) * factor);
}

using Names = std::vector<std::string>;

TEST(SampleCheck, FindsWrongValuesInEachTensor) {
  for (const auto& [dtype, factor] :
       {std::pair{DataType::kFloat32, 1 + 1e-4f}, {DataType::kBFloat16, 1.1f}, {DataType::kFloat16, 1.02f}}) {
    SCOPED_TRACE(name(dtype));
    EXPECT_EQ(failed_after(dtype, [f = factor](Outputs& outputs) { scale(outputs.out, f); }), Names{"out"});
    EXPECT_EQ(failed_after(dtype, [f = factor](Outputs& outputs) { scale(outputs.lse, f); }), Names{"lse"});
    EXPECT_EQ(failed_after(dtype, [f = factor](Outputs& outputs) { scale(outputs.dq, f); }), Names{"dq"});
    EXPECT_EQ(failed_after(dtype, [f = factor](Outputs& outputs) { scale(outputs.dk, f); }), Names{"dk"});
    EXPECT_EQ(failed_after(dtype, [f = factor](Outputs& outputs) { scale(outputs.dv, f); }), Names{"dv"});
  }
}

void add_constant(Tensor& tensor, double value) {
  for (int64_t at = 0; at < tensor.size(); ++at) {
    if (tensor.at(at) != 0) tensor.set(at, tensor.at(at) + value);  // padding stays 0
  }
}

const Accuracy& accuracy_of(const CheckFigures& figures, std::string_view tensor) {
  return *std::ranges::find(figures.accuracy, tensor, &Accuracy::tensor);
}

/// A kernel's rounding passes where the gradients cancel, and an error of 1e-4 still does not.
TEST(SampleCheck, JudgesRepetitiveTextByWhatCancels) {
  for (const Task task : {Task::kPretrain, Task::kSft, Task::kDpo, Task::kRm, Task::kTree}) {
    for (const DataType dtype : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat16}) {
      SCOPED_TRACE(std::string(name(task)) + " " + std::string(name(dtype)));
      for (const char* backend : {"reference", "auto"}) {
        CheckedRun run(dtype, packed_repetition(task), backend);
        EXPECT_TRUE(run.check().passed()) << backend;
      }
      if (dtype != DataType::kFloat32) continue;
      for (Tensor Outputs::* gradient : {&Outputs::dq, &Outputs::dk}) {
        CheckedRun run(dtype, packed_repetition(task));
        add_constant(run.outputs().*gradient, 1e-4);
        EXPECT_FALSE(accuracy_of(run.check(), gradient == &Outputs::dq ? "dq" : "dk").passed());
      }
    }
  }
}

/// The sums that cancel loosen nothing where they do not.
TEST(SampleCheck, TheLimitOfOrdinaryTextFollowsTheGradient) {
  const CheckFigures figures = CheckedRun(DataType::kFloat32, packed_words()).check();
  for (const char* tensor : {"dq", "dk"}) {
    const Accuracy& accuracy = accuracy_of(figures, tensor);
    EXPECT_EQ(accuracy.limit, 1e-5 * accuracy.max_reference) << tensor;
  }
}

TEST(SampleCheck, FindsOneElementThatIsNotWritten) {
  CheckedRun run(DataType::kFloat32);
  run.outputs().dk.set(77, std::numeric_limits<float>::quiet_NaN());
  const CheckFigures figures = run.check();
  EXPECT_EQ(figures.unwritten_or_nan, 1);
  EXPECT_FALSE(figures.passed());
}

TEST(SampleCheck, FindsValuesInThePadding) {
  CheckedRun run(DataType::kFloat32);
  const auto at = std::find(run.packed().segment_ids.begin(), run.packed().segment_ids.end(), -1) -
                  run.packed().segment_ids.begin();
  ASSERT_LT(at, static_cast<std::ptrdiff_t>(run.packed().segment_ids.size()));
  run.outputs().dv.set(at * run.outputs().dv.stride() / kSeqlen, 1e-30f);
  EXPECT_EQ(run.check().dirty_padding, 1);
  run.outputs().lse.set((at / kSeqlen * 4 + 3) * kSeqlen + at % kSeqlen, 0);
  EXPECT_EQ(run.check().dirty_padding, 2);
  EXPECT_FALSE(run.check().passed());
}

TEST(SampleCheck, FindsAWrongMask) {
  CheckedRun run(DataType::kFloat32);
  // Answers that see each other: only the documents are kept apart.
  const Packed& packed = run.packed();
  MaskParts parts{.seqlen_q = kSeqlen, .seqlen_k = kSeqlen, .band = Band::causal(), .batch = packed.sequences};
  for (std::size_t at = 0; at < packed.segment_ids.size(); ++at) {
    const auto sequence_end = (at / kSeqlen + 1) * kSeqlen;
    std::size_t end = at;
    while (end < sequence_end && packed.segment_ids[end] == packed.segment_ids[at]) ++end;
    parts.lts.push_back(packed.segment_ids[at] < 0 ? 0 : static_cast<int32_t>(end - at / kSeqlen * kSeqlen));
  }
  const Mask wrong(parts);
  run.bench().run(wrong, run.outputs());
  const CheckFigures figures = run.check(wrong);
  EXPECT_FALSE(figures.passed());
  EXPECT_GT(figures.wrong_visibility, 0);
  for (const Accuracy& accuracy : figures.accuracy) EXPECT_FALSE(accuracy.passed()) << accuracy.tensor;
}

TEST(SampleCheck, FindsBranchesThatSeeEachOther) {
  std::mt19937_64 engine(8);
  const auto node = [&](const std::vector<nlohmann::json>& branches) {
    return nlohmann::json{{"text", std::string(3 + engine() % 9, 'x')}, {"branches", branches}};
  };
  std::vector<Document> documents;
  for (int n = 0; n < 6; ++n)
    documents.push_back(make_document(Task::kTree, node({node({node({}), node({})}), node({})})));
  const Packed packed = pack(Task::kTree, documents, kSeqlen);
  std::vector<int64_t> lengths;
  for (int64_t n = 0; n < 6; ++n) {
    lengths.push_back(
        std::count(packed.segment_ids.begin(), packed.segment_ids.begin() + kSeqlen, static_cast<int32_t>(n)));
  }
  std::erase(lengths, 0);
  const Mask trees = packed.mask(0, 1);
  MaskParts parts{.seqlen_q = kSeqlen, .seqlen_k = kSeqlen, .band = Band::causal()};
  int64_t end = 0;
  for (const int64_t length : lengths)
    parts.lts.insert(parts.lts.end(), static_cast<std::size_t>(length), static_cast<int32_t>(end += length));
  parts.lts.resize(kSeqlen, 0);

  RunOptions options;
  options.seqlen = kSeqlen;
  options.shape = {4, 2, 16};
  options.backend = "reference";
  const Projections projections(options.shape, kSeqlen, 1);
  Workbench bench(options, packed, projections, 1);
  bench.load(0, 1);
  Outputs outputs = bench.make_outputs();
  const auto check = [&](const Mask& mask) {
    bench.run(mask, outputs);
    SampleCheck sample_check(packed, 1, options.shape, options.dtype, 1, 2);
    sample_check.check(0, 1, mask, bench.inputs(), outputs);
    return sample_check.figures();
  };
  EXPECT_TRUE(check(trees).passed());
  const CheckFigures wrong = check(Mask(parts));
  EXPECT_GT(wrong.wrong_visibility, 0);
  for (const Accuracy& accuracy : wrong.accuracy) EXPECT_FALSE(accuracy.passed()) << accuracy.tensor;
}

TEST(DenseFigures, OneDifferenceIsEnough) {
  DenseFigures figures;
  EXPECT_TRUE(figures.equal());
  figures.equality = {{"out", true}, {"lse", true}};
  EXPECT_TRUE(figures.equal());
  figures.equality[1].equal = false;
  EXPECT_FALSE(figures.equal());
}

/// Whatever the seed, scores must be neither flat nor all on one key.
TEST(Projections, ElementsAndScoresHaveAboutUnitVariance) {
  const Packed packed = packed_answers();
  const AttentionShape shape{4, 2, 64};
  const Projections projections(shape, kSeqlen, 9);
  const auto make = [](int64_t heads) {
    return Tensor::attention(DataType::kFloat32, numerics::Layout::kBshd, 1, kSeqlen, heads, 64);
  };
  Tensor q = make(4), k = make(2), v = make(2);
  projections.fill(packed, 0, 1, 2, q, k, v);
  for (const Tensor* tensor : {&q, &k, &v}) {
    double sum = 0;
    for (int64_t at = 0; at < tensor->size(); ++at) sum += tensor->at(at) * tensor->at(at);
    EXPECT_NEAR(sum / static_cast<double>(tensor->size()), 1, 0.3);
  }
  double sum = 0;
  for (int64_t i = 0; i < kSeqlen; ++i) {
    for (int64_t j = 0; j < kSeqlen; ++j) {
      double score = 0;
      for (int64_t x = 0; x < 64; ++x) score += q.at(i * 256 + x) * k.at(j * 128 + x);
      sum += score * score / 64;
    }
  }
  EXPECT_NEAR(sum / (kSeqlen * kSeqlen), 1, 0.5);
}

TEST(Projections, DoNotDependOnHowSequencesAreDivided) {
  const Packed packed = packed_answers();
  ASSERT_GE(packed.sequences, 3);
  const AttentionShape shape{4, 2, 15};
  const Projections projections(shape, kSeqlen, 9);
  const auto make = [&](int64_t n, int64_t heads) {
    return Tensor::attention(DataType::kBFloat16, numerics::Layout::kBshd, n, kSeqlen, heads, 15);
  };
  Tensor q3 = make(3, 4), k3 = make(3, 2), v3 = make(3, 2), d3 = make(3, 4), q1 = make(1, 4), k1 = make(1, 2),
         v1 = make(1, 2), d1 = make(1, 4);
  projections.fill(packed, 0, 3, 2, q3, k3, v3);
  projections.fill(packed, 2, 1, 1, q1, k1, v1);
  fill_gradient(5, 0, 3, 2, d3);
  fill_gradient(5, 2, 1, 1, d1);
  const std::pair<const Tensor*, const Tensor*> pairs[] = {{&q3, &q1}, {&k3, &k1}, {&v3, &v1}, {&d3, &d1}};
  for (const auto& [three, one] : pairs) {
    for (int64_t at = 0; at < one->size(); ++at) ASSERT_EQ(three->at(2 * one->size() + at), one->at(at));
  }
}

}  // namespace
}  // namespace flashmask::run
