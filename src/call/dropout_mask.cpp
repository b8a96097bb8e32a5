// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdint>

#include "call/problem.h"
#include "call/sink_and_dropout.h"
#include "common/dropout.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "flashmask/attention.h"

namespace flashmask {
namespace {

void check_kept(const TensorView& t) {
  if (t.rank != 4 || (t.dtype != DataType::kBool && t.dtype != DataType::kUInt8))
    throw_invalid("kept is ", describe(t), "; it must be bool or uint8 [batch, heads, seqlen_q, seqlen_k]");
  check_extent("kept", t);
  for (int d = 0; d < t.rank; ++d) {
    if (t.stride[d] < (t.shape[d] > 1 ? 1 : 0))
      throw_invalid("kept has stride ", t.stride[d], " in dimension ", d, "; its elements must not overlap");
  }
  for (int d = 2; d < t.rank; ++d) {
    if (t.shape[d] > kMaxSeqlen)
      throw_invalid("kept's dimension ", d, " is ", t.shape[d], "; it must be at most ", kMaxSeqlen);
  }
  if (t.device.kind != Device::Kind::kCpu) throw_invalid("kept is on a CUDA device; it must be in host memory");
  check_data("kept", t);
}

}  // namespace

void dropout_mask(const Dropout& dropout, const TensorView& kept) {
  check_dropout(dropout);
  check_dropout_state(dropout);
  check_kept(kept);
  check_dropout_origins(dropout, {kept.shape[0], kept.shape[1], kept.shape[2], kept.shape[3]}, kept.device, true);
  const auto keys = static_cast<uint32_t>(kept.shape[3]);
  const auto fill_row = [&](const DropoutSource& source, uint32_t i, uint8_t* row) {
    for (uint32_t j0 = 0; j0 < keys; j0 += 2) {
      const auto words = source.draw(i, j0);
      for (uint32_t j = j0; j < keys && j < j0 + 2; ++j)
        row[j * kept.stride[3]] = dropout::bits_of(words, i, j) >= source.threshold();
    }
  };
  for (int64_t b = 0; b < kept.shape[0]; ++b) {
    for (int64_t h = 0; h < kept.shape[1]; ++h) {
      const DropoutSource source(dropout, b, h);
      for (int64_t i = 0; i < kept.shape[2]; ++i) {
        fill_row(source, static_cast<uint32_t>(i),
                 static_cast<uint8_t*>(kept.data) + b * kept.stride[0] + h * kept.stride[1] + i * kept.stride[2]);
      }
    }
  }
}

}  // namespace flashmask
