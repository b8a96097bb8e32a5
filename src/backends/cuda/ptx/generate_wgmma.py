#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes wgmma.cuh: inline assembly cannot loop over operands, so every accumulator width is spelled out here.

Run it after changing WIDTHS: src/backends/cuda/ptx/generate_wgmma.py > src/backends/cuda/ptx/wgmma.cuh
"""

WIDTHS = (32, 64, 96, 128, 160, 192, 256)
TYPES = (("__nv_bfloat16", "bf16"), ("__half", "f16"))

HEAD = """// SPDX-License-Identifier: Apache-2.0
// Written by generate_wgmma.py; do not edit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flashmask::ptx {

/// In which direction an operand's tile is contiguous: along the product's inner dimension, or across it.
enum class Major : int { kInner = 0, kOuter = 1 };

/// PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate": wgmma.mma_async, m64nNk16, D = A * B +
/// (accumulate ? D : 0) in fp32. `ss`: A and B in shared memory, by descriptor; `rs`: A in registers. Lane l of
/// warp w holds rows 16w + l/4 and 16w + l/4 + 8 of D: d[4j .. 4j+3] are columns 8j + 2(l%4) + {0, 1} of the
/// first and of the second row.
template <typename T, int N, Major kA, Major kB>
__device__ __forceinline__ void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate);
template <typename T, int N, Major kB>
__device__ __forceinline__ void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate);
"""


def numbered(first, count):
    return ", ".join(f"%{i}" for i in range(first, first + count))


def accumulators(count):
    return ", ".join(f'"+f"(d[{i}])' for i in range(count))


def specialisation(n, type_name, suffix, from_registers):
    count = n // 2
    a_operand = "{" + numbered(count, 4) + "}" if from_registers else f"%{count}"
    b_index = count + (4 if from_registers else 1)
    a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if from_registers else '"l"(a)'
    majors = f"%{b_index + 2}" if from_registers else f"%{b_index + 2}, %{b_index + 3}"
    major_inputs = (
        '"n"(static_cast<int>(kB))' if from_registers else '"n"(static_cast<int>(kA)), "n"(static_cast<int>(kB))'
    )
    return f"""
    asm volatile(
        "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{b_index + 1}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{suffix}.{suffix} {{{numbered(0, count)}}}, "
        "{a_operand}, %{b_index}, p, 1, 1, {majors};\\n}}\\n"
        : {accumulators(count)}
        : {a_inputs}, "l"(b), "r"(accumulate), {major_inputs});"""


def function(from_registers):
    parameters = "Major kB" if from_registers else "Major kA, Major kB"
    name = "wgmma_rs" if from_registers else "wgmma_ss"
    a = "const uint32_t (&a)[4]" if from_registers else "uint64_t a"
    text = (
        f"\ntemplate <typename T, int N, {parameters}>\n"
        f"__device__ __forceinline__ void {name}(float (&d)[N / 2], {a}, uint64_t b, int accumulate) {{\n"
    )
    branch = "  if constexpr"
    for n in WIDTHS:
        for type_name, suffix in TYPES:
            body = specialisation(n, type_name, suffix, from_registers)
            text += f"{branch} (N == {n} && std::is_same_v<T, {type_name}>) {{{body}\n"
            branch = "  } else if constexpr"
    return text + '  } else {\n    static_assert(N < 0, "this width or type is not in generate_wgmma.py");\n  }\n}\n'


print("// clang-format off\n" + HEAD + function(False) + function(True) + "\n}  // namespace flashmask::ptx")
