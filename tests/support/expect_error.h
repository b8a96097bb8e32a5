// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "flashmask/status.h"

namespace flashmask::test {

/// Runs `f` and expects an Error of this code whose message contains every one of `parts`: the argument's
/// name, the value it had, what is accepted.
template <typename F>
void expect_error(ErrorCode code, std::initializer_list<std::string> parts, F&& f) {
  try {
    std::forward<F>(f)();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    const std::string text = error.what();
    for (const std::string& part : parts)
      EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
    return;
  } catch (const std::exception& other) {
    ADD_FAILURE() << "expected a flashmask::Error, got another exception: " << other.what();
    return;
  }
  std::string wanted;
  for (const std::string& part : parts) wanted += " '" + part + "'";
  ADD_FAILURE() << "nothing was thrown; expected an error with" << wanted;
}

template <typename F>
void expect_invalid(std::initializer_list<std::string> parts, F&& f) {
  expect_error(ErrorCode::kInvalidArgument, parts, std::forward<F>(f));
}

}  // namespace flashmask::test
