// Conversion: a model directory or a GGUF file is written anew with its experts in another form,
// and a report says what that costs. docs/quantisation.md has the forms and the rules of their
// scales.
#pragma once

#include "conclave/context.h"
#include "conclave/quantise.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// How the tensors of a model lie in files.
enum class ModelContainer : uint8_t {
  kSafetensors,  // a model directory, as Hugging Face has it
  kGguf,         // a GGUF file, or the parts of one
};

// A model or an unfinished conversion that is where the result should be.
enum class ExistingModel : uint8_t { kRefuse, kReplace };

// A conversion that fails or is stopped leaves this of all that it has written.
enum class UnfinishedModel : uint8_t {
  kKeep,    // DESTINATION.partial, from which the next conversion of the same request goes on
  kRemove,  // nothing, unless an earlier conversion had left it
};

// A form that conversions write. A name may stand once for each container.
struct ConversionFormat {
  std::string name;     // "int4-group128", "q4_k"
  std::string options;  // that may follow the name, as help shows them: "group=N, asym"; or empty
  ModelContainer container = ModelContainer::kSafetensors;  // the result's
};
CONCLAVE_API std::vector<ConversionFormat> conversion_formats();
// The forms that ModelValues may have, each name once.
CONCLAVE_API std::vector<std::string> random_model_formats();

// Linear layers of experts whose name matches are left as they are, or get a form of their own.
struct KeepRule {
  std::string pattern = {};  // "*" stands for any text, "?" for one character
  // "source": they keep their tensors. Otherwise "bf16", "f16" or "f32"; in GGUF files any form.
  std::string format = "source";
};

// Rows that go through a layer of both models, whose outputs are then compared.
struct ComparedRows {
  Tensor hidden;  // [T, H] f32, f16 or bf16
  // For layers that read them, as in ForwardArgs.
  std::optional<Tensor> router_input = {};
  std::optional<Tensor> residual_input = {};
  std::optional<Tensor> token_ids = {};
};

// An application's own rows, such as recorded ones.
class CONCLAVE_API RowSource {
 public:
  virtual ~RowSource() = default;
  // Where they are from, for the report.
  virtual std::string name() const = 0;
  // Throws as load does, before anything is written.
  virtual void check(int64_t layer, const MoeSpec& spec) const = 0;
  virtual ComparedRows load(int64_t layer, const MoeSpec& spec) const = 0;
};

// Random rows of a layer, and ids of tokens where its router asks for them: a pure function of the
// arguments. Throws Error(kOutOfMemory).
CONCLAVE_API ComparedRows random_rows(const MoeSpec& spec, int64_t num_tokens, uint64_t seed);

// The values of a model whose files only declare its tensors: they are made as they are asked for,
// and no second model lies on the disk. From several threads at once.
class CONCLAVE_API ModelValues {
 public:
  virtual ~ModelValues() = default;
  virtual std::unique_ptr<WeightSource> layer_source(int64_t layer) const = 0;
  // Writes bytes [offset, offset + destination.size()) of a tensor of that name.
  virtual void read(std::string_view tensor, uint64_t offset,
                    std::span<std::byte> destination) const = 0;
};

struct ConversionReport;

struct ConversionRequest {
  std::filesystem::path source = {};       // as Checkpoint::open takes it
  std::filesystem::path destination = {};  // a directory to make, of a GGUF file too
  // A name of conversion_formats(), with options behind a colon: "gptq-int4:group=64,asym".
  std::string format = {};
  // None: GGUF if the destination ends in ".gguf", else the only one that has the form, else the
  // source's.
  std::optional<ModelContainer> container = {};
  std::vector<int64_t> layers = {};  // by number; empty: all MoE layers
  std::vector<KeepRule> keep = {};   // the first that matches counts
  ScaleRule scales = ScaleRule::kAmax;
  uint64_t shard_bytes = 5'000'000'000;  // largest shard, unless one linear layer is larger
  ExistingModel existing = ExistingModel::kRefuse;
  UnfinishedModel unfinished = UnfinishedModel::kKeep;

  // Rows of each layer for the error of its output: of `rows`, or else `tokens` random ones. With 0
  // tokens outputs are not compared.
  int64_t tokens = 32;
  uint64_t seed = 0;
  const RowSource* rows = nullptr;
  // In place of the data of the source's files, which is a directory then.
  const ModelValues* values = nullptr;
  // Whether conversion.json is written beside the model.
  bool writes_report = true;

  // Told on the calling thread that `done` of `total` bytes are "converting", then "measuring", as
  // the context's log is too. What it throws ends the conversion and is thrown to the caller.
  std::function<void(std::string_view phase, int64_t done, int64_t total)> progress = {};
  // Called with the directory when all is written, before it gets its name. What it writes is there
  // when the model is; what it throws ends the conversion.
  std::function<void(const ConversionReport&, const std::filesystem::path&)> complete = {};
};

// A matrix that was converted.
struct ConvertedMatrix {
  std::string name;  // its linear layer's, and "[3]" for an expert of a stack
  int64_t layer = 0;
  std::string kind;  // "gate", "shared_down", "gate_up" for both in one
  int64_t rows = 0;
  int64_t cols = 0;
  std::string format;
  uint64_t bytes_before = 0;
  uint64_t bytes_after = 0;
  QuantiseError error = {};
};

// Outputs of a layer of both models in float64, on the same rows and routed by the same gate.
struct ConvertedLayer {
  int64_t layer = 0;
  double median = 0;  // relative L2 error of a token
  double worst = 0;
  int64_t worst_token = 0;
  std::vector<double> tokens = {};  // [T]
};

struct ConversionReport {
  std::string source;
  std::string destination;
  std::filesystem::path model = {};  // the result, as Checkpoint::open takes it
  std::string model_type;
  std::string format;
  std::string scales;         // "amax" or "search"
  int64_t tokens = 0;         // rows of a layer, or of the one that has most
  uint64_t seed = 0;          // random rows are drawn from it
  std::string input = {};     // RowSource::name(); empty: rows are random
  uint64_t bytes_before = 0;  // in all tensors
  uint64_t bytes_after = 0;
  size_t shards = 0;
  size_t shards_kept = 0;  // finished by an earlier conversion
  std::vector<ConvertedMatrix> matrices = {};
  std::vector<ConvertedLayer> layers = {};  // empty without tokens
  std::vector<std::string> left_out = {};   // files that were not copied
  std::string incomplete = {};              // why the result has MoE layers and no whole model
  std::string no_tokenizer = {};            // why a whole model in another container has none
  std::vector<std::string> tensors_left_out = {};
  bool keeps_others = false;  // beside them, tensors that no layer reads
};

// Converts a model, with the context's threads, and returns what came of it. Routed and shared
// experts get the form; other tensors and files are copied. The model grows in DESTINATION.partial
// and gets its name in one step, so that nobody meets half of one. With other threads, or after an
// end, the bytes are the same. Memory is a few strips of rows for each thread, and where outputs
// are compared an expert in float64.
//
// Throws Error before anything is written: as Checkpoint::open for a source; kUnknownName and
// kInvalidArgument naming the field, for a form, an option or a rule that means nothing here;
// kLayerNotFound; kUnsupported naming the tensor, for what no form of the result can say. Later:
// kFileWrite for a destination that exists, is the source or holds it, cannot be made, or has too
// little room; kFileRead; kFileChanged if the source changes meanwhile; kTensorValue naming the
// tensor of a weight that is not finite.
CONCLAVE_API ConversionReport convert_model(const Context& context,
                                            const ConversionRequest& request);
// The container that the result will have.
CONCLAVE_API ModelContainer container_of_result(const ConversionRequest& request);
// The text of conversion.json.
CONCLAVE_API std::string to_json(const ConversionReport& report);

}  // namespace conclave::inline v0
