#include "plan/exchange_model.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace conclave::tool {
namespace {

// The link of the GPUs between which the curves were measured.
constexpr double kMeasuredGbps = 395;
constexpr double kMeasuredMicroseconds = 9.5;

// Short exchanges take another protocol than long ones: less latency, a lower rate. The faster of
// the two counts. Peers beyond the first add latency; with few of them not all links are in use.
struct Curve {
  double short_us = 0;
  double short_gbps = 0;
  double long_us = 0;
  double long_gbps = 0;
  double peer_us = 0;
  double few_peers = 0;  // the rate is long_gbps n / (n + few_peers) with n peers
};

// In the order of Collective.
constexpr std::array kCurves = {Curve{.short_us = 9.48,
                                      .short_gbps = 127.5,
                                      .long_us = 29.66,
                                      .long_gbps = 327.6,
                                      .peer_us = 0.71,
                                      .few_peers = 0.09},
                                Curve{.short_us = 7.33,
                                      .short_gbps = 116.1,
                                      .long_us = 22.67,
                                      .long_gbps = 362.4,
                                      .peer_us = 1.71,
                                      .few_peers = 0.44},
                                Curve{.short_us = 7.67,
                                      .short_gbps = 125.9,
                                      .long_us = 17.44,
                                      .long_gbps = 366.1,
                                      .peer_us = 1.15,
                                      .few_peers = 0.53},
                                Curve{.short_us = 8.20,
                                      .short_gbps = 125.6,
                                      .long_us = 18.08,
                                      .long_gbps = 349.8,
                                      .peer_us = 1.77,
                                      .few_peers = 0.14}};

// 1e9 bytes a second are 1e3 bytes a microsecond.
constexpr double kBytesPerMicrosecond = 1e3;

}  // namespace

double wire_bytes(Collective collective, int32_t ranks, double bytes) {
  const double others = ranks - 1;
  switch (collective) {
    case Collective::kAllGather:
      return bytes * others;
    case Collective::kAllReduce:
      return 2 * bytes * others / ranks;
    case Collective::kAllToAll:
    case Collective::kReduceScatter:
      break;
  }
  return bytes * others / ranks;
}

double node_microseconds(const Cluster& cluster, Collective collective, int32_t ranks,
                         double wire) {
  if (ranks <= 1) return 0;
  const Curve& curve = kCurves[static_cast<size_t>(collective)];
  const double peers = ranks - 1;
  const double latency = cluster.link_us / kMeasuredMicroseconds;
  const double speed = cluster.link_gbps / kMeasuredGbps * kBytesPerMicrosecond;
  const double long_rate = curve.long_gbps * peers / (peers + curve.few_peers);
  const double of_short = curve.short_us * latency + wire / (curve.short_gbps * speed);
  const double of_long = curve.long_us * latency + wire / (long_rate * speed);
  return curve.peer_us * latency * peers + std::min(of_short, of_long);
}

double network_microseconds(const Cluster& cluster, int32_t peers, double bytes) {
  if (peers <= 0) return 0;
  return cluster.network_us + cluster.network_peer_us * (peers - 1) +
         bytes / (cluster.network_gbps * kBytesPerMicrosecond);
}

double all_reduce_microseconds(const Cluster& cluster, const GroupShape& group, double bytes) {
  const double within =
      node_microseconds(cluster, Collective::kAllReduce, group.per_node,
                        wire_bytes(Collective::kAllReduce, group.per_node, bytes));
  if (group.nodes == 1) return within;
  // Each GPU of a node adds up its part of the buffer with its peers on other nodes, in a tree.
  const double part = bytes / group.per_node;
  const double steps = 2 * std::ceil(std::log2(group.nodes));
  return within + steps * cluster.network_us +
         2 * part * (group.nodes - 1) / group.nodes / (cluster.network_gbps * kBytesPerMicrosecond);
}

double row_exchange_microseconds(const Cluster& cluster, const GroupShape& group,
                                 const RowExchange& rows) {
  return network_microseconds(cluster, group.nodes - 1, rows.network_bytes) +
         node_microseconds(cluster, Collective::kAllToAll, group.per_node, rows.node_bytes);
}

}  // namespace conclave::tool
