#include "convert/write_shard.h"

#include "convert/checksum.h"
#include "convert/forms/target_form.h"
#include "convert/moved_rows.h"
#include "convert/parallel.h"

#include "conclave/error.h"

#include <algorithm>
#include <memory>
#include <set>
#include <span>
#include <utility>
#include <vector>

namespace conclave::inline v0::conversion {
namespace {

constexpr uint64_t kCopyBytes = uint64_t{1} << 20;
// Two for each thread balance pieces of unequal size.
constexpr size_t kPiecesPerThread = 2;

// A part of a tensor: copied bytes, values in another type or order, encoded rows, or what has been
// gathered meanwhile.
struct Piece {
  enum class Kind : uint8_t { kCopy, kMove, kEncode, kGathered };
  Kind kind = Kind::kCopy;
  const PlannedTensor* tensor = nullptr;
  uint64_t offset = 0;  // for kCopy
  uint64_t bytes = 0;
  int64_t moved = 0;  // for kMove
  Strip strip = {};   // for kEncode
};

// A module's rows are encoded in front of its first tensor.
void add_pieces(const PlannedTensor& tensor, bool begins_module, const ModuleCodes& codes,
                std::vector<Piece>& pieces) {
  if (tensor.copied != nullptr) {
    for (uint64_t offset = 0; offset < tensor.bytes; offset += kCopyBytes) {
      pieces.push_back({.kind = Piece::Kind::kCopy,
                        .tensor = &tensor,
                        .offset = offset,
                        .bytes = std::min(kCopyBytes, tensor.bytes - offset)});
    }
    return;
  }
  if (tensor.moved) {
    for (int64_t i = 0; i < count_pieces(tensor); ++i) {
      pieces.push_back({.kind = Piece::Kind::kMove, .tensor = &tensor, .moved = i});
    }
    return;
  }
  if (begins_module) {
    for (const Strip& strip : codes.strips(tensor.module)) {
      pieces.push_back({.kind = Piece::Kind::kEncode, .tensor = &tensor, .strip = strip});
    }
  }
  if (!tensor.streamed) pieces.push_back({.kind = Piece::Kind::kGathered, .tensor = &tensor});
}

class ShardWriter {
 public:
  ShardWriter(const ShardJob& job, const PlannedShard& shard)
      : job_(job), file_(job.files.create(shard, job.directory)) {
    record_.file_name = shard.file_name;
    int32_t module = -1;
    for (const PlannedTensor& tensor : shard.tensors) {
      const bool begins_module = tensor.module != std::exchange(module, tensor.module);
      add_pieces(tensor, begins_module, job.codes, pieces_);
    }
  }

  ShardRecord write() {
    const size_t batch =
        kPiecesPerThread * static_cast<size_t>(job_.context.executor().concurrency());
    for (size_t begin = 0; begin < pieces_.size(); begin += batch) {
      const auto pieces =
          std::span(pieces_).subspan(begin, std::min(batch, pieces_.size() - begin));
      prepare(pieces);
      std::vector<QuantisedRows> results(pieces.size());
      for_each_index(job_.context, pieces.size(),
                     [&](size_t i) { results[i] = compute(pieces[i]); });
      for (size_t i = 0; i < pieces.size(); ++i) put(pieces[i], results[i]);
    }
    file_->finish();
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
    job_.codes.prepare(modules);
  }

  QuantisedRows compute(const Piece& piece) const {
    if (piece.kind == Piece::Kind::kEncode) return job_.codes.encode(piece.strip);
    QuantisedRows copied;
    if (piece.kind == Piece::Kind::kMove) {
      copied.codes = read_piece(job_.source, *piece.tensor, piece.moved);
    }
    if (piece.kind == Piece::Kind::kCopy) {
      copied.codes.resize(piece.bytes);
      job_.source.read(*piece.tensor->copied, piece.offset, copied.codes);
    }
    return copied;
  }

  void put(const Piece& piece, const QuantisedRows& result) {
    if (piece.kind == Piece::Kind::kGathered) return put_gathered(*piece.tensor);
    if (piece.kind == Piece::Kind::kEncode) gather(piece, result);
    const bool as_they_come = piece.kind != Piece::Kind::kEncode || piece.tensor->streamed;
    if (as_they_come) put_bytes(result.codes);
  }

  void gather(const Piece& piece, const QuantisedRows& result) {
    const Strip& strip = piece.strip;
    const ConvertedModule& module = job_.plan.modules[static_cast<size_t>(strip.module)];
    if (const auto matrix = module.parts[strip.part].matrix) {
      record_.errors[static_cast<int32_t>(*matrix)].add(result.error);
    }
    if (std::exchange(gathered_module_, strip.module) != strip.module) {
      gathered_ = {.matrix_scale = job_.codes.matrix_scale(strip.module)};
    }
    const auto append = [](std::vector<std::byte>& all, const std::vector<std::byte>& more) {
      all.insert(all.end(), more.begin(), more.end());
    };
    if (!piece.tensor->streamed) append(gathered_.codes, result.codes);
    append(gathered_.scales, result.scales);
    append(gathered_.zeros, result.zeros);
  }

  void put_gathered(const PlannedTensor& tensor) {
    const ConvertedModule& module = job_.plan.modules[static_cast<size_t>(tensor.module)];
    put_bytes(module.form->finish(module, tensor, gathered_));
  }

  void put_bytes(std::span<const std::byte> bytes) {
    file_->write(bytes);
    checksum_.update(bytes);
    job_.written(bytes.size());
  }

  const ShardJob& job_;
  std::unique_ptr<ShardFile> file_;
  std::vector<Piece> pieces_;
  std::set<int32_t> prepared_;
  int32_t gathered_module_ = -1;  // whose rows are gathered
  GatheredRows gathered_;
  Checksum checksum_;
  ShardRecord record_;
};

}  // namespace

ShardRecord write_shard(const ShardJob& job, const PlannedShard& shard) {
  return ShardWriter(job, shard).write();
}

bool is_intact(const ResultFiles& files, const PlannedShard& shard, const ShardRecord& record,
               const std::filesystem::path& directory) {
  try {
    Checksum checksum;
    const bool same = files.read_back(
        shard, directory, [&](std::span<const std::byte> bytes) { checksum.update(bytes); });
    return same && checksum.digest() == record.checksum;
  } catch (const Error&) {
    // Whatever is wrong with the file, it is written again.
    return false;
  }
}

}  // namespace conclave::inline v0::conversion
