#include "comm/nccl/peer_windows.h"

#include "comm/nccl/nccl_work.h"
#include "cuda/check.h"
#include "cuda/stream.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <cuda_runtime_api.h>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

constexpr const char* kPhase = "connect";
// All slots of a window together have so many bytes, and one has no more than the other.
constexpr int64_t kAllSlotBytes = int64_t{64} << 20;
constexpr int64_t kMostSlotBytes = int64_t{8} << 20;
constexpr int64_t kSlotUnit = int64_t{1} << 20;
// For NCCL to connect ranks that it has just connected once: it takes seconds on a busy machine.
constexpr std::chrono::nanoseconds kLeastTime = std::chrono::seconds(10);
constexpr std::chrono::nanoseconds kMostTime = std::chrono::hours(1);
// For NCCL to take a window back, where nothing holds it up.
constexpr auto kEndTime = std::chrono::seconds(5);

// The begin of what a window of NCCL 2.28 is on the device, by its public headers, which later
// versions replace by a call.
struct WindowOf228 {
  void* on_host;
  std::byte* first;  // the block of rank 0 of those that reach each other
  int32_t rank;
  int32_t world_rank;
  uint32_t stride;  // between blocks, by 4 GiB
};
constexpr int kWindowsByCall = 22900;
// Each rank writes this, and its number, into its window.
constexpr int64_t kSign = 0x636F6E636C617665;

int64_t slot_bytes_for(int32_t ranks) {
  const int64_t share = kAllSlotBytes / (int64_t{kEpochs} * (ranks - 1));
  return std::min(kMostSlotBytes, share / kSlotUnit * kSlotUnit);
}

std::string refusal(const NcclLibrary& library, int32_t ranks) {
  if (ranks > kMaxWindowRanks) {
    return fmt::format("{} ranks are more than the {} that windows have", ranks, kMaxWindowRanks);
  }
  const Support support = has_windows(library);
  return support ? std::string() : support.reason();
}

// The first rank's reason, or an empty text where no rank has one.
std::string first_reason(Communicator& host, const std::string& mine,
                         std::chrono::nanoseconds timeout) {
  struct Line {
    char text[192] = {};
  };
  Line own;
  std::copy_n(mine.begin(), std::min(mine.size(), sizeof(own.text) - 1), own.text);
  std::vector<Line> lines(static_cast<size_t>(host.size()));
  const CommHandle handle = host.begin_all_gather(std::as_bytes(std::span(&own, 1)),
                                                  std::as_writable_bytes(std::span(lines)));
  host.wait(handle, timeout, kPhase);
  for (size_t rank = 0; rank < lines.size(); ++rank) {
    if (lines[rank].text[0] != '\0') return fmt::format("rank {}: {}", rank, lines[rank].text);
  }
  return {};
}

bool is_memory_of_a_device(const void* data) {
  cudaPointerAttributes at{};
  if (data == nullptr || cudaPointerGetAttributes(&at, data) != cudaSuccess) {
    static_cast<void>(cudaGetLastError());
    return false;
  }
  return at.type == cudaMemoryTypeDevice;
}

void copy_and_wait(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace

// Ranks are there already, and whatever fails here leaves them without windows, not without each
// other.
PeerWindows::Search PeerWindows::open(const Request& request) {
  Communicator& host = request.host;
  const int32_t ranks = host.size();
  const auto timeout = std::clamp(request.timeout, kLeastTime, kMostTime);
  std::unique_ptr<PeerWindows> made(new PeerWindows(request.library, request.ordinal));
  std::string reason;
  const auto agree = [&](const auto& step) {
    try {
      reason = step();
    } catch (const Error& error) {
      reason = error.what();
    }
    // Another rank may have waited for NCCL meanwhile.
    reason = first_reason(host, reason, timeout + timeout);
    return reason.empty();
  };
  const auto refuse = [&] { return refusal(request.library, ranks); };
  const auto connect = [&] {
    made->group_ = request.make(timeout);
    return made->allocate(ranks);
  };
  const auto map = [&] {
    const std::string failure = made->register_memory(timeout);
    return failure.empty() ? made->find_blocks(host.rank(), ranks) : failure;
  };
  const auto write_card = [&] { return made->write_card(host.rank()); };
  const auto read_cards = [&] { return made->read_cards(); };
  const auto clear = [&] { return made->clear(); };
  // The last one, since nobody stores anything before all are clear.
  const bool all_have = agree(refuse) && agree(connect) && agree(map) && agree(write_card) &&
                        agree(read_cards) && agree(clear);
  if (!all_have) return {.windows = nullptr, .reason = reason};
  return {.windows = std::move(made), .reason = {}};
}

std::string PeerWindows::allocate(int32_t ranks) {
  slot_bytes_ = slot_bytes_for(ranks);
  bytes_ = static_cast<size_t>(window_bytes(ranks, slot_bytes_));
  const NcclResult result = library_.windows.mem_alloc(&memory_, bytes_);
  if (result == kNcclSuccess) return {};
  static_cast<void>(cudaGetLastError());
  memory_ = nullptr;
  return fmt::format("ncclMemAlloc of {} bytes: {}", bytes_, library_.get_error_string(result));
}

// NCCL waits for all ranks without a deadline.
std::string PeerWindows::register_memory(std::chrono::nanoseconds timeout) {
  struct Registering {
    std::mutex mutex;
    std::optional<NcclResult> result;
    ncclWindow_vidmem* window = nullptr;
  };
  constexpr int kPlain = 0;  // nothing but addresses: NCCL's own kernels do not use it
  const auto state = std::make_shared<Registering>();
  NcclWork work([state, calls = library_.windows, ordinal = ordinal_, memory = memory_,
                 bytes = bytes_, comm = group_->comm()] {
    ncclWindow_vidmem* window = nullptr;
    NcclResult result = 1;  // as NCCL reports an error of CUDA
    if (cudaSetDevice(ordinal) == cudaSuccess) {
      result = calls.window_register(comm, memory, bytes, &window, kPlain);
    }
    const std::lock_guard lock(state->mutex);
    state->result = result;
    state->window = window;
  });
  work.wait_for(timeout);
  const std::lock_guard lock(state->mutex);
  if (!state->result) {
    keep_mapped();  // the thread that was left has it
    return "NCCL did not register windows of all ranks in time";
  }
  if (*state->result != kNcclSuccess) {
    static_cast<void>(cudaGetLastError());
    return std::string("ncclCommWindowRegister: ") + library_.get_error_string(*state->result);
  }
  window_ = state->window;
  return {};
}

std::string PeerWindows::find_blocks(int32_t rank, int32_t ranks) {
  std::vector<std::byte*> blocks(static_cast<size_t>(ranks));
  const bool by_call = library_.version >= kWindowsByCall;
  if (by_call && window_ != nullptr) {
    for (int32_t peer = 0; peer < ranks; ++peer) {
      void* at = nullptr;
      static_cast<void>(library_.windows.get_peer_device_pointer(window_, 0, peer, &at));
      blocks[static_cast<size_t>(peer)] = static_cast<std::byte*>(at);
    }
  } else if (is_memory_of_a_device(window_)) {
    const NcclTeam team = library_.windows.team_lsa(group_->comm());
    if (team.ranks != ranks || team.rank != rank) {
      return fmt::format("{} of {} ranks reach each other's memory", team.ranks, ranks);
    }
    WindowOf228 window{};
    copy_and_wait(&window, window_, sizeof(window), cuda::make_stream().get());
    for (int32_t peer = 0; peer < ranks; ++peer) {
      const int64_t offset = (int64_t{window.stride} << 32) * peer;
      blocks[static_cast<size_t>(peer)] = window.first + offset;
    }
  }
  if (std::all_of(blocks.begin(), blocks.end(), is_memory_of_a_device)) {
    blocks_ = std::move(blocks);
    return {};
  }
  return "NCCL gives no addresses of peers' memory";
}

std::string PeerWindows::clear() const {
  const cuda::OwnedStream stream = cuda::make_stream();
  cuda::check(cudaMemsetAsync(memory_, 0, static_cast<size_t>(kWindowHeadBytes), stream.get()),
              "cudaMemsetAsync");
  cuda::check(cudaStreamSynchronize(stream.get()), "cudaStreamSynchronize");
  return {};
}

// Each rank writes by the address that its allocation has and reads by those that peers' have.
std::string PeerWindows::write_card(int32_t rank) const {
  const int64_t mine = kSign + rank;
  copy_and_wait(memory_, &mine, sizeof(mine), cuda::make_stream().get());
  return {};
}
std::string PeerWindows::read_cards() const {
  const cuda::OwnedStream stream = cuda::make_stream();
  int64_t expected = kSign;
  for (const std::byte* block : blocks_) {
    int64_t found = 0;
    copy_and_wait(&found, block, sizeof(found), stream.get());
    if (found != expected++) return "a window is not where NCCL says";
  }
  return {};
}

PeerWindows::~PeerWindows() {
  if (is_kept_) {
    static_cast<void>(group_.release());
    return;
  }
  if (window_ != nullptr) {
    NcclWork work(
        [calls = library_.windows, comm = group_->comm(), window = window_, ordinal = ordinal_] {
          static_cast<void>(cudaSetDevice(ordinal));
          cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
          static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode));
          static_cast<void>(calls.window_deregister(comm, window));
        });
    if (!work.wait_for(kEndTime)) {
      static_cast<void>(group_.release());
      return;
    }
  }
  group_.reset();
  if (memory_ != nullptr) static_cast<void>(library_.windows.mem_free(memory_));
}

}  // namespace conclave::inline v0::comm
