// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/sm90/common/host.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "backends/cuda/common/device.h"
#include "backends/cuda/common/error.h"
#include "common/message.h"

namespace flashmask::sm90 {

Sharing sharing(const Problem& p, int64_t batch, int64_t heads) {
  return {static_cast<uint32_t>(broadcast_group(p.batch, batch)),
          static_cast<uint32_t>(broadcast_group(p.heads_q, heads))};
}

std::string lengths_refusal(const Problem& p) {
  constexpr int64_t kLongest = int64_t{1} << 30;
  for (const auto& [argument, n] : {std::pair{"seqlen_q", p.seqlen_q}, {"seqlen_k", p.seqlen_k}}) {
    if (n > kLongest) return message(argument, " is ", n, "; it must be at most ", kLongest);
  }
  return "";
}

int64_t multiprocessors(const Problem& p) {
  return p.gpu ? p.gpu->multiprocessors : cuda::device(p.device.index).multiprocessors;
}

int64_t most_ctas(const Problem& p) {
  const int64_t all = multiprocessors(p);
  return p.max_ctas > 0 ? std::min<int64_t>(p.max_ctas, all) : all;
}

MaskColumns mask_columns(const Problem& p) {
  const MaskView& mask = p.mask;
  const int64_t of_head = mask.seqlen_k * mask.bounds_stride;
  return {columns(mask, 0, 0),
          {sharing(p, mask.bounds_batch, mask.bounds_heads), mask.bounds_heads * of_head, of_head}};
}

DenseMask dense_mask(const Problem& p) {
  if (!p.dense.defined()) return {};
  return {.given = true,
          .visible = static_cast<const uint8_t*>(p.dense.data),
          .place = {sharing(p, p.dense.shape[0], p.dense.shape[1]), p.dense.stride[0], p.dense.stride[1]},
          .row_stride = p.dense.stride[2],
          .key_stride = p.dense.stride[3]};
}

bool asks_for_features(const Problem& p) {
  return p.features.softcap != 0 || p.features.sink.defined() || p.features.dropout.p != 0 ||
         compares_positions(p.mask);
}

cuda::FeatureParams feature_params(const Problem& p) {
  const Features& asked = p.features;
  cuda::FeatureParams params{};
  if (asked.softcap != 0)
    params.softcap = {static_cast<float>(asked.softcap), static_cast<float>(p.softmax_scale / asked.softcap)};
  if (asked.sink.defined())
    params.sink = {asked.sink.data, asked.sink.stride[0], asked.sink.dtype == DataType::kFloat32};
  const uint32_t threshold = dropout::threshold_of(asked.dropout.p);
  params.dropout = {threshold, static_cast<float>(dropout::scale_of(threshold)), asked.dropout.state};
  const MaskView& mask = p.mask;
  params.positions = {position_band(mask, 0), mask.q_pos_batch > 1 ? mask.seqlen_q : 0,
                      mask.k_pos_batch > 1 ? mask.seqlen_k : 0};
  return params;
}

void allow_shared_memory(const void* kernel, int bytes, int32_t device) {
  static std::mutex mutex;
  static std::vector<std::pair<const void*, int32_t>> allowed;
  const std::lock_guard lock(mutex);
  const std::pair key(kernel, device);
  if (std::find(allowed.begin(), allowed.end(), key) != allowed.end()) return;
  cuda::check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
              "cudaFuncSetAttribute of a kernel");
  allowed.push_back(key);
}

}  // namespace flashmask::sm90
