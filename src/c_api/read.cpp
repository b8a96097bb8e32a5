// SPDX-License-Identifier: Apache-2.0
#include "c_api/read.h"

#include <utility>

#include "common/tensor_checks.h"
#include "flashmask/options.def"
#include "flashmask/version.h"
#include "mask/content_hash.h"
#include "mask/interval_lists.h"
#include "plan/plan_buffer.h"

namespace flashmask::c_api {
namespace {

thread_local std::string last_error;
thread_local int64_t last_error_column = -1;

/// The band of causal and window together.
Band read_band(const fm_mask& m) {
  Band band = m.flags & FM_HAS_WINDOW ? Band::window(m.window_left, m.window_right) : Band::none();
  if (m.flags & FM_CAUSAL) band.hi = band.hi ? std::min<int64_t>(*band.hi, 0) : 0;
  return band;
}

MaskTensors read_tensors(const fm_mask* from, Device device) {
  const auto m = read_struct(from, "mask");
  check_flags(m.flags, FM_CAUSAL | FM_HAS_Q_OFFSET | FM_HAS_WINDOW, "mask");
  const MaskTensors mask{.seqlen_q = m.seqlen_q,
                         .seqlen_k = m.seqlen_k,
                         .band = read_band(m),
                         .q_offset = m.flags & FM_HAS_Q_OFFSET ? std::optional(m.q_offset) : std::nullopt,
                         .causal = (m.flags & FM_CAUSAL) != 0,
                         .indices = tensor(m.bounds, "mask->bounds", device),
                         .block_mask = tensor(m.block_mask, "mask->block_mask", device),
                         .q_pos = tensor(m.q_pos, "mask->q_pos", device),
                         .k_pos = tensor(m.k_pos, "mask->k_pos", device),
                         .column_ptr = tensor(m.column_ptr, "mask->column_ptr", device),
                         .intervals = tensor(m.intervals, "mask->intervals", device)};
  const TensorView& bounds = mask.indices;
  if (bounds.rank == 4 && bounds.shape[2] != m.seqlen_k)
    throw_invalid("startend_row_indices is ", describe(bounds), "; its third dimension must be seqlen_k, ", m.seqlen_k);
  return mask;
}

/// 0 or 1.
bool flag(uint32_t value, const char* field) {
  if (value > 1) throw_unsupported("options->", field, " is ", value, "; it must be 0 or 1");
  return value != 0;
}

Features read_features(const fm_options& o, Device device) {
  Features features;
#define FLASHMASK_TENSOR(field, member, ...) features.member = tensor(o.field, #field, device);
#define FLASHMASK_NUMBER(field, member, ...) features.member = o.field;
#define FLASHMASK_FLAG(field, member) features.member = flag(o.field, #field);
  FLASHMASK_FEATURES(FLASHMASK_TENSOR, FLASHMASK_NUMBER, FLASHMASK_NUMBER, FLASHMASK_FLAG)
#undef FLASHMASK_FLAG
#undef FLASHMASK_NUMBER
#undef FLASHMASK_TENSOR
  features.dropout.state = o.dropout_state;
  features.dropout.q_origin = tensor(o.dropout_q_origin, "dropout_q_origin", device);
  features.dropout.k_origin = tensor(o.dropout_k_origin, "dropout_k_origin", device);
  features.dropout.first_head = o.dropout_first_head;
  return features;
}

std::span<const std::byte> const_memory(const void* data, std::size_t bytes) {
  return {static_cast<const std::byte*>(data), bytes};
}

}  // namespace

void copy_text(const std::string& full, char* text, std::size_t capacity, std::size_t* length) {
  if (length) *length = full.size();
  if (capacity == 0) return;
  const std::size_t copied = std::min(full.size(), capacity - 1);
  std::memcpy(&required(text, "text"), full.data(), copied);
  text[copied] = '\0';
}

void set_last_error(std::string text, int64_t column) {
  last_error = std::move(text);
  last_error_column = column;
}

void check_flags(uint32_t flags, uint32_t known, const char* argument) {
  if (flags & ~known) throw_unsupported(argument, "->flags has unknown bits ", flags & ~known);
}

TensorView tensor(const fm_tensor& t, const char* argument, Device device) {
  TensorView view;
  if (t.dtype == FM_NONE) return view;
  if (t.dtype < FM_NONE || t.dtype > FM_FLOAT8_E4M3)
    throw_invalid(argument, ".dtype is ", t.dtype, "; it must be one of fm_dtype, 0 to ",
                  static_cast<int>(FM_FLOAT8_E4M3));
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

double timeout_of(double seconds, const char* argument) {
  if (seconds == 0) return Arrivals{}.timeout;
  if (!(seconds > 0 && seconds <= kMostArrivalTimeout))
    throw_invalid(argument, " is ", seconds, "; it must be 0 (the default), or above 0 and at most ",
                  kMostArrivalTimeout, " seconds");
  return seconds;
}

std::span<std::byte> memory(void* data, std::size_t bytes, const char* argument) {
  if (!data && bytes > 0) throw_invalid(argument, " is NULL but has ", bytes, " bytes");
  return {static_cast<std::byte*>(data), bytes};
}

CallMask::CallMask(const fm_mask* from, Device device)
    : tensors_(read_tensors(from, device)), view_(view_of(tensors_)) {}

const MaskView& CallMask::contents() {
  if (view_.content_hash != 0) return view_;  // it has none
  check_contents(tensors_);
  if (view_.device.kind == Device::Kind::kCpu && !can_be_borrowed(tensors_)) view_ = copy_.emplace(copy()).view();
  return view_;
}

const MaskView& CallMask::hashed_contents() {
  contents();
  if (view_.content_hash == 0 && view_.device.kind == Device::Kind::kCpu) view_.content_hash = content_hash::of(view_);
  return view_;
}

Mask CallMask::copy() const {
  const MaskTensors& t = tensors_;
  MaskParts others{.seqlen_q = t.seqlen_q, .seqlen_k = t.seqlen_k, .q_offset = t.q_offset};
  if (t.column_ptr.defined()) read_interval_lists(t, others);
  const Mask vectors = t.indices.defined() ? from_startend_row_indices(t.indices, t.causal, t.seqlen_q, t.q_offset)
                                           : Mask(std::move(others));
  Mask mask = vectors.with_band(t.band);
  if (t.block_mask.defined()) mask = mask.with_block_mask(t.block_mask);
  return t.q_pos.defined() ? mask.with_positions(t.q_pos, t.k_pos) : mask;
}

CallOptions::CallOptions(const fm_options* from) {
  if (!from) return;
  const auto o = read_struct(from, "options");
  check_flags(o.flags, FM_DETERMINISTIC | FM_HAS_SCALE, "options");
  if (o.reserved[0] || o.reserved[1]) throw_unsupported("options->reserved is set; it must be zero");
  options.deterministic = (o.flags & FM_DETERMINISTIC) != 0;
  if (o.flags & FM_HAS_SCALE) options.softmax_scale = o.softmax_scale;
  if (o.backend) options.backend = o.backend;
  if (o.kernels) options.kernels = o.kernels;
  options.threads = o.threads;
  options.max_ctas = o.max_ctas;
  options.max_mask_bytes = o.max_mask_bytes;
  options.stream = o.stream;
  executed = o.executed_tiles;
  allocate = o.allocate;
  allocate_context = o.allocate_context;
  if (allocate_context && !allocate) throw_invalid("options->allocate_context is set and options->allocate is NULL");
  if (o.device < 0)
    throw_invalid("options->device is ", o.device, "; it must be FM_DEVICE_CPU (0) or 1 + the index of a CUDA device");
  if (o.device > 0) device = {Device::Kind::kCuda, o.device - 1};
  options.features = read_features(o, device);
}

const Options& CallOptions::with_counter() {
  if (executed) options.executed_tiles = &counted;
  return options;
}

void CallOptions::report() const {
  if (!executed) return;
  executed->forward += counted.forward;
  executed->backward_rows += counted.backward_rows;
  executed->backward_keys += counted.backward_keys;
}

PlanView read_plan(const void* plan, std::size_t bytes, const AttentionInputs& args, const MaskView* mask,
                   Device device) {
  if (device.kind == Device::Kind::kCpu) return PlanView(const_memory(plan, bytes));
  if (!mask && (args.q.rank != 4 || args.k.rank != 4)) return {};                // the call is going to be refused
  const MaskView all{.seqlen_q = args.q.shape[1], .seqlen_k = args.k.shape[1]};  // no mask hides nothing
  const PlanLayout layout = plan_layout(mask ? *mask : all, device, bytes);
  return PlanView::on_device(layout, const_memory(plan, bytes), device);
}

}  // namespace flashmask::c_api

uint32_t fm_abi_version(void) { return FM_ABI_VERSION; }

#define FLASHMASK_STRING_(x) #x
#define FLASHMASK_STRING(x) FLASHMASK_STRING_(x)
const char* fm_version(void) {
  return FLASHMASK_STRING(FLASHMASK_VERSION_MAJOR) "." FLASHMASK_STRING(FLASHMASK_VERSION_MINOR) "." FLASHMASK_STRING(
      FLASHMASK_VERSION_PATCH);
}

const char* fm_last_error(void) { return flashmask::c_api::last_error.c_str(); }

int64_t fm_last_error_column(void) { return flashmask::c_api::last_error_column; }
