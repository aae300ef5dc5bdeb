#include "comm/nccl/join_words.h"

#include "comm/deadline.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <chrono>

namespace conclave::inline v0::comm {
namespace {

constexpr const char* kPhase = "connect";

int32_t number(size_t rank) { return static_cast<int32_t>(rank); }

}  // namespace

template <class Body>
void JoinWords::for_each_peer(const Body& body) {
  for (size_t peer = 0; peer < heard_.size(); ++peer) {
    if (number(peer) != host_.rank()) body(peer);
  }
}

JoinWords::JoinWords(Communicator& host)
    : host_(host), words_(static_cast<size_t>(host.size())), heard_(words_.size()) {
  for_each_peer([&](size_t peer) { heard_[peer] = host_.begin_recv(number(peer), word_of(peer)); });
}

void JoinWords::look() {
  for_each_peer([&](size_t peer) { static_cast<void>(host_.test(heard_[peer], kPhase)); });
}

void JoinWords::meet(JoinWord mine, std::chrono::nanoseconds deadline) {
  const auto until = time_after(deadline);
  const auto own = static_cast<size_t>(host_.rank());
  words_[own] = static_cast<std::byte>(mine);
  std::vector<CommHandle> said(heard_.size());
  for_each_peer([&](size_t peer) { said[peer] = host_.begin_send(number(peer), word_of(own)); });
  for_each_peer([&](size_t peer) {
    host_.wait(said[peer], time_until(until), kPhase);
    host_.wait(heard_[peer], time_until(until), kPhase);
  });
  for_each_peer([&](size_t peer) {
    if (words_[peer] == static_cast<std::byte>(JoinWord::kIsThrough)) return;
    throw CommError(ErrorCode::kCommTimeout, number(peer), kPhase,
                    fmt::format("NCCL did not connect rank {} in time", peer));
  });
}

}  // namespace conclave::inline v0::comm
