// A Checkpoint shows the same of a model whichever container holds its tensors.
#pragma once

#include "conclave/checkpoint.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

struct Contents {
  Contents() = default;
  Contents(const Contents&) = delete;
  Contents& operator=(const Contents&) = delete;
  virtual ~Contents() = default;

  // Reads the weights of layers[position]; the contents must outlive it. Throws
  // Error(kUnsupportedQuantization).
  virtual std::unique_ptr<WeightSource> source(size_t position) const = 0;
  // Names the matrices of experts of layers[position].
  virtual std::vector<StoredMatrix> stored_matrices(size_t position) const = 0;
  // Names the tensors that layers[position] is read from, in any order; some may come twice.
  virtual std::vector<std::string> tensors_of(size_t position) const = 0;

  std::filesystem::path path;  // the directory or file
  std::string model_type;
  std::string architecture;
  int64_t num_hidden_layers = 0;
  std::vector<CheckpointLayer> layers;  // MoE layers, ascending
  std::vector<std::string> notes;
  uint64_t total_bytes = 0;
  uint64_t total_parameters = 0;
};

}  // namespace conclave::inline v0::checkpoint
