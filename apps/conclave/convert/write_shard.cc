#include "convert/write_shard.h"

#include "convert/checksum.h"
#include "convert/parallel.h"

#include "conclave/error.h"
#include "conclave/safetensors.h"

#include <algorithm>
#include <set>
#include <span>
#include <vector>

namespace conclave::tool {
namespace {

constexpr uint64_t kCopyBytes = uint64_t{1} << 20;
// Two for each thread balance pieces of unequal size.
constexpr size_t kPiecesPerThread = 2;

// A part of a tensor: copied bytes, encoded rows, or what has been gathered meanwhile.
struct Piece {
  enum class Kind : uint8_t { kCopy, kEncode, kGathered };
  Kind kind = Kind::kCopy;
  const PlannedTensor* tensor = nullptr;
  uint64_t offset = 0;  // for kCopy
  uint64_t bytes = 0;
  Strip strip = {};  // for kEncode
};

std::vector<Piece> pieces_of(const PlannedTensor& tensor, const ModuleCodes& codes) {
  std::vector<Piece> pieces;
  if (tensor.copied != nullptr) {
    for (uint64_t offset = 0; offset < tensor.bytes; offset += kCopyBytes) {
      pieces.push_back({.kind = Piece::Kind::kCopy,
                        .tensor = &tensor,
                        .offset = offset,
                        .bytes = std::min(kCopyBytes, tensor.bytes - offset)});
    }
    return pieces;
  }
  const bool is_codes =
      tensor.plane == WeightPlane::kWeights && tensor.content == FormTensor::Content::kPlane;
  if (!is_codes) return {{.kind = Piece::Kind::kGathered, .tensor = &tensor}};
  for (const Strip& strip : codes.strips(tensor.module)) {
    pieces.push_back({.kind = Piece::Kind::kEncode, .tensor = &tensor, .strip = strip});
  }
  return pieces;
}

class ShardWriter {
 public:
  ShardWriter(const Context& context, const PlannedShard& shard, ModuleCodes& codes,
              const std::filesystem::path& directory, const std::function<void(uint64_t)>& written)
      : context_(context),
        codes_(codes),
        written_(written),
        writer_(directory / shard.file_name, {{"format", "pt"}}) {
    record_.file_name = shard.file_name;
    for (const PlannedTensor& tensor : shard.tensors) {
      writer_.declare(tensor.name, tensor.dtype, tensor.shape);
      for (const Piece& piece : pieces_of(tensor, codes)) pieces_.push_back(piece);
    }
  }

  ShardRecord write() {
    const size_t batch = kPiecesPerThread * static_cast<size_t>(context_.executor().concurrency());
    for (size_t begin = 0; begin < pieces_.size(); begin += batch) {
      const auto pieces =
          std::span(pieces_).subspan(begin, std::min(batch, pieces_.size() - begin));
      prepare(pieces);
      std::vector<QuantisedRows> results(pieces.size());
      for_each_index(context_, pieces.size(), [&](size_t i) { results[i] = compute(pieces[i]); });
      for (size_t i = 0; i < pieces.size(); ++i) put(pieces[i], results[i]);
    }
    writer_.finish();
    record_.checksum = checksum_.digest();
    return std::move(record_);
  }

 private:
  void prepare(std::span<const Piece> pieces) {
    std::vector<int32_t> modules;
    for (const Piece& piece : pieces) {
      if (piece.kind != Piece::Kind::kEncode) continue;
      if (prepared_.insert(piece.strip.module).second) modules.push_back(piece.strip.module);
    }
    codes_.prepare(modules);
  }

  QuantisedRows compute(const Piece& piece) const {
    if (piece.kind == Piece::Kind::kEncode) return codes_.encode(piece.strip);
    QuantisedRows copied;
    if (piece.kind == Piece::Kind::kCopy) {
      const SourceTensor& from = *piece.tensor->copied;
      copied.codes.resize(piece.bytes);
      from.file->read(*from.info, piece.offset, copied.codes);
    }
    return copied;
  }

  void put(const Piece& piece, const QuantisedRows& result) {
    if (piece.kind == Piece::Kind::kGathered) return put_gathered(*piece.tensor);
    if (piece.kind == Piece::Kind::kEncode) {
      record_.errors[piece.strip.module].add(result.error);
      std::vector<std::byte>& scales = scales_[piece.strip.module];
      scales.insert(scales.end(), result.scales.begin(), result.scales.end());
    }
    put_bytes(result.codes);
  }

  // Strips of a matrix with one scale have each brought it.
  void put_gathered(const PlannedTensor& tensor) {
    if (tensor.plane != WeightPlane::kScale) return put_bytes(codes_.single(tensor));
    const auto gathered = scales_.extract(tensor.module);
    put_bytes(std::span(gathered.mapped()).first(tensor.bytes));
  }

  void put_bytes(std::span<const std::byte> bytes) {
    writer_.write(bytes);
    checksum_.update(bytes);
    written_(bytes.size());
  }

  const Context& context_;
  ModuleCodes& codes_;
  const std::function<void(uint64_t)>& written_;
  SafetensorsWriter writer_;
  std::vector<Piece> pieces_;
  std::set<int32_t> prepared_;
  std::map<int32_t, std::vector<std::byte>> scales_;  // gathered until their tensor's turn
  Checksum checksum_;
  ShardRecord record_;
};

bool has_tensors(const SafetensorsFile& file, const PlannedShard& shard) {
  return std::ranges::equal(file.tensors(), shard.tensors,
                            [](const TensorInfo& found, const PlannedTensor& planned) {
                              return found.name == planned.name && found.dtype == planned.dtype &&
                                     found.shape == planned.shape;
                            });
}

uint64_t checksum_of(const SafetensorsFile& file) {
  Checksum checksum;
  std::vector<std::byte> buffer(kCopyBytes);
  for (const TensorInfo& tensor : file.tensors()) {
    for (uint64_t offset = 0; offset < tensor.bytes; offset += kCopyBytes) {
      const auto piece = std::span(buffer).first(std::min(kCopyBytes, tensor.bytes - offset));
      file.read(tensor, offset, piece);
      checksum.update(piece);
    }
  }
  return checksum.digest();
}

}  // namespace

ShardRecord write_shard(const Context& context, const PlannedShard& shard, ModuleCodes& codes,
                        const std::filesystem::path& directory,
                        const std::function<void(uint64_t)>& written) {
  return ShardWriter(context, shard, codes, directory, written).write();
}

bool is_intact(const PlannedShard& shard, const ShardRecord& record,
               const std::filesystem::path& directory) {
  try {
    const SafetensorsFile file = SafetensorsFile::open(directory / record.file_name);
    return has_tensors(file, shard) && checksum_of(file) == record.checksum;
  } catch (const Error&) {
    // Whatever is wrong with the file, it is written again.
    return false;
  }
}

}  // namespace conclave::tool
