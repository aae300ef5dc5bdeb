// Moves experts of layers as their load changes: counts rows in a window of steps, now and then
// adds up the counts of all ranks, and sends experts where balance_experts says.
#pragma once

#include "conclave/context.h"
#include "conclave/migration.h"
#include "conclave/version.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0 {

class MoeLayer;

struct BalancerOptions {
  // Connects the ranks of the layers' communicator, and serves the balancer alone.
  Communicator* communicator = nullptr;
  // Rows of balance_rules(); all but `steady` begin without what lies where now, and keep experts
  // that stay on their rank.
  std::string rule = "hierarchical";
  int32_t num_nodes = 1;
  double least_gain = 0.01;      // as BalanceRequest::least_gain, for steady
  int64_t window_size = 1000;    // steps whose rows count, the last ones
  int64_t step_interval = 3000;  // steps from one rebalance to the next; the first comes after a
                                 // quarter of them
  bool log_balancedness = false;
  int64_t log_balancedness_interval = 1;  // steps from one line of the log to the next
  // Experts move beside forwards, as Migration does, layer by layer. False: all of them between two
  // forwards, in the step() that finds it is time.
  bool use_async = true;
  double processor_share = 0.05;  // as in MigrationOptions, as what follows
  size_t piece_bytes = size_t{256} << 10;
};

struct BalancerStatus {
  int64_t steps = 0;
  int64_t rebalances = 0;     // begun
  int64_t experts_moved = 0;  // in all layers, to and from any rank
  bool is_moving = false;     // a rebalance is under way
  double balancedness = 1;    // over all layers and this rank's rows of the last step
};

// One on each rank, with the same options and the same layers in the same order. A step is a
// forward of each layer. Counts are of valid tokens, as MoeLayer::expert_load has them. All ranks
// add up the same counts and so come to the same answer. Calls from the thread that calls the
// layers.
class CONCLAVE_API Balancer {
 public:
  // `context` has the log; it, the layers and the communicator must outlive the balancer. Throws
  // Error(kInvalidArgument) naming the field, kUnknownName for a rule, kUnsupported for a layer
  // with Reduce::kPartial.
  Balancer(const Context& context, std::vector<MoeLayer*> layers, const BalancerOptions& options);
  Balancer(const Balancer&) = delete;
  Balancer& operator=(const Balancer&) = delete;
  // Ends what is under way, as Migration does.
  ~Balancer();

  // [E] where the rows of a layer's forwards of this step are added: ForwardArgs::expert_load. Of a
  // layer on CUDA, which counts in memory of its device, the caller adds them.
  std::span<int64_t> load(size_t layer);
  // After the forwards of a step, on every rank. With use_async it waits for nothing. Throws what
  // ended a migration (Migration::check); the layers go on in the placement that they are in, and
  // the balancer does nothing more.
  void step();
  // Begins a rebalance with the next step, unless one is under way.
  void rebalance();
  BalancerStatus status() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace conclave::inline v0
