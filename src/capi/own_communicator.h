// A communicator of the application's own, given as a table of functions of C.
#pragma once

#include "conclave/c/own_communicator.h"
#include "conclave/comm.h"
#include "conclave/error.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::inline v0::capi {

// The table, checked, with its object. Windows hold it too, so that they may be closed last.
class CommunicatorFunctions {
 public:
  // Throws Error(kNullPointer, kInvalidArgument) naming the field behind `prefix`.
  CommunicatorFunctions(const conclave_own_communicator& own, const std::string& prefix);
  CommunicatorFunctions(const CommunicatorFunctions&) = delete;
  CommunicatorFunctions& operator=(const CommunicatorFunctions&) = delete;
  // Releases the caller's object where it was kept.
  ~CommunicatorFunctions();

  // From now on the caller's object is this one's to release.
  void keep() noexcept { is_kept_ = true; }
  const conclave_own_communicator& given() const noexcept { return given_; }
  const std::string& name() const noexcept { return name_; }

 private:
  conclave_own_communicator given_;
  std::string name_;
  bool is_kept_ = false;
};

class CCommunicator final : public Communicator {
 public:
  explicit CCommunicator(std::shared_ptr<const CommunicatorFunctions> functions);

  std::string_view name() const noexcept override { return functions_->name(); }
  int32_t rank() const noexcept override { return own().rank; }
  int32_t size() const noexcept override { return own().size; }
  std::chrono::nanoseconds timeout() const noexcept override { return timeout_; }
  Support supports(CommFeature feature) const override;
  Support supports_reduction(DType dtype, ReduceOp op) const override;

  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override;
  bool test(CommHandle handle, std::string_view phase) override;
  void wait_on(Stream stream, CommHandle handle, std::chrono::nanoseconds deadline,
               std::string_view phase) override;
  void check(std::string_view phase) override;
  std::unique_ptr<PeerWindow> open_window(size_t bytes, MemoryKind memory,
                                          std::chrono::nanoseconds deadline,
                                          std::string_view phase) override;
  void abort(std::string_view reason) noexcept override;
  Survivors shrink(std::chrono::nanoseconds deadline, std::string_view phase) override;

 protected:
  CommHandle start(const CommOperation& operation) override;

 private:
  // This made the communicator unusable.
  struct Failure {
    ErrorCode code;
    int32_t peer;
    std::string what;
  };

  const conclave_own_communicator& own() const noexcept { return functions_->given(); }
  void check_usable(std::string_view phase) const;
  [[noreturn]] static void throw_failure(const Failure& failure, std::string_view phase);
  // Calls a function of the table and keeps its failure, which the caller throws.
  template <class Call>
  void try_call(const char* function, Call&& call);
  // The same, and throws.
  template <class Call>
  void call(const char* function, std::string_view phase, Call&& call);
  const char* phase_text(std::string_view phase);

  std::shared_ptr<const CommunicatorFunctions> functions_;
  std::chrono::nanoseconds timeout_;
  std::optional<Failure> failure_;
  std::array<char, 128> phase_ = {};
  uint64_t last_number_ = 0;
  bool has_shrunk_ = false;
};

}  // namespace conclave::inline v0::capi
