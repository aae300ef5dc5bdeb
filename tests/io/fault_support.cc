#include "io/fault_support.h"

#include "io/io_test_support.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <map>
#include <set>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

namespace conclave::testing {
namespace {

enum class Fault { kShort, kInterrupted, kError, kEndOfFile };

ssize_t failing_pread(Fault fault, int fd, void* buffer, size_t bytes, off_t offset) {
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

using Modifications = std::map<std::string, Modification>;

Modifications modifications(const std::string& changed) {
  return {
      {"truncate_to_nothing", [](const auto& path) { std::filesystem::resize_file(path, 0); }},
      {"truncate_in_half",
       [](const auto& path) { std::filesystem::resize_file(path, kChangingBytes / 2); }},
      {"truncate_and_grow_again",
       [](const auto& path) {
         const auto bytes = std::filesystem::file_size(path);
         std::filesystem::resize_file(path, 0);
         std::filesystem::resize_file(path, bytes);
       }},
      {"append", [](const auto& path) { std::filesystem::resize_file(path, 2 * kChangingBytes); }},
      {"rewrite_in_place", [&](const auto& path) { overwrite(path, changed); }},
      {"rewrite_through_a_mapping",
       [&](const auto& path) { overwrite_through_a_mapping(path, changed); }},
      {"rename_over",
       [&](const auto& path) { std::filesystem::rename(path.string() + ".new", path); }},
      {"remove", [](const auto& path) { std::filesystem::remove(path); }},
  };
}

// Reads in pieces, so that the other process has time to strike in between.
std::optional<ErrorCode> read_in_pieces(const ReadTensor& read, std::string& bytes) {
  bytes.assign(kChangingBytes, '\0');
  constexpr size_t kPiece = kChangingBytes / 16;
  return code_of([&] {
    for (size_t at = 0; at < bytes.size(); at += kPiece) {
      read(at, std::as_writable_bytes(std::span(bytes).subspan(at, kPiece)));
    }
  });
}

}  // namespace

size_t expect_read_faults_handled(const std::filesystem::path& path, const LoadAll& load_all) {
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
          return failing_pread(fault, fd, buffer, bytes, offset);
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
  return cases;
}

ChangeCounts expect_changes_noticed(const MakeVersion& version, const OpenTensor& open_tensor) {
  const TemporaryDirectory directory;
  const std::string original = version('o');
  const std::string changed = version('n');
  const std::set<std::string> keeps_the_bytes = {"rename_over", "remove"};
  const int rounds = kIsInstrumented ? 5 : 20;
  ChangeCounts counts;
  std::string bytes;
  for (const auto& [name, modify] : modifications(changed)) {
    for (const FileAccess access : kBothModes) {
      for (int round = 0; round < rounds; ++round, ++counts.files) {
        SCOPED_TRACE(name);
        const auto path = directory.write("model", original);
        if (name == "rename_over") directory.write("model.new", changed);
        OtherProcess other([&] { modify(path); });
        const ReadTensor read = open_tensor(path, access);
        other.start();
        for (int pass = 0; pass < 8; ++pass) {
          const auto code = read_in_pieces(read, bytes);
          if (code) {
            EXPECT_EQ(name_of(code), "kFileChanged");
            EXPECT_FALSE(keeps_the_bytes.contains(name));
            ++counts.refused_loads;
          } else if (bytes.find_first_not_of('o') != std::string::npos) {
            ++counts.mixed_loads;
          }
        }
        EXPECT_TRUE(other.wait());
        // The modification is complete: only the original bytes may still be returned.
        EXPECT_EQ(name_of(read_in_pieces(read, bytes)),
                  keeps_the_bytes.contains(name) ? "no error" : "kFileChanged");
      }
    }
  }
  EXPECT_EQ(counts.mixed_loads, 0);
  return counts;
}

}  // namespace conclave::testing
