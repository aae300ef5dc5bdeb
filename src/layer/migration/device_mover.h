// Those who move experts ask this of places that lie in memory of a device, which the host neither
// reads nor writes.
#pragma once

#include "layer/migration/epoch_switch.h"
#include "layer/migration/move_slabs.h"

namespace conclave::inline v0 {

class DeviceMover {
 public:
  virtual ~DeviceMover() = default;

  // Before anything moves, on the thread that asked for it: from now on forwards leave a mark on
  // their streams. Waits for the device. Throws Error(kState) while a stream of it is captured.
  virtual void open() = 0;
  // Memory for a place behind the others, which no forward reads, or none any more.
  virtual void make_temporary(bool wanted) = 0;
  // Works as move_slabs. Waits until forwards in an earlier epoch, which read places that are free
  // now, have passed.
  virtual MoveHashes move(const MoveCall& call) = 0;
  // A round's experts are there: makes ready what a switch to `next` copies.
  virtual void prepare(const EpochPointer& next) = 0;
  // Between forwards: waits for the device, as a switch outside a forward needs it. Throws as open.
  virtual void await_device() = 0;
  // Makes `next` the epoch that forwards read, after await_device.
  virtual void enter(const EpochPointer& next) = 0;
  // Nothing moves any more. May be called again, and without open().
  virtual void close() noexcept = 0;
};

}  // namespace conclave::inline v0
