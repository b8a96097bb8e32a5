// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace flashmask::ptx {

/// PTX ISA, "ldmatrix": four 8x8 16-bit matrices; lane l gives the address of row l % 8 of matrix l / 8, and gets
/// elements 2(l % 4) and 2(l % 4) + 1 of row l / 4 of each.
__device__ __forceinline__ void ldmatrix_x4(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// ldmatrix_x4 with `.trans`: of each matrix, lane l gets rows 2(l % 4) and 2(l % 4) + 1 of column l / 4.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t address, uint32_t (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

}  // namespace flashmask::ptx
