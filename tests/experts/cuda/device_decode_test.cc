// Compares the single-launch kernel for small forwards with the float64 oracle for whole tokens.
#include "core/weight_types.h"
#include "experts/cuda/sm90/decode/decode_row.h"
#include "kernel_fixture.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace conclave::testing {

namespace {

constexpr size_t kCounterBytes = 256;

// Codes beside rows as they are need factors, which layers make: tests/layer/cuda/
// code_meaning_test.cc holds them to the oracle.
bool serves(const CudaProblem& problem) {
  const experts::ExpertsProblem& sizes = problem.sizes();
  const bool needs_factors =
      !is_plain(sizes.weight_dtype) && sizes.quant.activations == ActivationScale::kNone;
  return !needs_factors && experts::decode_supports(sizes);
}

// The kernel with poisoned memory of its own; only the counters start at zero, once.
class Decoder {
 public:
  explicit Decoder(CudaProblem& problem)
      : problem_(problem),
        kernel_(experts::make_decode(problem.sizes(), problem.weights())),
        counters_(kCounterBytes),
        workspace_(experts::decode_bytes(problem.sizes(), problem.options().num_tokens)),
        output_(static_cast<size_t>(problem.options().num_tokens * problem.row_stride() *
                                    byte_size(problem.row_dtype()))) {
    counters_.clear(kCounterBytes, nullptr);
  }

  experts::OneLaunchCall call() const {
    const CudaProblemOptions& o = problem_.options();
    return {.hidden = problem_.hidden().data,
            .hidden_dtype = problem_.hidden().dtype,
            .hidden_stride = problem_.hidden().row_stride,
            .num_tokens = o.num_tokens,
            .topk_ids = problem_.topk_ids(),
            .topk_weights = problem_.topk_weights(),
            .num_experts = o.num_experts,
            .weight_on_input = o.weight_on_input,
            .counters = reinterpret_cast<uint32_t*>(counters_.data()),
            .workspace = workspace_.data(),
            .out = output_.data(),
            .out_dtype = problem_.row_dtype(),
            .out_stride = problem_.row_stride()};
  }
  void run(const experts::OneLaunchCall& call) {
    output_.poison(nullptr);
    kernel_->run(call, nullptr);
    cuda::check(cudaDeviceSynchronize(), "decode");
  }
  OutputRows rows() const {
    return {.data = output_.data(),
            .rows = problem_.options().num_tokens,
            .cols = problem_.options().hidden_size,
            .stride = problem_.row_stride(),
            .dtype = problem_.row_dtype()};
  }
  int64_t damage() const { return counters_.damage() + workspace_.damage() + output_.damage(); }
  std::vector<std::byte> bits() const { return bits_of(output_); }

 private:
  CudaProblem& problem_;
  std::unique_ptr<experts::OneLaunchKernel> kernel_;
  GuardedDevice counters_;
  GuardedDevice workspace_;
  GuardedDevice output_;
};

class DeviceDecode : public HopperFixture, public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string reason = reason_to_skip();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  // Runs twice in the same workspace, since the second run finds what the first one left there.
  void check(const CudaProblemOptions& options, double tolerance = 6e-3) {
    CudaProblem problem(options);
    problem.set_ambiguity(kFloat32Ambiguity);
    if (!serves(problem)) return;
    Decoder decoder(problem);
    for (int run = 0; run < 2; ++run) {
      decoder.run(decoder.call());
      const RowErrors errors = problem.check_tokens(decoder.rows());
      EXPECT_TRUE(within(errors, tolerance)) << text_of(options) << ": " << errors.describe();
      EXPECT_EQ(decoder.damage(), 0) << text_of(options);
      note(errors);
    }
  }

  void TearDown() override { record(); }
};

TEST_F(DeviceDecode, EachTokenCount_EachFormat_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    for (int64_t tokens = 1; tokens <= 8; ++tokens) {
      check(with_format({.num_experts = 10,
                         .top_k = 5,
                         .hidden_size = 520,
                         .intermediate_size = 392,
                         .num_tokens = tokens},
                        format));
      check(with_format({.num_experts = 6,
                         .top_k = 3,
                         .hidden_size = 264,
                         .intermediate_size = 136,
                         .num_tokens = tokens,
                         .has_bias = true,
                         .routing = RoutingKind::kHoles},
                        format));
      check(with_format({.num_experts = 8,
                         .top_k = 1,
                         .hidden_size = 1024,
                         .intermediate_size = 256,
                         .num_tokens = tokens,
                         .routing = RoutingKind::kOneHot},
                        format));
    }
  }
}

TEST_F(DeviceDecode, EachFormat_SmallShapes_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    for (CudaProblemOptions shape : small_shapes()) {
      shape.num_tokens = std::min<int64_t>(shape.num_tokens, 8);
      check(with_format(shape, format));
    }
  }
}

TEST_F(DeviceDecode, SizesThatNothingDivides_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    for (const int64_t inner : {67, 129}) {
      check(with_format({.num_experts = 5,
                         .top_k = 2,
                         .hidden_size = 131,
                         .intermediate_size = inner,
                         .num_tokens = 3},
                        format));
    }
  }
}

TEST_F(DeviceDecode, EachActivation_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    for (const ActivationSpec& activation : kernel_activations()) {
      for (const bool bias : {false, true}) {
        check(with_format({.num_experts = 4,
                           .top_k = 2,
                           .hidden_size = 264,
                           .intermediate_size = 136,
                           .num_tokens = 2,
                           .activation = activation,
                           .has_bias = bias},
                          format));
      }
    }
  }
}

TEST_F(DeviceDecode, ModelSizes_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    for (const int64_t tokens : {1, 8}) {
      check(with_format({.num_experts = 128,
                         .top_k = 8,
                         .hidden_size = 2048,
                         .intermediate_size = 768,
                         .num_tokens = tokens},
                        format));
      check(with_format({.num_experts = 32,
                         .top_k = 4,
                         .hidden_size = 2880,
                         .intermediate_size = 2880,
                         .num_tokens = tokens,
                         .has_bias = true},
                        format));
      check(with_format({.num_experts = 8,
                         .top_k = 2,
                         .hidden_size = 4096,
                         .intermediate_size = 14336,
                         .num_tokens = tokens},
                        format));
    }
  }
}

TEST_F(DeviceDecode, WeightOnInput_MatchesOracle) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    check(with_format({.num_experts = 5,
                       .top_k = 1,
                       .hidden_size = 256,
                       .intermediate_size = 192,
                       .num_tokens = 4,
                       .has_bias = true,
                       .weight_on_input = true},
                      format));
  }
}

// Rows beyond the live tokens keep their poison; ids at or above num_experts contribute nothing.
TEST_F(DeviceDecode, LiveTokensAndStrangeIds_OthersUntouched) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    CudaProblem problem(with_format({.num_experts = 6,
                                     .top_k = 2,
                                     .hidden_size = 256,
                                     .intermediate_size = 192,
                                     .num_tokens = 5},
                                    format));
    if (!serves(problem)) continue;
    Decoder decoder(problem);
    const int64_t live = 3;
    cuda::DeviceBuffer live_tokens(sizeof live);
    cuda::upload(std::span(&live, 1), live_tokens.data());
    auto call = decoder.call();
    call.live_tokens = live_tokens.as<int64_t>();
    decoder.run(call);
    EXPECT_EQ(count_stray(decoder.rows(), std::vector<uint8_t>{1, 1, 1, 0, 0}), 0);

    decoder.run(decoder.call());
    const auto all = decoder.bits();
    std::vector<int32_t> ids(problem.host_ids(0).begin(), problem.host_ids(0).end());
    for (int32_t& id : ids) id = id == 0 ? 2'000'000'000 : id;
    std::vector<int32_t> without = ids;
    for (int32_t& id : without) id = id == 2'000'000'000 ? -1 : id;
    cuda::DeviceBuffer strange(ids.size() * sizeof(int32_t));
    std::vector<std::vector<std::byte>> results;
    uint64_t skipped = 0;
    cuda::DeviceBuffer counter(sizeof skipped);
    cuda::upload(std::span<const uint64_t>(&skipped, 1), counter.data());
    for (const auto* given : {&ids, &without}) {
      cuda::upload(std::span<const int32_t>(*given), strange.data());
      call = decoder.call();
      call.topk_ids = strange.as<int32_t>();
      call.skipped_ids = counter.as<uint64_t>();
      decoder.run(call);
      results.push_back(decoder.bits());
    }
    EXPECT_TRUE(results[0] == results[1]);
    cuda::copy_to_host(counter.data(), std::as_writable_bytes(std::span(&skipped, 1)));
    EXPECT_EQ(skipped, static_cast<uint64_t>(std::count(ids.begin(), ids.end(), 2'000'000'000)));
  }
}

TEST_F(DeviceDecode, ThousandRuns_SameBits) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    CudaProblem problem(with_format({.num_experts = 16,
                                     .top_k = 4,
                                     .hidden_size = 512,
                                     .intermediate_size = 384,
                                     .num_tokens = 4},
                                    format));
    if (!serves(problem)) continue;
    Decoder decoder(problem);
    decoder.run(decoder.call());
    const auto expected = decoder.bits();
    int different = 0;
    for (int run = 1; run < 1000; ++run) {
      decoder.run(decoder.call());
      different += decoder.bits() == expected ? 0 : 1;
    }
    EXPECT_EQ(different, 0);
  }
}

// A NaN stays in its token.
TEST_F(DeviceDecode, NotANumberInOneToken_OthersKeepTheirBits) {
  for (const KernelFormat& format : kernel_formats()) {
    SCOPED_TRACE(format.name);
    CudaProblem problem(with_format({.num_experts = 4,
                                     .top_k = 2,
                                     .hidden_size = 256,
                                     .intermediate_size = 128,
                                     .num_tokens = 4},
                                    format));
    if (!serves(problem)) continue;
    Decoder decoder(problem);
    decoder.run(decoder.call());
    const auto before = decoder.bits();
    problem.spoil_token(2);
    decoder.run(decoder.call());
    const auto after = decoder.bits();
    for (int64_t token = 0; token < 4; ++token) {
      EXPECT_EQ(same_row(before, after, token, 4), token != 2) << "token " << token;
    }
  }
}

// A bias makes a value of one expert's intermediate rows infinite or NaN: tokens that use it are
// NaN, all others keep their bits.
TEST_F(DeviceDecode, IntermediateNotFinite_StaysInTokensOfTheExpert) {
  constexpr int32_t kExpert = 1;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const KernelFormat& format : coded_formats()) {
    for (const ActivationSpec& activation : gated_and_plain()) {
      SCOPED_TRACE(format.name + ' ' + activation.name);
      CudaProblem problem(with_format({.num_experts = 6,
                                       .top_k = 2,
                                       .hidden_size = 136,
                                       .intermediate_size = 136,
                                       .num_tokens = 8,
                                       .activation = activation,
                                       .has_bias = true},
                                      format));
      problem.set_ambiguity(kFloat32Ambiguity);
      if (!serves(problem)) continue;
      Decoder decoder(problem);
      problem.set_up_bias(kExpert, 133, 0);
      decoder.run(decoder.call());
      const auto before = decoder.bits();
      for (const float value : {kInfinity, -kInfinity, std::nanf("")}) {
        SCOPED_TRACE(value);
        problem.set_up_bias(kExpert, 133, value);
        decoder.run(decoder.call());
        const auto after = decoder.bits();
        const RowErrors errors = problem.check_tokens(decoder.rows());
        EXPECT_TRUE(within(errors, format.tolerance)) << errors.describe();
        for (int64_t token = 0; token < 8; ++token) {
          const auto ids = problem.host_ids(0).subspan(static_cast<size_t>(token) * 2, 2);
          if (ids[0] == kExpert || ids[1] == kExpert) continue;
          EXPECT_TRUE(same_row(before, after, token, 8)) << "token " << token;
        }
      }
    }
  }
}

TEST_F(DeviceDecode, TinyIntermediates_MatchesOracle) {
  for (const KernelFormat& format : coded_formats()) {
    for (const ActivationSpec& activation : gated_and_plain()) {
      SCOPED_TRACE(format.name);
      for (const int64_t tokens : {1, 8}) {
        check(with_format({.num_experts = 6,
                           .top_k = 2,
                           .hidden_size = 264,
                           .intermediate_size = 264,
                           .num_tokens = tokens,
                           .activation = activation,
                           .up_exponent = kTinyExponent},
                          format));
      }
    }
  }
}

}  // namespace

}  // namespace conclave::testing
