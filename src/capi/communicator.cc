#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/json_text.h"
#include "capi/structs.h"
#include "capi/values.h"
#include "core/max_ranks.h"

#include "conclave/error.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::inline v0::capi {
namespace {

Communicator& communicator_of(conclave_communicator* handle) {
  return *required(handle, "communicator").communicator;
}

std::string_view phase_of(const char* phase, std::string_view unset) {
  return phase == nullptr ? unset : std::string_view(phase);
}

// The texts of all ranks, by the caller's function.
std::vector<std::string> exchanged(const conclave_connect_options& given, const std::string& mine) {
  std::vector<const char*> all(static_cast<size_t>(given.size), nullptr);
  const conclave_status status =
      given.exchange(given.exchange_user, mine.c_str(), given.size, all.data());
  if (status != CONCLAVE_OK) {
    throw Error(find_code(status).value_or(ErrorCode::kCommAborted),
                {.what = "the exchange of texts between ranks failed",
                 .tensor = "options.exchange",
                 .found = "status " + std::to_string(status)});
  }
  std::vector<std::string> texts;
  for (const char* text : all) texts.emplace_back(&required(text, "options.exchange: all[]"));
  return texts;
}

ConnectOptions connect_options_of(const conclave_connect_options& given) {
  check_flags("options.flags", given.flags, CONCLAVE_CONNECT_HAS_GROUP);
  check_choice("options.size", given.size, kMaxRanks);
  ConnectOptions options{.rank = given.rank,
                         .size = given.size,
                         .meeting_point = text_of(given.meeting_point),
                         .device = text_of(given.device),
                         .timeout = timeout_of("options.timeout_ms", given.timeout_ms)};
  if (given.size == 0 && given.rank == 0) options.rank = -1;
  if ((given.flags & CONCLAVE_CONNECT_HAS_GROUP) != 0) {
    check_choice("options.group", given.group, std::numeric_limits<int32_t>::max());
    options.group = given.group;
  }
  if (given.bootstrap != nullptr) options.bootstrap = given.bootstrap->communicator.get();
  if (given.exchange == nullptr) return options;
  if (given.size < 1) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "an exchange needs the number of ranks",
                                              .tensor = "options.size",
                                              .found = std::to_string(given.size),
                                              .limit = "at least 1"});
  }
  options.exchange = [given](const std::string& mine) { return exchanged(given, mine); };
  return options;
}

template <class Byte, class Void>
std::span<Byte> bytes_at(Void* data, size_t bytes, const char* name) {
  if (bytes > 0 && data == nullptr) throw_null(name);
  return {static_cast<Byte*>(data), bytes};
}

size_t product(size_t count, size_t factor, const char* name) {
  size_t bytes = 0;
  if (!__builtin_mul_overflow(count, factor, &bytes) &&
      bytes <= static_cast<size_t>(std::numeric_limits<int64_t>::max())) {
    return bytes;
  }
  throw Error(
      ErrorCode::kSizeOverflow,
      {.what = "a size does not fit 63 bits", .tensor = name, .found = std::to_string(count)});
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_local_group(int32_t num_ranks, int64_t timeout_ms,
                                     conclave_communicator** out) noexcept {
  return capi::guarded([&] {
    capi::required(out, "out");
    capi::check_choice("num_ranks", num_ranks, conclave::kMaxRanks);
    auto ranks = conclave::make_local_group(
        {.num_ranks = num_ranks, .timeout = capi::timeout_of("timeout_ms", timeout_ms)});
    std::vector<std::unique_ptr<conclave_communicator>> handles;
    for (auto& rank : ranks) {
      handles.push_back(std::make_unique<conclave_communicator>(std::move(rank)));
    }
    std::ranges::transform(handles, out, [](auto& handle) { return handle.release(); });
  });
}

conclave_status conclave_connect(const char* transport, const conclave_connect_options* options,
                                 conclave_communicator** out) noexcept {
  return capi::guarded([&] {
    const char* const name = &capi::required(transport, "transport");
    capi::required(out, "out");
    const conclave_connect_options given = capi::take_optional(options, "options");
    capi::hand_out(out, conclave::connect(name, capi::connect_options_of(given)));
  });
}

void conclave_communicator_destroy(conclave_communicator* communicator) noexcept {
  delete communicator;
}

conclave_status conclave_communicator_get_info(const conclave_communicator* communicator,
                                               conclave_communicator_info* info) noexcept {
  return capi::guarded([&] {
    const conclave::Communicator& ranks =
        *capi::required(communicator, "communicator").communicator;
    const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(ranks.timeout());
    // Names of transports are literals.
    capi::fill(capi::fillable(info, "info"), {.struct_size = 0,
                                              .rank = ranks.rank(),
                                              .size = ranks.size(),
                                              .timeout_ms = timeout.count(),
                                              .transport = ranks.name().data()});
  });
}

conclave_status conclave_communicator_barrier(conclave_communicator* communicator,
                                              const char* phase) noexcept {
  return capi::guarded(
      [&] { capi::communicator_of(communicator).barrier(capi::phase_of(phase, "barrier")); });
}

conclave_status conclave_communicator_all_gather(conclave_communicator* communicator,
                                                 const void* send, void* recv, size_t bytes,
                                                 const char* phase) noexcept {
  return capi::guarded([&] {
    conclave::Communicator& ranks = capi::communicator_of(communicator);
    const size_t all = capi::product(bytes, static_cast<size_t>(ranks.size()), "bytes");
    ranks.all_gather(capi::bytes_at<const std::byte>(send, bytes, "send"),
                     capi::bytes_at<std::byte>(recv, all, "recv"),
                     capi::phase_of(phase, "all_gather"));
  });
}

conclave_status conclave_communicator_all_reduce(conclave_communicator* communicator,
                                                 const void* send, void* recv, size_t count,
                                                 conclave_dtype dtype, const char* phase) noexcept {
  return capi::guarded([&] {
    conclave::Communicator& ranks = capi::communicator_of(communicator);
    const conclave::DType type = capi::dtype_of("dtype", dtype);
    const auto element = static_cast<size_t>(conclave::byte_size(type));
    const size_t bytes = capi::product(count, element, "count");
    capi::check_aligned("send", send, element);
    capi::check_aligned("recv", recv, element);
    ranks.all_reduce(capi::bytes_at<const std::byte>(send, bytes, "send"),
                     capi::bytes_at<std::byte>(recv, bytes, "recv"), type, conclave::ReduceOp::kSum,
                     capi::phase_of(phase, "all_reduce"));
  });
}

conclave_status conclave_communicator_abort(conclave_communicator* communicator,
                                            const char* reason) noexcept {
  return capi::guarded([&] {
    capi::communicator_of(communicator)
        .abort(reason == nullptr ? "the application asked for it" : reason);
  });
}

conclave_status conclave_communicator_check(conclave_communicator* communicator) noexcept {
  return capi::guarded([&] { capi::communicator_of(communicator).check("check"); });
}

conclave_status conclave_survivors(conclave_communicator* failed, int64_t timeout_ms,
                                   conclave_communicator** out, int32_t* old_ranks) noexcept {
  return capi::guarded([&] {
    conclave::Communicator& ranks = capi::communicator_of(failed);
    capi::required(out, "out");
    capi::check_aligned("old_ranks", old_ranks, alignof(int32_t));
    conclave::Survivors left = conclave::survivors(
        ranks, {.deadline = capi::timeout_of("timeout_ms", timeout_ms, std::chrono::seconds(0))});
    capi::hand_out(out, std::move(left.communicator));
    if (old_ranks != nullptr) std::ranges::copy(left.old_ranks, old_ranks);
  });
}

conclave_status conclave_transports_json(char** json) noexcept {
  return capi::guarded([&] {
    char*& to = capi::required(json, "json");
    capi::Json rows = capi::Json::array();
    for (const conclave::TransportInfo& row : conclave::transports()) {
      rows.push_back({{"name", row.name},
                      {"usable", row.usable},
                      {"reason", row.reason},
                      {"meets_by_exchange", row.meets_by_exchange},
                      {"device_kind", row.device_kind}});
    }
    to = capi::copy_json(rows);
  });
}
