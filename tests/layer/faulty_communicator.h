// A communicator that passes everything on, and does what a test plants in the operations of one
// phase.
#pragma once

#include "conclave/comm.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

namespace conclave::testing {

class FaultyCommunicator final : public Communicator {
 public:
  // Called after a wait has succeeded, with its phase and the bytes that the operation received.
  using AfterWait = std::function<void(std::string_view phase, std::span<std::byte> received)>;

  FaultyCommunicator(Communicator& inner, AfterWait after_wait)
      : inner_(inner), after_wait_(std::move(after_wait)) {}

  std::string_view name() const noexcept override { return inner_.name(); }
  int32_t rank() const noexcept override { return inner_.rank(); }
  int32_t size() const noexcept override { return inner_.size(); }
  std::chrono::nanoseconds timeout() const noexcept override { return inner_.timeout(); }
  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override {
    inner_.wait(handle, deadline, phase);
    after_wait_(phase, received_[handle.sequence]);
  }
  bool test(CommHandle handle, std::string_view phase) override {
    return inner_.test(handle, phase);
  }
  void check(std::string_view phase) override { inner_.check(phase); }
  void abort(std::string_view reason) noexcept override { inner_.abort(reason); }

 protected:
  CommHandle start(const CommOperation& operation) override {
    const CommHandle handle = inner_.begin(operation);
    received_[handle.sequence] = operation.recv.span;
    return handle;
  }

 private:
  Communicator& inner_;
  AfterWait after_wait_;
  std::map<uint64_t, std::span<std::byte>> received_;
};

}  // namespace conclave::testing
