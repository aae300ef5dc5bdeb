// A cluster as plain numbers: nodes of equal GPUs, what a GPU holds and does, and how fast bytes
// travel within a node and between nodes.
#pragma once

#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>

namespace conclave::tool {

struct Cluster {
  std::string gpu;  // "h200"
  int32_t nodes = 1;
  int32_t gpus_per_node = 1;
  double memory_gb = 0;        // 1e9 bytes that programs can have
  double memory_tbps = 0;      // read from memory, 1e12 bytes a second
  double tensor16_tflops = 0;  // dense products of 16-bit operands, as published
  double tensor8_tflops = 0;   // the same of 8-bit operands
  double float32_tflops = 0;   // without tensor cores
  double link_gbps = 0;        // a copy to a GPU of the same node, 1e9 bytes a second
  double link_us = 0;          // the shortest all-to-all of two GPUs of a node
  double network_gbps = 0;     // a GPU's share of the network, 1e9 bytes a second
  double network_us = 0;       // the shortest message to another node
  double network_peer_us = 0;  // one more message of an exchange with many nodes

  int32_t num_gpus() const { return nodes * gpus_per_node; }
};

// Parses [NODESx]GPUS:KIND with any ",key=value" behind it, such as "4x8:h200,network_gbps=45", or
// reads a JSON file with nodes, gpus, gpu and the same keys. KIND is h200, h100, or custom, of
// which every key must be given. Throws Error(kInvalidArgument) naming the key,
// Error(kFileNotFound, kFileRead, kJsonSyntax, kJsonType, kJsonTooLarge).
Cluster parse_cluster(const std::string& text);

// Returns "4 nodes of 8 h200".
std::string cluster_text(const Cluster& cluster);
// Has every key that a file may have.
nlohmann::ordered_json cluster_json(const Cluster& cluster);

}  // namespace conclave::tool
