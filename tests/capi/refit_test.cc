// New weights through the C interface: what C++ would have, in every mode, by experts and by
// tensors, over ranks, and what is refused.
#include "conclave/refit.h"

#include "capi/arrays.h"
#include "capi/layers.h"
#include "capi/local_ranks.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::Arrays;
using testing::expect_error;
using testing::Handle;
using testing::kArraysSpec;
using testing::kExperts;
using testing::kHidden;
using testing::kWidth;
using testing::make;
using testing::random_tensor;
using testing::same_bits;
using testing::scope_of;
using testing::sized;
using testing::tensor_of;

class Refits : public ::testing::Test {
 protected:
  Handle<conclave_layer> layer_of(const Arrays& arrays,
                                  const conclave_layer_options* options = nullptr) const {
    return make<conclave_layer>(&conclave_layer_create, context_.get(), spec_.get(),
                                arrays.source.get(), options, nullptr);
  }
  static uint64_t hash_of(const conclave_layer* layer) {
    uint64_t hash = 0;
    EXPECT_EQ(conclave_layer_content_hash(layer, &hash), CONCLAVE_OK)
        << conclave_last_error_message();
    return hash;
  }
  static uint64_t epoch_of(const conclave_layer* layer) {
    auto stats = sized<conclave_layer_stats>();
    EXPECT_EQ(conclave_layer_get_stats(layer, &stats), CONCLAVE_OK);
    return stats.refit_epoch;
  }
  Tensor forward(const conclave_layer* layer) const {
    Tensor out(DType::kF32, hidden_.shape());
    testing::forward(layer, hidden_, out);
    return out;
  }
  static void expect_ok(conclave_status status) {
    EXPECT_EQ(status, CONCLAVE_OK) << conclave_last_error_message();
  }

  Handle<conclave_context> context_ = testing::make_context();
  Handle<conclave_spec> spec_ = make<conclave_spec>(&conclave_spec_from_json, kArraysSpec);
  Arrays old_{1};
  Arrays new_{11};
  Tensor hidden_ = random_tensor(DType::kF32, 7, kHidden, 5);
};

TEST_F(Refits, WholeLayers_InEveryMode) {
  const auto expected = layer_of(new_);
  for (const conclave_refit_mode mode :
       {CONCLAVE_REFIT_MODE_STAGED, CONCLAVE_REFIT_MODE_STAGED_COPY,
        CONCLAVE_REFIT_MODE_IN_PLACE}) {
    SCOPED_TRACE(mode);
    const auto layer = layer_of(old_);
    const Tensor before = forward(layer.get());
    auto options = sized<conclave_refit_options>();
    options.mode = mode;
    options.epoch = 40;
    options.num_threads = 2;
    options.flags = CONCLAVE_REFIT_KEEPS_MEMORY;
    const auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), &options);
    int32_t staged = 5;
    expect_ok(conclave_refit_is_staged(refit.get(), &staged));
    EXPECT_EQ(staged, 0);
    expect_error(conclave_refit_commit(refit.get()), CONCLAVE_ERROR_STATE, "conclave_refit_scope");
    expect_ok(conclave_refit_stage(refit.get(), new_.source.get(), nullptr));
    expect_ok(conclave_refit_is_staged(refit.get(), &staged));
    EXPECT_EQ(staged, 1);
    if (mode != CONCLAVE_REFIT_MODE_IN_PLACE) {
      EXPECT_TRUE(same_bits(forward(layer.get()), before));
    }
    expect_ok(conclave_refit_commit(refit.get()));
    EXPECT_TRUE(same_bits(forward(layer.get()), forward(expected.get())));
    EXPECT_EQ(hash_of(layer.get()), hash_of(expected.get()));
    EXPECT_EQ(epoch_of(layer.get()), 40U);
    expect_error(conclave_refit_commit(refit.get()), CONCLAVE_ERROR_STATE, "");
    expect_error(conclave_refit_stage(refit.get(), old_.source.get(), nullptr),
                 CONCLAVE_ERROR_STATE, "");
    expect_ok(conclave_refit_rollback(refit.get()));
    expect_ok(conclave_refit_is_staged(refit.get(), &staged));
    EXPECT_EQ(staged, 1);
    EXPECT_EQ(epoch_of(layer.get()), 40U);
    EXPECT_EQ(hash_of(layer.get()), hash_of(expected.get()));
  }
}

// Two experts from arrays that hold these alone, then the router from one without any.
TEST_F(Refits, Parts_FromArraysOfPartsAlone) {
  const auto layer = layer_of(old_);
  const std::vector<int32_t> experts = {2, 3};
  auto part = sized<conclave_source_options>();
  part.num_experts = kExperts;
  part.experts = experts.data();
  part.experts_count = experts.size();
  const auto two = new_.source_of(&part, 2, {"gate_up", "down"}, 2);
  const conclave_refit_scope named = scope_of(experts);
  auto options = sized<conclave_refit_options>();
  options.scope = &named;
  auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), &options);
  const std::vector<int32_t> first = {2};
  const std::vector<const char*> of_gate = {"gate_up"};
  const conclave_refit_scope piece = scope_of(first, of_gate);
  expect_ok(conclave_refit_stage(refit.get(), two.get(), &piece));
  expect_error(conclave_refit_commit(refit.get()), CONCLAVE_ERROR_STATE, "expert 3");
  expect_ok(conclave_refit_stage(refit.get(), two.get(), nullptr));
  expect_ok(conclave_refit_commit(refit.get()));

  part.experts = nullptr;
  part.experts_count = 0;
  const auto router = new_.source_of(&part, 0, {"router"});
  const std::vector<const char*> of_layer = {"router"};
  const conclave_refit_scope last = scope_of({}, of_layer);
  options.scope = &last;
  refit = make<conclave_refit>(&conclave_refit_create, layer.get(), &options);
  expect_ok(conclave_refit_stage(refit.get(), router.get(), nullptr));
  expect_ok(conclave_refit_commit(refit.get()));
  EXPECT_EQ(epoch_of(layer.get()), 2U);

  // The same by C++, from all arrays at once.
  Arrays merged(1);
  for (const auto& [to, from] :
       {std::pair(&merged.gate_up, &new_.gate_up), std::pair(&merged.down, &new_.down)}) {
    const size_t bytes = to->size_bytes() / kExperts;
    std::copy_n(from->as<std::byte>() + 2 * bytes, 2 * bytes, to->as<std::byte>() + 2 * bytes);
  }
  std::copy_n(new_.router.as<std::byte>(), new_.router.size_bytes(), merged.router.as<std::byte>());
  const auto expected = layer_of(merged);
  EXPECT_TRUE(same_bits(forward(layer.get()), forward(expected.get())));
  EXPECT_EQ(hash_of(layer.get()), hash_of(expected.get()));
}

TEST_F(Refits, BadRequests_AreTypedErrors) {
  const auto layer = layer_of(old_);
  const Tensor before = forward(layer.get());
  const auto expect = [&](conclave_status status, const char* names, auto spoil) {
    SCOPED_TRACE(names);
    auto options = sized<conclave_refit_options>();
    auto scope = sized<conclave_refit_scope>();
    options.scope = &scope;
    spoil(options, scope);
    conclave_refit* out = nullptr;
    expect_error(conclave_refit_create(layer.get(), &options, &out), status, names);
    EXPECT_EQ(out, nullptr);
  };
  constexpr auto kInvalid = CONCLAVE_ERROR_INVALID_ARGUMENT;
  const int32_t beyond[] = {1, kExperts};
  const char* const names[] = {"gate_up", "left_over"};
  const char* const nothing[] = {"gate_up", nullptr};
  expect(kInvalid, "conclave_refit_scope.experts", [&](auto&, auto& scope) {
    scope.experts = beyond;
    scope.experts_count = 2;
  });
  expect(kInvalid, "scope.experts_count", [&](auto&, auto& scope) {
    scope.experts = beyond;
    scope.experts_count = ~size_t{0};
  });
  expect(CONCLAVE_ERROR_NULL_POINTER, "scope.experts",
         [&](auto&, auto& scope) { scope.experts_count = 1; });
  expect(CONCLAVE_ERROR_MISALIGNED, "scope.experts", [&](auto&, auto& scope) {
    scope.experts = reinterpret_cast<const int32_t*>(reinterpret_cast<const char*>(beyond) + 1);
    scope.experts_count = 1;
  });
  expect(kInvalid, "left_over", [&](auto&, auto& scope) {
    scope.tensors = names;
    scope.tensors_count = 2;
  });
  expect(CONCLAVE_ERROR_NULL_POINTER, "scope.tensors[1]", [&](auto&, auto& scope) {
    scope.tensors = nothing;
    scope.tensors_count = 2;
  });
  expect(kInvalid, "scope.tensors_count", [&](auto&, auto& scope) {
    scope.tensors = names;
    scope.tensors_count = ~size_t{0} / 8;
  });
  expect(kInvalid, "shared_up", [&](auto&, auto& scope) {
    static const char* const shared[] = {"shared_gate_up"};
    scope.tensors = shared;
    scope.tensors_count = 1;
  });
  for (const int32_t number : {-1, 3, std::numeric_limits<int32_t>::max()}) {
    expect(kInvalid, "options.mode", [&](auto& options, auto&) { options.mode = number; });
  }
  for (const int32_t number : {-1, 1025, std::numeric_limits<int32_t>::min()}) {
    expect(kInvalid, "num_threads", [&](auto& options, auto&) { options.num_threads = number; });
  }
  expect(kInvalid, "flags", [&](auto& options, auto&) { options.flags = 4; });
  expect(kInvalid, "reserved", [&](auto& options, auto&) { options.reserved = 1; });
  expect(kInvalid, "epoch", [&](auto& options, auto&) { options.epoch = ~uint64_t{0}; });
  expect(kInvalid, "struct_size", [&](auto& options, auto&) { options.struct_size = 12; });
  expect(kInvalid, "struct_size", [&](auto&, auto& scope) { scope.struct_size = 0; });
  expect(kInvalid, "executor.concurrency", [&](auto& options, auto&) {
    static auto executor = sized<conclave_executor>();
    executor.run = [](void*, conclave_task, void*) {};
    options.executor = &executor;
  });

  const auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), nullptr);
  conclave_refit* second = nullptr;
  expect_error(conclave_refit_create(layer.get(), nullptr, &second), CONCLAVE_ERROR_STATE, "");
  expect_error(conclave_layer_reload(layer.get(), new_.source.get(), 0), CONCLAVE_ERROR_STATE, "");
  const auto checkpoint = testing::open_model();
  expect_error(conclave_refit_stage_from_checkpoint(refit.get(), checkpoint.get(), 99, nullptr),
               CONCLAVE_ERROR_LAYER_NOT_FOUND, "");
  expect_error(conclave_refit_stage_from_checkpoint(refit.get(), checkpoint.get(), 0, nullptr),
               CONCLAVE_ERROR_TENSOR_SHAPE, "");
  expect_ok(conclave_refit_rollback(refit.get()));
  expect_error(conclave_refit_stage(refit.get(), new_.source.get(), nullptr), CONCLAVE_ERROR_STATE,
               "");
  EXPECT_TRUE(same_bits(forward(layer.get()), before));
  EXPECT_EQ(epoch_of(layer.get()), 0U);
}

TEST_F(Refits, SourcesOfParts_AreCheckedWhereTheyAreMade) {
  const int32_t experts[] = {2, 3, 2, 6};
  const auto expect = [&](conclave_status status, const char* names, int64_t num_experts,
                          const int32_t* of, size_t count) {
    auto part = sized<conclave_source_options>();
    part.num_experts = num_experts;
    part.experts = of;
    part.experts_count = count;
    const conclave_tensor router = tensor_of(new_.router.const_view());
    conclave_tensor down = tensor_of(new_.down.const_view());
    down.rank = 3;
    down.shape[0] = kExperts;
    down.shape[1] = kHidden;
    down.shape[2] = kWidth;
    const conclave_named_tensor named[] = {{"router", &router}, {"down", &down}};
    conclave_source* out = nullptr;
    expect_error(conclave_source_from_tensors(named, 2, &part, &out), status, names);
    EXPECT_EQ(out, nullptr);
  };
  constexpr auto kInvalid = CONCLAVE_ERROR_INVALID_ARGUMENT;
  expect(kInvalid, "num_experts", 0, experts, 2);
  expect(kInvalid, "num_experts", -6, experts, 2);
  expect(kInvalid, "num_experts", std::numeric_limits<int64_t>::max(), nullptr, 0);
  expect(kInvalid, "experts", 6, experts, 3);
  expect(kInvalid, "experts", 6, experts + 2, 2);
  expect(kInvalid, "experts_count", 6, experts, ~size_t{0});
  expect(CONCLAVE_ERROR_NULL_POINTER, "experts", 6, nullptr, 2);
  expect(CONCLAVE_ERROR_SHAPE, "down", 6, experts, 2);
}

// Threads of the application's own pack, and what they do wrong ends the stage alone.
TEST_F(Refits, AnExecutorOfTheApplications_Packs) {
  const auto layer = layer_of(old_);
  static int runs = 0;
  static bool is_lazy = true;
  auto executor = sized<conclave_executor>();
  executor.concurrency = 2;
  executor.run = [](void*, conclave_task task, void* state) {
    ++runs;
    task(state, 0);
    if (!is_lazy) task(state, 1);
  };
  auto options = sized<conclave_refit_options>();
  options.executor = &executor;
  const auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), &options);
  expect_error(conclave_refit_stage(refit.get(), new_.source.get(), nullptr), CONCLAVE_ERROR_STATE,
               "");
  is_lazy = false;
  expect_ok(conclave_refit_stage(refit.get(), new_.source.get(), nullptr));
  expect_ok(conclave_refit_commit(refit.get()));
  EXPECT_GT(runs, 1);
  EXPECT_EQ(hash_of(layer.get()), hash_of(layer_of(new_).get()));
}

// The mappings of the bundled model's files.
int64_t mappings() {
  std::ifstream maps("/proc/self/maps");
  int64_t count = 0;
  for (std::string line; std::getline(maps, line);) {
    count += line.find("qwen3-moe-tiny/model-") != std::string::npos ? 1 : 0;
  }
  return count;
}

// Weights that are read where they lie: a file that the layer no longer reads is let go, and no
// sooner.
TEST_F(Refits, SourcesThatAreReadInPlace_AreHeld) {
  hidden_ = random_tensor(DType::kBF16, 7, 88, 5);
  const auto open_mapped = [] {
    auto options = sized<conclave_checkpoint_options>();
    options.access = CONCLAVE_FILE_ACCESS_MAP;
    return make<conclave_checkpoint>(&conclave_checkpoint_open, testing::kModel, &options);
  };
  const auto layer_at = [&](int64_t index, conclave_weight_use use) {
    auto options = sized<conclave_layer_options>();
    options.weights = use;
    const auto checkpoint = open_mapped();
    return make<conclave_layer>(&conclave_layer_create_from_checkpoint, context_.get(),
                                checkpoint.get(), index, &options, nullptr);
  };
  const Tensor expected = forward(layer_at(1, CONCLAVE_WEIGHT_USE_PACKED).get());
  ASSERT_EQ(mappings(), 0);
  const auto layer = layer_at(0, CONCLAVE_WEIGHT_USE_IN_PLACE);
  const Tensor before = forward(layer.get());
  const int64_t of_one = mappings();
  ASSERT_GT(of_one, 0);
  const auto stage_layer = [&](conclave_refit* refit, int64_t index) {
    const auto checkpoint = open_mapped();
    expect_ok(conclave_refit_stage_from_checkpoint(refit, checkpoint.get(), index, nullptr));
  };
  {
    const auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), nullptr);
    stage_layer(refit.get(), 1);
    EXPECT_EQ(mappings(), 2 * of_one);
  }
  EXPECT_EQ(mappings(), of_one);
  EXPECT_TRUE(same_bits(forward(layer.get()), before));
  auto options = sized<conclave_refit_options>();
  const std::vector<const char*> experts = {"gate_up", "down"};
  const std::vector<const char*> of_layer = {"router"};
  for (const auto& names : {experts, of_layer}) {
    const conclave_refit_scope scope = scope_of({}, names);
    options.scope = &scope;
    const auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), &options);
    stage_layer(refit.get(), 1);
    expect_ok(conclave_refit_commit(refit.get()));
    EXPECT_EQ(mappings(), of_one);
  }
  EXPECT_TRUE(same_bits(forward(layer.get()), expected));
  EXPECT_EQ(epoch_of(layer.get()), 2U);
}

// Ranks go together; one that withdraws is named to the other, which keeps its weights as well.
TEST_F(Refits, OverRanks_AllOrNone) {
  auto group = testing::local_group(2, 20000);
  testing::on_threads(2, [&](size_t rank) {
    auto context = testing::context_of(group[rank].get());
    auto parallel = sized<conclave_parallel>();
    parallel.ep_size = 2;
    parallel.ep_rank = static_cast<int32_t>(rank);
    auto layer = make<conclave_layer>(&conclave_layer_create, context.get(), spec_.get(),
                                      old_.source.get(), nullptr, &parallel);
    const Tensor before = forward(layer.get());
    auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), nullptr);
    context.reset();  // the transaction holds it
    expect_ok(conclave_refit_stage(refit.get(), new_.source.get(), nullptr));
    if (rank == 1) {
      expect_ok(conclave_refit_withdraw(refit.get()));
    } else {
      expect_error(conclave_refit_commit(refit.get()), CONCLAVE_ERROR_COMM_MISMATCH,
                   "has withdrawn");
      EXPECT_EQ(testing::last_error().peer, 1);
      expect_ok(conclave_refit_rollback(refit.get()));
    }
    EXPECT_TRUE(same_bits(forward(layer.get()), before));
    refit = make<conclave_refit>(&conclave_refit_create, layer.get(), nullptr);
    expect_ok(conclave_refit_stage(refit.get(), new_.source.get(), nullptr));
    expect_ok(conclave_refit_commit(refit.get()));
    EXPECT_FALSE(same_bits(forward(layer.get()), before));
    EXPECT_EQ(epoch_of(layer.get()), 1U);
    layer.reset();
    refit.reset();
  });
}

// A rank that is refused where it begins is named too, whatever could not be read of its request.
TEST_F(Refits, RefusedOnOneRank_IsToldToTheOthers) {
  auto group = testing::local_group(2, 20000);
  const std::vector<int32_t> beyond = {kExperts};
  const conclave_refit_scope no_expert = scope_of(beyond, {});
  const std::vector<const char*> none = {"gait"};
  const conclave_refit_scope no_tensor = scope_of({}, none);
  auto expert = sized<conclave_refit_options>();
  expert.scope = &no_expert;
  auto tensor = sized<conclave_refit_options>();
  tensor.scope = &no_tensor;
  auto size = sized<conclave_refit_options>();
  size.struct_size = 1;
  auto silent = expert;
  silent.flags = CONCLAVE_REFIT_SILENT_REFUSAL;
  const std::array<const conclave_refit_options*, 4> refused = {&expert, &tensor, &size, &silent};
  testing::on_threads(2, [&](size_t rank) {
    auto context = testing::context_of(group[rank].get());
    auto parallel = sized<conclave_parallel>();
    parallel.ep_size = 2;
    parallel.ep_rank = static_cast<int32_t>(rank);
    auto layer = make<conclave_layer>(&conclave_layer_create, context.get(), spec_.get(),
                                      old_.source.get(), nullptr, &parallel);
    const Tensor before = forward(layer.get());
    for (const conclave_refit_options* options : refused) {
      if (rank == 1) {
        conclave_refit* never = nullptr;
        expect_error(conclave_refit_create(layer.get(), options, &never),
                     CONCLAVE_ERROR_INVALID_ARGUMENT, "");
        EXPECT_EQ(never, nullptr);
        if (options == &silent) expect_ok(conclave_layer_withdraw_refit(layer.get()));
      } else {
        auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), nullptr);
        expect_ok(conclave_refit_stage(refit.get(), new_.source.get(), nullptr));
        expect_error(conclave_refit_commit(refit.get()), CONCLAVE_ERROR_COMM_MISMATCH,
                     "has withdrawn");
        EXPECT_EQ(testing::last_error().peer, 1);
      }
    }
    EXPECT_TRUE(same_bits(forward(layer.get()), before));
    layer.reset();
  });
}

}  // namespace
}  // namespace conclave
