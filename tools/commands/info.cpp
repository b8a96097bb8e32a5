// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <string>
#include <thread>

#include "cli/commands.h"
#include "cli/json_output.h"
#include "flashmask/attention.h"
#include "flashmask/version.h"

namespace flashmask::cli {
namespace {

constexpr const char* kNoGpu = "none: no GPU backend is compiled in";

struct Info {
  std::string version = fmt::format("{}.{}.{}", FLASHMASK_VERSION_MAJOR, FLASHMASK_VERSION_MINOR, FLASHMASK_VERSION_PATCH);
  std::vector<BackendInfo> backends = flashmask::backends();
  unsigned hardware_threads = std::thread::hardware_concurrency();
};

void print_text(const Info& info) {
  fmt::print("flashmask {}\n\nbackends, the preferred first:\n", info.version);
  for (const BackendInfo& backend : info.backends) {
    fmt::print("  {:<10} {:<11} {}\n", backend.name, backend.usable ? "usable" : "not usable", backend.detail);
  }
  fmt::print("\nhardware threads: {}\nGPUs: {}\n", info.hardware_threads, kNoGpu);
}

Json to_json(const Info& info) {
  Json backends = Json::array();
  for (const BackendInfo& backend : info.backends) {
    backends.push_back({{"name", backend.name}, {"usable", backend.usable}, {"detail", backend.detail}});
  }
  return {{"version", info.version},
          {"backends", std::move(backends)},
          {"hardware_threads", info.hardware_threads},
          {"gpus", Json::array()},
          {"gpus_detail", kNoGpu}};
}

}  // namespace

void add_info_command(CLI::App& app, const Global& global) {
  CLI::App* command = app.add_subcommand("info", "Version, backends (with SIMD target and threads) and GPUs of this build and machine");
  command->callback([&global] {
    const Info info;
    if (global.json) {
      print_json(to_json(info));
    } else {
      print_text(info);
    }
  });
}

}  // namespace flashmask::cli
