// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "flashmask/mask.h"

namespace flashmask::io {

/// Most columns of a mask that the command prints as JSON.
inline constexpr int64_t kMostJsonColumns = 4096;

/// A mask as JSON: its MaskParts by name. `band` is {"lo", "hi"}, null where unbounded; vectors are flat arrays
/// in the order [batch, heads, seqlen_k] and left out where the mask stores none; column_ptr and intervals likewise,
/// and block_mask with block_batch and block_heads. mask_from_json(to_json(mask)) has the same contents, and so the
/// same plan.
nlohmann::json to_json(const Mask& mask);

/// Reads what to_json writes. Only seqlen_q and seqlen_k are required, the rest defaults as in MaskParts.
/// Throws Error naming the key if one is unknown, missing, of the wrong type or length, or out of range.
Mask mask_from_json(const nlohmann::json& json);

/// The mask in a file: an object as above, or one that has it as "mask", as `flashmask show --json` prints it. Throws
/// Error naming the file if it cannot be read, is not JSON, names a key twice or holds no mask.
Mask read_mask(const std::string& path);

}  // namespace flashmask::io
