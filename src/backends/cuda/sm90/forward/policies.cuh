// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "backends/cuda/device/variant.h"
#include "backends/cuda/sm90/forward/partial_rows.cuh"
#include "backends/cuda/sm90/forward/traits.cuh"

namespace flashmask::sm90 {

/// The parameters that a variant's kernel reads.
template <cuda::Variant variant>
using ParamsOf = std::conditional_t<
    variant.scores, ScoredForwardParams,
    std::conditional_t<variant.partial, PartialForwardParams,
                       std::conditional_t<variant.has_features(), FeaturedForwardParams, ForwardParams>>>;

/// The epilogue of a variant's kernel.
template <cuda::Variant variant>
using EpilogueOf =
    std::conditional_t<variant.partial, PartialRows, std::conditional_t<variant.sink, FeaturedRows, FinalRows>>;

/// The policies of a variant.
template <typename Element, cuda::Variant variant>
using PoliciesOf =
    ForwardPolicies<ParamsOf<variant>, cuda::ScoreOf<Element, variant>, cuda::WeightsOf<variant>, EpilogueOf<variant>>;

}  // namespace flashmask::sm90
