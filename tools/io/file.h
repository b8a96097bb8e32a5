// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <ostream>
#include <string>
#include <string_view>

namespace flashmask::io {

/// Throws unless `path` can be written: its folder must exist and take new files, and what is there already
/// must be a regular file that may be written. For finding out before long work starts.
void check_writable(const std::string& path);

/// Creates or replaces `path` in one piece: `write` fills a temporary file in the same folder, which then
/// takes the name. If anything fails, `path` is as it was, no temporary file is left, and an Error says why.
void write_file_atomically(const std::string& path, const std::function<void(std::ostream&)>& write);
void write_file_atomically(const std::string& path, std::string_view contents);

/// The whole file; throws if it cannot be read.
std::string read_file(const std::string& path);

/// Throws an Error that names what is wrong if `path` is not a file that can be read.
void check_readable(const std::string& path);

}  // namespace flashmask::io
