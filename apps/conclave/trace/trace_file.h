// Traces as safetensors files. docs/cli.md has the schema: metadata that name model, experts,
// choices, tokens and batches, and for each layer N layers.N.topk_ids, [T, k] int32.
#pragma once

#include "trace/routing_trace.h"

#include "conclave/safetensors.h"
#include "conclave/tensor.h"

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace conclave::tool {

enum class TraceWeights : uint8_t { kNo, kYes };

// Writes a trace layer by layer; the file appears when it is finished.
class TraceWriter {
 public:
  // Throws Error(kFileWrite) at once if the file cannot be made.
  TraceWriter(const std::filesystem::path& path, const TraceInfo& info, TraceWeights weights);

  // The next layer of info.layers: ids [T, slots] int32 and weights [T, slots] f32, of which the
  // first k of each row are kept; weights are read only where they are written.
  void write(const ConstTensorView& ids, const ConstTensorView& weights);
  void finish() { writer_.finish(); }

 private:
  void write_rows(const ConstTensorView& rows);

  SafetensorsWriter writer_;
  int64_t top_k_;
  TraceWeights weights_;
};

// Checks the metadata and the tensors of a file against each other. Throws
// Error(kConfigMissingKey, kConfigValue) naming the key, Error(kTensorMissing, kTensorShape,
// kTensorDType, kTensorUnexpected) naming the tensor.
TraceInfo read_trace_info(std::span<const TensorInfo> tensors,
                          const std::map<std::string, std::string>& metadata,
                          const std::string& file);
// Throws Error(kExpertId) naming token and slot for an id that is neither -1 nor an expert's.
void check_trace_ids(std::span<const int32_t> ids, const TraceInfo& info, int64_t layer,
                     const std::string& file);

class TraceFile final : public RoutingTrace {
 public:
  // Throws as SafetensorsFile::open and read_trace_info; weights that are not finite are
  // Error(kTensorValue).
  static TraceFile open(const std::filesystem::path& path);

  std::vector<int32_t> ids(size_t position) const override;
  std::string describe() const override;

 private:
  explicit TraceFile(SafetensorsFile file);
  void check_weights() const;

  SafetensorsFile file_;
};

}  // namespace conclave::tool
