// The result of a conversion as a Hugging Face model directory.
#pragma once

#include "convert/result_files.h"
#include "convert/safetensors_model.h"

#include <string>

namespace conclave::inline v0::conversion {

class SafetensorsResult final : public ResultFiles {
 public:
  // Without a source of this container there are no other files to copy.
  SafetensorsResult(const SafetensorsModel* source, const std::string& config,
                    const ConversionPlan& plan, const ResolvedRequest& request);

  std::filesystem::path model_in(const std::filesystem::path& directory) const override {
    return directory;
  }
  std::unique_ptr<ShardFile> create(const PlannedShard& shard,
                                    const std::filesystem::path& directory) const override;
  bool read_back(const PlannedShard& shard, const std::filesystem::path& directory,
                 const std::function<void(std::span<const std::byte>)>& take) const override;
  std::filesystem::path write_outline(const std::filesystem::path& directory) const override;
  std::vector<std::string> finish(const ResultDirectory& directory) const override;

 private:
  nlohmann::ordered_json index() const;
  void write_files(const std::filesystem::path& directory) const;

  const SafetensorsModel* source_;
  const ConversionPlan& plan_;
  std::vector<TextFile> files_;  // config.json last: without it the directory is no model
};

}  // namespace conclave::inline v0::conversion
