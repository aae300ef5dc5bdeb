// What a stranger may hand over: numbers that nobody set, memory that is crooked, functions that
// throw, threads and processes that do not keep to the rules. Each is a typed error, or nothing.
#include "capi/layers.h"
#include "capi/local_ranks.h"

#include <array>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave {
namespace {

using testing::Call;
using testing::expect_error;
using testing::Handle;
using testing::Layers;
using testing::make;
using testing::random_tensor;
using testing::same_bits;
using testing::sized;
using testing::tensor_of;

constexpr auto kMost32 = std::numeric_limits<int32_t>::max();
constexpr auto kLeast32 = std::numeric_limits<int32_t>::min();
constexpr auto kMost64 = std::numeric_limits<int64_t>::max();
constexpr auto kLeast64 = std::numeric_limits<int64_t>::min();

template <class T>
T* crooked(T* pointer) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + 1);
}

TEST_F(Layers, CrookedPointers_AreMisaligned) {
  Call call(spec_, 2);
  conclave_forward_args args = call.args();
  expect_error(conclave_layer_forward(layer_.get(), crooked(&args)), CONCLAVE_ERROR_MISALIGNED,
               "args");
  expect_error(conclave_layer_forward(crooked(layer_.get()), &args), CONCLAVE_ERROR_MISALIGNED,
               "layer");
  args.hidden = crooked(args.hidden);
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_MISALIGNED, "hidden");
  args = call.args();
  auto timings = sized<conclave_timings>();
  args.timings = crooked(&timings);
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_MISALIGNED, "timings");
  auto stats = sized<conclave_layer_stats>();
  expect_error(conclave_layer_get_stats(layer_.get(), crooked(&stats)), CONCLAVE_ERROR_MISALIGNED,
               "stats");
  conclave_layer* out[2] = {};
  expect_error(conclave_layer_with_max_tokens(layer_.get(), 4, crooked(&out[0])),
               CONCLAVE_ERROR_MISALIGNED, "out");
  auto error = sized<conclave_error>();
  EXPECT_EQ(conclave_last_error(crooked(&error)), CONCLAVE_ERROR_MISALIGNED);
  EXPECT_STREQ(testing::last_error().tensor, "out");  // the one before
  std::array<int64_t, 2> layers = {};
  conclave_feed* feed = nullptr;
  const auto spec = make<conclave_spec>(&conclave_layer_spec, layer_.get());
  expect_error(
      conclave_feed_from_spec(spec.get(), "qwen3_moe", crooked(layers.data()), 1, nullptr, &feed),
      CONCLAVE_ERROR_MISALIGNED, "layers");
  const auto valid =
      make<conclave_feed>(&conclave_feed_from_spec, spec.get(), "qwen3_moe",
                          static_cast<const int64_t*>(layers.data()), size_t{1}, nullptr);
  std::array<int32_t, 2> used = {};
  expect_error(conclave_feed_put(valid.get(), "name", &call.views[0], 0, crooked(used.data())),
               CONCLAVE_ERROR_MISALIGNED, "used");
  auto group = testing::local_group(1);
  conclave_communicator* left = nullptr;
  expect_error(conclave_survivors(group[0].get(), 0, &left, crooked(used.data())),
               CONCLAVE_ERROR_MISALIGNED, "old_ranks");
}

TEST_F(Layers, AbsurdOptions_NameTheField) {
  const auto expect = [&](const char* names, auto spoil) {
    SCOPED_TRACE(names);
    auto options = sized<conclave_layer_options>();
    auto parallel = sized<conclave_parallel>();
    spoil(options, parallel);
    conclave_layer* out = nullptr;
    const conclave_status status = conclave_layer_create_from_checkpoint(
        context_.get(), checkpoint_.get(), 0, &options, &parallel, &out);
    EXPECT_NE(status, CONCLAVE_OK);
    EXPECT_NE(status, CONCLAVE_ERROR_INTERNAL) << conclave_last_error_message();
    EXPECT_NE(std::string(conclave_last_error_message()).find(names), std::string::npos)
        << conclave_last_error_message();
    EXPECT_EQ(out, nullptr);
  };
  for (const int64_t number : {kMost64, kLeast64}) {
    expect("max_tokens", [&](auto& o, auto&) { o.max_tokens = number; });
    expect("max_adapter_rank", [&](auto& o, auto&) { o.max_adapter_rank = number; });
  }
  expect("micro_batch_tokens", [&](auto& o, auto&) { o.micro_batch_tokens = kLeast64; });
  for (const int32_t number : {kMost32, kLeast32}) {
    expect("spare_experts", [&](auto& o, auto&) { o.spare_experts = number; });
    expect("ep_size", [&](auto&, auto& p) { p.ep_size = number; });
    expect("tp_size", [&](auto&, auto& p) { p.tp_size = number; });
    expect("num_redundant_experts", [&](auto&, auto& p) { p.num_redundant_experts = number; });
    expect("chunk_order", [&](auto& o, auto&) { o.chunk_order = number; });
  }
  const int32_t rank = 0;
  expect("rank_of_count", [&](auto&, auto& p) {
    p.rank_of = &rank;
    p.rank_of_count = ~size_t{0};
  });
  expect("replica_of_count", [&](auto&, auto& p) {
    p.replica_of = &rank;
    p.replica_of_count = ~size_t{0} / 4;
  });
  expect("rank_of", [&](auto&, auto& p) {
    p.rank_of = crooked(&rank);
    p.rank_of_count = 1;
  });
  for (const int64_t tokens : {kMost64, kLeast64, int64_t{0}, int64_t{-1}}) {
    conclave_layer* out = nullptr;
    expect_error(conclave_layer_with_max_tokens(layer_.get(), tokens, &out),
                 CONCLAVE_ERROR_INVALID_ARGUMENT, "max_tokens");
    EXPECT_EQ(out, nullptr);
  }
  for (const int64_t tokens : {int64_t{1} << 36, int64_t{1} << 40}) {
    conclave_layer* out = nullptr;
    expect_error(conclave_layer_with_max_tokens(layer_.get(), tokens, &out),
                 CONCLAVE_ERROR_OUT_OF_MEMORY, "max_tokens");
    EXPECT_EQ(out, nullptr);
  }
  size_t bytes = 0;
  expect_error(conclave_layer_workspace_bytes(layer_.get(), kLeast64, &bytes),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "tokens");
  EXPECT_EQ(conclave_layer_workspace_bytes(layer_.get(), kMost64, &bytes), CONCLAVE_OK);
}

TEST_F(Layers, AbsurdTensors_AreTypedErrors) {
  struct Case {
    conclave_status status;
    void (*spoil)(conclave_tensor& tensor);
  };
  const Case cases[] = {
      {CONCLAVE_ERROR_STRIDE, [](auto& t) { t.row_stride = kMost64; }},
      {CONCLAVE_ERROR_STRIDE, [](auto& t) { t.row_stride = kMost64 / 2; }},
      {CONCLAVE_ERROR_STRIDE, [](auto& t) { t.row_stride = kLeast64; }},
      {CONCLAVE_ERROR_SIZE_OVERFLOW, [](auto& t) { t.shape[0] = t.shape[1] = kMost64; }},
      {CONCLAVE_ERROR_SHAPE, [](auto& t) { t.shape[0] = kLeast64; }},
      {CONCLAVE_ERROR_SHAPE, [](auto& t) { t.rank = kMost32; }},
      {CONCLAVE_ERROR_SHAPE, [](auto& t) { t.rank = kLeast32; }},
      {CONCLAVE_ERROR_DTYPE, [](auto& t) { t.dtype = kMost32; }},
      {CONCLAVE_ERROR_DTYPE, [](auto& t) { t.dtype = kLeast32; }},
      {CONCLAVE_ERROR_INVALID_ARGUMENT, [](auto& t) { t.struct_size = ~size_t{0}; }},
  };
  for (size_t argument = 0; argument < 5; ++argument) {
    for (const Case& bad : cases) {
      Call call(spec_, 2);
      bad.spoil(call.views[argument]);
      const conclave_forward_args args = call.args();
      EXPECT_EQ(conclave_layer_forward(layer_.get(), &args), bad.status)
          << argument << ": " << conclave_last_error_message();
    }
  }
  // Nothing to write, and a size that no memory has.
  Call none(spec_, 0);
  for (conclave_tensor& view : none.views) view.row_stride = kMost64;
  const conclave_forward_args args = none.args();
  EXPECT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK)
      << conclave_last_error_message();
}

TEST_F(Layers, OverlappingArguments_AreRefused) {
  Call call(spec_, 4);
  conclave_forward_args args = call.args();
  args.captured_weights = nullptr;
  call.views[3].data = call.ids.view().data;
  call.views[1].data = static_cast<char*>(call.hidden.view().data) + 4;
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_OVERLAP, "out");
  args = call.args();
  call.views[1].data = call.out.view().data;
  args.expert_load = reinterpret_cast<int64_t*>(call.out.view().data);
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_OVERLAP, "");
  args = call.args();
  call.views[4].data = call.logits.view().data;
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_OVERLAP, "captured");
}

TEST_F(Layers, Workspaces_OfEverySize) {
  conclave_workspace* out = nullptr;
  for (const size_t bytes : {~size_t{0}, ~size_t{0} / 2, size_t{1} << 60}) {
    expect_error(conclave_workspace_create(context_.get(), bytes, nullptr, &out),
                 CONCLAVE_ERROR_OUT_OF_MEMORY, "");
    EXPECT_EQ(out, nullptr);
  }
  const auto empty = make<conclave_workspace>(&conclave_workspace_create, context_.get(), size_t{0},
                                              static_cast<void*>(nullptr));
  Call call(spec_, 2);
  conclave_forward_args args = call.args();
  args.workspace = empty.get();
  expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_WORKSPACE_TOO_SMALL,
               "workspace");
  alignas(64) char memory[256];
  expect_error(conclave_workspace_borrow(context_.get(), memory + 8, 64, nullptr, &out),
               CONCLAVE_ERROR_MISALIGNED, "");
}

// A workspace that lies in what the call reads or writes would be overwritten while it runs.
TEST_F(Layers, AWorkspaceInAnArgument_IsRefused) {
  size_t bytes = 0;
  ASSERT_EQ(conclave_layer_workspace_bytes(layer_.get(), -1, &bytes), CONCLAVE_OK);
  std::vector<char> memory(bytes + 128);
  char* const aligned = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
  const auto workspace =
      make<conclave_workspace>(&conclave_workspace_borrow, context_.get(),
                               static_cast<void*>(aligned), bytes, static_cast<void*>(nullptr));
  Call call(spec_, 2);
  conclave_forward_args args = call.args();
  args.workspace = workspace.get();
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
  for (size_t argument = 0; argument < 2; ++argument) {
    Call other(spec_, 2);
    args = other.args();
    args.workspace = workspace.get();
    other.views[argument].data = aligned + 64;
    expect_error(conclave_layer_forward(layer_.get(), &args), CONCLAVE_ERROR_OVERLAP, "workspace");
  }
}

TEST(Hostile, CountsThatNobodySet) {
  conclave_source* source = nullptr;
  const conclave_named_tensor one = {"gate_up", nullptr};
  expect_error(conclave_source_from_tensors(&one, ~size_t{0}, nullptr, &source),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "tensors");
  expect_error(conclave_source_from_tensors(&one, 1, nullptr, &source), CONCLAVE_ERROR_NULL_POINTER,
               "gate_up");
  const auto spec = make<conclave_spec>(
      &conclave_spec_from_json,
      R"({"num_experts": 4, "top_k": 2, "hidden_size": 8, "intermediate_size": 8})");
  conclave_feed* made = nullptr;
  const int64_t layer = 0;
  expect_error(conclave_feed_from_spec(spec.get(), "qwen3_moe", &layer, ~size_t{0}, nullptr, &made),
               CONCLAVE_ERROR_INVALID_ARGUMENT, "num_layers");
  EXPECT_NE(conclave_feed_from_gguf("", 0, &made), CONCLAVE_OK);
  EXPECT_EQ(made, nullptr);
  const auto feed = make<conclave_feed>(&conclave_feed_from_spec, spec.get(), "qwen3_moe", &layer,
                                        size_t{1}, nullptr);
  EXPECT_NE(testing::text_by(&conclave_feed_missing, feed.get(), ~size_t{0}), "");
  EXPECT_EQ(testing::text_by(&conclave_feed_missing, feed.get(), size_t{0}), "");
  const int64_t shape[8] = {kMost64, kMost64, kMost64, kMost64, 1, 1, 1, 1};
  for (const int32_t rank : {kMost32, kLeast32, 9, 8}) {
    EXPECT_NE(conclave_feed_put_gguf(feed.get(), "blk.0.ffn_up_exps.weight", 12, shape, rank, shape,
                                     64, 0, nullptr),
              CONCLAVE_OK);
  }
  EXPECT_NE(
      conclave_feed_put_gguf(feed.get(), "x", ~uint32_t{0}, shape, 1, shape, 64, kMost32, nullptr),
      CONCLAVE_OK);
  int64_t at = 0;
  expect_error(conclave_feed_layer_at(feed.get(), ~size_t{0}, &at), CONCLAVE_ERROR_LAYER_NOT_FOUND,
               "position");
  for (const int64_t index : {kMost64, kLeast64, int64_t{1}}) {
    int32_t complete = 5;
    EXPECT_EQ(conclave_feed_is_complete(feed.get(), index, &complete),
              CONCLAVE_ERROR_LAYER_NOT_FOUND);
    EXPECT_EQ(complete, 5);
    conclave_spec* out = nullptr;
    EXPECT_NE(conclave_feed_spec(feed.get(), index, &out), CONCLAVE_OK);
    conclave_source* of_layer = nullptr;
    EXPECT_NE(conclave_feed_source(feed.get(), index, &of_layer), CONCLAVE_OK);
    EXPECT_NE(conclave_feed_release(feed.get(), index), CONCLAVE_OK);
    EXPECT_EQ(out, nullptr);
    EXPECT_EQ(of_layer, nullptr);
  }
}

TEST(Hostile, TextsOfEveryKind) {
  conclave_spec* spec = nullptr;
  const std::string deep(100000, '[');
  const std::string nested = R"({"router": {"name": ")" + std::string(1 << 20, 'x') + R"("}})";
  for (const std::string& json :
       {std::string(), deep, std::string("{\"num_experts\": 1e999}"), std::string("\xff\xfe"),
        std::string("{\"num_experts\": 99999999999999999999}"), std::string("null"),
        std::string("{\"activation\": {\"name\": 3}}")}) {
    EXPECT_NE(conclave_spec_from_json(json.c_str(), &spec), CONCLAVE_OK) << json.substr(0, 40);
    EXPECT_NE(conclave_last_error_message()[0], '\0');
    EXPECT_EQ(spec, nullptr);
  }
  const auto context = testing::make_context();
  const auto named = make<conclave_spec>(&conclave_spec_from_json, nested.c_str());
  conclave_router* router = nullptr;
  EXPECT_NE(conclave_router_create(context.get(), named.get(), &router), CONCLAVE_OK);
  const auto with_zero =
      make<conclave_spec>(&conclave_spec_from_json, "{\"router\": {\"name\": \"a\\u0000b\"}}");
  EXPECT_NE(conclave_router_create(context.get(), with_zero.get(), &router), CONCLAVE_OK);
  EXPECT_NE(testing::text_by(&conclave_spec_to_json, with_zero.get()).find("a\\u0000b"),
            std::string::npos);
  conclave_checkpoint* checkpoint = nullptr;
  for (const std::string& path :
       {std::string(), std::string("/dev/null"), std::string(1 << 16, 'p'), std::string("."),
        std::string("testdata\xff")}) {
    EXPECT_NE(conclave_checkpoint_open(path.c_str(), nullptr, &checkpoint), CONCLAVE_OK);
    EXPECT_NE(conclave_last_error_message()[0], '\0');
  }
  EXPECT_EQ(checkpoint, nullptr);
  for (const conclave_status number : {kMost32, kLeast32, -1}) {
    EXPECT_STREQ(conclave_status_name(number), "unknown");
  }
}

TEST(Hostile, Collectives) {
  auto group = testing::local_group(1);
  alignas(8) char bytes[64] = {};
  expect_error(conclave_communicator_all_gather(group[0].get(), bytes, bytes, 8, nullptr),
               CONCLAVE_ERROR_OVERLAP, "recv");
  expect_error(conclave_communicator_all_reduce(group[0].get(), bytes, bytes + 4, 2,
                                                CONCLAVE_DTYPE_F32, nullptr),
               CONCLAVE_ERROR_OVERLAP, "recv");
  expect_error(conclave_communicator_all_gather(group[0].get(), bytes, bytes, ~size_t{0}, nullptr),
               CONCLAVE_ERROR_SIZE_OVERFLOW, "bytes");
  EXPECT_EQ(conclave_communicator_all_gather(group[0].get(), nullptr, nullptr, 0, nullptr),
            CONCLAVE_OK)
      << conclave_last_error_message();
  EXPECT_EQ(
      conclave_communicator_all_reduce(group[0].get(), nullptr, nullptr, 0, CONCLAVE_DTYPE_F32, ""),
      CONCLAVE_OK)
      << conclave_last_error_message();
  const std::string phase(1 << 20, 'p');
  EXPECT_EQ(conclave_communicator_barrier(group[0].get(), phase.c_str()), CONCLAVE_OK)
      << conclave_last_error_message();
  conclave_communicator* out = nullptr;
  for (const int32_t size : {kMost32, kLeast32, -1}) {
    auto options = sized<conclave_connect_options>();
    options.size = size;
    options.timeout_ms = 50;
    EXPECT_NE(conclave_connect("tcp", &options, &out), CONCLAVE_OK);
    options.exchange = [](void*, const char*, int32_t, const char**) -> conclave_status {
      return CONCLAVE_ERROR_COMM_TIMEOUT;
    };
    EXPECT_NE(conclave_connect("tcp", &options, &out), CONCLAVE_OK);
  }
  EXPECT_EQ(out, nullptr);
}

// Functions of C++ behind pointers of C may throw: the call ends, and the process does not.
TEST(Hostile, FunctionsThatThrow_EndTheirCallAlone) {
  auto executor = sized<conclave_executor>();
  executor.concurrency = 2;
  executor.run = [](void*, conclave_task, void*) { throw std::runtime_error("no threads today"); };
  auto options = sized<conclave_context_options>();
  options.executor = &executor;
  const auto context = make<conclave_context>(&conclave_context_create, &options);
  const auto checkpoint = testing::open_model();
  conclave_layer* layer = nullptr;
  expect_error(conclave_layer_create_from_checkpoint(context.get(), checkpoint.get(), 0, nullptr,
                                                     nullptr, &layer),
               CONCLAVE_ERROR_INTERNAL, "no threads today");
  EXPECT_EQ(layer, nullptr);

  auto connect = sized<conclave_connect_options>();
  connect.size = 2;
  connect.timeout_ms = 50;
  connect.exchange = [](void*, const char*, int32_t, const char**) -> conclave_status { throw 42; };
  conclave_communicator* out = nullptr;
  EXPECT_EQ(conclave_connect("tcp", &connect, &out), CONCLAVE_ERROR_INTERNAL);
  EXPECT_EQ(out, nullptr);

  auto allocator = sized<conclave_allocator>();
  allocator.allocate = [](void*, size_t, size_t, void*) -> void* { throw std::bad_alloc(); };
  allocator.deallocate = [](void*, void*, size_t, void*) {};
  options = sized<conclave_context_options>();
  options.host_allocator = &allocator;
  const auto without = make<conclave_context>(&conclave_context_create, &options);
  conclave_workspace* workspace = nullptr;
  EXPECT_EQ(conclave_workspace_create(without.get(), 64, nullptr, &workspace),
            CONCLAVE_ERROR_OUT_OF_MEMORY);

  auto log = sized<conclave_log>();
  log.message = [](void*, int32_t, const char*) { throw std::runtime_error("no paper"); };
  log.progress = [](void*, const char*, int64_t, int64_t) { throw std::runtime_error("no paper"); };
  options = sized<conclave_context_options>();
  options.num_threads = 2;
  options.log = &log;
  const auto logging = make<conclave_context>(&conclave_context_create, &options);
  const conclave_status status = conclave_layer_create_from_checkpoint(
      logging.get(), checkpoint.get(), 0, nullptr, nullptr, &layer);
  EXPECT_TRUE(status == CONCLAVE_OK || status == CONCLAVE_ERROR_INTERNAL);
  conclave_layer_destroy(layer);
}

// A text of an error lives while other threads fail, and other calls of its own succeed.
TEST(Hostile, TextsOfErrors_AreTheThreadsOwn) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([thread] {
      const std::string name = "no-such-model-" + std::to_string(thread);
      for (int round = 0; round < 20; ++round) {
        conclave_checkpoint* out = nullptr;
        EXPECT_EQ(conclave_checkpoint_open(name.c_str(), nullptr, &out),
                  CONCLAVE_ERROR_FILE_NOT_FOUND);
        const char* const text = conclave_last_error_message();
        auto build = sized<conclave_build>();
        EXPECT_EQ(conclave_get_build(&build), CONCLAVE_OK);
        std::this_thread::yield();
        EXPECT_NE(std::string(text).find(name), std::string::npos) << text;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// One layer used by several threads, of which each needs a workspace: without, one of them is told.
TEST_F(Layers, ThreadsWithoutWorkspaces_AreToldOrServed) {
  Call expected(spec_, 8);
  cpp_layer_.forward(expected.cpp_args());
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        Call call(spec_, 8);
        const conclave_forward_args args = call.args();
        const conclave_status status = conclave_layer_forward(layer_.get(), &args);
        if (status == CONCLAVE_OK) {
          EXPECT_TRUE(same_bits(call.out, expected.out));
        } else {
          expect_error(status, CONCLAVE_ERROR_STATE, "workspace");
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// The child of a fork has no threads of the library's: it is told, and may end what it was left.
TEST_F(Layers, AForkedChild_IsTold_AndMayEndEverything) {
  Call call(spec_, 8);
  const conclave_forward_args args = call.args();
  ASSERT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const conclave_status status = conclave_layer_forward(layer_.get(), &args);
    conclave_error error = {};
    error.struct_size = sizeof error;
    conclave_last_error(&error);
    const bool is_told = status == CONCLAVE_ERROR_FORKED && error.status == status;
    conclave_layer_destroy(layer_.release());
    conclave_checkpoint_destroy(checkpoint_.release());
    conclave_context_destroy(context_.release());
    ::_exit(is_told ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(conclave_layer_forward(layer_.get(), &args), CONCLAVE_OK);
}

}  // namespace
}  // namespace conclave
