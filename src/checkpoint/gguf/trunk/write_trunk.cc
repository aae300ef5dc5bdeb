#include "checkpoint/gguf/trunk/trunk_keys.h"
#include "checkpoint/gguf/trunk/trunk_names.h"
#include "checkpoint/gguf/written_family.h"

#include "conclave/error.h"
#include "conclave/model_trunk.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

namespace conclave::inline v0 {
namespace {

using checkpoint::NamedOrder;
using checkpoint::NamedTensor;
using checkpoint::TrunkPlace;
using checkpoint::TrunkSizes;
using checkpoint::TrunkTable;
using checkpoint::WrittenFamily;
using Shape = std::vector<int64_t>;

constexpr std::string_view kEmbedding = "token_embd.weight";
constexpr std::string_view kOutput = "output.weight";
// Each layer has these, and each model with an embedding the norm of its output.
constexpr std::array<std::string_view, 2> kInEachLayer = {"attn_norm.weight", "attn_output.weight"};
constexpr std::string_view kOutputNorm = "output_norm.weight";
// Readers compute it, where a directory still has it.
constexpr std::string_view kComputed = "rotary_emb.inv_freq";

[[noreturn]] void refuse(std::string reason) {
  throw Error(ErrorCode::kUnsupported, {.what = std::move(reason)});
}

const WrittenFamily& family_of(std::string_view model_type, std::string_view architecture) {
  const WrittenFamily* const family = checkpoint::find_written_family(model_type);
  const bool is_named = family != nullptr && family->trunk != nullptr &&
                        (architecture.empty() || family->architecture == architecture);
  if (is_named) return *family;
  refuse(fmt::format("there is no table of what else models of {} have",
                     architecture.empty() ? model_type : architecture));
}

std::set<std::string, std::less<>> names_of_layers(const Checkpoint& model) {
  std::set<std::string, std::less<>> names;
  for (const CheckpointLayer& layer : model.layers()) {
    for (std::string& name : model.layer_tensors(layer.index)) names.insert(std::move(name));
  }
  return names;
}

const TrunkTensorInfo* find(std::span<const TrunkTensorInfo> tensors, std::string_view name) {
  const auto at = std::ranges::find(tensors, name, &TrunkTensorInfo::name);
  return at == tensors.end() ? nullptr : &*at;
}

int64_t vocabulary_of(std::span<const TrunkTensorInfo> tensors, std::string_view embedding) {
  const TrunkTensorInfo* const found = find(tensors, embedding);
  if (found == nullptr) refuse(fmt::format("there is no tensor {}", embedding));
  if (found->shape.size() != 2) refuse(fmt::format("{} is no matrix", embedding));
  return found->shape.front();
}

// Layers beyond those that count are for multi-token prediction.
bool is_left_out(const TrunkPlace& place, std::string_view name, int64_t num_layers) {
  return (place.layer && *place.layer >= num_layers) || name.starts_with("mtp.") ||
         name.ends_with(kComputed);
}

[[noreturn]] void refuse_shape(const TrunkTensorInfo& tensor) {
  refuse(fmt::format("{} has the shape [{}], which does not go with the sizes of the model",
                     tensor.name, fmt::join(tensor.shape, ", ")));
}

// Rows in pairs are those of whole heads.
void check_heads(const TrunkTensorInfo& tensor, int64_t heads) {
  const bool fits = !tensor.shape.empty() && heads > 0 && tensor.shape.front() % (2 * heads) == 0;
  if (!fits) refuse_shape(tensor);
}

void require_whole(std::span<const TrunkTensor> tensors, int64_t num_layers,
                   const std::function<std::string(const TrunkTensor&)>& name_in_file) {
  std::set<std::string, std::less<>> names;
  for (const TrunkTensor& tensor : tensors) names.insert(name_in_file(tensor));
  const auto require = [&](const std::string& name) {
    if (!names.contains(name)) refuse(fmt::format("the model has no {}", name));
  };
  require(std::string(kOutputNorm));
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    for (const std::string_view name : kInEachLayer) {
      require(fmt::format("blk.{}.{}", layer, name));
    }
  }
}

class FileTrunk {
 public:
  FileTrunk(const Checkpoint& model, const WrittenFamily& family,
            std::span<const TrunkTensorInfo> tensors)
      : model_(model), family_(family), table_(*family.trunk), tensors_(tensors) {}

  ModelTrunk write(std::string_view config, std::span<const GgufKey> layer_keys) {
    const io::JsonDocument document =
        io::JsonDocument::parse(std::string(config), "config.json", io::kConfigLimits);
    const std::string embedding = fmt::format("{}.weight", table_.once.front().directory);
    const int64_t vocabulary = vocabulary_of(tensors_, embedding);
    sizes_ = checkpoint::sizes_of_config(table_, document.root());
    const auto tied = document.root().find_set("tie_word_embeddings");
    is_tied_ = tied && tied->is_bool() && tied->as_bool();
    add_tensors();
    require_whole(trunk_.tensors, model_.num_hidden_layers(),
                  [](const TrunkTensor& tensor) { return tensor.name; });
    for (GgufKey& key : keys_of_config(table_, family_.architecture, document.root(), vocabulary)) {
      const auto same = std::ranges::find(layer_keys, key.name, &GgufKey::name);
      if (same == layer_keys.end()) trunk_.keys.push_back(std::move(key));
    }
    return std::move(trunk_);
  }

 private:
  void add_tensors() {
    const std::set<std::string, std::less<>> in_layers = names_of_layers(model_);
    for (const TrunkTensorInfo& tensor : tensors_) {
      if (in_layers.contains(tensor.name)) continue;
      const TrunkPlace place = find_by_directory_name(table_, tensor.name);
      const bool is_copy_of_embedding =
          is_tied_ && !place.rows.empty() && file_name(*place.rows.front(), place) == kOutput;
      if (is_copy_of_embedding || is_left_out(place, tensor.name, model_.num_hidden_layers())) {
        trunk_.left_out.push_back(tensor.name);
        continue;
      }
      if (place.rows.empty()) {
        refuse(fmt::format("files of {} have no name for {}", family_.architecture, tensor.name));
      }
      add(tensor, place);
    }
  }

  void add(const TrunkTensorInfo& tensor, const TrunkPlace& place) {
    for (const NamedTensor* row : place.rows) {
      TrunkTensor moved{
          .name = file_name(*row, place), .sources = {tensor.name}, .shape = tensor.shape};
      const bool is_latent =
          row->order == NamedOrder::kLatentKeys || row->order == NamedOrder::kLatentValues;
      if (is_latent) split(tensor, *row, moved);
      if (row->order == NamedOrder::kQueryPairs || row->order == NamedOrder::kKeyPairs) {
        moved.order = TrunkOrder::kPairs;
        moved.heads = row->order == NamedOrder::kQueryPairs ? sizes_.query_heads : sizes_.key_heads;
        check_heads(tensor, moved.heads);
      }
      // A matrix that has two parts has no third.
      if (row->order == NamedOrder::kSame && place.rows.size() > 1) continue;
      trunk_.tensors.push_back(std::move(moved));
    }
  }

  void split(const TrunkTensorInfo& tensor, const NamedTensor& row, TrunkTensor& moved) const {
    const int64_t rows = sizes_.latent_keys + sizes_.latent_values;
    const bool fits = tensor.shape.size() == 2 && tensor.shape[0] == sizes_.query_heads * rows;
    if (!fits) refuse_shape(tensor);
    const bool has_keys = row.order == NamedOrder::kLatentKeys;
    const int64_t latent = tensor.shape[1];
    moved.order = has_keys ? TrunkOrder::kLatentKeys : TrunkOrder::kLatentValues;
    moved.heads = sizes_.query_heads;
    moved.keys = sizes_.latent_keys;
    moved.shape = has_keys ? Shape{moved.heads, latent, sizes_.latent_keys}
                           : Shape{moved.heads, sizes_.latent_values, latent};
  }

  const Checkpoint& model_;
  const WrittenFamily& family_;
  const TrunkTable& table_;
  std::span<const TrunkTensorInfo> tensors_;
  TrunkSizes sizes_;
  bool is_tied_ = false;
  ModelTrunk trunk_;
};

class DirectoryTrunk {
 public:
  DirectoryTrunk(const Checkpoint& model, const WrittenFamily& family,
                 std::span<const TrunkTensorInfo> tensors)
      : model_(model),
        family_(family),
        table_(*family.trunk),
        tensors_(tensors),
        file_(io::GgufFile::open(model.directory())) {}

  ModelTrunk write(std::string_view config) {
    const int64_t vocabulary = vocabulary_of(tensors_, kEmbedding);
    sizes_ = checkpoint::sizes_of_keys(table_, family_.architecture, file_);
    add_tensors();
    require_whole(trunk_.tensors, model_.num_hidden_layers(),
                  [](const TrunkTensor& tensor) { return tensor.sources.front(); });
    const auto has_part = [&](std::string_view part) {
      return std::ranges::any_of(tensors_, [&](const TrunkTensorInfo& tensor) {
        return tensor.name.starts_with("blk.") && tensor.name.ends_with(fmt::format(".{}", part));
      });
    };
    trunk_.config = config_of_keys(table_, family_.architecture, file_,
                                   {.model_class = family_.model_class,
                                    .vocabulary = vocabulary,
                                    .is_tied = find(tensors_, kOutput) == nullptr,
                                    .has_part = has_part},
                                   config);
    return std::move(trunk_);
  }

 private:
  void add_tensors() {
    const std::set<std::string, std::less<>> in_layers = names_of_layers(model_);
    for (const TrunkTensorInfo& tensor : tensors_) {
      if (in_layers.contains(tensor.name)) continue;
      const TrunkPlace place = find_by_file_name(table_, tensor.name);
      if (is_left_out(place, tensor.name, model_.num_hidden_layers())) {
        trunk_.left_out.push_back(tensor.name);
        continue;
      }
      if (place.rows.empty()) {
        refuse(
            fmt::format("directories of {} have no name for {}", family_.model_type, tensor.name));
      }
      add(tensor, *place.rows.front(), place);
    }
  }

  void add(const TrunkTensorInfo& tensor, const NamedTensor& row, const TrunkPlace& place) {
    // Values go with their keys.
    if (row.order == NamedOrder::kLatentValues) return require_keys(tensor, place);
    TrunkTensor moved{.name = directory_name(table_, row, place),
                      .sources = {tensor.name},
                      .shape = tensor.shape};
    if (row.order == NamedOrder::kQueryPairs || row.order == NamedOrder::kKeyPairs) {
      moved.order = TrunkOrder::kHalves;
      moved.heads = row.order == NamedOrder::kQueryPairs ? sizes_.query_heads : sizes_.key_heads;
      check_heads(tensor, moved.heads);
    }
    if (row.order == NamedOrder::kLatentKeys) join(tensor, place, moved);
    trunk_.tensors.push_back(std::move(moved));
  }

  const NamedTensor& row_of(NamedOrder order) const {
    for (const auto& group : table_.layer) {
      const auto found = std::ranges::find(group, order, &NamedTensor::order);
      if (found != group.end()) return *found;
    }
    refuse("the family has no latent attention");
  }

  void require_keys(const TrunkTensorInfo& values, const TrunkPlace& place) const {
    const std::string keys = file_name(row_of(NamedOrder::kLatentKeys), place);
    if (find(tensors_, keys) == nullptr) {
      refuse(fmt::format("{} has no keys, {}", values.name, keys));
    }
  }

  void join(const TrunkTensorInfo& keys, const TrunkPlace& place, TrunkTensor& moved) const {
    const std::string name = file_name(row_of(NamedOrder::kLatentValues), place);
    const TrunkTensorInfo* const values = find(tensors_, name);
    if (values == nullptr) refuse(fmt::format("{} has no values, {}", keys.name, name));
    const int64_t latent = keys.shape.size() == 3 ? keys.shape[1] : 0;
    const Shape key_shape = {sizes_.query_heads, latent, sizes_.latent_keys};
    const Shape value_shape = {sizes_.query_heads, sizes_.latent_values, latent};
    if (keys.shape != key_shape) refuse_shape(keys);
    if (values->shape != value_shape) refuse_shape(*values);
    moved.order = TrunkOrder::kLatentBoth;
    moved.sources.push_back(name);
    moved.heads = sizes_.query_heads;
    moved.keys = sizes_.latent_keys;
    moved.shape = {sizes_.query_heads * (sizes_.latent_keys + sizes_.latent_values), latent};
  }

  const Checkpoint& model_;
  const WrittenFamily& family_;
  const TrunkTable& table_;
  std::span<const TrunkTensorInfo> tensors_;
  io::GgufFile file_;
  TrunkSizes sizes_;
  ModelTrunk trunk_;
};

constexpr std::string_view kGgufPrefix = "gguf ";

}  // namespace

ModelTrunk gguf_trunk(const Checkpoint& model, std::string_view config,
                      std::span<const TrunkTensorInfo> tensors,
                      std::span<const GgufKey> layer_keys) {
  try {
    return FileTrunk(model, family_of(model.model_type(), {}), tensors).write(config, layer_keys);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return {.support = Support::no(error.detail().what)};
  }
}

ModelTrunk directory_trunk(const Checkpoint& model, std::string_view model_type,
                           std::string_view config, std::span<const TrunkTensorInfo> tensors) {
  std::string_view architecture = model.architecture();
  if (architecture.starts_with(kGgufPrefix)) architecture.remove_prefix(kGgufPrefix.size());
  try {
    const WrittenFamily& family = family_of(model_type, architecture);
    if (!family.trunk->comes_back) {
      refuse(fmt::format("directories of {} have experts in another form", model_type));
    }
    return DirectoryTrunk(model, family, tensors).write(config);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kUnsupported) throw;
    return {.support = Support::no(error.detail().what)};
  }
}

}  // namespace conclave::inline v0
