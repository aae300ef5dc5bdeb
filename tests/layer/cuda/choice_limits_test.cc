// Limits of a call's choices on a GPU: the ids that the host chooses for the same logits, weights
// within the routers' bar, and outputs within that of float64; also in graphs.

#include "cuda/check.h"
#include "cuda/stream.h"
#include "device_layer.h"
#include "routing/cuda/device_router.h"
#include "routing/router_cases.h"
#include "support/layer_parts.h"
#include "support/tolerance.h"
#include "support/ulp.h"

#include "conclave/interop/cuda.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::CudaLayerTest;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::LayerOutput;
using testing::make_spec;
using testing::random_tensor;

constexpr int64_t kTokens = 19;

int64_t num_columns(const MoeSpec& spec) { return spec.num_experts + spec.num_zero_experts; }

// Rows of flags, one for all tokens or one each.
Tensor no_bans(const MoeSpec& spec, int64_t rows) {
  const int64_t columns = num_columns(spec);
  Tensor flags(DType::kBool, rows == 1 ? Shape{columns} : Shape{rows, columns});
  std::fill_n(flags.as<uint8_t>(), rows * columns, uint8_t{0});
  return flags;
}
Tensor bans_of(const MoeSpec& spec, const std::set<int64_t>& banned) {
  Tensor flags = no_bans(spec, 1);
  for (const int64_t id : banned) flags.as<uint8_t>()[id] = 1;
  return flags;
}
// Some experts, of all tokens or of each, so that enough are left.
Tensor random_bans(const MoeSpec& spec, int64_t rows, int64_t choices, std::mt19937& generator) {
  Tensor flags = no_bans(spec, rows);
  const int64_t columns = num_columns(spec);
  for (int64_t row = 0; row < rows; ++row) {
    const auto most = static_cast<uint32_t>(columns - choices + 1);
    for (auto left = static_cast<uint32_t>(generator()) % most; left > 0; --left) {
      const auto column = static_cast<int64_t>(generator() % static_cast<uint32_t>(columns));
      flags.as<uint8_t>()[row * columns + column] = 1;
    }
  }
  return flags;
}

enum class FlagsIn : uint8_t { kHost, kDevice };

// A call with limits, in host memory.
struct LimitedCall {
  Tensor hidden;
  int64_t top_k = 0;
  Tensor bans = {};
  FlagsIn bans_in = FlagsIn::kDevice;
  int64_t expert_budget = 0;
  Tensor logits = {};  // instead of the gate's
  Tensor ids = {};
  Tensor weights = {};
  Tensor token_ids = {};
  Tensor padding = {};
};

Tensor copy_of(const Tensor& tensor) {
  Tensor copy(tensor.dtype(), tensor.shape());
  std::memcpy(copy.as<std::byte>(), tensor.as<std::byte>(), tensor.size_bytes());
  return copy;
}

bool is_there(const Tensor& tensor) { return tensor.size_bytes() != 0; }

// The same layer on both devices.
class Both {
 public:
  explicit Both(const MoeSpec& spec, const LayerOptions& options = {.max_tokens = 64},
                const ParallelSpec& parallel = {})
      : device(spec, options, parallel),
        host_(MoeLayer::create(device.host, spec, *device.source,
                               {.max_tokens = 64, .id_policy = options.id_policy})) {}

  LayerOutput run_on_device(const LimitedCall& call) {
    DeviceForward forward(device, call.hidden.view(), DType::kF32);
    std::vector<DeviceTensor> kept;
    const auto give = [&](ConstTensorView ForwardArgs::*field, const Tensor& tensor) {
      if (!is_there(tensor)) return;
      kept.push_back(device.queue.upload(tensor.const_view()));
      forward.args.*field = kept.back().const_view();
    };
    give(&ForwardArgs::router_logits, call.logits);
    give(&ForwardArgs::topk_ids, call.ids);
    give(&ForwardArgs::topk_weights, call.weights);
    give(&ForwardArgs::token_ids, call.token_ids);
    give(&ForwardArgs::padding_mask, call.padding);
    forward.capture_routing();
    forward.args.top_k = call.top_k;
    forward.args.expert_budget = call.expert_budget;
    if (call.bans_in == FlagsIn::kDevice) {
      give(&ForwardArgs::banned_experts, call.bans);
    } else {
      forward.args.banned_experts = call.bans.const_view();
    }
    forward.enqueue();
    return forward.output();
  }

  // On the logits that the device has captured.
  LayerOutput run_on_host(const LimitedCall& call, const LayerOutput& on_device) const {
    ForwardArgs args{.top_k = call.top_k, .expert_budget = call.expert_budget};
    if (is_there(call.bans)) args.banned_experts = call.bans.const_view();
    if (is_there(call.ids)) args.topk_ids = call.ids.const_view();
    if (is_there(call.weights)) args.topk_weights = call.weights.const_view();
    if (is_there(call.token_ids)) args.token_ids = call.token_ids.const_view();
    if (is_there(call.padding)) args.padding_mask = call.padding.const_view();
    if (is_there(call.logits)) {
      args.router_logits = call.logits.const_view();
    } else if (!is_there(call.ids)) {
      args.router_logits = on_device.logits.const_view();
    }
    return testing::run_layer(host_, call.hidden.view(), DType::kF32, args);
  }

  // Returns what the device has made.
  LayerOutput expect_alike(const LimitedCall& call) {
    LayerOutput actual = run_on_device(call);
    const LayerOutput expected = run_on_host(call, actual);
    EXPECT_TRUE(testing::same_bits(actual.ids, expected.ids));
    const int64_t slots = num_slots(device.layer.spec());
    for (int64_t i = 0; i < actual.weights.shape().num_elements(); ++i) {
      // The host leaves weights in slots of padding, which no id reads.
      if (is_there(call.padding) && call.padding.as<uint8_t>()[i / slots] == 0) continue;
      const float weight = actual.weights.as<float>()[i];
      const float wanted = expected.weights.as<float>()[i];
      EXPECT_LE(testing::ulp_distance(weight, wanted), testing::kMaxUlp)
          << "slot " << i << ": " << weight << " for " << wanted;
      if (::testing::Test::HasFailure()) break;
    }
    if (call.expert_budget == 0 && !is_there(call.padding)) expect_accurate(call, actual);
    return actual;
  }

  DeviceLayer device;

 private:
  void expect_accurate(const LimitedCall& call, const LayerOutput& output) {
    const MoeSpec& spec = device.layer.spec();
    // Weights of shared experts are no part of a result, and logits would ask for other choices.
    if (is_there(call.ids) && spec.shared.mode == SharedMode::kRouterWeight) return;
    LayerResult result = output.result(call.hidden.const_view());
    if (is_there(call.ids)) {
      result.logits = {};
    } else {
      result.top_k = call.top_k;
      if (is_there(call.bans)) result.banned_experts = call.bans.const_view();
      if (is_there(call.token_ids)) result.token_ids = call.token_ids.const_view();
    }
    const StageCheck check = check_against_reference(device.host, spec, *device.source, result);
    EXPECT_EQ(check.routing_mismatches, 0);
    EXPECT_LE(check.worst_token_error, accuracy_bar(spec.weight_dtype, DType::kF32));
  }

  MoeLayer host_;
};

std::set<int32_t> distinct(const Tensor& ids, int64_t num_experts) {
  std::set<int32_t> found;
  for (int64_t i = 0; i < ids.shape().num_elements(); ++i) {
    const int32_t id = ids.as<int32_t>()[i];
    if (id >= 0 && id < num_experts) found.insert(id);
  }
  return found;
}

class CudaChoiceLimits : public CudaLayerTest {};

MoeSpec drawn(const routing::RouterRow& row, uint32_t seed) {
  std::mt19937 generator(seed);
  MoeSpec spec = testing::drawn_spec(row, generator);
  spec.weight_dtype = DType::kBF16;
  spec.hidden_size = 48;
  return spec;
}

Tensor some_token_ids(const MoeSpec& spec) {
  if (spec.router.vocab_size == 0) return {};
  Tensor ids(DType::kI32, {kTokens});
  for (int64_t token = 0; token < kTokens; ++token) {
    ids.as<int32_t>()[token] = static_cast<int32_t>(token * 7 % spec.router.vocab_size);
  }
  return ids;
}

TEST_F(CudaChoiceLimits, EveryRouter_ChoosesAsTheHost) {
  for (const routing::RouterRow& row : routing::router_catalog().rows()) {
    int compared = 0;
    for (uint32_t seed = 0; seed < 24; ++seed) {
      const MoeSpec spec = drawn(row, seed);
      SCOPED_TRACE("seed " + std::to_string(seed) + ", " + testing::describe(spec));
      if (testing::may_cancel(spec.router) || !row.device->supports(spec)) continue;
      std::mt19937 generator(seed);
      Both both(spec, {.max_tokens = seed % 2 == 0 ? 64 : 8});
      LimitedCall call{.hidden = random_tensor(DType::kBF16, kTokens, spec.hidden_size, seed),
                       .token_ids = some_token_ids(spec)};
      call.top_k = 1 + static_cast<int64_t>(generator() % static_cast<size_t>(spec.top_k));
      both.expect_alike(call);
      call.bans = random_bans(spec, kTokens, call.top_k, generator);
      both.expect_alike(call);
      call.bans = random_bans(spec, 1, call.top_k, generator);
      for (const FlagsIn place : {FlagsIn::kHost, FlagsIn::kDevice}) {
        call.bans_in = place;
        both.expect_alike(call);
      }
      call.top_k = 0;
      call.bans = random_bans(spec, kTokens, spec.top_k, generator);
      call.bans_in = FlagsIn::kDevice;
      both.expect_alike(call);
      ++compared;
      if (HasFailure()) return;
    }
    EXPECT_GT(compared, 8) << row.name;
  }
}

TEST_F(CudaChoiceLimits, EveryCombinationOfParts_ObeysThem) {
  for (uint32_t seed = 700; seed < 740; ++seed) {
    const MoeSpec spec = testing::SpecDraw(seed).draw();
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + testing::parts_text(spec));
    std::mt19937 generator(seed);
    Both both(spec, {.max_tokens = seed % 2 == 0 ? 64 : 8});
    LimitedCall call{.hidden = random_tensor(spec.weight_dtype, kTokens, spec.hidden_size, seed)};
    call.top_k = 1 + static_cast<int64_t>(generator() % static_cast<size_t>(spec.top_k));
    call.bans = random_bans(spec, kTokens, call.top_k, generator);
    both.expect_alike(call);
    const int64_t least = std::min(call.top_k, spec.num_experts);
    call.bans = {};
    call.expert_budget =
        least +
        static_cast<int64_t>(generator() % static_cast<size_t>(spec.num_experts - least + 1));
    const LayerOutput output = both.expect_alike(call);
    EXPECT_LE(std::ssize(distinct(output.ids, spec.num_experts)), call.expert_budget);
    call.padding = Tensor(DType::kBool, {kTokens});
    for (int64_t i = 0; i < kTokens; ++i) call.padding.as<uint8_t>()[i] = i % 3 != 1;
    both.expect_alike(call);
    if (HasFailure()) return;
  }
}

TEST_F(CudaChoiceLimits, SizesOfModels_ChooseAsTheHost) {
  MoeSpec grouped = make_spec(256, 8, 64, 32, DType::kBF16);
  grouped.router.score = RouterScore::kSigmoid;
  grouped.router.has_selection_bias = true;
  grouped.router.num_groups = 8;
  grouped.router.topk_groups = 4;
  grouped.router.group_score = GroupScore::kTop2Sum;
  MoeSpec unnormed = make_spec(60, 4, 64, 32, DType::kBF16);
  unnormed.router.renormalize = Renormalize::kNone;
  MoeSpec many = make_spec(64, 48, 64, 32, DType::kBF16);
  many.num_zero_experts = 9;
  for (const MoeSpec& spec : {grouped, unnormed, many, make_spec(128, 8, 64, 32, DType::kBF16),
                              make_spec(1024, 32, 32, 32, DType::kBF16)}) {
    Both both(spec, {.max_tokens = 256});
    for (const int64_t tokens : {1, 8, 300}) {
      SCOPED_TRACE(testing::describe(spec) + ", T" + std::to_string(tokens));
      std::mt19937 generator(3);
      LimitedCall call{.hidden = random_tensor(DType::kBF16, tokens, spec.hidden_size, 3)};
      for (const int64_t top_k : {int64_t{1}, spec.top_k - 1, spec.top_k}) {
        call.top_k = top_k;
        call.bans = random_bans(spec, 1, spec.top_k, generator);
        call.expert_budget = 0;
        both.expect_alike(call);
        call.expert_budget = spec.top_k + 5;
        both.expect_alike(call);
        if (HasFailure()) return;
      }
    }
  }
}

// Ids may be of either width, name nothing, or nobody.
Tensor given_ids(const MoeSpec& spec, DType dtype, std::mt19937& generator) {
  Tensor ids(dtype, {kTokens, num_slots(spec)});
  for (int64_t i = 0; i < ids.shape().num_elements(); ++i) {
    const int64_t slot = i % num_slots(spec);
    int64_t id = static_cast<int64_t>(generator() % static_cast<size_t>(num_columns(spec) + 3)) - 1;
    if (slot >= spec.top_k) id = generator() % 4 == 0 ? -1 : spec.num_experts + slot - spec.top_k;
    if (dtype == DType::kI32) {
      ids.as<int32_t>()[i] = static_cast<int32_t>(id);
    } else {
      ids.as<int64_t>()[i] = generator() % 9 == 0 ? id + (int64_t{1} << 33) : id;
    }
  }
  return ids;
}

TEST_F(CudaChoiceLimits, GivenIds_LoseTheSlotsThatTheHostDrops) {
  for (uint32_t seed = 800; seed < 824; ++seed) {
    const MoeSpec spec = testing::SpecDraw(seed).draw();
    SCOPED_TRACE("seed " + std::to_string(seed) + ", " + testing::parts_text(spec));
    std::mt19937 generator(seed);
    Both both(spec, {.max_tokens = 8, .id_policy = IdPolicy::kSkip});
    LimitedCall call{.hidden = random_tensor(spec.weight_dtype, kTokens, spec.hidden_size, seed)};
    call.top_k = 1 + static_cast<int64_t>(generator() % static_cast<size_t>(spec.top_k));
    call.bans = random_bans(spec, kTokens, call.top_k, generator);
    call.ids = given_ids(spec, seed % 2 == 0 ? DType::kI32 : DType::kI64, generator);
    call.logits = random_tensor(DType::kF32, kTokens, num_logits(spec), seed);
    both.expect_alike(call);
    if (spec.shared.mode != SharedMode::kRouterWeight) {
      call.logits = {};
      call.weights =
          random_tensor(seed % 3 == 0 ? DType::kBF16 : DType::kF32, kTokens, num_slots(spec), seed);
      both.expect_alike(call);
    }
    if (HasFailure()) return;
  }
}

TEST_F(CudaChoiceLimits, FewerExperts_AreRoutedAsByALayerThatHasFewer) {
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, 64, 3);
  for (const int64_t top_k : {1, 3, 5}) {
    Both wide(make_spec(16, 6, 64, 32, DType::kBF16));
    Both narrow(make_spec(16, top_k, 64, 32, DType::kBF16));
    const LayerOutput few = wide.run_on_device({.hidden = copy_of(hidden), .top_k = top_k});
    const LayerOutput expected = narrow.run_on_device({.hidden = copy_of(hidden)});
    for (int64_t token = 0; token < kTokens; ++token) {
      for (int64_t slot = 0; slot < 6; ++slot) {
        const int64_t at = token * 6 + slot;
        const bool is_filled = slot < top_k;
        EXPECT_EQ(few.ids.as<int32_t>()[at],
                  is_filled ? expected.ids.as<int32_t>()[token * top_k + slot] : -1);
        EXPECT_EQ(few.weights.as<float>()[at],
                  is_filled ? expected.weights.as<float>()[token * top_k + slot] : 0.0F);
      }
    }
  }
}

TEST_F(CudaChoiceLimits, ABudget_IsOfAllChunksAndKeepsTheLowerOfEqualIds) {
  const MoeSpec spec = make_spec(16, 3, 64, 32, DType::kBF16);
  Both whole(spec);
  Both cut(spec, {.max_tokens = 4});
  const Tensor hidden = random_tensor(DType::kBF16, kTokens, 64, 3);
  for (const int64_t budget : {3, 5, 8, 16}) {
    LimitedCall call{.hidden = copy_of(hidden), .expert_budget = budget};
    const LayerOutput output = whole.expect_alike(call);
    EXPECT_TRUE(testing::same_bits(cut.run_on_device(call).ids, output.ids)) << budget;
    EXPECT_LE(std::ssize(distinct(output.ids, 16)), budget);
  }
  Both small(make_spec(6, 2, 64, 32, DType::kBF16));
  LimitedCall ties{.hidden = random_tensor(DType::kBF16, 3, 64, 3),
                   .expert_budget = 3,
                   .logits = Tensor(DType::kF32, {3, 6})};
  std::fill_n(ties.logits.as<float>(), 18, -9.0F);
  for (const int64_t at : {4, 5, 8, 9, 12, 13}) ties.logits.as<float>()[at] = 1.0F;
  EXPECT_EQ(distinct(small.expect_alike(ties).ids, 6), (std::set<int32_t>{0, 1, 2}));
}

TEST_F(CudaChoiceLimits, RedundantExperts_ServeWhatIsLeft) {
  const MoeSpec spec = make_spec(6, 2, 64, 32, DType::kBF16);
  Both both(spec, {.max_tokens = 8}, {.num_redundant_experts = 3, .reduce = Reduce::kPartial});
  std::mt19937 generator(4);
  LimitedCall call{.hidden = random_tensor(DType::kBF16, kTokens, 64, 3),
                   .bans = random_bans(spec, kTokens, 2, generator)};
  both.expect_alike(call);
  call.bans = {};
  call.top_k = 1;
  call.expert_budget = 2;
  EXPECT_LE(std::ssize(distinct(both.expect_alike(call).ids, 6)), 2);
}

// Flags in device memory cannot be looked at: what is missing is counted.
TEST_F(CudaChoiceLimits, TooFewExpertsOnTheDevice_LeaveSlotsEmptyAndCount) {
  const MoeSpec spec = make_spec(6, 3, 64, 32, DType::kBF16);
  DeviceLayer owned(spec, {.max_tokens = 8});
  const Tensor hidden = random_tensor(DType::kBF16, 4, 64, 3);
  Tensor flags = no_bans(spec, 4);
  for (const int64_t at : {0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14}) {
    flags.as<uint8_t>()[at] = 1;
  }
  const DeviceTensor bans = owned.queue.upload(flags.const_view());
  DeviceForward forward(owned, hidden.view(), DType::kF32);
  forward.capture_routing();
  forward.args.banned_experts = bans.const_view();
  forward.enqueue();
  const LayerOutput output = forward.output();
  const auto filled = [&](int64_t token) {
    return std::count_if(output.ids.as<int32_t>() + token * 3,
                         output.ids.as<int32_t>() + token * 3 + 3,
                         [](int32_t id) { return id >= 0; });
  };
  EXPECT_EQ(filled(0), 1);
  EXPECT_EQ(output.ids.as<int32_t>()[0], 5);
  EXPECT_EQ(output.weights.as<float>()[0], 1.0F);
  EXPECT_EQ(filled(1), 0);
  EXPECT_EQ(filled(2), 3);
  EXPECT_EQ(filled(3), 3);
  EXPECT_EQ(owned.layer.status().skipped_ids, 2 + 3);
  EXPECT_EQ(owned.layer.status().tokens_without_finite_logit, 1);
  for (int64_t col = 0; col < 64; ++col) EXPECT_EQ(output.out.as<float>()[64 + col], 0.0F);
}

TEST_F(CudaChoiceLimits, AGraph_ReadsFlagsOfTheDeviceAnewAndKeepsThoseOfTheHost) {
  const MoeSpec spec = make_spec(24, 3, 256, 128, DType::kBF16);
  for (const int64_t tokens : {4, 40}) {
    for (const int64_t budget : {0, 7}) {
      DeviceLayer owned(spec, {.max_tokens = 16});
      const auto plain = [&](const Tensor& hidden, const ConstTensorView& bans) {
        DeviceForward forward(owned, hidden.view(), DType::kF32);
        forward.args.banned_experts = bans;
        forward.args.expert_budget = budget;
        forward.enqueue();
        return forward.out();
      };
      cudaStream_t const stream = to_cuda(owned.queue.stream());
      Tensor host_flags = bans_of(spec, {1, 5, 9});
      DeviceTensor flags = owned.queue.upload(host_flags.const_view());
      DeviceForward captured(owned, random_tensor(DType::kBF16, tokens, 256, 1).view(),
                             DType::kF32);
      captured.args.expert_budget = budget;
      captured.args.banned_experts = flags.const_view();
      const cuda::OwnedGraph device_graph = cuda::capture(stream, [&] { captured.enqueue(); });
      captured.args.banned_experts = host_flags.const_view();
      const cuda::OwnedGraph host_graph = cuda::capture(stream, [&] { captured.enqueue(); });
      const Tensor at_capture = bans_of(spec, {1, 5, 9});
      std::fill_n(host_flags.as<uint8_t>(), 24, uint8_t{1});
      for (uint32_t seed = 2; seed < 6; ++seed) {
        std::mt19937 generator(seed);
        const Tensor hidden = random_tensor(DType::kBF16, tokens, 256, seed);
        const Tensor bans = random_bans(spec, 1, 3, generator);
        owned.queue.upload(bans.const_view(), flags.view());
        const Tensor expected = plain(hidden, flags.const_view());
        const Tensor expected_at_capture = plain(hidden, at_capture.const_view());
        owned.queue.upload(hidden.const_view(), captured.hidden().view());
        const auto replay = [&](const cuda::OwnedGraph& graph) {
          owned.queue.fill(captured.args.out, 0xFF);
          cuda::check(cudaGraphLaunch(graph.get(), stream), "cudaGraphLaunch");
          return captured.out();
        };
        EXPECT_TRUE(testing::same_bits(replay(device_graph), expected)) << tokens;
        EXPECT_TRUE(testing::same_bits(replay(host_graph), expected_at_capture)) << tokens;
      }
    }
  }
}

TEST_F(CudaChoiceLimits, LimitsOutOfRange_AreRefusedByName) {
  const MoeSpec spec = make_spec(8, 3, 64, 32, DType::kBF16);
  DeviceLayer owned(spec, {.max_tokens = 8});
  const Tensor hidden = random_tensor(DType::kBF16, 4, 64, 3);
  const testing::GivenRouting routing = testing::random_routing(4, 8, 3, 9);
  const Tensor by_token = no_bans(spec, 4);
  const Tensor all = bans_of(spec, {0, 1, 2, 3, 4, 5, 6, 7});
  const Tensor most = bans_of(spec, {0, 1, 2, 3, 4, 5});
  const auto refusal = [&](const auto& change, bool given = false) -> std::string {
    DeviceForward forward(owned, hidden.view(), DType::kBF16);
    if (given) forward.route_by(routing.ids, routing.weights);
    change(forward.args);
    try {
      forward.enqueue();
    } catch (const Error& error) {
      const Tensor out = forward.out();
      const std::vector<std::byte> poison(out.size_bytes(), std::byte{0xFF});
      EXPECT_EQ(std::memcmp(out.as<std::byte>(), poison.data(), poison.size()), 0);
      return std::string(to_string(error.code())) + " " + error.detail().tensor;
    }
    return "taken";
  };
  using Args = ForwardArgs;
  EXPECT_EQ(refusal([](Args& args) { args.top_k = 4; }), "kInvalidArgument top_k");
  EXPECT_EQ(refusal([](Args& args) { args.top_k = -1; }), "kInvalidArgument top_k");
  EXPECT_EQ(refusal([](Args& args) { args.expert_budget = 2; }), "kInvalidArgument expert_budget");
  EXPECT_EQ(refusal([](Args& args) { args.expert_budget = 9; }), "kInvalidArgument expert_budget");
  EXPECT_EQ(refusal([](Args& args) { args.expert_budget = -1; }), "kInvalidArgument expert_budget");
  EXPECT_EQ(refusal([](Args& args) { args.expert_budget = 4; }, true),
            "kUnsupported expert_budget");
  EXPECT_EQ(refusal([&](Args& args) { args.banned_experts = all.const_view(); }),
            "kInvalidArgument banned_experts");
  EXPECT_EQ(refusal([&](Args& args) { args.banned_experts = most.const_view(); }),
            "kInvalidArgument banned_experts");
  EXPECT_EQ(refusal([&](Args& args) { args.banned_experts = by_token.const_view(); }),
            "kDevice banned_experts");
  EXPECT_EQ(refusal([&](Args& args) {
              args.banned_experts = all.const_view();
              args.banned_experts.dtype = DType::kU8;
            }),
            "kDType banned_experts");
  EXPECT_EQ(refusal([&](Args& args) {
              args.banned_experts = all.const_view();
              args.banned_experts.shape = {7};
            }),
            "kShape banned_experts");
  EXPECT_EQ(refusal([&](Args& args) {
              args.banned_experts = most.const_view();
              args.top_k = 2;
            }),
            "taken");
  EXPECT_EQ(refusal([&](Args& args) { args.banned_experts = all.const_view(); }, true), "taken");
}

}  // namespace
}  // namespace conclave
