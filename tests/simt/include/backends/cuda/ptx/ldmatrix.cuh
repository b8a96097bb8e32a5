// SPDX-License-Identifier: Apache-2.0
#pragma once

// In place of the header of this name.

#include <cstdint>
#include <cstring>

#include "simt/device.h"

namespace flashmask::ptx {
namespace simulated {

struct MatrixLoad {
  uint32_t address;
  const unsigned char* row;
  uint32_t* r;
};

/// Element `column` of row `row` of matrix m, of which lane 8m + row gave the address.
inline uint32_t element(simt::Operands lanes, int m, int row, int column) {
  uint16_t bits;
  std::memcpy(&bits, static_cast<const MatrixLoad*>(lanes[8 * m + row])->row + 2 * column, sizeof(bits));
  return bits;
}

template <bool transposed>
void load_matrices(simt::Operands lanes) {
  uint32_t addresses[32];
  for (int lane = 0; lane < 32; ++lane) addresses[lane] = static_cast<const MatrixLoad*>(lanes[lane])->address;
  simt::count_matrix_load(addresses);
  for (int lane = 0; lane < 32; ++lane) {
    const int along = lane / 4, across = 2 * (lane % 4);
    for (int m = 0; m < 4; ++m) {
      const uint32_t low = transposed ? element(lanes, m, across, along) : element(lanes, m, along, across),
                     high = transposed ? element(lanes, m, across + 1, along) : element(lanes, m, along, across + 1);
      static_cast<MatrixLoad*>(lanes[lane])->r[m] = high << 16 | low;
    }
  }
}

template <bool transposed>
void load(const char* what, uint32_t address, uint32_t (&r)[4], simt::Place place) {
  MatrixLoad own{address, simt::matrix_row(what, address, place), r};
  simt::meet(what, simt::kWholeWarp, place, &own, load_matrices<transposed>);
}

}  // namespace simulated

inline void ldmatrix_x4(uint32_t address, uint32_t (&r)[4], simt::Place place = simt::Place::current()) {
  simulated::load<false>("ldmatrix", address, r, place);
}
inline void ldmatrix_x4_transposed(uint32_t address, uint32_t (&r)[4], simt::Place place = simt::Place::current()) {
  simulated::load<true>("ldmatrix.trans", address, r, place);
}

}  // namespace flashmask::ptx
