#include "io/file.h"

#include "io/io_test_support.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace conclave::testing {
namespace {

using io::File;
using io::FileOptions;

std::string numbered(size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 131 + i / 256);
  return text;
}

class FileTest : public ::testing::TestWithParam<FileAccess> {
 protected:
  File open(io::ReadFunction read = {}) const {
    return File::open(path_, {.access = GetParam(), .read = std::move(read)});
  }
  std::string read(const File& file, uint64_t offset, size_t bytes) const {
    std::string text(bytes, '\0');
    file.read(offset, std::as_writable_bytes(std::span(text)));
    return text;
  }

  TemporaryDirectory directory_;
  const std::string content_ = numbered(100'000);
  const std::filesystem::path path_ = directory_.write("file", content_);
};

TEST_P(FileTest, Read_AnyRange) {
  const File file = open();
  EXPECT_EQ(file.bytes(), content_.size());
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, size_t>>{
           {0, 0}, {0, 1}, {4095, 2}, {99'999, 1}, {100'000, 0}, {0, 100'000}, {12'345, 54'321}}) {
    EXPECT_EQ(read(file, offset, bytes), content_.substr(offset, bytes));
  }
  EXPECT_EQ(file.read_all(), content_);
}

TEST_P(FileTest, ReadBeyondTheEnd_Refused) {
  const File file = open();
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, size_t>>{
           {100'000, 1}, {99'999, 2}, {100'001, 0}, {~uint64_t{0}, 1}, {~uint64_t{0} - 3, 8}}) {
    EXPECT_EQ(name_of(code_of([&] { read(file, offset, bytes); })), "kInvalidArgument");
  }
}

TEST_P(FileTest, Mapping_OnlyWhenAsked) {
  const File file = open();
  const std::span<const std::byte> mapping = file.mapping();
  if (GetParam() != FileAccess::kMap) {
    EXPECT_TRUE(mapping.empty());
  } else {
    ASSERT_EQ(mapping.size(), content_.size());
    EXPECT_TRUE(std::ranges::equal(mapping, bytes_of(content_)));
  }
}

TEST_P(FileTest, Moved_KeepsWorking) {
  File first = open();
  File second = std::move(first);
  EXPECT_EQ(second.read_all(), content_);
  first = File::open(directory_.write("other", "other"), {.access = GetParam()});
  second = std::move(first);
  EXPECT_EQ(second.read_all(), "other");
}

TEST_P(FileTest, ShortReadsAndInterrupts_Retried) {
  std::atomic<int> calls = 0;
  const File file = open([&](int fd, void* buffer, size_t bytes, off_t offset) -> ssize_t {
    if (++calls % 3 == 0) {
      errno = EINTR;
      return -1;
    }
    return pread(fd, buffer, std::min<size_t>(bytes, 1 + static_cast<size_t>(calls) % 700), offset);
  });
  EXPECT_EQ(file.read_all(), content_);
  EXPECT_GT(calls, 100);
}

TEST_P(FileTest, FailedRead_NamesFileAndOffset) {
  const File file = open([&](int fd, void* buffer, size_t bytes, off_t offset) -> ssize_t {
    if (offset >= 5000) {
      errno = EIO;
      return -1;
    }
    return pread(fd, buffer, std::min<size_t>(bytes, 5000 - static_cast<size_t>(offset)), offset);
  });
  std::string what;
  EXPECT_EQ(name_of(code_of([&] { file.read_all(); }, &what)), "kFileRead");
  EXPECT_NE(what.find(path_.string()), std::string::npos) << what;
  EXPECT_NE(what.find("offset 5000"), std::string::npos) << what;
}

TEST_P(FileTest, ThreadsShareOneFile) {
  const File file = open();
  std::vector<std::thread> threads;
  std::atomic<int> wrong = 0;
  for (size_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (size_t i = 0; i < 200; ++i) {
        const size_t offset = (i * 7919 + t * 104'729) % 90'000;
        if (read(file, offset, 1000) != content_.substr(offset, 1000)) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(FileTest, WrittenAfterOpening_Changed) {
  const File file = open();
  std::ofstream(path_, std::ios::in | std::ios::binary) << "X";
  EXPECT_EQ(name_of(code_of([&] { file.read_all(); })), "kFileChanged");
}

TEST_P(FileTest, TruncatedAfterOpening_ChangedNotASignal) {
  const File file = open();
  std::filesystem::resize_file(path_, 4096);
  std::string what;
  EXPECT_EQ(name_of(code_of([&] { read(file, 50'000, 10); }, &what)), "kFileChanged");
  EXPECT_NE(what.find("offset 50000"), std::string::npos) << what;
  EXPECT_EQ(name_of(code_of([&] { read(file, 0, 10); })), "kFileChanged");
}

TEST_P(FileTest, ReplacedOrRemovedAfterOpening_KeepsTheOriginalBytes) {
  const File file = open();
  std::filesystem::rename(directory_.write("new", "new content"), path_);
  EXPECT_EQ(file.read_all(), content_);
  const File second = open();
  std::filesystem::remove(path_);
  EXPECT_EQ(second.read_all(), "new content");
}

TEST_P(FileTest, Empty_ReadsNothing) {
  const File file = File::open(directory_.write("empty", ""), {.access = GetParam()});
  EXPECT_EQ(file.bytes(), 0U);
  EXPECT_EQ(file.read_all(), "");
  EXPECT_TRUE(file.mapping().empty());
}

INSTANTIATE_TEST_SUITE_P(Access, FileTest, ::testing::ValuesIn(kAccessModes), access_name);

TEST(File, NotAFile_Refused) {
  const TemporaryDirectory directory;
  EXPECT_EQ(name_of(code_of([&] { File::open(directory.path()); })), "kFileNotRegular");
  EXPECT_EQ(name_of(code_of([&] { File::open("/dev/null"); })), "kFileNotRegular");
  EXPECT_EQ(name_of(code_of([&] { File::open(directory.path() / "absent"); })), "kFileNotFound");
}

}  // namespace
}  // namespace conclave::testing
