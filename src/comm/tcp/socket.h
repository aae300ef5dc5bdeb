// Sockets of this process, none of which blocks: addresses, listening, connecting.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::comm {

// Owns a descriptor, which no program that is started gets.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept;
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();

  int fd() const noexcept { return fd_; }
  bool is_open() const noexcept { return fd_ >= 0; }
  void close() noexcept;

 private:
  int fd_ = -1;
};

struct Listener {
  Socket socket;
  uint16_t port = 0;
};
// Who may reach a listener: processes of this host's network, or everyone who has a way to it.
enum class Reach : uint8_t { kThisHost, kAnyHost };
// Throws PortFailure with the system's reason.
Listener listen_for_ranks(Reach reach);
// The next one who connects, if somebody has.
std::optional<Socket> accept_one(const Listener& listener);

// The addresses under which others may reach a listener of this reach: "127.0.0.1", "10.0.0.7",
// "2001:db8::7". Those of kAnyHost are those of all interfaces that are up.
std::vector<std::string> own_addresses(Reach reach);
// Begins to connect. Nothing where the address cannot even be tried.
std::optional<Socket> begin_connect(const std::string& address, uint16_t port);
// The errno of a connection that was begun and has become writable; 0: it is there.
int connect_error(const Socket& socket);
// Sends short messages at once.
void set_options(const Socket& socket);
// Tells the other side's system now of what has come, and not with the next message.
void confirm_at_once(const Socket& socket);

// Moves what can be moved now, without a signal where the other side is gone. -1 with errno.
int64_t read_some(int fd, std::span<std::byte> to);
int64_t write_some(int fd, std::span<const std::byte> first, std::span<const std::byte> second);
bool would_block(int error);

// Bytes that the other side's system has not confirmed yet; 0 where that is unknown.
int64_t unconfirmed_bytes(int fd);

}  // namespace conclave::inline v0::comm
