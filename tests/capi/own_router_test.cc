// Routers that an application gives as functions of C: what they are told, what they may do, and
// what becomes of a call where they do something else.
#include "capi/layers.h"
#include "capi/local_ranks.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace conclave {
namespace {

using testing::expect_error;
using testing::Handle;
using testing::make;
using testing::random_tensor;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;

enum class Habit {
  kRotates,
  kFails,
  kFailsByNoStatus,
  kLeavesAnId,
  kLeavesTheLastId,
  kLeavesAWeight,
  kWritesNothing,
  kChoosesBeyond,
  kCountsTooMany,
  kCallsTheLayer,
};

// Token t uses experts t, t + 1, ... (mod E), weighed by one over the slot's number.
struct Rotating {
  Habit habit = Habit::kRotates;
  std::atomic<int> calls = 0;
  std::atomic<int> released = 0;
  std::atomic<int64_t> most_tokens = 0;
  const conclave_layer* layer = nullptr;
  const conclave_forward_args* args = nullptr;
  conclave_status of_inner = CONCLAVE_OK;

  static conclave_status route(void* user, conclave_route_call* call) {
    auto& self = *static_cast<Rotating*>(user);
    ++self.calls;
    self.most_tokens = std::max(self.most_tokens.load(), call->num_tokens);
    EXPECT_EQ(call->struct_size, sizeof(conclave_route_call));
    if (call->scratch != nullptr) {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(call->scratch) % 64, 0U);
      std::memset(call->scratch, 0xA5, 96);
    }
    if (self.habit == Habit::kWritesNothing) return CONCLAVE_OK;
    for (int64_t token = 0; token < call->num_tokens; ++token) {
      for (int64_t slot = 0; slot < call->top_k; ++slot) {
        const int64_t expert = (call->first_token + token + slot) % call->num_experts;
        const int64_t at = token * call->top_k + slot;
        const bool is_last = at + 1 == call->num_tokens * call->top_k;
        if ((self.habit != Habit::kLeavesAnId || at != 1) &&
            (self.habit != Habit::kLeavesTheLastId || !is_last)) {
          call->topk_ids[at] = static_cast<int32_t>(expert);
        }
        if (self.habit != Habit::kLeavesAWeight || at != 1) {
          call->topk_weights[at] = 1.0F / static_cast<float>(slot + 1);
        }
      }
    }
    return self.finish(*call);
  }

  conclave_status finish(conclave_route_call& call) {
    switch (habit) {
      case Habit::kFails:
        call.reason = kReason;
        return CONCLAVE_ERROR_FILE_READ;
      case Habit::kFailsByNoStatus:
        return 12345;
      case Habit::kChoosesBeyond:
        call.topk_ids[0] = 1'000'000;
        return CONCLAVE_OK;
      case Habit::kCountsTooMany:
        call.tokens_without_finite_logit = call.num_tokens + 1;
        return CONCLAVE_OK;
      case Habit::kCallsTheLayer:
        if (layer != nullptr) of_inner = conclave_layer_forward(layer, args);
        return CONCLAVE_OK;
      default:
        call.tokens_without_finite_logit = 1;
        return CONCLAVE_OK;
    }
  }

  static void release(void* user) { ++static_cast<Rotating*>(user)->released; }

  conclave_own_router router(const char* name = "rotating") {
    auto router = sized<conclave_own_router>();
    router.name = name;
    router.user = this;
    router.route = &route;
    router.release = &release;
    router.scratch_bytes = 96;
    return router;
  }

  static constexpr const char* kReason = "the cache of tables is cold";
};

constexpr const char* kSpec =
    R"({"num_experts": 6, "top_k": 3, "hidden_size": 32, "intermediate_size": 16,
        "weight_dtype": "F32", "router": {"name": "rotating"}, "has_gate": false})";

// A layer of random weights whose router is the function's.
class OwnRouters : public ::testing::Test {
 protected:
  OwnRouters()
      : gate_up_(random_tensor(DType::kF32, 6 * 32, 32, 1)),
        down_(random_tensor(DType::kF32, 6 * 32, 16, 2)) {
    const conclave_own_router router = rotating_.router();
    EXPECT_EQ(conclave_context_add_router(context_.get(), &router), CONCLAVE_OK)
        << conclave_last_error_message();
  }

  Handle<conclave_layer> layer(const conclave_layer_options* options = nullptr,
                               const char* json = kSpec) {
    const conclave_tensor gate_up =
        tensor_of({gate_up_.const_view().data, DType::kF32, {6, 32, 32}});
    const conclave_tensor down = tensor_of({down_.const_view().data, DType::kF32, {6, 32, 16}});
    const conclave_named_tensor tensors[] = {{"gate_up", &gate_up}, {"down", &down}};
    const auto spec = make<conclave_spec>(&conclave_spec_from_json, json);
    const auto source =
        make<conclave_source>(&conclave_source_from_tensors, tensors, size_t{2}, nullptr);
    return make<conclave_layer>(&conclave_layer_create, context_.get(), spec.get(), source.get(),
                                options, nullptr);
  }

  Rotating rotating_;
  Handle<conclave_context> context_ = testing::make_context();
  Tensor gate_up_, down_;
};

struct Rows {
  explicit Rows(int64_t tokens)
      : hidden(random_tensor(DType::kF32, tokens, 32, 7)),
        logits(random_tensor(DType::kF32, tokens, 6, 8)),
        out(DType::kF32, {tokens, 32}),
        ids(DType::kI32, {tokens, 3}),
        weights(DType::kF32, {tokens, 3}) {
    views = {tensor_of(hidden.const_view()), tensor_of(logits.const_view()),
             tensor_of(out.const_view()), tensor_of(ids.const_view()),
             tensor_of(weights.const_view())};
  }
  conclave_forward_args args() {
    auto args = sized<conclave_forward_args>();
    args.hidden = &views[0];
    args.router_logits = &views[1];
    args.out = &views[2];
    args.captured_ids = &views[3];
    args.captured_weights = &views[4];
    return args;
  }

  Tensor hidden, logits, out, ids, weights;
  std::vector<conclave_tensor> views;
};

TEST_F(OwnRouters, ChooseForALayer_InChunksToo) {
  auto options = sized<conclave_layer_options>();
  options.max_tokens = 4;
  const auto made = layer(&options);
  Rows rows(11);
  const conclave_forward_args args = rows.args();
  ASSERT_EQ(conclave_layer_forward(made.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  for (int token = 0; token < 11; ++token) {
    for (int slot = 0; slot < 3; ++slot) {
      EXPECT_EQ(rows.ids.as<int32_t>()[token * 3 + slot], (token + slot) % 6);
      EXPECT_EQ(rows.weights.as<float>()[token * 3 + slot], 1.0F / static_cast<float>(slot + 1));
    }
  }
  EXPECT_EQ(rotating_.calls, 3);
  EXPECT_LE(rotating_.most_tokens, 4);
  auto stats = sized<conclave_layer_stats>();
  ASSERT_EQ(conclave_layer_get_stats(made.get(), &stats), CONCLAVE_OK);
  EXPECT_EQ(stats.tokens_without_finite_logit, 3);
  EXPECT_NE(testing::text_by(&conclave_layer_explain, made.get()).find("rotating"),
            std::string::npos);

  // The same choices given give the same bits.
  Rows given(11);
  conclave_forward_args replay = given.args();
  replay.router_logits = nullptr;
  replay.captured_ids = replay.captured_weights = nullptr;
  replay.topk_ids = &rows.views[3];
  replay.topk_weights = &rows.views[4];
  ASSERT_EQ(conclave_layer_forward(made.get(), &replay), CONCLAVE_OK);
  EXPECT_TRUE(same_bits(rows.out, given.out));
}

TEST_F(OwnRouters, FewerChoices_AndNoTokens) {
  const auto made = layer();
  Rows rows(5);
  conclave_forward_args args = rows.args();
  args.top_k = 2;
  ASSERT_EQ(conclave_layer_forward(made.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  for (int token = 0; token < 5; ++token) {
    EXPECT_EQ(rows.ids.as<int32_t>()[token * 3 + 1], (token + 1) % 6);
    EXPECT_EQ(rows.ids.as<int32_t>()[token * 3 + 2], -1);
  }
  const int calls = rotating_.calls;
  Rows none(0);
  args = none.args();
  EXPECT_EQ(conclave_layer_forward(made.get(), &args), CONCLAVE_OK);
  EXPECT_EQ(rotating_.calls, calls);
}

TEST_F(OwnRouters, ServeRoutingOnItsOwn) {
  const auto spec =
      make<conclave_spec>(&conclave_spec_from_json,
                          R"({"num_experts": 6, "top_k": 3, "router": {"name": "rotating"}})");
  const auto router = make<conclave_router>(&conclave_router_create, context_.get(), spec.get());
  Rows rows(4);
  auto args = sized<conclave_route_args>();
  args.logits = &rows.views[1];
  args.topk_ids = &rows.views[3];
  args.topk_weights = &rows.views[4];
  ASSERT_EQ(conclave_router_route(router.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_EQ(rows.ids.as<int32_t>()[11], 5);
  // Bans and a budget look ids up, which must not be anything.
  Tensor banned(DType::kBool, {6});
  const conclave_tensor bans = tensor_of(banned.const_view());
  args.banned_experts = &bans;
  args.expert_budget = 4;
  rotating_.habit = Habit::kChoosesBeyond;
  expect_error(conclave_router_route(router.get(), &args), CONCLAVE_ERROR_EXPERT_ID, "1000000");
}

TEST_F(OwnRouters, BadHabits_AreTypedErrors_AndTheLayerGoesOn) {
  struct Case {
    Habit habit;
    conclave_status status;
    const char* names;
  };
  const Case cases[] = {
      {Habit::kFails, CONCLAVE_ERROR_FILE_READ, "the cache of tables is cold"},
      {Habit::kFailsByNoStatus, CONCLAVE_ERROR_STATE, "12345"},
      {Habit::kLeavesAnId, CONCLAVE_ERROR_STATE, "token 0, slot 1"},
      {Habit::kLeavesTheLastId, CONCLAVE_ERROR_STATE, "token 3, slot 2"},
      {Habit::kLeavesAWeight, CONCLAVE_ERROR_STATE, "topk_weights"},
      {Habit::kWritesNothing, CONCLAVE_ERROR_STATE, "token 0, slot 0"},
      {Habit::kChoosesBeyond, CONCLAVE_ERROR_EXPERT_ID, "1000000"},
      {Habit::kCountsTooMany, CONCLAVE_ERROR_STATE, "tokens_without_finite_logit"},
  };
  const auto made = layer();
  Rows rows(4);
  const conclave_forward_args args = rows.args();
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.names);
    rotating_.habit = bad.habit;
    expect_error(conclave_layer_forward(made.get(), &args), bad.status, bad.names);
    for (int64_t i = 0; i < 4 * 32; ++i) ASSERT_EQ(rows.out.as<float>()[i], 0.0F);
  }
  rotating_.habit = Habit::kRotates;
  EXPECT_EQ(conclave_layer_forward(made.get(), &args), CONCLAVE_OK);

  auto options = sized<conclave_layer_options>();
  options.id_policy = CONCLAVE_ID_POLICY_SKIP;
  const auto skips = layer(&options);
  rotating_.habit = Habit::kChoosesBeyond;
  EXPECT_EQ(conclave_layer_forward(skips.get(), &args), CONCLAVE_OK);
  EXPECT_EQ(rows.ids.as<int32_t>()[0], -1);
  rotating_.habit = Habit::kLeavesAnId;
  expect_error(conclave_layer_forward(skips.get(), &args), CONCLAVE_ERROR_STATE, "unwritten");
}

TEST_F(OwnRouters, ACallOfTheirLayer_IsAnError_OfTheInnerCallAlone) {
  const auto made = layer();
  Rows rows(3);
  const conclave_forward_args args = rows.args();
  rotating_.habit = Habit::kCallsTheLayer;
  rotating_.layer = made.get();
  rotating_.args = &args;
  EXPECT_EQ(conclave_layer_forward(made.get(), &args), CONCLAVE_OK);
  EXPECT_EQ(rotating_.of_inner, CONCLAVE_ERROR_STATE);
}

TEST_F(OwnRouters, SeveralThreads_CallTheFunctionAtOnce_WhileRoutersAreAdded) {
  Rotating more;  // outlives the layer, which holds the context
  const auto made = layer();
  Rows expected(6);
  const conclave_forward_args first = expected.args();
  ASSERT_EQ(conclave_layer_forward(made.get(), &first), CONCLAVE_OK);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&] {
      size_t bytes = 0;
      EXPECT_EQ(conclave_layer_workspace_bytes(made.get(), -1, &bytes), CONCLAVE_OK);
      const auto workspace = make<conclave_workspace>(&conclave_workspace_create, context_.get(),
                                                      bytes, static_cast<void*>(nullptr));
      Rows rows(6);
      conclave_forward_args args = rows.args();
      args.workspace = workspace.get();
      for (int round = 0; round < 5; ++round) {
        args.top_k = round % 2 == 0 ? 0 : 2;
        EXPECT_EQ(conclave_layer_forward(made.get(), &args), CONCLAVE_OK)
            << conclave_last_error_message();
      }
      EXPECT_TRUE(same_bits(rows.out, expected.out));
    });
  }
  for (int i = 0; i < 8; ++i) {
    const std::string name = "more" + std::to_string(i);
    const conclave_own_router router = more.router(name.c_str());
    EXPECT_EQ(conclave_context_add_router(context_.get(), &router), CONCLAVE_OK);
  }
  for (std::thread& thread : threads) thread.join();
  context_.reset();
  EXPECT_EQ(more.released, 0);
}

TEST_F(OwnRouters, AreReleasedOnce_WhenTheLastHolderEnds) {
  auto made = layer();
  const auto spec =
      make<conclave_spec>(&conclave_spec_from_json,
                          R"({"num_experts": 6, "top_k": 3, "router": {"name": "rotating"}})");
  auto router = make<conclave_router>(&conclave_router_create, context_.get(), spec.get());
  context_.reset();
  EXPECT_EQ(rotating_.released, 0);
  Rows rows(2);
  const conclave_forward_args args = rows.args();
  EXPECT_EQ(conclave_layer_forward(made.get(), &args), CONCLAVE_OK);
  router.reset();
  EXPECT_EQ(rotating_.released, 0);
  made.reset();
  EXPECT_EQ(rotating_.released, 1);
}

TEST_F(OwnRouters, BadRouters_AreRefused_AndNotReleased) {
  Rotating other;
  const auto expect = [&](const conclave_own_router& router, conclave_status status,
                          const char* names) {
    expect_error(conclave_context_add_router(context_.get(), &router), status, names);
  };
  expect(other.router(), CONCLAVE_ERROR_INVALID_ARGUMENT, "rotating");
  expect(other.router(""), CONCLAVE_ERROR_INVALID_ARGUMENT, "name");
  expect(other.router(nullptr), CONCLAVE_ERROR_NULL_POINTER, "router.name");
  conclave_own_router router = other.router("other");
  router.route = nullptr;
  expect(router, CONCLAVE_ERROR_NULL_POINTER, "router.route");
  router = other.router("other");
  router.scratch_bytes = ~size_t{0};
  expect(router, CONCLAVE_ERROR_INVALID_ARGUMENT, "router.scratch_bytes");
  router = other.router("other");
  router.struct_size = 24;  // a size of no function yet
  expect(router, CONCLAVE_ERROR_NULL_POINTER, "router.route");
  router.struct_size = 4097;
  expect(router, CONCLAVE_ERROR_INVALID_ARGUMENT, "router.struct_size");
  context_.reset();
  EXPECT_EQ(other.released, 0);
  EXPECT_EQ(rotating_.released, 1);
}

// Weighs ids that are given by 2, keeps off banned experts, and notes what it was told.
struct Told {
  bool given = false;
  bool banned = false;
  int64_t banned_stride = -1;
  int32_t token_id = -1;
  int64_t num_shared = -1;
  bool writes_shared = true;

  static conclave_status route(void* user, conclave_route_call* call) {
    auto& told = *static_cast<Told*>(user);
    told.given = call->given_ids != nullptr;
    told.banned = call->banned != nullptr;
    told.banned_stride = call->banned_stride;
    told.num_shared = call->num_shared;
    if (call->token_ids != nullptr) told.token_id = call->token_ids[0];
    for (int64_t at = 0; at < call->num_tokens * call->top_k; ++at) {
      const int64_t token = at / call->top_k;
      auto id = static_cast<int32_t>(at % call->top_k);
      while (told.banned && call->banned[token * call->banned_stride + id] != 0) ++id;
      call->topk_ids[at] = told.given ? call->given_ids[at] : id;
      call->topk_weights[at] = 2;
    }
    if (!told.writes_shared) return CONCLAVE_OK;
    for (int64_t at = 0; at < call->num_tokens * call->num_shared; ++at) {
      call->shared_weights[at] = 0.5F;
    }
    return CONCLAVE_OK;
  }
};

TEST_F(OwnRouters, AreToldWhatTheCallHas) {
  Told told;
  auto router = sized<conclave_own_router>();
  router.name = "told";
  router.user = &told;
  router.route = &Told::route;
  ASSERT_EQ(conclave_context_add_router(context_.get(), &router), CONCLAVE_OK);
  std::string json = kSpec;
  json.replace(json.find("rotating"), 8, "told");
  const auto made = layer(nullptr, json.c_str());
  Rows rows(2);
  int32_t given[] = {5, 4, -1, 3, 3, 0};
  const conclave_tensor ids = tensor_of({given, DType::kI32, {2, 3}});
  const int64_t names[] = {71, 72};
  const conclave_tensor tokens = tensor_of({names, DType::kI64, {2}});
  const uint8_t flags[] = {0, 1, 1, 0, 0, 0};
  const conclave_tensor bans = tensor_of({flags, DType::kBool, {6}});
  conclave_forward_args args = rows.args();
  args.topk_ids = &ids;
  args.token_ids = &tokens;
  ASSERT_EQ(conclave_layer_forward(made.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_TRUE(told.given);
  EXPECT_EQ(told.token_id, 71);
  EXPECT_EQ(told.num_shared, 0);
  EXPECT_TRUE(std::equal(given, given + 6, rows.ids.as<int32_t>()));
  args = rows.args();
  args.banned_experts = &bans;
  ASSERT_EQ(conclave_layer_forward(made.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_TRUE(told.banned);
  EXPECT_EQ(told.banned_stride, 0);
  EXPECT_EQ(rows.ids.as<int32_t>()[1], 3);
}

TEST_F(OwnRouters, WeighSharedExperts_WhereTheSpecSaysSo) {
  Told told;
  auto router = sized<conclave_own_router>();
  router.name = "told";
  router.user = &told;
  router.route = &Told::route;
  ASSERT_EQ(conclave_context_add_router(context_.get(), &router), CONCLAVE_OK);
  const auto spec =
      make<conclave_spec>(&conclave_spec_from_json,
                          R"({"num_experts": 6, "top_k": 3, "router": {"name": "told"},
          "shared": {"mode": "router_weight", "count": 2}})");
  const auto made = make<conclave_router>(&conclave_router_create, context_.get(), spec.get());
  auto info = sized<conclave_spec_info>();
  ASSERT_EQ(conclave_spec_get_info(spec.get(), &info), CONCLAVE_OK);
  Rows rows(4);
  const Tensor logits = random_tensor(DType::kF32, 4, info.num_logits, 9);
  Tensor shared(DType::kF32, {4, 2});
  const conclave_tensor given = tensor_of(logits.const_view());
  const conclave_tensor written = tensor_of(shared.const_view());
  auto args = sized<conclave_route_args>();
  args.logits = &given;
  args.topk_ids = &rows.views[3];
  args.topk_weights = &rows.views[4];
  args.shared_weights = &written;
  ASSERT_EQ(conclave_router_route(made.get(), &args), CONCLAVE_OK) << conclave_last_error_message();
  EXPECT_EQ(told.num_shared, 2);
  EXPECT_EQ(shared.as<float>()[7], 0.5F);
  told.writes_shared = false;
  expect_error(conclave_router_route(made.get(), &args), CONCLAVE_ERROR_STATE, "shared_weights");
}

// The library's own rule goes by its name until a context has another.
TEST_F(OwnRouters, MayHaveANameOfTheLibrary) {
  Rotating other;
  const conclave_own_router router = other.router("topk");
  ASSERT_EQ(conclave_context_add_router(context_.get(), &router), CONCLAVE_OK);
  const auto spec =
      make<conclave_spec>(&conclave_spec_from_json, R"({"num_experts": 6, "top_k": 3})");
  const auto made = make<conclave_router>(&conclave_router_create, context_.get(), spec.get());
  Rows rows(2);
  auto args = sized<conclave_route_args>();
  args.logits = &rows.views[1];
  args.topk_ids = &rows.views[3];
  args.topk_weights = &rows.views[4];
  ASSERT_EQ(conclave_router_route(made.get(), &args), CONCLAVE_OK) << conclave_last_error_message();
  EXPECT_EQ(rows.ids.as<int32_t>()[5], 3);
  EXPECT_EQ(other.calls, 1);
  context_.reset();
}

// A function that fails on one rank ends the forward of all, within the time that they wait.
TEST(OwnRoutersOfRanks, AFailureOnOne_EndsTheForwardOfAll) {
  auto group = testing::local_group(2, 20000);
  testing::on_threads(2, [&](size_t rank) {
    Rotating rotating{.habit = rank == 1 ? Habit::kFails : Habit::kRotates};
    const auto context = testing::context_of(group[rank].get());
    const conclave_own_router router = rotating.router();
    EXPECT_EQ(conclave_context_add_router(context.get(), &router), CONCLAVE_OK);
    const Tensor gate_up = random_tensor(DType::kF32, 6 * 32, 32, 1);
    const Tensor down = random_tensor(DType::kF32, 6 * 32, 16, 2);
    const conclave_tensor stacked =
        tensor_of({gate_up.const_view().data, DType::kF32, {6, 32, 32}});
    const conclave_tensor of_down = tensor_of({down.const_view().data, DType::kF32, {6, 32, 16}});
    const conclave_named_tensor tensors[] = {{"gate_up", &stacked}, {"down", &of_down}};
    const auto spec = make<conclave_spec>(&conclave_spec_from_json, kSpec);
    const auto source =
        make<conclave_source>(&conclave_source_from_tensors, tensors, size_t{2}, nullptr);
    auto parallel = sized<conclave_parallel>();
    parallel.ep_size = 2;
    parallel.ep_rank = static_cast<int32_t>(rank);
    const auto layer = make<conclave_layer>(&conclave_layer_create, context.get(), spec.get(),
                                            source.get(), nullptr, &parallel);
    Rows rows(3);
    const conclave_forward_args args = rows.args();
    const conclave_status status = conclave_layer_forward(layer.get(), &args);
    if (rank == 1) {
      expect_error(status, CONCLAVE_ERROR_FILE_READ, Rotating::kReason);
    } else {
      expect_error(status, CONCLAVE_ERROR_COMM_ABORTED, Rotating::kReason);
      EXPECT_EQ(testing::last_error().peer, 1);
    }
  });
}

TEST(OwnRouterNames, AreThoseOfTheContextAlone) {
  const auto context = testing::make_context();
  const auto spec =
      make<conclave_spec>(&conclave_spec_from_json,
                          R"({"num_experts": 6, "top_k": 3, "router": {"name": "rotating"}})");
  conclave_router* out = nullptr;
  expect_error(conclave_router_create(context.get(), spec.get(), &out), CONCLAVE_ERROR_UNKNOWN_NAME,
               "rotating");
  EXPECT_EQ(out, nullptr);
}

// A function of C++ that throws does not take the process with it.
TEST_F(OwnRouters, AnExceptionOfCpp_EndsTheCall) {
  auto router = sized<conclave_own_router>();
  router.name = "throwing";
  router.route = [](void*, conclave_route_call*) -> conclave_status {
    throw std::runtime_error("out of tables");
  };
  ASSERT_EQ(conclave_context_add_router(context_.get(), &router), CONCLAVE_OK);
  std::string json = kSpec;
  json.replace(json.find("rotating"), 8, "throwing");
  const auto made = layer(nullptr, json.c_str());
  Rows rows(2);
  const conclave_forward_args args = rows.args();
  expect_error(conclave_layer_forward(made.get(), &args), CONCLAVE_ERROR_INTERNAL, "out of tables");
}

}  // namespace
}  // namespace conclave
