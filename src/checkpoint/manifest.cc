#include "checkpoint/manifest.h"

#include "checkpoint/hash.h"
#include "io/json.h"

#include "conclave/error.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <system_error>

namespace conclave::inline v0::checkpoint {
namespace {

constexpr std::string_view kFormat = "conclave-manifest";
constexpr int64_t kVersion = 1;
constexpr std::string_view kHashName = "xxh3-64";
// Smaller slices are hashed together: a hash would cost more than the data it covers.
constexpr uint64_t kMinBlockBytes = 4096;
constexpr size_t kReadBytes = size_t{1} << 20;
constexpr std::string_view kStaleHint =
    "the model was changed after its manifest was written, or is damaged: fetch it again, or write "
    "the manifest anew if the change was meant";

uint64_t hash_block(const HashedTensors& model, int32_t tensor, uint64_t offset, uint64_t bytes) {
  const std::span<const std::byte> mapped = model.mapped(tensor);
  if (!mapped.empty()) return hash_bytes(mapped.subspan(offset, bytes));
  StreamHash hash;
  std::vector<std::byte> buffer(std::min<uint64_t>(bytes, kReadBytes));
  for (uint64_t done = 0; done < bytes;) {
    const auto piece = std::span(buffer).first(std::min<uint64_t>(bytes - done, kReadBytes));
    model.read(tensor, offset + done, piece);
    hash.update(piece);
    done += piece.size();
  }
  return hash.digest();
}

std::string hex(uint64_t hash) { return fmt::format("{:016x}", hash); }

nlohmann::ordered_json describe(const HashedTensors& model, int32_t tensor) {
  const HashedTensor info = model.at(tensor);
  const HashBlocks blocks = hash_blocks(info);
  nlohmann::ordered_json hashes = nlohmann::ordered_json::array();
  for (int64_t block = 0; block < blocks.count; ++block) {
    const uint64_t offset = static_cast<uint64_t>(block) * blocks.bytes;
    hashes.push_back(hex(hash_block(model, tensor, offset, blocks.bytes)));
  }
  return {{"dtype", std::string(info.type)},
          {"shape", std::vector<int64_t>(info.shape.begin(), info.shape.end())},
          {"hashes", std::move(hashes)}};
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  const std::filesystem::path unfinished = path.string() + ".partial";
  std::ofstream file(unfinished, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(unfinished, path, error);
  if (file && !error) return;
  std::error_code ignored;
  std::filesystem::remove(unfinished, ignored);
  throw Error(ErrorCode::kFileWrite, {.what = "the manifest cannot be written",
                                      .file = path.string(),
                                      .found = error ? error.message() : "a failed write",
                                      .hint = "is the directory writable, and is there space?"});
}

[[noreturn]] void reject_tensor(const HashedTensors& model, int32_t tensor,
                                std::string_view manifest, std::string expected,
                                std::string found) {
  throw Error(ErrorCode::kChecksum,
              {.what = fmt::format("the tensor is not what {} describes", manifest),
               .file = model.file_of(tensor),
               .tensor = std::string(model.at(tensor).name),
               .expected = std::move(expected),
               .found = std::move(found),
               .hint = std::string(kStaleHint)});
}

uint64_t parse_hash(const io::JsonValue& value) {
  const std::string_view text = value.as_string();
  uint64_t hash = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), hash, 16);
  if (text.size() != 16 || error != std::errc() || end != text.data() + text.size()) {
    value.reject(ErrorCode::kConfigValue, "not a hash", "16 hexadecimal digits");
  }
  return hash;
}

// Returns "BF16 [128, 2048]".
std::string describe_type(std::string_view dtype, std::span<const int64_t> shape) {
  return fmt::format("{} [{}]", dtype, fmt::join(shape, ", "));
}

std::vector<uint64_t> read_entry(const HashedTensors& model, int32_t tensor,
                                 std::string_view manifest, const io::JsonValue& entry) {
  std::vector<int64_t> shape;
  for (const io::JsonValue& size : entry.at("shape").items()) shape.push_back(size.as_int64());
  const std::string recorded = describe_type(entry.at("dtype").as_string(), shape);
  const HashedTensor info = model.at(tensor);
  const std::string stored = describe_type(info.type, info.shape);
  if (recorded != stored) reject_tensor(model, tensor, manifest, recorded, stored);
  std::vector<uint64_t> hashes;
  for (const io::JsonValue& hash : entry.at("hashes").items()) hashes.push_back(parse_hash(hash));
  const auto blocks = static_cast<size_t>(hash_blocks(info).count);
  if (hashes.size() != blocks) {
    entry.at("hashes").reject(ErrorCode::kConfigValue, "the wrong number of hashes",
                              std::to_string(blocks));
  }
  return hashes;
}

[[noreturn]] void reject_left_over(const std::filesystem::path& manifest,
                                   const HashedTensors& model, const io::JsonValue& listed) {
  std::set<std::string_view> present;
  for (int32_t i = 0; i < model.count(); ++i) present.insert(model.at(i).name);
  std::string first;
  for (const io::JsonMember& member : listed.members()) {
    if (!present.contains(member.key) && first.empty()) first = member.key;
  }
  throw Error(ErrorCode::kChecksum,
              {.what = "the manifest describes tensors that the model does not hold",
               .file = manifest.string(),
               .tensor = first,
               .expected = fmt::format("{} tensors", listed.size()),
               .found = fmt::format("{} tensors", model.count()),
               .hint = std::string(kStaleHint)});
}

io::JsonDocument read_manifest(const io::Directory& directory, std::string_view name) {
  if (!directory.contains(name)) {
    throw Error(ErrorCode::kFileNotFound,
                {.what = "the model has no manifest to verify its data against",
                 .file = (directory.path() / name).string(),
                 .hint = "Checkpoint::write_manifest writes one from a copy that is known to be "
                         "good"});
  }
  io::JsonDocument document = directory.read_json(name, io::kIndexLimits);
  const io::JsonValue root = document.root();
  if (root.at("format").as_string() != kFormat) {
    root.at("format").reject(ErrorCode::kConfigValue, "not a manifest", std::string(kFormat));
  }
  if (root.at("version").as_int64() != kVersion) {
    root.at("version").reject(ErrorCode::kConfigValue, "a manifest of another version",
                              std::to_string(kVersion));
  }
  if (root.at("hash").as_string() != kHashName) {
    root.at("hash").reject(ErrorCode::kConfigValue, "a hash of another kind",
                           std::string(kHashName));
  }
  return document;
}

}  // namespace

int32_t ShardTensors::count() const { return static_cast<int32_t>(shards_.tensors.size()); }

HashedTensor ShardTensors::at(int32_t tensor) const {
  const TensorInfo& info = shards_.info(tensor);
  return {
      .name = info.name, .type = to_string(info.dtype), .shape = info.shape, .bytes = info.bytes};
}

std::string ShardTensors::file_of(int32_t tensor) const { return shards_.path_of(tensor); }

std::span<const std::byte> ShardTensors::mapped(int32_t tensor) const {
  const StoredTensor& stored = shards_.tensors[static_cast<size_t>(tensor)];
  return shards_.files[static_cast<size_t>(stored.shard)].mapped(*stored.info);
}

void ShardTensors::read(int32_t tensor, uint64_t offset, std::span<std::byte> destination) const {
  const StoredTensor& stored = shards_.tensors[static_cast<size_t>(tensor)];
  shards_.files[static_cast<size_t>(stored.shard)].read(*stored.info, offset, destination);
}

HashBlocks hash_blocks(const HashedTensor& tensor) {
  if (tensor.shape.size() >= 3 && tensor.shape[0] > 1) {
    const auto count = static_cast<uint64_t>(tensor.shape[0]);
    // Types smaller than a byte may not divide evenly.
    if (tensor.bytes % count == 0 && tensor.bytes / count >= kMinBlockBytes) {
      return {.count = tensor.shape[0], .bytes = tensor.bytes / count};
    }
  }
  return {.count = 1, .bytes = tensor.bytes};
}

void write_manifest_file(const io::Directory& directory, std::string_view name,
                         const HashedTensors& model) {
  nlohmann::ordered_json tensors = nlohmann::ordered_json::object();
  for (int32_t i = 0; i < model.count(); ++i) {
    // emplace on an ordered object searches it from the front; the names are unique already.
    tensors.get_ref<nlohmann::ordered_json::object_t&>().push_back(
        {std::string(model.at(i).name), describe(model, i)});
  }
  const nlohmann::ordered_json manifest = {{"format", std::string(kFormat)},
                                           {"version", kVersion},
                                           {"hash", std::string(kHashName)},
                                           {"tensors", std::move(tensors)}};
  write_file(directory.path() / name, manifest.dump(1) + "\n");
}

Verifier::Verifier(const io::Directory& directory, std::string_view name,
                   std::unique_ptr<const HashedTensors> tensors)
    : model_(std::move(tensors)), name_(name) {
  const io::JsonDocument document = read_manifest(directory, name);
  const io::JsonValue listed = document.root().at("tensors");
  tensors_.reserve(static_cast<size_t>(model_->count()));
  for (int32_t i = 0; i < model_->count(); ++i) {
    const auto entry = listed.find(model_->at(i).name);
    if (!entry) reject_tensor(*model_, i, name_, "no tensor of this name", "one");
    const std::vector<uint64_t> hashes = read_entry(*model_, i, name_, *entry);
    tensors_.push_back({.layout = hash_blocks(model_->at(i)), .first = hashes_.size()});
    hashes_.insert(hashes_.end(), hashes.begin(), hashes.end());
  }
  // Names are unique on both sides: equal counts mean that none is left over.
  if (static_cast<int64_t>(listed.size()) != model_->count()) {
    reject_left_over(directory.path() / name, *model_, listed);
  }
  verified_ = std::make_unique<std::atomic<bool>[]>(hashes_.size());
}

size_t Verifier::block_index(int32_t tensor, uint64_t offset) const {
  const Blocks& blocks = tensors_[static_cast<size_t>(tensor)];
  return blocks.first + (blocks.layout.count > 1 ? offset / blocks.layout.bytes : 0);
}

void Verifier::check(int32_t tensor, uint64_t offset) const {
  const size_t index = block_index(tensor, offset);
  if (verified_[index].load(std::memory_order_acquire)) return;
  const Blocks& blocks = tensors_[static_cast<size_t>(tensor)];
  compare(tensor, index,
          hash_block(*model_, tensor, (index - blocks.first) * blocks.layout.bytes,
                     blocks.layout.bytes));
  verified_[index].store(true, std::memory_order_release);
}

bool Verifier::is_block(int32_t tensor, uint64_t offset, uint64_t bytes) const {
  const HashBlocks& layout = tensors_[static_cast<size_t>(tensor)].layout;
  return bytes == layout.bytes && offset % layout.bytes == 0;
}

void Verifier::check_bytes(int32_t tensor, uint64_t offset,
                           std::span<const std::byte> bytes) const {
  compare(tensor, block_index(tensor, offset), hash_bytes(bytes));
}

void Verifier::compare(int32_t tensor, size_t index, uint64_t hash) const {
  if (hash == hashes_[index]) return;
  const Blocks& blocks = tensors_[static_cast<size_t>(tensor)];
  const std::string part =
      blocks.layout.count > 1 ? fmt::format("slice {} of ", index - blocks.first) : "";
  throw Error(ErrorCode::kChecksum,
              {.what = fmt::format("the data of {}the tensor differs from {}", part, name_),
               .file = model_->file_of(tensor),
               .tensor = std::string(model_->at(tensor).name),
               .expected = fmt::format("{} {}", kHashName, hex(hashes_[index])),
               .found = hex(hash),
               .hint = std::string(kStaleHint)});
}

}  // namespace conclave::inline v0::checkpoint
