#include "comm/message/process_watch.h"

#include "conclave/version.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstring>
#include <fcntl.h>
#include <optional>
#include <string_view>
#include <sys/stat.h>
#include <unistd.h>

namespace conclave::inline v0::comm {
namespace {

struct ProcessState {
  char letter = '?';  // 'Z' and 'X': it has ended
  uint64_t started = 0;
};

// Reads /proc/<pid>/stat without allocating. `gone` is set where the directory is missing.
std::optional<ProcessState> read_state(int64_t pid, bool& gone) {
  std::array<char, 64> path{};
  fmt::format_to_n(path.data(), path.size() - 1, "/proc/{}/stat", pid);
  const int file = ::open(path.data(), O_RDONLY | O_CLOEXEC);
  gone = file < 0 && errno == ENOENT;
  if (file < 0) return std::nullopt;
  std::array<char, 1024> text{};
  const ssize_t length = ::read(file, text.data(), text.size() - 1);
  gone = length < 0 && errno == ESRCH;
  ::close(file);
  if (length <= 0) return std::nullopt;
  // The name in parentheses may hold anything: the fields count from behind the last one.
  std::string_view fields(text.data(), static_cast<size_t>(length));
  const size_t behind = fields.rfind(')');
  if (behind == std::string_view::npos || behind + 2 >= fields.size()) return std::nullopt;
  fields.remove_prefix(behind + 2);
  ProcessState state{.letter = fields.front()};
  constexpr int kFieldsBeforeStart = 19;  // from the state to the start time
  for (int i = 0; i < kFieldsBeforeStart; ++i) {
    const size_t space = fields.find(' ');
    if (space == std::string_view::npos) return std::nullopt;
    fields.remove_prefix(space + 1);
  }
  std::from_chars(fields.data(), fields.data() + fields.size(), state.started);
  return state;
}

uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325U;
  for (const char letter : text) {
    hash = (hash ^ static_cast<unsigned char>(letter)) * 0x100000001b3U;
  }
  return hash;
}

uint64_t this_place() {
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  std::array<char, 256> space{};
  const ssize_t length = ::readlink("/proc/self/ns/pid", space.data(), space.size() - 1);
  if (length <= 0) return 0;
  return hash_of(fmt::format("{}/{}", host.data(), space.data()));
}

}  // namespace

Identity this_process() {
  bool gone = false;
  const auto state = read_state(::getpid(), gone);
  return {.build = hash_of(build_info().version) ^ sizeof(Notice),
          .place = state ? this_place() : 0,
          .started = state ? state->started : 0,
          .pid = ::getpid()};
}

bool may_live(const Identity& peer, const Identity& self) {
  if (self.place == 0 || peer.place != self.place || peer.pid == self.pid) return true;
  bool gone = false;
  const auto state = read_state(peer.pid, gone);
  if (!state) return !gone;
  return state->started == peer.started && state->letter != 'Z' && state->letter != 'X';
}

}  // namespace conclave::inline v0::comm
