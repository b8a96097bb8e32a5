// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <string>
#include <string_view>

#include "fuzz/check.h"

namespace flashmask::fuzz {

/// A file that a reader can open by its path and that is on no disk.
class MemoryFile {
 public:
  explicit MemoryFile(std::string_view contents) : file_(::memfd_create("fuzz", MFD_CLOEXEC)) {
    require(file_ >= 0, "a file in memory can be made");
    while (!contents.empty()) {
      const ssize_t written = ::write(file_, contents.data(), contents.size());
      require(written > 0, "a file in memory can be written");
      contents.remove_prefix(static_cast<std::size_t>(written));
    }
  }
  ~MemoryFile() { ::close(file_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

inline std::string_view as_text(const uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

}  // namespace flashmask::fuzz
