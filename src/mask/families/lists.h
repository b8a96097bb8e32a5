// SPDX-License-Identifier: Apache-2.0
#pragma once

// Families whose columns are hidden from any number of row intervals; for the host.

#include "mask/families/steps.h"

namespace flashmask::build {

/// Own has `kFamily`, whose form has lists, and visible_rows(run, arguments): a function of a lead, a key column and
/// see(begin, end), which it calls for the rows that see the key, in any order and possibly overlapping.
template <typename Own>
struct OfLists : OfColumns<Own> {
  /// Writes no vectors: build_mask makes the lists.
  template <typename Run>
  static void write(Run&, const Arguments&, const Output&) {}
};

}  // namespace flashmask::build
