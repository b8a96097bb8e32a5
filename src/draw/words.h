// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "flashmask/mask.h"

namespace flashmask {

// Words of a legend. None of them depends on the process's locale.

/// "1,048,576"
std::string grouped(int64_t number);

/// "12.5 %", with 0 and 100 for exactly nothing and everything only; "0 %" of nothing.
std::string percent(int64_t part, int64_t whole);

/// 1048576 as "1M", 131072 as "128K"; what is not a multiple of 1024 as grouped().
std::string binary_units(int64_t number);

/// "i - 15 ≤ j ≤ i", with q_offset folded in; "no band".
std::string describe_band(const Mask& mask);

/// "1 hidden interval per key, block mask"
std::string describe_intervals(const Mask& mask);

/// ", batch entry 1 of 2, head 0 of 4"; nothing if there is only one mask.
std::string describe_entry(const Mask& mask, int64_t batch, int64_t head);

}  // namespace flashmask
