// SPDX-License-Identifier: Apache-2.0
#include "io/file.h"

#include <sys/stat.h>
#include <unistd.h>

#include "support/expect_error.h"
#include "support/temporary_folder.h"

namespace flashmask::io {
namespace {

using test::contents_of;
using test::expect_invalid;
using test::TemporaryFolder;

using Names = std::vector<std::string>;

TEST(WriteFile, CreatesAndReplaces) {
  TemporaryFolder folder;
  write_file_atomically(folder / "a", "first");
  EXPECT_EQ(contents_of(folder / "a"), "first");
  write_file_atomically(folder / "a", std::string_view("se\0nd", 5));
  EXPECT_EQ(contents_of(folder / "a"), std::string_view("se\0nd", 5));
  EXPECT_EQ(folder.names(), Names{"a"});
}

TEST(WriteFile, LeavesTheOldFileWhenTheWriterThrows) {
  TemporaryFolder folder;
  write_file_atomically(folder / "a", "old");
  const auto half = [](std::ostream& out) {
    out << "half of the ne";
    throw std::runtime_error("no more");
  };
  EXPECT_THROW(write_file_atomically(folder / "a", half), std::runtime_error);
  EXPECT_THROW(write_file_atomically(folder / "b", half), std::runtime_error);
  EXPECT_EQ(contents_of(folder / "a"), "old");
  EXPECT_EQ(folder.names(), Names{"a"});
}

TEST(WriteFile, LeavesTheOldFileWhenWritingFails) {
  TemporaryFolder folder;
  write_file_atomically(folder / "a", "old");
  expect_invalid({"cannot write", folder / "a"}, [&] {
    write_file_atomically(folder / "a", [](std::ostream& out) { out.setstate(std::ios::badbit); });
  });
  EXPECT_EQ(contents_of(folder / "a"), "old");
  EXPECT_EQ(folder.names(), Names{"a"});
}

TEST(WriteFile, ReplacesTheTargetOfALink) {
  TemporaryFolder folder;
  folder.write("real", "old");
  ASSERT_EQ(::symlink("real", (folder / "link").c_str()), 0);
  write_file_atomically(folder / "link", "new");
  EXPECT_EQ(contents_of(folder / "real"), "new");
  EXPECT_TRUE(std::filesystem::is_symlink(folder / "link"));
}

TEST(CheckWritable, LeavesNothingBehind) {
  TemporaryFolder folder;
  folder.write("there", "kept");
  check_writable(folder / "there");
  check_writable(folder / "new");
  EXPECT_EQ(folder.names(), Names{"there"});
  EXPECT_EQ(contents_of(folder / "there"), "kept");
}

TEST(CheckWritable, RefusesWhatCannotBeWritten) {
  TemporaryFolder folder;
  folder.write("file", "");
  std::filesystem::create_directory(folder / "sub");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  expect_invalid({"cannot write", "missing/x", "No such file or directory"},
                 [&] { check_writable(folder / "missing/x"); });
  expect_invalid({"cannot write", "file/x", "Not a directory"}, [&] { check_writable(folder / "file/x"); });
  expect_invalid({"cannot write", "sub", "it is a directory"}, [&] { check_writable(folder / "sub"); });
  expect_invalid({"cannot write", "sub/", "it does not name a file"}, [&] { check_writable(folder / "sub/"); });
  expect_invalid({"cannot write", "pipe", "it is not a regular file"}, [&] { check_writable(folder / "pipe"); });
  // A device is not replaced by a file, even for root.
  expect_invalid({"cannot write", "/dev/null", "it is not a regular file"}, [&] { check_writable("/dev/null"); });
  expect_invalid({"cannot write", "/proc/flashmask"}, [&] { check_writable("/proc/flashmask"); });
}

TEST(CheckWritable, RefusesReadOnlyFoldersAndFiles) {
  if (::geteuid() == 0) GTEST_SKIP() << "root may write everywhere";
  TemporaryFolder folder;
  folder.write("file", "");
  ASSERT_EQ(::chmod((folder / "file").c_str(), 0444), 0);
  expect_invalid({"cannot write", "Permission denied"}, [&] { check_writable(folder / "file"); });
  std::filesystem::create_directory(folder / "sub");
  ASSERT_EQ(::chmod((folder / "sub").c_str(), 0555), 0);
  expect_invalid({"cannot write", "Permission denied"}, [&] { check_writable(folder / "sub/x"); });
}

TEST(ReadFile, SaysWhyItCannot) {
  TemporaryFolder folder;
  EXPECT_EQ(read_file(folder.write("a", "text")), "text");
  expect_invalid({"cannot read", "missing"}, [&] { read_file(folder / "missing"); });
  expect_invalid({"cannot read", "it is a directory"}, [&] { read_file(folder / "."); });
}

}  // namespace
}  // namespace flashmask::io
