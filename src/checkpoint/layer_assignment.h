// The tensors of one MoE layer given to its matrices, each to exactly one.
#pragma once

#include "checkpoint/role_map.h"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::checkpoint {

class LayerAssignment {
 public:
  // Assigns all it can. `usual_form` names what is missing in a layer without any expert tensor.
  // Throws Error(kTensorDuplicate, kTensorShape, kTensorUnexpected for an expert number >= E).
  // Everything given must outlive the assignment.
  LayerAssignment(const ModelConfig& config, const ShardSet& shards, const LayerTensors& tensors,
                  const LayerConfig& layer, const ExpertForm& usual_form);

  const ExpertForm& form() const { return *form_; }  // the one most tensors are named by
  int64_t missing_count() const;
  std::vector<std::string> missing(size_t limit) const;  // "NAME [rows, cols]"
  std::span<const std::string> stray_names() const { return strays_; }
  std::string summary() const;  // "16 of 24 expert tensors of layer 3"

  // Throws Error(kTensorUnexpected) for the first name of the MoE block that no pattern knows.
  void check_strays() const;
  // Throws Error(kTensorDType) where types differ that must agree.
  LayerMap finish();

 private:
  struct Match {
    const NamePattern* pattern;
    const ExpertForm* form;  // null for parts that exist once
    int32_t tensor;
    int64_t expert;
  };
  struct Extent {
    int64_t rows;
    int64_t cols;
  };

  std::vector<Match> match_names(std::span<const LayerTensor> items);
  void choose_form(std::span<const Match> matches, const ExpertForm& usual_form);
  void choose_stack_order(std::span<const Match> matches);
  void place(const Match& match);
  void place_stack(const Match& match);
  void fill(WeightRole role, int64_t expert, const MatrixLocation& location);

  Extent extent(Part part) const;  // of one expert's share, both halves of kGateUp together
  Extent matrix_extent(WeightRole role) const;
  bool is_filled(Part part, int64_t expert) const;
  std::vector<NamePattern> expected_once() const;  // one pattern a part
  std::string full_name(const NamePattern& pattern, int64_t expert) const;
  std::string expected_shape(const NamePattern& pattern) const;
  const StoredTensor& stored(int32_t tensor) const;
  std::string file_of(int32_t tensor) const;
  Support type_support(const LayerMap& map) const;
  void check_same_type(std::span<const WeightRole> roles) const;

  const ModelConfig& config_;
  const ShardSet& shards_;
  const LayerConfig& layer_;
  const ExpertForm* form_ = nullptr;
  StackOrder stack_order_;
  std::string prefix_;  // "model.layers.0."
  std::array<std::vector<MatrixLocation>, kNumRoles> slots_;
  std::vector<std::string> strays_;
  int32_t first_stray_ = -1;
  int64_t expert_tensors_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace conclave::inline v0::checkpoint
