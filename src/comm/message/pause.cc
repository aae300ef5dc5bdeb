#include "comm/message/pause.h"

#include "comm/message/message_port.h"

#include <chrono>
#include <thread>

namespace conclave::inline v0::comm {

void rest_by_the_clock(int64_t round) noexcept {
  using std::chrono_literals::operator""us;
  constexpr int64_t kYields = 2000;
  constexpr int64_t kShortSleeps = 4000;
  if (round < kYields) return std::this_thread::yield();
  std::this_thread::sleep_for(round < kShortSleeps ? 20us : 200us);
}

void MessagePort::rest(int64_t round) noexcept { rest_by_the_clock(round); }

Support MessagePort::supports_survivors() const {
  return Support::no("the communicator " + std::string(name()) +
                     " has no connections for ranks that are left after a failure");
}

std::unique_ptr<MessagePort> MessagePort::survivors(const std::vector<int32_t>& /*ranks*/) {
  return nullptr;
}

void Pause::without(std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  ++rounds_;
  if (port_ == nullptr) {
    rest_by_the_clock(rounds_);
  } else {
    port_->rest(rounds_);
  }
  lock.lock();
}

}  // namespace conclave::inline v0::comm
