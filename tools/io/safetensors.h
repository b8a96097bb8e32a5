// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <ostream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace flashmask::io {

/// A tensor to be written: `dtype` is the format's name ("I64", "I32", "U8", "BOOL", "F32", ...), `data` its
/// elements in row-major order.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::span<const std::byte> data;
};

using SafetensorsMetadata = std::map<std::string, std::string>;

/// Bytes per element of one of the format's dtypes; throws naming an unknown one.
std::size_t safetensors_element_size(std::string_view dtype);

/// Writes a file in the safetensors format: the length of the header in 8 bytes, little-endian; the header, a
/// JSON object of dtype, shape and data_offsets by name, padded with spaces so that the data begins at a
/// multiple of 8; the tensors one after the other in the order given. Entries should come with the widest
/// elements first, which keeps every tensor aligned. All or nothing, see write_file_atomically.
void write_safetensors(const std::string& path, std::span<const SafetensorsEntry> entries,
                       const SafetensorsMetadata& metadata);
void write_safetensors(std::ostream& out, std::span<const SafetensorsEntry> entries,
                       const SafetensorsMetadata& metadata);

/// A safetensors file in memory.
class SafetensorsFile {
 public:
  /// Throws unless the file obeys the format: no key twice, offsets in range, without holes or overlaps, sizes as the
  /// shapes say.
  explicit SafetensorsFile(const std::string& path);
  SafetensorsFile(SafetensorsFile&&) = default;
  SafetensorsFile& operator=(SafetensorsFile&&) = default;
  SafetensorsFile(const SafetensorsFile&) = delete;  // the entries point into the contents
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const SafetensorsMetadata& metadata() const { return metadata_; }
  /// In the order of their data.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  bool contains(std::string_view name) const;
  /// Throws if there is no tensor of this name.
  const SafetensorsEntry& at(std::string_view name) const;

 private:
  std::string contents_;
  SafetensorsMetadata metadata_;
  std::vector<SafetensorsEntry> entries_;
};

}  // namespace flashmask::io
