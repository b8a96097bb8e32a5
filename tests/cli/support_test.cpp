// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <regex>
#include <string>
#include <thread>
#include <vector>

#include "cli/family_list.h"
#include "cli/progress.h"
#include "families/families.h"
#include "flashmask/status.h"

namespace flashmask::cli {
namespace {

TEST(Progress, SaysNothingInTheFirstSecond) {
  testing::internal::CaptureStderr();
  {
    Progress progress("task", 4);
    for (int n = 0; n < 4; ++n) progress.advance();
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST(Progress, ThenAddsALineEveryTenthWithTheTimeThatIsLeft) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  {
    Progress progress("task", 100);
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    for (int n = 0; n < 25; ++n) progress.advance();
  }
  const std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "");
  EXPECT_NE(text.find("task: 1 % (1 of 100), "), std::string::npos) << text;
  EXPECT_NE(text.find("task: 10 % (10 of 100)"), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 3) << text;
  // A busy machine sleeps for longer.
  std::smatch times;
  ASSERT_TRUE(std::regex_search(text, times, std::regex(R"(task: 20 % \(20 of 100\), ([\d.]+) s, ([\d.]+) s left\n)")))
      << text;
  EXPECT_NEAR(std::stod(times[2]), 4 * std::stod(times[1]), 0.3) << text;
}

TEST(Progress, CountsMayStayHidden) {
  testing::internal::CaptureStderr();
  {
    Progress progress("task", 1000, /*show_counts=*/false);
    std::this_thread::sleep_for(std::chrono::milliseconds(1050));
    progress.advance(1000);
  }
  EXPECT_EQ(testing::internal::GetCapturedStderr().find("of 1000"), std::string::npos);
}

TEST(DurationText, FitsTheLength) {
  EXPECT_EQ(duration_text(0), "0.0 s");
  EXPECT_EQ(duration_text(3.24), "3.2 s");
  EXPECT_EQ(duration_text(59.9), "59.9 s");
  EXPECT_EQ(duration_text(59.97), "1 min 00 s");
  EXPECT_EQ(duration_text(245), "4 min 05 s");
  EXPECT_EQ(duration_text(2 * 3600 + 3 * 60 + 9), "2 h 03 min");
}

TEST(FamilyList, NamesAllAndPaper) {
  EXPECT_EQ(family_list("causal,document"), (std::vector<std::string>{"causal", "document"}));
  EXPECT_EQ(family_list("all").size(), families().size());
  EXPECT_EQ(family_list("paper").size(), 12u);
  for (const std::string& name : family_list("paper")) EXPECT_NO_THROW(make_family(name, 64)) << name;
}

TEST(FamilyList, RefusesWhatItDoesNotKnow) {
  for (const char* text : {"", "causal,", ",causal", "Causal", "causal document", "all,causal"})
    EXPECT_THROW(family_list(text), Error) << text;
}

}  // namespace
}  // namespace flashmask::cli
