// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>
#include <vector>

#include "c_api/read.h"
#include "c_api/write_mask.h"
#include "call/build_vectors.h"
#include "mask/families/arguments.h"

using namespace flashmask;
using namespace flashmask::c_api;

namespace {

std::vector<build::Parameter> read_parameters(const char* family, const fm_mask_parameters* parameters, Device device) {
  required(family, "family");
  const auto all = read_struct(parameters, "parameters");
  if (all.count > 0) required(all.items, "parameters->items");
  std::vector<build::Parameter> read;
  for (uint32_t n = 0; n < all.count; ++n) {
    const fm_mask_parameter& item = all.items[n];
    required(item.name, message("parameters->items[", n, "].name").c_str());
    read.push_back({item.name, tensor(item.vector, item.name, device), item.number});
  }
  return read;
}

build::Arguments read_family(const char* family, const fm_mask_parameters* parameters, Device device) {
  build::Arguments arguments = build::read_arguments(family, read_parameters(family, parameters, device), device);
  if (arguments.shape.form.is_listed() && device.kind != Device::Kind::kCpu)
    throw_unsupported("options->device is CUDA device ", device.index, "; masks of ", family,
                      " are built in host memory, as their columns may need interval lists");
  return arguments;
}

/// The bounds that fm_mask_shape describes: of a mask of lists the space that its writing needs.
fm_tensor bounds_of(const build::Shape& shape, void* data) {
  const int64_t numbers = shape.form.is_listed() ? 4 : shape.form.numbers();
  if (numbers == 0) return {};
  fm_tensor t{.data = data, .dtype = FM_INT32, .ndim = 4, .shape = {}, .stride = {}};
  const int64_t sizes[] = {shape.batch, shape.heads, shape.seqlen_k, numbers};
  int64_t stride = 1;
  for (int d = 3; d >= 0; --d) {
    t.shape[d] = sizes[d];
    t.stride[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return t;
}

/// Positions of rows and keys, which are the same.
fm_tensor positions_of(const build::Shape& shape, void* data) {
  if (!shape.form.has_positions) return {};
  return {.data = data,
          .dtype = FM_INT32,
          .ndim = 2,
          .shape = {shape.batch, shape.seqlen_k},
          .stride = {std::max<int64_t>(shape.seqlen_k, 1), 1}};
}

/// All of a mask but its tensors' data.
fm_mask described(const build::Shape& shape) {
  fm_mask mask{};
  mask.seqlen_q = shape.seqlen_q;
  mask.seqlen_k = shape.seqlen_k;
  if (shape.causal()) {
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
  mask.q_pos = mask.k_pos = positions_of(shape, nullptr);
  return mask;
}

/// `first`: null if there are no columns.
build::VectorOutput vectors_of(const build::Shape& shape, int32_t* first) {
  const int64_t count = shape.form.numbers();
  if (!first) return {nullptr, nullptr, nullptr, nullptr, count};
  if (count == 4) return {first, first + 1, first + 2, first + 3, count};
  if (shape.causal()) return {first, count == 2 ? first + 1 : nullptr, nullptr, nullptr, count};
  return {first, nullptr, nullptr, first + 1, count};
}

/// Throws unless the tensor is the wanted one, with data if that has elements.
void check_room(const char* argument, const fm_tensor& given, const fm_tensor& wanted) {
  fm_tensor without_data = given;
  without_data.data = nullptr;
  if (std::memcmp(&without_data, &wanted, sizeof(wanted)) != 0)
    throw_invalid(argument, " is ", describe(tensor(given, argument)), "; it must be ",
                  describe(tensor(wanted, argument)), ", contiguous, as fm_mask_shape says");
  if (wanted.dtype != FM_NONE && tensor(wanted, argument).num_elements() > 0 && !given.data)
    throw_invalid(argument, " has no data: its pointer is null");
}

}  // namespace

fm_status fm_mask_shape(const char* family, const fm_mask_parameters* parameters, fm_mask* out,
                        const fm_options* options) {
  return guarded([&] {
    fm_mask mask = described(read_family(family, parameters, CallOptions(options).device).shape);
    mask.struct_size = read_struct(out, "out").struct_size;
    write_struct(mask, out);
  });
}

fm_status fm_mask_build(const char* family, const fm_mask_parameters* parameters, fm_mask* out,
                        const fm_options* options) {
  return guarded([&] {
    const CallOptions call(options);
    const build::Arguments arguments = read_family(family, parameters, call.device);
    const build::Shape& shape = arguments.shape;
    if (shape.form.is_listed() || (shape.form.has_lists && call.device.kind == Device::Kind::kCpu && takes_lists(out)))
      return write_mask(build::build_mask(family, read_parameters(family, parameters, {})), out, family);
    const fm_mask mask = read_struct(out, "out");
    check_room("out->bounds", mask.bounds, bounds_of(shape, nullptr));
    check_room("out->q_pos", mask.q_pos, positions_of(shape, nullptr));
    check_room("out->k_pos", mask.k_pos, positions_of(shape, nullptr));
    if (mask.q_pos.data != mask.k_pos.data)
      throw_invalid("out->q_pos and out->k_pos have other data; the positions are the same, written once");
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
    const build::Output output{vectors_of(shape, static_cast<int32_t*>(mask.bounds.data)),
                               static_cast<int32_t*>(mask.q_pos.data)};
    build_vectors(arguments, output, allocate, call.options.stream);
  });
}

fm_status fm_mask_families_json(char* text, size_t capacity, size_t* length) {
  return guarded([&] { copy_text(build::families_json(), text, capacity, length); });
}
