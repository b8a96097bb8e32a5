// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "flashmask/inspect.h"
#include "run/attention_run.h"
#include "run/dense_comparison.h"
#include "run/options.h"
#include "run/packing.h"
#include "run/records.h"

namespace flashmask::run {

/// Everything that `flashmask run` found out, for the terminal, for JSON and for the report.
struct RunFigures {
  const RunOptions& options;
  const Records& records;
  const Packed& packed;
  MaskedFigures masked{};
  DenseFigures dense{};

  bool passed() const { return masked.check.passed() && dense.equal(); }
  /// FLOPs of the attended sequences by the paper's convention over this share of the scores.
  AttentionFlops flops(double share) const;
  /// 10^12 per second on the visible elements, and on everything in the tiles that were executed.
  struct Rate {
    double visible = 0, executed = 0;
  };
  Rate forward_rate() const;
  Rate backward_rate() const;
  /// Time of the dense run over that of the masked run; 0 if there was none.
  double forward_speedup() const;
  double backward_speedup() const;
  double speedup() const;
};

nlohmann::ordered_json to_json(const RunFigures& figures);
/// Several lines, as the command prints them.
std::string to_text(const RunFigures& figures);

// Words for figures, for text and report alike.

/// "each of 124 answers with its question": the parts that would be written separately if nothing were shared.
std::string separate_text(const Packed& packed);
/// "0.9 MiB".
std::string bytes_text(double bytes);
/// "1.32 s", "12.1 ms", "35 us".
std::string seconds_text(double seconds);
/// "93.1 GFLOP/s", of a rate in 10^12 per second.
std::string rate_text(double tera);
/// "5.9 %".
std::string percent_text(double share);

}  // namespace flashmask::run
