// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace flashmask::verify {

/// Names of the features (Features in attention.h) that a backend refuses, found out by asking it. No case asks for a
/// feature yet: when a backend takes one, cases have to, too.
std::vector<std::string> refused_features(const std::string& backend);

}  // namespace flashmask::verify
