// The result of a conversion as a GGUF file, or the parts of one.
#pragma once

#include "convert/gguf_model.h"
#include "convert/result_files.h"

namespace conclave::inline v0::conversion {

class GgufResult final : public ResultFiles {
 public:
  // `keys` of the model, in a file aligned as they say.
  GgufResult(std::vector<GgufKey> keys, uint64_t alignment, const ConversionPlan& plan,
             const ResolvedRequest& request);

  std::filesystem::path model_in(const std::filesystem::path& directory) const override;
  std::unique_ptr<ShardFile> create(const PlannedShard& shard,
                                    const std::filesystem::path& directory) const override;
  bool read_back(const PlannedShard& shard, const std::filesystem::path& directory,
                 const std::function<void(std::span<const std::byte>)>& take) const override;
  std::filesystem::path write_outline(const std::filesystem::path& directory) const override;
  std::vector<std::string> finish(const ResultDirectory& directory) const override;

 private:
  // The keys of a part: the first has all of the model's.
  std::vector<GgufKey> keys_of(const PlannedShard& shard) const;

  const ConversionPlan& plan_;
  uint64_t alignment_;
  std::vector<GgufKey> keys_;
};

}  // namespace conclave::inline v0::conversion
