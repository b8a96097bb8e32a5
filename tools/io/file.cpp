// SPDX-License-Identifier: Apache-2.0
#include "io/file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <utility>

#include "io/fail.h"

namespace flashmask::io {
namespace {

namespace fs = std::filesystem;

/// Follows a link, so that its target is replaced and not the link.
fs::path target_of(const std::string& path) {
  std::error_code error;
  if (!fs::is_symlink(path, error)) return path;
  const fs::path target = fs::weakly_canonical(path, error);
  return error ? fs::path(path) : target;
}

/// A file that is removed again unless it is renamed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path) : named_(path), target_(target_of(path)) {
    if (target_.filename().empty()) fail("cannot write '{}': it does not name a file", named_);
    std::error_code error;
    const fs::file_status status = fs::status(target_, error);
    if (fs::is_directory(status)) fail("cannot write '{}': it is a directory", named_);
    if (fs::exists(status) && !fs::is_regular_file(status)) fail("cannot write '{}': it is not a regular file", named_);
    if (fs::exists(status) && ::access(target_.c_str(), W_OK) != 0)
      fail("cannot write '{}': {}", named_, std::strerror(errno));
    temporary_ = target_.parent_path() /
                 fmt::format(".{}.{}-{:08x}", target_.filename().string(), ::getpid(), std::random_device{}());
    const int file = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file < 0) fail("cannot write '{}': {}", named_, std::strerror(errno));
    ::close(file);
  }
  ~TemporaryFile() {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void fill(const std::function<void(std::ostream&)>& write) {
    std::ofstream stream(temporary_, std::ios::binary | std::ios::trunc);
    errno = 0;
    if (stream) write(stream);
    stream.close();
    if (!stream) fail("cannot write '{}': {}", named_, errno ? std::strerror(errno) : "writing failed");
    // On the disk before it takes the name, so that a crash leaves the old file or the new one.
    const int file = ::open(temporary_.c_str(), O_RDONLY | O_CLOEXEC);
    const bool stored = file >= 0 && ::fsync(file) == 0;
    const int error = errno;
    if (file >= 0) ::close(file);
    if (!stored) fail("cannot write '{}': {}", named_, std::strerror(error));
  }

  void rename_to_target() {
    if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot write '{}': {}", named_, std::strerror(errno));
    temporary_.clear();
  }

 private:
  std::string named_;
  fs::path target_, temporary_;
};

}  // namespace

void check_writable(const std::string& path) { TemporaryFile{path}; }

void write_file_atomically(const std::string& path, const std::function<void(std::ostream&)>& write) {
  TemporaryFile file(path);
  file.fill(write);
  file.rename_to_target();
}

void write_file_atomically(const std::string& path, std::string_view contents) {
  write_file_atomically(
      path, [&](std::ostream& out) { out.write(contents.data(), static_cast<std::streamsize>(contents.size())); });
}

void check_readable(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) fail("cannot read '{}': {}", path, error ? error.message() : "no such file");
  if (fs::is_directory(status)) fail("cannot read '{}': it is a directory", path);
  if (::access(path.c_str(), R_OK) != 0) fail("cannot read '{}': {}", path, std::strerror(errno));
}

std::string read_file(const std::string& path) {
  check_readable(path);
  std::ifstream stream(path, std::ios::binary);
  std::string contents{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  if (!stream) fail("cannot read '{}': reading failed", path);
  return contents;
}

}  // namespace flashmask::io
