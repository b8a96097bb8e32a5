// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <utility>

#include "backends/cuda/device/variant.h"
#include "call/problem.h"
#include "common/message.h"

namespace flashmask::cuda {

/// The variant that a call's features and options ask for.
Variant asked_variant(const Problem& p);

/// The beginning of the ids of a tile's kernels: "sm90.fwd.bf16.d128.dv128.c3". `column` is the tile's third.
std::string id_of_tile(const char* arch, const char* op, DataType dtype, int head_dim, int head_dim_v, char column,
                       int value);

/// A kernel over tiles of a row of an architecture's tiles and of its variants.
template <typename Tile>
struct TileKernel {
  const Tile* tile = nullptr;
  const VariantRow* row = nullptr;
  std::string id{};
  CompiledKernel compiled{};
};

/// The kernels of an element type: a row for each of kTiles tiles, a column for each of kVariants variants, sparse.
template <typename Tile, std::size_t kTiles, std::size_t kVariants>
class KernelTable {
 public:
  using Kernel = TileKernel<Tile>;

  /// `make(tile, variant)`: called with a row and a column as integral constants; returns the kernel.
  template <typename Make>
  KernelTable(const Tile (&tiles)[kTiles], const Make& make) : tiles_(tiles) {
    [&]<std::size_t... cell>(std::index_sequence<cell...>) {
      ((kernels_[cell] = make(std::integral_constant<std::size_t, cell / kVariants>(),
                              std::integral_constant<std::size_t, cell % kVariants>())),
       ...);
    }(std::make_index_sequence<kTiles * kVariants>());
  }

  /// The kernel in which a call that asks for `asked` runs in tiles of `tile`, one of the table's; null if there is
  /// none.
  const Kernel* find(const Tile& tile, const Variant& asked) const {
    const std::size_t first = static_cast<std::size_t>(&tile - tiles_) * kVariants;
    for (std::size_t n = first; n < first + kVariants; ++n) {
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
  const Tile* tiles_;
  std::array<Kernel, kTiles * kVariants> kernels_;
};

}  // namespace flashmask::cuda
