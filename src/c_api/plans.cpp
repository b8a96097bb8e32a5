// SPDX-License-Identifier: Apache-2.0
#include "call/backend.h"
#include "plan/mask_memory.h"
#include "plan/plan_buffer.h"

#include "c_api/read.h"

using namespace flashmask;
using namespace flashmask::c_api;

fm_status fm_plan_bytes(const fm_mask* mask, size_t* bytes) {
  return guarded([&] {
    const PlanLayout layout = plan_layout(CallMask(mask, {}).view());
    required(bytes, "bytes") = static_cast<size_t>(layout.bytes);
  });
}

fm_status fm_plan_device_bytes(const fm_mask* mask, const fm_options* options, size_t* most, size_t* scratch) {
  return guarded([&] {
    const CallOptions call(options);
    const CallMask of(mask, call.device);
    const PlanLayout wanted = most ? plan_layout(of.view(), call.device) : plan_layout(of.view(), call.device, 0);
    check_mask_memory(of.view(), wanted, call.options.max_mask_bytes,
                      backend_for(call.device.kind).memory_bytes(call.device));
    if (most) *most = static_cast<size_t>(wanted.bytes);
    required(scratch, "scratch") = static_cast<size_t>(count_plan_scratch(of.view(), call.device));
  });
}

fm_status fm_plan_count_bytes(const fm_mask* mask, void* scratch, size_t scratch_bytes, const fm_options* options,
                              size_t* bytes) {
  return guarded([&] {
    const CallOptions call(options);
    CallMask of(mask, call.device);
    const bool is_read = of.view().column_ptr || count_plan_scratch(of.view(), call.device) > 0;
    const PlanLayout layout =
        count_plan_layout(is_read ? of.contents() : of.view(), memory(scratch, scratch_bytes, "scratch"), call.device,
                          call.options.stream, call.options.max_mask_bytes);
    required(bytes, "bytes") = static_cast<size_t>(layout.bytes);
  });
}

fm_status fm_plan_build(const fm_mask* mask, void* buffer, size_t bytes, const fm_options* options) {
  return guarded([&] {
    const CallOptions call(options);
    const std::span<std::byte> plan = memory(buffer, bytes, "buffer");
    CallMask of(mask, call.device);
    check_plan_buffer("plan buffer", plan, plan_layout(of.view(), call.device, bytes));
    build_plan(of.hashed_contents(), plan, call.device, call.options.stream);
  });
}

fm_status fm_plan_validate(const fm_mask* mask, const void* plan, size_t plan_bytes, void* scratch,
                           size_t scratch_bytes, const fm_options* options) {
  return guarded([&] {
    const CallOptions call(options);
    required(static_cast<const std::byte*>(plan), "plan");
    CallMask of(mask, call.device);
    const PlanView view = read_plan(plan, plan_bytes, {}, &of.view(), call.device);
    // A plan of other shapes is refused without a look at the contents.
    if (view.layout() == plan_layout(of.view(), call.device, plan_bytes)) of.hashed_contents();
    validate_plan(of.view(), view, memory(scratch, scratch_bytes, "scratch"), call.options.stream);
  });
}
