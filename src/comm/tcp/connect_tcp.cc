#include "comm/tcp/connect_tcp.h"

#include "comm/deadline.h"
#include "comm/message/message_communicator.h"
#include "comm/tcp/exchange.h"
#include "comm/tcp/line_verdict.h"
#include "comm/tcp/link.h"
#include "comm/tcp/meeting.h"
#include "comm/tcp/tcp_port.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string_view>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::string_view kPhase = "connect";
constexpr std::string_view kCpu = "cpu";
// Precedes a rank's place: whoever says something else speaks of another meeting.
constexpr std::string_view kGreeting = "conclave tcp 2";

// Whether the ranks are all on one network of one host.
Reach reach_of(const Texts& places) {
  for (size_t rank = 0; rank < places.size(); ++rank) {
    if (places[rank].starts_with(kGreeting)) continue;
    throw CommError(ErrorCode::kCommMismatch, static_cast<int32_t>(rank), std::string(kPhase),
                    fmt::format("rank {} has another version of this library", rank));
  }
  const bool together =
      std::all_of(places.begin(), places.end(), [&](const auto& p) { return p == places[0]; });
  return together && !places[0].ends_with("unknown") ? Reach::kThisHost : Reach::kAnyHost;
}

std::vector<Sockets> join(const ConnectOptions& options, int32_t lanes, Clock::time_point until) {
  const Texts places = exchange_texts(options, fmt::format("{} {}", kGreeting, network_place()));
  const Reach reach = reach_of(places);
  const Listener listener = listen_for_ranks(reach);
  const Card mine{.token = make_token(), .port = listener.port, .addresses = own_addresses(reach)};
  std::vector<Card> cards;
  for (const std::string& text : exchange_texts(options, to_text(mine))) {
    cards.push_back(card_of(text, static_cast<int32_t>(cards.size())));
  }
  return meet_all(listener, cards, options.rank, lanes, until);
}

// A rank has none to itself.
template <class Connection>
std::vector<Connection> connections_of(Sockets sockets) {
  std::vector<Connection> connections;
  for (Socket& socket : sockets) {
    connections.push_back(socket.is_open() ? Connection(std::move(socket)) : Connection());
  }
  return connections;
}

}  // namespace

std::shared_ptr<VerdictPlace> connect_lines(const ConnectOptions& options) {
  std::vector<Sockets> met = join(options, 1, time_after(options.timeout));
  return std::make_shared<Lines>(connections_of<Line>(std::move(met.front())));
}

Support tcp_supports(const ConnectOptions& options) {
  if (!options.device.empty() && options.device != kCpu) {
    return Support::no("it carries host memory, not that of " + options.device);
  }
  if (options.group >= 0) {
    return Support::no("no launcher gives its ranks, so that there are none to split");
  }
  if (options.size > 1 && !options.exchange && options.bootstrap == nullptr) {
    return Support::no("its ranks meet over `exchange` or `bootstrap`, and neither is given");
  }
  return Support::yes();
}

std::unique_ptr<Communicator> connect_tcp(const ConnectOptions& options) {
  const int32_t rank = std::max(options.rank, 0);
  std::unique_ptr<MessageCommunicator> communicator;
  try {
    std::vector<Sockets> met(2);
    for (Sockets& lane : met) lane.resize(1);
    if (options.size > 1) met = join(options, 2, time_after(options.timeout));
    auto port = std::make_unique<TcpPort>(rank, connections_of<Link>(std::move(met[0])));
    auto lines = std::make_shared<Lines>(connections_of<Line>(std::move(met[1])));
    communicator =
        std::make_unique<MessageCommunicator>(std::move(port), options.timeout, std::move(lines));
  } catch (const PortFailure& failure) {
    throw CommError(ErrorCode::kCommPeerLost, failure.peer(), std::string(kPhase), failure.what());
  }
  communicator->meet();
  return communicator;
}

std::vector<std::string> tcp_launch(int32_t) {
  throw Error(ErrorCode::kUnsupported,
              {.what = "no launcher starts ranks of tcp",
               .hint = "start the processes, and let them connect over an exchange of texts"});
}

}  // namespace conclave::inline v0::comm
