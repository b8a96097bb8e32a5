// SPDX-License-Identifier: Apache-2.0

// Masks built where their parameters are. Here and not in src/mask/, which knows no backend.

#include "call/build_vectors.h"

#include "call/backend.h"
#include "common/message.h"

namespace flashmask {

void build_vectors(const build::Arguments& arguments, const build::Output& output,
                   const std::function<std::byte*(std::size_t)>& allocate, void* stream) {
  check_stream(arguments.device, stream);
  backend_for(arguments.device.kind).build_vectors(arguments, output, allocate, stream);
}

void Backend::build_vectors(const build::Arguments& arguments, const build::Output& output,
                            const std::function<std::byte*(std::size_t)>&, void*) const {
  build::check_contents(arguments);
  build::build_on_host(arguments, output);
}

}  // namespace flashmask
