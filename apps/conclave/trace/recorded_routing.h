// --record-routing and --replay: the routing of a run's layers, written with the tokens' numbers,
// and given to a run in place of its own. Tokens are sequence 0, their row in the input the
// position.
#pragma once

#include "layer_run.h"

#include "conclave/routing_record.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

namespace conclave::tool {

std::vector<TokenKey> numbered_tokens(int64_t num_tokens);

// Throws Error(kShape) for a layer that the record has with other slots or more experts, and
// kLayerNotFound for one that it lacks: naming the file, and the model that it is of.
void check_record(const RoutingRecord& record, const std::string& file, int64_t layer,
                  const MoeSpec& spec);

// A layer's recorded choices for the rows of a batch.
class ReplayedLayer {
 public:
  // Throws Error naming what the record lacks: the layer, one of the tokens, or slots of this k.
  ReplayedLayer(const RoutingReplay& replay, int64_t layer, const MoeSpec& spec,
                int64_t num_tokens);
  void apply(LayerInput& input) const;
  // The router weighs shared experts in such layers, so that it runs all the same.
  static bool keeps_weights(const MoeSpec& spec);

 private:
  Tensor ids_;
  Tensor weights_;  // none where the router weighs
};

// Collects what a run's layers choose and writes it when all have run.
class RoutingFile {
 public:
  // The largest number of tokens of any layer is the room for each. Throws Error(kFileWrite) where
  // the file's directory is not there, before anything runs.
  RoutingFile(std::filesystem::path path, std::span<const RecordedLayer> layers, int64_t num_tokens,
              std::string model, std::string model_type);
  void add(int64_t layer, const LayerRun& run);
  void finish() const { recorder_.write(path_); }

 private:
  std::filesystem::path path_;
  RoutingRecorder recorder_;
};

}  // namespace conclave::tool
