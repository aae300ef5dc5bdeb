#include "checkpoint/shard_index.h"

#include "checkpoint/name_list.h"
#include "checkpoint/weight_map.h"
#include "io/safetensors_open.h"
#include "io/text.h"

#include "conclave/error.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <set>
#include <string_view>
#include <system_error>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";
// Suffixes of weights in formats that are not read: most can run code when they are loaded.
constexpr std::array<std::string_view, 8> kForbiddenSuffixes = {".bin", ".pt",   ".pth", ".ckpt",
                                                                ".pkl", ".gguf", ".npz", ".h5"};
// A listing only serves a message; a directory may hold any number of files.
constexpr int kMaxListedEntries = 4096;

std::vector<std::string> members_of(const io::Directory& directory) {
  std::vector<std::string> names;
  std::error_code ignored;
  std::filesystem::directory_iterator entry(directory.path(), ignored);
  const std::filesystem::directory_iterator end;
  for (int seen = 0; !ignored && entry != end && seen < kMaxListedEntries; ++seen) {
    names.push_back(entry->path().filename().string());
    entry.increment(ignored);
  }
  std::sort(names.begin(), names.end());
  return names;
}

template <class Predicate>
std::vector<std::string> members_where(const io::Directory& directory, Predicate keep) {
  std::vector<std::string> names = members_of(directory);
  std::erase_if(names, [&](const std::string& name) { return !keep(name); });
  return names;
}

std::vector<std::string> safetensors_in(const io::Directory& directory) {
  return members_where(directory,
                       [](std::string_view name) { return name.ends_with(".safetensors"); });
}

[[noreturn]] void reject_without_weights(const io::Directory& directory) {
  const std::vector<std::string> forbidden = members_where(directory, [](std::string_view name) {
    return std::any_of(kForbiddenSuffixes.begin(), kForbiddenSuffixes.end(),
                       [&](std::string_view suffix) { return name.ends_with(suffix); });
  });
  const std::string expected = fmt::format("{} or {}", kSingleFile, kIndexFile);
  const std::vector<std::string> shards = safetensors_in(directory);
  if (shards.empty() && !forbidden.empty()) {
    throw Error(ErrorCode::kForbiddenFormat,
                {.what = "the directory holds weights only in a format that is not read",
                 .file = directory.path().string(),
                 .expected = expected,
                 .found = first_few(forbidden),
                 .hint = "load the model with transformers and save_pretrained() it again: that "
                         "writes safetensors"});
  }
  throw Error(ErrorCode::kFileNotFound,
              {.what = "the directory holds no weights of a model",
               .file = directory.path().string(),
               .expected = expected,
               .found = shards.empty() ? "no .safetensors file" : first_few(shards),
               .hint = shards.empty() ? "is this the directory that holds config.json?"
                                      : fmt::format("shards need their {}: fetch it from where the "
                                                    "model came from",
                                                    kIndexFile)});
}

SafetensorsFile open_shard(const io::Directory& directory, const WeightMap& map,
                           const std::string& name, FileAccess access) {
  if (!directory.contains(name)) {
    const std::vector<std::string> present = safetensors_in(directory);
    int64_t listed = 0;
    for (const io::JsonMember& line : map.tensors.members()) {
      if (line.value.as_string() == name) ++listed;
    }
    throw Error(ErrorCode::kIndexShardMissing,
                {.what = "a shard that the index lists is not in the directory",
                 .file = map.file,
                 .expected = fmt::format("{}, which holds {} of {} tensors", name, listed,
                                         map.tensors.size()),
                 .found = present.empty() ? "no .safetensors file" : first_few(present),
                 .hint = "fetch the missing shard; the download may not have finished"});
  }
  return io::open_safetensors(directory.open_file(name, {.access = access}));
}

[[noreturn]] void reject_unlisted(const SafetensorsFile& file, const std::string& shard,
                                  const TensorInfo& tensor, const WeightMap& map) {
  const auto line = map.tensors.find(tensor.name);
  throw Error(ErrorCode::kIndexTensorUnlisted,
              {.what = "the shard holds a tensor that the index does not place there",
               .file = file.path().string(),
               .tensor = tensor.name,
               .expected = line ? "only in " + std::string(line->as_string())
                                : "a line for it in " + map.file,
               .found = "in " + shard,
               .hint = "index and shards come from different saves: fetch the whole model again"});
}

[[noreturn]] void reject_missing(const ShardSet& shards, const WeightMap& map) {
  std::set<std::string_view> held;
  for (const StoredTensor& tensor : shards.tensors) held.insert(tensor.info->name);
  std::vector<std::string> missing;
  for (const io::JsonMember& line : map.tensors.members()) {
    if (!held.contains(line.key)) missing.emplace_back(line.key);
  }
  const std::string shard(map.tensors.at(missing.front()).as_string());
  const auto number = std::find(map.shards.begin(), map.shards.end(), shard) - map.shards.begin();
  const size_t others = shards.files[static_cast<size_t>(number)].tensors().size();
  throw Error(
      ErrorCode::kIndexTensorMissing,
      {.what = missing.size() == 1
                   ? "the index lists a tensor that its shard does not hold"
                   : fmt::format("the index lists {} tensors that their shards do not hold",
                                 missing.size()),
       .file = map.file,
       .tensor = io::show_name(missing.front()),
       .expected = "in " + shard,
       .found = fmt::format("{} other tensors there", others),
       .hint = missing.size() == 1
                   ? "index and shards come from different saves: fetch the whole model again"
                   : "missing are " + first_few(missing)});
}

ShardSet open_indexed(const io::Directory& directory, FileAccess access) {
  const io::JsonDocument document = directory.read_json(kIndexFile, io::kIndexLimits);
  WeightMap map = read_weight_map(document);
  ShardSet shards;
  shards.listing = map.file;
  shards.names = map.shards;
  shards.tensors.reserve(map.tensors.size());
  for (const std::string& name : map.shards) {
    shards.files.push_back(open_shard(directory, map, name, access));
    shards.paths.push_back(shards.files.back().path().string());
    const auto shard = static_cast<int32_t>(shards.files.size() - 1);
    for (const TensorInfo& tensor : shards.files.back().tensors()) {
      const auto line = map.tensors.find(tensor.name);
      if (!line || line->as_string() != name) {
        reject_unlisted(shards.files.back(), name, tensor, map);
      }
      shards.tensors.push_back({.info = &tensor, .shard = shard});
    }
  }
  // Each tensor is listed once, for one shard: equal counts mean that none is missing.
  if (shards.tensors.size() != map.tensors.size()) reject_missing(shards, map);
  return shards;
}

ShardSet open_single(const io::Directory& directory, FileAccess access) {
  ShardSet shards;
  shards.names.emplace_back(kSingleFile);
  shards.files.push_back(
      io::open_safetensors(directory.open_file(kSingleFile, {.access = access})));
  shards.listing = shards.files.front().path().string();
  shards.paths.push_back(shards.listing);
  for (const TensorInfo& tensor : shards.files.front().tensors()) {
    shards.tensors.push_back({.info = &tensor, .shard = 0});
  }
  return shards;
}

}  // namespace

ShardSet open_shards(const io::Directory& directory, FileAccess access) {
  // transformers prefers the single file too.
  if (directory.contains(kSingleFile)) {
    ShardSet shards = open_single(directory, access);
    if (directory.contains(kIndexFile)) {
      shards.notes.push_back(
          fmt::format("{} is used, {} beside it is not", kSingleFile, kIndexFile));
    }
    return shards;
  }
  if (directory.contains(kIndexFile)) return open_indexed(directory, access);
  reject_without_weights(directory);
}

}  // namespace conclave::inline v0::checkpoint
