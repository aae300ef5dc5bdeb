// The seam of the converter: a form that weights are written in says which tensors a linear layer
// becomes, how rows are encoded, and what the model's configuration says of it.
#pragma once

#include "convert/module.h"

#include "conclave/checkpoint.h"
#include "conclave/quantise.h"

#include <nlohmann/json.hpp>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace conclave::inline v0::conversion {

// A linear layer, or stack of them, that a matrix becomes a part of.
struct ModulePlace {
  std::string module;       // empty: the form has no name for it
  bool alternates = false;  // rows of gate and up, which become one part
};

struct TextFile {
  std::string name;
  std::string text;
};

// Immutable, for any threads.
class TargetForm {
 public:
  virtual ~TargetForm() = default;

  virtual std::string name() const = 0;  // with its options
  virtual bool has_codes() const { return true; }
  // Whether the tensor has this form and would only lose by being encoded anew.
  virtual bool is_form_of(const SourceTensor&) const { return false; }
  virtual ModulePlace place(const CheckpointLayer&, const StoredMatrix& matrix) const {
    return {.module = matrix.module};
  }
  // Throws Error(kUnsupported), naming the model, if its family has no such weights.
  virtual void check_model(const Checkpoint&) const {}
  // Throws Error(kUnsupported), naming the module, if the form has no tensors of its sizes.
  virtual void check(const ConvertedModule&) const {}
  // The tensors of a module; `module`, the number, is left to the caller.
  virtual std::vector<PlannedTensor> tensors(const ConvertedModule& module) const = 0;

  // Rows that belong together; a strip is a multiple of them.
  virtual int64_t block_rows() const { return 1; }
  // The quantiser that chooses a number for the whole matrix; null if there is no such number.
  virtual const Quantiser* matrix_quantiser() const { return nullptr; }
  // Whether gate and up of an expert have that number in common.
  virtual bool pairs_share_scale() const { return false; }
  // The number as readers get it back.
  virtual float as_read(float matrix_scale) const { return matrix_scale; }

  virtual QuantisedRows encode(std::span<const float> values, int64_t rows, int64_t cols,
                               float matrix_scale) const = 0;
  // The bytes of a tensor that is not streamed.
  virtual std::vector<std::byte> finish(const ConvertedModule&, const PlannedTensor&,
                                        const GatheredRows&) const {
    return {};
  }

  // Describes the form to config.json; `kept` names the linear layers without codes.
  virtual nlohmann::ordered_json configuration(const std::vector<std::string>&) const {
    return nullptr;
  }
  // Under this key config.json has the same once more; empty: under no other.
  virtual std::string own_key() const { return {}; }
  // Files beside config.json.
  virtual std::vector<TextFile> files(const std::vector<std::string>&) const { return {}; }
  // llama.cpp's number for files that are mostly of this type.
  virtual std::optional<uint32_t> file_type() const { return std::nullopt; }
};

// Throws Error(kUnsupported) about a module.
[[noreturn]] void refuse_module(const ConvertedModule& module, std::string what, std::string found,
                                std::string expected, std::string hint = {});
// Throws unless rows are whole groups of so many columns.
void require_whole_groups(const ConvertedModule& module, int64_t columns);
// The columns of a matrix that the tensor has; bytes of a dense tensor.
PlannedTensor dense_tensor(std::string name, DType dtype, std::vector<int64_t> shape);

}  // namespace conclave::inline v0::conversion
