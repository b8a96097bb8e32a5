// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "flashmask/mask.h"
#include "flashmask/tensor.h"
#include "mask/families/family.h"
#include "mask/families/integers.h"

namespace flashmask::build {

/// A parameter by name: a vector, or, if that is undefined, a number.
struct Parameter {
  std::string_view name;
  TensorView vector{};
  int64_t number = 0;
};

/// Properties of a mask known before its vectors are built.
struct Shape {
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t batch = 1, heads = 1;
  Band band{};
  std::optional<int64_t> q_offset{};
  Form form{};

  bool causal() const { return form.edges == Edges::kCausal; }
};

/// How the segments of a sequence are given.
enum class SegmentForm { kNone /* one of all tokens */, kCuSeqlens, kSeqlens, kDocIds, kPositionIds };

/// True if a number per token gives the segments; step_of() is its increase within a segment.
constexpr bool is_per_token(SegmentForm form) {
  return form == SegmentForm::kDocIds || form == SegmentForm::kPositionIds;
}
constexpr int64_t step_of(SegmentForm form) { return form == SegmentForm::kPositionIds ? 1 : 0; }

struct GivenSegments {
  SegmentForm form = SegmentForm::kNone;
  std::string_view name;
  Integers values;
};

/// A parameter as it was read.
struct Value {
  std::string_view name;
  Integers vector{}, ends{};  ///< ends: the second of each pair
  int64_t number = 0;
  bool is_given = false;
};

/// A family and its parameters, checked but for the contents of vectors on a device.
struct Arguments {
  const Family* family = nullptr;
  Shape shape;
  Device device;
  int64_t seqlen = 0;  ///< tokens of the documents
  GivenSegments documents, blocks;
  int64_t block = 0;         ///< the length of every block; 0: given lengths
  int64_t* order = nullptr;  ///< contiguous [batch, heads, seqlen_k]; null: not asked for
  int32_t* unfit = nullptr;  ///< one number that becomes 1 if contents on a device make no mask of the family, else 0

  static constexpr std::size_t kMostValues = 6;
  std::array<Value, kMostValues> values{};  ///< one for each parameter of the family, in its order

  Leads leads() const { return {shape.batch, shape.heads}; }
  const Value& operator[](std::string_view name) const;
  Value& operator[](std::string_view name) { return const_cast<Value&>(std::as_const(*this)[name]); }
  int64_t number(std::string_view name) const { return (*this)[name].number; }
  const Integers& vector(std::string_view name) const { return (*this)[name].vector; }
  /// A number that is given.
  std::optional<int64_t> optional_number(std::string_view name) const {
    const Value& value = (*this)[name];
    return value.is_given ? std::optional(value.number) : std::nullopt;
  }
};

/// Reads a family's parameters: names, shapes and numbers, and the contents of vectors in host memory as far as lengths
/// follow from them. Throws kInvalidArgument naming what is wrong.
Arguments read_arguments(std::string_view family, std::span<const Parameter> parameters, Device device);

/// Throws unless the contents of all vectors, in host memory, make a mask of the family, as far as a build does not
/// find out.
void check_contents(const Arguments& arguments);

/// Destination of the vectors: null ones are not written. `stride` elements lie between neighbouring columns.
struct VectorOutput {
  int32_t *lts = nullptr, *lte = nullptr, *uts = nullptr, *ute = nullptr;
  int64_t stride = 1;
};

/// Destination of all of a mask.
struct Output {
  VectorOutput vectors{};
  int32_t* positions = nullptr;  ///< contiguous [batch, seqlen_k], where the shape has them
};

/// Builds the vectors in host memory, from contents that are checked. Throws kUnrepresentable, naming the first column
/// that does not fit two intervals, or kInvalidArgument, naming the first node of a tree that is not in its place.
void build_on_host(const Arguments& arguments, const Output& output);

/// The whole of it: a mask in host memory.
Mask build_mask(std::string_view family, const std::vector<Parameter>& parameters);

}  // namespace flashmask::build
