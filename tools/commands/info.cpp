// SPDX-License-Identifier: Apache-2.0
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <string>
#include <thread>

#include "cli/commands.h"
#include "cli/json_output.h"
#include "flashmask/attention.h"
#include "flashmask/version.h"

namespace flashmask::cli {
namespace {

struct Info {
  std::string version =
      fmt::format("{}.{}.{}", FLASHMASK_VERSION_MAJOR, FLASHMASK_VERSION_MINOR, FLASHMASK_VERSION_PATCH);
  std::vector<BackendInfo> backends = flashmask::backends();
  unsigned hardware_threads = std::thread::hardware_concurrency();

  /// The cuda backend's report on the devices.
  const BackendInfo& cuda() const {
    return *std::find_if(backends.begin(), backends.end(), [](const BackendInfo& b) { return b.name == "cuda"; });
  }
  std::string gpus() const { return cuda().usable ? cuda().detail : "none: " + cuda().detail; }
};

void print_text(const Info& info) {
  fmt::print("flashmask {}\n\nbackends, the preferred first:\n", info.version);
  for (const BackendInfo& backend : info.backends) {
    fmt::print("  {:<10} {:<11} {}\n", backend.name, backend.usable ? "usable" : "not usable", backend.detail);
  }
  fmt::print("\nhardware threads: {}\nGPUs: {}\n", info.hardware_threads, info.gpus());
}

Json to_json(const Info& info) {
  Json backends = Json::array();
  for (const BackendInfo& backend : info.backends) {
    backends.push_back({{"name", backend.name}, {"usable", backend.usable}, {"detail", backend.detail}});
  }
  Json gpus = Json::array();
  if (info.cuda().usable) gpus.push_back(info.cuda().detail);
  return {{"version", info.version},
          {"backends", std::move(backends)},
          {"hardware_threads", info.hardware_threads},
          {"gpus", std::move(gpus)},
          {"gpus_detail", info.gpus()}};
}

}  // namespace

void add_info_command(CLI::App& app, const Global& global) {
  CLI::App* command =
      app.add_subcommand("info", "Version, backends (with SIMD target and threads) and GPUs of this build and machine");
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
