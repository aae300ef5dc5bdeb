// Assigns the tensors of one MoE layer to its matrices: every matrix gets exactly one tensor.
#pragma once

#include "checkpoint/layer_map.h"
#include "checkpoint/layer_names.h"
#include "checkpoint/layer_shapes.h"
#include "checkpoint/scale_names.h"
#include "checkpoint/stored_planes.h"

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace conclave::inline v0::checkpoint {

// The names of most of a layer's tensors.
struct LayerNaming {
  const ExpertForm* form = nullptr;
  int32_t base = 0;
};

class LayerAssignment {
 public:
  // Assigns all tensors it can. `usual` gives the names of what is missing from a layer without any
  // expert tensor; its form may be null. Throws Error(kTensorDuplicate, kTensorShape,
  // kTensorUnexpected for an expert number >= E). All arguments must outlive the assignment.
  LayerAssignment(const ModelConfig& config, const TensorTable& table, const LayerTensors& tensors,
                  const LayerConfig& layer, const LayerNaming& usual);

  const LayerNaming& naming() const { return naming_; }
  // Whether some tensor of the matrix, or of a plane of it, is there.
  bool has_any_of(WeightId matrix, int64_t expert) const;
  int64_t expert_tensors() const { return expert_tensors_; }
  // Says what its tensor holds; nothing without one.
  std::optional<DType> type_of(WeightId matrix, int64_t expert) const;
  // "NAME [rows, cols]" of the tensor that would hold the matrix.
  std::string expected_name(WeightId matrix, int64_t expert) const;
  int64_t missing_count() const;
  std::vector<std::string> missing(size_t limit) const;  // "NAME [rows, cols]"
  std::span<const std::string> stray_names() const { return strays_; }
  std::string summary() const;  // "16 of 24 expert tensors of layer 3"

  // Throws Error(kTensorUnexpected) for the first name of the MoE block that no pattern knows.
  void check_strays() const;
  // Throws Error(kTensorDType) if types differ that must agree.
  LayerMap finish();

 private:
  struct Match {
    NameMatch name;
    int32_t tensor;
    // The plane of the matrix that the name means, or none: the tensor itself.
    std::optional<WeightPlane> plane = std::nullopt;
    // Set if the quantisation's method stores the tensor in a way of its own.
    const StoredPlane* row = nullptr;
  };

  std::vector<Match> match_names(std::span<const LayerTensor> items);
  // Whether a tensor without a place in the layer can be dropped without losing anything.
  bool is_absent(const LayerTensor& item) const;
  void choose_naming(std::span<const Match> matches, const LayerNaming& usual);
  void choose_axes(std::span<const Match> matches);
  void place(const Match& match);
  void place_plane(const Match& match, int64_t expert);
  // Fills the matrices of the block, or their planes, from the tensor.
  void fill_block(const Match& match, const TensorBlock& block, AxisOrder axes, int64_t expert);
  void check_plane_shape(const Match& match, const quant::PlaneShape& plane) const;
  [[noreturn]] void reject_plane(const Match& match, const char* what, std::string hint) const;
  // The quantised matrix's scale that the name stands for, if any.
  std::optional<Match> match_scale(const LayerTensor& item) const;
  // Whether the name is that of a scale of a matrix that is stored in a form that is not read.
  bool is_foreign_scale(const LayerTensor& item);
  void fill(WeightId id, int64_t expert, const MatrixLocation& location);
  // Adds the reading of a tensor that the method stores in a way of its own; -1 for others.
  int32_t add_reading(const Match& match, const TensorBlock& block);
  WantedPlane wanted_plane(const NamePattern& pattern, const TensorBlock& block) const;
  void find_inputs(PlaneReading& reading);
  // Whether the name is that of a tensor that serves to read a matrix, or of no use for it.
  bool is_aid(const LayerTensor& item);
  DType type_of(const MatrixLocation& location) const;
  bool is_surplus(const Match& match) const;
  int64_t first_expert() const;  // number of the layer's expert 0 in names
  [[noreturn]] void reject_expert(const Match& match) const;

  bool is_wanted(const NamePattern& pattern) const;
  bool has_ids(std::span<const WeightId> ids) const;
  bool covers_experts(const ExpertForm& form) const;
  TensorBlock block_of(const NamePattern& pattern) const;
  TensorBlock plane_block(const NamePattern& pattern, WeightPlane plane) const;
  std::vector<std::vector<int64_t>> plane_shapes(const NamePattern& pattern,
                                                 WeightPlane plane) const;
  AxisOrder axes_of(const NamePattern& pattern) const;
  bool is_filled(std::span<const WeightId> ids, int64_t expert) const;
  // Whether the layer lacks what the pattern, or its plane, means for this expert.
  bool lacks(const NamePattern& pattern, std::optional<WeightPlane> plane, int64_t expert) const;
  const MatrixLocation* first_filled(WeightId id) const;
  std::vector<NamePattern> expected_once() const;  // one pattern per part
  // Calls visit(pattern, plane, number of tensors) for everything that the layer must have.
  template <class Visit>
  void for_each_expected(Visit visit) const;
  std::string full_name(const NamePattern& pattern, int64_t expert) const;
  std::string full_name(const NamePattern& pattern, std::optional<WeightPlane> plane,
                        int64_t expert) const;
  // The method's row for such a plane; null where the usual names count.
  const StoredPlane* expected_row(const NamePattern& pattern,
                                  std::optional<WeightPlane> plane) const;
  std::string expected_shape(const NamePattern& pattern) const;
  std::string expected_shape(const NamePattern& pattern, std::optional<WeightPlane> plane) const;
  Support type_support(const LayerMap& map) const;
  bool is_type_of(WeightId id, DType dtype) const;
  void check_same_type(std::span<const WeightId> ids) const;
  void check_plane_types() const;
  void check_types() const;

  const ModelConfig& config_;
  const TensorTable& table_;
  const LayerConfig& layer_;
  const std::optional<QuantizedWeights>& quant_;
  LayerShapes shapes_;
  LayerNaming naming_;
  AxisOrder axes_ = AxisOrder::kRowsFirst;  // for stacks whose pattern leaves it open
  bool transposed_ = false;                 // whether an expert tensor is stored columns first
  std::string prefix_;                      // "model.layers.0."
  WeightTable<std::vector<MatrixLocation>> slots_;
  std::vector<std::string> strays_;
  std::vector<PlaneReading> readings_;
  std::vector<std::string> missing_inputs_;
  std::span<const LayerTensor> items_;
  std::unordered_map<std::string_view, int32_t> by_rest_;  // filled when first needed
  std::unordered_map<std::string_view, int32_t> by_name_;  // likewise, by the whole name
  std::string foreign_;  // a matrix that must not be quantised but is, or whose form is not read
  int32_t first_stray_ = -1;
  int64_t expert_tensors_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace conclave::inline v0::checkpoint
