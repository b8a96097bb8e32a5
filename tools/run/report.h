// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "run/figures.h"

namespace flashmask::run {

/// The report: one HTML page that needs nothing else (no script, font or picture from elsewhere) and follows
/// the reader's light or dark colour scheme.
std::string report_html(const RunFigures& figures);

}  // namespace flashmask::run
