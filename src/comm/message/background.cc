#include "comm/message/background.h"

#include "comm/message/message_port.h"

#include <cstdint>

namespace conclave::inline v0::comm {
namespace {

// Products have the cores meanwhile: the thread never spins, but begins with the short rests of a
// port that has waited for a while.
constexpr int64_t kFirstRest = 2000;

}  // namespace

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void Background::wake() {
  {
    const std::lock_guard lock(mutex_);
    if (has_work_) return;
    has_work_ = true;
  }
  if (thread_.joinable()) return changed_.notify_one();
  thread_ = std::thread([this] { run(); });
}

bool Background::await_work() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return has_work_ || ends_; });
  has_work_ = false;
  return !ends_;
}

void Background::run() {
  while (await_work()) {
    for (int64_t round = kFirstRest; advance_(); ++round) port_.rest(round);
  }
}

}  // namespace conclave::inline v0::comm
