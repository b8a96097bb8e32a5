// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/json_output.h"
#include "cli/mask_vectors.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "families/families.h"
#include "flashmask/draw.h"
#include "flashmask/inspect.h"
#include "flashmask/placement.h"
#include "flashmask/plan.h"
#include "flashmask/status.h"
#include "io/file.h"
#include "io/mask_json.h"
#include "show/families_json.h"
#include "show/page.h"
#include "show/png.h"
#include "show/ranks.h"

namespace flashmask::cli {
namespace {

/// Head dim of the head whose FLOPs `show` prints.
constexpr int64_t kFlopsHeadDim = 128;
/// Up to this many columns the JSON holds every value of the vectors.
using io::kMostJsonColumns;
static_assert(kMostJsonColumns <= VectorRuns::kFirst);
/// Up to this many runs of equal columns are printed; if there are more, the first and the last few.
constexpr int64_t kMostRuns = 16;

struct ShowArguments {
  std::string source;                   ///< a family, or a file
  std::vector<std::string> parameters;  ///< name=value
  int64_t seqlen = 64;
  uint64_t seed = 0;
  std::string tile = "128";
  int64_t batch = 0;
  int64_t head = 0;
  std::string svg, png, html;  ///< files to write; empty: none
  int64_t text_cells = 0;
  int64_t ranks = 0;  ///< 0: no placement
  std::string scheme = "balanced";
  bool list = false;
  bool has_family_options = false;  ///< --seqlen or --seed were given
};

template <typename... Arguments>
[[noreturn]] void fail(fmt::format_string<Arguments...> format, Arguments&&... arguments) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format(format, std::forward<Arguments>(arguments)...));
}

std::optional<int64_t> positive_integer(std::string_view text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < 1) return std::nullopt;
  return value;
}

/// "128" or "64x128": rows x keys.
TileShape parse_tile(const std::string& text) {
  const std::size_t cross = text.find('x');
  const auto rows = positive_integer(text.substr(0, cross));
  const auto keys = cross == std::string::npos ? rows : positive_integer(text.substr(cross + 1));
  if (!rows || !keys || *rows > kMaxSeqlen || *keys > kMaxSeqlen) {
    fail("--tile is '{}'; it must be N, or ROWSxKEYS, of numbers from 1 to {}", text, kMaxSeqlen);
  }
  return {*rows, *keys};
}

FamilyParameters parse_parameters(const std::vector<std::string>& words) {
  FamilyParameters parameters;
  for (const std::string& word : words) {
    const std::size_t equals = word.find('=');
    if (equals == 0 || equals == std::string::npos) fail("'{}' is not a parameter; parameters are name=value", word);
    const auto [entry, is_new] = parameters.emplace(word.substr(0, equals), word.substr(equals + 1));
    if (!is_new) fail("parameter '{}' is given twice", entry->first);
  }
  return parameters;
}

bool is_file(const std::string& source) { return source.ends_with(".json") || source.find('/') != std::string::npos; }

Mask load_mask(const ShowArguments& arguments) {
  if (!is_file(arguments.source))
    return make_family(arguments.source, arguments.seqlen, parse_parameters(arguments.parameters), arguments.seed);
  if (!arguments.parameters.empty() || arguments.has_family_options) {
    fail("{} is a file; --seqlen, --seed and parameters only go with a family", arguments.source);
  }
  return io::read_mask(arguments.source);
}

void check_index(const char* option, int64_t index, int64_t count) {
  if (index >= count) fail("{} is {}; the mask has {}, counted from 0", option, index, count);
}

/// A mask with all that is shown of it.
struct Shown {
  Mask mask;
  DrawOptions draw;
  int64_t plan_bytes;  ///< comes before slow steps: it refuses lengths too large for a plan
  MaskStatistics statistics;
  MaskVectors vectors;
  std::optional<Placement> placement;
  std::string drawing;
};

constexpr const char* kSchemes[] = {"contiguous", "zigzag", "balanced"};

std::optional<Placement> placement_of(const Mask& mask, const ShowArguments& arguments) {
  if (arguments.ranks == 0) return std::nullopt;
  if (!arguments.png.empty() || !arguments.html.empty())
    fail("--ranks is drawn by --out alone; leave out --png and --html");
  const auto scheme = std::find(std::begin(kSchemes), std::end(kSchemes), arguments.scheme) - std::begin(kSchemes);
  return place({&mask.view(), 1}, arguments.ranks, static_cast<PlacementScheme>(scheme));
}

/// Counts the bytes of a plan that is made ahead of calls, on a CPU.
int64_t plan_bytes(const Mask& mask) {
  if (mask.has_interval_lists())  // in bits, which this command shows however many they are
    return PlanLayout(mask.seqlen_q(), mask.seqlen_k(), mask.batch(), mask.heads()).bytes;
  std::vector<uint64_t> scratch(static_cast<std::size_t>(count_plan_scratch(mask.view(), {}) / 8));
  return count_plan_layout(mask.view(), std::as_writable_bytes(std::span(scratch)), {}).bytes;
}

AttentionFlops shown_flops(const Shown& shown) {
  return attention_flops(1, 1, shown.mask.seqlen_q(), shown.mask.seqlen_k(), kFlopsHeadDim, kFlopsHeadDim,
                         shown.statistics.live_share());
}

/// Does all that takes time for a long mask, apart from the files.
Shown make_shown(const ShowArguments& arguments, Progress& progress) {
  const auto done = [&progress](auto result) {
    progress.advance();
    return result;
  };
  const Mask mask = done(load_mask(arguments));
  check_index("--batch", arguments.batch, mask.batch());
  check_index("--head", arguments.head, mask.heads());
  const DrawOptions draw{.batch = arguments.batch,
                         .head = arguments.head,
                         .tile = parse_tile(arguments.tile),
                         .max_cells = arguments.text_cells};
  return {.mask = mask,
          .draw = draw,
          .plan_bytes = plan_bytes(mask),
          .statistics = done(statistics(mask, draw.tile)),
          .vectors = done(mask_vectors(mask, arguments.batch, arguments.head)),
          .placement = done(placement_of(mask, arguments)),
          .drawing = done(draw_text(mask, draw))};
}
constexpr int64_t kStepsOfShown = 5;

/// A file that was asked for.
struct Output {
  const char* option;
  const char* kind;
  std::string path;
  std::function<std::string(const Mask&, const DrawOptions&)> draw;
};

std::string draw_page(const ShowArguments& arguments, const Mask& mask, const DrawOptions& draw) {
  const bool family = !is_file(arguments.source);
  return show::draw_page(mask, draw,
                         {.name = arguments.source,
                          .is_family = family,
                          .seqlen = family ? arguments.seqlen : 0,
                          .parameters = parse_parameters(arguments.parameters),
                          .seed = arguments.seed});
}

std::vector<Output> outputs(const Shown& shown, const ShowArguments& arguments) {
  const auto page = [&arguments](const Mask& mask, const DrawOptions& draw) {
    return draw_page(arguments, mask, draw);
  };
  const auto svg = [&shown](const Mask& mask, const DrawOptions& draw) {
    return shown.placement ? show::draw_ranks(mask, *shown.placement, draw) : draw_svg(mask, draw);
  };
  const auto png = [](const Mask& mask, const DrawOptions& draw) { return show::to_png(draw_pixels(mask, draw)); };
  std::vector<Output> files{{"--out", "svg", arguments.svg, svg},
                            {"--png", "png", arguments.png, png},
                            {"--html", "html", arguments.html, page}};
  std::erase_if(files, [](const Output& file) { return file.path.empty(); });
  return files;
}

// --- Text -----------------------------------------------------------------------------------------

void print_run(const MaskVectors& vectors, const VectorRun& run) {
  fmt::print("  columns [{}, {}):", run.begin, run.end);
  for (std::size_t n = 0; n < vectors.names.size(); ++n) fmt::print("  {} {}", vectors.names[n], run.values[n]);
  fmt::print("\n");
}

void print_vectors(const MaskVectors& vectors) {
  fmt::print("{}\n", vectors.meaning);
  const auto& [count, first, last] = vectors.runs;
  const bool all = count <= kMostRuns;
  for (const VectorRun& run : std::span(first).first(static_cast<std::size_t>(all ? count : VectorRuns::kLast)))
    print_run(vectors, run);
  if (all) return;
  fmt::print("  ... ({} more)\n", count - 2 * VectorRuns::kLast);
  for (const VectorRun& run : last) print_run(vectors, run);
}

/// Prints statistics that the drawing's legend leaves out.
void print_statistics(const Shown& shown) {
  const MaskStatistics& s = shown.statistics;
  const Mask& mask = shown.mask;
  if (mask.batch() * mask.heads() > 1) {
    fmt::print("\nall {} batch entries and {} heads of the mask: {:.2f} % visible, {} of {} tiles live", mask.batch(),
               mask.heads(), 100 * s.visible_share(), s.live_tiles(), s.tiles);
  }
  fmt::print("\nmemory: {} bytes, its plan {} bytes\n", mask.memory_bytes(), shown.plan_bytes);
  const AttentionFlops flops = shown_flops(shown);
  fmt::print("FLOPs of a head with head dim {} over the live tiles: forward {:.4g}, backward {:.4g}\n", kFlopsHeadDim,
             flops.forward, flops.backward);
}

void print_text(const Shown& shown) {
  fmt::print("{}\n", shown.drawing);
  print_vectors(shown.vectors);
  print_statistics(shown);
  if (shown.placement) fmt::print("\n{}", show::ranks_text(*shown.placement));
}

// --- JSON -----------------------------------------------------------------------------------------

Json vectors_json(const MaskVectors& vectors) {
  Json json{{"form", vectors.form},
            {"causal", vectors.causal},
            {"columns", vectors.columns},
            {"complete", vectors.columns <= kMostJsonColumns}};
  Json values = Json::object();
  if (vectors.columns <= kMostJsonColumns) {
    for (std::size_t n = 0; n < vectors.names.size(); ++n) {
      Json& own = values[vectors.names[n]] = Json::array();
      for (const VectorRun& run : vectors.runs.first) own.insert(own.end(), run.end - run.begin, run.values[n]);
    }
  }
  json["names"] = vectors.names;
  json["values"] = std::move(values);
  return json;
}

Json statistics_json(const MaskStatistics& s) {
  return {{"elements", s.elements},
          {"visible", s.visible},
          {"visible_share", s.visible_share()},
          {"tile", {s.tile.rows, s.tile.keys}},
          {"tiles", s.tiles},
          {"live_tiles", s.live_tiles()},
          {"partial_tiles", s.partial_tiles},
          {"full_tiles", s.full_tiles},
          {"live_share", s.live_share()}};
}

Json to_json(const Shown& shown, const ShowArguments& arguments) {
  const Mask& mask = shown.mask;
  const AttentionFlops flops = shown_flops(shown);
  const auto edge = [](const std::optional<int64_t>& value) { return value ? Json(*value) : Json(nullptr); };
  Json json{{"source", arguments.source},
            {"seqlen_q", mask.seqlen_q()},
            {"seqlen_k", mask.seqlen_k()},
            {"mask_batch", mask.batch()},
            {"mask_heads", mask.heads()},
            {"memory_bytes", mask.memory_bytes()},
            {"plan_bytes", shown.plan_bytes},
            {"band", {{"lo", edge(mask.band().lo)}, {"hi", edge(mask.band().hi)}, {"q_offset", mask.q_offset()}}},
            {"block_mask", mask.has_block_mask()},
            {"batch", shown.draw.batch},
            {"head", shown.draw.head},
            {"vectors", vectors_json(shown.vectors)},
            {"statistics", statistics_json(shown.statistics)},
            {"flops", {{"head_dim", kFlopsHeadDim}, {"forward", flops.forward}, {"backward", flops.backward}}},
            {"drawing", shown.drawing}};
  json["mask"] = mask.seqlen_k() <= kMostJsonColumns ? Json(io::to_json(mask)) : Json(nullptr);  // `show` reads it back
  if (shown.placement) json["placement"] = show::ranks_json(*shown.placement);
  for (const Output& output : outputs(shown, arguments)) json[output.kind] = output.path;
  return json;
}

// --- The list of families -------------------------------------------------------------------------

void print_families() {
  for (const Family& family : families()) {
    fmt::print("{}\n  {}\n", family.name, family.definition);
    for (const FamilyParameter& parameter : family.parameters)
      fmt::print("    {:<14} {}\n", parameter.name, parameter.help);
  }
}

// --- Files ----------------------------------------------------------------------------------------

void check_distinct(const std::vector<Output>& files) {
  for (auto file = files.begin(); file != files.end(); ++file) {
    const auto same = std::find_if(files.begin(), file, [&](const Output& other) { return other.path == file->path; });
    if (same != file)
      fail("{} and {} would both be written to {}; each needs a file of its own", same->option, file->option,
           file->path);
  }
}

/// A picture under the name of another kind is one that no viewer opens; a name without a kind may be anything.
void check_kind(const Output& file) {
  const std::string extension = std::filesystem::path(file.path).extension().string();
  if (extension.empty() || extension == fmt::format(".{}", file.kind)) return;
  fail("{} is '{}'; it writes .{}, while --out is for .svg, --png for .png, --html for .html", file.option, file.path,
       file.kind);
}

/// Draws all before it writes any: an error in one file leaves none behind.
void write_files(const Shown& shown, const ShowArguments& arguments, Progress& progress) {
  const std::vector<Output> files = outputs(shown, arguments);
  check_distinct(files);
  DrawOptions draw = shown.draw;
  draw.max_cells = 0;  // --text-cells is for the text
  std::vector<std::string> contents;
  for (const Output& file : files) {
    check_kind(file);
    io::check_writable(file.path);
    contents.push_back(file.draw(shown.mask, draw));
    progress.advance();
  }
  for (std::size_t n = 0; n < files.size(); ++n) io::write_file_atomically(files[n].path, contents[n]);
}

void run_show(const ShowArguments& arguments, const Global& global) {
  if (arguments.list) {
    if (global.json) {
      print_json({{"families", show::families_json()}});
    } else {
      print_families();
    }
    return;
  }
  if (arguments.source.empty()) throw CLI::RequiredError("FAMILY or FILE.json");
  const auto files = static_cast<int64_t>(!arguments.svg.empty() + !arguments.png.empty() + !arguments.html.empty());
  std::optional<Progress> progress(std::in_place, "show", kStepsOfShown + files);
  const Shown shown = make_shown(arguments, *progress);
  write_files(shown, arguments, *progress);
  progress.reset();
  if (global.json) {
    print_json(to_json(shown, arguments));
  } else {
    print_text(shown);
    for (const Output& output : outputs(shown, arguments)) fmt::print("wrote {}\n", output.path);
  }
}

constexpr const char* kDescription =
    "Show a mask: a drawing, the vectors that it is made of, and statistics.\n"
    "\n"
    "  flashmask show causal_document lengths=20,12,32\n"
    "  flashmask show sliding_window --seqlen 4096 --param left=511 --out window.svg\n"
    "  flashmask show causal_document --seqlen 4096 --html mask.html\n"
    "  flashmask show --list                   all families with their parameters";

}  // namespace

void add_show_command(CLI::App& app, const Global& global) {
  const auto arguments = std::make_shared<ShowArguments>();
  CLI::App* command = app.add_subcommand("show", kDescription);
  command
      ->add_option("mask", arguments->source,
                   "A mask family (see --list), or a file with a mask in JSON, such as --json prints")
      ->type_name("FAMILY|FILE.json");
  const auto parameters = std::make_shared<std::vector<std::string>>();
  command->add_option("parameters", *parameters, "Parameters of the family, as with --param")->type_name("NAME=VALUE");
  CLI::Option* seqlen = command->add_option("--seqlen", arguments->seqlen, "Rows and keys of the family's mask")
                            ->check(between(0, kMaxSeqlen))
                            ->capture_default_str();
  command
      ->add_option("--param", arguments->parameters,
                   "A parameter of the family; may be repeated. Lists are separated by commas")
      ->type_name("NAME=VALUE")
      ->expected(1)
      ->allow_extra_args(false)
      ->take_all();
  CLI::Option* seed =
      command->add_option("--seed", arguments->seed, "Of the parameters that are not given and are drawn")
          ->check(any_seed())
          ->capture_default_str();
  command->add_option("--tile", arguments->tile, "Tile to classify by: N, or ROWSxKEYS")
      ->type_name("N|RxK")
      ->capture_default_str();
  command->add_option("--batch", arguments->batch, "Batch entry of the mask to draw and list")
      ->check(between(0, kMaxSeqlen))
      ->capture_default_str();
  command->add_option("--head", arguments->head, "Head of the mask to draw and list")
      ->check(between(0, kMaxSeqlen))
      ->capture_default_str();
  command->add_option("--out", arguments->svg, "Write the drawing as an SVG file too")->type_name("FILE.svg");
  command
      ->add_option("--png", arguments->png,
                   "Write the SVG's plot as a PNG file too: the tiles and elements, without words, axes and legend")
      ->type_name("FILE.png");
  command
      ->add_option("--html", arguments->html,
                   "Write a page for a browser too, in one file: its reader changes the tile, and sees the mask, its "
                   "tiles and the load of the multiprocessors")
      ->type_name("FILE.html");
  command
      ->add_option("--text-cells", arguments->text_cells,
                   "Longest side of the text drawing in cells, 0 for the default of 64; longer masks are downsampled")
      ->check(between(0, 100'000))
      ->capture_default_str();
  command
      ->add_option("--ranks", arguments->ranks,
                   "Place the rows on so many ranks (GPUs), and show which computes what; --out then draws that")
      ->type_name("N")
      ->check(between(1, 65'536));
  command->add_option("--scheme", arguments->scheme, "How to place them: contiguous, zigzag or balanced")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(kSchemes), std::end(kSchemes))))
      ->capture_default_str();
  command->add_flag("--list", arguments->list, "List all families, what they show, and their parameters");
  command->callback([=, &global] {
    arguments->parameters.insert(arguments->parameters.end(), parameters->begin(), parameters->end());
    arguments->has_family_options = seqlen->count() + seed->count() > 0;
    run_show(*arguments, global);
  });
}

}  // namespace flashmask::cli
