// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>

#include "backends/cuda/device/variant.h"
#include "call/problem.h"
#include "common/message.h"

namespace flashmask::cuda {

/// The variant that a call's features and options ask for.
Variant asked_variant(const Problem& p);

/// The beginning of the ids of a tile's kernels: "sm90.fwd.bf16.d128.dv128.c3". `column` is the tile's third.
std::string tile_kernel_id(const char* arch, const char* op, DataType dtype, int head_dim, int head_dim_v, char column,
                           int value);

/// A kernel over tiles of a row of an architecture's tiles and of its variants.
template <typename Tile>
struct TileKernel {
  const Tile* tile = nullptr;
  const VariantRow* row = nullptr;
  std::string id{};
  CompiledKernel compiled{};
};

/// The kernels of an element type: a row for each of kTiles, a column for each of kVariants, sparse.
template <const auto& kTiles, const auto& kVariants>
class KernelTable {
 public:
  using Tile = std::remove_cvref_t<decltype(kTiles[0])>;
  using Kernel = TileKernel<Tile>;

  /// The table of an element type of kDataTypes. `id(dtype, tile)` begins the ids of a tile's kernels, `compiled` gives
  /// one: it is called with an element type, a tile and the number of a variant that is_of the tile as template
  /// arguments.
  template <typename Id, typename Compiled>
  static const KernelTable& of(DataType dtype, const Id& id, const Compiled& compiled) {
    static const KernelTable bf16 = make<DataType::kBFloat16>(id, compiled),
                             f16 = make<DataType::kFloat16>(id, compiled);
    return dtype == DataType::kBFloat16 ? bf16 : f16;
  }

  /// The kernel in which a call that asks for `asked` runs in tiles of `tile`, one of the table's; null if there is
  /// none.
  const Kernel* find(const Tile& tile, const Variant& asked) const {
    const std::size_t first = static_cast<std::size_t>(&tile - kTiles) * kColumns;
    for (std::size_t n = first; n < first + kColumns; ++n) {
      if (kernels_[n].compiled.entry && kernels_[n].row->variant.takes(asked)) return &kernels_[n];
    }
    return nullptr;
  }
  /// Calls `visit` with each kernel that there is.
  template <typename Visit>
  void for_each(const Visit& visit) const {
    for (const Kernel& kernel : kernels_) {
      if (kernel.compiled.entry) visit(kernel);
    }
  }

 private:
  static constexpr std::size_t kColumns = std::size(kVariants), kCells = std::size(kTiles) * kColumns;

  template <DataType dtype, typename Id, typename Compiled>
  static KernelTable make(const Id& id, const Compiled& compiled) {
    KernelTable table;
    [&]<std::size_t... cell>(std::index_sequence<cell...>) {
      ((table.kernels_[cell] = make_kernel<dtype, cell / kColumns, cell % kColumns>(id, compiled)), ...);
    }(std::make_index_sequence<kCells>());
    return table;
  }
  template <DataType dtype, std::size_t tile, std::size_t variant, typename Id, typename Compiled>
  static Kernel make_kernel(const Id& id, const Compiled& compiled) {
    constexpr const VariantRow& row = kVariants[variant];
    if constexpr (row.is_of(kTiles[tile])) {
      return {&kTiles[tile], &row, message(id(dtype, kTiles[tile]), row.suffix),
              compiled.template operator()<dtype, kTiles[tile], variant>()};
    } else {
      return {};
    }
  }

  std::array<Kernel, kCells> kernels_;
};

}  // namespace flashmask::cuda
