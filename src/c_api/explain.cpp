// SPDX-License-Identifier: Apache-2.0
#include <optional>
#include <string>

#include "c_api/call_args.h"
#include "call/call.h"

namespace flashmask::c_api {
namespace {

/// Explains a call; reads the mask's contents if there are live tiles to count.
template <typename CArgs>
Explanation explain_call(const CArgs* from, const CallOptions& call, const std::optional<GpuModel>& gpu = {}) {
  CallArgs<CArgs> args(from, call.device);
  Problem problem = check(args.args(), args.mask(), call.options, false);
  problem.gpu = gpu;
  Explanation explanation = explain_problem(problem, call.options.backend);
  if (!lacks_live_tiles(problem, explanation)) return explanation;
  if (const MaskView* mask = args.mask_contents()) problem.mask = *mask;
  if (problem.plan.defined()) check_plan_hash(problem);
  count_live_tiles(problem, explanation);
  return explanation;
}

std::optional<GpuModel> read_gpu_model(const fm_gpu_model* from) {
  if (!from) return std::nullopt;
  const auto gpu = read_struct(from, "gpu");
  if (gpu.compute_major < 1 || gpu.compute_minor < 0 || gpu.multiprocessors < 1)
    throw_invalid("gpu has compute capability ", gpu.compute_major, ".", gpu.compute_minor, " and ",
                  gpu.multiprocessors,
                  " multiprocessors; there must be at least one, and a compute capability such as 9.0");
  return GpuModel{gpu.compute_major, gpu.compute_minor, gpu.multiprocessors};
}

}  // namespace
}  // namespace flashmask::c_api

using namespace flashmask;
using namespace flashmask::c_api;

fm_status fm_explain(const fm_forward_args* args, const fm_options* options, char* text, size_t capacity,
                     size_t* length) {
  return guarded([&] { copy_text(to_string(explain_call(args, CallOptions(options))), text, capacity, length); });
}

fm_status fm_explain_backward(const fm_backward_args* args, const fm_options* options, char* text, size_t capacity,
                              size_t* length) {
  return guarded([&] { copy_text(to_string(explain_call(args, CallOptions(options))), text, capacity, length); });
}

fm_status fm_explain_json(const void* args, int is_backward, const fm_options* options, const fm_gpu_model* gpu,
                          char* text, size_t capacity, size_t* length) {
  return guarded([&] {
    const CallOptions call(options);
    const std::optional<GpuModel> model = read_gpu_model(gpu);
    const auto json = [&](const auto* from) { return to_json(explain_call(from, call, model)); };
    copy_text(is_backward ? json(static_cast<const fm_backward_args*>(args))
                          : json(static_cast<const fm_forward_args*>(args)),
              text, capacity, length);
  });
}

fm_status fm_kernels_json(char* text, size_t capacity, size_t* length) {
  return guarded([&] { copy_text(to_json(kernels()), text, capacity, length); });
}
