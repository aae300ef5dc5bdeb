#include "comm/tcp/connect_tcp.h"

#include "comm/deadline.h"
#include "comm/message/message_communicator.h"
#include "comm/tcp/exchange.h"
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
constexpr std::string_view kGreeting = "conclave tcp 1";

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

std::vector<Link> join(const ConnectOptions& options, Clock::time_point until) {
  const Texts places = exchange_texts(options, fmt::format("{} {}", kGreeting, network_place()));
  const Reach reach = reach_of(places);
  const Listener listener = listen_for_ranks(reach);
  const Card mine{.token = make_token(), .port = listener.port, .addresses = own_addresses(reach)};
  std::vector<Card> cards;
  for (const std::string& text : exchange_texts(options, to_text(mine))) {
    cards.push_back(card_of(text, static_cast<int32_t>(cards.size())));
  }
  return meet_all(listener, cards, options.rank, until);
}

}  // namespace

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
    std::vector<Link> links(1);
    if (options.size > 1) links = join(options, time_after(options.timeout));
    communicator = std::make_unique<MessageCommunicator>(
        std::make_unique<TcpPort>(rank, std::move(links)), options.timeout);
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
