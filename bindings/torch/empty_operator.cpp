// SPDX-License-Identifier: Apache-2.0
//
// flashmask_empty::forward and backward: registered in the same way and with the schemas of flashmask's operators, but
// they only allocate the outputs. They cost PyTorch's own overhead; benchmarks/measure/torch_overhead.py measures ours
// beyond it. Not part of the package.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "runtime.h"
#include "schemas.h"

namespace {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Types of the arguments that have the features of flashmask/options.def, and dropout's origins.
#define FLASHMASK_TENSOR(...) , const OptionalTensor&
#define FLASHMASK_NUMBER(...) , double
#define FLASHMASK_COUNT(...) , int64_t
#define FLASHMASK_FLAG(...) , bool
#define FLASHMASK_FEATURE_TYPES                                                                                      \
  , const OptionalTensor &,                                                                                          \
      const OptionalTensor &FLASHMASK_FEATURES(FLASHMASK_TENSOR, FLASHMASK_NUMBER, FLASHMASK_COUNT, FLASHMASK_FLAG), \
      int64_t

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor&, const Tensor& v, const OptionalTensor&,
                                   const OptionalTensor&, const OptionalTensor&, std::optional<double>, bool,
                                   std::optional<int64_t>, int64_t, int64_t, bool, const std::string&, int64_t,
                                   const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                   const OptionalTensor&, const OptionalTensor& FLASHMASK_FEATURE_TYPES) {
  const Place place = place_of(q);
  const int64_t batch = q.size(0), seqlen_q = q.size(1), heads = q.size(2);
  return {empty<4>("out", {batch, seqlen_q, heads, v.size(3)}, torch_dtype(q), place),
          empty<3>("lse", {batch, heads, seqlen_q}, aoti_torch_dtype_float32(), place)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor&, const OptionalTensor&, const Tensor& q,
                                                    const Tensor& k, const Tensor& v, const Tensor&, const Tensor&,
                                                    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                    std::optional<double>, bool, std::optional<int64_t>, int64_t,
                                                    int64_t, bool, const std::string&, int64_t, const OptionalTensor&,
                                                    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                    const OptionalTensor& FLASHMASK_FEATURE_TYPES) {
  const Place place = place_of(q);
  return {empty_like("dq", q, torch_dtype(q), place), empty_like("dk", k, torch_dtype(k), place),
          empty_like("dv", v, torch_dtype(v), place), empty<1>("dsink", {0}, aoti_torch_dtype_float32(), place)};
}

}  // namespace

STABLE_TORCH_LIBRARY(flashmask_empty, m) {
  m.def(schemas::kForward);
  m.def(schemas::kBackward);
}

STABLE_TORCH_LIBRARY_IMPL(flashmask_empty, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}

STABLE_TORCH_LIBRARY_IMPL(flashmask_empty, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("backward", TORCH_BOX(&backward));
}
