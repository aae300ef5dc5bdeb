#include "comm/tcp/socket.h"

#include "comm/message/message_port.h"

#include <fmt/format.h>

#include <arpa/inet.h>
#include <array>
#include <cerrno>
#include <cstring>
#include <ifaddrs.h>
#include <linux/sockios.h>
#include <memory>
#include <net/if.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

constexpr int kBacklog = 1024;
constexpr int kKind = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;

// An address of either family, and how much of it counts.
struct Endpoint {
  sockaddr_storage storage{};
  socklen_t length = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

Endpoint ipv4(in_addr address, uint16_t port) {
  Endpoint endpoint;
  sockaddr_in value{};
  value.sin_family = AF_INET;
  value.sin_port = htons(port);
  value.sin_addr = address;
  std::memcpy(&endpoint.storage, &value, sizeof value);
  endpoint.length = sizeof value;
  return endpoint;
}

Endpoint ipv6(in6_addr address, uint16_t port) {
  Endpoint endpoint;
  sockaddr_in6 value{};
  value.sin6_family = AF_INET6;
  value.sin6_port = htons(port);
  value.sin6_addr = address;
  std::memcpy(&endpoint.storage, &value, sizeof value);
  endpoint.length = sizeof value;
  return endpoint;
}

std::optional<Endpoint> parse(const std::string& address, uint16_t port) {
  in_addr four{};
  if (::inet_pton(AF_INET, address.c_str(), &four) == 1) return ipv4(four, port);
  in6_addr six{};
  if (::inet_pton(AF_INET6, address.c_str(), &six) == 1) return ipv6(six, port);
  return std::nullopt;
}

uint16_t port_of(const Socket& socket) {
  Endpoint endpoint;
  endpoint.length = sizeof endpoint.storage;
  if (::getsockname(socket.fd(), endpoint.get(), &endpoint.length) != 0) return 0;
  in_port_t port = 0;
  if (endpoint.storage.ss_family == AF_INET6) {
    sockaddr_in6 value{};
    std::memcpy(&value, &endpoint.storage, sizeof value);
    port = value.sin6_port;
  } else {
    sockaddr_in value{};
    std::memcpy(&value, &endpoint.storage, sizeof value);
    port = value.sin_port;
  }
  return ntohs(port);
}

// Not open where this machine lacks the family.
Socket listen_at(Endpoint endpoint) {
  Socket socket(::socket(endpoint.storage.ss_family, kKind, 0));
  if (!socket.is_open()) return socket;
  if (endpoint.storage.ss_family == AF_INET6) {
    const int only = 0;  // IPv4 too
    ::setsockopt(socket.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &only, sizeof only);
  }
  if (::bind(socket.fd(), endpoint.get(), endpoint.length) != 0) return Socket();
  if (::listen(socket.fd(), kBacklog) != 0) return Socket();
  return socket;
}

std::optional<std::string> text_of(const ifaddrs& entry) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (entry.ifa_addr->sa_family == AF_INET) {
    sockaddr_in value{};
    std::memcpy(&value, entry.ifa_addr, sizeof value);
    if (::inet_ntop(AF_INET, &value.sin_addr, text.data(), text.size()) == nullptr) return {};
    return std::string(text.data());
  }
  if (entry.ifa_addr->sa_family == AF_INET6) {
    sockaddr_in6 value{};
    std::memcpy(&value, entry.ifa_addr, sizeof value);
    // An address that holds on one link only means nothing to another host.
    if (IN6_IS_ADDR_LINKLOCAL(&value.sin6_addr)) return {};
    if (::inet_ntop(AF_INET6, &value.sin6_addr, text.data(), text.size()) == nullptr) return {};
    return std::string(text.data());
  }
  return {};
}

}  // namespace

Socket::Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  if (this == &other) return *this;
  close();
  fd_ = std::exchange(other.fd_, -1);
  return *this;
}

Socket::~Socket() { close(); }

void Socket::close() noexcept {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Listener listen_for_ranks(Reach reach) {
  const bool local = reach == Reach::kThisHost;
  const in_addr four{.s_addr = htonl(local ? INADDR_LOOPBACK : INADDR_ANY)};
  const Endpoint of_four = ipv4(four, 0);
  const Endpoint of_six = ipv6(local ? in6addr_loopback : in6addr_any, 0);
  // A socket of IPv6 takes both families, but for the loopback.
  Listener listener{.socket = listen_at(local ? of_four : of_six)};
  if (!listener.socket.is_open()) listener.socket = listen_at(local ? of_six : of_four);
  if (!listener.socket.is_open()) {
    throw PortFailure(fmt::format("cannot listen for other ranks: {}", std::strerror(errno)), -1);
  }
  listener.port = port_of(listener.socket);
  return listener;
}

std::optional<Socket> accept_one(const Listener& listener) {
  const int fd = ::accept4(listener.socket.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) return std::nullopt;
  return Socket(fd);
}

std::vector<std::string> own_addresses(Reach reach) {
  if (reach == Reach::kThisHost) return {"127.0.0.1", "::1"};
  std::vector<std::string> addresses;
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return addresses;
  const std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> owner(list, ::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    if ((entry->ifa_flags & IFF_LOOPBACK) != 0) continue;
    if (auto text = text_of(*entry)) addresses.push_back(std::move(*text));
  }
  // A machine without a network may have several names, and reaches itself.
  if (addresses.empty()) return own_addresses(Reach::kThisHost);
  return addresses;
}

std::optional<Socket> begin_connect(const std::string& address, uint16_t port) {
  auto endpoint = parse(address, port);
  if (!endpoint) return std::nullopt;
  Socket socket(::socket(endpoint->storage.ss_family, kKind, 0));
  if (!socket.is_open()) return std::nullopt;
  if (::connect(socket.fd(), endpoint->get(), endpoint->length) != 0 && errno != EINPROGRESS) {
    return std::nullopt;
  }
  return socket;
}

int connect_error(const Socket& socket) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

void set_options(const Socket& socket) {
  const int on = 1;
  ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

void confirm_at_once(const Socket& socket) {
  const int on = 1;
  ::setsockopt(socket.fd(), IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on);
}

int64_t read_some(int fd, std::span<std::byte> to) {
  ssize_t got = 0;
  do {
    got = ::recv(fd, to.data(), to.size(), MSG_DONTWAIT);
  } while (got < 0 && errno == EINTR);
  return got;
}

int64_t write_some(int fd, std::span<const std::byte> first, std::span<const std::byte> second) {
  std::array<iovec, 2> parts{iovec{const_cast<std::byte*>(first.data()), first.size()},
                             iovec{const_cast<std::byte*>(second.data()), second.size()}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  ssize_t put = 0;
  do {
    put = ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (put < 0 && errno == EINTR);
  return put;
}

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

int64_t unconfirmed_bytes(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

}  // namespace conclave::inline v0::comm
