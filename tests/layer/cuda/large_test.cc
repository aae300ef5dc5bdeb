// Runs whole layers whose tensors exceed 2^31 elements, one kind of tensor at a time, and compares
// tokens around each border with float64.

#include "cuda/check.h"
#include "device_layer.h"
#include "support/cuda/cuda_problem.h"
#include "support/cuda/guarded_device.h"
#include "support/cuda/problem_layer.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::CudaProblem;
using testing::CudaProblemOptions;
using testing::GuardedDevice;
using testing::RowErrors;

constexpr int64_t kBorder = int64_t{1} << 31;
constexpr int64_t kNeededBytes = int64_t{100} << 30;

class CudaLarge : public testing::CudaLayerTest {
 protected:
  void SetUp() override {
    testing::CudaLayerTest::SetUp();
    if (IsSkipped()) return;
    const int64_t memory = cuda::device_info(0).memory_bytes;
    if (memory < kNeededBytes) GTEST_SKIP() << "the device has only " << memory << " bytes";
  }
};

// Chooses the first and last token, tokens near 2^31 and 2^32 elements or bytes of tensors with
// `row_elements` per token, and some others.
std::vector<int64_t> tokens_to_check(int64_t tokens, const std::vector<int64_t>& row_elements) {
  std::set<int64_t> chosen = {0, tokens - 1};
  for (const int64_t elements : row_elements) {
    for (const int64_t border : {kBorder / 4, kBorder / 2, kBorder, 2 * kBorder}) {
      for (int64_t step = -1; step <= 1; ++step) {
        const int64_t token = border / elements + step;
        if (token >= 0 && token < tokens) chosen.insert(token);
      }
    }
  }
  std::mt19937_64 random(3);
  const auto wanted = static_cast<size_t>(std::min<int64_t>(tokens, 48));
  while (chosen.size() < wanted) {
    chosen.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(tokens)));
  }
  return {chosen.begin(), chosen.end()};
}

// A layer on the problem's weights that takes all tokens in one chunk.
class LargeLayer {
 public:
  explicit LargeLayer(CudaProblem& problem, int64_t max_tokens)
      : problem_(problem),
        context_({.device = "cuda:0", .num_threads = 1}),
        layer_(MoeLayer::create(context_, testing::layer_spec(problem.options()),
                                *testing::layer_source(problem), {.max_tokens = max_tokens})),
        queue_(context_),
        workspace_(context_, layer_.workspace_bytes()) {}

  // `row_elements` gives the elements per token of the tensors to check around their borders.
  void check(DType out_dtype, const std::vector<int64_t>& row_elements) {
    const CudaProblemOptions& o = problem_.options();
    const DeviceRows hidden = problem_.hidden();
    SCOPED_TRACE("T" + std::to_string(o.num_tokens) + " " + kernel());
    GuardedDevice out(static_cast<size_t>(o.num_tokens * o.hidden_size * byte_size(out_dtype)));
    out.poison(to_cuda(queue_.stream()));
    layer_.forward({.hidden = {hidden.data, hidden.dtype, {o.num_tokens, o.hidden_size}},
                    .topk_ids = {problem_.topk_ids(), DType::kI32, {o.num_tokens, o.top_k}},
                    .topk_weights = {problem_.topk_weights(), DType::kF32, {o.num_tokens, o.top_k}},
                    .out = {out.data(), out_dtype, {o.num_tokens, o.hidden_size}},
                    .workspace = &workspace_,
                    .stream = queue_.stream()});
    queue_.synchronize();
    const testing::OutputRows rows{.data = out.data(),
                                   .rows = o.num_tokens,
                                   .cols = o.hidden_size,
                                   .stride = o.hidden_size,
                                   .dtype = out_dtype};
    const RowErrors errors =
        problem_.check_these_tokens(rows, tokens_to_check(o.num_tokens, row_elements));
    EXPECT_TRUE(within(errors, 6e-3)) << errors.describe();
    EXPECT_EQ(out.damage(), 0);
    testing::note_error(layer_.spec(), errors.excess);
  }
  const MoeLayer& layer() const { return layer_; }
  const DeviceQueue& queue() const { return queue_; }
  Workspace& workspace() { return workspace_; }

 private:
  std::string kernel() const {
    for (const PlanRung& rung : layer_.plan().ladder) {
      if (problem_.options().num_tokens <= rung.last_tokens) return rung.kernel + " " + rung.tile;
    }
    return "";
  }

  CudaProblem& problem_;
  Context context_;
  MoeLayer layer_;
  DeviceQueue queue_;
  Workspace workspace_;
};

std::vector<std::pair<DType, QuantSpec>> formats() {
  return {{DType::kBF16, {}},
          {DType::kF8E4M3, testing::fp8_block_quant()},
          {DType::kF8E4M3, testing::fp8_channel_quant()}};
}

TEST_F(CudaLarge, HiddenAndOut_BeyondTwoToThe31Elements) {
  for (const auto& [dtype, quant] : formats()) {
    CudaProblem problem({.num_experts = 8,
                         .top_k = 1,
                         .hidden_size = 8192,
                         .intermediate_size = 128,
                         .num_tokens = 270'000,
                         .weight_dtype = dtype,
                         .quant = quant});
    ASSERT_GT(problem.options().num_tokens * 8192, kBorder);
    LargeLayer layer(problem, 270'000);
    for (const DType out : {DType::kBF16, DType::kF32}) layer.check(out, {8192});
  }
}

TEST_F(CudaLarge, ExpertRows_BeyondTwoToThe31Elements) {
  for (const auto& [dtype, quant] : formats()) {
    CudaProblem problem({.num_experts = 16,
                         .top_k = 8,
                         .hidden_size = 8192,
                         .intermediate_size = 128,
                         .num_tokens = 33'800,
                         .weight_dtype = dtype,
                         .quant = quant,
                         .routing = testing::RoutingKind::kZipf});
    ASSERT_GT(problem.options().num_tokens * 8 * 8192, kBorder);
    LargeLayer(problem, 33'800).check(DType::kBF16, {int64_t{8} * 8192});
  }
}

TEST_F(CudaLarge, IntermediateRows_BeyondTwoToThe31Elements) {
  for (const auto& [dtype, quant] : formats()) {
    CudaProblem problem({.num_experts = 4,
                         .top_k = 2,
                         .hidden_size = 128,
                         .intermediate_size = 8192,
                         .num_tokens = 135'000,
                         .weight_dtype = dtype,
                         .quant = quant});
    ASSERT_GT(problem.options().num_tokens * 2 * 8192, kBorder);
    LargeLayer(problem, 135'000).check(DType::kBF16, {2 * 8192});
  }
}

// Covers both matrices and every rung, from the single launch to the tiles for many tokens.
TEST_F(CudaLarge, Weights_BeyondTwoToThe31Elements) {
  for (const auto& [dtype, quant] : formats()) {
    CudaProblem problem({.num_experts = 80,
                         .top_k = 4,
                         .hidden_size = 8192,
                         .intermediate_size = 4096,
                         .num_tokens = 1,
                         .weight_dtype = dtype,
                         .quant = quant});
    ASSERT_GT(int64_t{80} * 4096 * 8192, kBorder);
    LargeLayer layer(problem, 4096);
    for (const int64_t tokens : {1, 8, 60, 400, 4096}) {
      problem.set_batch({.num_tokens = tokens, .seed = static_cast<uint64_t>(tokens)});
      const auto ids = problem.host_ids(0);
      ASSERT_TRUE(tokens <= 8 || *std::max_element(ids.begin(), ids.end()) > 70);
      layer.check(DType::kBF16, {8192});
    }
  }
}

// Checks the experts that the largest logits name, for tokens around the borders of [T, E].
TEST_F(CudaLarge, Logits_BeyondTwoToThe31Elements) {
  constexpr int64_t kExperts = 1024;
  constexpr int64_t kTokens = 2'100'000;
  CudaProblem problem({.num_experts = kExperts,
                       .top_k = 1,
                       .hidden_size = 64,
                       .intermediate_size = 64,
                       .num_tokens = kTokens});
  // The logits are numbers that nothing here computes: rows of another problem.
  const CudaProblem random({.num_experts = 1,
                            .top_k = 1,
                            .hidden_size = kExperts,
                            .intermediate_size = 64,
                            .num_tokens = kTokens});
  ASSERT_GT(kTokens * kExperts, kBorder);
  LargeLayer large(problem, kTokens);
  const DeviceQueue& queue = large.queue();
  DeviceTensor ids = queue.allocate(DType::kI32, {kTokens, 1});
  DeviceTensor out = queue.allocate(DType::kBF16, {kTokens, 64});
  queue.fill(ids.view(), 0xAB);
  large.layer().forward({.hidden = {problem.hidden().data, DType::kBF16, {kTokens, 64}},
                         .router_logits = {random.hidden().data, DType::kBF16, {kTokens, kExperts}},
                         .out = out.view(),
                         .captured_ids = ids.view(),
                         .workspace = &large.workspace(),
                         .stream = queue.stream()});
  Tensor chosen(DType::kI32, {kTokens, 1});
  queue.download(ids.const_view(), chosen.view());
  for (const int64_t token : tokens_to_check(kTokens, {kExperts})) {
    Tensor row(DType::kBF16, {1, kExperts});
    queue.download({static_cast<const uint16_t*>(random.hidden().data) + token * kExperts,
                    DType::kBF16,
                    {1, kExperts}},
                   row.view());
    Tensor logits(DType::kF32, {1, kExperts});
    convert(row.const_view(), logits.view());
    // Among equal logits the lower id counts, which max_element returns.
    const float* const begin = logits.as<float>();
    EXPECT_EQ(chosen.as<int32_t>()[token], std::max_element(begin, begin + kExperts) - begin)
        << token;
  }
}

}  // namespace
}  // namespace conclave
