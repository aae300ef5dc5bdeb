// Three things arrive: notices of peers, their side of an operation, and its bytes.
#include "comm/message/message_communicator.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

uint64_t chunks_of(int64_t bytes) {
  return static_cast<uint64_t>((bytes + kChunkBytes - 1) / kChunkBytes);
}

}  // namespace

void MessageCommunicator::read_notices() {
  while (const auto received = port_->take_notice()) read(received->peer, *received->notice);
}

void MessageCommunicator::read(int32_t from, const Notice& notice) {
  Peer& sender = peer(from);
  switch (notice.kind) {
    case NoticeKind::kHello:
      sender.met = true;
      sender.identity = notice.identity;
      return;
    case NoticeKind::kReady:
      sender.ready = true;
      sender.identity = notice.identity;
      return;
    case NoticeKind::kPresent:
      sender.present = true;
      return;
    case NoticeKind::kAnnounce: {
      const auto free = std::find_if(sender.arrivals.begin(), sender.arrivals.end(),
                                     [](const Arrival& a) { return !a.waiting; });
      Arrival& arrival = free == sender.arrivals.end() ? sender.arrivals.emplace_back() : *free;
      arrival.waiting = true;
      arrival.notice = notice;
      return;
    }
    case NoticeKind::kAborted:
      if (aborted_by_ >= 0) return;
      aborted_by_ = is_rank(notice.farewell.culprit) ? notice.farewell.culprit : from;
      abort_reason_ = notice.farewell.reason;
      return;
    case NoticeKind::kGone:
    case NoticeKind::kFailed:
      sender.left = sender.left || notice.kind == NoticeKind::kGone;
      // Peers report why it failed, not that it left afterwards.
      if (sender.standing != Standing::kActive) return;
      sender.standing = notice.kind == NoticeKind::kGone ? Standing::kGone : Standing::kFailed;
      sender.farewell = notice.farewell;
      return;
  }
}

void MessageCommunicator::read_chunks(int32_t from) {
  while (const auto chunk = port_->take_chunk(from)) {
    const ChunkHeader& header = chunk->header;
    const auto mine =
        std::find_if(operations_.begin(), operations_.end(), [&](MessageOperation& o) {
          return o.in_use() && o.channel == header.channel && o.number == header.number &&
                 (o.peer == from || is_collective(o.kind));
        });
    // A chunk comes only after both sides have agreed, so that its place is known.
    if (mine == operations_.end() || header.round >= kRounds) {
      throw PortFailure(fmt::format("rank {} sent bytes that nobody waits for", from), from);
    }
    Lane& lane = mine->parts[static_cast<size_t>(from)].lanes[header.round];
    if (header.bytes < 0 || header.offset != lane.received ||
        header.bytes > lane.in_bytes - lane.received) {
      throw PortFailure(fmt::format("rank {} sent more bytes than it offered", from), from);
    }
    std::copy_n(chunk->data, header.bytes, lane.to + header.offset);
    lane.received += header.bytes;
  }
}

void MessageCommunicator::move(MessageOperation& operation, std::string_view phase) {
  for (int32_t with = 0; with < size(); ++with) {
    PeerPart& part = operation.parts[static_cast<size_t>(with)];
    if (!part.involved) continue;
    if (!part.matched) match(operation, with, phase);
    if (part.matched) send_lanes(operation, with);
  }
  if (!can_reduce(operation)) return;
  add_up(operation);
  for (int32_t to = 0; to < size(); ++to) send_lanes(operation, to);
}

void MessageCommunicator::match(MessageOperation& operation, int32_t with, std::string_view phase) {
  PeerPart& part = operation.parts[static_cast<size_t>(with)];
  const auto agree = [&](const Claim& theirs) {
    auto why = disagreement(part.claim, rank(), theirs, with);
    if (!why) why = disagreement(theirs, with, part.claim, rank());
    if (why) fail(ErrorCode::kCommMismatch, with, phase, std::move(*why));
    part.matched = true;
  };
  if (with == rank() && is_collective(operation.kind)) return agree(part.claim);
  // A rank that comes late, after its peers have given up, has no result either. Where they gave up
  // because ranks disagree, it compares all the same: who disagrees with it is to blame.
  const bool gave_up =
      peer(with).standing == Standing::kFailed && !has_finished(peer(with), operation);
  if (gave_up && peer(with).farewell.code != ErrorCode::kCommMismatch) return;
  for (Arrival& arrival : peer(with).arrivals) {
    const Announcement& theirs = arrival.notice.announcement;
    if (!arrival.waiting || theirs.number != operation.number ||
        theirs.channel != partner_channel(operation.channel)) {
      continue;
    }
    arrival.waiting = gave_up;
    agree({.kind = theirs.kind,
           .dtype = theirs.dtype,
           .reduce = theirs.reduce,
           .offered = theirs.offered,
           .expected = theirs.expected});
    if (gave_up) {
      part.matched = false;
      return;
    }
    Lane& first = part.lanes[0];
    if (is_inline(first.in_bytes)) {
      std::copy_n(arrival.notice.payload.begin(), first.in_bytes, first.to);
      first.received = first.in_bytes;
    } else {
      port_->expect_chunks(with, chunks_of(first.in_bytes));
    }
    if (is_inline(first.out_bytes)) first.sent = first.out_bytes;
    port_->expect_chunks(with, chunks_of(part.lanes[1].in_bytes));
    return;
  }
}

void MessageCommunicator::send_lanes(MessageOperation& operation, int32_t to) {
  auto& lanes = operation.parts[static_cast<size_t>(to)].lanes;
  for (size_t round = 0; round < kRounds; ++round) {
    if (round > 0 && !operation.reduced) return;
    Lane& lane = lanes[round];
    while (lane.sent < lane.out_bytes) {
      const ChunkHeader header{.number = operation.number,
                               .offset = lane.sent,
                               .bytes = std::min(kChunkBytes, lane.out_bytes - lane.sent),
                               .channel = partner_channel(operation.channel),
                               .round = static_cast<uint8_t>(round)};
      if (!port_->send_chunk(to, header, lane.from + lane.sent)) return;
      lane.sent += header.bytes;
    }
  }
}

bool MessageCommunicator::is_over(const MessageOperation& operation) const {
  if (!is_complete(operation)) return false;
  for (int32_t to = 0; to < size(); ++to) {
    if (part_of(operation, to).involved && !port_->has_handed_over(to)) return false;
  }
  return true;
}

void MessageCommunicator::end_operations() {
  finished_ = collectives_;
  for (MessageOperation& operation : operations_) {
    if (operation.in_use() && is_collective(operation.kind) && !is_complete(operation)) {
      finished_ = std::min(finished_, operation.number);
    }
    operation.sequence = 0;
  }
}

}  // namespace conclave::inline v0::comm
