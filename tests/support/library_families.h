// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <regex>
#include <string>
#include <vector>

#include "flashmask/c_api.h"

namespace flashmask::test {

/// The names of all families that fm_mask_build makes vectors of: not masks that are only a band, or of lists alone.
inline std::vector<std::string> known_families() {
  std::size_t length = 0;
  fm_mask_families_json(nullptr, 0, &length);
  std::string json(length + 1, '\0');
  fm_mask_families_json(json.data(), json.size(), nullptr);
  const std::regex family(R"re(\{"name": "(\w+)", "parameters".*?"form": \{"vectors": ([0-4]))re");
  std::vector<std::string> names;
  for (std::sregex_iterator found(json.begin(), json.end(), family), end; found != end; ++found) {
    if ((*found)[2] != "0") names.push_back((*found)[1]);
  }
  return names;
}

}  // namespace flashmask::test
