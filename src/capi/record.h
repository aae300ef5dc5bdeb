// Recorders and replays of routing as handles, and keys of tokens as the library has them.
#pragma once

#include "capi/handles.h"
#include "capi/structs.h"

#include "conclave/c/record.h"
#include "conclave/routing_record.h"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace conclave::inline v0::capi {

// More tokens than one call can have rows for in memory.
inline constexpr size_t kMostKeys = size_t{1} << 40;

// Throw Error(kNullPointer, kMisaligned, kInvalidArgument) naming the field.
std::vector<RecordedLayer> recorded_layers_of(const int64_t* layers,
                                              const conclave_spec* const* specs, size_t count);
RecorderOptions recorder_options_of(const conclave_recorder_options* options);
std::vector<TokenKey> keys_of(const conclave_token_key* tokens, size_t count);

// Serves recorders of host and device. Each pointer may be null, and none is written to on failure.
template <class Recorder>
void tell_counts(const Recorder& from, int64_t layer, int64_t* recorded, int64_t* dropped) {
  check_aligned("recorded", recorded, alignof(int64_t));
  check_aligned("dropped", dropped, alignof(int64_t));
  const int64_t given = from.recorded_tokens(layer);
  const int64_t gone = from.dropped_tokens(layer);
  if (recorded != nullptr) *recorded = given;
  if (dropped != nullptr) *dropped = gone;
}

}  // namespace conclave::inline v0::capi

struct conclave_recorder {
  conclave::RoutingRecorder recorder;
};

struct conclave_replay {
  conclave::RoutingReplay replay;
};
