// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::cuda {

/// The type a kernel sums dq up in: floats, integers (deterministic mode), or either, as a call asks.
enum class DqSum : uint8_t { kFloats, kIntegers, kEither };

/// Additions to plain attention that a kernel over tiles makes, or that a call asks for.
struct Variant {
  DqSum sum = DqSum::kFloats;
  bool scores = false;  ///< that are not products alone: the policy FeatureScore
  bool dropout = false, sink = false, positions = false;
  bool partial = false;      ///< leaves out in fp32
  bool split = false;        ///< leaves parts of dk and dv, or all of them, in fp32
  bool float8 = false;       ///< reads a cache of e4m3
  bool shares_rows = false;  ///< has two CTAs of a cluster share each work tile's rows

  /// True if its kernel runs a call that asks for `asked`. A feature that the call lacks costs only time.
  constexpr bool takes(const Variant& asked) const {
    const bool has_features = (scores || !asked.scores) && (dropout || !asked.dropout) && (sink || !asked.sink) &&
                              (positions || !asked.positions);
    return has_features && (sum == DqSum::kEither || sum == asked.sum) && partial == asked.partial &&
           split == asked.split && float8 == asked.float8 && shares_rows == asked.shares_rows;
  }
  /// True if its kernel reads FeatureParams.
  constexpr bool has_features() const { return scores || dropout || sink || positions; }
};

/// The kernels of a tile that one translation unit has.
enum class Unit : uint8_t { kPlain, kFeatures, kPartial, kFloat8 };

/// The features that a tile has kernels for: all, all over caches of e4m3, too, all and, of plain calls, kernels that
/// share rows, all but dropout, or none that changes the loop over tiles. For a variant: the tiles that it is for.
enum class TileFeatures : uint8_t { kAny, kAll, kAllAndFloat8, kAllAndSharedRows, kNoDropout, kNone };

/// A row of an architecture's table of variants. A call runs in a tile's first variant that takes it.
struct VariantRow {
  Unit unit;
  TileFeatures tiles;
  const char* suffix;  ///< ends the kernel's id
  Variant variant;

  template <typename Tile>
  constexpr bool is_of(const Tile& tile) const {
    return tiles == TileFeatures::kAny || tiles == tile.features ||
           (tiles == TileFeatures::kAll && tile.features == TileFeatures::kAllAndSharedRows);
  }
};

/// A kernel over tiles as it is compiled.
struct CompiledKernel {
  const void* entry = nullptr;
  int threads = 0, shared_bytes = 0;
};

}  // namespace flashmask::cuda
