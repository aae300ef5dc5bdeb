// A communicator for plans of layers on several GPUs.
#pragma once

#include "comm/one_launch.h"

#include "conclave/comm.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string_view>

namespace conclave::testing {

// Says that it can do everything but `lacks`. Nothing is sent over it.
class OnDevices : public Communicator {
 public:
  explicit OnDevices(int32_t rank = 0, int32_t size = 2, std::optional<CommFeature> lacks = {})
      : rank_(rank), size_(size), lacks_(lacks) {}
  std::string_view name() const noexcept override { return "devices"; }
  int32_t rank() const noexcept override { return rank_; }
  int32_t size() const noexcept override { return size_; }
  std::chrono::nanoseconds timeout() const noexcept override { return std::chrono::seconds(1); }
  Support supports(CommFeature feature) const override {
    return feature == lacks_ ? Communicator::supports(feature) : Support::yes();
  }
  void wait(CommHandle, std::chrono::nanoseconds, std::string_view) override {}
  bool test(CommHandle, std::string_view) override { return true; }
  void abort(std::string_view) noexcept override {}

 protected:
  CommHandle start(const CommOperation&) override { return {}; }

 private:
  int32_t rank_;
  int32_t size_;
  std::optional<CommFeature> lacks_;
};

// One that may carry operations in one launch.
class OneLaunchOnDevices final : public OnDevices, public comm::OneLaunch {
 public:
  const Support& has_one_launch() const noexcept override { return one_launch; }
  CommHandle begin_sum_of_parts(const comm::PartsOfRanks&, Stream) override { return {}; }
  int64_t window_bytes() const noexcept override { return 0; }
  CommHandle begin_kernel(const comm::WindowMessages&, const comm::WindowKernel&, Stream) override {
    return {};
  }

  Support one_launch = Support::yes();
};

}  // namespace conclave::testing
