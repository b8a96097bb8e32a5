// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>

#include "mask/families/arguments.h"

namespace flashmask {

/// Builds a mask's vectors where its parameters are. `allocate` gives scratch on a CUDA device: it is called at most
/// once, and its memory has to stay until the work on the stream is done.
void build_vectors(const build::Arguments& arguments, const build::Output& output,
                   const std::function<std::byte*(std::size_t)>& allocate, void* stream);

}  // namespace flashmask
