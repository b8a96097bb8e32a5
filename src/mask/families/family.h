// SPDX-License-Identifier: Apache-2.0
#pragma once

// Description of a mask family without its arguments: its name, its parameters and the form of its masks.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flashmask::build {

/// How a parameter is given. Before a vector's own dimensions may come the mask's batch and heads.
enum class Kind {
  kLength,            ///< a number of tokens
  kNumber,            ///< a number
  kReach,             ///< a number of at least 1, or -1: all
  kFlag,              ///< 0 or 1
  kTokens,            ///< [..., seqlen], an entry for each token, which gives the sequence its length
  kVector,            ///< [..., n]
  kFlags,             ///< [..., n], also bool or uint8
  kSingle,            ///< a number, [batch] or [batch, heads]
  kPairs,             ///< [..., n, 2]
  kBlocks,            ///< a number, the length of every block, or their lengths [..., n]
  kDocuments,         ///< one of cu_seqlens, seqlens, doc_ids and position_ids, and seqlen
  kDocumentsOrOne,    ///< as kDocuments, or seqlen alone: one document of all
  kDocumentsOfTokens  ///< as kDocumentsOrOne, without seqlen, which a parameter of kTokens gives
};

/// A parameter of a family.
struct Declared {
  std::string_view name;
  Kind kind;
  std::string_view doc;
  int64_t least = INT64_MIN;           ///< lower bound of a kNumber
  std::optional<int64_t> otherwise{};  ///< the number that stands for one left out
  bool is_optional = false;            ///< may be left out, though no number stands for it
};

inline constexpr Declared kDocuments{"documents", Kind::kDocuments, "packed one after the other"};
inline constexpr Declared kDocumentsOrOne{"documents", Kind::kDocumentsOrOne, "packed one after the other"};
inline constexpr Declared kBlocks{"blocks", Kind::kBlocks, "of each document, counted from where it begins"};
inline constexpr Declared kSeqlen{"seqlen", Kind::kLength, "rows and keys"};
inline constexpr Declared kOptionalSeqlen{
    .name = "seqlen", .kind = Kind::kLength, .doc = "rows and keys", .is_optional = true};
inline constexpr Declared kWindow{
    .name = "window", .kind = Kind::kReach, .doc = "how far a row sees, itself included", .otherwise = -1};

/// The vectors that a family writes, in the order of FlashMask's forms.
enum Vectors : uint32_t { kLts = 1, kLte = 2, kUts = 4, kUte = 8 };

/// The band of a family's masks.
enum class Edges {
  kNone,
  kCausal,    ///< j <= i + q_offset, as the mask's flag `causal` says it
  kDiagonal,  ///< j <= i + q_offset, said as a window
  kReach,     ///< the parameter `window` less 1 before the row, everything after it
  kGiven      ///< the parameters `left` and `right`
};

/// The form of a family's masks, which follows from numbers alone.
struct Form {
  uint32_t vectors = 0;  ///< that say something; 0: the mask is a band
  Edges edges = Edges::kNone;
  bool has_positions = false;  ///< rows and keys share them; the band compares them
  /// The requirement that contents on a device may break, which the build finds out; empty if there is none.
  std::string_view misfit{};
  bool has_lists = false;  ///< in host memory, columns that the vectors cannot say become interval lists

  /// Masks of host memory alone, whose vectors, if no column needs a list, follow from the mask.
  constexpr bool is_listed() const { return has_lists && vectors == 0; }
  /// How many numbers a column takes in FlashMask's forms: 0, 1, 2 or 4.
  constexpr int64_t numbers() const {
    if (vectors == 0) return 0;
    if (edges == Edges::kCausal) return vectors & kLte ? 2 : 1;
    return vectors & (kLte | kUts) ? 4 : 2;
  }
};

struct Family {
  std::string_view name;
  std::span<const Declared> parameters;
  Form form;
  std::string_view option{};  ///< the number that makes the form `other`, if it is not its default
  Form other{};
  bool has_order = false;  ///< writes order_out, the order in which its tokens lie, beside the mask
};

/// Families by their types, each of which has a `kFamily`.
template <typename... Own>
struct FamilyList {};

/// Every family, in the order in which errors list them.
std::span<const Family* const> all_families();

/// All families as JSON, see fm_mask_families_json.
std::string families_json();

/// The names of all that a family takes.
std::vector<std::string_view> names_of(const Family& family);

}  // namespace flashmask::build
