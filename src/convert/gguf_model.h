// A GGUF file, or the parts of one, as the source of a conversion.
#pragma once

#include "convert/source_model.h"

#include "conclave/gguf.h"

namespace conclave::inline v0::conversion {

// The name of a part of a model.
std::string gguf_shard_name(size_t index, size_t count);

class GgufModel final : public SourceModel {
 public:
  explicit GgufModel(const std::filesystem::path& path);

  ModelContainer container() const override { return ModelContainer::kGguf; }
  void read(const SourceTensor& tensor, uint64_t offset,
            std::span<std::byte> destination) const override;
  // A scale that goes is named with the matrix: "ffn_down_exps.scale" may belong to the router.
  bool goes_with_weights(const SourceTensor&) const override { return false; }
  // Every tensor says its type.
  void require_copyable(const SourceTensor&) const override {}
  std::unique_ptr<ResultFiles> result_files(const ConversionPlan& plan,
                                            const ResolvedRequest& request) const override;
  std::string shard_name(size_t index, size_t count) const override;

  const GgufReader& reader() const { return reader_; }

 private:
  GgufReader reader_;
};

}  // namespace conclave::inline v0::conversion
