#include "conclave/context.h"

#include "cpu/isa.h"
#include "cpu/memory.h"
#include "cpu/turn.h"
#include "layer/engine.h"

#include "conclave/error.h"

#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr int32_t kMaxThreads = 4096;

int32_t parse_thread_count(const char* variable, std::string_view text) {
  int32_t value = 0;
  // OMP_NUM_THREADS may list counts per nesting level; the first is the outer one.
  const std::string_view first = text.substr(0, text.find(','));
  const auto [end, problem] = std::from_chars(first.data(), first.data() + first.size(), value);
  if (problem != std::errc() || end != first.data() + first.size() || value < 1 ||
      value > kMaxThreads) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = std::string(variable) + " is not a thread count",
                 .found = std::string(text),
                 .limit = "1 to " + std::to_string(kMaxThreads)});
  }
  return value;
}

// An application's executor, of which forwards in several threads take turns.
class InTurns final : public Executor {
 public:
  explicit InTurns(Executor& executor) : executor_(executor) {}
  int32_t concurrency() const noexcept override { return executor_.concurrency(); }
  void run(ParallelTask task) override {
    const std::lock_guard turn(turn_);
    executor_.run(task);
  }

 private:
  Executor& executor_;
  cpu::Turn turn_;
};

void check_device(const Device& device, const EngineRow& row) {
  const Support support = row.usable(device.ordinal);
  if (support) return;
  throw Error(ErrorCode::kDevice, {.what = "the device " + to_string(device) + " cannot be used",
                                   .found = support.reason()});
}

}  // namespace

void LogSink::progress(std::string_view, int64_t, int64_t) {}

struct Context::Impl {
  ContextOptions options;
  std::unique_ptr<Executor> executor;
  std::string device;
  HostAllocator* allocator = nullptr;
  DeviceAllocator* device_allocator = nullptr;
  std::map<std::string, RouterFactory, std::less<>> routers;
  mutable std::shared_mutex routers_mutex;
};

Context::Context(ContextOptions options) : impl_(std::make_unique<Impl>()) {
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    throw Error(ErrorCode::kInvalidArgument, {.what = "ContextOptions.num_threads is out of range",
                                              .found = std::to_string(options.num_threads),
                                              .limit = "0 to " + std::to_string(kMaxThreads)});
  }
  if (!options.isa.empty()) {
    const cpu::Isa isa = cpu::parse_isa(options.isa);
    const Support support = cpu::usable(isa);
    if (!support) {
      throw Error(ErrorCode::kUnsupported,
                  {.what = "the instruction set " + options.isa + " cannot be used",
                   .found = support.reason(),
                   .hint = "leave it unset to use the best one this machine has"});
    }
  }
  if (options.executor != nullptr) {
    impl_->executor = std::make_unique<InTurns>(*options.executor);
  } else {
    impl_->executor =
        make_thread_pool({.num_threads = options.num_threads, .pin_threads = options.pin_threads});
  }
  impl_->allocator =
      options.host_allocator != nullptr ? options.host_allocator : &cpu::default_allocator();
  const Device device = parse_device(options.device);
  const EngineRow& engine = engine_row(device);
  check_device(device, engine);
  impl_->device = to_string(device);
  if (const DeviceRuntime* runtime = engine.runtime(device.ordinal)) {
    impl_->device_allocator =
        options.device_allocator != nullptr ? options.device_allocator : &runtime->allocator();
  }
  impl_->options = std::move(options);
}

Context Context::from_environment(ContextOptions options) {
  if (options.num_threads == 0) {
    for (const char* variable : {"CONCLAVE_NUM_THREADS", "OMP_NUM_THREADS"}) {
      const char* text = std::getenv(variable);
      if (text == nullptr || *text == '\0') continue;
      options.num_threads = parse_thread_count(variable, text);
      break;
    }
  }
  if (const char* device = std::getenv("CONCLAVE_DEVICE");
      device != nullptr && options.device.empty()) {
    options.device = device;
  }
  if (const char* isa = std::getenv("CONCLAVE_ISA"); isa != nullptr && options.isa.empty()) {
    options.isa = isa;
  }
  if (const char* pin = std::getenv("CONCLAVE_PIN_THREADS"); pin != nullptr) {
    // A variable never takes back pinning that the caller asked for in code.
    options.pin_threads = options.pin_threads || std::string_view(pin) == std::string_view("1");
  }
  return Context(std::move(options));
}

Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;
Context::~Context() = default;

Executor& Context::executor() const noexcept { return *impl_->executor; }

HostAllocator& Context::host_allocator() const noexcept { return *impl_->allocator; }

const std::string& Context::device() const noexcept { return impl_->device; }

DeviceAllocator* Context::device_allocator() const noexcept { return impl_->device_allocator; }

Communicator* Context::communicator() const noexcept { return impl_->options.communicator; }

Communicator* Context::tensor_communicator() const noexcept {
  return impl_->options.tensor_communicator;
}

const std::string& Context::isa() const noexcept { return impl_->options.isa; }

void Context::log(LogLevel level, std::string_view message) const {
  if (impl_->options.log != nullptr) impl_->options.log->log(level, message);
}

void Context::progress(std::string_view phase, int64_t done, int64_t total) const {
  if (impl_->options.log != nullptr) impl_->options.log->progress(phase, done, total);
}

void Context::add_router(std::string name, RouterFactory factory) {
  if (name.empty() || !factory) {
    throw Error(ErrorCode::kInvalidArgument, "a router needs a name and a factory");
  }
  const std::unique_lock lock(impl_->routers_mutex);
  const auto [position, inserted] = impl_->routers.try_emplace(std::move(name), std::move(factory));
  if (!inserted) {
    throw Error(ErrorCode::kInvalidArgument,
                {.what = "a router of this name exists", .found = position->first});
  }
}

const RouterFactory* Context::find_router(std::string_view name) const noexcept {
  const std::shared_lock lock(impl_->routers_mutex);
  const auto found = impl_->routers.find(name);
  return found != impl_->routers.end() ? &found->second : nullptr;
}

}  // namespace conclave::inline v0
