// SPDX-License-Identifier: Apache-2.0
#include "call/requirements.h"

#include <string>
#include <utility>

#include "common/message.h"
#include "common/tensor_checks.h"
#include "mask/host_only.h"

namespace flashmask {

void check_strides(const char* argument, const TensorView& t, bool row_contiguous, bool output) {
  for (int d = 0; d < t.rank; ++d) {
    if (t.stride[d] < 0)
      throw_invalid(argument, " has stride ", t.stride[d], " in dimension ", d, "; strides must be at least 0");
    if (output && t.stride[d] == 0 && t.shape[d] > 1 && t.num_elements() > 0)
      throw_invalid(argument, " is an output and has stride 0 in dimension ", d, "; its elements must not overlap");
  }
  const int last = t.rank - 1;
  if (row_contiguous && t.shape[last] > 1 && t.stride[last] != 1) {
    throw_invalid(argument, " has stride ", t.stride[last], " in its last dimension; it must be contiguous (stride 1)");
  }
}

void check_device(const char* argument, const TensorView& t, const Device& device) {
  if (t.device == device) return;
  throw_invalid(argument, " and q are on different devices (", describe(t.device), " and ", describe(device),
                "); a call has one");
}

void check_tensor(const char* argument, const TensorView& t, const Requirement& need, const Device& device,
                  bool with_data) {
  bool same = t.rank == static_cast<int32_t>(need.shape.size());
  int d = 0;
  for (const int64_t n : need.shape) same = same && t.shape[d++] == n;
  if (!same || t.dtype != need.dtype) {
    std::string shape;
    for (const int64_t n : need.shape) shape += message(shape.empty() ? "" : ", ", n);
    throw_invalid(argument, " is ", describe(t), "; it must be ", name(need.dtype), " [", shape, "] (", need.meaning,
                  ")");
  }
  check_extent(argument, t);
  check_strides(argument, t, need.row_contiguous, need.output);
  check_device(argument, t, device);
  if (with_data) check_data(argument, t);
}

bool is_one_of(int64_t n, std::initializer_list<int64_t> accepted) {
  for (const int64_t a : accepted) {
    if (n == a) return true;
  }
  return false;
}

void check_heads(int64_t heads_q, int64_t heads_kv) {
  if (heads_kv < 1 || heads_q < 1 || heads_q % heads_kv != 0) {
    throw_invalid("q has ", heads_q, " heads and k ", heads_kv, "; both must be at least 1 and q's a multiple of k's");
  }
}

void check_head_dims(int64_t head_dim, int64_t head_dim_v) {
  for (const auto& [argument, n] :
       {std::pair{"head_dim (q's last dimension)", head_dim}, {"head_dim_v (v's last dimension)", head_dim_v}}) {
    if (n < 1 || n > kMaxHeadDim) throw_unsupported(argument, " is ", n, "; it must be between 1 and ", kMaxHeadDim);
  }
}

void check_q_dtype(const TensorView& q) {
  if (q.dtype != DataType::kFloat32 && q.dtype != DataType::kFloat64 && q.dtype != DataType::kBFloat16 &&
      q.dtype != DataType::kFloat16)
    throw_invalid("q is ", describe(q), "; accepted dtypes are float32, bfloat16, float16 and float64");
}

}  // namespace flashmask
