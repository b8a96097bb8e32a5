// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>
#include <vector>

#include "backends/device_mask.h"
#include "c_api/read.h"
#include "mask/build/arguments.h"

using namespace flashmask;
using namespace flashmask::c_api;

namespace {

build::Arguments read_family(const char* family, const fm_mask_parameters* parameters, Device device) {
  required(family, "family");
  const auto all = read_struct(parameters, "parameters");
  if (all.count > 0) required(all.items, "parameters->items");
  std::vector<build::Parameter> read;
  for (uint32_t n = 0; n < all.count; ++n) {
    const fm_mask_parameter& item = all.items[n];
    required(item.name, message("parameters->items[", n, "].name").c_str());
    read.push_back({item.name, tensor(item.vector, item.name, device), item.number});
  }
  return build::read_arguments(family, read, device);
}

fm_tensor bounds_of(const build::Shape& shape, void* data) {
  if (shape.numbers() == 0) return {};
  fm_tensor t{.data = data, .dtype = FM_INT32, .ndim = 4, .shape = {}, .stride = {}};
  const int64_t sizes[] = {shape.batch, shape.heads, shape.seqlen_k, shape.numbers()};
  int64_t stride = 1;
  for (int d = 3; d >= 0; --d) {
    t.shape[d] = sizes[d];
    t.stride[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return t;
}

/// All of a mask but its vectors' data.
fm_mask described(const build::Shape& shape) {
  fm_mask mask{};
  mask.seqlen_q = shape.seqlen_q;
  mask.seqlen_k = shape.seqlen_k;
  if (shape.causal) {
    mask.flags |= FM_CAUSAL;
  } else if (!shape.band.unbounded()) {
    mask.flags |= FM_HAS_WINDOW;
    mask.window_left = shape.band.lo ? -*shape.band.lo : -1;
    mask.window_right = shape.band.hi ? *shape.band.hi : -1;
  }
  if (shape.q_offset) {
    mask.flags |= FM_HAS_Q_OFFSET;
    mask.q_offset = *shape.q_offset;
  }
  mask.bounds = bounds_of(shape, nullptr);
  return mask;
}

/// Fills in a caller's struct of its own size.
void write(const fm_mask& from, fm_mask* to) {
  const uint32_t size = read_struct(to, "out").struct_size;
  fm_mask all = from;
  all.struct_size = size;
  std::memcpy(to, &all, std::min<std::size_t>(size, sizeof(all)));
}

build::Output output_of(const build::Shape& shape, int32_t* first) {
  const int64_t count = shape.numbers();
  if (count == 4) return {first, first + 1, first + 2, first + 3, count};
  if (shape.causal) return {first, count == 2 ? first + 1 : nullptr, nullptr, nullptr, count};
  return {first, nullptr, nullptr, first + 1, count};
}

bool is_as_described(const fm_tensor& bounds, const build::Shape& shape) {
  const fm_tensor wanted = bounds_of(shape, bounds.data);
  return std::memcmp(&bounds, &wanted, sizeof(bounds)) == 0;
}

}  // namespace

fm_status fm_mask_shape(const char* family, const fm_mask_parameters* parameters, fm_mask* out,
                        const fm_options* options) {
  return guarded([&] { write(described(read_family(family, parameters, CallOptions(options).device).shape), out); });
}

fm_status fm_mask_build(const char* family, const fm_mask_parameters* parameters, fm_mask* out,
                        const fm_options* options) {
  return guarded([&] {
    const CallOptions call(options);
    const build::Arguments arguments = read_family(family, parameters, call.device);
    const build::Shape& shape = arguments.shape;
    const fm_mask mask = read_struct(out, "out");
    if (!is_as_described(mask.bounds, shape))
      throw_invalid("out->bounds is ", describe(tensor(mask.bounds, "out->bounds")), "; it must be ",
                    describe(tensor(bounds_of(shape, nullptr), "out->bounds")), ", contiguous, as fm_mask_shape says");
    const bool is_empty = shape.batch * shape.heads * shape.seqlen_k * shape.numbers() == 0;
    if (!is_empty && !mask.bounds.data) throw_invalid("out->bounds has no data: its pointer is null");
    const auto allocate = [&](std::size_t bytes) {
      if (!call.allocate)
        throw_invalid("options->allocate is NULL; building ", family, " on a device needs ", bytes,
                      " bytes of scratch");
      void* const memory = call.allocate(call.allocate_context, bytes);
      if (!memory)
        throw Error(ErrorCode::kOutOfMemory,
                    message("options->allocate gave no memory for a scratch of ", bytes, " bytes"));
      return static_cast<std::byte*>(memory);
    };
    build_vectors(arguments, output_of(shape, static_cast<int32_t*>(mask.bounds.data)), allocate, call.options.stream);
  });
}
