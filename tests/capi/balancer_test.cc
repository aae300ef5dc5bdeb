// A balancer through the C interface: hot experts spread over ranks, and every forward keeps its
// bits.
#include "capi/local_ranks.h"
#include "support/layer_fixture.h"

#include <limits>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::context_of;
using testing::expect_error;
using testing::Handle;
using testing::local_group;
using testing::make;
using testing::on_threads;
using testing::random_tensor;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;

// Experts 0 and 1, on one rank at first, get most rows.
constexpr const char* kSpec =
    R"({"num_experts": 8, "top_k": 2, "hidden_size": 40, "intermediate_size": 24,
        "weight_dtype": "F32", "has_gate": false,
        "router": {"name": "simulated", "simulated": {"distribution": "zipf", "seed": 3}}})";

struct Weights {
  Tensor gate_up = random_tensor(DType::kF32, 8 * 48, 40, 1);
  Tensor down = random_tensor(DType::kF32, 8 * 40, 24, 2);

  Handle<conclave_source> source() const {
    const conclave_tensor up = tensor_of({gate_up.const_view().data, DType::kF32, {8, 48, 40}});
    const conclave_tensor of_down = tensor_of({down.const_view().data, DType::kF32, {8, 40, 24}});
    const conclave_named_tensor named[] = {{"gate_up", &up}, {"down", &of_down}};
    return make<conclave_source>(&conclave_source_from_tensors, named, size_t{2}, nullptr);
  }
};

// A rank with two layers, and a balancer that outlives the handles of both.
struct Rank {
  Rank(conclave_communicator* communicator, conclave_communicator* second, size_t rank,
       uint32_t flags)
      : context(context_of(communicator)) {
    const auto spec = make<conclave_spec>(&conclave_spec_from_json, kSpec);
    auto parallel = sized<conclave_parallel>();
    parallel.ep_size = 2;
    parallel.ep_rank = static_cast<int32_t>(rank);
    parallel.num_redundant_experts = 2;
    auto options = sized<conclave_layer_options>();
    options.max_tokens = 64;
    options.spare_experts = flags == 0 ? 1 : 0;
    for (int i = 0; i < 2; ++i) {
      layers.push_back(make<conclave_layer>(&conclave_layer_create, context.get(), spec.get(),
                                            Weights().source().get(), &options, &parallel));
    }
    auto balancing = sized<conclave_balancer_options>();
    balancing.communicator = second;
    balancing.window_size = 5;
    balancing.step_interval = 12;
    balancing.processor_share = 1;
    balancing.flags = flags;
    conclave_layer* const handles[] = {layers[0].get(), layers[1].get()};
    balancer = make<conclave_balancer>(&conclave_balancer_create, context.get(), handles, size_t{2},
                                       &balancing);
  }

  // A layer's forward, its rows added where the balancer counts them, or uncounted.
  Tensor forward(size_t layer, bool counts) const {
    Tensor out(DType::kF32, hidden.shape());
    const conclave_tensor in = tensor_of(hidden.const_view());
    const conclave_tensor written = tensor_of(out.const_view());
    const conclave_tensor any = tensor_of(logits.const_view());
    auto args = sized<conclave_forward_args>();
    args.hidden = &in;
    args.out = &written;
    args.router_logits = &any;
    if (counts) {
      EXPECT_EQ(
          conclave_balancer_load(balancer.get(), layer, &args.expert_load, &args.expert_load_count),
          CONCLAVE_OK);
    }
    EXPECT_EQ(conclave_layer_forward(layers[layer].get(), &args), CONCLAVE_OK)
        << conclave_last_error_message();
    return out;
  }
  conclave_balancer_status status() const {
    auto now = sized<conclave_balancer_status>();
    EXPECT_EQ(conclave_balancer_get_status(balancer.get(), &now), CONCLAVE_OK);
    return now;
  }

  Handle<conclave_context> context;
  std::vector<Handle<conclave_layer>> layers;
  Handle<conclave_balancer> balancer;
  Tensor hidden = random_tensor(DType::kF32, 64, 40, 4);
  Tensor logits = random_tensor(DType::kF32, 64, 8, 5);
};

class Balancing : public ::testing::TestWithParam<uint32_t> {};

TEST_P(Balancing, HotExperts_AreSpread_AndEveryForwardKeepsItsBits) {
  auto group = local_group(2);
  auto second = local_group(2);
  on_threads(2, [&](size_t rank) {
    Rank mine(group[rank].get(), second[rank].get(), rank, GetParam());
    second[rank].reset();  // the balancer holds it
    const Tensor expected = mine.forward(0, false);
    double first = 0;
    // As many steps on each rank: the last ones let a rebalance that is under way come to an end.
    for (int step = 0; step < 300; ++step) {
      EXPECT_TRUE(same_bits(mine.forward(0, true), expected));
      EXPECT_TRUE(same_bits(mine.forward(1, true), expected));
      if (step == 290) {
        EXPECT_EQ(conclave_balancer_rebalance(mine.balancer.get()), CONCLAVE_OK);
      }
      EXPECT_EQ(conclave_balancer_step(mine.balancer.get()), CONCLAVE_OK)
          << conclave_last_error_message();
      if (step == 0) first = mine.status().balancedness;
    }
    const conclave_balancer_status last = mine.status();
    EXPECT_EQ(last.steps, 300);
    EXPECT_GT(last.rebalances, 0);
    EXPECT_GT(last.experts_moved, 0);
    EXPECT_GT(last.balancedness, first);
    EXPECT_TRUE(same_bits(mine.forward(0, false), expected));
    // It has what it needs of layers and context.
    mine.layers.clear();
    mine.context.reset();
    EXPECT_EQ(mine.status().steps, 300);
    int64_t* load = nullptr;
    size_t count = 0;
    EXPECT_EQ(conclave_balancer_load(mine.balancer.get(), 1, &load, &count), CONCLAVE_OK);
    EXPECT_EQ(count, 8U);
    mine.balancer.reset();
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, Balancing,
                         ::testing::Values(0U, uint32_t{CONCLAVE_BALANCER_BETWEEN_FORWARDS}));

TEST(BalancerOfC, BadRequests_NameTheField) {
  auto group = local_group(1);
  const auto context = context_of(group[0].get());
  const auto spec = make<conclave_spec>(&conclave_spec_from_json, kSpec);
  const Weights weights;
  const auto source = weights.source();
  const auto layer = make<conclave_layer>(&conclave_layer_create, context.get(), spec.get(),
                                          source.get(), nullptr, nullptr);
  const auto expect = [&](conclave_status status, const char* names, size_t count, auto spoil) {
    SCOPED_TRACE(names);
    auto options = sized<conclave_balancer_options>();
    options.communicator = group[0].get();
    spoil(options);
    conclave_layer* const layers[] = {layer.get()};
    conclave_balancer* out = nullptr;
    expect_error(conclave_balancer_create(context.get(), layers, count, &options, &out), status,
                 names);
    EXPECT_EQ(out, nullptr);
  };
  constexpr auto kInvalid = CONCLAVE_ERROR_INVALID_ARGUMENT;
  constexpr auto kMost = std::numeric_limits<int64_t>::max();
  expect(kInvalid, "layers", 0, [](auto&) {});
  expect(kInvalid, "num_layers", ~size_t{0}, [](auto&) {});
  expect(kInvalid, "flags", 1, [](auto& o) { o.flags = 4; });
  expect(kInvalid, "window_size", 1, [](auto& o) { o.window_size = kMost; });
  expect(kInvalid, "window_size", 1, [](auto& o) { o.window_size = -1; });
  expect(kInvalid, "step_interval", 1, [](auto& o) { o.step_interval = kMost; });
  expect(kInvalid, "log_balancedness_interval", 1,
         [](auto& o) { o.log_balancedness_interval = -1; });
  // A migration would refuse these later, in a step and on one rank alone.
  for (const double share :
       {-0.5, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    expect(kInvalid, "processor_share", 1, [&](auto& o) { o.processor_share = share; });
  }
  for (const size_t bytes : {size_t{1}, ~size_t{0}}) {
    expect(kInvalid, "piece_bytes", 1, [&](auto& o) { o.piece_bytes = bytes; });
  }
  for (const double gain : {-0.5, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    expect(kInvalid, "least_gain", 1, [&](auto& o) { o.least_gain = gain; });
  }
  expect(kInvalid, "num_nodes", 1, [](auto& o) { o.num_nodes = -1; });
  expect(kInvalid, "struct_size", 1, [](auto& o) { o.struct_size = 4; });
  expect(CONCLAVE_ERROR_UNKNOWN_NAME, "rule", 1, [](auto& o) { o.rule = "by the moon"; });
  expect(CONCLAVE_ERROR_NULL_POINTER, "options.communicator", 1,
         [](auto& o) { o.communicator = nullptr; });

  auto options = sized<conclave_balancer_options>();
  options.communicator = group[0].get();
  conclave_layer* const layers[] = {layer.get()};
  const auto balancer = make<conclave_balancer>(&conclave_balancer_create, context.get(), layers,
                                                size_t{1}, &options);
  int64_t* load = nullptr;
  size_t count = 7;
  expect_error(conclave_balancer_load(balancer.get(), ~size_t{0}, &load, &count), kInvalid, "");
  EXPECT_EQ(count, 7U);
  EXPECT_EQ(load, nullptr);
}

}  // namespace
}  // namespace conclave
