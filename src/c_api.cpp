// SPDX-License-Identifier: Apache-2.0
#include "flashmask/c_api.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <string>

#include "common/message.h"
#include "common/tensor_checks.h"
#include "flashmask/attention.h"
#include "flashmask/mask.h"
#include "flashmask/plan.h"
#include "flashmask/version.h"
#include "mask/outline.h"
#include "plan/plan_buffer.h"

namespace flashmask {
namespace {

thread_local std::string last_error;

/// Runs f and turns whatever it throws into a status and a message.
template <typename F>
fm_status guarded(F&& f) {
  try {
    f();
    return FM_OK;
  } catch (const Error& error) {
    last_error = error.what();
    return static_cast<fm_status>(error.code());
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
    return FM_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    last_error = message("internal error: ", error.what());
    return FM_INTERNAL;
  } catch (...) {
    last_error = "internal error";
    return FM_INTERNAL;
  }
}

template <typename T>
T& required(T* pointer, const char* argument) {
  if (!pointer) throw_invalid(argument, " is NULL");
  return *pointer;
}

/// A caller's struct in this library's size: fields the caller does not know are zero, and fields this library
/// does not know must be.
template <typename Struct>
Struct read_struct(const Struct* from, const char* argument) {
  constexpr std::size_t kSmallest = 2 * sizeof(uint32_t);
  uint32_t size = 0;
  std::memcpy(&size, &required(from, argument), sizeof(size));
  if (size < kSmallest || size > 65536)
    throw_invalid(argument, "->struct_size is ", size, "; set it to sizeof the struct, which is ", sizeof(Struct),
                  " here");
  Struct result{};
  std::memcpy(&result, from, std::min<std::size_t>(size, sizeof(Struct)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  if (size > sizeof(Struct) &&
      std::any_of(bytes + sizeof(Struct), bytes + size, [](unsigned char b) { return b != 0; })) {
    throw_unsupported(argument, " has fields that this version of the library does not know; leave them zero");
  }
  return result;
}

void check_flags(uint32_t flags, uint32_t known, const char* argument) {
  if (flags & ~known) throw_unsupported(argument, "->flags has unknown bits ", flags & ~known);
}

TensorView tensor(const fm_tensor& t, const char* argument, Device device = {}) {
  TensorView view;
  if (t.dtype == FM_NONE) return view;
  if (t.dtype < FM_NONE || t.dtype > FM_UINT8)
    throw_invalid(argument, ".dtype is ", t.dtype, "; it must be one of fm_dtype, 0 to ", static_cast<int>(FM_UINT8));
  if (t.ndim < 0 || t.ndim > TensorView::kMaxRank)
    throw_invalid(argument, ".ndim is ", t.ndim, "; it must be between 0 and ", TensorView::kMaxRank);
  view.data = t.data;
  view.dtype = static_cast<DataType>(t.dtype);
  view.rank = t.ndim;
  view.device = device;
  for (int d = 0; d < t.ndim; ++d) {
    view.shape[d] = t.shape[d];
    view.stride[d] = t.stride[d];
  }
  return view;
}

/// The band of causal and window together.
Band read_band(const fm_mask& m) {
  Band band = m.flags & FM_HAS_WINDOW ? Band::window(m.window_left, m.window_right) : Band::none();
  if (m.flags & FM_CAUSAL) band.hi = band.hi ? std::min<int64_t>(*band.hi, 0) : 0;
  return band;
}

/// What of a mask is wanted: its shapes, whose check comes before anything of it is read, or its contents, which on a
/// device are borrowed.
enum class Of { kShapes, kContents };

void check_no_positions(const TensorView& positions, const char* argument) {
  if (positions.defined())
    throw_unsupported(argument, " is ", describe(positions), "; it must be absent: positions are not implemented");
}

Mask read_mask(const fm_mask* from, Device device, Of of) {
  const auto m = read_struct(from, "mask");
  check_flags(m.flags, FM_CAUSAL | FM_HAS_Q_OFFSET | FM_HAS_WINDOW, "mask");
  check_no_positions(tensor(m.q_pos, "mask->q_pos", device), "mask->q_pos");
  check_no_positions(tensor(m.k_pos, "mask->k_pos", device), "mask->k_pos");
  const std::optional<int64_t> q_offset = m.flags & FM_HAS_Q_OFFSET ? std::optional(m.q_offset) : std::nullopt;
  const TensorView bounds = tensor(m.bounds, "mask->bounds", device);
  const auto make = [&] {
    if (!bounds.defined()) return Mask({.seqlen_q = m.seqlen_q, .seqlen_k = m.seqlen_k, .q_offset = q_offset});
    if (bounds.rank == 4 && bounds.shape[2] != m.seqlen_k)
      throw_invalid("mask->bounds is ", describe(bounds), "; its third dimension must be mask->seqlen_k, ", m.seqlen_k);
    const auto from_bounds = of == Of::kShapes ? Outline::from_startend_row_indices : from_startend_row_indices;
    return from_bounds(bounds, (m.flags & FM_CAUSAL) != 0, m.seqlen_q, q_offset);
  };
  const auto with_blocks = [&](const Mask& mask) {
    const TensorView blocks = tensor(m.block_mask, "mask->block_mask", device);
    if (!blocks.defined()) return mask;
    return of == Of::kShapes ? Outline::with_block_mask(mask, blocks) : mask.with_block_mask(blocks);
  };
  return with_blocks(make().with_band(read_band(m)));
}

/// The layout of a mask's plan, from its shapes: what they are of may be on any device.
PlanLayout layout_of_plan(const Mask& mask) { return {mask.seqlen_q(), mask.seqlen_k(), mask.batch(), mask.heads()}; }

/// Refuses what only the C interface has a field for yet; features are for check() to judge.
void check_unimplemented(const fm_options& o) {
  for (const auto& [field, is_set] : {std::pair{"reserved", o.reserved[0] || o.reserved[1]},
                                      {"block_table", o.block_table.dtype != FM_NONE},
                                      {"partial_out", o.partial_out != 0},
                                      {"allocate", o.allocate != nullptr},
                                      {"allocate_context", o.allocate_context != nullptr},
                                      {"kernels", o.kernels != nullptr}}) {
    if (is_set) throw_unsupported("options->", field, " is set; it must be zero: it is not implemented");
  }
}

/// A call's options, with the device its tensors are on.
struct CallOptions {
  Options options;
  Device device;
  fm_executed_tiles* executed = nullptr;
  ExecutedTiles counted;

  explicit CallOptions(const fm_options* from) {
    if (!from) return;
    const auto o = read_struct(from, "options");
    check_flags(o.flags, FM_DETERMINISTIC | FM_HAS_SCALE, "options");
    check_unimplemented(o);
    options.deterministic = (o.flags & FM_DETERMINISTIC) != 0;
    if (o.flags & FM_HAS_SCALE) options.softmax_scale = o.softmax_scale;
    if (o.backend) options.backend = o.backend;
    options.threads = o.threads;
    options.max_ctas = o.max_ctas;
    options.stream = o.stream;
    executed = o.executed_tiles;
    if (o.device < 0)
      throw_invalid("options->device is ", o.device,
                    "; it must be FM_DEVICE_CPU (0) or 1 + the index of a CUDA device");
    if (o.device > 0) device = {Device::Kind::kCuda, o.device - 1};
    options.features = {.softcap = o.softcap,
                        .sink = tensor(o.sink, "sink", device),
                        .dropout = {.p = o.dropout_p, .state = o.dropout_state}};
  }
  /// The options to pass on; counting needs this object to stay where it is.
  const Options& with_counter() {
    if (executed) options.executed_tiles = &counted;
    return options;
  }
  void report() const {
    if (!executed) return;
    executed->forward += counted.forward;
    executed->backward_rows += counted.backward_rows;
    executed->backward_keys += counted.backward_keys;
  }
};

std::span<const std::byte> const_memory(const void* data, std::size_t bytes) {
  return {static_cast<const std::byte*>(data), bytes};
}

/// The plan of a call, which on a device says nothing itself: its layout is that of the call's mask.
PlanView read_plan(const void* plan, std::size_t bytes, const AttentionInputs& args, Device device) {
  if (device.kind == Device::Kind::kCpu) return PlanView(const_memory(plan, bytes));
  if (!args.mask && (args.q.rank != 4 || args.k.rank != 4)) return {};  // the call is going to be refused
  const PlanLayout layout = args.mask ? layout_of_plan(*args.mask) : PlanLayout(args.q.shape[1], args.k.shape[1], 1, 1);
  return PlanView::on_device(layout, const_memory(plan, bytes), device);
}

template <typename Args, typename CArgs>
void read_inputs(const CArgs& c, Device device, Of of, Args& args) {
  if (c.reserved) throw_unsupported("args->reserved is ", c.reserved, "; it must be zero");
  args.q = tensor(c.q, "q", device);
  args.k = tensor(c.k, "k", device);
  args.v = tensor(c.v, "v", device);
  args.out = tensor(c.out, "out", device);
  args.lse = tensor(c.lse, "lse", device);
  args.dense_mask = tensor(c.dense_mask, "dense_mask", device);
  if (c.mask) args.mask = read_mask(c.mask, device, of);
  if (c.plan) args.plan = read_plan(c.plan, c.plan_bytes, args, device);
}

ForwardArgs read_call(const fm_forward_args* from, Device device, Of of) {
  const auto c = read_struct(from, "args");
  ForwardArgs args;
  read_inputs(c, device, of, args);
  return args;
}

BackwardArgs read_call(const fm_backward_args* from, Device device, Of of) {
  const auto c = read_struct(from, "args");
  BackwardArgs args;
  read_inputs(c, device, of, args);
  args.dout = tensor(c.dout, "dout", device);
  args.dlse = tensor(c.dlse, "dlse", device);
  args.dq = tensor(c.dq, "dq", device);
  args.dk = tensor(c.dk, "dk", device);
  args.dv = tensor(c.dv, "dv", device);
  args.dsink = tensor(c.dsink, "dsink", device);
  return args;
}

std::size_t workspace_of(const ForwardArgs& args, const Options& options) { return forward_workspace(args, options); }
std::size_t workspace_of(const BackwardArgs& args, const Options& options) { return backward_workspace(args, options); }

/// The arguments with the mask's contents. In host memory these are read, so first a backend has to take a call of
/// these shapes; on a device they are borrowed.
template <typename CArgs>
auto read_args(const CArgs* from, const CallOptions& call) {
  if (call.device.kind != Device::Kind::kCpu) return read_call(from, call.device, Of::kContents);
  auto args = read_call(from, call.device, Of::kShapes);
  if (!args.mask) return args;
  workspace_of(args, call.options);
  args.mask = read_mask(read_struct(from, "args").mask, call.device, Of::kContents);
  return args;
}

/// What is said of a call; the mask's contents are read if there are live tiles to count.
template <typename CArgs>
Explanation explain_call(const CArgs* args, const CallOptions& call, const std::optional<GpuModel>& gpu = {}) {
  const Explanation of_shapes = explain(read_call(args, call.device, Of::kShapes), call.options, gpu);
  const bool counts = of_shapes.live_tiles < 0 && call.device.kind == Device::Kind::kCpu;
  return counts ? explain(read_args(args, call), call.options, gpu) : of_shapes;
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

/// As much of `full` as fits with its terminating zero.
void copy_text(const std::string& full, char* text, std::size_t capacity, std::size_t* length) {
  if (length) *length = full.size();
  if (capacity == 0) return;
  const std::size_t copied = std::min(full.size(), capacity - 1);
  std::memcpy(&required(text, "text"), full.data(), copied);
  text[copied] = '\0';
}

std::span<std::byte> memory(void* data, std::size_t bytes, const char* argument) {
  if (!data && bytes > 0) throw_invalid(argument, " is NULL but has ", bytes, " bytes");
  return {static_cast<std::byte*>(data), bytes};
}

}  // namespace
}  // namespace flashmask

using namespace flashmask;

uint32_t fm_abi_version(void) { return FM_ABI_VERSION; }

#define FLASHMASK_STRING_(x) #x
#define FLASHMASK_STRING(x) FLASHMASK_STRING_(x)
const char* fm_version(void) {
  return FLASHMASK_STRING(FLASHMASK_VERSION_MAJOR) "." FLASHMASK_STRING(FLASHMASK_VERSION_MINOR) "." FLASHMASK_STRING(
      FLASHMASK_VERSION_PATCH);
}

const char* fm_last_error(void) { return last_error.c_str(); }

fm_status fm_plan_bytes(const fm_mask* mask, size_t* bytes) {
  return guarded([&] {
    const PlanLayout layout = layout_of_plan(read_mask(mask, {}, Of::kShapes));
    required(bytes, "bytes") = static_cast<size_t>(layout.bytes);
  });
}

fm_status fm_plan_build(const fm_mask* mask, void* buffer, size_t bytes, const fm_options* options) {
  return guarded([&] {
    const CallOptions call(options);
    const std::span<std::byte> plan = memory(buffer, bytes, "buffer");
    check_plan_buffer("plan buffer", plan, layout_of_plan(read_mask(mask, call.device, Of::kShapes)));
    build_plan(read_mask(mask, call.device, Of::kContents).view(), plan, call.device, call.options.stream);
  });
}

fm_status fm_plan_validate(const fm_mask* mask, const void* plan, size_t plan_bytes, void* scratch,
                           size_t scratch_bytes, const fm_options* options) {
  return guarded([&] {
    const CallOptions call(options);
    required(static_cast<const std::byte*>(plan), "plan");
    AttentionInputs inputs;
    inputs.mask = read_mask(mask, call.device, Of::kShapes);
    const PlanView view = read_plan(plan, plan_bytes, inputs, call.device);
    // A plan of other shapes is refused without a look at the contents.
    if (view.layout() == layout_of_plan(*inputs.mask)) inputs.mask = read_mask(mask, call.device, Of::kContents);
    validate_plan(*inputs.mask, view, memory(scratch, scratch_bytes, "scratch"), call.options.stream);
  });
}

fm_status fm_mask_to_dense(const fm_mask* mask, const fm_tensor* visible) {
  return guarded([&] {
    const Mask shapes = read_mask(mask, {}, Of::kShapes);
    const TensorView out = tensor(required(visible, "visible"), "visible");
    const auto refuse = [&] {
      throw_invalid("visible is ", describe(out), "; it must be bool or uint8, contiguous, [", shapes.batch(), ", ",
                    shapes.heads(), ", ", shapes.seqlen_q(), ", ", shapes.seqlen_k(), "]");
    };
    const std::array<int64_t, TensorView::kMaxRank> shape{shapes.batch(), shapes.heads(), shapes.seqlen_q(),
                                                          shapes.seqlen_k()};
    if ((out.dtype != DataType::kBool && out.dtype != DataType::kUInt8) || out.rank != 4 || out.shape != shape)
      refuse();
    check_extent("visible", out);
    if (out.num_elements() == 0) return;
    if (out.stride != TensorView::contiguous(nullptr, out.dtype, {shape[0], shape[1], shape[2], shape[3]}).stride)
      refuse();
    check_data("visible", out);
    const std::vector<uint8_t> dense = to_dense(read_mask(mask, {}, Of::kContents));
    std::memcpy(out.data, dense.data(), dense.size());
  });
}

fm_status fm_forward_workspace(const fm_forward_args* args, const fm_options* options, size_t* bytes) {
  return guarded([&] {
    const CallOptions call(options);
    required(bytes, "bytes") = workspace_of(read_call(args, call.device, Of::kShapes), call.options);
  });
}

fm_status fm_forward(const fm_forward_args* args, void* workspace, size_t workspace_bytes, const fm_options* options) {
  return guarded([&] {
    CallOptions call(options);
    forward(read_args(args, call), memory(workspace, workspace_bytes, "workspace"), call.with_counter());
    call.report();
  });
}

fm_status fm_backward_workspace(const fm_backward_args* args, const fm_options* options, size_t* bytes) {
  return guarded([&] {
    const CallOptions call(options);
    required(bytes, "bytes") = workspace_of(read_call(args, call.device, Of::kShapes), call.options);
  });
}

fm_status fm_backward(const fm_backward_args* args, void* workspace, size_t workspace_bytes,
                      const fm_options* options) {
  return guarded([&] {
    CallOptions call(options);
    backward(read_args(args, call), memory(workspace, workspace_bytes, "workspace"), call.with_counter());
    call.report();
  });
}

fm_status fm_explain(const fm_forward_args* args, const fm_options* options, char* text, size_t capacity,
                     size_t* length) {
  return guarded([&] {
    const CallOptions call(options);
    copy_text(to_string(explain_call(args, call)), text, capacity, length);
  });
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
