// One rank of a group in which one rank, the victim, does as a scenario says. Each of the others
// writes what its call threw, and after how long.
//
// mpi_fault_rank SCENARIO VICTIM DIRECTORY
#include "support/layer_fixture.h"

#include "conclave/balance.h"
#include "conclave/comm.h"
#include "conclave/error.h"
#include "conclave/migration.h"

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mpi.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""ms;
using std::chrono_literals::operator""s;
using Clock = std::chrono::steady_clock;

constexpr auto kDeadline = 1500ms;

struct Rank {
  std::unique_ptr<Communicator> comm;
  int32_t victim = 0;
  std::unique_ptr<Communicator> second = {};  // carries migrations; outlives what a scenario throws
  bool is_victim() const { return comm->rank() == victim; }
};

[[noreturn]] void die() {
  ::kill(::getpid(), SIGKILL);
  std::abort();
}

void gather(Communicator& comm, size_t bytes) {
  const std::vector<std::byte> mine(bytes);
  std::vector<std::byte> all(bytes * static_cast<size_t>(comm.size()));
  comm.all_gather(mine, all, "step");
}

// Layers run until the victim, at some moment of one of them, is gone.
void run_layers(Rank& rank, Clock::duration until_death, int signal) {
  MoeSpec spec = testing::make_spec(8, 2, 256, 128, DType::kBF16);
  const Context context({.num_threads = 1, .communicator = rank.comm.get()});
  const auto source = make_synthetic_source(spec, 11);
  const MoeLayer layer =
      MoeLayer::create(context, spec, *source, {.max_tokens = 64},
                       {.ep_size = rank.comm->size(), .ep_rank = rank.comm->rank()});
  const Tensor hidden = testing::random_tensor(DType::kBF16, 100, 256, 1);
  rank.comm->barrier("ready");
  if (rank.is_victim()) {
    std::thread([=] {
      std::this_thread::sleep_for(until_death);
      ::kill(::getpid(), signal);
    }).detach();
  }
  while (true) testing::run_layer(layer, hidden.view(), DType::kBF16);
}

// Experts go to and fro until the victim is gone: between forwards, or beside them.
void move_experts(Rank& rank, Clock::duration until_death, int signal, bool beside_forwards) {
  const MoeSpec spec = testing::make_spec(9, 2, 256, 128, DType::kBF16);
  if (beside_forwards) rank.second = connect("mpi", {.timeout = kDeadline});
  const Context context({.num_threads = 1, .communicator = rank.comm.get()});
  const auto source = make_synthetic_source(spec, 11);
  const ParallelSpec linear{.ep_size = rank.comm->size(), .ep_rank = rank.comm->rank()};
  ParallelSpec turned = linear;
  turned.placement = PlacementStrategy::kRoundRobin;
  MoeLayer layer =
      MoeLayer::create(context, spec, *source, {.max_tokens = 64, .spare_experts = 1}, linear);
  const Tensor hidden = testing::random_tensor(DType::kBF16, 20, 256, 1);
  rank.comm->barrier("ready");
  if (rank.is_victim()) {
    std::thread([=] {
      std::this_thread::sleep_for(until_death);
      ::kill(::getpid(), signal);
    }).detach();
  }
  for (int round = 0;; ++round) {
    const ParallelSpec& next = round % 2 == 0 ? turned : linear;
    if (!beside_forwards) {
      layer.update_placement(next);
      continue;
    }
    Migration migration(layer, slots_of(spec.num_experts, next),
                        {.communicator = rank.second.get(), .processor_share = 1});
    for (int i = 0; i < 4; ++i) testing::run_layer(layer, hidden.view(), DType::kBF16);
    migration.finish();
  }
}

using Scenario = std::function<void(Rank&)>;

const std::map<std::string, Scenario>& scenarios() {
  static const std::map<std::string, Scenario> known = {
      {"killed_before_begin",
       [](Rank& rank) {
         if (rank.is_victim()) die();
         rank.comm->barrier("step");
       }},
      {"killed_before_long_reduction",
       [](Rank& rank) {
         if (rank.is_victim()) die();
         const std::vector<float> mine(1 << 20);
         std::vector<float> sum(mine.size());
         rank.comm->all_reduce(std::as_bytes(std::span(mine)),
                               std::as_writable_bytes(std::span(sum)), DType::kF32, ReduceOp::kSum,
                               "step");
       }},
      {"killed_after_begin",
       [](Rank& rank) {
         const std::vector<std::byte> mine(4 << 20);
         std::vector<std::byte> all(mine.size() * static_cast<size_t>(rank.comm->size()));
         const CommHandle handle = rank.comm->begin_all_gather(mine, all);
         if (rank.is_victim()) die();
         rank.comm->wait(handle, kDeadline, "step");
       }},
      {"killed_while_messages_are_open",
       [](Rank& rank) {
         if (rank.is_victim()) die();
         std::vector<std::byte> data(1 << 20);
         const CommHandle sent = rank.comm->begin_send(rank.victim, data);
         rank.comm->wait(sent, kDeadline, "step");
       }},
      {"leaves",
       [](Rank& rank) {
         if (!rank.is_victim()) gather(*rank.comm, 8);
       }},
      {"never_calls",
       [](Rank& rank) {
         if (rank.is_victim()) std::this_thread::sleep_for(kDeadline + 2s);
         rank.comm->barrier("step");
       }},
      {"never_connects",
       [](Rank& rank) {
         if (rank.is_victim()) std::this_thread::sleep_for(kDeadline + 2s);
         connect("mpi", {.timeout = kDeadline});
       }},
      {"stopped",
       [](Rank& rank) {
         if (rank.is_victim()) ::kill(::getpid(), SIGSTOP);
         rank.comm->barrier("step");
       }},
      {"throws",
       [](Rank& rank) {
         if (rank.is_victim()) rank.comm->abort("out of memory");
         rank.comm->barrier("step");
       }},
      {"ends_before_the_others_go_on",
       [](Rank& rank) {
         if (rank.is_victim()) {
           rank.comm->abort("out of memory");
           return;
         }
         try {
           rank.comm->barrier("step");
         } catch (const CommError&) {
           std::this_thread::sleep_for(300ms);
           const Survivors left = survivors(*rank.comm, {.deadline = kDeadline});
           left.communicator->barrier("on");
         }
       }},
      {"slow",
       [](Rank& rank) {
         for (int round = 0; round < 5; ++round) {
           if (rank.is_victim()) std::this_thread::sleep_for(kDeadline / 5);
           gather(*rank.comm, 300'000);
         }
       }},
      {"layer_killed_after_3ms", [](Rank& rank) { run_layers(rank, 3ms, SIGKILL); }},
      {"layer_killed_after_17ms", [](Rank& rank) { run_layers(rank, 17ms, SIGKILL); }},
      {"layer_killed_after_61ms", [](Rank& rank) { run_layers(rank, 61ms, SIGKILL); }},
      {"update_killed_after_7ms", [](Rank& rank) { move_experts(rank, 7ms, SIGKILL, false); }},
      {"update_killed_after_29ms", [](Rank& rank) { move_experts(rank, 29ms, SIGKILL, false); }},
      {"update_stopped_after_19ms", [](Rank& rank) { move_experts(rank, 19ms, SIGSTOP, false); }},
      {"migration_killed_after_7ms", [](Rank& rank) { move_experts(rank, 7ms, SIGKILL, true); }},
      {"migration_killed_after_31ms", [](Rank& rank) { move_experts(rank, 31ms, SIGKILL, true); }},
      {"migration_stopped_after_19ms", [](Rank& rank) { move_experts(rank, 19ms, SIGSTOP, true); }},
      {"layer_stopped_after_23ms", [](Rank& rank) { run_layers(rank, 23ms, SIGSTOP); }},
  };
  return known;
}

// MPI_Finalize deletes the attributes of MPI_COMM_SELF before it waits for other ranks.
int note_finalize(MPI_Comm, int, void* path, void*) {
  std::ofstream(*static_cast<std::string*>(path)) << "begun\n";
  return MPI_SUCCESS;
}
void watch_finalize(const std::string& directory, int32_t rank) {
  // Lives on, as MPI_Finalize comes after the end of what is static here.
  static auto* const path = new std::string(directory + "/finalises." + std::to_string(rank));
  int key = MPI_KEYVAL_INVALID;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, note_finalize, &key, nullptr);
  MPI_Comm_set_attr(MPI_COMM_SELF, key, path);
}

// Written whole or not at all: the one who reads waits for it.
void report(const std::string& directory, int32_t rank, const std::string& text) {
  const std::string path = directory + "/rank." + std::to_string(rank);
  {
    std::ofstream file(path + ".new");
    file << text << "\n";
  }
  ::rename((path + ".new").c_str(), path.c_str());
}

int run(const std::string& scenario, int32_t victim, const std::string& directory) {
  Rank rank{.comm = connect("mpi", {.timeout = kDeadline}), .victim = victim};
  const int32_t number = rank.comm->rank();
  { std::ofstream(directory + "/pid." + std::to_string(number)) << ::getpid(); }
  watch_finalize(directory, number);
  std::string text = "nothing -1 -";
  const auto start = Clock::now();
  try {
    // Peers may be through, and have met the fault, before this rank has read that they came.
    rank.comm->barrier("all are there");
    scenarios().at(scenario)(rank);
  } catch (const CommError& error) {
    text = std::string(to_string(error.code())) + " " + std::to_string(error.peer()) + " " +
           (error.phase().empty() ? "-" : "named");
  } catch (const Error& error) {
    text = std::string(to_string(error.code())) + " -1 - " + error.what();
  }
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
  rank.second.reset();
  rank.comm.reset();
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start);
  report(directory, number,
         text + " " + std::to_string(took.count()) + " " + std::to_string(left.count()));
  return 0;
}

}  // namespace
}  // namespace conclave

int main(int, char** argv) { return conclave::run(argv[1], std::atoi(argv[2]), argv[3]); }
