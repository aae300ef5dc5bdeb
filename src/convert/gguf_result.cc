#include "convert/gguf_result.h"

#include "convert/forms/target_form.h"
#include "convert/safetensors_result.h"

#include "conclave/gguf.h"

#include <algorithm>
#include <utility>

namespace conclave::inline v0::conversion {
namespace {

constexpr const char* kAlignment = "general.alignment";
constexpr const char* kFileType = "general.file_type";
constexpr const char* kQuantization = "general.quantization_version";
// ggml calls this the version of its blocks.
constexpr uint32_t kQuantizationVersion = 2;

class GgufShard final : public ShardFile {
 public:
  GgufShard(const std::filesystem::path& path, const PlannedShard& shard,
            const std::vector<GgufKey>& keys, uint64_t alignment)
      : writer_(path, keys, alignment) {
    for (const PlannedTensor& tensor : shard.tensors) {
      writer_.declare(tensor.name, tensor.type, tensor.shape);
    }
  }
  void write(std::span<const std::byte> bytes) override { writer_.write(bytes); }
  void finish() override { writer_.finish(); }
  void finish_with_zeros() { writer_.finish_with_zeros(); }

 private:
  GgufWriter writer_;
};

void set_key(std::vector<GgufKey>& keys, GgufKey key) {
  const auto same = std::ranges::find(keys, key.name, &GgufKey::name);
  if (same == keys.end()) {
    keys.push_back(std::move(key));
  } else {
    *same = std::move(key);
  }
}

}  // namespace

// Here, so that the source needs no word of results.
std::unique_ptr<ResultFiles> GgufModel::result_files(const ConversionPlan& plan,
                                                     const ResolvedRequest& request) const {
  if (request.container == ModelContainer::kSafetensors) {
    return std::make_unique<SafetensorsResult>(nullptr, plan.config, plan, request);
  }
  return std::make_unique<GgufResult>(reader_.keys(), reader_.alignment(), plan, request);
}

// Keys keep their bytes, but for those that say how the model is split and what its type is.
GgufResult::GgufResult(std::vector<GgufKey> keys, uint64_t alignment, const ConversionPlan& plan,
                       const ResolvedRequest& request)
    : plan_(plan), alignment_(alignment), keys_(std::move(keys)) {
  std::erase_if(keys_, [](const GgufKey& key) { return key.name.starts_with("split."); });
  if (const auto type = request.form->file_type()) {
    set_key(keys_, GgufKey::of_u32(kFileType, *type));
  }
  set_key(keys_, GgufKey::of_u32(kQuantization, kQuantizationVersion));
}

std::vector<GgufKey> GgufResult::keys_of(const PlannedShard& shard) const {
  const auto index = static_cast<size_t>(&shard - plan_.shards.data());
  std::vector<GgufKey> keys;
  if (index == 0) keys = keys_;
  if (index > 0) {
    const auto alignment = std::ranges::find(keys_, kAlignment, &GgufKey::name);
    if (alignment != keys_.end()) keys.push_back(*alignment);
  }
  if (plan_.shards.size() == 1) return keys;
  size_t tensors = 0;
  for (const PlannedShard& each : plan_.shards) tensors += each.tensors.size();
  keys.push_back(GgufKey::of_u16("split.no", static_cast<uint16_t>(index)));
  keys.push_back(GgufKey::of_u16("split.count", static_cast<uint16_t>(plan_.shards.size())));
  keys.push_back(GgufKey::of_i32("split.tensors.count", static_cast<int32_t>(tensors)));
  return keys;
}

std::filesystem::path GgufResult::model_in(const std::filesystem::path& directory) const {
  return directory / plan_.shards.front().file_name;
}

std::unique_ptr<ShardFile> GgufResult::create(const PlannedShard& shard,
                                              const std::filesystem::path& directory) const {
  return std::make_unique<GgufShard>(directory / shard.file_name, shard, keys_of(shard),
                                     alignment_);
}

bool GgufResult::read_back(const PlannedShard& shard, const std::filesystem::path& directory,
                           const std::function<void(std::span<const std::byte>)>& take) const {
  const GgufReader file = GgufReader::open_part(directory / shard.file_name);
  const bool same = std::ranges::equal(
      file.tensors(), shard.tensors, [](const GgufTensorInfo& found, const PlannedTensor& planned) {
        return found.name == planned.name && found.type == planned.type &&
               found.shape == planned.shape;
      });
  if (!same) return false;
  std::vector<std::byte> buffer(kReadBackBytes);
  for (const GgufTensorInfo& tensor : file.tensors()) {
    for (uint64_t offset = 0; offset < tensor.bytes; offset += kReadBackBytes) {
      const auto piece = std::span(buffer).first(std::min(kReadBackBytes, tensor.bytes - offset));
      file.read(tensor, offset, piece);
      take(piece);
    }
  }
  return true;
}

std::filesystem::path GgufResult::write_outline(const std::filesystem::path& directory) const {
  for (const PlannedShard& shard : plan_.shards) {
    GgufShard file(directory / shard.file_name, shard, keys_of(shard), alignment_);
    file.finish_with_zeros();
  }
  return model_in(directory);
}

std::vector<std::string> GgufResult::finish(const ResultDirectory&) const { return {}; }

}  // namespace conclave::inline v0::conversion
