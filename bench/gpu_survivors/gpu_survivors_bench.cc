// Times how a layer on GPUs goes on after one of its ranks, processes over NCCL, has killed itself:
//   conclave synth qwen3-30b-a3b MODEL --layers 1
//   gpu_survivors_bench MODEL [--replicas]
// Ranks that are left print milliseconds since the death: to the error, to the new group, to the
// new layer, and to the end of its first forward, whose result is compared with that before.
#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <conclave/conclave.h>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

using conclave::DType;
using Clock = std::chrono::steady_clock;

struct Settings {
  std::string model;
  bool replicas = false;
  int32_t ranks = 2;
  int32_t gpus = 2;
  int32_t victim = 1;
  int64_t tokens = 64;
  std::string folder;  // where the ranks meet
};

double now_ms() {
  return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count();
}

// Written whole or not at all.
void write(const std::string& path, const std::string& text) {
  { std::ofstream(path + ".new") << text; }
  std::filesystem::rename(path + ".new", path);
}

std::vector<std::string> exchange(const Settings& settings, int32_t rank, const std::string& mine) {
  static int round = 0;
  const std::string place = fmt::format("{}/{}.", settings.folder, round++);
  write(place + std::to_string(rank), mine);
  std::vector<std::string> texts;
  for (int32_t other = 0; other < settings.ranks; ++other) {
    const std::string theirs = place + std::to_string(other);
    for (int wait = 0; wait < 60000 && !std::filesystem::exists(theirs); ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::ifstream file(theirs);
    texts.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return texts;
}

conclave::ParallelSpec split_of(const Settings& settings, int64_t experts, int32_t rank) {
  const conclave::ParallelSpec plain{.ep_size = settings.ranks, .ep_rank = rank};
  if (!settings.replicas) return plain;
  const std::vector<double> load(static_cast<size_t>(experts), 1.0);
  return with_slots(plain, conclave::balance_experts(
                               load, {.rule = "surviving",
                                      .num_ranks = settings.ranks,
                                      .num_redundant_experts = static_cast<int32_t>(experts)}));
}

// Calls of one rank's tokens.
class Call {
 public:
  Call(const conclave::Context& context, const conclave::MoeSpec& spec, int64_t tokens,
       int32_t rank)
      : queue_(context), out_(DType::kF32, {tokens, spec.hidden_size}) {
    conclave::Tensor rows(DType::kBF16, {tokens, spec.hidden_size});
    conclave::fill_random(rows.view(), static_cast<uint64_t>(rank) + 1);
    hidden_ = queue_.upload(rows.const_view());
    device_out_ = queue_.allocate(DType::kF32, {tokens, spec.hidden_size});
  }

  // Throws the CommError of a call without a result, which may be known only behind it.
  const conclave::Tensor& run(const conclave::MoeLayer& layer, conclave::Workspace& workspace,
                              conclave::Communicator& comm) {
    layer.forward({.hidden = hidden_.const_view(),
                   .out = device_out_.view(),
                   .workspace = &workspace,
                   .stream = queue_.stream()});
    queue_.synchronize();
    comm.check("forward");
    queue_.download(device_out_.const_view(), out_.view());
    return out_;
  }

 private:
  conclave::DeviceQueue queue_;
  conclave::DeviceTensor hidden_;
  conclave::DeviceTensor device_out_;
  conclave::Tensor out_;
};

double relative_difference(const std::vector<float>& a, std::span<const float> b) {
  double difference = 0;
  double size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double step = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += step * step;
    size += static_cast<double>(a[i]) * static_cast<double>(a[i]);
  }
  return std::sqrt(difference / size);
}

void run_rank(const Settings& settings, int32_t rank) {
  const std::string device = fmt::format("cuda:{}", rank % settings.gpus);
  const auto comm = conclave::connect(
      "nccl", {.rank = rank,
               .size = settings.ranks,
               .exchange = [&](const std::string& mine) { return exchange(settings, rank, mine); },
               .device = device,
               .timeout = std::chrono::seconds(30)});
  const conclave::Checkpoint checkpoint = conclave::Checkpoint::open(settings.model);
  const conclave::CheckpointLayer& stored = checkpoint.layers().front();
  const auto source = checkpoint.layer_source(stored.index);
  const conclave::Context context({.device = device, .communicator = comm.get()});
  const conclave::LayerOptions options{.max_tokens = settings.tokens};
  const double begin = now_ms();
  const conclave::MoeLayer layer = conclave::MoeLayer::create(
      context, stored.spec, *source, options, split_of(settings, stored.spec.num_experts, rank));
  const double created = now_ms() - begin;
  conclave::Workspace workspace(context, layer.workspace_bytes());
  Call call(context, stored.spec, settings.tokens, rank);
  const conclave::Tensor& out = call.run(layer, workspace, *comm);
  const std::vector<float> before(out.as<float>(), out.as<float>() + out.size_bytes() / 4);
  for (int round = 0; round < 5; ++round) call.run(layer, workspace, *comm);
  comm->barrier("ready");
  const std::string death = settings.folder + "/death";
  if (rank == settings.victim) {
    write(death, fmt::format("{:.3f}", now_ms()));
    ::kill(::getpid(), SIGKILL);
  }
  std::vector<double> times;
  try {
    while (true) call.run(layer, workspace, *comm);
  } catch (const conclave::CommError& error) {
    times.push_back(now_ms());
    if (error.peer() != settings.victim) throw;
  }
  const conclave::Survivors left =
      conclave::survivors(*comm, {.deadline = std::chrono::seconds(5)});
  times.push_back(now_ms());
  const conclave::Context fewer({.device = device, .communicator = left.communicator.get()});
  const conclave::MoeLayer next =
      layer.on_ranks(fewer,
                     conclave::without_ranks(stored.spec.num_experts, layer.parallel(),
                                             left.old_ranks, left.communicator->rank()),
                     settings.replicas ? nullptr : source.get());
  times.push_back(now_ms());
  conclave::Workspace room(fewer, next.workspace_bytes());
  const conclave::Tensor& after = call.run(next, room, *left.communicator);
  times.push_back(now_ms());
  const double difference = relative_difference(before, {after.as<float>(), before.size()});
  left.communicator->barrier("done");
  double died = 0;
  std::ifstream(death) >> died;
  fmt::print(
      "rank {} of {}, {}: error {:.0f} group {:.0f} layer {:.0f} forward {:.0f} ms; created "
      "in {:.0f} ms before; {} left; differs by {:.1e}\n",
      rank, settings.ranks, settings.replicas ? "replicas" : "read again", times[0] - died,
      times[1] - died, times[2] - died, times[3] - died, created, left.old_ranks.size(),
      difference);
  if (!(difference < 6e-3)) throw std::runtime_error("another result than before");
}

int run_child(const Settings& settings, int32_t rank) {
  if (settings.ranks > settings.gpus) {
    // NCCL takes ranks that share a GPU for those of several hosts.
    ::setenv("NCCL_HOSTID", std::to_string(rank).c_str(), 1);
    ::setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  }
  try {
    run_rank(settings, rank);
    return 0;
  } catch (const std::exception& error) {
    fmt::print(stderr, "rank {}: {}\n", rank, error.what());
    return 1;
  }
}

int run(Settings settings) {
  std::string folder = (std::filesystem::temp_directory_path() / "conclave-bench-XXXXXX").string();
  if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  settings.folder = folder;
  std::vector<pid_t> children;
  for (int32_t rank = 0; rank < settings.ranks; ++rank) {
    const pid_t child = ::fork();
    if (child == 0) {
      const int status = run_child(settings, rank);
      std::fflush(stdout);
      ::_exit(status);
    }
    children.push_back(child);
  }
  int worst = 0;
  for (int32_t rank = 0; rank < settings.ranks; ++rank) {
    int status = 0;
    ::waitpid(children[static_cast<size_t>(rank)], &status, 0);
    if (rank != settings.victim && status != 0) worst = 1;
  }
  std::filesystem::remove_all(folder);
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Times how a layer on GPUs goes on after one of its ranks has died.");
  app.add_option("model", settings.model)->required();
  app.add_flag("--replicas", settings.replicas, "every expert on two ranks: nothing is read");
  app.add_option("--ranks", settings.ranks);
  app.add_option("--gpus", settings.gpus);
  app.add_option("--victim", settings.victim);
  app.add_option("--tokens", settings.tokens, "of each rank");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(settings);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
