// SPDX-License-Identifier: Apache-2.0
//
// Forward and backward, on the host and on CUDA.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "common.h"

namespace {

/// What a call says beside its arrays, as fm_mask and fm_options have it.
struct Attributes {
  int64_t mask_flags, q_offset, window_left, window_right;
  bool has_bounds, has_block_mask;
  int64_t flags;
  double softmax_scale;
  std::string_view backend;
};

/// The arrays of a call in their order, of which its mask's may be missing.
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

fm_mask mask_of(const Attributes& attributes, const fm_tensor& q, const fm_tensor& k, Arrays& arrays) {
  fm_mask mask{};
  mask.struct_size = sizeof(mask);
  mask.flags = static_cast<uint32_t>(attributes.mask_flags);
  mask.seqlen_q = q.shape[1];
  mask.seqlen_k = k.shape[1];
  mask.q_offset = attributes.q_offset;
  mask.window_left = attributes.window_left;
  mask.window_right = attributes.window_right;
  mask.bounds = arrays.next(attributes.has_bounds);
  mask.block_mask = arrays.next(attributes.has_block_mask);
  return mask;
}

/// Where a call runs, and its workspace: on the host memory that lasts as long as the call, on CUDA a buffer of XLA's,
/// so that a command buffer, which runs the work again later, holds on to it.
struct Place {
  int32_t device = FM_DEVICE_CPU;
  void* stream = nullptr;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;

  static Place cuda(int32_t ordinal, void* stream, const ffi::AnyBuffer& workspace) {
    return {1 + ordinal, stream, workspace.untyped_data(), workspace.size_bytes()};
  }
};

template <typename Args>
ffi::Error run(fm_status (*function)(const Args*, void*, size_t, const fm_options*), const Args& args,
               const Attributes& attributes, const Place& place) {
  const std::string backend(attributes.backend);
  HostMemory memory;
  fm_options options{};
  options.struct_size = sizeof(options);
  options.flags = static_cast<uint32_t>(attributes.flags);
  options.softmax_scale = attributes.softmax_scale;
  options.backend = backend.c_str();
  options.device = place.device;
  options.stream = place.stream;
  if (place.device == FM_DEVICE_CPU) {
    options.allocate = allocate;
    options.allocate_context = &memory;
  }
  return error_of(function(&args, place.workspace, place.workspace_bytes, &options));
}

/// Arguments: q, k, v, and what there is of bounds and block_mask.
ffi::Error forward(const Place& place, const Attributes& attributes, ffi::RemainingArgs arguments,
                   const ffi::AnyBuffer& out, const ffi::AnyBuffer& lse) {
  Arrays arrays(arguments);
  fm_forward_args args{};
  args.struct_size = sizeof(args);
  args.q = arrays.next();
  args.k = arrays.next();
  args.v = arrays.next();
  const fm_mask mask = mask_of(attributes, args.q, args.k, arrays);
  args.mask = &mask;
  args.out = tensor_of(out);
  args.lse = tensor_of(lse);
  return run(fm_forward, args, attributes, place);
}

/// Arguments: q, k, v, out, lse, dout, dlse, and what there is of bounds and block_mask.
ffi::Error backward(const Place& place, const Attributes& attributes, ffi::RemainingArgs arguments,
                    const ffi::AnyBuffer& dq, const ffi::AnyBuffer& dk, const ffi::AnyBuffer& dv) {
  Arrays arrays(arguments);
  fm_backward_args args{};
  args.struct_size = sizeof(args);
  args.q = arrays.next();
  args.k = arrays.next();
  args.v = arrays.next();
  args.out = arrays.next();
  args.lse = arrays.next();
  args.dout = arrays.next();
  args.dlse = arrays.next();
  const fm_mask mask = mask_of(attributes, args.q, args.k, arrays);
  args.mask = &mask;
  args.dq = tensor_of(dq);
  args.dk = tensor_of(dk);
  args.dv = tensor_of(dv);
  return run(fm_backward, args, attributes, place);
}

using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error forward_cpu(Attributes attributes, ffi::RemainingArgs arguments, Result out, Result lse) {
  return forward({}, attributes, arguments, *out, *lse);
}

ffi::Error forward_cuda(int32_t ordinal, void* stream, Attributes attributes, ffi::RemainingArgs arguments, Result out,
                        Result lse, Result workspace) {
  return forward(Place::cuda(ordinal, stream, *workspace), attributes, arguments, *out, *lse);
}

ffi::Error backward_cpu(Attributes attributes, ffi::RemainingArgs arguments, Result dq, Result dk, Result dv) {
  return backward({}, attributes, arguments, *dq, *dk, *dv);
}

ffi::Error backward_cuda(int32_t ordinal, void* stream, Attributes attributes, ffi::RemainingArgs arguments, Result dq,
                         Result dk, Result dv, Result workspace) {
  return backward(Place::cuda(ordinal, stream, *workspace), attributes, arguments, *dq, *dk, *dv);
}

auto on_host() { return ffi::Ffi::Bind().Attrs<Attributes>().RemainingArgs(); }

auto on_cuda() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::DeviceOrdinal>()
      .Ctx<ffi::PlatformStream<void*>>()
      .Attrs<Attributes>()
      .RemainingArgs();
}

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Attributes, ffi::StructMember<int64_t>("mask_flags"),
                                      ffi::StructMember<int64_t>("q_offset"), ffi::StructMember<int64_t>("window_left"),
                                      ffi::StructMember<int64_t>("window_right"), ffi::StructMember<bool>("has_bounds"),
                                      ffi::StructMember<bool>("has_block_mask"), ffi::StructMember<int64_t>("flags"),
                                      ffi::StructMember<double>("softmax_scale"),
                                      ffi::StructMember<std::string_view>("backend"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_forward_cpu, forward_cpu,
                              on_host().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_backward_cpu, backward_cpu,
                              on_host().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
// What these put on the stream is the same work on the same buffers each time it runs, as command buffers need it.
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_forward_cuda, forward_cuda,
                              on_cuda().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
                              {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    flashmask_backward_cuda, backward_cuda,
    on_cuda().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>(),
    {ffi::Traits::kCmdBufferCompatible});
