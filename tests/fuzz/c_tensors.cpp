// SPDX-License-Identifier: Apache-2.0
#include "fuzz/c_tensors.h"

#include <cmath>

#include "fuzz/check.h"

namespace flashmask::fuzz {

void lay_out(fm_tensor& t, int32_t dtype, std::initializer_list<int64_t> shape, uint8_t layout) {
  t.dtype = dtype;
  t.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  uint64_t stride = 1;  // sizes may have been changed to anything
  for (int d = t.ndim - 1; d >= 0; --d) {
    t.stride[d] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(std::max<int64_t>(t.shape[d], 1));
    if (d == t.ndim - 1 && layout == 1) stride += 3;  // rows with something after them
  }
  if (layout == 2 && t.ndim == 4) {  // [batch, heads, seqlen, head_dim] underneath
    t.stride[1] = t.shape[3];
    t.stride[2] = t.shape[3] * std::max<int64_t>(t.shape[1], 1);
  }
}

int64_t draw_wrong(ByteReader& bytes) {
  constexpr int64_t k62 = int64_t{1} << 62, k31 = int64_t{1} << 31;
  constexpr int64_t kOdd[] = {0, 1, -1, 2, 3, 127, 129, 257, k31 - 1, k31, k62, k62 + 1, 300'000'000, 65536, -k31, 8};
  const uint8_t kind = bytes.byte();
  return kind < 128 ? kOdd[kind % 16] : kind < 192 ? bytes.position() : bytes.byte();
}

void change_tensor(ByteReader& bytes, std::vector<Argument>& tensors) {
  Argument& argument = tensors[bytes.byte() % tensors.size()];
  fm_tensor& t = *argument.tensor;
  const uint8_t field = bytes.byte() % 16;
  if (field < 5) {
    t.shape[field] = draw_wrong(bytes);
  } else if (field < 10) {
    t.stride[field - 5] = draw_wrong(bytes);
  } else if (field == 10) {
    t.dtype = static_cast<int32_t>(draw_wrong(bytes));
  } else if (field == 11) {
    t.ndim = static_cast<int32_t>(draw_wrong(bytes));
  } else if (field == 12) {
    argument.null = 1;
  } else if (field == 13) {
    argument.misaligned = bytes.byte() % 8;
  } else if (field == 14) {
    t = *tensors[bytes.byte() % tensors.size()].tensor;
  } else {
    t.dtype = bytes.byte() % 8;
  }
}

uint32_t draw_struct_size(ByteReader& bytes, std::size_t right) {
  constexpr int64_t kOdd[] = {0, 4, 8, 65536, 65544, UINT32_MAX, 7};
  const uint8_t kind = bytes.byte();
  if (kind < 32) return static_cast<uint32_t>(kOdd[kind % 7]);
  return kind < 64 ? static_cast<uint32_t>(right + kind % 4 * 8) : kind % (static_cast<uint32_t>(right) / 8 + 1) * 8;
}

std::size_t size_of(int32_t dtype) {
  constexpr std::size_t kSizes[] = {0, 4, 8, 2, 2, 4, 1, 1, 8, 1};
  return dtype >= FM_NONE && dtype <= FM_FLOAT8_E4M3 ? kSizes[dtype] : 0;
}

std::optional<Claim> claim_of(const fm_tensor& t) {
  const std::size_t element = size_of(t.dtype);
  if (element == 0 || t.ndim < 0 || t.ndim > 5) return Claim{};  // never read
  // In floating point, which does not overflow and is exact where the claim is small.
  double before = 0, after = static_cast<double>(element), elements = 1;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] <= 0) return Claim{};
    const double stride = static_cast<double>(t.stride[d]),
                 reach = static_cast<double>(t.shape[d] - 1) * static_cast<double>(element);
    (stride < 0 ? before : after) += reach * std::abs(stride);
    elements *= static_cast<double>(t.shape[d]);
  }
  if (std::max({before, after, elements}) > static_cast<double>(kMostBytes)) return std::nullopt;
  return Claim{static_cast<std::size_t>(before), static_cast<std::size_t>(after)};
}

fm_status judged(fm_status status) {
  require(status >= FM_OK && status < FM_INTERNAL,
          "a function returns one of the statuses, and never that of a defect");
  require(status == FM_OK || fm_last_error()[0] != '\0', "a function that fails says why");
  return status;
}

}  // namespace flashmask::fuzz
