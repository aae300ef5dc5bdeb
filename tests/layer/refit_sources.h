// Sources of what a refit names, and of what a layer holds after it.
#pragma once

#include "layer/refit/refit_units.h"
#include "support/layer_fixture.h"

#include "conclave/refit.h"
#include "conclave/weights.h"

#include <atomic>
#include <cstdint>
#include <span>
#include <utility>

namespace conclave::testing {

// `base`, and `other` where the scope says so.
class MergedSource final : public WeightSource {
 public:
  MergedSource(const MoeSpec& spec, const WeightSource& base, const WeightSource& other,
               const RefitScope& scope)
      : base_(base), other_(other), units_(units_of(spec, scope)) {}
  WeightInfo describe(WeightId id) const override { return base_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    (units_.has(id, expert) ? other_ : base_).read(id, expert, block, destination);
  }

 private:
  const WeightSource& base_;
  const WeightSource& other_;
  RefitUnits units_;
};

// Only what the scope names; reading anything else is an error, and other tensors are not there.
class NamedSource final : public WeightSource {
 public:
  NamedSource(const MoeSpec& spec, const WeightSource& inner, const RefitScope& scope)
      : inner_(inner), units_(units_of(spec, scope)) {}
  WeightInfo describe(WeightId id) const override {
    return units_.has_any(id) ? inner_.describe(id) : WeightInfo{};
  }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    const bool is_step = id.plane() == WeightPlane::kInputScale;
    if (!is_step && !units_.has(id, expert)) {
      throw Error(ErrorCode::kInternal,
                  {.what = "read of what is not named", .tensor = locate(id, expert)});
    }
    inner_.read(id, expert, block, destination);
  }

 private:
  const WeightSource& inner_;
  RefitUnits units_;
};

// Fails at the n-th read.
class FailsAtRead final : public WeightSource {
 public:
  FailsAtRead(const WeightSource& inner, int64_t read) : inner_(inner), left_(read) {}
  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (left_.fetch_sub(1) == 0) {
      throw Error(ErrorCode::kFileRead, {.what = "disk gone", .tensor = locate(id, expert)});
    }
    inner_.read(id, expert, block, destination);
  }
  bool has_failed() const { return left_.load() < 0; }

 private:
  const WeightSource& inner_;
  mutable std::atomic<int64_t> left_;
};

}  // namespace conclave::testing
