// SPDX-License-Identifier: Apache-2.0
#include "flashmask/c_api.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <type_traits>

#include "backends/call.h"
#include "common/message.h"
#include "common/tensor_checks.h"
#include "flashmask/attention.h"
#include "flashmask/mask.h"
#include "flashmask/plan.h"
#include "flashmask/version.h"
#include "mask/mask_tensors.h"
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

void check_no_positions(const TensorView& positions, const char* argument) {
  if (positions.defined())
    throw_unsupported(argument, " is ", describe(positions), "; it must be absent: positions are not implemented");
}

MaskTensors read_tensors(const fm_mask* from, Device device) {
  const auto m = read_struct(from, "mask");
  check_flags(m.flags, FM_CAUSAL | FM_HAS_Q_OFFSET | FM_HAS_WINDOW, "mask");
  check_no_positions(tensor(m.q_pos, "mask->q_pos", device), "mask->q_pos");
  check_no_positions(tensor(m.k_pos, "mask->k_pos", device), "mask->k_pos");
  const MaskTensors mask{.seqlen_q = m.seqlen_q,
                         .seqlen_k = m.seqlen_k,
                         .band = read_band(m),
                         .q_offset = m.flags & FM_HAS_Q_OFFSET ? std::optional(m.q_offset) : std::nullopt,
                         .causal = (m.flags & FM_CAUSAL) != 0,
                         .indices = tensor(m.bounds, "mask->bounds", device),
                         .block_mask = tensor(m.block_mask, "mask->block_mask", device)};
  const TensorView& bounds = mask.indices;
  if (bounds.rank == 4 && bounds.shape[2] != m.seqlen_k)
    throw_invalid("mask->bounds is ", describe(bounds), "; its third dimension must be mask->seqlen_k, ", m.seqlen_k);
  return mask;
}

/// A mask of the C interface: first its shapes, which are checked before anything of it is read. Its contents on a
/// device are borrowed, those in host memory copied.
class CallMask {
 public:
  CallMask(const fm_mask* from, Device device) : tensors_(read_tensors(from, device)), device_(device) {
    view_ = view_of(tensors_, Of::kShapes);
  }
  /// Without contents until they are read.
  const MaskView& view() const { return view_; }
  const MaskView& read_contents() {
    if (view_.content_hash != 0) return view_;  // it has none
    if (device_.kind != Device::Kind::kCpu) return view_ = view_of(tensors_, Of::kContents);
    copy_ = copy();
    return view_ = copy_->view();
  }
  /// In host memory.
  Mask copy() const {
    const MaskTensors& t = tensors_;
    const Mask vectors = t.indices.defined()
                             ? from_startend_row_indices(t.indices, t.causal, t.seqlen_q, t.q_offset)
                             : Mask({.seqlen_q = t.seqlen_q, .seqlen_k = t.seqlen_k, .q_offset = t.q_offset});
    const Mask with_band = vectors.with_band(t.band);
    return t.block_mask.defined() ? with_band.with_block_mask(t.block_mask) : with_band;
  }

 private:
  MaskTensors tensors_;
  Device device_;
  MaskView view_;
  std::optional<Mask> copy_;
};

/// Refuses what only the C interface has a field for yet; features are for check() to judge.
void check_unimplemented(const fm_options& o) {
  for (const auto& [field, is_set] : {std::pair{"reserved", o.reserved[0] || o.reserved[1]},
                                      {"block_table", o.block_table.dtype != FM_NONE},
                                      {"partial_out", o.partial_out != 0}}) {
    if (is_set) throw_unsupported("options->", field, " is set; it must be zero: it is not implemented");
  }
}

/// A call's options, with the device its tensors are on.
struct CallOptions {
  Options options;
  Device device;
  fm_allocate allocate = nullptr;
  void* allocate_context = nullptr;
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
    if (o.kernels) options.kernels = o.kernels;
    options.threads = o.threads;
    options.max_ctas = o.max_ctas;
    options.stream = o.stream;
    executed = o.executed_tiles;
    allocate = o.allocate;
    allocate_context = o.allocate_context;
    if (allocate_context && !allocate) throw_invalid("options->allocate_context is set and options->allocate is NULL");
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
PlanView read_plan(const void* plan, std::size_t bytes, const AttentionInputs& args, const MaskView* mask,
                   Device device) {
  if (device.kind == Device::Kind::kCpu) return PlanView(const_memory(plan, bytes));
  if (!mask && (args.q.rank != 4 || args.k.rank != 4)) return {};  // the call is going to be refused
  const PlanLayout layout = mask ? layout_of_plan(*mask) : PlanLayout(args.q.shape[1], args.k.shape[1], 1, 1);
  return PlanView::on_device(layout, const_memory(plan, bytes), device);
}

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

ForwardArgs read_args(const fm_forward_args& c, const MaskView* mask, Device device) {
  ForwardArgs args;
  read_inputs(c, mask, device, args);
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
  return args;
}

/// A call's arguments as the library takes them, its mask apart.
template <typename CArgs>
class CallArgs {
 public:
  CallArgs(const CArgs* from, Device device) : from_(read_struct(from, "args")) {
    if (from_.mask) mask_.emplace(from_.mask, device);
    args_ = read_args(from_, mask(), device);
  }
  const auto& args() const { return args_; }
  /// Null: the call has none.
  const MaskView* mask() const { return mask_ ? &mask_->view() : nullptr; }
  /// The mask's contents, for a call that some backend takes; null if it has no mask.
  const MaskView* read_mask() { return mask_ ? &mask_->read_contents() : nullptr; }

 private:
  CArgs from_;
  std::optional<CallMask> mask_;
  std::conditional_t<std::is_same_v<CArgs, fm_forward_args>, ForwardArgs, BackwardArgs> args_;
};

template <typename CArgs>
std::size_t workspace_of(const CArgs* from, const fm_options* options) {
  const CallOptions call(options);
  const CallArgs<CArgs> args(from, call.device);
  return Call(args.args(), args.mask(), call.options, false).workspace_bytes();
}

/// The caller's workspace, or one that its allocate gives.
std::span<std::byte> workspace_for(const Call& call, std::span<std::byte> given, const CallOptions& options) {
  if (!options.allocate) return given;
  if (given.data()) throw_invalid("workspace and options->allocate are both given; one must be NULL");
  const std::size_t bytes = call.workspace_bytes();
  if (bytes == 0) return {};
  void* const memory = options.allocate(options.allocate_context, bytes);
  if (!memory)
    throw Error(ErrorCode::kOutOfMemory,
                message("options->allocate gave no memory for a workspace of ", bytes, " bytes"));
  return {static_cast<std::byte*>(memory), bytes};
}

template <typename CArgs>
void run(const CArgs* from, std::span<std::byte> workspace, const fm_options* options) {
  CallOptions call_options(options);
  CallArgs<CArgs> args(from, call_options.device);
  Call call(args.args(), args.mask(), call_options.with_counter(), true);
  if (const MaskView* mask = args.read_mask()) call.set_mask(*mask);
  call.run(workspace_for(call, workspace, call_options));
  call_options.report();
}

/// What is said of a call; the mask's contents are read if there are live tiles to count.
template <typename CArgs>
Explanation explain_call(const CArgs* from, const CallOptions& call, const std::optional<GpuModel>& gpu = {}) {
  CallArgs<CArgs> args(from, call.device);
  Problem problem = check(args.args(), args.mask(), call.options, false);
  problem.gpu = gpu;
  const Explanation of_shapes = explain_problem(problem, call.options.backend);
  const bool counts = of_shapes.live_tiles < 0 && call.device.kind == Device::Kind::kCpu;
  if (!counts) return of_shapes;
  problem.mask = *args.read_mask();
  if (problem.plan.defined()) check_plan(problem);
  return explain_problem(problem, call.options.backend);
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
    const PlanLayout layout = layout_of_plan(CallMask(mask, {}).view());
    required(bytes, "bytes") = static_cast<size_t>(layout.bytes);
  });
}

fm_status fm_plan_build(const fm_mask* mask, void* buffer, size_t bytes, const fm_options* options) {
  return guarded([&] {
    const CallOptions call(options);
    const std::span<std::byte> plan = memory(buffer, bytes, "buffer");
    CallMask of(mask, call.device);
    check_plan_buffer("plan buffer", plan, layout_of_plan(of.view()));
    build_plan(of.read_contents(), plan, call.device, call.options.stream);
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
    if (view.layout() == layout_of_plan(of.view())) of.read_contents();
    validate_plan(of.view(), view, memory(scratch, scratch_bytes, "scratch"), call.options.stream);
  });
}

fm_status fm_mask_to_dense(const fm_mask* mask, const fm_tensor* visible) {
  return guarded([&] {
    const CallMask of(mask, {});
    const MaskView& shapes = of.view();
    const TensorView out = tensor(required(visible, "visible"), "visible");
    const auto refuse = [&] {
      throw_invalid("visible is ", describe(out), "; it must be bool or uint8, contiguous, [", shapes.batch(), ", ",
                    shapes.heads(), ", ", shapes.seqlen_q, ", ", shapes.seqlen_k, "]");
    };
    const std::array<int64_t, TensorView::kMaxRank> shape{shapes.batch(), shapes.heads(), shapes.seqlen_q,
                                                          shapes.seqlen_k};
    if ((out.dtype != DataType::kBool && out.dtype != DataType::kUInt8) || out.rank != 4 || out.shape != shape)
      refuse();
    check_extent("visible", out);
    if (out.num_elements() == 0) return;
    if (out.stride != TensorView::contiguous(nullptr, out.dtype, {shape[0], shape[1], shape[2], shape[3]}).stride)
      refuse();
    check_data("visible", out);
    const std::vector<uint8_t> dense = to_dense(of.copy());
    std::memcpy(out.data, dense.data(), dense.size());
  });
}

fm_status fm_forward_workspace(const fm_forward_args* args, const fm_options* options, size_t* bytes) {
  return guarded([&] { required(bytes, "bytes") = workspace_of(args, options); });
}

fm_status fm_forward(const fm_forward_args* args, void* workspace, size_t workspace_bytes, const fm_options* options) {
  return guarded([&] { run(args, memory(workspace, workspace_bytes, "workspace"), options); });
}

fm_status fm_backward_workspace(const fm_backward_args* args, const fm_options* options, size_t* bytes) {
  return guarded([&] { required(bytes, "bytes") = workspace_of(args, options); });
}

fm_status fm_backward(const fm_backward_args* args, void* workspace, size_t workspace_bytes,
                      const fm_options* options) {
  return guarded([&] { run(args, memory(workspace, workspace_bytes, "workspace"), options); });
}

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
