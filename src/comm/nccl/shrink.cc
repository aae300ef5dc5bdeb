// Ranks of NCCL that are left after a failure: they find each other by the roll call of their
// connections over TCP, where nobody waits for a rank that is silent, and NCCL connects them anew.
#include "comm/nccl/join_ranks.h"
#include "comm/nccl/nccl_communicator.h"
#include "comm/survivors.h"
#include "cuda/device_info.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <string_view>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

// For NCCL to end what waits on the device for ranks that are gone. Where it does not, memory that
// the driver frees meanwhile may wait for it as well, but nothing of the new group does.
constexpr auto kEndTime = std::chrono::milliseconds(1500);

// Another rank may begin so much later.
std::chrono::nanoseconds join_time(std::chrono::nanoseconds deadline) {
  const bool fits = deadline < std::chrono::nanoseconds::max() - kEndTime;
  return fits ? deadline + kEndTime : deadline;
}

}  // namespace

void NcclCommunicator::call_for_survivors() {
  watch_->fail(ErrorCode::kCommAborted, rank(),
               fmt::format("rank {} calls for the survivors", rank()));
  watch_->stop();
}

Survivors NcclCommunicator::shrink(std::chrono::nanoseconds deadline, std::string_view phase) {
  if (const Support support = supports(CommFeature::kShrink); !support) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "this communicator has no shrink", .found = support.reason()});
  }
  if (has_gone_on_) refuse_second_roll_call();
  const cuda::DeviceGuard guard(group_->ordinal());
  call_for_survivors();
  const int32_t most = size();
  Survivors left = host_->shrink(deadline, phase);
  has_gone_on_ = true;
  // Not before the roll call: one whose device takes its time would be left out.
  static_cast<void>(group_->await_end(kEndTime));
  // A rank that is lost while they connect makes another roll call necessary.
  for (int32_t lost = 0;; ++lost) {
    try {
      const NcclPlace place{
          .ordinal = group_->ordinal(), .timeout = timeout_, .deadline = join_time(deadline)};
      left.communicator = join_ranks(left.communicator, place);
      return left;
    } catch (const CommError& error) {
      if (lost == most) throw known_as(left.old_ranks, error);
    }
    left = call_again(left, deadline, phase);
  }
}

}  // namespace conclave::inline v0::comm
