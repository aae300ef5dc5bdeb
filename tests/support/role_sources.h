// Weight sources that are composed from others, role by role.
#pragma once

#include "conclave/weights.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace conclave::testing {

// Returns every role that `source` holds.
inline std::vector<WeightId> roles_of(const WeightSource& source) {
  std::vector<WeightId> roles;
  for (const WeightId role : weights::kAll) {
    if (source.describe(role).count > 0) roles.push_back(role);
  }
  return roles;
}

// `base`, except for one role, which comes from `other`.
class MixedSource final : public WeightSource {
 public:
  MixedSource(const WeightSource& base, const WeightSource& other, WeightId role)
      : base_(base), other_(other), role_(role) {}
  WeightInfo describe(WeightId role) const override { return of(role).describe(role); }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    of(role).read(role, expert, block, destination);
  }

 private:
  const WeightSource& of(WeightId role) const { return role == role_ ? other_ : base_; }

  const WeightSource& base_;
  const WeightSource& other_;
  WeightId role_;
};

// `base` with the description of one role changed; its bytes are never requested.
class RedescribedSource final : public WeightSource {
 public:
  RedescribedSource(const WeightSource& base, WeightId role,
                    std::function<void(WeightInfo& info)> change)
      : base_(base), role_(role), change_(std::move(change)) {}
  WeightInfo describe(WeightId role) const override {
    WeightInfo info = base_.describe(role);
    if (role == role_) change_(info);
    return info;
  }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    base_.read(role, expert, block, destination);
  }

 private:
  const WeightSource& base_;
  WeightId role_;
  std::function<void(WeightInfo& info)> change_;
};

// `base` with every entry of one float32 matrix replaced.
class FilledSource final : public WeightSource {
 public:
  FilledSource(const WeightSource& base, WeightId role, int64_t expert, float value)
      : base_(base), role_(role), expert_(expert), value_(value) {}
  WeightInfo describe(WeightId role) const override { return base_.describe(role); }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    if (role != role_ || expert != expert_) return base_.read(role, expert, block, destination);
    for (size_t at = 0; at < destination.size(); at += sizeof(float)) {
      std::memcpy(destination.data() + at, &value_, sizeof(float));
    }
  }

 private:
  const WeightSource& base_;
  WeightId role_;
  int64_t expert_;
  float value_;
};

// `source` with NaN in these rows of the gate.
class NanGate final : public WeightSource {
 public:
  NanGate(const WeightSource& source, std::vector<int64_t> rows)
      : source_(source), rows_(std::move(rows)) {}
  WeightInfo describe(WeightId role) const override { return source_.describe(role); }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    source_.read(role, expert, block, destination);
    if (role != weights::kRouter) return;
    // All bits set are a NaN of every type that a gate has.
    const size_t row_bytes =
        destination.size() / static_cast<size_t>(block.row_end - block.row_begin);
    for (const int64_t row : rows_) {
      if (row < block.row_begin || row >= block.row_end) continue;
      const auto at = static_cast<size_t>(row - block.row_begin) * row_bytes;
      std::ranges::fill(destination.subspan(at, 4), std::byte{0xff});
    }
  }

 private:
  const WeightSource& source_;
  std::vector<int64_t> rows_;
};

}  // namespace conclave::testing
