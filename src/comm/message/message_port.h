// How the messages of one rank reach its peers: what MessageCommunicator asks of a transport.
#pragma once

#include "comm/message/wire.h"

#include "conclave/error.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0::comm {

// A transport failed. Whoever knows the phase makes a CommError of it.
class PortFailure : public std::runtime_error {
 public:
  PortFailure(const std::string& what, int32_t peer) : std::runtime_error(what), peer_(peer) {}
  int32_t peer() const noexcept { return peer_; }

 private:
  int32_t peer_;  // -1: no rank in particular
};

struct ReceivedNotice {
  int32_t peer = -1;
  const Notice* notice = nullptr;  // valid until the next call of take_notice
};
struct ReceivedChunk {
  ChunkHeader header;
  const std::byte* data = nullptr;  // valid until the next message of that peer is taken
};

// How a rank leaves its group.
struct Leaving {
  bool orderly = true;           // no rank has failed
  bool rank_is_missing = false;  // some rank may never end as this one does
  int32_t staying = 0;           // ranks that have not left, this one among them
  // For which a peer may hold a wait before it hears that this rank has left.
  std::chrono::nanoseconds patience{0};
  // Nobody reads or writes here any more but ranks that are left out.
  bool has_gone_on = false;
};

// Messages between two ranks arrive in the order in which they were sent, notices and chunks each
// among themselves; a rank also sends to itself. All bytes pass through buffers of the port: memory
// of the caller is free when a wait has failed. Needs the lock of mutex() unless a call says
// otherwise; none blocks, and those that are not noexcept throw PortFailure.
class MessagePort {
 public:
  virtual ~MessagePort() = default;

  virtual std::string_view name() const noexcept = 0;
  virtual int32_t rank() const noexcept = 0;
  virtual int32_t size() const noexcept = 0;

  virtual std::mutex& mutex() noexcept = 0;
  // Whether the calling thread may use the port. Without the lock.
  virtual bool may_call() const noexcept = 0;
  // Throws Error with the reason why not. Without the lock.
  virtual void check_caller() const = 0;
  // True in a child of the process that opened the port: the messages are not the child's, and a
  // thread that it does not have may hold the lock.
  virtual bool is_inherited() const noexcept = 0;
  // Whether a thread of this library may use the port while the application does other work.
  virtual Support takes_background() const { return Support::yes(); }

  // Sends the notice and the first `payload_bytes` of its payload.
  virtual void post(int32_t peer, const Notice& notice, size_t payload_bytes) = 0;
  virtual std::optional<ReceivedNotice> take_notice() = 0;

  // False while the buffers for this peer are under way.
  virtual bool send_chunk(int32_t peer, const ChunkHeader& header, const std::byte* data) = 0;
  virtual uint64_t chunks_sent(int32_t peer) const noexcept = 0;
  // The peer will send so many more.
  virtual void expect_chunks(int32_t peer, uint64_t count) = 0;
  virtual std::optional<ReceivedChunk> take_chunk(int32_t peer) = 0;
  virtual uint64_t chunks_taken(int32_t peer) const noexcept = 0;
  // Nobody takes chunks any more: those that come before a notice may be forgotten.
  virtual void give_chunks_up() noexcept {}

  // True if what was sent to the peer gets there without further calls.
  virtual bool has_handed_over(int32_t) const noexcept { return true; }
  // True if the peer is known to be gone, and all that it sent has been taken.
  virtual bool is_cut_off(int32_t) const noexcept { return false; }
  // False if peers may be gone without showing it here.
  virtual bool shows_ends() const noexcept { return false; }
  // Waits a moment, for messages or for the `round`-th time in a row. Without the lock.
  virtual void rest(int64_t round) noexcept;

  // How many failures the ranks of this port have gone on after.
  virtual uint64_t epoch() const noexcept { return 0; }
  // Whether ranks that are left after a failure can have a port of their own. Without the lock.
  virtual Support supports_survivors() const;
  // The port of `ranks` of this one, ascending, this rank among them: late messages of this port
  // reach nobody there. For ports that support it.
  virtual std::unique_ptr<MessagePort> survivors(const std::vector<int32_t>& ranks);

  // Waits until what was sent has left this rank, but not longer.
  virtual void flush(std::chrono::nanoseconds deadline) noexcept = 0;
  // Ends the port, which gets itself to keep as long as it has to. Without the lock.
  virtual void retire(std::unique_ptr<MessagePort> self, const Leaving& leaving) noexcept = 0;
};

}  // namespace conclave::inline v0::comm
