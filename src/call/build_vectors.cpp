// SPDX-License-Identifier: Apache-2.0

// Masks built where their parameters are. Here and not in src/mask/, which knows no backend.

#include "call/build_vectors.h"

#include "call/backend.h"
#include "common/message.h"

namespace flashmask {

void build_vectors(const build::Arguments& arguments, const build::Output& output,
                   const std::function<std::byte*(std::size_t)>& allocate, void* stream) {
  if (arguments.device.kind == Device::Kind::kCuda) return cuda::build_mask(arguments, output, allocate, stream);
  if (stream) throw_invalid("stream must be null on the CPU");
  build::check_contents(arguments);
  build::build_on_host(arguments, output);
}

}  // namespace flashmask
