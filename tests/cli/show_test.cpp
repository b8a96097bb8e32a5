// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <nlohmann/json.hpp>

#include "cli/program.h"
#include "families/families.h"
#include "flashmask/builders.h"
#include "flashmask/draw.h"
#include "flashmask/inspect.h"
#include "flashmask/plan.h"
#include "io/mask_json.h"
#include "support/extent.h"

namespace flashmask::test {
namespace {

using nlohmann::json;

std::vector<std::string> names_of(const json& entries) {
  std::vector<std::string> names;
  for (const json& entry : entries) names.push_back(entry["name"]);
  return names;
}

TEST(Show, DrawsAFamily) {
  const std::string text = output_of({"show", "causal_document", "--seqlen", "12", "lengths=5,7"});
  const std::vector<int64_t> lengths{5, 7};
  expect_contains(text, draw_text(masks::causal_document(Documents::from_lengths(lengths))));
  expect_contains(text, "columns [0, 5):  LTS 5\n");
  expect_contains(text, "columns [5, 12):  LTS 12\n");
  expect_contains(text, "startend_row_indices [1, 1, 12, 1], causal");
}

TEST(Show, TakesParametersAsWordsAndAsOptions) {
  const std::string words = output_of({"show", "sliding_window", "--seqlen", "20", "left=3", "right=1"});
  EXPECT_EQ(output_of({"show", "sliding_window", "--seqlen", "20", "--param", "left=3", "--param", "right=1"}), words);
  EXPECT_EQ(output_of({"show", "sliding_window", "--param", "right=1", "--seqlen", "20", "left=3"}), words);
  EXPECT_NE(output_of({"show", "sliding_window", "--seqlen", "20", "left=2", "right=1"}), words);
}

TEST(Show, SaysWhichRankComputesWhat) {
  const std::vector<std::string> arguments{"show", "causal", "--seqlen", "1024", "--ranks", "2"};
  const auto with = [&](const char* scheme) {
    json shown = json_of({"show", "causal", "--seqlen", "1024", "--ranks", "2", "--scheme", scheme, "--json"});
    return shown["placement"];
  };
  const json contiguous = with("contiguous"), zigzag = with("zigzag");
  EXPECT_EQ(contiguous["ranks"][1]["segments"], json::parse("[[512, 1024]]"));
  EXPECT_EQ(contiguous["ranks"][0]["live_tiles"], 10);  // on and below the diagonal of 8 x 8 tiles
  EXPECT_EQ(contiguous["ranks"][1]["live_tiles"], 26);
  EXPECT_EQ(contiguous["ranks"][1]["received_keys"], 512);
  EXPECT_EQ(zigzag["ranks"][0]["segments"], json::parse("[[0, 256], [768, 1024]]"));
  EXPECT_EQ(zigzag["largest_load"], 1.0);
  expect_contains(output_of(arguments), "2 ranks: largest load 1.000 of the mean");
}

TEST(Show, DrawsWhatIsNotGivenFromTheSeed) {
  const auto drawing = [](const char* seed) {
    return output_of({"show", "document", "--seqlen", "40", "--seed", seed});
  };
  EXPECT_EQ(drawing("3"), drawing("3"));
  EXPECT_NE(drawing("3"), drawing("4"));
}

TEST(Show, EveryFamilyAsTextAndAsJson) {
  for (const Family& family : families()) {
    SCOPED_TRACE(family.name);
    const std::string name(family.name);
    const Mask mask = make_family(name, 70);
    expect_contains(output_of({"show", name, "--seqlen", "70"}), draw_text(mask));
    const json shown = json_of({"show", name, "--seqlen", "70", "--json"});
    EXPECT_EQ(shown["source"], name);
    EXPECT_EQ(shown["mask"], io::to_json(mask));
    EXPECT_EQ(shown["seqlen_q"], 70);
    EXPECT_EQ(shown["drawing"], draw_text(mask));
    EXPECT_EQ(shown["statistics"]["visible"], statistics(mask).visible);
    EXPECT_EQ(shown["vectors"]["columns"], 70);
    EXPECT_EQ(shown["vectors"]["complete"], true);
  }
}

TEST(Show, JsonHasTheSmallestVectorsColumnByColumn) {
  for (const char* name : {"causal", "causal_document", "document", "causal_blockwise", "global_sliding_window"}) {
    SCOPED_TRACE(name);
    const StartEndRowIndices expected = to_startend_row_indices(make_family(name, 50));
    const json vectors = json_of({"show", name, "--seqlen", "50", "--json"})["vectors"];
    EXPECT_EQ(vectors["form"], "startend_row_indices");
    EXPECT_EQ(vectors["causal"], expected.causal);
    ASSERT_EQ(static_cast<int64_t>(vectors["names"].size()), expected.vectors);
    for (std::size_t n = 0; n < vectors["names"].size(); ++n) {
      const json& values = vectors["values"][vectors["names"][n].get<std::string>()];
      ASSERT_EQ(values.size(), 50u);
      for (std::size_t j = 0; j < 50; ++j)
        EXPECT_EQ(values[j], expected.values[j * static_cast<std::size_t>(expected.vectors) + n]);
    }
  }
}

TEST(Show, StatisticsGoByTheTileAskedFor) {
  const Mask mask = make_family("causal", 300);
  for (const auto& [option, tile] :
       {std::pair<const char*, TileShape>{"64", {64, 64}}, {"64x32", {64, 32}}, {"1x300", {1, 300}}}) {
    const MaskStatistics expected = statistics(mask, tile);
    const json shown = json_of({"show", "causal", "--seqlen", "300", "--tile", option, "--json"})["statistics"];
    EXPECT_EQ(shown["tile"], json({tile.rows, tile.keys}));
    EXPECT_EQ(shown["tiles"], expected.tiles);
    EXPECT_EQ(shown["live_tiles"], expected.live_tiles());
    EXPECT_EQ(shown["partial_tiles"], expected.partial_tiles);
    EXPECT_EQ(shown["full_tiles"], expected.full_tiles);
    EXPECT_DOUBLE_EQ(shown["live_share"].get<double>(), expected.live_share());
    EXPECT_DOUBLE_EQ(shown["visible_share"].get<double>(), expected.visible_share());
  }
}

TEST(Show, LongMasksAreListedByRunsAndByTheirEnds) {
  const std::string text = output_of({"show", "prefix_lm_causal", "--seqlen", "5000"});
  expect_contains(text, " more)\n");
  EXPECT_LT(std::count(text.begin(), text.end(), '\n'), 120);
  const json vectors = json_of({"show", "prefix_lm_causal", "--seqlen", "5000", "--json"})["vectors"];
  EXPECT_EQ(vectors["complete"], false);
  EXPECT_EQ(vectors["columns"], 5000);
  EXPECT_EQ(vectors["values"], json::object());
  EXPECT_TRUE(json_of({"show", "prefix_lm_causal", "--seqlen", "5000", "--json"})["mask"].is_null());
  EXPECT_EQ(json_of({"show", "causal", "--seqlen", "4096", "--json"})["vectors"]["complete"], true);
}

TEST(Show, TakesNoMemoryBesideTheMask) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's heap keeps what was freed";
  const auto peak = [](const char* family, const char* seqlen) {
    const Outcome outcome = run_program({"show", family, "--seqlen", seqlen});
    EXPECT_EQ(outcome.status, 0) << outcome.error;
    return outcome.peak_bytes;
  };
  constexpr int64_t kSlack = 16 << 20;
  for (const char* family : {"causal", "sliding_window", "causal_document", "document", "prefix_lm_causal"}) {
    SCOPED_TRACE(family);
    EXPECT_LE(peak(family, "4000000"), peak(family, "64") + make_family(family, 4'000'000).memory_bytes() + kSlack);
  }
}

TEST(Show, TextCellsBoundTheDrawing) {
  const DrawOptions draw{.max_cells = 10};
  expect_contains(output_of({"show", "causal", "--seqlen", "1000", "--text-cells", "10"}),
                  draw_text(make_family("causal", 1000), draw));
}

TEST(Show, AnEmptyMask) {
  EXPECT_EQ(json_of({"show", "document", "--seqlen", "0", "--json"})["statistics"]["elements"], 0);
}

TEST(Show, WritesAnSvg) {
  const TemporaryFolder folder;
  const std::string path = folder / "mask.svg";
  expect_contains(output_of({"show", "causal", "--seqlen", "32", "--out", path}), path);
  EXPECT_EQ(contents_of(path), draw_svg(make_family("causal", 32)));
  EXPECT_EQ(json_of({"show", "document", "--seqlen", "32", "--out", path, "--json"})["svg"], path);
  EXPECT_EQ(contents_of(path), draw_svg(make_family("document", 32)));
  EXPECT_EQ(folder.names(), std::vector<std::string>{"mask.svg"});
}

TEST(Show, WritesAPngAndAPage) {
  const TemporaryFolder folder;
  const std::string svg = folder / "a.svg", png = folder / "b.png", html = folder / "c.html";
  const std::vector<std::string> words{"show", "causal", "--seqlen", "32", "--out", svg, "--png", png, "--html", html};
  const std::string text = output_of(words);
  for (const std::string& path : {svg, png, html}) expect_contains(text, "wrote " + path + "\n");
  EXPECT_EQ(contents_of(svg), draw_svg(make_family("causal", 32)));
  EXPECT_TRUE(contents_of(png).starts_with("\x89PNG\r\n")) << "tests/show decodes it";
  EXPECT_TRUE(contents_of(html).starts_with("<!DOCTYPE html>")) << "tests/show works it";
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"a.svg", "b.png", "c.html"}));
  const std::string first = contents_of(png) + contents_of(html);
  std::vector<std::string> again = words;
  again.emplace_back("--json");
  const json shown = json_of(again);
  EXPECT_EQ(shown["png"], png);
  EXPECT_EQ(shown["html"], html);
  EXPECT_EQ(contents_of(png) + contents_of(html), first) << "the same bytes";
}

TEST(Show, ThePictureIsOfTheEntryAskedFor) {
  const TemporaryFolder folder;
  const auto picture = [&folder](const std::string& lengths, const char* batch) {
    output_of({"show", "padding", "key_lengths=" + lengths, "--batch", batch, "--png", folder / "x.png"});
    return contents_of(folder / "x.png");
  };
  EXPECT_EQ(picture("9,30", "1"), picture("30", "0"));
  EXPECT_NE(picture("9,30", "0"), picture("9,30", "1"));
}

TEST(Show, AnOutputThatCannotBeWrittenIsAnError) {
  const TemporaryFolder folder;
  for (const char* option : {"--out", "--png", "--html"}) {
    expect_failure({"show", "causal", option, folder / "no/such/folder/x"}, kFailed, {"no/such/folder/x"});
    expect_failure({"show", "causal", option, folder / "", "--json"}, kFailed, {"cannot write"});
  }
  expect_failure({"show", "causal", "--out", folder / "a.svg", "--html", folder / "no/x.html"}, kFailed, {"no/x.html"});
  EXPECT_TRUE(folder.names().empty()) << "all files or none";
}

TEST(Show, AFileIsOfTheKindThatItsNameSays) {
  const TemporaryFolder folder;
  for (const auto& [option, name] :
       {std::pair{"--out", "a.png"}, {"--out", "a.pdf"}, {"--png", "a.svg"}, {"--html", "a.htm"}}) {
    expect_failure({"show", "causal", option, folder / name}, kFailed, {option, name, "--png for .png"});
  }
  EXPECT_TRUE(folder.names().empty());
  output_of({"show", "causal", "--out", folder / "plain"});
}

TEST(Show, WhatCannotBeDrawnIsAnErrorAndLeavesNoFile) {
  const TemporaryFolder folder;
  const std::string png = folder / "x.png", html = folder / "x.html";
  expect_failure({"show", "full", "--seqlen", "0", "--png", png}, kFailed, {"picture", "0 query rows"});
  expect_failure({"show", "full", "--seqlen", "131073", "--html", html}, kFailed, {"131072", "131073"});
  expect_failure({"show", "full", "--seqlen", "131072", "--tile", "8", "--html", html}, kFailed,
                 {"tiles", "--tile 8x8", "268435456"});
  expect_failure({"show", "full", "--out", png, "--png", png}, kFailed, {"--out", "--png", png});
  const std::string blocks = R"({"seqlen_q": 4, "seqlen_k": 4, "block_mask": [1]})";
  EXPECT_EQ(run_program({"show", folder.write("blocks.json", blocks), "--png", png}).status, 0);
  expect_failure({"show", folder / "blocks.json", "--html", html}, kFailed, {"block mask"});
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"blocks.json", "x.png"}));
}

TEST(Show, SaysWhatAPlanTakes) {
  const int64_t bytes = PlanLayout(1000, 1000, 2, 1).bytes;
  expect_contains(output_of({"show", "padding", "key_lengths=5,6", "--seqlen", "1000"}),
                  "its plan " + std::to_string(bytes) + " bytes");
  EXPECT_EQ(json_of({"show", "padding", "key_lengths=5,6", "--seqlen", "1000", "--json"})["plan_bytes"], bytes);
}

TEST(Show, ListsTheFamiliesWithTheirParameters) {
  const std::string text = output_of({"show", "--list"});
  for (const Family& family : families()) {
    expect_contains(text, std::string(family.name));
    expect_contains(text, std::string(family.definition));
    for (const FamilyParameter& parameter : family.parameters) expect_contains(text, std::string(parameter.help));
  }
  std::vector<std::string> expected;
  for (const Family& family : families()) expected.emplace_back(family.name);
  EXPECT_EQ(names_of(json_of({"show", "--list", "--json"})["families"]), expected);
}

// --- Masks from files -------------------------------------------------------------------------------

TEST(ShowFile, DrawsTheMaskThatIsInIt) {
  const TemporaryFolder folder;
  const Mask mask = make_family("prefix_tree", 30);
  const std::string path = folder.write("mask.json", io::to_json(mask).dump());
  expect_contains(output_of({"show", path}), draw_text(mask));
  EXPECT_EQ(json_of({"show", path, "--json"})["drawing"], draw_text(mask));
}

TEST(ShowFile, ReadsWhatShowPrints) {
  const TemporaryFolder folder;
  const std::string printed = output_of({"show", "global_sliding_window", "--seqlen", "40", "--json"});
  const json again = json_of({"show", folder.write("printed.json", printed), "--json"});
  EXPECT_EQ(again["mask"], json::parse(printed)["mask"]);
  EXPECT_EQ(again["drawing"], draw_text(make_family("global_sliding_window", 40)));
  const std::string long_one = output_of({"show", "causal_document", "--seqlen", "5000", "--json"});
  expect_failure({"show", folder.write("long.json", long_one)}, kFailed, {"long.json", "4096"});
}

TEST(ShowFile, BatchAndHeadPickAnEntry) {
  const TemporaryFolder folder;
  const std::vector<int64_t> keys{3, 9};
  const Mask mask = masks::padding(10, 10, keys);
  const std::string path = folder.write("mask.json", io::to_json(mask).dump());
  const json second = json_of({"show", path, "--batch", "1", "--json"});
  EXPECT_EQ(second["mask_batch"], 2);
  EXPECT_EQ(second["drawing"], draw_text(mask, {.batch = 1}));
  const json lts = second["vectors"]["values"]["LTS"];
  EXPECT_EQ(lts, json({10, 10, 10, 10, 10, 10, 10, 10, 10, 0}));
  expect_failure({"show", path, "--batch", "2"}, kFailed, {"--batch is 2", "has 2"});
  expect_failure({"show", path, "--head", "1"}, kFailed, {"--head is 1", "has 1"});
}

TEST(ShowFile, AMaskWithoutAVectorFormShowsItsOwnParts) {
  const TemporaryFolder folder;
  // A window with two holes in it: four hidden intervals in the columns of the middle.
  const int64_t n = 20;
  MaskParts parts{.seqlen_q = n, .seqlen_k = n, .band = Band::window(6, 6)};
  for (int64_t j = 0; j < n; ++j) {
    parts.lts.push_back(static_cast<int32_t>(std::min(j + 2, n)));
    parts.lte.push_back(static_cast<int32_t>(std::min(j + 3, n)));
    parts.uts.push_back(static_cast<int32_t>(std::max<int64_t>(j - 3, 0)));
    parts.ute.push_back(static_cast<int32_t>(std::max<int64_t>(j - 2, 0)));
  }
  const Mask mask(parts);
  const std::string path = folder.write("mask.json", io::to_json(mask).dump());
  const json vectors = json_of({"show", path, "--json"})["vectors"];
  EXPECT_EQ(vectors["form"], "band_and_intervals");
  EXPECT_EQ(vectors["names"], json({"LTS", "LTE", "UTS", "UTE"}));
  EXPECT_EQ(vectors["values"]["LTS"], json(parts.lts));
  expect_contains(output_of({"show", path}), "-6 <= key - (row + 0) <= 6");
}

TEST(ShowFile, IntervalLists) {
  const TemporaryFolder folder;
  const Mask mask({.seqlen_q = 9, .seqlen_k = 2, .column_ptr = {0, 3, 3}, .intervals = {0, 1, 2, 3, 4, 6}});
  const std::string path = folder.write("mask.json", io::to_json(mask).dump());
  const json shown = json_of({"show", path, "--json"});
  EXPECT_EQ(shown["statistics"]["visible"], 18 - 4);
  EXPECT_EQ(shown["vectors"]["form"], "band_and_intervals");
  EXPECT_EQ(shown["mask"], json(io::to_json(mask)));
  expect_contains(output_of({"show", path}), "up to 3 hidden intervals per key");
  output_of({"show", path, "--html", folder / "page.html"});
  expect_contains(contents_of(folder / "page.html"), "\"column_ptr\":[0,3,3]");
}

TEST(ShowFile, ABlockMaskIsLeftOutOfTheVectors) {
  const TemporaryFolder folder;
  const Mask mask = make_family("causal", 300).with_block_mask({1, 1, 1, 0, 1, 1, 1, 1, 1});
  const json shown = json_of({"show", folder.write("mask.json", io::to_json(mask).dump()), "--json"});
  EXPECT_EQ(shown["block_mask"], true);
  EXPECT_EQ(shown["vectors"]["form"], "startend_row_indices");
  EXPECT_EQ(shown["statistics"]["visible"], statistics(mask).visible);
}

TEST(ShowFile, BadFilesAreErrors) {
  const TemporaryFolder folder;
  expect_failure({"show", folder / "missing.json"}, kFailed, {"missing.json"});
  expect_failure({"show", folder.write("text.json", "not json")}, kFailed, {"text.json", "JSON"});
  expect_failure({"show", folder.write("cut.json", R"({"seqlen_q": 4, "seql)")}, kFailed, {"cut.json", "JSON"});
  expect_failure({"show", folder.write("empty.json", "{}"), "--json"}, kFailed, {"seqlen_q"});
  expect_failure({"show", folder.write("wrong.json", R"({"seqlen_q": 4, "seqlen_k": 4, "colour": 3})")}, kFailed,
                 {"colour"});
}

TEST(ShowFile, FamilyOptionsDoNotGoWithAFile) {
  const TemporaryFolder folder;
  const std::string path = folder.write("mask.json", io::to_json(make_family("full", 4)).dump());
  expect_failure({"show", path, "--seqlen", "8"}, kFailed, {"--seqlen"});
  expect_failure({"show", path, "left=3"}, kFailed, {"parameters"});
}

TEST(ShowFamily, AnInfiniteWindowIsUnbounded) {
  const json infinite =
      json_of({"show", "sliding_window", "left=9223372036854775807", "right=4611686018427387904", "--json"});
  const json unbounded = json_of({"show", "sliding_window", "left=-1", "right=-1", "--json"});
  EXPECT_EQ(infinite["statistics"], unbounded["statistics"]);
  EXPECT_EQ(infinite["vectors"], unbounded["vectors"]);
}

// --- Wrong arguments --------------------------------------------------------------------------------

TEST(ShowErrors, UnknownFamiliesAndParameters) {
  expect_failure({"show", "diagonal"}, kFailed, {"'diagonal'", "causal_document"});
  expect_failure({"show", "diagonal", "--json"}, kFailed, {"'diagonal'", "causal_document"});
  expect_failure({"show", "causal", "left=3"}, kFailed, {"'left'", "q_offset"});
  expect_failure({"show", "causal_document", "lengths=3,4"}, kFailed, {"lengths", "64"});
  expect_failure({"show", "causal_document", "lengths=40,40"}, kFailed, {"lengths adds up to 80", "64"});
  expect_failure({"show", "causal_document", "lengths=3,x"}, kFailed, {"lengths", "3,x"});
  expect_failure({"show", "shared_question", "groups=62,2", "answers=3"}, kFailed,
                 {"answers has 3", "length of group 1, 2"});
  expect_failure({"show", "sliding_window", "left=-2"}, kFailed, {"left", "-2"});
  expect_failure({"show", "sliding_window", "left=99999999999999999999"}, kFailed, {"left"});
}

TEST(ShowErrors, MalformedParameters) {
  expect_failure({"show", "sliding_window", "left"}, kFailed, {"'left'", "name=value"});
  expect_failure({"show", "sliding_window", "=3"}, kFailed, {"'=3'"});
  expect_failure({"show", "sliding_window", "left=3", "left=4"}, kFailed, {"'left'", "twice"});
}

TEST(ShowErrors, MalformedTiles) {
  for (const char* tile : {"0", "x", "64x", "x64", "-4", "64x0", "4x4x4", "99999999999"}) {
    expect_failure({"show", "causal", "--tile", tile}, kFailed, {"--tile", tile});
  }
}

}  // namespace
}  // namespace flashmask::test
