// Bars S7 and S8: truncated files, failing reads, and files that change while they are read.
#include "io/io_test_support.h"
#include "io/safetensors_open.h"

#include "conclave/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

namespace conclave::testing {
namespace {

constexpr FileAccess kBothModes[] = {FileAccess::kMap, FileAccess::kRead};

// Opens the file and loads every tensor; returns the bytes of all of them together.
std::string load_all(io::File opened) {
  const SafetensorsFile file = io::open_safetensors(std::move(opened));
  std::string all;
  for (const TensorInfo& tensor : file.tensors()) {
    const Tensor loaded = file.load(tensor.name);
    all.append(loaded.as<char>(), loaded.size_bytes());
  }
  return all;
}

// A small file with metadata, an empty tensor and several dtypes.
std::string sample_file() {
  const std::string header = R"({"__metadata__":{"format":"pt"},)" +
                             entry("w", "F32", "[4,8]", "[0,128]") + "," +
                             entry("empty", "F16", "[0,4]", "[128,128]") + "," +
                             entry("b", "BF16", "[64]", "[128,256]") + "}";
  return safetensors(header, 256);
}

TEST(SafetensorsFaults, CutAnywhere_TypedErrorNamingTheFile) {
  const TemporaryDirectory directory;
  const std::string file = sample_file();
  const size_t data_begin = file.size() - 256;
  std::vector<size_t> cuts;
  for (size_t i = 0; i < data_begin; ++i) cuts.push_back(i);
  for (size_t i = 0; i < 64; ++i) cuts.push_back(data_begin + i * 4);
  std::map<std::string, int> codes;
  for (const size_t cut : cuts) {
    const auto path = directory.write("cut.safetensors", std::string_view(file).substr(0, cut));
    for (const FileAccess access : kBothModes) {
      std::string what;
      const auto code = code_of([&] { load_all(io::File::open(path, {.access = access})); }, &what);
      const std::string expected = cut < 8            ? "kSafetensorsTooShort"
                                   : cut < data_begin ? "kSafetensorsHeaderTruncated"
                                                      : "kSafetensorsTruncatedData";
      EXPECT_EQ(name_of(code), expected) << cut;
      EXPECT_NE(what.find(path.string()), std::string::npos) << what;
      EXPECT_NE(what.find(fmt::format("{} bytes", cut)), std::string::npos) << what;
      ++codes[name_of(code)];
    }
  }
  fmt::print("S7: {} cuts in 2 access modes, {} distinct codes, signals 0\n", cuts.size(),
             codes.size());
}

enum class Fault { kShort, kInterrupted, kError, kEndOfFile };

// Makes the k-th read of a load fail in one way; short and interrupted reads must be invisible.
TEST(SafetensorsFaults, KthReadFails_TypedErrorOrRetried) {
  const TemporaryDirectory directory;
  const auto path = directory.write("model.safetensors", sample_file());
  const std::string original = load_all(io::File::open(path));
  size_t cases = 0;
  for (const FileAccess access : kBothModes) {
    for (const Fault fault :
         {Fault::kShort, Fault::kInterrupted, Fault::kError, Fault::kEndOfFile}) {
      bool reached = true;
      for (int k = 0; reached; ++k) {
        int calls = 0;
        const io::ReadFunction read = [&](int fd, void* buffer, size_t bytes,
                                          off_t offset) -> ssize_t {
          if (calls++ != k || bytes == 0) return pread(fd, buffer, bytes, offset);
          switch (fault) {
            case Fault::kShort:
              return pread(fd, buffer, (bytes + 1) / 2, offset);
            case Fault::kInterrupted:
              errno = EINTR;
              return -1;
            case Fault::kError:
              errno = EIO;
              return -1;
            case Fault::kEndOfFile:
              return 0;
          }
          return 0;
        };
        std::string loaded;
        std::string what;
        const auto code = code_of(
            [&] { loaded = load_all(io::File::open(path, {.access = access, .read = read})); },
            &what);
        reached = calls > k;
        if (!reached) break;
        ++cases;
        SCOPED_TRACE(fmt::format("read {} fault {}", k, static_cast<int>(fault)));
        if (fault == Fault::kShort || fault == Fault::kInterrupted) {
          EXPECT_EQ(code, std::nullopt) << what;
          EXPECT_EQ(loaded, original);
        } else {
          EXPECT_EQ(name_of(code), fault == Fault::kError ? "kFileRead" : "kFileChanged");
          EXPECT_NE(what.find(path.string()), std::string::npos) << what;
          EXPECT_NE(what.find("offset"), std::string::npos) << what;
        }
      }
    }
  }
  EXPECT_GE(cases, 32U);
  fmt::print("S7: {} injected read faults, signals 0\n", cases);
}

// A change that the other process makes to the file after it was opened.
using Modification = std::function<void(const std::filesystem::path& path)>;

void overwrite(const std::filesystem::path& path, const std::string& content) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  for (size_t at = 0; at < content.size(); at += 8192) {
    const size_t bytes = std::min<size_t>(8192, content.size() - at);
    if (pwrite(fd, content.data() + at, bytes, static_cast<off_t>(at)) < 0) _exit(2);
  }
  close(fd);
}

void overwrite_through_a_mapping(const std::filesystem::path& path, const std::string& content) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  void* memory = mmap(nullptr, content.size(), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) _exit(2);
  std::copy(content.begin(), content.end(), static_cast<char*>(memory));
  munmap(memory, content.size());
  close(fd);
}

// Runs `modify` in another process, from the moment `start` returns until `wait`.
class OtherProcess {
 public:
  explicit OtherProcess(const std::function<void()>& modify) {
    if (pipe2(pipe_, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    child_ = fork();
    if (child_ == 0) {
      char token = 0;
      if (read(pipe_[0], &token, 1) == 1) modify();
      _exit(0);
    }
  }
  void start() {
    if (write(pipe_[1], "x", 1) != 1) throw std::runtime_error("write");
  }
  bool wait() {
    int status = 0;
    waitpid(child_, &status, 0);
    close(pipe_[0]);
    close(pipe_[1]);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }

 private:
  int pipe_[2] = {-1, -1};
  pid_t child_ = -1;
};

TEST(SafetensorsFaults, ModifiedDuringLoad_TypedErrorOrOriginalBytes) {
  const TemporaryDirectory directory;
  constexpr size_t kBytes = 1 << 19;
  const std::string header = fmt::format(
      "{{{}}}", entry("w", "U8", fmt::format("[{}]", kBytes), fmt::format("[0,{}]", kBytes)));
  const auto version = [&](char value) { return safetensors(header) + std::string(kBytes, value); };
  const std::string changed = version('n');
  const std::map<std::string, Modification> modifications = {
      {"truncate_to_nothing", [](const auto& path) { std::filesystem::resize_file(path, 0); }},
      {"truncate_in_half",
       [](const auto& path) { std::filesystem::resize_file(path, kBytes / 2); }},
      {"truncate_and_grow_again",
       [](const auto& path) {
         const auto bytes = std::filesystem::file_size(path);
         std::filesystem::resize_file(path, 0);
         std::filesystem::resize_file(path, bytes);
       }},
      {"append", [](const auto& path) { std::filesystem::resize_file(path, 2 * kBytes); }},
      {"rewrite_in_place", [&](const auto& path) { overwrite(path, changed); }},
      {"rewrite_through_a_mapping",
       [&](const auto& path) { overwrite_through_a_mapping(path, changed); }},
      {"rename_over",
       [&](const auto& path) { std::filesystem::rename(path.string() + ".new", path); }},
      {"remove", [](const auto& path) { std::filesystem::remove(path); }},
  };
  const std::set<std::string> keeps_the_bytes = {"rename_over", "remove"};
  const int rounds = kIsInstrumented ? 5 : 20;
  int cases = 0;
  int errors = 0;
  int mixed = 0;
  for (const auto& [name, modify] : modifications) {
    for (const FileAccess access : kBothModes) {
      for (int round = 0; round < rounds; ++round, ++cases) {
        SCOPED_TRACE(name);
        const auto path = directory.write("w.safetensors", version('o'));
        if (name == "rename_over") directory.write("w.safetensors.new", changed);
        OtherProcess other([&] { modify(path); });
        const SafetensorsFile file = SafetensorsFile::open(path, access);
        other.start();
        for (int pass = 0; pass < 8; ++pass) {
          std::string bytes(kBytes, '\0');
          // The test reads in pieces, so that the other process has time to strike in between.
          const auto code = code_of([&] {
            for (size_t at = 0; at < kBytes; at += kBytes / 16) {
              file.read(file.tensors()[0], at,
                        std::as_writable_bytes(std::span(bytes).subspan(at, kBytes / 16)));
            }
          });
          if (code) {
            EXPECT_EQ(name_of(code), "kFileChanged");
            EXPECT_FALSE(keeps_the_bytes.contains(name));
            ++errors;
          } else if (bytes.find_first_not_of('o') != std::string::npos) {
            ++mixed;
          }
        }
        EXPECT_TRUE(other.wait());
        // The modification is complete: only the original bytes may still be returned.
        const auto after = code_of([&] { file.load("w"); });
        EXPECT_EQ(name_of(after), keeps_the_bytes.contains(name) ? "no error" : "kFileChanged");
      }
    }
  }
  EXPECT_EQ(mixed, 0);
  fmt::print("S8: {} modified files, {} refused loads, mixed loads {}, signals 0\n", cases, errors,
             mixed);
}

}  // namespace
}  // namespace conclave::testing
