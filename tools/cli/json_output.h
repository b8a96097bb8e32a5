// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>

namespace flashmask::cli {

/// The JSON of every command: keys stay in the order in which they were written.
using Json = nlohmann::ordered_json;

/// JSON text; bytes that are not UTF-8 (in file names, for instance) are replaced.
inline std::string json_text(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

inline void print_json(const Json& json) { std::fputs(json_text(json).c_str(), stdout); }

}  // namespace flashmask::cli
