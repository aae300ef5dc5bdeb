// Sources whose columns have other orders than those of the source that they wrap.
#pragma once

#include "conclave/spec.h"
#include "conclave/synthetic.h"
#include "conclave/weights.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>

namespace conclave::testing {

class WrappedOrder : public WeightSource {
 public:
  explicit WrappedOrder(const WeightSource& inner) : inner_(inner) {}

  WeightInfo describe(WeightId id) const override { return inner_.describe(id); }
  std::string locate(WeightId id, int64_t expert) const override {
    return inner_.locate(id, expert);
  }

 protected:
  const WeightSource& inner() const { return inner_; }
  static bool is_order(WeightId id) { return id.plane() == WeightPlane::kColumnOrder; }

 private:
  const WeightSource& inner_;
};

// Up has the order of gate, as files that quantise both for one input have it.
class OneOrder final : public WrappedOrder {
 public:
  using WrappedOrder::WrappedOrder;
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner().read(source_of(id), expert, block, destination);
  }

 private:
  WeightId source_of(WeightId id) const {
    if (!is_order(id) || id.matrix() != WeightMatrix::kUp) return id;
    const WeightId gate(*id.mlp(), WeightMatrix::kGate, WeightPlane::kColumnOrder);
    return inner().describe(gate).count > 0 ? gate : id;
  }
};

// A few columns of the first group belong to the second.
class UnevenOrder final : public WrappedOrder {
 public:
  using WrappedOrder::WrappedOrder;
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner().read(id, expert, block, destination);
    if (!is_order(id)) return;
    int moved = 0;
    for (size_t at = 0; at < destination.size() && moved < 5; at += sizeof(int32_t)) {
      int32_t group = 0;
      std::memcpy(&group, destination.data() + at, sizeof(group));
      if (group != 0) continue;
      group = 1;
      ++moved;
      std::memcpy(destination.data() + at, &group, sizeof(group));
    }
  }
};

// A column belongs to a group that the matrix lacks.
class WrongOrder final : public WrappedOrder {
 public:
  using WrappedOrder::WrappedOrder;
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    inner().read(id, expert, block, destination);
    if (!is_order(id)) return;
    const int32_t group = 1 << 20;
    std::memcpy(destination.data(), &group, sizeof(group));
  }
};

// Owns what a wrapped source reads.
template <class Wrapped>
class Owning final : public WeightSource {
 public:
  explicit Owning(std::unique_ptr<WeightSource> inner)
      : inner_(std::move(inner)), wrapped_(*inner_) {}

  WeightInfo describe(WeightId id) const override { return wrapped_.describe(id); }
  void read(WeightId id, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    wrapped_.read(id, expert, block, destination);
  }
  std::string locate(WeightId id, int64_t expert) const override {
    return wrapped_.locate(id, expert);
  }

 private:
  std::unique_ptr<WeightSource> inner_;
  Wrapped wrapped_;
};

enum class Orders : uint8_t { kApart, kAlike, kUneven };

inline std::unique_ptr<WeightSource> source_for(const MoeSpec& spec, Orders orders,
                                                uint64_t seed = 11) {
  std::unique_ptr<WeightSource> source = make_synthetic_source(spec, seed);
  switch (orders) {
    case Orders::kAlike:
      return std::make_unique<Owning<OneOrder>>(std::move(source));
    case Orders::kUneven:
      return std::make_unique<Owning<UnevenOrder>>(std::move(source));
    case Orders::kApart:
      break;
  }
  return source;
}

}  // namespace conclave::testing
