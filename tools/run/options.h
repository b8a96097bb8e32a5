// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "flashmask/tensor.h"
#include "run/projections.h"
#include "run/records.h"

namespace flashmask::run {

/// Options of the command line; see add_options in options.cpp for the meaning.
struct RunOptions {
  std::string input;
  Task task{};
  int64_t seqlen = 4096;
  AttentionShape shape{};
  DataType dtype = DataType::kFloat32;
  std::string backend = "auto";
  int threads = 0;
  uint64_t seed = 0;
  int64_t limit_sequences = 0;
  int64_t batch_size = 0;
  double dense_seconds = 5;
  bool skip_bad = false;
  std::string out;
  std::string report;
};

/// Finds errors that the parser cannot: files that cannot be read or written or that coincide, heads that do
/// not divide. Throws naming the option.
void check_options(const RunOptions& options);

/// Throws if packing `tokens` tokens and one call with the options' batch size need more memory than there is.
void check_memory(const RunOptions& options, int64_t tokens);

/// Sequences that one attention call takes: as asked for, or at most 8 and about 1 GiB of tensors.
int64_t batch_size_of(const RunOptions& options, int64_t sequences);

}  // namespace flashmask::run
