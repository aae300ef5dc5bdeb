#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/json_text.h"
#include "capi/structs.h"
#include "capi/values.h"

#include "conclave/device.h"

namespace conclave::inline v0::capi {
namespace {

std::shared_ptr<Communicator> held_ranks(const conclave_communicator* handle) {
  return handle == nullptr ? nullptr : handle->communicator;
}

template <class T>
T* address_of(std::optional<T>& hook) {
  return hook ? &*hook : nullptr;
}

std::shared_ptr<ContextState> make_context(const conclave_context_options& given) {
  check_flags("options.flags", given.flags,
              CONCLAVE_CONTEXT_PIN_THREADS | CONCLAVE_CONTEXT_FROM_ENVIRONMENT);
  auto state = std::make_shared<ContextState>();
  state->communicator = held_ranks(given.communicator);
  state->tensor_communicator = held_ranks(given.tensor_communicator);
  if (given.executor != nullptr) state->executor.emplace(take(given.executor, "executor"));
  if (given.host_allocator != nullptr) {
    state->host_allocator.emplace(take(given.host_allocator, "host_allocator"), "host_allocator");
  }
  if (given.device_allocator != nullptr) {
    state->device_allocator.emplace(take(given.device_allocator, "device_allocator"),
                                    "device_allocator");
  }
  if (given.log != nullptr) state->log.emplace(take(given.log, "log"));

  const ContextOptions options{.device = text_of(given.device),
                               .num_threads = given.num_threads,
                               .pin_threads = (given.flags & CONCLAVE_CONTEXT_PIN_THREADS) != 0,
                               .isa = text_of(given.isa),
                               .executor = address_of(state->executor),
                               .host_allocator = address_of(state->host_allocator),
                               .device_allocator = address_of(state->device_allocator),
                               .log = address_of(state->log),
                               .communicator = state->communicator.get(),
                               .tensor_communicator = state->tensor_communicator.get()};
  const bool reads_environment = (given.flags & CONCLAVE_CONTEXT_FROM_ENVIRONMENT) != 0;
  state->context.emplace(reads_environment ? Context::from_environment(options) : Context(options));
  return state;
}

}  // namespace
}  // namespace conclave::inline v0::capi

namespace capi = conclave::capi;

conclave_status conclave_context_create(const conclave_context_options* options,
                                        conclave_context** context) noexcept {
  return capi::guarded([&] {
    capi::required(context, "context");
    capi::hand_out(context, capi::make_context(capi::take_optional(options, "options")));
  });
}

void conclave_context_destroy(conclave_context* context) noexcept { delete context; }

conclave_status conclave_context_device(const conclave_context* context,
                                        const char** device) noexcept {
  return capi::guarded([&] {
    const capi::ContextState& state = *capi::required(context, "context").state;
    capi::required(device, "device") = state.context->device().c_str();
  });
}

conclave_status conclave_backends_json(char** json) noexcept {
  return capi::guarded([&] {
    char*& to = capi::required(json, "json");
    capi::Json rows = capi::Json::array();
    for (const conclave::BackendInfo& row : conclave::backends()) {
      rows.push_back({{"name", row.name}, {"usable", row.usable}, {"reason", row.reason}});
    }
    to = capi::copy_json(rows);
  });
}
