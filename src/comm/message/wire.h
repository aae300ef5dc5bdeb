// Ranks that are processes send each other these. Both sides run one build: the layouts are those
// of the structs, and a rank of another version is refused when it connects.
#pragma once

#include "conclave/comm.h"
#include "conclave/dtype.h"
#include "conclave/error.h"

#include <array>
#include <cstddef>
#include <cstdint>

namespace conclave::inline v0::comm {

// Bytes that travel with an announcement: more cost a message of their own.
inline constexpr int64_t kInlineBytes = 512;
inline constexpr bool is_inline(int64_t bytes) { return bytes <= kInlineBytes; }
// Bytes of one data message. It stays in a second-level cache between the two copies, and no count
// comes near what an int holds.
inline constexpr int64_t kChunkBytes = int64_t{256} << 10;

// The four ways in which operations are counted between two ranks. A message is counted by its
// sender and by its receiver, so that one to itself has two.
enum class Channel : uint8_t { kCollective, kSend, kRecv };

// kHello: who this rank is; kReady: whether it has the group's shared file; kPresent: it has come
// to the roll call.
enum class NoticeKind : uint8_t {
  kHello,
  kReady,
  kAnnounce,
  kGone,
  kFailed,
  kAborted,
  kPresent,
};

// Who a rank is, in its first message.
struct Identity {
  uint64_t build = 0;    // a hash of the version: other layouts are refused
  uint64_t place = 0;    // a hash of host and process namespace: equal where /proc shows the other
  uint64_t started = 0;  // with pid, names a process for ever
  int64_t pid = 0;
  int32_t shared_file = -1;  // its descriptor there, or -1
};

// Announces an operation to the other rank of it; both do, and compare.
struct Announcement {
  uint64_t number = 0;
  int64_t offered = 0;
  int64_t expected = 0;
  Channel channel = Channel::kCollective;
  CommKind kind = CommKind::kBarrier;
  DType dtype = DType::kU8;
  ReduceOp reduce = ReduceOp::kSum;
};

// Why a rank takes part no more.
struct Farewell {
  uint64_t chunks = 0;       // data messages that it has sent to the receiver of this notice
  uint64_t collectives = 0;  // so many, counted from the first, were complete on it
  int32_t culprit = -1;
  ErrorCode code = ErrorCode::kCommAborted;
  std::array<char, 256> reason{};
};

// A control message, cut after what it holds.
struct Notice {
  NoticeKind kind = NoticeKind::kAnnounce;
  Identity identity;
  Announcement announcement;
  union {
    Farewell farewell;
    std::array<std::byte, kInlineBytes> payload;
  };

  Notice() : payload{} {}
};

// Precedes the bytes of a data message.
struct ChunkHeader {
  uint64_t number = 0;
  int64_t offset = 0;
  int64_t bytes = 0;
  Channel channel = Channel::kCollective;  // the receiver's
  uint8_t round = 0;
};

}  // namespace conclave::inline v0::comm
