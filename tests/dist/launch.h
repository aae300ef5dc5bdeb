// Ranks that a test has started, seen from the test: they write into a directory.
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
#include <utility>
#include <vector>

namespace conclave::testing {

// One group of ranks, which is ended with this: under the launcher of its transport, or each as a
// child that finds its number and theirs in the environment (group_rank.h).
class Launch {
 public:
  // Words of the program, which gets the directory for its reports as its last one.
  Launch(int32_t ranks, std::vector<std::string> program)
      : Launch("mpi", ranks, std::move(program)) {}
  Launch(const std::string& transport, int32_t ranks, std::vector<std::string> program) {
    std::string name = (std::filesystem::temp_directory_path() / "conclave-ranks-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
    directory_ = name;
    program.push_back(directory_.string());
    if (transport == "mpi") {
      std::vector<std::string> words = launch_command("mpi", ranks);
      words.insert(words.end(), program.begin(), program.end());
      start(words);
      return;
    }
    for (int32_t rank = 0; rank < ranks; ++rank) {
      std::vector<std::string> words = {"/usr/bin/env",
                                        "CONCLAVE_TEST_RANK=" + std::to_string(rank),
                                        "CONCLAVE_TEST_RANKS=" + std::to_string(ranks)};
      words.insert(words.end(), program.begin(), program.end());
      start(words);
    }
  }
  const std::filesystem::path& directory() const { return directory_; }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;
  ~Launch() {
    for (const pid_t child : children_) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
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
    while (!children_.empty() && std::chrono::steady_clock::now() < until) {
      std::erase_if(children_,
                    [](pid_t child) { return ::waitpid(child, nullptr, WNOHANG) == child; });
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return children_.empty();
  }

  std::string log() const {
    std::ifstream file(directory_ / "log");
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  void start(std::vector<std::string> words) {
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    const pid_t child = ::fork();
    if (child != 0) return children_.push_back(child);
    const int log =
        ::open((directory_ / "log").c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    ::dup2(log, STDOUT_FILENO);
    ::dup2(log, STDERR_FILENO);
    ::execv(arguments[0], arguments.data());
    ::_exit(126);
  }

  std::filesystem::path directory_;
  std::vector<pid_t> children_;
};

}  // namespace conclave::testing
