// SPDX-License-Identifier: Apache-2.0

// A mask file: any bytes give a mask or an Error; a mask that is written out and read again is the same.

#include "io/mask_json.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "fuzz/check.h"
#include "fuzz/memory_file.h"

namespace flashmask::fuzz {
namespace {

void check_written_again(const Mask& mask) {
  const MemoryFile file(io::to_json(mask).dump());
  std::optional<Mask> again;
  require(succeeds([&] { again = io::read_mask(file.path()); }), "what was written can be read");
  require(again->view().content_hash == mask.view().content_hash, "the mask that was written comes back");
  require(again->band() == mask.band() && again->q_offset() == mask.q_offset(), "its band and q_offset come back");
  require(again->batch() == mask.batch() && again->heads() == mask.heads(), "its batch and heads come back");
}

void check(std::string_view contents) {
  const MemoryFile file(contents);
  std::optional<Mask> mask;
  if (succeeds([&] { mask = io::read_mask(file.path()); })) check_written_again(*mask);
}

}  // namespace
}  // namespace flashmask::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  flashmask::fuzz::check(flashmask::fuzz::as_text(data, size));
  return 0;
}
