// How the result of a conversion lies in files: one class for each container of tensors.
#pragma once

#include "convert/plan.h"
#include "convert/request.h"
#include "convert/result_directory.h"
#include "convert/source_model.h"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::conversion {

// Finished shards are read again in pieces of this size.
inline constexpr uint64_t kReadBackBytes = uint64_t{1} << 20;

// Takes the data of a shard's tensors in their order. The file appears when it is finished.
class ShardFile {
 public:
  virtual ~ShardFile() = default;
  virtual void write(std::span<const std::byte> bytes) = 0;
  virtual void finish() = 0;
};

class ResultFiles {
 public:
  virtual ~ResultFiles() = default;

  // Checkpoint::open takes this for the result in a directory.
  virtual std::filesystem::path model_in(const std::filesystem::path& directory) const = 0;
  virtual std::unique_ptr<ShardFile> create(const PlannedShard& shard,
                                            const std::filesystem::path& directory) const = 0;
  // Gives all data of a shard to `take`, in pieces; false if it has other tensors than planned.
  virtual bool read_back(const PlannedShard& shard, const std::filesystem::path& directory,
                         const std::function<void(std::span<const std::byte>)>& take) const = 0;
  // Writes the model as it would be, without data, and returns what Checkpoint::open takes.
  virtual std::filesystem::path write_outline(const std::filesystem::path& directory) const = 0;
  // Writes what lies beside the shards. Returns the names of the source's files that are left out.
  virtual std::vector<std::string> finish(const ResultDirectory& directory) const = 0;
};

// Opens the result as it would be, without data. Throws Error(kUnsupported) with the reason if no
// layer of this library could read it, or in another container would mean something else.
void require_readable(const Checkpoint& source, const ResultFiles& files,
                      const ResolvedRequest& request, const std::filesystem::path& scratch);

}  // namespace conclave::inline v0::conversion
