// SPDX-License-Identifier: Apache-2.0

// In place of libFuzzer where it is not built in: gives a target every file of the folders that are named.

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "fuzz/check.h"

namespace {

std::vector<std::filesystem::path> files_of(int count, char** folders) {
  std::vector<std::filesystem::path> files;
  for (int n = 0; n < count; ++n) {
    for (const auto& entry : std::filesystem::directory_iterator(folders[n])) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

/// The file's bytes in memory of exactly their size, so that a sanitizer sees reading past the end.
std::vector<char> contents_of(const std::filesystem::path& path) {
  std::ifstream stream(path, std::ios::binary);
  std::vector<char> bytes{std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
  bytes.shrink_to_fit();
  return bytes;
}

}  // namespace

int main(int count, char** arguments) {
  const auto files = files_of(count - 1, arguments + 1);
  for (const std::filesystem::path& file : files) {
    std::printf("%s\n", file.c_str());
    std::fflush(stdout);  // the last name is the one that ended the program
    const std::vector<char> bytes = contents_of(file);
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  }
  std::printf("%zu inputs\n", files.size());
  return files.empty() ? 1 : 0;
}
