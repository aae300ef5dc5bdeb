// Plans what a result in another container has beside MoE layers, or says why it has nothing else.
#pragma once

#include "convert/plan.h"
#include "convert/request.h"
#include "convert/source_model.h"

#include "conclave/dtype.h"
#include "conclave/gguf.h"
#include "conclave/model_trunk.h"

#include <string>
#include <vector>

namespace conclave::inline v0::conversion {

class TrunkPlan {
 public:
  // Both must outlive it.
  TrunkPlan(const SourceModel& source, const ResolvedRequest& request)
      : source_(source), request_(request) {}

  // Adds what a file's keys say of the whole model, or that there are MoE layers alone.
  void plan_file(std::vector<GgufKey>& keys);
  // Adds what config.json says of the whole model; a part of one keeps the text.
  void plan_directory(const std::string& model_type, std::string& config);

  bool is_whole() const { return reason_.empty(); }
  const std::string& reason() const { return reason_; }  // why it is not
  const std::vector<std::string>& left_out() const { return trunk_.left_out; }
  // Why the result has no tokenizer; empty if it has one.
  const std::string& no_tokenizer() const { return no_tokenizer_; }
  // The tensors, each a unit; adds the linear layers among them to `kept`.
  std::vector<std::vector<PlannedTensor>> units(std::vector<std::string>& kept) const;

 private:
  bool has_all_layers();
  void take(ModelTrunk trunk);
  std::vector<TrunkTensorInfo> tensors_of_source() const;
  DType dtype() const;
  DType dtype_of(const TrunkTensor& tensor) const;

  const SourceModel& source_;
  const ResolvedRequest& request_;
  ModelTrunk trunk_;
  std::string reason_;
  std::string no_tokenizer_ = "no files are made of a GGUF file's keys";
};

}  // namespace conclave::inline v0::conversion
