// A Hugging Face model directory as a list of MoE layers: config.json, then model.safetensors or
// model.safetensors.index.json with its shards.
#pragma once

#include "conclave/error.h"
#include "conclave/gguf.h"
#include "conclave/safetensors.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// Selects one set of experts in a layer with one for text and one for images (ERNIE 4.5 VL).
enum class ExpertSet : uint8_t { kText, kVision };

struct CheckpointOptions {
  FileAccess access = FileAccess::kAuto;
  // kVision: Error(kInvalidArgument) for families with one set.
  ExpertSet experts = ExpertSet::kText;
  // Also lists the MoE layers beyond num_hidden_layers (N) that multi-token prediction stores:
  // those named "<trunk>layers.{N + i}." keep their number, "mtp.layers.{i}." becomes N + i; i <
  // 64. The tensors decide which exist, whatever config.json counts: layers without experts and
  // router are not listed. Lists with one value per layer continue with their last value.
  bool extra_layers = false;
  // Checks tensor data against the manifest that write_manifest wrote while reading;
  // Error(kChecksum) if a bit differs.
  bool verify_manifest = false;
};

struct CheckpointLayer {
  int64_t index = 0;   // N of model.layers.N; num_hidden_layers + N of mtp.layers.N
  std::string prefix;  // "model.layers.0.mlp."
  // Storage of the experts: "per_expert", "per_expert_fused", "stacked", "stacked_unfused",
  // "stacked_interleaved", "flat"; "_transposed" follows if a stack lies columns first.
  std::string layout;
  MoeSpec spec;
  uint64_t bytes = 0;  // bytes of the layer's tensors in the files
  ParameterCount parameters;
  Support support = Support::yes();  // yes if MoeLayer can run it, otherwise the reason
};

// A matrix of routed or shared experts, and the names that the files have for it.
struct StoredMatrix {
  WeightId id = weights::kGate;
  int64_t expert = 0;
  // Tensors that hold its weights, which come first, and the planes that give codes a meaning.
  std::vector<std::string> tensors;
  // The name of a linear layer for it, without ".weight": that of its tensor, if no more lies there
  // than this matrix, or this and others with their rows in turn; otherwise the family's name for
  // it where each expert has tensors of its own. Empty if there is no such name. In a GGUF file a
  // tensor of all experts is one layer.
  std::string module;
};

// Immutable; safe to use from several threads.
class CONCLAVE_API Checkpoint {
 public:
  // Reads config, index and every shard header; no tensor data. Either the whole checkpoint is
  // consistent or an Error (2xx to 5xx) names file, tensor, expected and found. `path` is a
  // directory, a GGUF file (the first of its parts), or a directory with one GGUF model and no
  // config.json; Error(kFileNotFound) names the models if there are several.
  static Checkpoint open(const std::filesystem::path& path, const CheckpointOptions& options = {});
  Checkpoint(Checkpoint&&) noexcept;
  Checkpoint& operator=(Checkpoint&&) noexcept;
  ~Checkpoint();

  const std::filesystem::path& directory() const noexcept;
  const std::string& model_type() const noexcept;    // "qwen3_moe"
  const std::string& architecture() const noexcept;  // row of the architecture catalog
  int64_t num_hidden_layers() const noexcept;
  uint64_t total_bytes() const noexcept;                     // bytes of all tensors in all shards
  uint64_t total_parameters() const noexcept;                // elements of all tensors
  std::span<const CheckpointLayer> layers() const noexcept;  // MoE layers only, ascending
  const CheckpointLayer& layer(int64_t index) const;         // Error(kLayerNotFound)
  std::span<const std::string> notes() const noexcept;       // skipped parts, oddities

  // Reads through the checkpoint, which must outlive the source.
  std::unique_ptr<WeightSource> layer_source(int64_t index) const;
  // The experts' matrices of a layer, those of one module in the order of their rows. Throws
  // Error(kLayerNotFound).
  std::vector<StoredMatrix> stored_matrices(int64_t index) const;
  // Names of all tensors that a layer's weights are read from, sorted. Throws likewise.
  std::vector<std::string> layer_tensors(int64_t index) const;

  // Hashes every tensor and writes conclave.manifest.json into the model's directory; for a GGUF
  // file, of a split model the first, a file of its name and ".conclave.manifest.json" beside it.
  // Returns its path.
  static std::filesystem::path write_manifest(const std::filesystem::path& model);

  struct Impl;

 private:
  explicit Checkpoint(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Owner of the memory of a tensor that is put.
enum class FeedMemory : uint8_t {
  kCopy,  // the feed owns a copy
  kKeep,  // the caller, who keeps it until the feed and its sources are gone
};

// The weights of a model pushed tensor by tensor, in any order, from any origin: those of a model
// directory or of a GGUF file. Names, checks and errors are those of a Checkpoint. Layers beyond
// num_hidden_layers are not taken. One thread at a time may use it; sources may be read from
// several threads as long as nothing is put.
class CONCLAVE_API CheckpointFeed {
 public:
  // Makes a feed from the text of config.json. In a quantised model a layer's experts count as
  // quantised until one comes that is not. Throws as Checkpoint::open does for that file, and
  // Error(kUnsupportedQuantization) for methods that are not read.
  static CheckpointFeed from_config(std::string_view config_json);
  // Makes a feed for layers of one spec, by the names of a family ("qwen3_moe"). Throws
  // Error(kUnknownArchitecture), Error(kInvalidArgument) for a layer below 0 or above 4095, and as
  // validate(spec).
  static CheckpointFeed from_spec(const MoeSpec& spec, std::string_view model_type,
                                  std::span<const int64_t> layers);
  // The same for experts that a method packs: `quantization` is the text of a quantization_config,
  // and `spec` says what the layer would be without it, so that its weight_dtype holds values.
  // Its rules for modules are followed by the names of tensors, or, with `modules`, as if all
  // experts were these. Throws Error(kUnsupportedQuantization) for methods that are not read, also
  // where spec has a type of codes already, and for modules that differ or stay as they are.
  static CheckpointFeed from_spec(const MoeSpec& spec, std::string_view model_type,
                                  std::span<const int64_t> layers, std::string_view quantization,
                                  std::span<const std::string> modules = {});
  // Makes a feed for a GGUF model, by the first bytes of its file: all that its header has, and any
  // number behind it. A header that lists the model's tensors says which the layers have, and
  // tensors must be as it says; of a split model the list is whole with the headers of the other
  // parts, in any order. Without a list, or with a part of it, layers have what comes: a tensor
  // that layers may do without counts for all once one has it, so that all should be put before a
  // layer is made, and experts have gates. Throws as Checkpoint::open does for keys and, if the
  // list is whole, for tensors.
  static CheckpointFeed from_gguf(std::span<const std::byte> header,
                                  std::span<const std::span<const std::byte>> other_parts = {});
  CheckpointFeed(CheckpointFeed&&) noexcept;
  CheckpointFeed& operator=(CheckpointFeed&&) noexcept;
  ~CheckpointFeed();

  // Takes a tensor under its full name ("model.layers.0.mlp.gate.weight"). Returns whether a MoE
  // layer has a use for it; others are forgotten. A tensor that is refused is not kept. Throws
  // Error(kTensorDuplicate) for a name that came before, Error(kSafetensorsName, kSafetensorsUtf8)
  // for one that no file may have, Error(kTensorShape, kTensorUnexpected, kNullPointer), and
  // Error(kStride) for rows apart under kKeep. Two tensors for one matrix, and names without
  // meaning, are also found by missing() and layer_source().
  bool put(std::string_view name, const ConstTensorView& tensor,
           FeedMemory memory = FeedMemory::kCopy);
  // The same for a tensor of a GGUF model ("blk.0.ffn_up_exps.weight"), of any type that files
  // have; `put` above takes its values of F32, F16, BF16, I32 and I64, too. Throws
  // Error(kGgufName, kGgufTensorType, kGgufShape, kGgufSizeOverflow) for what no file may have,
  // Error(kShape) for another number of bytes, Error(kNullPointer, kTensorDuplicate, kTensorShape,
  // kTensorDType, kTensorUnexpected), Error(kConfigValue) for experts of a layer that a key calls
  // dense, and Error(kInvalidArgument) for a feed that is not of a GGUF model.
  bool put(std::string_view name, const GgufTensorView& tensor,
           FeedMemory memory = FeedMemory::kCopy);

  // Numbers of the MoE layers, ascending. Of a GGUF model whose tensors are not listed there may be
  // others after a put.
  std::span<const int64_t> layers() const noexcept;
  // Tensors that have not come yet, "NAME [rows, cols]", at most `limit`; empty when complete.
  // Looks at everything put. Throws Error(kTensorDuplicate), and Error(kTensorUnexpected) for
  // expert weights of two models.
  std::vector<std::string> missing(size_t limit = 10) const;
  bool is_complete(int64_t layer) const;  // Throws Error(kLayerNotFound).

  // Both need a complete layer and throw Error(kLayerNotFound, kTensorMissing, kTensorUnexpected,
  // kTensorDType).
  CheckpointLayer layer(int64_t index) const;
  // Reads from the tensors put; the feed must outlive the source.
  std::unique_ptr<WeightSource> layer_source(int64_t index) const;
  // Frees the copies of one layer, whose sources must be gone. It counts as missing again.
  void release(int64_t layer);

  struct Impl;

 private:
  explicit CheckpointFeed(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Names of the model types known, sorted.
CONCLAVE_API std::vector<std::string> known_model_types();

}  // namespace conclave::inline v0
