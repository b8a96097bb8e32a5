// SPDX-License-Identifier: Apache-2.0
//
// Attention over a KV cache and appends to it, on the host and on CUDA.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "common.h"
#include "flashmask/options.def"

#define FLASHMASK_NONE(...)
#define FLASHMASK_NUMBER(field, ...) double field;

namespace {

/// names: of the arrays in their order, as split() takes them.
struct Attributes {
  std::string_view names, backend;
  int64_t flags, split_size, mask_flags, window_left, window_right;
  double softmax_scale;
  int64_t option_flags;
  FLASHMASK_CACHED_FEATURES(FLASHMASK_NONE, FLASHMASK_NUMBER)
};

/// The arrays of a call by their names.
class Arrays {
 public:
  Arrays(std::string_view names, ffi::RemainingArgs arguments) : names_(split(names)), arguments_(arguments) {}

  /// The array of this name, or none.
  fm_tensor operator()(std::string_view name) const {
    const auto at = std::find(names_.begin(), names_.end(), name);
    if (at == names_.end()) return {};
    const auto buffer = arguments_.get<ffi::AnyBuffer>(static_cast<size_t>(at - names_.begin()));
    return buffer ? tensor_of(*buffer) : fm_tensor{};
  }

 private:
  std::vector<std::string> names_;
  ffi::RemainingArgs arguments_;
};

fm_kv_cache cache_of(const Arrays& arrays) {
  fm_kv_cache cache{};
  cache.struct_size = sizeof(cache);
  cache.k = arrays("cache.k");
  cache.v = arrays("cache.v");
  cache.page_table = arrays("page_table");
  cache.page_indptr = arrays("page_indptr");
  cache.page_indices = arrays("page_indices");
  cache.seqlens = arrays("seqlens");
  cache.k_scale = arrays("k_scale");
  cache.v_scale = arrays("v_scale");
  return cache;
}

fm_sequence_mask mask_of(const Attributes& attributes, const Arrays& arrays) {
  fm_sequence_mask mask{};
  mask.struct_size = sizeof(mask);
  mask.flags = static_cast<uint32_t>(attributes.mask_flags);
  mask.window_left = attributes.window_left;
  mask.window_right = attributes.window_right;
  mask.bounds = arrays("bounds");
  mask.tail = arrays("tail");
  mask.tail_lens = arrays("tail_lens");
  mask.tail_depth = arrays("tail_depth");
  mask.q_pos = arrays("q_pos");
  mask.k_pos = arrays("k_pos");
  mask.block_mask = arrays("block_mask");
  return mask;
}

ffi::Error forward(const Place& place, const Attributes& attributes, ffi::RemainingArgs arguments,
                   const ffi::AnyBuffer& out, const ffi::AnyBuffer& lse) {
  const Arrays arrays(attributes.names, arguments);
  const fm_kv_cache cache = cache_of(arrays);
  const fm_sequence_mask mask = mask_of(attributes, arrays);
  fm_cached_args args{};
  args.struct_size = sizeof(args);
  args.flags = static_cast<uint32_t>(attributes.flags);
  args.split_size = attributes.split_size;
  args.q = arrays("q");
  args.out = tensor_of(out);
  args.lse = tensor_of(lse);
  args.cu_seqlens_q = arrays("cu_seqlens_q");
  args.cache = &cache;
  args.mask = &mask;
  const std::string backend(attributes.backend);
  fm_options options{};
  options.flags = static_cast<uint32_t>(attributes.option_flags);
  options.softmax_scale = attributes.softmax_scale;
  options.backend = backend.c_str();
#define FLASHMASK_SET_TENSOR(field, ...) options.field = arrays(#field);
#define FLASHMASK_SET_NUMBER(field, ...) options.field = attributes.field;
  FLASHMASK_CACHED_FEATURES(FLASHMASK_SET_TENSOR, FLASHMASK_SET_NUMBER)
  return run_at(place, fm_cached_forward, args, options);
}

/// The results are the cache's k and v, and the scales if they are written, which XLA has put where its arguments are,
/// or copied there.
ffi::Error append(const Place& place, std::string_view names, ffi::RemainingArgs arguments,
                  ffi::RemainingRets results) {
  constexpr fm_tensor fm_kv_cache::* kWritten[] = {&fm_kv_cache::k, &fm_kv_cache::v, &fm_kv_cache::k_scale,
                                                   &fm_kv_cache::v_scale};
  const Arrays arrays(names, arguments);
  fm_kv_cache cache = cache_of(arrays);
  for (size_t n = 0; n < results.size() && n < std::size(kWritten); ++n) {
    auto result = results.get<ffi::AnyBuffer>(n);
    if (!result) return result.error();
    cache.*kWritten[n] = tensor_of(**result);
  }
  fm_append_args args{};
  args.struct_size = sizeof(args);
  if (results.size() > 2) args.flags = FM_WRITE_SCALES;
  args.k = arrays("k");
  args.v = arrays("v");
  args.cu_seqlens = arrays("cu_seqlens");
  args.slots = arrays("slots");
  args.cache = &cache;
  fm_options options{};
  options.struct_size = sizeof(options);
  options.device = place.device;
  options.stream = place.stream;
  return error_of(fm_append_kv(&args, &options));
}

using Result = ffi::Result<ffi::AnyBuffer>;

ffi::Error forward_cpu(Attributes attributes, ffi::RemainingArgs arguments, Result out, Result lse) {
  return forward({}, attributes, arguments, *out, *lse);
}
ffi::Error forward_cuda(int32_t ordinal, void* stream, Attributes attributes, ffi::RemainingArgs arguments, Result out,
                        Result lse, ffi::RemainingRets rest) {
  const auto place = place_on_cuda(ordinal, stream, rest);
  return place ? forward(*place, attributes, arguments, *out, *lse) : place.error();
}
ffi::Error append_cpu(std::string_view names, ffi::RemainingArgs arguments, ffi::RemainingRets results) {
  return append({}, names, arguments, results);
}
ffi::Error append_cuda(int32_t ordinal, void* stream, std::string_view names, ffi::RemainingArgs arguments,
                       ffi::RemainingRets results) {
  return append(Place{1 + ordinal, stream}, names, arguments, results);
}

auto on_host() { return ffi::Ffi::Bind(); }
auto on_cuda() { return ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::PlatformStream<void*>>(); }

}  // namespace

#define FLASHMASK_NUMBER_MEMBER(field, ...) , ffi::StructMember<double>(#field)
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(
    Attributes, ffi::StructMember<std::string_view>("names"), ffi::StructMember<std::string_view>("backend"),
    ffi::StructMember<int64_t>("flags"), ffi::StructMember<int64_t>("split_size"),
    ffi::StructMember<int64_t>("mask_flags"), ffi::StructMember<int64_t>("window_left"),
    ffi::StructMember<int64_t>("window_right"), ffi::StructMember<double>("softmax_scale"),
    ffi::StructMember<int64_t>("option_flags") FLASHMASK_CACHED_FEATURES(FLASHMASK_NONE, FLASHMASK_NUMBER_MEMBER));

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    flashmask_cached_forward_cpu, forward_cpu,
    on_host().Attrs<Attributes>().RemainingArgs().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    flashmask_cached_forward_cuda, forward_cuda,
    on_cuda().Attrs<Attributes>().RemainingArgs().Ret<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>().RemainingRets(),
    {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_append_kv_cpu, append_cpu,
                              on_host().Attr<std::string_view>("names").RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_append_kv_cuda, append_cuda,
                              on_cuda().Attr<std::string_view>("names").RemainingArgs().RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});
