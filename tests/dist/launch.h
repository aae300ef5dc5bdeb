// Ranks under a launcher that write into a directory, seen from the test that has started them.
#pragma once

#include "conclave/comm.h"

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave::testing {

// One group of ranks under the launcher, which is ended with them.
class Launch {
 public:
  // Words of the program, which gets the directory for its reports as its last one.
  Launch(int32_t ranks, std::vector<std::string> program) {
    std::string name = (std::filesystem::temp_directory_path() / "conclave-mpi-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    directory_ = name;
    std::vector<std::string> words = launch_command("mpi", ranks);
    program.push_back(directory_.string());
    words.insert(words.end(), program.begin(), program.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    child_ = ::fork();
    if (child_ != 0) return;
    const int log = ::open((directory_ / "log").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    ::dup2(log, STDOUT_FILENO);
    ::dup2(log, STDERR_FILENO);
    ::execv(arguments[0], arguments.data());
    ::_exit(126);
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch() {
    if (!ended_) {
      ::kill(child_, SIGKILL);
      ::waitpid(child_, nullptr, 0);
    }
    std::filesystem::remove_all(directory_);
  }

  // The line that a rank has written, as soon as it is there.
  std::optional<std::string> line_of(int32_t rank,
                                     std::chrono::steady_clock::duration patience) const {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (std::chrono::steady_clock::now() < until) {
      std::ifstream file(directory_ / ("rank." + std::to_string(rank)));
      std::string line;
      if (std::getline(file, line)) return line;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return std::nullopt;
  }
  // A number that a rank has written beside its line; 0 if it has not.
  int64_t number_of(const std::string& name) const {
    int64_t number = 0;
    std::ifstream(directory_ / name) >> number;
    return number;
  }

  void kill_rank(int32_t rank) const {
    const auto pid = static_cast<pid_t>(number_of("pid." + std::to_string(rank)));
    if (pid > 0) ::kill(pid, SIGKILL);
  }

  bool ends_within(std::chrono::steady_clock::duration patience) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (!ended_ && std::chrono::steady_clock::now() < until) {
      ended_ = ::waitpid(child_, nullptr, WNOHANG) == child_;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return ended_;
  }

  std::string log() const {
    std::ifstream file(directory_ / "log");
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::filesystem::path directory_;
  pid_t child_ = -1;
  bool ended_ = false;
};

}  // namespace conclave::testing
