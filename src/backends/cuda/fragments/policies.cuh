// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "backends/cuda/device/score.cuh"
#include "backends/cuda/device/variant.h"
#include "backends/cuda/fragments/weights.cuh"

namespace flashmask::cuda {

/// The policies Score and Weights of a variant.
template <typename Element, Variant variant>
using ScoreOf = std::conditional_t<variant.scores, FeatureScore<Element>, ProductScore>;
template <Variant variant>
using WeightsOf = std::conditional_t<variant.dropout, KeptWeights, AllWeights>;

}  // namespace flashmask::cuda
