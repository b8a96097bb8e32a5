// SPDX-License-Identifier: Apache-2.0

// A safetensors file: any bytes give tensors that cover the data exactly, or an Error; written out and read again they
// are the same.

#include "io/safetensors.h"

#include <cstring>
#include <optional>
#include <sstream>

#include "fuzz/check.h"
#include "fuzz/memory_file.h"

namespace flashmask::fuzz {
namespace {

/// An input that begins with a brace is a header up to its last brace, and data: the length in front is put there, as a
/// fuzzer that changes the header does not hit it. Everything else is a file as it is.
std::string file_of(std::string_view input) {
  if (!input.starts_with('{')) return std::string(input);
  const std::size_t last = input.rfind('}');
  const uint64_t length = last == std::string_view::npos ? input.size() : last + 1;
  return std::string(reinterpret_cast<const char*>(&length), sizeof length).append(input);
}

std::optional<io::SafetensorsFile> read(const std::string& contents) {
  const MemoryFile file(contents);
  std::optional<io::SafetensorsFile> tensors;
  if (!succeeds([&] { tensors.emplace(file.path()); })) return std::nullopt;
  return tensors;
}

bool same(const io::SafetensorsEntry& a, const io::SafetensorsEntry& b) {
  return a.name == b.name && a.dtype == b.dtype && a.shape == b.shape && a.data.size() == b.data.size() &&
         (a.data.empty() || std::memcmp(a.data.data(), b.data.data(), a.data.size()) == 0);
}

void check_entries(const io::SafetensorsFile& file, std::size_t bytes) {
  for (const io::SafetensorsEntry& entry : file.entries()) {
    std::size_t size = io::safetensors_element_size(entry.dtype);
    for (const int64_t n : entry.shape) size *= static_cast<std::size_t>(n);
    require(size == entry.data.size() && size <= bytes, "a tensor has the size of its shape");
    require(file.contains(entry.name) && &file.at(entry.name) == &entry, "a tensor is found by its name");
  }
}

void check_written_again(const io::SafetensorsFile& file) {
  std::ostringstream text;
  require(succeeds([&] { io::write_safetensors(text, file.entries(), file.metadata()); }),
          "what was read can be written");
  const std::optional<io::SafetensorsFile> again = read(text.str());
  require(again && again->metadata() == file.metadata() && again->entries().size() == file.entries().size(),
          "it can be read again");
  for (const io::SafetensorsEntry& entry : file.entries())
    require(same(entry, again->at(entry.name)), "the tensors come back");
}

void check(std::string_view input) {
  const std::string contents = file_of(input);
  const std::optional<io::SafetensorsFile> file = read(contents);
  if (!file) return;
  check_entries(*file, contents.size());
  check_written_again(*file);
}

}  // namespace
}  // namespace flashmask::fuzz

int LLVMFuzzerTestOneInput(const uint8_t* data, std::size_t size) {
  flashmask::fuzz::check(flashmask::fuzz::as_text(data, size));
  return 0;
}
