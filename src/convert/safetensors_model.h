// A Hugging Face model directory, as the source of a conversion.
#pragma once

#include "convert/source_model.h"

#include "conclave/safetensors.h"

namespace conclave::inline v0::conversion {

// The name of a shard of a model.
std::string safetensors_shard_name(size_t index, size_t count);

class SafetensorsModel : public SourceModel {
 public:
  explicit SafetensorsModel(const std::filesystem::path& directory);

  ModelContainer container() const override { return ModelContainer::kSafetensors; }
  void read(const SourceTensor& tensor, uint64_t offset,
            std::span<std::byte> destination) const override;
  bool goes_with_weights(const SourceTensor& tensor) const override;
  void require_copyable(const SourceTensor& tensor) const override;
  std::unique_ptr<ResultFiles> result_files(const ConversionPlan& plan,
                                            const ResolvedRequest& request) const override;
  std::string shard_name(size_t index, size_t count) const override;

  std::string_view config_text() const override { return config_text_; }
  // Whether a file of the directory holds tensors or says where they are.
  bool holds_tensors(const std::string& file_name) const;

 private:
  std::string config_text_;
  std::vector<SafetensorsFile> files_;
};

}  // namespace conclave::inline v0::conversion
