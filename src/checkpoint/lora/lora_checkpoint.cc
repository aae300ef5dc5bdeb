#include "conclave/lora_checkpoint.h"

#include "checkpoint/architecture.h"
#include "checkpoint/lora/lora_config.h"
#include "checkpoint/lora/lora_factors.h"
#include "checkpoint/lora/lora_names.h"
#include "io/directory.h"

#include "conclave/error.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace conclave::inline v0 {
namespace {

constexpr const char* kConfigName = "adapter_config.json";
constexpr const char* kTensorsName = "adapter_model.safetensors";

// With and without PEFT's prefix a name is the same module's.
[[noreturn]] void refuse_twice(const SafetensorsFile& file, const TensorInfo& first,
                               const TensorInfo& second) {
  throw Error(ErrorCode::kTensorDuplicate, {.what = "two tensors are the same factor of a module",
                                            .file = file.path().string(),
                                            .tensor = second.name,
                                            .found = first.name});
}

}  // namespace

struct LoraCheckpoint::Impl {
  std::filesystem::path directory;
  LoraConfig config;
  SafetensorsFile file;
  std::map<int64_t, std::vector<LoraPair>> pairs;  // those of experts, by layer
  std::map<int64_t, std::vector<std::string>> unknown;
  std::vector<int64_t> layers;
  std::vector<std::string> others;
  int64_t max_rank = 0;

  void sort();
  LoraAdapter read(int64_t index, const MoeSpec& spec, const StackLayout& layout) const;
};

// Brings lora_A and lora_B of each module together.
void LoraCheckpoint::Impl::sort() {
  std::map<std::pair<std::string, int64_t>, LoraPair> found;  // by module and depth
  std::set<std::string> elsewhere;
  for (const TensorInfo& tensor : file.tensors()) {
    const auto name = parse_lora_name(tensor.name);
    // A tensor that is no factor may belong to a MoE block, which then would be another.
    const LoraModule module = name ? name->module : parse_lora_module(tensor.name);
    if (module.place == LoraPlace::kElsewhere) {
      if (name) elsewhere.insert(module.name);
    } else if (!name || module.place == LoraPlace::kUnknown) {
      unknown[module.layer].push_back(tensor.name);
    } else {
      LoraPair& pair = found[{module.name, module.depth}];
      pair.module = module;
      const TensorInfo*& factor = name->is_b ? pair.b : pair.a;
      if (factor != nullptr) refuse_twice(file, *factor, tensor);
      factor = &tensor;
    }
  }
  for (auto& [name, pair] : found) pairs[pair.module.layer].push_back(std::move(pair));
  for (const auto& [layer, list] : pairs) layers.push_back(layer);
  others.assign(elsewhere.begin(), elsewhere.end());
}

LoraCheckpoint LoraCheckpoint::open(const std::filesystem::path& directory) {
  const io::Directory folder = io::Directory::open(directory);
  if (!folder.contains(kTensorsName)) {
    throw Error(ErrorCode::kFileNotFound,
                {.what = "an adapter's tensors are missing",
                 .file = (directory / kTensorsName).string(),
                 .hint = folder.contains("adapter_model.bin")
                             ? "save it with safe_serialization: pickles are not read"
                             : "give the directory that PEFT saved"});
  }
  const io::JsonDocument config = folder.read_json(kConfigName);
  auto impl =
      std::unique_ptr<Impl>(new Impl{.directory = directory,
                                     .config = LoraConfig(config.root()),
                                     .file = SafetensorsFile::open(directory / kTensorsName),
                                     .pairs = {},
                                     .unknown = {},
                                     .layers = {},
                                     .others = {}});
  impl->sort();
  for (const auto& [layer, pairs] : impl->pairs) {
    for (const LoraPair& pair : pairs) {
      impl->max_rank = std::max(impl->max_rank, largest_rank(pair, impl->config));
    }
  }
  return LoraCheckpoint(std::move(impl));
}

LoraCheckpoint::LoraCheckpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
LoraCheckpoint::LoraCheckpoint(LoraCheckpoint&&) noexcept = default;
LoraCheckpoint& LoraCheckpoint::operator=(LoraCheckpoint&&) noexcept = default;
LoraCheckpoint::~LoraCheckpoint() = default;

std::span<const int64_t> LoraCheckpoint::layers() const noexcept { return impl_->layers; }
int64_t LoraCheckpoint::max_rank() const noexcept { return impl_->max_rank; }
std::span<const std::string> LoraCheckpoint::others() const noexcept { return impl_->others; }

LoraAdapter LoraCheckpoint::Impl::read(int64_t index, const MoeSpec& spec,
                                       const StackLayout& layout) const {
  const std::string path = file.path().string();
  const auto found = unknown.find(index);
  if (found != unknown.end()) {
    throw Error(ErrorCode::kUnsupported,
                {.what = "an adapter changes a part of a MoE block that takes none",
                 .file = path,
                 .tensor = found->second.front(),
                 .expected = "projections of experts and of shared experts"});
  }
  const auto own = pairs.find(index);
  if (own == pairs.end()) {
    throw Error(ErrorCode::kLayerNotFound,
                {.what = "the adapter has no factors for the experts of this layer",
                 .file = path,
                 .found = std::to_string(index)});
  }
  return read_lora_factors(file, config, own->second, spec, layout);
}

LoraAdapter LoraCheckpoint::layer(int64_t index, const MoeSpec& spec, GateUpOrder order) const {
  return impl_->read(index, spec, {.order = order});
}

LoraAdapter LoraCheckpoint::layer(int64_t index, const Checkpoint& model) const {
  for (const int64_t layer : impl_->layers) {
    const bool exists = std::ranges::any_of(
        model.layers(), [layer](const CheckpointLayer& own) { return own.index == layer; });
    if (exists) continue;
    throw Error(ErrorCode::kLayerNotFound,
                {.what = "the adapter has experts of a layer that the model lacks",
                 .file = impl_->file.path().string(),
                 .tensor = impl_->pairs.at(layer).front().module.name,
                 .found = std::to_string(layer),
                 .limit = std::to_string(model.num_hidden_layers()) + " layers"});
  }
  const CheckpointLayer& own = model.layer(index);
  const checkpoint::Architecture* const family = checkpoint::find_architecture(model.model_type());
  const auto is = [&](const char* word) { return own.layout.find(word) != std::string::npos; };
  return impl_->read(
      index, own.spec,
      {.order = is("interleaved") ? GateUpOrder::kInterleaved : GateUpOrder::kConcatenated,
       .axes =
           is("transposed") ? checkpoint::AxisOrder::kColsFirst : checkpoint::AxisOrder::kRowsFirst,
       .words = family == nullptr ? checkpoint::StackWords::kUnknown : family->cols_first_words});
}

}  // namespace conclave::inline v0
