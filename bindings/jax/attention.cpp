// SPDX-License-Identifier: Apache-2.0
//
// Forward, backward and the plan of a mask, on the host and on CUDA.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common.h"
#include "flashmask/options.def"

// Members for the features of flashmask/options.def, which have an attribute each: of a tensor that it is there.
#define FLASHMASK_NONE(...)
#define FLASHMASK_HAS_TENSOR(field, ...) bool has_##field;
#define FLASHMASK_NUMBER(field, ...) double field;
#define FLASHMASK_COUNT(field, ...) int64_t field;
#define FLASHMASK_TENSOR(field, ...) fm_tensor field{};

namespace {

/// Attributes of a call beside its arrays, as in fm_mask and fm_options.
struct Attributes {
  int64_t mask_flags, q_offset, window_left, window_right;
  bool has_bounds, has_block_mask, has_lists, has_dropout_state, has_plan, has_dlse;
  int64_t flags;
  double softmax_scale;
  std::string_view backend;
  FLASHMASK_FEATURES(FLASHMASK_HAS_TENSOR, FLASHMASK_NUMBER, FLASHMASK_COUNT, FLASHMASK_NONE)
};

/// Attributes of a mask beside its arrays, with the lengths that no q and k give.
struct PlanAttributes {
  int64_t seqlen_q, seqlen_k, mask_flags, q_offset, window_left, window_right;
  bool has_bounds, has_block_mask, has_lists;
};

/// The arrays of a call in their order; its attributes say which are missing.
class Arrays {
 public:
  explicit Arrays(ffi::RemainingArgs arguments) : arguments_(arguments) {}

  fm_tensor next(bool is_given = true) {
    if (!is_given) return {};
    const auto buffer = arguments_.get<ffi::AnyBuffer>(next_++);
    return buffer ? tensor_of(*buffer) : fm_tensor{};
  }

 private:
  ffi::RemainingArgs arguments_;
  size_t next_ = 0;
};

template <typename Attrs>
fm_mask mask_of(const Attrs& attributes, int64_t seqlen_q, int64_t seqlen_k, Arrays& arrays) {
  fm_mask mask{};
  mask.struct_size = sizeof(mask);
  mask.flags = static_cast<uint32_t>(attributes.mask_flags);
  mask.seqlen_q = seqlen_q;
  mask.seqlen_k = seqlen_k;
  mask.q_offset = attributes.q_offset;
  mask.window_left = attributes.window_left;
  mask.window_right = attributes.window_right;
  mask.bounds = arrays.next(attributes.has_bounds);
  mask.block_mask = arrays.next(attributes.has_block_mask);
  mask.column_ptr = arrays.next(attributes.has_lists);
  mask.intervals = arrays.next(attributes.has_lists);
  return mask;
}

/// The arrays of a call's features, in their order.
struct Features {
  Features(const Attributes& attributes, Arrays& arrays) : dropout_state(arrays.next(attributes.has_dropout_state)) {
#define FLASHMASK_NEXT(field, ...) field = arrays.next(attributes.has_##field);
    FLASHMASK_FEATURES(FLASHMASK_NEXT, FLASHMASK_NONE, FLASHMASK_NONE, FLASHMASK_NONE)
  }

  fm_tensor dropout_state;
  FLASHMASK_FEATURES(FLASHMASK_TENSOR, FLASHMASK_NONE, FLASHMASK_NONE, FLASHMASK_NONE)
};

template <typename Args>
ffi::Error run(fm_status (*function)(const Args*, void*, size_t, const fm_options*), const Args& args,
               const Attributes& attributes, const Features& features, const Place& place) {
  const std::string backend(attributes.backend);
  fm_options options{};
  options.flags = static_cast<uint32_t>(attributes.flags);
  options.softmax_scale = attributes.softmax_scale;
#define FLASHMASK_SET_TENSOR(field, ...) options.field = features.field;
#define FLASHMASK_SET_NUMBER(field, ...) options.field = attributes.field;
  FLASHMASK_FEATURES(FLASHMASK_SET_TENSOR, FLASHMASK_SET_NUMBER, FLASHMASK_SET_NUMBER, FLASHMASK_NONE)
  options.dropout_state = static_cast<const uint64_t*>(features.dropout_state.data);
  options.backend = backend.c_str();
  return run_at(place, function, args, options);
}

/// The plan of a mask, for calls to read.
ffi::Error build_plan(const fm_mask& mask, const ffi::AnyBuffer& plan, const Place& place) {
  fm_options options{};
  options.struct_size = sizeof(options);
  options.device = place.device;
  options.stream = place.stream;
  return error_of(fm_plan_build(&mask, plan.untyped_data(), plan.size_bytes(), &options));
}

/// Arguments: q, k, v, then bounds, block_mask, column_ptr, intervals, dropout_state and features' tensors if present.
/// `rest` begins with the plan, if the call is to leave one.
ffi::Error forward(const Place& place, const Attributes& attributes, ffi::RemainingArgs arguments,
                   const ffi::AnyBuffer& out, const ffi::AnyBuffer& lse, const ffi::RemainingRets& rest) {
  Arrays arrays(arguments);
  fm_forward_args args{};
  args.struct_size = sizeof(args);
  args.q = arrays.next();
  args.k = arrays.next();
  args.v = arrays.next();
  const fm_mask mask = mask_of(attributes, args.q.shape[1], args.k.shape[1], arrays);
  const Features features(attributes, arrays);
  args.mask = &mask;
  args.out = tensor_of(out);
  args.lse = tensor_of(lse);
  if (attributes.has_plan) {
    auto plan = rest.get<ffi::AnyBuffer>(0);
    if (!plan) return plan.error();
    if (ffi::Error error = build_plan(mask, **plan, place); error.failure()) return error;
    args.plan = (*plan)->untyped_data();
    args.plan_bytes = (*plan)->size_bytes();
  }
  return run(fm_forward, args, attributes, features, place);
}

/// Results of a backward; dsink only with a sink.
struct Gradients {
  fm_tensor dq, dk, dv, dsink;
};

/// Arguments: q, k, v, out, lse, dout, then dlse, bounds, block_mask, column_ptr, intervals, dropout_state, features'
/// tensors and the forward's plan if present.
ffi::Error backward(const Place& place, const Attributes& attributes, ffi::RemainingArgs arguments,
                    const Gradients& gradients) {
  Arrays arrays(arguments);
  fm_backward_args args{};
  args.struct_size = sizeof(args);
  args.q = arrays.next();
  args.k = arrays.next();
  args.v = arrays.next();
  args.out = arrays.next();
  args.lse = arrays.next();
  args.dout = arrays.next();
  args.dlse = arrays.next(attributes.has_dlse);
  const fm_mask mask = mask_of(attributes, args.q.shape[1], args.k.shape[1], arrays);
  const Features features(attributes, arrays);
  const fm_tensor plan = arrays.next(attributes.has_plan);
  args.mask = &mask;
  args.plan = plan.data;
  args.plan_bytes = static_cast<size_t>(plan.shape[0]);
  args.dq = gradients.dq;
  args.dk = gradients.dk;
  args.dv = gradients.dv;
  args.dsink = gradients.dsink;
  return run(fm_backward, args, attributes, features, place);
}

using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error forward_cpu(Attributes attributes, ffi::RemainingArgs arguments, Result out, Result lse,
                       ffi::RemainingRets rest) {
  return forward({}, attributes, arguments, *out, *lse, rest);
}

ffi::Error forward_cuda(int32_t ordinal, void* stream, Attributes attributes, ffi::RemainingArgs arguments, Result out,
                        Result lse, ffi::RemainingRets rest) {
  const auto place = place_on_cuda(ordinal, stream, rest);
  return place ? forward(*place, attributes, arguments, *out, *lse, rest) : place.error();
}

/// `rest` begins with dsink, if there is one.
Gradients gradients_of(const Attributes& attributes, Result dq, Result dk, Result dv, const ffi::RemainingRets& rest) {
  Gradients gradients{tensor_of(*dq), tensor_of(*dk), tensor_of(*dv), {}};
  if (!attributes.has_sink) return gradients;
  if (auto dsink = rest.get<ffi::AnyBuffer>(0)) gradients.dsink = tensor_of(**dsink);
  return gradients;
}

ffi::Error backward_cpu(Attributes attributes, ffi::RemainingArgs arguments, Result dq, Result dk, Result dv,
                        ffi::RemainingRets rest) {
  return backward({}, attributes, arguments, gradients_of(attributes, dq, dk, dv, rest));
}

ffi::Error backward_cuda(int32_t ordinal, void* stream, Attributes attributes, ffi::RemainingArgs arguments, Result dq,
                         Result dk, Result dv, ffi::RemainingRets rest) {
  const auto place = place_on_cuda(ordinal, stream, rest);
  return place ? backward(*place, attributes, arguments, gradients_of(attributes, dq, dk, dv, rest)) : place.error();
}

/// Arguments: bounds, block_mask, column_ptr and intervals if present.
ffi::Error plan_of(const PlanAttributes& attributes, ffi::RemainingArgs arguments, const ffi::AnyBuffer& plan,
                   const Place& place) {
  Arrays arrays(arguments);
  return build_plan(mask_of(attributes, attributes.seqlen_q, attributes.seqlen_k, arrays), plan, place);
}

ffi::Error build_plan_cpu(PlanAttributes attributes, ffi::RemainingArgs arguments, Result plan) {
  return plan_of(attributes, arguments, *plan, {});
}

ffi::Error build_plan_cuda(int32_t ordinal, void* stream, PlanAttributes attributes, ffi::RemainingArgs arguments,
                           Result plan) {
  return plan_of(attributes, arguments, *plan, Place{1 + ordinal, stream});
}

template <typename Attrs = Attributes>
auto on_host() {
  return ffi::Ffi::Bind().Attrs<Attrs>().RemainingArgs();
}

template <typename Attrs = Attributes>
auto on_cuda() {
  return ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<void*>>().Attrs<Attrs>().RemainingArgs();
}

}  // namespace

#define FLASHMASK_HAS_MEMBER(field, ...) , ffi::StructMember<bool>("has_" #field)
#define FLASHMASK_NUMBER_MEMBER(field, ...) , ffi::StructMember<double>(#field)
#define FLASHMASK_COUNT_MEMBER(field, ...) , ffi::StructMember<int64_t>(#field)
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Attributes, ffi::StructMember<int64_t>("mask_flags"),
                                      ffi::StructMember<int64_t>("q_offset"), ffi::StructMember<int64_t>("window_left"),
                                      ffi::StructMember<int64_t>("window_right"), ffi::StructMember<bool>("has_bounds"),
                                      ffi::StructMember<bool>("has_block_mask"), ffi::StructMember<bool>("has_lists"),
                                      ffi::StructMember<bool>("has_dropout_state"), ffi::StructMember<bool>("has_plan"),
                                      ffi::StructMember<bool>("has_dlse"), ffi::StructMember<int64_t>("flags"),
                                      ffi::StructMember<double>("softmax_scale"),
                                      ffi::StructMember<std::string_view>("backend")
                                          FLASHMASK_FEATURES(FLASHMASK_HAS_MEMBER, FLASHMASK_NUMBER_MEMBER,
                                                             FLASHMASK_COUNT_MEMBER, FLASHMASK_NONE));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(PlanAttributes, ffi::StructMember<int64_t>("seqlen_q"),
                                      ffi::StructMember<int64_t>("seqlen_k"), ffi::StructMember<int64_t>("mask_flags"),
                                      ffi::StructMember<int64_t>("q_offset"), ffi::StructMember<int64_t>("window_left"),
                                      ffi::StructMember<int64_t>("window_right"), ffi::StructMember<bool>("has_bounds"),
                                      ffi::StructMember<bool>("has_block_mask"), ffi::StructMember<bool>("has_lists"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_forward_cpu, forward_cpu,
                              on_host().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    flashmask_backward_cpu, backward_cpu,
    on_host().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_build_plan_cpu, build_plan_cpu,
                              on_host<PlanAttributes>().Ret<ffi::AnyBuffer>());
// Each run puts the same work on the same buffers on the stream, as command buffers need it.
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_forward_cuda, forward_cuda,
                              on_cuda().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    flashmask_backward_cuda, backward_cuda,
    on_cuda().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_build_plan_cuda, build_plan_cuda,
                              on_cuda<PlanAttributes>().Ret<ffi::AnyBuffer>(), {ffi::Traits::kCmdBufferCompatible});
