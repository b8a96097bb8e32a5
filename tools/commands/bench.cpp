// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/family_list.h"
#include "cli/json_output.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "families/families.h"
#include "flashmask/attention.h"
#include "flashmask/inspect.h"
#include "flashmask/version.h"
#include "io/file.h"
#include "verify/problem.h"

namespace flashmask::cli {
namespace {

struct BenchArguments {
  std::string backend = "auto";
  std::string families = "paper";
  int64_t seqlen = 2048;
  int64_t batch = 1;
  int64_t heads = 4;
  int64_t kv_heads = 0;  ///< 0: as heads
  int64_t head_dim = 64;
  std::string dtype = "float32";
  int threads = 0;
  int rounds = 5;
  bool no_backward = false;
  bool dense = false;
  uint64_t seed = 0;
  std::string json;  ///< a file, or "-"

  int64_t heads_kv() const { return kv_heads ? kv_heads : heads; }
};

verify::Case make_case(const BenchArguments& arguments, const std::string& family) {
  verify::Case c{.batch = arguments.batch,
                 .seqlen_q = arguments.seqlen,
                 .seqlen_k = arguments.seqlen,
                 .heads_q = arguments.heads,
                 .heads_kv = arguments.heads_kv(),
                 .head_dim = arguments.head_dim,
                 .head_dim_v = arguments.head_dim,
                 .dtype = verify::parse_dtype(arguments.dtype)};
  c.family = family;
  c.seed = arguments.seed;
  return c;
}

/// Median milliseconds of the rounds, after one that is not counted.
double median_ms(int rounds, const std::function<void()>& run) {
  using Clock = std::chrono::steady_clock;
  run();
  std::vector<double> times;
  for (int n = 0; n < rounds; ++n) {
    const auto start = Clock::now();
    run();
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  const std::size_t middle = times.size() / 2;
  return times.size() % 2 == 1 ? times[middle] : (times[middle - 1] + times[middle]) / 2;
}

struct Times {
  double forward_ms = 0;
  std::optional<double> backward_ms;
};

/// One mask's figures.
struct BenchRow {
  std::string family;
  MaskStatistics statistics;
  double plan_ms = 0;
  Times masked;
  std::optional<Times> dense;
};

/// Times one mask on tensors that all masks share.
class Bench {
 public:
  explicit Bench(const BenchArguments& arguments)
      : arguments_(arguments),
        problem_(make_case(arguments, "full")),
        outputs_(problem_.c),
        options_{.threads = arguments.threads, .backend = arguments.backend} {}

  /// Explains a call with a ready plan.
  Explanation explanation() const {
    const Plan plan(make_family("full", arguments_.seqlen));
    AttentionInputs planned = inputs();
    planned.plan = plan.view();
    return explain(verify::forward_args(planned, outputs_), options_);
  }

  BenchRow run(const std::string& family) const {
    const Mask mask = make_family(family, arguments_.seqlen, {}, arguments_.seed);
    BenchRow row{.family = family, .statistics = statistics(mask), .plan_ms = 0, .masked = {}, .dense = {}};
    row.plan_ms = median_ms(arguments_.rounds, [&] { const Plan timed(mask); });
    const Plan plan(mask);
    AttentionInputs masked = inputs();
    masked.mask = mask;
    masked.plan = plan.view();
    row.masked = time(masked);
    if (arguments_.dense) row.dense = time_dense(mask);
    return row;
  }

 private:
  AttentionInputs inputs() const { return {.q = problem_.q.view(), .k = problem_.k.view(), .v = problem_.v.view()}; }

  Times time_dense(const Mask& mask) const {
    const std::vector<uint8_t> visible = to_dense(mask);
    AttentionInputs dense = inputs();
    dense.dense_mask = TensorView::contiguous(visible.data(), DataType::kUInt8,
                                              {mask.batch(), mask.heads(), mask.seqlen_q(), mask.seqlen_k()});
    return time(dense);
  }

  Times time(const AttentionInputs& inputs) const {
    const ForwardArgs to_time = verify::forward_args(inputs, outputs_);
    std::vector<std::byte> workspace(forward_workspace(to_time, options_));
    Times times{.forward_ms = median_ms(arguments_.rounds, [&] { forward(to_time, workspace, options_); }),
                .backward_ms = {}};
    if (arguments_.no_backward) return times;
    const BackwardArgs back = verify::backward_args(inputs, problem_, outputs_);
    workspace.resize(backward_workspace(back, options_));
    times.backward_ms = median_ms(arguments_.rounds, [&] { backward(back, workspace, options_); });
    return times;
  }

  const BenchArguments& arguments_;
  const verify::Problem problem_;
  const verify::Outputs outputs_;
  const Options options_;
};

/// TFLOP/s of both directions if `share` of the score matrix counts.
struct Rates {
  double forward = 0;
  std::optional<double> backward;
};

Rates rates(const BenchArguments& a, const Times& times, double share) {
  const AttentionFlops flops = attention_flops(a.batch, a.heads, a.seqlen, a.seqlen, a.head_dim, a.head_dim, share);
  const auto tflops = [](double count, double ms) { return ms > 0 ? count / ms * 1e-9 : 0; };
  Rates result{.forward = tflops(flops.forward, times.forward_ms), .backward = {}};
  if (times.backward_ms) result.backward = tflops(flops.backward, *times.backward_ms);
  return result;
}

// --- Text -----------------------------------------------------------------------------------------

std::string cell(const std::optional<double>& value) {
  return value ? fmt::format("{:>9.4g}", *value) : fmt::format("{:>9}", "-");
}

void print_header(const BenchArguments& a, const Explanation& explanation) {
  fmt::print("backend {} ({}); batch {}, seqlen {}, heads {}/{}, head dim {}, {}; medians of {} rounds\n",
             explanation.backend, explanation.configuration, a.batch, a.seqlen, a.heads, a.heads_kv(), a.head_dim,
             a.dtype, a.rounds);
  fmt::print(
      "TFLOP/s: 'tiles' counts the live share of 128 x 128 tiles, as the FlashMask paper does, 'seen' the visible "
      "elements\n\n");
  constexpr auto kColumns = "{:<22}{:>9}{:>9}{:>9} |{:>9}{:>9}{:>9} |{:>9}{:>9}{:>9}", kDenseColumns = " |{:>9}{:>9}";
  fmt::print(kColumns, "", "visible", "live", "plan", "forward", "tiles", "seen", "backward", "tiles", "seen");
  fmt::print("{}\n", a.dense ? fmt::format(kDenseColumns, "dense", "dense") : "");
  fmt::print(kColumns, "mask", "%", "%", "ms", "ms", "TFLOP/s", "TFLOP/s", "ms", "TFLOP/s", "TFLOP/s");
  fmt::print("{}\n", a.dense ? fmt::format(kDenseColumns, "fwd ms", "bwd ms") : "");
}

void print_row(const BenchArguments& a, const BenchRow& row) {
  const Rates tiles = rates(a, row.masked, row.statistics.live_share()),
              seen = rates(a, row.masked, row.statistics.visible_share());
  fmt::print("{:<22}{:>9.2f}{:>9.2f}{}", row.family, 100 * row.statistics.visible_share(),
             100 * row.statistics.live_share(), cell(row.plan_ms));
  fmt::print(" |{}{}{}", cell(row.masked.forward_ms), cell(tiles.forward), cell(seen.forward));
  fmt::print(" |{}{}{}", cell(row.masked.backward_ms), cell(tiles.backward), cell(seen.backward));
  if (row.dense) fmt::print(" |{}{}", cell(row.dense->forward_ms), cell(row.dense->backward_ms));
  fmt::print("\n");
  std::fflush(stdout);
}

// --- JSON -----------------------------------------------------------------------------------------

Json optional_json(const std::optional<double>& value) { return value ? Json(*value) : Json(nullptr); }

Json row_json(const BenchArguments& a, const BenchRow& row) {
  const Rates tiles = rates(a, row.masked, row.statistics.live_share()),
              seen = rates(a, row.masked, row.statistics.visible_share());
  Json json{{"mask", row.family},
            {"visible_share", row.statistics.visible_share()},
            {"live_share", row.statistics.live_share()},
            {"plan_ms", row.plan_ms},
            {"forward_ms", row.masked.forward_ms},
            {"backward_ms", optional_json(row.masked.backward_ms)},
            {"forward_tflops", tiles.forward},
            {"backward_tflops", optional_json(tiles.backward)},
            {"forward_tflops_visible", seen.forward},
            {"backward_tflops_visible", optional_json(seen.backward)}};
  if (row.dense) {
    json["dense_forward_ms"] = row.dense->forward_ms;
    json["dense_backward_ms"] = optional_json(row.dense->backward_ms);
  }
  return json;
}

Json to_json(const BenchArguments& a, const Explanation& explanation, const std::vector<BenchRow>& rows) {
  Json cases = Json::array();
  for (const BenchRow& row : rows) cases.push_back(row_json(a, row));
  return {
      {"version", fmt::format("{}.{}.{}", FLASHMASK_VERSION_MAJOR, FLASHMASK_VERSION_MINOR, FLASHMASK_VERSION_PATCH)},
      {"backend", explanation.backend},
      {"configuration", explanation.configuration},
      {"batch", a.batch},
      {"seqlen", a.seqlen},
      {"heads", a.heads},
      {"heads_kv", a.heads_kv()},
      {"head_dim", a.head_dim},
      {"dtype", a.dtype},
      {"rounds", a.rounds},
      {"seed", a.seed},
      {"cases", std::move(cases)}};
}

void run_bench(const BenchArguments& arguments) {
  const std::vector<std::string> families = family_list(arguments.families);
  const bool to_stdout = arguments.json == "-";
  if (!arguments.json.empty() && !to_stdout) io::check_writable(arguments.json);
  const Bench bench(arguments);
  const Explanation explanation = bench.explanation();
  if (explanation.backend.empty()) throw Error(ErrorCode::kUnsupported, to_string(explanation));
  if (!to_stdout) print_header(arguments, explanation);
  std::vector<BenchRow> rows;
  {
    Progress progress("bench", static_cast<int64_t>(families.size()));
    for (const std::string& family : families) {
      rows.push_back(bench.run(family));
      progress.clear();
      if (!to_stdout) print_row(arguments, rows.back());
      progress.advance();
    }
  }
  if (arguments.json.empty()) return;
  const Json json = to_json(arguments, explanation, rows);
  if (to_stdout) {
    print_json(json);
  } else {
    io::write_file_atomically(arguments.json, json_text(json));
  }
}

constexpr const char* kDescription =
    "Time masked attention, one mask family after the other, on random tensors.\n"
    "\n"
    "  flashmask bench --seqlen 8192 --heads 8 --head-dim 128 --dtype bfloat16\n"
    "  flashmask bench --families causal_document,prefix_tree --dense --json bench.json";

}  // namespace

void add_bench_command(CLI::App& app, const Global&) {
  const auto arguments = std::make_shared<BenchArguments>();
  const CLI::Validator length = between(1, kMaxSeqlen), count = between(1, 1 << 20);
  CLI::App* command = app.add_subcommand("bench", kDescription);
  command->add_option("--backend", arguments->backend, "The backend to time, as listed by 'flashmask info', or 'auto'")
      ->capture_default_str();
  command
      ->add_option("--families", arguments->families,
                   "Mask families, separated by commas; 'paper' for the twelve of the FlashMask paper, or 'all'")
      ->capture_default_str();
  command->add_option("--seqlen", arguments->seqlen, "Rows and keys")->check(length)->capture_default_str();
  command->add_option("--batch", arguments->batch, "Batch entries")->check(count)->capture_default_str();
  command->add_option("--heads", arguments->heads, "Query heads")->check(count)->capture_default_str();
  command->add_option("--kv-heads", arguments->kv_heads, "Key and value heads, a divisor of --heads (default: as many)")
      ->check(count);
  command->add_option("--head-dim", arguments->head_dim, "Head dim of q, k and v")
      ->check(between(1, 256))
      ->capture_default_str();
  command->add_option("--dtype", arguments->dtype, "float32, bfloat16 or float16")->capture_default_str();
  command->add_option("--threads", arguments->threads, "CPU threads, 0 for the default")
      ->check(between(0, 4096))
      ->capture_default_str();
  command->add_option("--rounds", arguments->rounds, "Runs of which the median is taken, after one that does not count")
      ->check(between(1, 10'000))
      ->capture_default_str();
  command->add_option("--seed", arguments->seed, "Of the tensors and the masks")
      ->check(any_seed())
      ->capture_default_str();
  command->add_flag("--no-backward", arguments->no_backward, "Time the forward only");
  command->add_flag("--dense", arguments->dense,
                    "Also time the same run with the mask given as a dense matrix, with nothing skipped");
  command
      ->add_option("--json", arguments->json,
                   "Write the figures as JSON to this file; '-' is stdout, and nothing else goes there")
      ->type_name("FILE");
  command->callback([arguments] { run_bench(*arguments); });
}

}  // namespace flashmask::cli
