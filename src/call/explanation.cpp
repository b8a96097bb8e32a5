// SPDX-License-Identifier: Apache-2.0

// Writes how a call would run, and which kernels are compiled in, as text and as JSON.

#include "common/json.h"
#include "common/message.h"
#include "flashmask/attention.h"

namespace flashmask {
namespace {

std::string json_of(const TileShape& tile) {
  return JsonObject().add_number("rows", tile.rows).add_number("keys", tile.keys).text();
}

std::string json_of(const KernelInfo& kernel) {
  return JsonObject()
      .add_string("id", kernel.id)
      .add_string("arch", kernel.arch)
      .add_string("symbol", kernel.symbol)
      .add_string("op", kernel.op)
      .add("dtype", kernel.dtype == DataType::kNone ? "null" : json_string(name(kernel.dtype)))
      .add_number("head_dim", kernel.head_dim)
      .add_number("head_dim_v", kernel.head_dim_v)
      .add("tile", json_of(kernel.tile))
      .add_number("threads", kernel.threads)
      .add_number("shared_bytes", kernel.shared_bytes)
      .text();
}

}  // namespace

std::string to_string(const Explanation& e) {
  std::string text;
  if (e.backend.empty()) {
    text = "no backend takes this call";
  } else {
    const std::string live = e.live_tiles < 0 ? "unknown (the mask is on the device)" : message(e.live_tiles);
    text = message("backend: ", e.backend, " (", e.reason, ")\nconfiguration: ", e.configuration, "\ntiles: ", live,
                   " of ", e.tiles, " of ", e.tile.rows, "x", e.tile.keys,
                   " are executed\nworkspace: ", e.workspace_bytes, " bytes");
  }
  for (const std::string& feature : e.features) text += message("\nwith ", feature);
  for (const std::string& line : e.rejected) text += message("\nnot ", line);
  return text;
}

std::string to_json(const Explanation& e) {
  return JsonObject()
      .add("backend", e.backend.empty() ? "null" : json_string(e.backend))
      .add_string("reason", e.reason)
      .add_string("configuration", e.configuration)
      .add("features", json_string_array(e.features))
      .add_string("arch", e.arch)
      .add_string("instance", e.instance)
      .add("kernels", json_string_array(e.kernels))
      .add("tile", json_of(e.tile))
      .add_number("padding_share", e.padding_share)
      .add("live_tiles", e.live_tiles < 0 ? "null" : message(e.live_tiles))
      .add_number("tiles", e.tiles)
      .add_number("workspace_bytes", e.workspace_bytes)
      .add("rejected", json_string_array(e.rejected))
      .text();
}

std::string to_json(const std::vector<KernelInfo>& kernels) {
  std::vector<std::string> objects;
  for (const KernelInfo& kernel : kernels) objects.push_back(json_of(kernel));
  return JsonObject().add("kernels", json_array(objects)).text();
}

}  // namespace flashmask
