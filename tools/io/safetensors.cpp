// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "io/fail.h"
#include "io/file.h"

namespace flashmask::io {
namespace {

// Elements are written as they lie in memory, and the format is little-endian.
static_assert(std::endian::native == std::endian::little);

constexpr std::size_t kAlignment = 8;

/// Elements times their size, or nothing if that overflows or a dimension is negative.
std::optional<std::size_t> byte_size(const SafetensorsEntry& entry) {
  std::size_t bytes = safetensors_element_size(entry.dtype);
  for (const int64_t n : entry.shape) {
    if (n < 0 || __builtin_mul_overflow(bytes, static_cast<std::size_t>(n), &bytes)) return std::nullopt;
  }
  return bytes;
}

std::string header_of(std::span<const SafetensorsEntry> entries, const SafetensorsMetadata& metadata) {
  nlohmann::ordered_json header;
  header["__metadata__"] = metadata;
  std::size_t begin = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (byte_size(entry) != entry.data.size()) {
      fail("tensor '{}' has {} bytes, which is not what {} and its shape need", entry.name, entry.data.size(), entry.dtype);
    }
    if (header.contains(entry.name)) fail("two tensors are named '{}'", entry.name);
    const std::size_t end = begin + entry.data.size();
    header[entry.name] = {{"dtype", entry.dtype}, {"shape", entry.shape}, {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string text = header.dump();
  text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
  return text;
}

}  // namespace

std::size_t safetensors_element_size(std::string_view dtype) {
  constexpr std::array<std::pair<std::string_view, std::size_t>, 12> kSizes{{{"F64", 8},
                                                                             {"I64", 8},
                                                                             {"U64", 8},
                                                                             {"F32", 4},
                                                                             {"I32", 4},
                                                                             {"U32", 4},
                                                                             {"F16", 2},
                                                                             {"BF16", 2},
                                                                             {"I16", 2},
                                                                             {"I8", 1},
                                                                             {"U8", 1},
                                                                             {"BOOL", 1}}};
  for (const auto& [name, size] : kSizes) {
    if (name == dtype) return size;
  }
  fail("'{}' is not a dtype of safetensors that is known here", dtype);
}

void write_safetensors(const std::string& path, std::span<const SafetensorsEntry> entries, const SafetensorsMetadata& metadata) {
  const std::string header = header_of(entries, metadata);
  write_file_atomically(path, [&](std::ostream& out) {
    const uint64_t length = header.size();
    out.write(reinterpret_cast<const char*>(&length), sizeof length);
    out.write(header.data(), static_cast<std::streamsize>(header.size()));
    for (const SafetensorsEntry& entry : entries) {
      out.write(reinterpret_cast<const char*>(entry.data.data()), static_cast<std::streamsize>(entry.data.size()));
    }
  });
}

SafetensorsFile::SafetensorsFile(const std::string& path) : contents_(read_file(path)) {
  uint64_t length = 0;
  if (contents_.size() < sizeof length) fail("'{}' is shorter than the length of a safetensors header", path);
  std::memcpy(&length, contents_.data(), sizeof length);
  if (length > contents_.size() - sizeof length) fail("'{}' is shorter than its safetensors header", path);
  const auto header =
      nlohmann::ordered_json::parse(contents_.data() + sizeof length, contents_.data() + sizeof length + length, nullptr, false);
  if (!header.is_object()) fail("the safetensors header of '{}' is not a JSON object", path);
  const std::size_t data_size = contents_.size() - sizeof length - length;
  const auto* data = reinterpret_cast<const std::byte*>(contents_.data()) + sizeof length + length;

  std::vector<std::array<std::size_t, 2>> ranges;
  for (const auto& [name, value] : header.items()) {
    try {
      if (name == "__metadata__") {
        metadata_ = value.get<SafetensorsMetadata>();
        continue;
      }
      SafetensorsEntry entry{name, value.at("dtype").get<std::string>(), value.at("shape").get<std::vector<int64_t>>(), {}};
      const auto range = value.at("data_offsets").get<std::array<std::size_t, 2>>();
      if (range[0] > range[1] || range[1] > data_size) fail("tensor '{}' of '{}' lies outside of the file", name, path);
      entry.data = {data + range[0], range[1] - range[0]};
      if (byte_size(entry) != entry.data.size()) fail("tensor '{}' of '{}' does not have the size of its shape", name, path);
      ranges.push_back(range);
      entries_.push_back(std::move(entry));
    } catch (const nlohmann::json::exception& error) {
      fail("the safetensors header of '{}' is wrong at '{}': {}", path, name, error.what());
    }
  }
  std::sort(ranges.begin(), ranges.end());
  std::size_t end = 0;
  for (const auto& range : ranges) {
    if (range[0] != end) fail("the tensors of '{}' overlap or leave a hole at byte {}", path, end);
    end = range[1];
  }
  if (end != data_size) fail("'{}' has {} bytes that belong to no tensor", path, data_size - end);
}

bool SafetensorsFile::contains(std::string_view name) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const SafetensorsEntry& entry) { return entry.name == name; });
}

const SafetensorsEntry& SafetensorsFile::at(std::string_view name) const {
  for (const SafetensorsEntry& entry : entries_) {
    if (entry.name == name) return entry;
  }
  fail("there is no tensor named '{}'", name);
}

}  // namespace flashmask::io
