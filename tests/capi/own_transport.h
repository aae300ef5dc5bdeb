// A transport in functions of C, over a communicator of C++ that does the work.
#pragma once

#include "capi/handles.h"

#include "conclave/comm.h"
#include "conclave/error.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace conclave::testing {

// One rank. The table's `release` deletes it.
struct OwnTransport {
  std::unique_ptr<Communicator> ranks;
  std::atomic<int>* released = nullptr;
  std::map<uint64_t, CommHandle> under_way = {};
  std::string reason = {};
  std::vector<void*> blocks = {};
  conclave_own_communicator table = {};
  conclave_own_communicator of_left = {};

  OwnTransport(std::unique_ptr<Communicator> given, std::atomic<int>* counter)
      : ranks(std::move(given)), released(counter), table(table_of(*this)) {}

  template <class Body>
  conclave_status answer(conclave_comm_failure* failure, Body&& body) {
    try {
      body();
      return CONCLAVE_OK;
    } catch (const CommError& error) {
      failure->peer = error.peer();
      return say(failure, error);
    } catch (const Error& error) {
      return say(failure, error);
    }
  }
  conclave_status say(conclave_comm_failure* failure, const Error& error) {
    reason = error.detail().what;
    failure->reason = reason.c_str();
    return static_cast<conclave_status>(error.code());
  }

  static OwnTransport& self(void* user) { return *static_cast<OwnTransport*>(user); }

  static CommOperation operation_of(const conclave_comm_operation& from, size_t ranks) {
    const auto bytes = [](void* data, size_t count) {
      return std::span(static_cast<std::byte*>(data), count);
    };
    CommOperation to{
        .kind = static_cast<CommKind>(from.kind),
        .send = std::span<const std::byte>(bytes(const_cast<void*>(from.send), from.send_bytes)),
        .recv = bytes(from.recv, from.recv_bytes),
        .reduce = static_cast<ReduceOp>(from.reduce),
        .peer = from.peer,
        .in_background = from.in_background == 1};
    if (from.dtype != 0) to.dtype = static_cast<DType>(from.dtype - 1);
    if (from.kind != CONCLAVE_COMM_KIND_ALL_TO_ALL_V) return to;
    to.send = {};
    to.recv = {};
    to.exchange = {.send = static_cast<const std::byte*>(from.send),
                   .send_bytes = {from.send_counts, ranks},
                   .send_offsets = {from.send_offsets, ranks},
                   .recv = static_cast<std::byte*>(from.recv),
                   .recv_bytes = {from.recv_counts, ranks},
                   .recv_offsets = {from.recv_offsets, ranks}};
    return to;
  }

  static conclave_status start(void* user, const conclave_comm_operation* operation,
                               conclave_comm_failure* failure) {
    OwnTransport& own = self(user);
    return own.answer(failure, [&] {
      const auto count = static_cast<size_t>(own.ranks->size());
      own.under_way[operation->number] = own.ranks->begin(operation_of(*operation, count));
    });
  }
  static conclave_status wait(void* user, uint64_t number, int64_t deadline_ns, const char* phase,
                              conclave_comm_failure* failure) {
    OwnTransport& own = self(user);
    return own.answer(failure, [&] {
      own.ranks->wait(own.under_way.at(number), std::chrono::nanoseconds(deadline_ns), phase);
      own.under_way.erase(number);
    });
  }
  static conclave_status test(void* user, uint64_t number, int32_t* complete, const char* phase,
                              conclave_comm_failure* failure) {
    OwnTransport& own = self(user);
    return own.answer(
        failure, [&] { *complete = own.ranks->test(own.under_way.at(number), phase) ? 1 : 0; });
  }
  static conclave_status check(void* user, const char* phase, conclave_comm_failure* failure) {
    return self(user).answer(failure, [&] { self(user).ranks->check(phase); });
  }
  static void abort(void* user, const char* reason) { self(user).ranks->abort(reason); }
  static conclave_status shrink(void* user, int64_t deadline_ns, const char* phase,
                                const conclave_own_communicator** left, int32_t* old_ranks,
                                conclave_comm_failure* failure) {
    OwnTransport& own = self(user);
    return own.answer(failure, [&] {
      Survivors made = own.ranks->shrink(std::chrono::nanoseconds(deadline_ns), phase);
      std::ranges::copy(made.old_ranks, old_ranks);
      own.of_left = (new OwnTransport(std::move(made.communicator), own.released))->table;
      *left = &own.of_left;
    });
  }
  // Blocks that nobody shares: what is tested is how they are handed over.
  static conclave_status open_window(void* user, size_t bytes, conclave_memory, int64_t,
                                     const char*, conclave_peer_window* window,
                                     conclave_comm_failure*) {
    OwnTransport& own = self(user);
    auto* const memory = new std::vector<std::byte>(bytes * static_cast<size_t>(own.table.size));
    own.blocks.clear();
    for (int32_t rank = 0; rank < own.table.size; ++rank) {
      own.blocks.push_back(memory->data() + bytes * static_cast<size_t>(rank));
    }
    window->window = memory;
    window->blocks = own.blocks.data();
    return CONCLAVE_OK;
  }
  static void close_window(void*, void* window) {
    delete static_cast<std::vector<std::byte>*>(window);
  }
  static void release(void* user) {
    if (self(user).released != nullptr) ++*self(user).released;
    delete &self(user);
  }

  static conclave_own_communicator table_of(OwnTransport& own) {
    auto table = sized<conclave_own_communicator>();
    table.name = "own";
    table.user = &own;
    table.rank = own.ranks->rank();
    table.size = own.ranks->size();
    table.timeout_ms =
        std::chrono::duration_cast<std::chrono::milliseconds>(own.ranks->timeout()).count();
    table.flags = CONCLAVE_OWN_COMMUNICATOR_OVERLAP;
    table.start = &start;
    table.wait = &wait;
    table.test = &test;
    table.abort = &abort;
    table.check = &check;
    table.shrink = &shrink;
    table.open_window = &open_window;
    table.close_window = &close_window;
    table.release = &release;
    return table;
  }
};

// Handles of ranks that are threads, each over such a transport. `change` sees each table before.
template <class Change>
std::vector<Handle<conclave_communicator>> own_group(int32_t ranks, std::atomic<int>* released,
                                                     std::chrono::milliseconds timeout,
                                                     const Change& change) {
  std::vector<Handle<conclave_communicator>> group;
  for (auto& rank : make_local_group({.num_ranks = ranks, .timeout = timeout})) {
    auto* const own = new OwnTransport(std::move(rank), released);
    conclave_own_communicator table = own->table;
    change(table);
    group.push_back(make<conclave_communicator>(&conclave_communicator_from_own, &table));
  }
  return group;
}
inline std::vector<Handle<conclave_communicator>> own_group(int32_t ranks,
                                                            std::atomic<int>* released = nullptr) {
  return own_group(ranks, released, std::chrono::seconds(20), [](conclave_own_communicator&) {});
}

}  // namespace conclave::testing
