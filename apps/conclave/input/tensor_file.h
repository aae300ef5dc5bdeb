// Input and reference files: safetensors with the keys layers.N.hidden_states, .router_logits,
// .topk_ids, .topk_weights and .output, and for layers that read more .router_input,
// .residual_input and .token_ids. A bare hidden_states feeds every layer. A file with several
// records of a layer holds layers.N.RECORD.hidden_states and so on; float64.output is then
// preferred to output.
#pragma once

#include "conclave/safetensors.h"
#include "conclave/spec.h"
#include "conclave/tensor.h"

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::tool {

class LayerTensors {
 public:
  // `record` may be empty.
  LayerTensors(const std::filesystem::path& path, std::string record);

  std::string file_name() const { return file_.path().string(); }

  // Returns [T, H] in f32, f16 or bf16. Throws Error(kTensorMissing, kTensorShape, kTensorDType)
  // naming file, tensor, expected and found.
  Tensor hidden_states(int64_t layer, const MoeSpec& spec) const;
  // Makes the same checks without reading data.
  const TensorInfo& find_hidden_states(int64_t layer, const MoeSpec& spec) const;
  // The others are absent if the file does not hold them. They must have `num_tokens` rows.
  std::optional<Tensor> router_logits(int64_t layer, const MoeSpec& spec, int64_t num_tokens) const;
  std::optional<Tensor> topk_ids(int64_t layer, const MoeSpec& spec, int64_t num_tokens) const;
  std::optional<Tensor> topk_weights(int64_t layer, const MoeSpec& spec, int64_t num_tokens) const;
  std::optional<Tensor> router_input(int64_t layer, const MoeSpec& spec, int64_t num_tokens) const;
  std::optional<Tensor> residual_input(int64_t layer, const MoeSpec& spec,
                                       int64_t num_tokens) const;
  std::optional<Tensor> token_ids(int64_t layer, int64_t num_tokens) const;
  // Returns the required tensor [T, H] as float64.
  std::vector<double> output(int64_t layer, const MoeSpec& spec, int64_t num_tokens) const;
  const TensorInfo& find_output(int64_t layer, const MoeSpec& spec, int64_t num_tokens) const;
  bool has(int64_t layer, const std::string& key) const;
  // Throws the error for a required tensor.
  [[noreturn]] void missing(int64_t layer, const std::string& key, const std::string& hint) const;

 private:
  struct Wanted {
    int64_t rows = 0;  // -1: any number
    int64_t cols = 0;  // -1: the tensor is a vector
    const char* letters = "";
    std::initializer_list<DType> dtypes;
  };
  void check(const TensorInfo& tensor, const Wanted& wanted) const;
  std::optional<Tensor> load(int64_t layer, const char* key, const Wanted& wanted) const;

  std::string tensor_name(int64_t layer, std::string_view key) const;

  SafetensorsFile file_;
  std::string record_;
};

// Copies f32, f16, bf16 or f64 elements to float64.
std::vector<double> to_float64(const ConstTensorView& tensor);

}  // namespace conclave::tool
