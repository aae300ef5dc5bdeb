#include "convert/safetensors_result.h"

#include "convert/gguf_result.h"
#include "convert/json_edit.h"
#include "convert/json_text.h"

#include "conclave/error.h"
#include "conclave/safetensors.h"

#include <algorithm>

namespace conclave::inline v0::conversion {
namespace {

constexpr uint64_t kGgufAlignment = 32;
constexpr const char* kIndexFile = "model.safetensors.index.json";

class SafetensorsShard final : public ShardFile {
 public:
  SafetensorsShard(const std::filesystem::path& path, const PlannedShard& shard)
      : writer_(path, {{"format", "pt"}}) {
    for (const PlannedTensor& tensor : shard.tensors) {
      writer_.declare(tensor.name, *parse_dtype(tensor.type), tensor.shape);
    }
  }
  void write(std::span<const std::byte> bytes) override { writer_.write(bytes); }
  void finish() override { writer_.finish(); }

 private:
  SafetensorsWriter writer_;
};

// Moves all lines but the first to where a member of an object stands.
std::string indented(const std::string& text) {
  std::string out;
  for (const char c : text) {
    out += c;
    if (c == '\n') out += "  ";
  }
  return out;
}

// `own_key` is the form's, under which its settings stand once more.
std::string config_of(std::string text, const nlohmann::ordered_json& quantization,
                      const std::string& own_key) {
  for (const char* key : {"quantization_config", "compression_config", "quantization"}) {
    text = without_member(text, key);
    const std::string nested(member_text(text, "text_config"));
    if (member_text(nested, key).empty()) continue;
    text = with_member(text, "text_config", without_member(nested, key));
  }
  if (quantization.is_null()) return text;
  const std::string settings = indented(json_text(quantization, 2));
  text = with_member(text, "quantization_config", settings);
  return own_key.empty() ? text : with_member(text, own_key, settings);
}

// Some models tie it to the embedding and store no tensor.
std::vector<std::string> with_head(std::vector<std::string> kept) {
  if (std::ranges::find(kept, "lm_head") == kept.end()) kept.emplace_back("lm_head");
  return kept;
}

}  // namespace

// Here, so that the source needs no word of results.
std::unique_ptr<ResultFiles> SafetensorsModel::result_files(const ConversionPlan& plan,
                                                            const ResolvedRequest& request) const {
  if (request.container == ModelContainer::kGguf) {
    return std::make_unique<GgufResult>(plan.keys, kGgufAlignment, plan, request);
  }
  return std::make_unique<SafetensorsResult>(this, config_text_, plan, request);
}

SafetensorsResult::SafetensorsResult(const SafetensorsModel* source, const std::string& config,
                                     const ConversionPlan& plan, const ResolvedRequest& request)
    : source_(source), plan_(plan) {
  const std::vector<std::string> kept = with_head(plan.kept);
  files_ = request.form->files(kept);
  files_.push_back(
      {.name = "config.json",
       .text = config_of(config, request.form->configuration(kept), request.form->own_key())});
}

std::unique_ptr<ShardFile> SafetensorsResult::create(const PlannedShard& shard,
                                                     const std::filesystem::path& directory) const {
  return std::make_unique<SafetensorsShard>(directory / shard.file_name, shard);
}

bool SafetensorsResult::read_back(
    const PlannedShard& shard, const std::filesystem::path& directory,
    const std::function<void(std::span<const std::byte>)>& take) const {
  const SafetensorsFile file = SafetensorsFile::open(directory / shard.file_name);
  const bool same = std::ranges::equal(
      file.tensors(), shard.tensors, [](const TensorInfo& found, const PlannedTensor& planned) {
        return found.name == planned.name && to_string(found.dtype) == planned.type &&
               found.shape == planned.shape;
      });
  if (!same) return false;
  std::vector<std::byte> buffer(kReadBackBytes);
  for (const TensorInfo& tensor : file.tensors()) {
    for (uint64_t offset = 0; offset < tensor.bytes; offset += kReadBackBytes) {
      const auto piece = std::span(buffer).first(std::min(kReadBackBytes, tensor.bytes - offset));
      file.read(tensor, offset, piece);
      take(piece);
    }
  }
  return true;
}

// One file of all tensors, whose data is a hole.
std::filesystem::path SafetensorsResult::write_outline(
    const std::filesystem::path& directory) const {
  PlannedShard all{.file_name = "model.safetensors"};
  for (const PlannedShard& shard : plan_.shards) {
    all.tensors.insert(all.tensors.end(), shard.tensors.begin(), shard.tensors.end());
  }
  SafetensorsWriter writer(directory / all.file_name);
  for (const PlannedTensor& tensor : all.tensors) {
    writer.declare(tensor.name, *parse_dtype(tensor.type), tensor.shape);
  }
  writer.finish_with_zeros();
  write_files(directory);
  return directory;
}

std::vector<std::string> SafetensorsResult::finish(const ResultDirectory& directory) const {
  const std::filesystem::path& path = directory.unfinished();
  if (plan_.shards.size() > 1) write_durably(path / kIndexFile, json_text(index(), 2) + "\n");
  std::vector<std::string> left_out;
  if (source_ != nullptr) {
    const auto holds = [&](const std::string& name) { return source_->holds_tensors(name); };
    left_out = directory.copy_other_files(source_->path(), holds);
  }
  write_files(path);
  return left_out;
}

void SafetensorsResult::write_files(const std::filesystem::path& directory) const {
  for (const TextFile& file : files_) write_durably(directory / file.name, file.text);
}

nlohmann::ordered_json SafetensorsResult::index() const {
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  for (const PlannedShard& shard : plan_.shards) {
    // Assigning by key would search an ordered object from the front; the names are unique.
    for (const PlannedTensor& tensor : shard.tensors) {
      map.get_ref<nlohmann::ordered_json::object_t&>().push_back({tensor.name, shard.file_name});
    }
  }
  return {{"metadata", {{"total_size", plan_.bytes}}}, {"weight_map", std::move(map)}};
}

}  // namespace conclave::inline v0::conversion
