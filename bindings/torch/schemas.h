// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The operators' schemas; benchmarks/torch_overhead.py compares with operators of the same that do nothing.
namespace schemas {

constexpr const char* kForward =
    "forward(Tensor q, Tensor k, Tensor v, Tensor? bounds, Tensor? block_mask, Tensor? plan, float? scale, bool "
    "causal, SymInt? q_offset, SymInt window_left, SymInt window_right, bool deterministic, str backend) -> (Tensor "
    "out, Tensor lse)";
constexpr const char* kBackward =
    "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? bounds, Tensor? "
    "block_mask, Tensor? plan, float? scale, bool causal, SymInt? q_offset, SymInt window_left, SymInt window_right, "
    "bool deterministic, str backend) -> (Tensor dq, Tensor dk, Tensor dv)";

}  // namespace schemas
