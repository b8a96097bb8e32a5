// SPDX-License-Identifier: Apache-2.0
#include "backends/cuda/host/alignment.h"

#include <cstdint>
#include <iterator>
#include <span>

#include "common/message.h"

namespace flashmask::cuda {

std::string alignment_refusal(const char* argument, const TensorView& t) {
  constexpr int64_t kAlignment = 16;
  const int64_t step = kAlignment / static_cast<int64_t>(element_size(t.dtype));
  if (reinterpret_cast<std::uintptr_t>(t.data) % kAlignment != 0)
    return message(argument, "'s address is not a multiple of 16 bytes; rows must be aligned to 16 bytes");
  const int last = t.rank - 1;
  if (t.shape[last] > 1 && t.stride[last] != 1)
    return message(argument, " has stride ", t.stride[last], " in its last dimension; make it contiguous");
  for (int d = 0; d < last; ++d) {
    if (t.shape[d] > 1 && t.stride[d] % step != 0)
      return message(argument, " has stride ", t.stride[d], " in dimension ", d, "; it must be a multiple of ", step,
                     " (rows aligned to 16 bytes)");
  }
  return "";
}

std::string first_refusal(const Problem& p, std::string (*refusal)(const char*, const TensorView&)) {
  struct Argument {
    const char* name;
    const TensorView& tensor;
  };
  const Argument arguments[] = {{"q", p.q},       {"k", p.k},   {"v", p.v},   {"out", p.out},
                                {"dout", p.dout}, {"dq", p.dq}, {"dk", p.dk}, {"dv", p.dv}};
  for (const Argument& argument : std::span(arguments).first(p.is_backward ? std::size(arguments) : 4)) {
    if (std::string why = refusal(argument.name, argument.tensor); !why.empty()) return why;
  }
  return "";
}

}  // namespace flashmask::cuda
