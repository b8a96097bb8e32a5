// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <hwy/highway.h>

#include <algorithm>
#include <string>
#include <vector>

#include "flashmask/attention.h"

namespace flashmask::test {

/// Lets the library see this instruction set only; 0 gives all back.
inline void choose_instruction_set(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

/// Calls `check` for every instruction set of this machine, not only the one that the cpu backend would choose.
template <typename Check>
void for_every_instruction_set(const Check& check) {
  int checked = 0;
  for (int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) {
    const int64_t target = rest & -rest;
    choose_instruction_set(target);
    const std::vector<BackendInfo> all = backends();
    const std::string chosen =
        std::find_if(all.begin(), all.end(), [](const BackendInfo& b) { return b.name == "cpu"; })->detail;
    // A target that the machine has and the library was not compiled for falls to the next lower one.
    SCOPED_TRACE(std::string(hwy::TargetName(target)) + " -> " + chosen);
    checked += chosen.rfind(hwy::TargetName(target), 0) == 0;
    check();
  }
  choose_instruction_set(0);
  EXPECT_GE(checked, HWY_ARCH_X86 ? 2 : 1);  // NEON alone on 64-bit Arm
}

}  // namespace flashmask::test
