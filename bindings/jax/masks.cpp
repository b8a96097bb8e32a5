// SPDX-License-Identifier: Apache-2.0
//
// The mask of a family, on the host and on CUDA.
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common.h"

namespace {

/// names: of the vectors and then of the numbers, a comma after each.
struct Attributes {
  std::string_view family, names;
  ffi::Span<const int64_t> numbers;
};

/// A family's parameters as the C interface takes them.
class Parameters {
 public:
  Parameters(const Attributes& attributes, const ffi::RemainingArgs& vectors) : names_(split(attributes.names)) {
    for (size_t n = 0; n < names_.size(); ++n) {
      fm_mask_parameter item{names_[n].c_str(), {}, 0};
      if (n < vectors.size()) {
        if (const auto vector = vectors.get<ffi::AnyBuffer>(n)) item.vector = tensor_of(*vector);
      } else if (const size_t number = n - vectors.size(); number < attributes.numbers.size()) {
        item.number = attributes.numbers[number];
      }
      items_.push_back(item);
    }
  }
  /// A vector of int64 that is written, whose buffer has two int32 for each: JAX need not know int64.
  void add_int64_output(const char* name, const ffi::AnyBuffer& buffer) {
    fm_tensor vector = tensor_of(buffer);
    vector.dtype = FM_INT64;
    vector.ndim -= 1;
    for (int32_t d = 0; d < vector.ndim; ++d) vector.stride[d] /= 2;
    items_.push_back({name, vector, 0});
  }
  fm_mask_parameters read() const {
    return {sizeof(fm_mask_parameters), static_cast<uint32_t>(items_.size()), items_.data()};
  }

 private:
  std::vector<std::string> names_;
  std::vector<fm_mask_parameter> items_;
};

/// Results: the bounds, and the outputs that a family writes beside them.
ffi::Error build(const Attributes& attributes, const ffi::RemainingArgs& vectors, const ffi::RemainingRets& results,
                 const fm_options& options) {
  const std::string family(attributes.family);
  Parameters parameters(attributes, vectors);
  fm_mask mask{};
  mask.struct_size = sizeof(mask);
  fm_mask_parameters given = parameters.read();
  if (const fm_status status = fm_mask_shape(family.c_str(), &given, &mask, &options); status != FM_OK)
    return error_of(status);
  auto bounds = results.get<ffi::AnyBuffer>(0);
  if (!bounds || mask.bounds.ndim != 4) return ffi::Error::Internal(family + " has no bounds to build");
  mask.bounds = tensor_of(**bounds);
  if (auto order = results.get<ffi::AnyBuffer>(1)) parameters.add_int64_output("order_out", **order);
  given = parameters.read();
  return error_of(fm_mask_build(family.c_str(), &given, &mask, &options));
}

ffi::Error build_mask_cpu(Attributes attributes, ffi::RemainingArgs vectors, ffi::RemainingRets results) {
  HostMemory memory;
  fm_options options{};
  options.struct_size = sizeof(options);
  options.allocate = allocate;
  options.allocate_context = &memory;
  return build(attributes, vectors, results, options);
}

void* allocate_scratch(void* context, size_t bytes) {
  constexpr size_t kAlignment = 16;
  return static_cast<ffi::ScratchAllocator*>(context)->Allocate(bytes, kAlignment).value_or(nullptr);
}

ffi::Error build_mask_cuda(int32_t ordinal, void* stream, ffi::ScratchAllocator scratch, Attributes attributes,
                           ffi::RemainingArgs vectors, ffi::RemainingRets results) {
  fm_options options{};
  options.struct_size = sizeof(options);
  options.device = 1 + ordinal;
  options.stream = stream;
  options.allocate = allocate_scratch;
  options.allocate_context = &scratch;
  return build(attributes, vectors, results, options);
}

}  // namespace

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(Attributes, ffi::StructMember<std::string_view>("family"),
                                      ffi::StructMember<std::string_view>("names"),
                                      ffi::StructMember<ffi::Span<const int64_t>>("numbers"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_build_mask_cpu, build_mask_cpu,
                              ffi::Ffi::Bind().Attrs<Attributes>().RemainingArgs().RemainingRets());
// Not for command buffers: its scratch is gone when they run again.
XLA_FFI_DEFINE_HANDLER_SYMBOL(flashmask_build_mask_cuda, build_mask_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Attrs<Attributes>()
                                  .RemainingArgs()
                                  .RemainingRets());
