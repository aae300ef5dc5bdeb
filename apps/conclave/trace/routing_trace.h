// The routing of a run: which experts each token chose in each layer. It comes from a file or is
// drawn, one layer at a time, so that memory is bounded by the longest layer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::tool {

struct TraceInfo {
  std::string model = {};       // as the run named it
  std::string model_type = {};  // may be empty
  int64_t num_experts = 0;
  int64_t num_zero_experts = 0;  // ids E .. E+Z-1 ask for no work
  int64_t top_k = 0;
  int64_t num_tokens = 0;
  std::vector<int64_t> layers = {};       // numbers of the layers, ascending
  std::vector<int64_t> batch_begin = {};  // first token of each batch, ascending from 0
};

class RoutingTrace {
 public:
  virtual ~RoutingTrace() = default;

  const TraceInfo& info() const { return info_; }
  // Returns [T, k] ids of the layer info().layers[position]; -1: no expert. Throws Error(kExpertId)
  // for an id that the layer cannot have, and as a file's reader does.
  virtual std::vector<int32_t> ids(size_t position) const = 0;
  // Returns "4096 tokens of x.safetensors", "uniform, seed 0".
  virtual std::string describe() const = 0;

 protected:
  explicit RoutingTrace(TraceInfo info) : info_(std::move(info)) {}

 private:
  TraceInfo info_;
};

// Rows of each expert, [E]: zero experts and skipped choices are left out. `ids` are any tokens'.
std::vector<int64_t> expert_rows(std::span<const int32_t> ids, int64_t num_experts);

}  // namespace conclave::tool
