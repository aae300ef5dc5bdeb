// Handles of the interface share what they need of others, so that callers may end them in any
// order.
#pragma once

#include "capi/hooks.h"

#include "conclave/c.h"
#include "conclave/checkpoint.h"
#include "conclave/comm.h"
#include "conclave/context.h"
#include "conclave/layer.h"
#include "conclave/lora_checkpoint.h"
#include "conclave/spec.h"
#include "conclave/token_router.h"
#include "conclave/weights.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

namespace conclave::inline v0::capi {

// Hooks and communicators live as long as the context that points at them.
struct ContextState {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<Communicator> tensor_communicator;
  std::optional<CExecutor> executor;
  std::optional<CHostAllocator> host_allocator;
  std::optional<CDeviceAllocator> device_allocator;
  std::optional<CLog> log;
  std::optional<Context> context;
};

struct FeedState {
  explicit FeedState(CheckpointFeed made) : feed(std::move(made)) {}

  CheckpointFeed feed;
  // The layers that have sources, which must be gone before a layer is released.
  std::vector<std::pair<int64_t, std::weak_ptr<const WeightSource>>> sources;
};

using SharedSource = std::shared_ptr<const WeightSource>;

// A refit replaces a source for some MLPs of a layer, and leaves it to the others.
struct KeptSource {
  SharedSource source;
  uint32_t mlps = ~uint32_t{0};  // a bit for each WeightMlp that it may have the weights of
};

// Sources whose memory the weights of a layer lie in; layers that share weights share them.
struct KeptSources {
  std::vector<KeptSource> sources;
};

// Hands a new handle to the caller, and leaves *out as it is where making it failed.
template <class Handle, class... Values>
void hand_out(Handle** out, Values&&... values) {
  *out = new Handle{std::forward<Values>(values)...};
}

}  // namespace conclave::inline v0::capi

struct conclave_context {
  std::shared_ptr<conclave::capi::ContextState> state;
};

struct conclave_communicator {
  std::shared_ptr<conclave::Communicator> communicator;
};

struct conclave_spec {
  conclave::MoeSpec spec;
};

struct conclave_checkpoint {
  std::shared_ptr<const conclave::Checkpoint> checkpoint;
};

struct conclave_feed {
  std::shared_ptr<conclave::capi::FeedState> state;
};

struct conclave_source {
  std::shared_ptr<const conclave::WeightSource> source;
};

struct conclave_layer {
  std::shared_ptr<conclave::capi::ContextState> context;
  std::shared_ptr<conclave::capi::KeptSources> kept;
  conclave::MoeLayer layer;
};

struct conclave_workspace {
  std::shared_ptr<conclave::capi::ContextState> context;
  conclave::Workspace workspace;
};

struct conclave_lora_checkpoint {
  conclave::LoraCheckpoint checkpoint;
};

struct conclave_router {
  std::shared_ptr<conclave::capi::ContextState> context;
  conclave::TokenRouter router;
};
