// Recorded routing of layers on CUDA: rings in the device's memory, which forwards fill without
// anybody waiting, also in graphs. What is read out is a RoutingRecord as any other.
#pragma once

#include "conclave/context.h"
#include "conclave/routing_record.h"
#include "conclave/tensor.h"
#include "conclave/version.h"

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>

namespace conclave::inline v0 {

// Rows of one forward, as ForwardArgs captures them, in memory of the recorder's device. They are
// read when the stream reaches them.
struct DeviceRoutingRows {
  ConstTensorView topk_ids = {};      // [T, num_slots] int32 or int64; rows may be apart
  ConstTensorView topk_weights = {};  // [T, num_slots] f32; likewise
  // [T, 2] int64, sequence and position. Empty: numbered on, in sequence 0, from the number of
  // tokens that the layer was given before.
  ConstTensorView tokens = {};
  // [1], or null: the rows that count, as ForwardArgs::num_tokens; more than T are T.
  const int64_t* num_tokens = nullptr;
};

// Rings of fixed size, one for each layer. record() enqueues one launch and allocates nothing; a
// captured one records at each replay. Rows of one layer come in the order of a stream, or of
// streams that wait for each other; different layers do not meet. Whatever reads waits for all work
// of the device and must not run while a stream is captured. The context outlives the recorder,
// whose destruction waits, too; graphs that record must not be replayed afterwards.
class CONCLAVE_API DeviceRoutingRecorder {
 public:
  // Throws Error(kUnsupported) for a context on "cpu"; kInvalidArgument as RoutingRecorder;
  // kOutOfMemory; kDevice.
  DeviceRoutingRecorder(const Context& context, std::span<const RecordedLayer> layers,
                        RecorderOptions options = {});
  DeviceRoutingRecorder(DeviceRoutingRecorder&&) noexcept;
  DeviceRoutingRecorder& operator=(DeviceRoutingRecorder&&) noexcept;
  ~DeviceRoutingRecorder();

  // Throws Error before anything is enqueued: kInvalidArgument for a layer that is not recorded,
  // kShape, kDType, kStride, kNullPointer, kMisaligned for an argument, kDevice for one in other
  // memory. Values are seen on the device only: an id that the layer has not, and with
  // WhenFull::kError a call that does not fit, which then records nothing, are errors of whatever
  // reads the layer next, until clear().
  void record(int64_t layer, const DeviceRoutingRows& rows, Stream stream);

  // These are RoutingRecorder's, and wait. Throw Error(kInvalidArgument) for a layer that is not
  // recorded; kExpertId, kState for what record() could not see; kDevice, also for a stream that is
  // being captured.
  int64_t recorded_tokens(int64_t layer) const;
  int64_t dropped_tokens(int64_t layer) const;
  RoutingRecord snapshot() const;
  void write(const std::filesystem::path& path) const { snapshot().write(path); }
  // Forgets all rows, counts and errors. Waits.
  void clear();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::inline v0
