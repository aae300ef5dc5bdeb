// Threads, memory and log of an application, as functions of C.
#include "capi/handles.h"
#include "support/layer_fixture.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace conclave {
namespace {

using testing::expect_error;
using testing::make;
using testing::sized;

// Ways to run the workers of a call.
enum class Habit { kAll, kMissesOne, kRepeatsOne, kMakesOneUp, kNone };

struct Threads {
  int32_t concurrency = 3;
  Habit habit = Habit::kAll;
  int runs = 0;

  static void run(void* user, conclave_task task, void* state) {
    auto& self = *static_cast<Threads*>(user);
    ++self.runs;
    if (self.habit == Habit::kNone) return;
    std::thread last([&] { task(state, self.concurrency - 1); });
    last.join();
    for (int32_t worker = 0; worker + 1 < self.concurrency; ++worker) {
      if (self.habit == Habit::kMissesOne && worker == 0) continue;
      task(state, worker);
    }
    if (self.habit == Habit::kRepeatsOne) task(state, 0);
    if (self.habit == Habit::kMakesOneUp) task(state, self.concurrency);
  }

  conclave_executor executor() {
    auto executor = sized<conclave_executor>();
    executor.user = this;
    executor.run = &run;
    executor.concurrency = concurrency;
    return executor;
  }
};

conclave_status forward_once(const conclave_context* context) {
  const auto checkpoint = testing::open_model();
  conclave_layer* handle = nullptr;
  const conclave_status status = conclave_layer_create_from_checkpoint(context, checkpoint.get(), 0,
                                                                       nullptr, nullptr, &handle);
  if (status != CONCLAVE_OK) return status;
  const testing::Handle<conclave_layer> layer(handle);
  const Tensor hidden = testing::random_tensor(DType::kBF16, 40, 88, 1);
  Tensor out(DType::kF32, {40, 88});
  const conclave_tensor in = testing::tensor_of(hidden.const_view());
  const conclave_tensor written = testing::tensor_of(out.const_view());
  auto args = sized<conclave_forward_args>();
  args.hidden = &in;
  args.out = &written;
  return conclave_layer_forward(layer.get(), &args);
}

TEST(Executors, RunTheLayer_AndBadHabitsAreErrors) {
  for (const Habit habit :
       {Habit::kAll, Habit::kMissesOne, Habit::kRepeatsOne, Habit::kMakesOneUp, Habit::kNone}) {
    Threads threads{.habit = habit};
    const conclave_executor executor = threads.executor();
    auto options = sized<conclave_context_options>();
    options.executor = &executor;
    const auto context = make<conclave_context>(&conclave_context_create, &options);
    const conclave_status status = forward_once(context.get());
    EXPECT_GT(threads.runs, 0);
    if (habit == Habit::kAll) {
      EXPECT_EQ(status, CONCLAVE_OK) << conclave_last_error_message();
    } else {
      expect_error(status, CONCLAVE_ERROR_STATE, "executor");
    }
  }
}

TEST(Executors, ServeOneForwardAtATime) {
  Threads threads;
  const conclave_executor executor = threads.executor();
  auto options = sized<conclave_context_options>();
  options.executor = &executor;
  const auto context = make<conclave_context>(&conclave_context_create, &options);
  std::thread other([&] { EXPECT_EQ(forward_once(context.get()), CONCLAVE_OK); });
  EXPECT_EQ(forward_once(context.get()), CONCLAVE_OK) << conclave_last_error_message();
  other.join();
}

struct Memory {
  size_t bytes = 0;
  int blocks = 0;
  size_t shift = 0;
  bool is_full = false;

  static void* allocate(void* user, size_t bytes, size_t alignment, void* /*stream*/) {
    auto& self = *static_cast<Memory*>(user);
    if (self.is_full) return nullptr;
    ++self.blocks;
    self.bytes += bytes;
    const size_t whole = (bytes + alignment - 1) / alignment * alignment + alignment;
    auto* const data = static_cast<char*>(std::aligned_alloc(alignment, whole));
    return data + self.shift;
  }
  static void deallocate(void* user, void* data, size_t bytes, void* /*stream*/) {
    auto& self = *static_cast<Memory*>(user);
    --self.blocks;
    self.bytes -= bytes;
    std::free(static_cast<char*>(data) - self.shift);
  }
  conclave_allocator allocator() {
    auto allocator = sized<conclave_allocator>();
    allocator.user = this;
    allocator.allocate = &allocate;
    allocator.deallocate = &deallocate;
    return allocator;
  }
};

TEST(Allocators, HaveAllThatWasAskedFor_AndGetItBack) {
  Memory memory;
  const conclave_allocator allocator = memory.allocator();
  auto options = sized<conclave_context_options>();
  options.num_threads = 1;
  options.host_allocator = &allocator;
  auto context = make<conclave_context>(&conclave_context_create, &options);
  auto workspace = make<conclave_workspace>(&conclave_workspace_create, context.get(), size_t{4096},
                                            static_cast<void*>(nullptr));
  EXPECT_GE(memory.bytes, 4096U);
  workspace.reset();
  EXPECT_EQ(forward_once(context.get()), CONCLAVE_OK);
  context.reset();
  EXPECT_EQ(memory.blocks, 0);
  EXPECT_EQ(memory.bytes, 0U);
}

TEST(Allocators, WithoutMemory_OrWithCrookedMemory_AreErrors) {
  Memory memory{.is_full = true};
  const conclave_allocator allocator = memory.allocator();
  auto options = sized<conclave_context_options>();
  options.host_allocator = &allocator;
  const auto context = make<conclave_context>(&conclave_context_create, &options);
  expect_error(forward_once(context.get()), CONCLAVE_ERROR_OUT_OF_MEMORY, "");
  memory.is_full = false;
  memory.shift = 8;
  expect_error(forward_once(context.get()), CONCLAVE_ERROR_MISALIGNED, "allocat");
  EXPECT_EQ(memory.blocks, 0);
}

TEST(Logs, ReceiveProgress) {
  int64_t last = -1;
  auto log = sized<conclave_log>();
  log.user = &last;
  log.progress = [](void* user, const char* phase, int64_t done, int64_t total) {
    EXPECT_NE(std::strlen(phase), 0U);
    EXPECT_LE(done, total);
    *static_cast<int64_t*>(user) = done;
  };
  auto options = sized<conclave_context_options>();
  options.num_threads = 1;
  options.log = &log;
  const auto context = make<conclave_context>(&conclave_context_create, &options);
  EXPECT_EQ(forward_once(context.get()), CONCLAVE_OK);
  EXPECT_GT(last, 0);
}

// The call has made nothing, and the context serves on.
TEST(Logs, EndLongWork) {
  struct Answer {
    std::atomic<int> asked{0};
    conclave_status status = CONCLAVE_OK;
  };
  struct Case {
    conclave_status answer;
    conclave_status expected;
  };
  Answer answer;
  auto log = sized<conclave_log>();
  log.user = &answer;
  log.should_end = [](void* user) {
    auto& state = *static_cast<Answer*>(user);
    ++state.asked;
    return state.status;
  };
  auto options = sized<conclave_context_options>();
  options.num_threads = 2;
  options.log = &log;
  const auto context = make<conclave_context>(&conclave_context_create, &options);
  EXPECT_EQ(forward_once(context.get()), CONCLAVE_OK);
  EXPECT_GT(answer.asked, 0);
  for (const Case& given :
       {Case{CONCLAVE_ERROR_CANCELLED, CONCLAVE_ERROR_CANCELLED},
        Case{CONCLAVE_ERROR_STATE, CONCLAVE_ERROR_STATE}, Case{1, CONCLAVE_ERROR_CANCELLED},
        Case{-1, CONCLAVE_ERROR_CANCELLED}}) {
    answer.status = given.answer;
    expect_error(forward_once(context.get()), given.expected, "log.should_end");
  }
  answer.status = CONCLAVE_OK;
  EXPECT_EQ(forward_once(context.get()), CONCLAVE_OK);
}

TEST(Contexts, BadOptions_NameTheField) {
  Threads threads;
  conclave_context* out = nullptr;
  const auto expect = [&](const conclave_context_options& options, conclave_status status,
                          const char* names) {
    expect_error(conclave_context_create(&options, &out), status, names);
    EXPECT_EQ(out, nullptr);
  };
  auto options = sized<conclave_context_options>();
  options.device = "cpu:7x";
  expect(options, CONCLAVE_ERROR_UNKNOWN_NAME, "device");
  options = sized<conclave_context_options>();
  options.isa = "avx1024";
  expect(options, CONCLAVE_ERROR_UNKNOWN_NAME, "avx1024");
  options = sized<conclave_context_options>();
  options.num_threads = -1;
  expect(options, CONCLAVE_ERROR_INVALID_ARGUMENT, "num_threads");
  options = sized<conclave_context_options>();
  options.flags = 8;
  expect(options, CONCLAVE_ERROR_INVALID_ARGUMENT, "flags");
  options = sized<conclave_context_options>();
  conclave_executor executor = threads.executor();
  options.executor = &executor;
  executor.concurrency = 0;
  expect(options, CONCLAVE_ERROR_INVALID_ARGUMENT, "concurrency");
  executor.concurrency = 2;
  executor.reserved = 5;
  expect(options, CONCLAVE_ERROR_INVALID_ARGUMENT, "reserved");
  executor.run = nullptr;
  expect(options, CONCLAVE_ERROR_NULL_POINTER, "executor.run");
  executor.struct_size = 4;
  expect(options, CONCLAVE_ERROR_INVALID_ARGUMENT, "executor.struct_size");
  options = sized<conclave_context_options>();
  auto allocator = sized<conclave_allocator>();
  options.host_allocator = &allocator;
  expect(options, CONCLAVE_ERROR_NULL_POINTER, "host_allocator.allocate");
  allocator.allocate = &Memory::allocate;
  expect(options, CONCLAVE_ERROR_NULL_POINTER, "host_allocator.deallocate");
}

}  // namespace
}  // namespace conclave
