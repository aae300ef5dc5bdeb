// How long exchanges between GPUs take: by latency and bytes, with curves fitted to collectives
// between H200s (bench/results/h200). They have been measured over 2 and 4 GPUs of one host;
// everything beyond is extrapolated.
#pragma once

#include "plan/cluster.h"

#include <cstdint>

namespace conclave::tool {

enum class Collective : uint8_t { kAllToAll, kAllGather, kReduceScatter, kAllReduce };

// The largest relative error of a prediction against any of the measured collectives.
inline constexpr double kWorstExchangeError = 0.17;

// Bytes that each GPU sends in a collective among `ranks` of one node. `bytes` is what each gives
// to every other in an all-gather, and its whole buffer in the others.
double wire_bytes(Collective collective, int32_t ranks, double bytes);

// Microseconds of a collective in which each of `ranks` GPUs of a node sends `wire` bytes. One rank
// has nobody to exchange with: 0.
double node_microseconds(const Cluster& cluster, Collective collective, int32_t ranks, double wire);

// Microseconds in which each GPU sends `bytes` to GPUs of `peers` other nodes.
double network_microseconds(const Cluster& cluster, int32_t peers, double bytes);

// A group of GPUs: how many nodes it spans, and how many of it a node has.
struct GroupShape {
  int32_t nodes = 1;
  int32_t per_node = 1;
};

// The sum of a buffer of `bytes` on every GPU of a group.
double all_reduce_microseconds(const Cluster& cluster, const GroupShape& group, double bytes);

// Rows between the ranks of a group: over the network a row travels once to each node, then within
// the node to the ranks that need it.
struct RowExchange {
  double node_bytes = 0;     // that the busiest GPU sends or takes within its node
  double network_bytes = 0;  // over the network
};
double row_exchange_microseconds(const Cluster& cluster, const GroupShape& group,
                                 const RowExchange& rows);

}  // namespace conclave::tool
