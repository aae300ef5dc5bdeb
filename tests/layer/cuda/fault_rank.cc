// One process of a group over NCCL in which one rank meets a fault in some phase of a layer on
// GPUs. The others write what they heard of it, and how they went on.
//
// cuda_fault_rank nccl HOST|MS FAULT PHASE VICTIM REPLICAS OVERLAPS DIRECTORY, as matrix_rank; with
// a number the victim meets its fault so many ms after it has called survivors().
#include "device_layer.h"
#include "dist/group_rank.h"
#include "support/rank_fault.h"

#include "conclave/balance.h"
#include "conclave/comm.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cuda_runtime_api.h>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <unistd.h>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::Fault;
using testing::FaultCase;
using testing::FaultPhase;
using testing::FaultReport;
using testing::write_whole;

constexpr double kBar = 6e-3;

// Does as the case says at the victim's operation of the phase: the first that waits on the host,
// or the exchanges on the device before and behind the products.
class FaultyCommunicator final : public Communicator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> inner, const FaultCase& fault,
                     std::chrono::milliseconds delay)
      : inner_(std::move(inner)), fault_(fault), delay_(delay) {}
  void arm() {
    begun_ = true;
    armed_ = rank() == fault_.victim;
  }

  std::string_view name() const noexcept override { return inner_->name(); }
  int32_t rank() const noexcept override { return inner_->rank(); }
  int32_t size() const noexcept override { return inner_->size(); }
  // For the waits that meet the fault. Before, ranks had longer: programs of a busy machine load
  // their kernels one long after the other.
  std::chrono::nanoseconds timeout() const noexcept override {
    return begun_ ? std::chrono::nanoseconds(fault_.deadline) : inner_->timeout();
  }
  Support supports(CommFeature feature) const override { return inner_->supports(feature); }
  void check(std::string_view phase) override { inner_->check(phase); }
  void abort(std::string_view reason) noexcept override { inner_->abort(reason); }
  bool test(CommHandle handle, std::string_view phase) override {
    return inner_->test(handle, phase);
  }
  void wait(CommHandle handle, std::chrono::nanoseconds deadline, std::string_view phase) override {
    const bool is_created = fault_.phase == FaultPhase::kCreate && phase.starts_with("create");
    if (is_created || (fault_.phase == FaultPhase::kAgree && phase.starts_with("forward: agree"))) {
      strike();
    }
    inner_->wait(handle, deadline, phase);
  }
  void wait_on(Stream stream, CommHandle handle, std::chrono::nanoseconds deadline,
               std::string_view phase) override {
    const bool gathers = phase.starts_with("forward: gather");
    if (fault_.phase == (gathers ? FaultPhase::kDispatch : FaultPhase::kCombine)) strike();
    inner_->wait_on(stream, handle, deadline, phase);
    // The products follow: they are enqueued between the two exchanges.
    if (gathers && fault_.phase == FaultPhase::kProducts) strike();
  }
  Survivors shrink(std::chrono::nanoseconds deadline, std::string_view phase) override {
    if (fault_.phase == FaultPhase::kSurvivors) strike_later();
    return inner_->shrink(deadline, phase);
  }

 protected:
  CommHandle start(const CommOperation& operation) override {
    if (!armed_ || fault_.fault != Fault::kDisagrees) return inner_->begin(operation);
    const bool on_device = operation.stream.handle != nullptr;
    if (on_device) ++exchanges_;
    const bool hits =
        on_device ? (fault_.phase == FaultPhase::kDispatch && exchanges_ == 1) ||
                        (fault_.phase == FaultPhase::kCombine && exchanges_ == 2)
                  : fault_.phase == FaultPhase::kCreate || fault_.phase == FaultPhase::kAgree;
    if (!hits) return inner_->begin(operation);
    armed_ = false;
    return inner_->begin_barrier(operation.stream);
  }

 private:
  // In the roll call, or some time later, when the ranks may connect or serve on.
  void strike_later() {
    if (!armed_ || delay_.count() == 0) return strike();
    std::thread([this] {
      std::this_thread::sleep_for(delay_);
      fault_.strike(fault_.fault);
    }).detach();
    armed_ = false;
  }
  void strike() {
    if (!armed_ || fault_.fault == Fault::kDisagrees) return;
    armed_ = false;
    switch (fault_.fault) {
      case Fault::kThrows:
        throw std::runtime_error("planted");
      case Fault::kNeverCalls:
        return std::this_thread::sleep_for(fault_.deadline * 3);
      case Fault::kIsSlow:
        return std::this_thread::sleep_for(fault_.deadline / 20);
      default:
        return fault_.strike(fault_.fault);
    }
  }

  std::unique_ptr<Communicator> inner_;
  const FaultCase& fault_;
  std::chrono::milliseconds delay_;
  bool begun_ = false;
  bool armed_ = false;
  int exchanges_ = 0;
};

// A layer on this rank's GPU, and its own tokens.
class GpuRank {
 public:
  GpuRank(const FaultCase& fault, std::string device, int32_t rank, int32_t ranks)
      : device_(std::move(device)),
        spec_(testing::make_spec(8, 2, 256, 256, DType::kBF16)),
        hidden_(
            testing::random_tensor(DType::kBF16, 40 + rank, 256, static_cast<uint64_t>(rank) + 1)),
        routing_(testing::random_routing(40 + rank, 8, 2, static_cast<uint64_t>(rank) + 1)),
        split_({.ep_size = ranks, .ep_rank = rank}) {
    if (!fault.has_replicas) return;
    const std::vector<double> load(8, 1.0);
    split_ = with_slots(
        split_, balance_experts(
                    load, {.rule = "surviving", .num_ranks = ranks, .num_redundant_experts = 8}));
  }

  bool has_layer() const { return layer_ != nullptr; }
  void create(Communicator& comm) {
    layer_ = std::make_unique<testing::DeviceLayer>(
        ContextOptions{.device = device_, .num_threads = 1, .communicator = &comm}, spec_,
        make_synthetic_source(spec_, 11), LayerOptions{.max_tokens = 64}, split_);
  }

  // Throws the CommError of a call without a result, which may be known only behind it.
  Tensor forward(Communicator& comm) { return forward(layer_->layer, layer_->workspace, comm); }
  bool is_right(const Tensor& out) {
    return testing::worst_error(*layer_, hidden_, routing_, out) <= kBar;
  }

  // The first forward with those that are left, when it was over, and whether it is right.
  std::pair<bool, int64_t> go_on(const Survivors& left, bool has_replicas) {
    Communicator& comm = *left.communicator;
    const Context fewer({.device = device_, .num_threads = 1, .communicator = &comm});
    const ParallelSpec next = without_ranks(spec_.num_experts, split_, left.old_ranks, comm.rank());
    const auto source = make_synthetic_source(spec_, 11);
    const MoeLayer layer =
        has_layer() ? layer_->layer.on_ranks(fewer, next, has_replicas ? nullptr : source.get())
                    : MoeLayer::create(fewer, spec_, *source, {.max_tokens = 64}, next);
    if (!has_layer()) {
      layer_ = std::make_unique<testing::DeviceLayer>(
          ContextOptions{.device = device_, .num_threads = 1}, spec_,
          make_synthetic_source(spec_, 11), LayerOptions{.max_tokens = 64}, ParallelSpec{});
    }
    Workspace workspace(fewer, layer.workspace_bytes());
    const Tensor out = forward(layer, workspace, comm);
    const int64_t over = testing::steady_ns();
    // Nobody leaves before all have their results.
    comm.barrier("done");
    return {is_right(out), over};
  }

 private:
  Tensor forward(const MoeLayer& layer, Workspace& workspace, Communicator& comm) {
    testing::DeviceForward call(*layer_, hidden_.view(), DType::kF32);
    call.route_by(routing_.ids, routing_.weights);
    call.args.workspace = &workspace;
    try {
      layer.forward(call.args);
    } catch (const CommError&) {
      layer_->queue.synchronize();
      throw;
    }
    layer_->queue.synchronize();
    comm.check("forward: look back");
    return call.out();
  }

  std::string device_;
  MoeSpec spec_;
  Tensor hidden_;
  testing::GivenRouting routing_;
  ParallelSpec split_;
  std::unique_ptr<testing::DeviceLayer> layer_;
};

std::string joined(const std::vector<int32_t>& ranks) {
  std::string text;
  for (const int32_t rank : ranks) text += (text.empty() ? "" : ".") + std::to_string(rank);
  return text;
}

// More ranks may die meanwhile: the group that fails then is left like the first one.
void go_on(Communicator& first, const FaultCase& fault, GpuRank& rank, FaultReport& report) {
  std::vector<Survivors> groups;
  Communicator* failed = &first;
  for (int32_t lost = 0; lost < fault.ranks; ++lost) {
    try {
      Survivors left = survivors(*failed, {.deadline = fault.deadline});
      for (int32_t& old : left.old_ranks) {
        if (!groups.empty()) old = groups.back().old_ranks[static_cast<size_t>(old)];
      }
      groups.push_back(std::move(left));
    } catch (const CommError& error) {
      report.went_on = to_string(error.code());
      return;
    }
    failed = groups.back().communicator.get();
    report.went_on = joined(groups.back().old_ranks);
    try {
      const auto [is_right, over] = rank.go_on(groups.back(), fault.has_replicas);
      report.is_right = is_right && report.is_right;
      report.correct_ns = over;
      return;
    } catch (const CommError&) {
      continue;
    }
  }
}

FaultReport run_fault_on_gpu(std::unique_ptr<Communicator> communicator, const FaultCase& fault,
                             const std::string& device, std::chrono::milliseconds delay) {
  FaultReport report;
  GpuRank rank(fault, device, communicator->rank(), communicator->size());
  FaultyCommunicator comm(std::move(communicator), fault, delay);
  report.is_right = true;
  try {
    if (fault.phase != FaultPhase::kCreate) {
      rank.create(comm);
      report.is_right = rank.is_right(rank.forward(comm));
    }
    comm.barrier("ready");
    comm.arm();
    report.begin_ns = testing::steady_ns();
    if (fault.phase == FaultPhase::kCreate) rank.create(comm);
    if (fault.phase == FaultPhase::kSurvivors) {
      throw CommError(ErrorCode::kCommAborted, -1, "planted", "the group is given up");
    }
    // One forward meets the fault; the next one, what it has left behind.
    for (int forward = 0; forward < 3; ++forward) {
      report.is_right = rank.is_right(rank.forward(comm)) && report.is_right;
    }
    comm.barrier("done");
    return report;
  } catch (const CommError& error) {
    report.error_ns = testing::steady_ns();
    report.code = to_string(error.code());
    report.peer = error.peer();
    report.phase = error.phase();
  }
  go_on(comm, fault, rank, report);
  return report;
}

std::string one_word(std::string text) {
  std::ranges::replace(text, ' ', '_');
  return text.empty() ? "-" : text;
}

std::string line_of(const FaultReport& report) {
  return report.code + " " + std::to_string(report.peer) + " " + one_word(report.phase) + " " +
         one_word(report.went_on) + " " + (report.is_right ? "right" : "wrong") + " " +
         std::to_string(report.begin_ns) + " " + std::to_string(report.error_ns) + " " +
         std::to_string(report.correct_ns);
}

// NCCL takes ranks that share a GPU for those of several hosts.
std::string device_of_rank(int32_t rank, int32_t ranks) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) throw std::runtime_error("no device");
  if (ranks > devices) {
    ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  }
  return "cuda:" + std::to_string(rank % devices);
}

int run(char** words) {
  FaultCase fault{.fault = testing::fault_of(words[3]),
                  .phase = testing::phase_of(words[4]),
                  .victim = std::atoi(words[5]),
                  .has_replicas = std::string(words[6]) == "yes",
                  .ranks = std::atoi(std::getenv("CONCLAVE_TEST_RANKS"))};
  const std::string directory = words[8];
  const int32_t rank = std::atoi(std::getenv("CONCLAVE_TEST_RANK"));
  const int32_t ranks = std::atoi(std::getenv("CONCLAVE_TEST_RANKS"));
  const std::string number = std::to_string(rank);
  write_whole(directory + "/pid." + number, std::to_string(::getpid()));
  fault.strike = [&](Fault how) {
    write_whole(directory + "/struck", std::to_string(testing::steady_ns()));
    ::kill(::getpid(), how == Fault::kDies ? SIGKILL : SIGSTOP);
  };
  std::string line;
  try {
    const std::string device = device_of_rank(rank, ranks);
    // Programs of a busy machine begin one long after the other, and load NCCL when they connect.
    auto communicator = connect("nccl", {.rank = rank,
                                         .size = ranks,
                                         .exchange = testing::FileExchange(directory, rank, ranks),
                                         .device = device,
                                         .timeout = std::chrono::seconds(60)});
    const std::chrono::milliseconds delay(std::atoi(words[2]));
    line = line_of(run_fault_on_gpu(std::move(communicator), fault, device, delay));
  } catch (const std::exception& error) {
    line = "threw " + one_word(error.what());
  }
  write_whole(directory + "/rank." + number, line);
  return 0;
}

}  // namespace
}  // namespace conclave

int main(int, char** words) { return conclave::run(words); }
