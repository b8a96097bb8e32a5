// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "call/problem.h"

namespace flashmask::cuda {

/// Why a tensor's rows cannot be loaded and stored 16 bytes at a time; empty if they can.
std::string alignment_refusal(const char* argument, const TensorView& tensor);
/// The first refusal(argument, tensor) of the call's tensors [batch, seqlen, heads, head_dim] that is not empty.
std::string first_refusal(const Problem& p, std::string (*refusal)(const char* argument, const TensorView& tensor));

}  // namespace flashmask::cuda
