// The caller's ids and weights are checked and converted on the device, alone and before grouping.
#include "dispatch/cuda/sanitize_ids.h"

#include "core/float_convert.h"
#include "dispatch/cuda/catalog.h"
#include "support/cuda/device_array.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace conclave::dispatch {
namespace {

using testing::DeviceArray;

struct SanitizeProblem {
  int64_t num_tokens = 5;
  int32_t top_k = 3;
  int32_t num_experts = 6;
  int32_t num_zero_experts = 2;
  bool wide_ids = false;  // int64
  DType weights_dtype = DType::kF32;
  int64_t ids_stride = 3;
  int64_t live = -1;
  bool has_mask = false;
  std::vector<int64_t> ids = {};  // [T, ids_stride]
  std::vector<float> weights = {};
  std::vector<uint8_t> mask = {};
};

struct Sanitized {
  std::vector<int32_t> ids = {};
  std::vector<float> weights = {};
  std::vector<float> identity = {};
  std::vector<int32_t> captured_ids = {};
  uint64_t skipped = 0;
  friend bool operator==(const Sanitized&, const Sanitized&) = default;
};

float rounded(float value, DType dtype) {
  if (dtype == DType::kF16) return f16_to_float(float_to_f16(value));
  if (dtype == DType::kBF16) return bf16_to_float(float_to_bf16(value));
  return value;
}

SanitizeProblem random_problem(uint32_t seed) {
  std::mt19937 generator(seed);
  const auto pick = [&](uint32_t count) { return static_cast<int32_t>(generator() % count); };
  const std::vector<DType> types = {DType::kF32, DType::kF16, DType::kBF16};
  SanitizeProblem problem{.num_tokens = std::vector<int64_t>{0, 1, 2, 33, 257, 3000}[seed % 6],
                          .top_k = std::vector<int32_t>{1, 2, 5, 8, 32, 40}[generator() % 6],
                          .num_experts = 1 + pick(60),
                          .num_zero_experts = pick(4),
                          .wide_ids = pick(2) == 0,
                          .weights_dtype = types[generator() % 3],
                          .has_mask = pick(2) == 0};
  problem.ids_stride = problem.top_k + pick(3);
  if (pick(2) == 0) problem.live = problem.num_tokens / 2;
  std::vector<int64_t> hostile = {-1, -2, problem.num_experts + problem.num_zero_experts,
                                  std::numeric_limits<int32_t>::min(),
                                  std::numeric_limits<int32_t>::max()};
  if (problem.wide_ids) {
    // These are valid once truncated.
    hostile.push_back(int64_t{1} << 32);
    hostile.push_back((int64_t{-1} << 40) + 1);
  }
  const auto columns = static_cast<uint32_t>(problem.num_experts + problem.num_zero_experts);
  for (int64_t i = 0; i < problem.num_tokens * problem.ids_stride; ++i) {
    const bool bad = pick(4) == 0;
    problem.ids.push_back(bad ? hostile[generator() % hostile.size()]
                              : static_cast<int64_t>(generator() % columns));
    problem.weights.push_back(
        rounded(static_cast<float>(pick(1000)) * 0.01F, problem.weights_dtype));
  }
  for (int64_t t = 0; t < problem.num_tokens && problem.has_mask; ++t) {
    problem.mask.push_back(pick(4) != 0 ? 1 : 0);
  }
  return problem;
}

Sanitized expected(const SanitizeProblem& problem) {
  Sanitized result;
  const int64_t live = problem.live < 0 ? problem.num_tokens : problem.live;
  for (int64_t t = 0; t < problem.num_tokens; ++t) {
    const bool counts = t < live && (problem.mask.empty() || problem.mask[static_cast<size_t>(t)]);
    float identity = 0;
    for (int32_t s = 0; s < problem.top_k; ++s) {
      const auto at = static_cast<size_t>(t * problem.ids_stride + s);
      const int64_t id = counts ? problem.ids[at] : -1;
      const float weight = counts ? problem.weights[at] : 0.0F;
      const bool valid = id >= 0 && id < problem.num_experts + problem.num_zero_experts;
      if (!valid && id != -1) ++result.skipped;
      if (valid && id >= problem.num_experts) identity += weight;
      result.captured_ids.push_back(valid ? static_cast<int32_t>(id) : -1);
      result.ids.push_back(valid && id < problem.num_experts ? static_cast<int32_t>(id) : -1);
      result.weights.push_back(weight);
    }
    result.identity.push_back(identity);
  }
  return result;
}

template <class T, class Convert>
std::vector<uint8_t> bytes_of(const std::vector<T>& values, size_t element, Convert convert) {
  std::vector<uint8_t> bytes(values.size() * element);
  for (size_t i = 0; i < values.size(); ++i) convert(values[i], bytes.data() + i * element);
  return bytes;
}

std::vector<uint8_t> store_ids(const SanitizeProblem& problem) {
  const size_t element = problem.wide_ids ? 8 : 4;
  return bytes_of(problem.ids, element, [&](int64_t id, uint8_t* to) {
    const auto narrow = static_cast<int32_t>(id);
    std::memcpy(to, problem.wide_ids ? static_cast<const void*>(&id) : &narrow, element);
  });
}

std::vector<uint8_t> store_weights(const SanitizeProblem& problem) {
  const auto element = static_cast<size_t>(byte_size(problem.weights_dtype));
  return bytes_of(problem.weights, element, [&](float weight, uint8_t* to) {
    const uint16_t half =
        problem.weights_dtype == DType::kF16 ? float_to_f16(weight) : float_to_bf16(weight);
    std::memcpy(to, element == 4 ? static_cast<const void*>(&weight) : &half, element);
  });
}

class DeviceSanitize : public testing::DeviceTest {
 protected:
  Sanitized run(const SanitizeProblem& problem) {
    const auto tokens = static_cast<size_t>(problem.num_tokens);
    const size_t slots = tokens * static_cast<size_t>(problem.top_k);
    const DeviceArray<uint8_t> given_ids(store_ids(problem));
    const DeviceArray<uint8_t> given_weights(store_weights(problem));
    const DeviceArray<uint8_t> mask(problem.mask);
    const DeviceArray<int64_t> live(std::vector<int64_t>{problem.live});
    const DeviceArray<uint64_t> skipped(std::vector<uint64_t>{0});
    const DeviceArray<int32_t> ids(slots);
    const DeviceArray<float> weights(slots);
    const DeviceArray<float> identity(tokens);
    const DeviceArray<int32_t> captured_ids(slots);
    const DeviceArray<float> captured_weights(slots);
    const DeviceSanitizeArgs args{
        .given_ids = given_ids.data(),
        .ids_dtype = problem.wide_ids ? DType::kI64 : DType::kI32,
        .ids_stride = problem.ids_stride,
        .given_weights = given_weights.data(),
        .weights_dtype = problem.weights_dtype,
        .weights_stride = problem.ids_stride,
        .num_tokens = problem.num_tokens,
        .live_tokens = problem.live < 0 ? nullptr : live.data(),
        .padding_mask = static_cast<const bool*>(static_cast<void*>(or_null(mask))),
        .top_k = problem.top_k,
        .num_experts = problem.num_experts,
        .num_zero_experts = problem.num_zero_experts,
        .topk_ids = ids.data(),
        .topk_weights = weights.data(),
        .identity = identity.data(),
        .captured_ids = captured_ids.data(),
        .captured_weights = captured_weights.data(),
        .skipped_ids = skipped.data()};
    enqueue(problem, args);
    wait();
    captured_ids.expect_guard_untouched();
    weights.expect_guard_untouched();
    EXPECT_EQ(captured_weights.download(), weights.download());
    return {ids.download(), weights.download(), identity.download(), captured_ids.download(),
            skipped.download()[0]};
  }

  virtual void enqueue(const SanitizeProblem&, const DeviceSanitizeArgs& args) {
    device_sanitize_ids(args, stream());
  }
};

// The same kernel before a grouping, which must equal a grouping of the ids it wrote.
class DeviceSanitizeAndGroup : public DeviceSanitize {
 protected:
  void enqueue(const SanitizeProblem& problem, const DeviceSanitizeArgs& args) override {
    const int64_t experts = problem.num_experts;
    const size_t bytes = device_group_workspace_bytes(args.num_tokens, args.top_k, experts, 16);
    const DeviceArray<uint8_t> fused(bytes);
    const DeviceArray<uint8_t> apart(bytes);
    DeviceGroupArgs group{.launches = group_launches(args.num_tokens, args.top_k, experts),
                          .num_experts = problem.num_experts,
                          .num_local_experts = problem.num_experts,
                          .tile_tokens = 16,
                          .workspace = fused.data()};
    prepare_group_kernels(group.launches.shape);
    const GroupedRows one = device_sanitize_and_group(args, group, stream());
    group.topk_ids = args.topk_ids;
    group.num_tokens = args.num_tokens;
    group.live_tokens = args.live_tokens;
    group.top_k = args.top_k;
    group.workspace = apart.data();
    const GroupedRows two = device_group(group, stream());
    wait();
    expect_equal(one, two, static_cast<size_t>(experts));
  }

 private:
  static void expect_equal(const GroupedRows& one, const GroupedRows& two, size_t experts) {
    const auto begin = DeviceArray<int32_t>::download(one.expert_begin, experts + 1);
    ASSERT_EQ(begin, DeviceArray<int32_t>::download(two.expert_begin, experts + 1));
    const auto rows = static_cast<size_t>(begin.back());
    ASSERT_EQ(DeviceArray<int32_t>::download(one.row_slot, rows),
              DeviceArray<int32_t>::download(two.row_slot, rows));
    ASSERT_EQ(DeviceArray<int32_t>::download(one.num_tiles, 1),
              DeviceArray<int32_t>::download(two.num_tiles, 1));
  }
};

TEST_F(DeviceSanitize, RandomIds_EqualTheHost) {
  for (uint32_t seed = 0; seed < 120; ++seed) {
    const SanitizeProblem problem = random_problem(seed);
    ASSERT_EQ(run(problem), expected(problem)) << "seed " << seed;
  }
}

TEST_F(DeviceSanitizeAndGroup, RandomIds_EqualTwoLaunches) {
  for (uint32_t seed = 0; seed < 120; ++seed) {
    const SanitizeProblem problem = random_problem(seed);
    ASSERT_EQ(run(problem), expected(problem)) << "seed " << seed;
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace conclave::dispatch
