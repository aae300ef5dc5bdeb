#include "ranks/probe.h"

#include "commands.h"
#include "ranks/own_command.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <fcntl.h>
#include <memory>
#include <poll.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

namespace conclave::tool {
namespace {

using std::chrono_literals::operator""s;
using Clock = std::chrono::steady_clock;

constexpr const char* kCommand = "probe-transport";
constexpr auto kPatience = 20s;

struct ProbeResult {
  bool connected = false;
  std::string text;
};

// Reads until the child closes its end, or for as long as the patience lasts.
std::string read_all(int end) {
  std::string text;
  const auto until = Clock::now() + kPatience;
  while (true) {
    const auto left =
        std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd ready{.fd = end, .events = POLLIN, .revents = 0};
    if (left <= 0 || ::poll(&ready, 1, static_cast<int>(left)) <= 0) return text;
    std::array<char, 512> buffer{};
    const ssize_t count = ::read(end, buffer.data(), buffer.size());
    if (count <= 0) return text;
    text.append(buffer.data(), static_cast<size_t>(count));
  }
}

ProbeResult probe(const std::string& transport, const char* command) {
  std::vector<std::string> words = own_command();
  const auto place = std::find(words.begin(), words.end(), command);
  words.erase(place, words.end());
  words.emplace_back(kCommand);
  words.push_back(transport);
  const std::vector<char*> arguments = argument_pointers(words);
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) return {.connected = false, .text = "no pipe"};
  const pid_t child = ::fork();
  if (child == 0) {
    const int nowhere = ::open("/dev/null", O_RDWR | O_CLOEXEC);
    ::dup2(nowhere, STDIN_FILENO);
    ::dup2(ends[1], STDOUT_FILENO);
    ::dup2(nowhere, STDERR_FILENO);
    ::execv(arguments.front(), arguments.data());
    ::_exit(127);
  }
  ::close(ends[1]);
  ProbeResult result{.connected = false, .text = read_all(ends[0])};
  ::close(ends[0]);
  int status = 0;
  if (::waitpid(child, &status, WNOHANG) == 0 && result.text.empty()) ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  result.connected = WIFEXITED(status) && WEXITSTATUS(status) == 0 && !result.text.empty();
  while (result.text.ends_with('\n')) result.text.pop_back();
  return result;
}

ExitCode run_probe(const std::string& transport) {
  try {
    connect(transport, {.timeout = kPatience});
  } catch (const Error& error) {
    fmt::print("{}\n", error.what());
    return exit_code(error.code());
  }
  for (const TransportInfo& info : transports()) {
    if (info.name == transport) fmt::print("{}\n", info.reason);
  }
  return ExitCode::kOk;
}

}  // namespace

std::vector<TransportInfo> probed_transports(const char* command) {
  std::vector<TransportInfo> infos = transports();
  for (TransportInfo& info : infos) {
    if (!info.usable || info.launch_variables.empty()) continue;
    const ProbeResult result = probe(info.name, command);
    info.usable = result.connected;
    if (result.connected) {
      info.reason = result.text;
    } else {
      info.reason += result.text.empty() ? ", which does not start" : ": " + result.text;
    }
  }
  return infos;
}

void add_probe_command(CommandLine& line) {
  Command command = line.add_command(kCommand, "Connect one rank by a transport");
  auto transport = std::make_shared<std::string>();
  command.positional("TRANSPORT", *transport, "A name that doctor lists").required();
  command.hide();
  command.on_run([transport] { return run_probe(*transport); });
}

}  // namespace conclave::tool
