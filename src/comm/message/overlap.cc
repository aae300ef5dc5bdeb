// A communicator's thread in the background does this, and is woken when there is something to do.
#include "comm/message/message_communicator.h"

#include <algorithm>
#include <exception>

namespace conclave::inline v0::comm {

bool MessageCommunicator::is_long(const MessageOperation& operation) const {
  for (int32_t with = 0; with < size(); ++with) {
    if (with == rank()) continue;
    for (const Lane& lane : operation.parts[static_cast<size_t>(with)].lanes) {
      if (lane.out_bytes > kInlineBytes || lane.in_bytes > kInlineBytes) return true;
    }
  }
  return false;
}

void MessageCommunicator::wake_background() noexcept {
  try {
    if (!port_->takes_background()) return;
    if (!background_) {
      background_ =
          std::make_unique<Background>(*port_, [this] { return advance_in_background(); });
    }
    background_->wake();
  } catch (const std::exception&) {
    return;  // without a thread bytes move in calls
  }
}

bool MessageCommunicator::has_background_work() const {
  return std::ranges::any_of(operations_, [this](const MessageOperation& operation) {
    return operation.in_use() && operation.in_background && !is_over(operation);
  });
}

bool MessageCommunicator::advance_in_background() {
  const MessageLock lock(port_->mutex());
  if (is_waiting_ || !usable() || !has_background_work()) return false;
  try {
    advance("background");
  } catch (const CommError&) {
    is_unreported_ = true;
    return false;
  } catch (const std::exception&) {
    return false;  // the thread that waits meets it again, and has someone to tell
  }
  return has_background_work();
}

}  // namespace conclave::inline v0::comm
