// SPDX-License-Identifier: Apache-2.0
#include <cstddef>

#include "c_api/call_args.h"
#include "call/call.h"

namespace flashmask::c_api {
namespace {

template <typename Args, typename CArgs>
void read_inputs(const CArgs& c, const MaskView* mask, Device device, Args& args) {
  if (c.reserved) throw_unsupported("args->reserved is ", c.reserved, "; it must be zero");
  args.q = tensor(c.q, "q", device);
  args.k = tensor(c.k, "k", device);
  args.v = tensor(c.v, "v", device);
  args.out = tensor(c.out, "out", device);
  args.lse = tensor(c.lse, "lse", device);
  args.dense_mask = tensor(c.dense_mask, "dense_mask", device);
  if (c.plan) args.plan = read_plan(c.plan, c.plan_bytes, args, mask, device);
}

Arrivals read_arrivals(const fm_arrivals* from, Device device) {
  const auto c = read_struct(from, "args->arrivals");
  if (c.reserved) throw_unsupported("args->arrivals->reserved is ", c.reserved, "; it must be zero");
  return {.needed = tensor(c.needed, "arrivals' needed", device),
          .state = tensor(c.state, "arrivals' state", device),
          .timeout = timeout_of(c.timeout, "args->arrivals->timeout")};
}

EarlyKeys read_early_keys(const fm_early_keys* from, Device device) {
  const auto c = read_struct(from, "args->early");
  if (c.reserved) throw_unsupported("args->early->reserved is ", c.reserved, "; it must be zero");
  return {.dk = tensor(c.dk, "early dk", device),
          .dv = tensor(c.dv, "early dv", device),
          .event = c.event,
          .stream = c.stream};
}

template <typename CArgs>
std::size_t workspace_of(const CArgs* from, const fm_options* options) {
  const CallOptions call(options);
  const CallArgs<CArgs> args(from, call.device);
  return Call(args.args(), args.mask(), call.options, false).workspace_bytes();
}

template <typename CArgs>
void run(const CArgs* from, std::span<std::byte> workspace, const fm_options* options) {
  CallOptions call_options(options);
  CallArgs<CArgs> args(from, call_options.device);
  Call call(args.args(), args.mask(), call_options.with_counter(), true);
  if (const MaskView* mask = args.mask_contents()) call.set_mask(*mask);
  call.run(workspace_for(call, workspace, call_options));
  call_options.report();
}

}  // namespace

ForwardArgs read_args(const fm_forward_args& c, const MaskView* mask, Device device) {
  ForwardArgs args;
  read_inputs(c, mask, device, args);
  if (c.arrivals) args.arrivals = read_arrivals(c.arrivals, device);
  return args;
}

BackwardArgs read_args(const fm_backward_args& c, const MaskView* mask, Device device) {
  BackwardArgs args;
  read_inputs(c, mask, device, args);
  args.dout = tensor(c.dout, "dout", device);
  args.dlse = tensor(c.dlse, "dlse", device);
  args.dq = tensor(c.dq, "dq", device);
  args.dk = tensor(c.dk, "dk", device);
  args.dv = tensor(c.dv, "dv", device);
  args.dsink = tensor(c.dsink, "dsink", device);
  if (c.early) args.early = read_early_keys(c.early, device);
  return args;
}

}  // namespace flashmask::c_api

using namespace flashmask;
using namespace flashmask::c_api;

fm_status fm_forward_workspace(const fm_forward_args* args, const fm_options* options, size_t* bytes) {
  return guarded([&] { required(bytes, "bytes") = workspace_of(args, options); });
}

fm_status fm_forward(const fm_forward_args* args, void* workspace, size_t workspace_bytes, const fm_options* options) {
  return guarded([&] { run(args, memory(workspace, workspace_bytes, "workspace"), options); });
}

fm_status fm_backward_workspace(const fm_backward_args* args, const fm_options* options, size_t* bytes) {
  return guarded([&] { required(bytes, "bytes") = workspace_of(args, options); });
}

fm_status fm_dropout_mask(double dropout_p, const uint64_t* state, const fm_tensor* kept) {
  return guarded([&] { dropout_mask({.p = dropout_p, .state = state}, tensor(required(kept, "kept"), "kept", {})); });
}

fm_status fm_backward(const fm_backward_args* args, void* workspace, size_t workspace_bytes,
                      const fm_options* options) {
  return guarded([&] { run(args, memory(workspace, workspace_bytes, "workspace"), options); });
}
