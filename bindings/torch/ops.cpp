// SPDX-License-Identifier: Apache-2.0
//
// The PyTorch operators flashmask::plan, forward, arriving_forward, backward, partial_backward and build_mask over the
// C interface.
//
// Written against LibTorch's stable ABI: one binary serves every torch from 2.10 on and every Python. The C interface
// checks the arguments; here tensors become fm_tensor, outputs and workspace are allocated, and a status becomes an
// exception. Shapes, strides and devices pass through as they are: nothing is copied, but a dout that CUDA could not
// read.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "call.h"
#include "flashmask/options.def"
#include "schemas.h"

namespace {

const OptionalTensor kNoTensor;

/// A mask as the operators take it.
struct MaskArguments {
  const OptionalTensor& bounds;
  const OptionalTensor& block_mask;
  bool causal;
  std::optional<int64_t> q_offset;
  int64_t window_left, window_right;
  const OptionalTensor& q_pos;
  const OptionalTensor& k_pos;
  const OptionalTensor& column_ptr;
  const OptionalTensor& intervals;

  fm_mask read(const Call& call, int64_t seqlen_q, int64_t seqlen_k) const {
    fm_mask mask{};
    mask.struct_size = sizeof(mask);
    mask.seqlen_q = seqlen_q;
    mask.seqlen_k = seqlen_k;
    if (causal) mask.flags |= FM_CAUSAL;
    if (q_offset) {
      mask.flags |= FM_HAS_Q_OFFSET;
      mask.q_offset = *q_offset;
    }
    if (window_left != -1 || window_right != -1) {
      mask.flags |= FM_HAS_WINDOW;
      mask.window_left = window_left;
      mask.window_right = window_right;
    }
    mask.bounds = call(bounds, "startend_row_indices");
    mask.block_mask = call(block_mask, "block_mask");
    mask.q_pos = call(q_pos, "q_pos");
    mask.k_pos = call(k_pos, "k_pos");
    mask.column_ptr = call(column_ptr, "column_ptr");
    mask.intervals = call(intervals, "intervals");
    return mask;
  }
};

/// Seed and offset, which torch makes as int64.
const uint64_t* dropout_state_of(const OptionalTensor& state, const Call& call) {
  if (!state) return nullptr;
  call.check_place(*state, "dropout_state");
  if (torch_dtype(*state) != aoti_torch_dtype_int64() || state->dim() != 1 || state->size(0) != 2 ||
      state->stride(0) != 1)
    throw std::invalid_argument("dropout_state must be int64 [2], contiguous: a seed and an offset");
  return static_cast<const uint64_t*>(state->data_ptr());
}

// Parameters, arguments and members for the features of flashmask/options.def, and for dropout's origins.
#define FLASHMASK_TENSOR(field, ...) , const OptionalTensor& field
#define FLASHMASK_NUMBER(field, ...) , double field
#define FLASHMASK_COUNT(field, ...) , int64_t field
#define FLASHMASK_FLAG(field, ...) , bool field
#define FLASHMASK_FEATURE_PARAMETERS                                                                                 \
  , const OptionalTensor &dropout_q_origin,                                                                          \
      const OptionalTensor &dropout_k_origin FLASHMASK_FEATURES(FLASHMASK_TENSOR, FLASHMASK_NUMBER, FLASHMASK_COUNT, \
                                                                FLASHMASK_FLAG),                                     \
      int64_t dropout_first_head
#define FLASHMASK_ARGUMENT(field, ...) , field
#define FLASHMASK_FEATURE_ARGUMENTS                                                                   \
  , dropout_q_origin,                                                                                 \
      dropout_k_origin FLASHMASK_FEATURES(FLASHMASK_ARGUMENT, FLASHMASK_ARGUMENT, FLASHMASK_ARGUMENT, \
                                          FLASHMASK_ARGUMENT),                                        \
      dropout_first_head
#define FLASHMASK_TENSOR_MEMBER(field, ...) const OptionalTensor& field = kNoTensor;
#define FLASHMASK_NUMBER_MEMBER(field, ...) double field = 0;
#define FLASHMASK_COUNT_MEMBER(field, ...) int64_t field = 0;
#define FLASHMASK_FLAG_MEMBER(field, ...) bool field = false;
#define FLASHMASK_READ_TENSOR(field, ...) options.field = call(field, #field);
#define FLASHMASK_READ_NUMBER(field, ...) options.field = field;

/// Options as the operators take them.
struct OptionArguments {
  std::optional<double> softmax_scale;
  bool deterministic;
  const std::string& backend;
  int64_t max_ctas;
  const OptionalTensor& dropout_state = kNoTensor;
  const OptionalTensor& dropout_q_origin = kNoTensor;
  const OptionalTensor& dropout_k_origin = kNoTensor;
  FLASHMASK_FEATURES(FLASHMASK_TENSOR_MEMBER, FLASHMASK_NUMBER_MEMBER, FLASHMASK_COUNT_MEMBER, FLASHMASK_FLAG_MEMBER)
  int64_t dropout_first_head = 0;

  fm_options read(const Call& call, const Place& place) const {
    fm_options options = options_for(place);
    if (deterministic) options.flags |= FM_DETERMINISTIC;
    if (softmax_scale) {
      options.flags |= FM_HAS_SCALE;
      options.softmax_scale = *softmax_scale;
    }
    options.backend = backend.c_str();
    options.max_ctas = static_cast<int32_t>(std::clamp<int64_t>(max_ctas, INT32_MIN, INT32_MAX));
    FLASHMASK_FEATURES(FLASHMASK_READ_TENSOR, FLASHMASK_READ_NUMBER, FLASHMASK_READ_NUMBER, FLASHMASK_READ_NUMBER)
    options.dropout_state = dropout_state_of(dropout_state, call);
    options.dropout_q_origin = call(dropout_q_origin, "dropout_q_origin");
    options.dropout_k_origin = call(dropout_k_origin, "dropout_k_origin");
    options.dropout_first_head = dropout_first_head;
    return options;
  }
};

/// Dtype of lse and of the partial results that partial_out leaves to be added up.
int32_t partial_dtype(const Tensor& q) {
  const int32_t dtype = torch_dtype(q);
  return dtype == aoti_torch_dtype_float64() ? dtype : aoti_torch_dtype_float32();
}

void set_plan(const OptionalTensor& plan, const Call& call, const void*& data, size_t& bytes) {
  if (!plan) return;
  const fm_tensor buffer = call(plan, "plan");
  if (buffer.dtype != FM_UINT8 || buffer.ndim != 1)
    throw std::invalid_argument("plan must be what flashmask::plan returned: uint8, one dimension");
  data = buffer.data;
  bytes = static_cast<size_t>(buffer.shape[0]);
}

/// Sizes that the outputs are made of; whatever else is wrong is for the C interface to say.
int64_t size_of(const Tensor& tensor, int64_t dimension, const char* argument) {
  if (tensor.dim() != 4)
    throw std::invalid_argument(std::string(argument) + " has " + std::to_string(tensor.dim()) +
                                " dimensions; it must have 4, [batch, seqlen, heads, head_dim]");
  return tensor.size(dimension);
}

/// Bytes of the mask's plan: counted, as many as its contents need.
size_t plan_bytes(const fm_mask& mask, bool counted, const fm_options& options, const Place& place) {
  size_t most = 0, scratch = 0, bytes = 0;
  check(fm_plan_device_bytes(&mask, &options, counted ? nullptr : &most, &scratch), place);
  if (!counted) return most;
  const Tensor memory = empty_bytes("the plan's scratch", scratch, place);
  check(fm_plan_count_bytes(&mask, memory.data_ptr(), scratch, &options, &bytes), place);
  return bytes;
}

Tensor plan(const OptionalTensor& bounds, const OptionalTensor& block_mask, int64_t seqlen_q, int64_t seqlen_k,
            bool causal, std::optional<int64_t> q_offset, int64_t window_left, int64_t window_right,
            const torch::stable::Device& device, const OptionalTensor& q_pos, const OptionalTensor& k_pos,
            const OptionalTensor& column_ptr, const OptionalTensor& intervals, bool counted, int64_t max_mask_bytes) {
  const Place place = bounds       ? place_of(*bounds)
                      : block_mask ? place_of(*block_mask)
                      : q_pos      ? place_of(*q_pos)
                      : column_ptr ? place_of(*column_ptr)
                                   : place_of(device);
  const Call call(place, bounds ? "startend_row_indices" : "the call");
  const fm_mask mask = MaskArguments{bounds,       block_mask, causal, q_offset,   window_left,
                                     window_right, q_pos,      k_pos,  column_ptr, intervals}
                           .read(call, seqlen_q, seqlen_k);
  fm_options options = options_for(place);
  options.max_mask_bytes = max_mask_bytes;
  const size_t bytes = plan_bytes(mask, counted, options, place);
  const Tensor buffer = empty_bytes("the plan", bytes, place);
  check(fm_plan_build(&mask, buffer.data_ptr(), bytes, &options), place);
  return buffer;
}

void run_forward(const fm_forward_args& args, const fm_options& options, const Place& place) {
  run(fm_forward, "the forward's workspace", args, options, place);
}

void run_backward(const fm_backward_args& args, const fm_options& options, const Place& place) {
  run(fm_backward, "the backward's workspace", args, options, place);
}

/// Common part of the forward operators; arrivals may be null.
std::tuple<Tensor, Tensor> call_forward(const Call& call, const Place& place, const Tensor& q, const Tensor& k,
                                        const Tensor& v, const MaskArguments& mask_arguments,
                                        const OptionalTensor& plan_buffer, const OptionArguments& options,
                                        const fm_arrivals* arrivals) {
  const int64_t batch = size_of(q, 0, "query"), seqlen_q = size_of(q, 1, "query"), heads = size_of(q, 2, "query");
  const int64_t seqlen_k = size_of(k, 1, "key"), head_dim_v = size_of(v, 3, "value");
  fm_forward_args args{};
  args.struct_size = sizeof(args);
  args.q = call(q, "query");
  args.k = call(k, "key");
  args.v = call(v, "value");
  args.arrivals = arrivals;
  const fm_mask mask = mask_arguments.read(call, seqlen_q, seqlen_k);
  args.mask = &mask;
  set_plan(plan_buffer, call, args.plan, args.plan_bytes);
  const Tensor out = empty<4>("out", {batch, seqlen_q, heads, head_dim_v},
                              options.partial_out ? partial_dtype(q) : torch_dtype(q), place);
  const Tensor lse = empty<3>("lse", {batch, heads, seqlen_q}, partial_dtype(q), place);
  args.out = call(out, "out");
  args.lse = call(lse, "lse");
  run_forward(args, options.read(call, place), place);
  return {out, lse};
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& bounds,
                                   const OptionalTensor& block_mask, const OptionalTensor& plan_buffer,
                                   std::optional<double> softmax_scale, bool causal, std::optional<int64_t> q_offset,
                                   int64_t window_left, int64_t window_right, bool deterministic,
                                   const std::string& backend, int64_t max_ctas, const OptionalTensor& q_pos,
                                   const OptionalTensor& k_pos, const OptionalTensor& column_ptr,
                                   const OptionalTensor& intervals,
                                   const OptionalTensor& dropout_state FLASHMASK_FEATURE_PARAMETERS) {
  const Place place = place_of(q);
  return call_forward(
      Call(place, "query"), place, q, k, v,
      {bounds, block_mask, causal, q_offset, window_left, window_right, q_pos, k_pos, column_ptr, intervals},
      plan_buffer, {softmax_scale, deterministic, backend, max_ctas, dropout_state FLASHMASK_FEATURE_ARGUMENTS},
      nullptr);
}

std::tuple<Tensor, Tensor> arriving_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& needed,
                                            const Tensor& state, double timeout, const OptionalTensor& bounds,
                                            const OptionalTensor& block_mask, const OptionalTensor& plan_buffer,
                                            std::optional<double> softmax_scale, bool causal,
                                            std::optional<int64_t> q_offset, int64_t window_left, int64_t window_right,
                                            bool deterministic, const std::string& backend, int64_t max_ctas,
                                            const OptionalTensor& q_pos, const OptionalTensor& k_pos,
                                            const OptionalTensor& column_ptr, const OptionalTensor& intervals,
                                            const OptionalTensor& dropout_state FLASHMASK_FEATURE_PARAMETERS) {
  const Place place = place_of(q);
  const Call call(place, "query");
  const fm_arrivals arrivals{sizeof(arrivals), 0, call(needed, "needed"), call(state, "state"), timeout};
  return call_forward(
      call, place, q, k, v,
      {bounds, block_mask, causal, q_offset, window_left, window_right, q_pos, k_pos, column_ptr, intervals},
      plan_buffer, {softmax_scale, deterministic, backend, max_ctas, dropout_state FLASHMASK_FEATURE_ARGUMENTS},
      &arrivals);
}

/// True if the CUDA kernels can read a 16-bit tensor in place: its rows are contiguous, not broadcast, and aligned to
/// 16 bytes.
bool has_rows_for_cuda(const fm_tensor& t) {
  constexpr int64_t kAlignment = 16, kElements = kAlignment / 2;
  if (reinterpret_cast<std::uintptr_t>(t.data) % kAlignment != 0) return false;
  for (int d = 0; d < t.ndim; ++d) {
    if (t.shape[d] <= 1) continue;
    if (d == t.ndim - 1 ? t.stride[d] != 1 : t.stride[d] == 0 || t.stride[d] % kElements != 0) return false;
  }
  return true;
}

/// dout as the kernels take it. It comes from autograd, not the user: an expanded tensor after sum(), a slice after
/// cat(). The CPU reads any strides; CUDA reads most tensors in place and copies the others for the call.
Tensor readable(const Tensor& dout, const Call& call, const Place& place) {
  return place.is_cpu() || has_rows_for_cuda(call(dout, "dout")) ? dout : copy_of("a copy of dout", dout, place);
}

/// Common part of the backward operators: all but the options and the places of the results.
class BackwardCall {
 public:
  BackwardCall(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
               const Tensor& out, const Tensor& lse, const MaskArguments& mask, const OptionalTensor& plan)
      : place(place_of(q)),
        call(place, "query"),
        dout_(readable(dout, call, place)),
        mask_(mask.read(call, size_of(q, 1, "query"), size_of(k, 1, "key"))) {
    args.struct_size = sizeof(args);
    args.q = call(q, "query");
    args.k = call(k, "key");
    args.v = call(v, "value");
    args.out = call(out, "out");
    args.lse = call(lse, "lse");
    args.dout = call(dout_, "dout");
    args.dlse = call(dlse, "dlse");
    args.mask = &mask_;
    set_plan(plan, call, args.plan, args.plan_bytes);
  }
  BackwardCall(const BackwardCall&) = delete;
  BackwardCall& operator=(const BackwardCall&) = delete;

  void run(const OptionArguments& options) const { run_backward(args, options.read(call, place), place); }

  const Place place;
  const Call call;
  fm_backward_args args{};

 private:
  const Tensor dout_;
  const fm_mask mask_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(
    const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, const OptionalTensor& bounds, const OptionalTensor& block_mask,
    const OptionalTensor& plan_buffer, std::optional<double> softmax_scale, bool causal,
    std::optional<int64_t> q_offset, int64_t window_left, int64_t window_right, bool deterministic,
    const std::string& backend, int64_t max_ctas, const OptionalTensor& q_pos, const OptionalTensor& k_pos,
    const OptionalTensor& column_ptr, const OptionalTensor& intervals,
    const OptionalTensor& dropout_state FLASHMASK_FEATURE_PARAMETERS) {
  const MaskArguments mask{bounds,       block_mask, causal, q_offset,   window_left,
                           window_right, q_pos,      k_pos,  column_ptr, intervals};
  BackwardCall made(dout, dlse, q, k, v, out, lse, mask, plan_buffer);
  const Place& place = made.place;
  const Call& call = made.call;
  const int32_t dtype = partial_out ? partial_dtype(q) : torch_dtype(q);
  const Tensor dq = empty_like("dq", q, partial_out ? torch_dtype(out) : dtype, place),
               dk = empty_like("dk", k, dtype, place), dv = empty_like("dv", v, dtype, place);
  made.args.dq = call(dq, "dq");
  made.args.dk = call(dk, "dk");
  made.args.dv = call(dv, "dv");
  const Tensor dsink = sink ? empty_like("dsink", *sink, torch_dtype(*sink), place)
                            : empty<1>("dsink", {0}, aoti_torch_dtype_float32(), place);
  if (sink) made.args.dsink = call(dsink, "dsink");
  made.run({softmax_scale, deterministic, backend, max_ctas, dropout_state FLASHMASK_FEATURE_ARGUMENTS});
  return {dq, dk, dv, dsink};
}

/// A contiguous tensor of `shape` in a one-dimensional `buffer`, from element `first` on.
fm_tensor part_of(fm_tensor buffer, int64_t first, int64_t element_size, const Tensor& shape) {
  buffer.data = static_cast<char*>(buffer.data) + first * element_size;
  buffer.ndim = static_cast<int32_t>(shape.dim());
  int64_t stride = 1;
  for (int32_t d = buffer.ndim - 1; d >= 0; --d) {
    buffer.shape[d] = shape.size(d);
    buffer.stride[d] = stride;
    stride *= shape.size(d);
  }
  return buffer;
}

std::tuple<Tensor, Tensor> partial_backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q,
                                            const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& lse,
                                            const OptionalTensor& bounds, const OptionalTensor& block_mask,
                                            const OptionalTensor& plan_buffer, std::optional<double> softmax_scale,
                                            bool causal, std::optional<int64_t> q_offset, int64_t window_left,
                                            int64_t window_right, bool deterministic, const std::string& backend,
                                            int64_t max_ctas, const OptionalTensor& q_pos, const OptionalTensor& k_pos,
                                            const OptionalTensor& column_ptr, const OptionalTensor& intervals) {
  const MaskArguments mask{bounds,       block_mask, causal, q_offset,   window_left,
                           window_right, q_pos,      k_pos,  column_ptr, intervals};
  BackwardCall made(dout, dlse, q, k, v, out, lse, mask, plan_buffer);
  const Place& place = made.place;
  const Call& call = made.call;
  const int32_t dtype = partial_dtype(q);
  const Tensor dq = empty_like("dq", q, torch_dtype(out), place),
               dkv = empty<1>("dk and dv", {k.numel() + v.numel()}, dtype, place);
  const int64_t element_size = dtype == aoti_torch_dtype_float64() ? 8 : 4;
  const fm_tensor buffer = call(dkv, "dk and dv");
  made.args.dq = call(dq, "dq");
  made.args.dk = part_of(buffer, 0, element_size, k);
  made.args.dv = part_of(buffer, k.numel(), element_size, v);
  made.run({.softmax_scale = softmax_scale,
            .deterministic = deterministic,
            .backend = backend,
            .max_ctas = max_ctas,
            .partial_out = true});
  return {dq, dkv};
}

std::tuple<Tensor, Tensor, Tensor> early_backward(
    const Tensor& dout, const OptionalTensor& dlse, const Tensor& q, const Tensor& k, const Tensor& v,
    const Tensor& out, const Tensor& lse, const OptionalTensor& bounds, const OptionalTensor& block_mask,
    const OptionalTensor& plan_buffer, const Tensor& early_dk, const Tensor& early_dv, int64_t event, int64_t stream,
    std::optional<double> softmax_scale, bool causal, std::optional<int64_t> q_offset, int64_t window_left,
    int64_t window_right, bool deterministic, const std::string& backend, int64_t max_ctas, const OptionalTensor& q_pos,
    const OptionalTensor& k_pos, const OptionalTensor& column_ptr, const OptionalTensor& intervals,
    const OptionalTensor& dropout_state FLASHMASK_FEATURE_PARAMETERS) {
  const MaskArguments mask{bounds,       block_mask, causal, q_offset,   window_left,
                           window_right, q_pos,      k_pos,  column_ptr, intervals};
  BackwardCall made(dout, dlse, q, k, v, out, lse, mask, plan_buffer);
  const Place& place = made.place;
  const Call& call = made.call;
  const int64_t keys = size_of(k, 1, "key") - size_of(early_dk, 1, "dk"), rows = k.size(0) * std::max<int64_t>(keys, 0);
  const int64_t dk_elements = rows * k.size(2) * k.size(3), dv_elements = rows * v.size(2) * size_of(v, 3, "value");
  const Tensor dq = empty_like("dq", q, torch_dtype(out), place),
               dkv = empty<1>("dk and dv", {dk_elements + dv_elements}, partial_dtype(q), place);
  const auto gradient = [&](int64_t first, const Tensor& of) {
    fm_tensor shaped = call(of, "early dk and dv");  // its heads and head_dim
    shaped.shape[1] = keys;
    int64_t stride = 1;
    for (int32_t d = 3; d >= 0; --d) {
      shaped.stride[d] = stride;
      stride *= shaped.shape[d];
    }
    shaped.data = static_cast<char*>(dkv.data_ptr()) + first * 4;
    return shaped;
  };
  const fm_early_keys early{sizeof(early),
                            0,
                            call(early_dk, "early dk"),
                            call(early_dv, "early dv"),
                            reinterpret_cast<void*>(event),
                            reinterpret_cast<void*>(stream)};
  made.args.dq = call(dq, "dq");
  made.args.dk = gradient(0, early_dk);
  made.args.dv = gradient(dk_elements, early_dv);
  made.args.early = &early;
  const Tensor dsink = sink ? empty_like("dsink", *sink, torch_dtype(*sink), place)
                            : empty<1>("dsink", {0}, aoti_torch_dtype_float32(), place);
  if (sink) made.args.dsink = call(dsink, "dsink");
  made.run({softmax_scale, deterministic, backend, max_ctas, dropout_state FLASHMASK_FEATURE_ARGUMENTS});
  return {dq, dkv, dsink};
}

/// The parameters of a mask family as the C interface takes them.
class FamilyParameters {
 public:
  FamilyParameters(const std::vector<Tensor>& vectors, const std::string& names, const std::vector<int64_t>& numbers,
                   const Call& call) {
    std::istringstream split(names);
    for (std::string name; std::getline(split, name, ',');) names_.push_back(name);
    if (names_.size() != vectors.size() + numbers.size())
      throw std::invalid_argument("names are " + std::to_string(names_.size()) + ", for " +
                                  std::to_string(vectors.size()) + " vectors and " + std::to_string(numbers.size()) +
                                  " numbers");
    for (size_t n = 0; n < names_.size(); ++n) {
      fm_mask_parameter item{names_[n].c_str(), {}, 0};
      if (n < vectors.size())
        item.vector = call.describe(vectors[n], item.name, integer_dtype_of(vectors[n], item.name));
      else
        item.number = numbers[n - vectors.size()];
      items_.push_back(item);
    }
  }
  void add_output(const char* name, const Tensor& tensor, fm_dtype dtype, const Call& call) {
    items_.push_back({name, call.describe(tensor, name, dtype), 0});
  }
  fm_mask_parameters read() const {
    return {sizeof(fm_mask_parameters), static_cast<uint32_t>(items_.size()), items_.data()};
  }

 private:
  static fm_dtype integer_dtype_of(const Tensor& tensor, const char* name) {
    return torch_dtype(tensor) == aoti_torch_dtype_int64() ? FM_INT64 : dtype_of(tensor, name);
  }

  std::vector<std::string> names_;
  std::vector<fm_mask_parameter> items_;
};

std::tuple<Tensor, Tensor, Tensor, Tensor> build_mask(const std::string& family, const std::vector<Tensor>& vectors,
                                                      const std::string& names, const std::vector<int64_t>& numbers,
                                                      const std::vector<int64_t>& shape, bool checked,
                                                      const torch::stable::Device& device) {
  const Place place = vectors.empty() ? place_of(device) : place_of(vectors[0]);
  const Call call(place, vectors.empty() ? "the call" : "the first of them");
  FamilyParameters parameters(vectors, names, numbers, call);
  const fm_options options = options_for(place);
  fm_mask mask{};
  mask.struct_size = sizeof(mask);
  fm_mask_parameters given = parameters.read();
  check(fm_mask_shape(family.c_str(), &given, &mask, &options), place);
  const int64_t* const sizes = mask.bounds.shape;
  if (mask.bounds.ndim != 4) throw std::invalid_argument(family + " is only a band: there are no bounds to build");
  const Tensor bounds = empty<4>("the mask", {sizes[0], sizes[1], sizes[2], sizes[3]}, aoti_torch_dtype_int32(), place);
  const bool has_order = shape.at(2) != 0, has_flag = checked && !place.is_cpu();
  const Tensor order =
      empty<3>("the order", {sizes[0], sizes[1], has_order ? sizes[2] : 0}, aoti_torch_dtype_int64(), place);
  const Tensor unfit = empty<1>("unfit", {has_flag}, aoti_torch_dtype_int32(), place);
  if (has_order) parameters.add_output("order_out", order, FM_INT64, call);
  if (has_flag) parameters.add_output("unfit_out", unfit, FM_INT32, call);
  mask.bounds.data = bounds.data_ptr();
  const bool has_positions = mask.q_pos.dtype != FM_NONE;
  const Tensor positions =
      empty<2>("positions", {sizes[0], has_positions ? sizes[2] : 0}, aoti_torch_dtype_int32(), place);
  if (has_positions) mask.q_pos.data = mask.k_pos.data = positions.data_ptr();
  given = parameters.read();
  const auto build = [&](const fm_mask_parameters* all, void*, size_t, const fm_options* with) {
    return fm_mask_build(family.c_str(), all, &mask, with);
  };
  run(build, "the mask's scratch", given, options, place);
  return {bounds, order, unfit, positions};
}

}  // namespace

STABLE_TORCH_LIBRARY(flashmask, m) {
  m.def(schemas::kPlan);
  m.def(schemas::kForward);
  m.def(schemas::kArrivingForward);
  m.def(schemas::kBackward);
  m.def(schemas::kPartialBackward);
  m.def(schemas::kEarlyBackward);
  m.def(schemas::kBuildMask);
}

// A plan of a mask without tensors has nothing to dispatch on, nor have families of numbers.
STABLE_TORCH_LIBRARY_IMPL(flashmask, CompositeExplicitAutograd, m) {
  m.impl("plan", TORCH_BOX(&plan));
  m.impl("build_mask", TORCH_BOX(&build_mask));
}

STABLE_TORCH_LIBRARY_IMPL(flashmask, CPU, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("arriving_forward", TORCH_BOX(&arriving_forward));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("partial_backward", TORCH_BOX(&partial_backward));
  m.impl("early_backward", TORCH_BOX(&early_backward));
}

STABLE_TORCH_LIBRARY_IMPL(flashmask, CUDA, m) {
  m.impl("forward", TORCH_BOX(&forward));
  m.impl("arriving_forward", TORCH_BOX(&arriving_forward));
  m.impl("backward", TORCH_BOX(&backward));
  m.impl("partial_backward", TORCH_BOX(&partial_backward));
  m.impl("early_backward", TORCH_BOX(&early_backward));
}
