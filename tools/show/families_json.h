// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace flashmask::show {

/// Every family: an array of {name, definition, parameters: [{name, help}]}.
nlohmann::ordered_json families_json();

}  // namespace flashmask::show
