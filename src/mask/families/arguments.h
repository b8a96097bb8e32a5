// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "flashmask/mask.h"
#include "flashmask/tensor.h"
#include "mask/families/integers.h"

namespace flashmask::build {

enum class Kind {
  kFull,
  kCausal,
  kSlidingWindow,
  kCausalDocument,
  kDocument,
  kPrefixLmDocument,
  kCausalBlockwise,
  kSharedQuestion,
  kGlobalSlidingWindow,
  kPrefixLmCausal,
  kQkSparse,
  kEviction,
  kHashSparse,
  kPrefixTree,
  kPrefixTreeFromIntervals,
  kPadding,
  kAttentionSinkWindow,
  kBlockCausal,
  kCausalWithBlocks,
  kBlockDiffusion,
  kEagle3Ttt,
  kDflash,
};

/// A parameter by name: a vector, or, if that is undefined, a number.
struct Parameter {
  std::string_view name;
  TensorView vector{};
  int64_t number = 0;
};

/// The vectors that a family writes, in the order of FlashMask's forms.
enum Vectors : uint32_t { kLts = 1, kLte = 2, kUts = 4, kUte = 8 };

/// What is known of a mask before its vectors are built.
struct Shape {
  int64_t seqlen_q = 0, seqlen_k = 0;
  int64_t batch = 1, heads = 1;
  Band band{};
  bool causal = false;  ///< the band is causal, and the vectors are LTS or LTS, LTE
  std::optional<int64_t> q_offset{};
  uint32_t vectors = 0;        ///< those that say something; 0: the mask is a band
  bool has_positions = false;  ///< of rows and keys, which are the same, [batch, seqlen_k]; the band compares them

  /// How many numbers a column takes in FlashMask's forms: 0, 1, 2 or 4.
  int64_t numbers() const {
    if (vectors == 0) return 0;
    if (causal) return vectors & kLte ? 2 : 1;
    return vectors & (kLte | kUts) ? 4 : 2;
  }
};

/// How the segments of a sequence are given.
enum class Form { kNone /* one of all tokens */, kCuSeqlens, kSeqlens, kDocIds, kPositionIds };

/// Whether the tokens' numbers give them, and how these go up within a segment.
constexpr bool are_of_tokens(Form form) { return form == Form::kDocIds || form == Form::kPositionIds; }
constexpr int64_t step_of(Form form) { return form == Form::kPositionIds ? 1 : 0; }

struct GivenSegments {
  Form form = Form::kNone;
  std::string_view name;
  Integers values;
};

/// A family and its parameters, checked but for the contents of vectors on a device.
struct Arguments {
  Kind kind{};
  Shape shape;
  Device device;
  int64_t seqlen = 0;  ///< tokens of the documents
  GivenSegments documents, blocks;
  Integers prefix, is_question, span_begin, span_end, evicted_at, query_buckets, key_buckets, parents, tin, tout;
  Integers key_lengths, query_lengths, block_ids, anchors;
  int64_t window = -1 /* all */, sink = 0, block = 0, steps = 0, global_tokens = 0;
  bool concatenated = false;
  int64_t* order = nullptr;  ///< of block_diffusion, contiguous [batch, heads, seqlen_k]; null: not asked for
  int32_t* unfit = nullptr;  ///< one number that becomes 1 if contents on a device make no mask of the family, else 0
};

/// Reads a family's parameters: names, shapes and numbers, and the contents of vectors in host memory as far as lengths
/// follow from them. Throws kInvalidArgument naming what is wrong.
Arguments read_arguments(std::string_view family, std::span<const Parameter> parameters, Device device);

/// Throws unless the contents of all vectors, in host memory, make a mask of the family, as far as a build does not
/// find out.
void check_contents(const Arguments& arguments);

/// Where the vectors go: null ones are not written. `stride` elements lie between neighbouring columns.
struct VectorOutput {
  int32_t *lts = nullptr, *lte = nullptr, *uts = nullptr, *ute = nullptr;
  int64_t stride = 1;
};

/// Where all of a mask goes.
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
