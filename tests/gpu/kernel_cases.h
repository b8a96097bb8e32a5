// SPDX-License-Identifier: Apache-2.0
#pragma once

// Shared by the programs that run every instantiation of a kernel: 16-bit numbers, masks on the device, output.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/random.h"
#include "flashmask/attention.h"
#include "gpu/device_mask.h"

namespace flashmask::test {

inline constexpr Device kDevice{Device::Kind::kCuda, 0};
/// Multiprocessors that sizes are printed for where there is no device.
inline constexpr int kUsualMultiprocessors = 132;
/// Inputs are uniform in [-kLargest, kLargest]: variance 1.
inline constexpr double kLargest = 1.7;

/// A compiled configuration of the attention kernel of a direction.
struct Instance {
  DataType dtype;
  const char* element;
  int64_t head_dim;
  int consumers;  ///< consumer warpgroups
  int64_t head_dim_v;
  bool operator==(const Instance&) const = default;
};

/// Kernels of an instance beside its plain one, whose cases are their own or the plain one's.
inline bool is_variant(std::string_view id) {
  return id.ends_with(".split") || id.ends_with(".shared") || id.ends_with(".pos") || id.ends_with(".dropout");
}

/// True if the library runs Hopper's kernels for calls that name none: on the device, or on a Hopper GPU if there is
/// none. Other kernels' tiles are at most two of Hopper's warpgroups high, and a device has one for each pair of head
/// dims.
inline bool runs_hopper_kernels() {
  static const bool hopper = [] {
    const auto tensor = [](std::initializer_list<int64_t> shape, DataType dtype) {
      TensorView view = TensorView::contiguous(reinterpret_cast<const void*>(uintptr_t{0x1000}), dtype, shape);
      view.device = kDevice;
      return view;
    };
    ForwardArgs args;
    args.q = args.k = args.v = args.out = tensor({1, 1, 1, 64}, DataType::kBFloat16);
    args.lse = tensor({1, 1, 1}, DataType::kFloat32);
    return explain(args, {}, no_device().empty() ? std::nullopt : std::optional(GpuModel{})).arch == "sm90";
  }();
  return hopper;
}

/// Instances of the kernels that run; `op` as KernelInfo has it.
inline std::vector<Instance> instances(std::string_view op) {
  const bool hopper = runs_hopper_kernels();
  std::vector<Instance> found;
  for (const KernelInfo& kernel : kernels()) {
    const bool attention = kernel.tile.rows > 0 && kernel.tile.keys > 0 && !is_variant(kernel.id);
    if (kernel.op != op || !attention || (kernel.arch == "sm90") != hopper) continue;
    const char* element = kernel.dtype == DataType::kBFloat16 ? "bf16" : "f16";
    const Instance instance{kernel.dtype, element, kernel.head_dim, hopper ? kernel.threads / 128 - 1 : 2,
                            kernel.head_dim_v};
    if (found.empty() || found.back() != instance) found.push_back(instance);
  }
  return found;
}

/// Head dims that run in wider instances, head_dim_v above head_dim among them: each instance with less of both, and
/// rows that end in any block of 64 columns.
inline constexpr std::pair<int64_t, int64_t> kPadded[] = {
    {8, 8},     {40, 40}, {24, 56},   {72, 72},  {80, 80},   {64, 96},   {64, 128}, {112, 16}, {112, 112},
    {104, 104}, {192, 8}, {136, 128}, {72, 160}, {160, 160}, {224, 224}, {8, 256},  {256, 40}};

/// Calls of them in small tiles.
inline std::vector<Instance> padded_instances() {
  std::vector<Instance> found;
  for (const auto& [head_dim, head_dim_v] : kPadded) {
    found.push_back({DataType::kBFloat16, "bf16", head_dim, 2, head_dim_v});
    found.push_back({DataType::kFloat16, "f16", head_dim, 2, head_dim_v});
  }
  return found;
}

/// A case's line, as tools/gpu/session.py reads it.
inline std::string describe(const Instance& instance, const char* mask, int64_t batch, int64_t heads, int64_t heads_kv,
                            int64_t seqlen_q, int64_t seqlen_k, const char* mode) {
  char text[160];
  std::snprintf(text, sizeof(text),
                "%-4s head_dim %3d/%-3d, %d consumers  %-21s  batch %d, heads %3d/%d, (%d, %4d)  %-21s",
                instance.element, static_cast<int>(instance.head_dim), static_cast<int>(instance.head_dim_v),
                instance.consumers, mask, static_cast<int>(batch), static_cast<int>(heads), static_cast<int>(heads_kv),
                static_cast<int>(seqlen_q), static_cast<int>(seqlen_k), mode);
  return text;
}

// --- Numbers -----------------------------------------------------------------------------------------

inline uint16_t to_bits(DataType dtype, double x) {
  const auto value = static_cast<float>(x);
  if (dtype == DataType::kBFloat16) return __bfloat16_as_ushort(__float2bfloat16_rn(value));
  return __half_as_ushort(__float2half_rn(value));
}

inline double from_bits(DataType dtype, uint16_t bits) {
  if (dtype == DataType::kBFloat16) return __bfloat162float(__ushort_as_bfloat16(bits));
  return __half2float(__ushort_as_half(bits));
}

/// Half a unit in the last place of numbers near 1.
inline double rounding(DataType dtype) { return dtype == DataType::kBFloat16 ? 0x1p-8 : 0x1p-11; }

/// 16-bit numbers, and their values.
struct Numbers {
  std::vector<uint16_t> bits;
  std::vector<double> values;

  Numbers() = default;
  Numbers(Random& random, DataType dtype, int64_t count) {
    for (int64_t n = 0; n < count; ++n) add(dtype, (2 * random.real() - 1) * kLargest);
  }
  void add(DataType dtype, double x) {
    bits.push_back(to_bits(dtype, x));
    values.push_back(from_bits(dtype, bits.back()));
  }
};

/// Foreign columns after every row in memory: NaN in inputs, and to be left alone in outputs.
inline constexpr int64_t kBeyond = 8;
/// Rows of `dim`, each with its columns beyond.
inline std::vector<uint16_t> with_columns_beyond(const std::vector<uint16_t>& rows, int64_t dim) {
  std::vector<uint16_t> padded;
  for (auto row = rows.begin(); row != rows.end(); row += dim) {
    padded.insert(padded.end(), row, row + dim);
    padded.insert(padded.end(), kBeyond, uint16_t{0xffff});  // NaN in either type
  }
  return padded;
}

/// With four sums, so that the compiler adds four at a time.
inline double dot(const double* x, const double* y, int64_t dim) {
  double sums[4] = {};
  for (int64_t d = 0; d < dim; d += 4) {
    for (int64_t n = 0; n < 4; ++n) sums[n] += x[d + n] * y[d + n];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// --- Masks and tensors -------------------------------------------------------------------------------

/// The hidden row intervals of one key.
struct Column {
  int64_t lts, lte, uts, ute;
};

inline void add_column(const Column& column, MaskParts& parts) {
  parts.lts.push_back(static_cast<int32_t>(column.lts));
  parts.lte.push_back(static_cast<int32_t>(column.lte));
  parts.uts.push_back(static_cast<int32_t>(column.uts));
  parts.ute.push_back(static_cast<int32_t>(column.ute));
}

/// The row after the last row of key j's document, for documents of `length` keys and rows aligned to the last keys.
inline int64_t document_end(int64_t length, int64_t j, int64_t seqlen_q, int64_t seqlen_k) {
  return std::clamp<int64_t>((j / length + 1) * length - (seqlen_k - seqlen_q), 0, seqlen_q);
}

/// The vectors as startend_row_indices.
inline std::vector<int32_t> interleave(const MaskParts& parts) {
  std::vector<int32_t> values;
  for (std::size_t at = 0; at < parts.lts.size(); ++at) {
    for (const auto* vector : {&parts.lts, &parts.lte, &parts.uts, &parts.ute}) {
      if (!vector->empty()) values.push_back((*vector)[at]);
    }
  }
  return values;
}

inline TensorView on_device(const DeviceBytes& bytes, DataType dtype, std::initializer_list<int64_t> shape) {
  TensorView view = TensorView::contiguous(bytes.data(), dtype, shape);
  view.device = kDevice;
  return view;
}

/// A tensor of the shape, whose rows have columns beyond.
inline TensorView on_device_with_columns_beyond(const DeviceBytes& bytes, DataType dtype,
                                                const std::array<int64_t, 4>& shape) {
  TensorView view = on_device(bytes, dtype, {shape[0], shape[1], shape[2], shape[3] + kBeyond});
  view.shape[3] = shape[3];
  return view;
}

/// `vectors`: those of the parts, interleaved, on the device; one vector means a causal band.
inline Mask make_mask(const MaskParts& parts, const DeviceBytes& vectors) {
  if (parts.lts.empty()) return Mask(parts);
  const int64_t n = parts.lte.empty() ? 1 : 4;
  return from_startend_row_indices(on_device(vectors, DataType::kInt32, {parts.batch, parts.heads, parts.seqlen_k, n}),
                                   n == 1, parts.seqlen_q);
}

/// The mask's plan in `buffer`, which begins as NaN if `poison`.
inline PlanView make_plan(const Mask& mask, DeviceBytes& buffer, bool poison) {
  const PlanLayout layout(mask.seqlen_q(), mask.seqlen_k(), mask.batch(), mask.heads());
  buffer = DeviceBytes(static_cast<std::size_t>(layout.bytes));
  const std::span bytes(buffer.data(), buffer.size());
  if (poison) buffer.fill(0xff);
  build_plan(mask.view(), bytes, kDevice);
  return PlanView::on_device(layout, bytes, kDevice);
}

/// The largest difference of one result, or the first thing that is wrong with it.
struct Difference {
  double largest = 0;
  std::string wrong;

  void add(const char* result, double got, double expected, double limit, int64_t b, int64_t head, int64_t i,
           int64_t d = -1) {
    const double difference = got == expected ? 0 : std::abs(got - expected);
    if (difference > largest) largest = difference;
    if (difference <= limit || !wrong.empty()) return;  // a NaN is not below the limit
    char text[200];
    std::snprintf(text, sizeof(text), "%s of batch entry %d, head %d, row %d%s is %.6g%s, expected %.6g", result,
                  static_cast<int>(b), static_cast<int>(head), static_cast<int>(i),
                  d < 0 ? "" : (", element " + std::to_string(d)).c_str(), got,
                  std::isnan(got) ? " (perhaps not written)" : "", expected);
    wrong = text;
  }
};

/// The columns beyond a row of a result that began as 0xff have to be that still.
inline void expect_untouched(const char* result, const uint16_t* beyond, Difference& difference, int64_t b,
                             int64_t head, int64_t i) {
  const bool untouched = std::all_of(beyond, beyond + kBeyond, [](uint16_t x) { return x == 0xffff; });
  if (untouched || !difference.wrong.empty()) return;
  difference.wrong = std::string(result) + " has been written past the end of batch entry " + std::to_string(b) +
                     ", head " + std::to_string(head) + ", row " + std::to_string(i);
}

/// "out within 1.2e-03, lse 4.0e-06".
inline std::string within(std::initializer_list<std::pair<const char*, const Difference&>> results) {
  std::string text;
  for (const auto& [name, difference] : results) {
    char part[64];
    std::snprintf(part, sizeof(part), "%s%s%s %.1e", text.empty() ? "" : ", ", name, text.empty() ? " within" : "",
                  difference.largest);
    text += part;
  }
  return text;
}

// --- The program -------------------------------------------------------------------------------------

struct Arguments {
  bool list = false, quick = false, poison = true, probe = false;
  int repeat = 1;
};

inline std::optional<Arguments> parse(int count, char** words) {
  Arguments arguments;
  for (int n = 1; n < count; ++n) {
    const std::string_view word = words[n];
    if (word == "--list") {
      arguments.list = true;
    } else if (word == "--quick") {
      arguments.quick = true;
    } else if (word == "--probe") {
      arguments.probe = true;
    } else if (word == "--no-poison") {
      arguments.poison = false;
    } else if (word == "--repeat" && n + 1 < count && std::atoi(words[n + 1]) > 0) {
      arguments.repeat = std::atoi(words[++n]);
    } else {
      return std::nullopt;
    }
  }
  return arguments;
}

/// Prints the line of a case, calls run() `repeat` times and judges the first results; same(a, b) must hold between
/// them and all others. judge(results) prints the end of the line and returns whether they are right.
template <typename Run, typename Same, typename Judge>
bool run_and_judge(const std::string& line, int repeat, Run run, Same same, Judge judge) {
  std::printf("%s", line.c_str());
  std::fflush(stdout);
  try {
    const auto first = run();
    for (int n = 1; n < repeat; ++n) {
      if (same(run(), first)) continue;
      std::printf("  FAILED: run %d has other bits than the first\n", n + 1);
      return false;
    }
    return judge(first);
  } catch (const std::exception& error) {
    std::printf("  FAILED: %s\n", error.what());
    return false;
  }
}

/// Prints the end of a case's line: `wrong`, or `within` if nothing is wrong; true then.
inline bool verdict(std::string_view wrong, const std::string& within) {
  if (wrong.empty()) {
    std::printf("  ok: %s\n", within.c_str());
  } else {
    std::printf("  FAILED: %.*s\n", static_cast<int>(wrong.size()), wrong.data());
  }
  return wrong.empty();
}

/// Prints the line of every case in every mode.
template <typename Cases, typename Modes>
int list_cases(const Cases& cases, const Modes& modes) {
  for (const auto& c : cases) {
    for (const auto& [mode, name] : modes) std::printf("%s\n", describe(c, name).c_str());
  }
  return 0;
}

/// Runs every case: run_case(case, in_all_modes) makes its inputs once and gives in_all_modes a function of (mode,
/// name).
template <typename Cases, typename Modes, typename RunCase>
int run_cases(const Cases& cases, const Modes& modes, RunCase run_case) {
  int passed = 0, failed = 0;
  for (const auto& c : cases) {
    run_case(c, [&](auto run_mode) {
      for (const auto& [mode, name] : modes) ++(run_mode(mode, name) ? passed : failed);
    });
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}

/// Usage of the program; `quick` names the cases that --quick runs.
inline std::string usage(std::string_view program, std::string_view quick) {
  return std::string(program) +
         " [--list] [--quick] [--no-poison] [--repeat N] [--probe]\n"
         "  --list       only print the cases; sizes as on 132 multiprocessors if there is no device\n"
         "  --quick      " +
         std::string(quick) +
         "\n"
         "  --no-poison  leave workspace and plan as they are allocated, for a tool that looks for reads of memory "
         "that "
         "was never written\n"
         "  --repeat N   run each case N times and compare the bits\n"
         "  --probe      only allocate and clear some of the device's memory, to see whether a tool works\n";
}

/// Exit status of --probe, which does on the device what a watching tool must allow, without the library.
inline int probe() {
  if (const std::string missing = no_device(); !missing.empty()) {
    std::printf("skipped: %s\n", missing.c_str());
    return 77;
  }
  DeviceBytes memory(1 << 20);
  memory.fill(0);
  return memory.read()[0] == std::byte{0} ? 0 : 1;
}

/// main: list(arguments, multiprocessors) and run_cases(arguments, multiprocessors) give the exit status; ctest counts
/// 77 as skipped.
template <typename List, typename RunCases>
int run_program(int count, char** words, const std::string& usage, List list, RunCases run_cases) {
  const auto arguments = parse(count, words);
  if (!arguments) {
    std::fputs(usage.c_str(), stderr);
    return 2;
  }
  try {
    if (arguments->probe) return probe();
    const std::string missing = no_device();
    int multiprocessors = kUsualMultiprocessors;
    if (missing.empty())
      require(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0), "cudaDeviceGetAttribute");
    if (arguments->list) return list(*arguments, multiprocessors);
    if (missing.empty()) return run_cases(*arguments, multiprocessors);
    std::printf("skipped: %s\n", missing.c_str());
    return 77;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace flashmask::test
