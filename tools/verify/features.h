// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "verify/case.h"

namespace flashmask::verify {

/// Names of the features (CaseFeatures) that a backend refuses, found out by asking it: no case is to ask
/// for one of these.
std::vector<std::string> refused_features(const std::string& backend);

/// True if a case asks for one of the features in `names`.
bool asks_for_any(const CaseFeatures& features, const std::vector<std::string>& names);

}  // namespace flashmask::verify
