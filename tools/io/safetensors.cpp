// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "io/fail.h"
#include "io/file.h"
#include "io/json_text.h"

namespace flashmask::io {
namespace {

using nlohmann::json;

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
      fail("tensor '{}' has {} bytes, which is not what {} and its shape need", entry.name, entry.data.size(),
           entry.dtype);
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

json parse_header(const std::string& path, std::string_view text) {
  json header;
  try {
    header = parse_json(text);
  } catch (const JsonError& error) {
    if (error.byte == 0) fail("the safetensors header of '{}': {}", path, error.what());
    fail("the safetensors header of '{}' is not JSON: byte {}: {}", path, error.byte, error.what());
  }
  if (!header.is_object()) fail("the safetensors header of '{}' is not a JSON object", path);
  return header;
}

const json& required(const json& entry, const char* key) {
  const auto found = entry.is_object() ? entry.find(key) : entry.end();
  if (found == entry.end()) fail("it must be a JSON object with the key '{}'", key);
  return *found;
}

const std::string& string_of(const json& value, std::string_view key) {
  if (!value.is_string()) fail("'{}' must be a string, not {}", key, value.type_name());
  return value.get_ref<const std::string&>();
}

SafetensorsMetadata metadata_of(const json& value) {
  if (!value.is_object()) fail("it must be a JSON object of strings, not {}", value.type_name());
  SafetensorsMetadata metadata;
  for (const auto& [key, text] : value.items()) metadata[key] = string_of(text, key);
  return metadata;
}

/// An array of sizes; the parser would take fractions, booleans and negative numbers for integers too.
std::vector<int64_t> sizes_of(const json& entry, const char* key) {
  const json& values = required(entry, key);
  if (!values.is_array()) fail("'{}' must be an array of integers, not {}", key, values.type_name());
  std::vector<int64_t> sizes;
  for (const json& value : values) {
    if (!value.is_number_unsigned() ||
        value.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      fail("'{}' holds {}; it must hold integers from 0 to 2^63 - 1", key,
           value.is_number() ? value.dump() : value.type_name());
    sizes.push_back(value.get<int64_t>());
  }
  return sizes;
}

/// One tensor of a header; its data lies in `tensors`. Its messages do not name the tensor.
SafetensorsEntry entry_of(const std::string& name, const json& value, std::span<const std::byte> tensors) {
  SafetensorsEntry entry{name, string_of(required(value, "dtype"), "dtype"), sizes_of(value, "shape"), {}};
  const std::vector<int64_t> range = sizes_of(value, "data_offsets");
  if (range.size() != 2)
    fail("'data_offsets' has {} elements; it must have two, the first byte and the end", range.size());
  const auto begin = static_cast<std::size_t>(range[0]), end = static_cast<std::size_t>(range[1]);
  if (begin > end || end > tensors.size()) fail("it lies outside of the file");
  entry.data = tensors.subspan(begin, end - begin);
  if (byte_size(entry) != entry.data.size()) fail("it does not have the size of its shape");
  return entry;
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

void write_safetensors(std::ostream& out, std::span<const SafetensorsEntry> entries,
                       const SafetensorsMetadata& metadata) {
  const std::string header = header_of(entries, metadata);
  const uint64_t length = header.size();
  out.write(reinterpret_cast<const char*>(&length), sizeof length);
  out.write(header.data(), static_cast<std::streamsize>(header.size()));
  for (const SafetensorsEntry& entry : entries) {
    out.write(reinterpret_cast<const char*>(entry.data.data()), static_cast<std::streamsize>(entry.data.size()));
  }
}

void write_safetensors(const std::string& path, std::span<const SafetensorsEntry> entries,
                       const SafetensorsMetadata& metadata) {
  write_file_atomically(path, [&](std::ostream& out) { write_safetensors(out, entries, metadata); });
}

SafetensorsFile::SafetensorsFile(const std::string& path) : contents_(read_file(path)) {
  uint64_t length = 0;
  if (contents_.size() < sizeof length) fail("'{}' is shorter than the length of a safetensors header", path);
  std::memcpy(&length, contents_.data(), sizeof length);
  if (length > contents_.size() - sizeof length) fail("'{}' is shorter than its safetensors header", path);
  const auto* data = reinterpret_cast<const std::byte*>(contents_.data()) + sizeof length + length;
  const std::span<const std::byte> tensors(data, contents_.size() - sizeof length - length);
  const json header = parse_header(path, std::string_view(contents_).substr(sizeof length, length));
  for (const auto& [name, value] : header.items()) {
    try {
      if (name == "__metadata__") {
        metadata_ = metadata_of(value);
      } else {
        entries_.push_back(entry_of(name, value, tensors));
      }
    } catch (const Error& error) {
      fail("{}'{}' of '{}': {}", name == "__metadata__" ? "" : "tensor ", name, path, error.what());
    }
  }
  std::stable_sort(entries_.begin(), entries_.end(), [](const auto& a, const auto& b) {
    return std::pair(a.data.data(), a.data.size()) < std::pair(b.data.data(), b.data.size());
  });
  std::size_t end = 0;
  for (const SafetensorsEntry& entry : entries_) {
    if (entry.data.data() != data + end) fail("the tensors of '{}' overlap or leave a hole at byte {}", path, end);
    end += entry.data.size();
  }
  if (end != tensors.size()) fail("'{}' has {} bytes that belong to no tensor", path, tensors.size() - end);
}

bool SafetensorsFile::contains(std::string_view name) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const SafetensorsEntry& entry) { return entry.name == name; });
}

const SafetensorsEntry& SafetensorsFile::at(std::string_view name) const {
  for (const SafetensorsEntry& entry : entries_) {
    if (entry.name == name) return entry;
  }
  fail("there is no tensor named '{}'", name);
}

}  // namespace flashmask::io
