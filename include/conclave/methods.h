// Methods by which safetensors files store matrices of codes: the tensors that a method has for a
// matrix, and the way from a matrix's planes to these. Both come from the rows that read them.
#pragma once

#include "conclave/dtype.h"
#include "conclave/format.h"
#include "conclave/spec.h"
#include "conclave/version.h"
#include "conclave/weights.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::inline v0 {

// A tensor that a method stores for a matrix.
struct MethodTensor {
  enum class Use : uint8_t {
    kPlane,   // layers read it as a plane of the matrix
    kInput,   // serves to read a plane
    kUnused,  // no layer needs it
  };
  std::string name;
  Use use = Use::kPlane;
  WeightPlane plane = WeightPlane::kWeights;
  std::vector<DType> dtypes = {};   // as it may be stored, the usual type first; may be empty
  std::vector<int64_t> shape = {};  // the usual one
  // The axes along which rows, and columns or groups of them, follow each other; -1 without any.
  int rows_axis = -1;
  int cols_axis = -1;
};

// The tensors that a quantization_config gives a matrix, and the spec of its codes.
struct MethodLayout {
  std::string method = {};  // quant_method
  std::string reason = {};  // why such weights are not read; empty if they are
  // Set where they are not read since a tool has laid codes in the order of a kernel: what that is.
  std::string kernel_order = {};
  DType codes = DType::kF8E4M3;
  int64_t code_bits = 0;  // that a stored code has
  QuantSpec quant = {};
  bool has_module_schemes = false;  // modules have several; this is one of the routed experts'
  bool leaves_out = false;  // rules say that the modules stay as they are; there are no tensors
  // Those that the method always has, codes first. A matrix may have the tensor of a plane under
  // any name of docs/quantisation.md; this is the method's own or the usual one.
  std::vector<MethodTensor> tensors = {};
};

// All values of quant_method that are read, each once.
CONCLAVE_API std::vector<std::string> checkpoint_methods();

// The tensors for a matrix [rows, cols] of this name, such as "w1.weight", or "experts.w1" for
// stacks, whose axis of experts is left out. `config` is the text of a quantization_config. With
// the full names of modules, such as "model.layers.0.mlp.experts.0.up_proj", rules for modules are
// followed: it is the layout of these, and has a reason where they differ. Throws
// Error(kJson...) for what is no JSON, and Error(kJsonType, kConfigValue, kConfigMissingKey) for
// values that no such method writes.
CONCLAVE_API MethodLayout method_layout(const std::string& config, std::string_view matrix,
                                        int64_t rows, int64_t cols,
                                        std::span<const std::string> modules = {});

// The modules that a quantization_config leaves as they are, as it names them: by names, or by
// patterns, of which expressions begin with "re:". Keys of every method count, whatever
// quant_method says. Throws Error(kJson...) for what is no JSON, Error(kJsonType) for what is no
// list of names.
CONCLAVE_API std::vector<std::string> kept_modules(const std::string& config);

// The form in which a method shall store a matrix.
struct MethodForm {
  std::string method = {};  // quant_method
  // Which of the method's own ways, in its words: "pack-quantized" of "compressed-tensors", "gemv"
  // of "awq", "nested" of "bitsandbytes". Empty: the method has one, or its usual one.
  std::string format = {};
  DType codes = DType::kF8E4M3;
  int64_t code_bits = 0;  // that are stored of each code; 0: all
  QuantSpec quant = {};
  DType scale_dtype = DType::kF32;
};

// The same of a form that tools offer; its method must not be empty.
CONCLAVE_API MethodForm method_form(const WeightForm& form);

// The planes of a matrix [rows, cols] as `Quantiser` makes them.
struct MatrixPlanes {
  std::span<const std::byte> codes = {};
  std::span<const std::byte> scales = {};  // have the form's type, which MethodWriter::encode sets
  DType scale_dtype = DType::kF32;
  std::span<const std::byte> zeros = {};  // float32; without any, codes are symmetric
  // The group of each column, where the form has an order; empty: neighbours are a group.
  std::span<const int32_t> order = {};
  float matrix_scale = 1;
};

// A tensor to be written.
struct WrittenTensor {
  std::string name;
  WeightPlane plane = WeightPlane::kWeights;
  DType dtype = DType::kU8;
  std::vector<int64_t> shape = {};
  uint64_t bytes = 0;
  bool is_plane = false;  // has the bytes of its plane; others are made by MethodWriter::encode
};

// Stores matrices of codes as a method does. Immutable, for any threads.
class CONCLAVE_API MethodWriter {
 public:
  // The values of quant_method that are written.
  static std::vector<std::string> methods();
  // Throws Error(kUnsupported) for a form that the method does not have.
  explicit MethodWriter(MethodForm form);
  MethodWriter(MethodWriter&&) noexcept;
  ~MethodWriter();

  const MethodForm& form() const;
  // The text of the quantization_config. `kept` names modules without codes, in the method's own
  // way: whole names, or "re:" and a pattern.
  std::string configuration(const std::vector<std::string>& kept) const;
  // Beside config.json the same may stand in this file, for older loaders; empty: nowhere else.
  std::string_view file() const;
  // In config.json the same stands under this key too, where the method's own loader looks for it;
  // empty: only as quantization_config.
  std::string_view own_key() const;

  // Rows and columns of a matrix are multiples of these, so that codes fill words.
  int64_t whole_rows() const;
  int64_t whole_cols() const;
  // A matrix_scale as readers get it back, which may be rounded otherwise.
  float as_read(float matrix_scale) const;

  // The tensors of a matrix [rows, cols], its codes first. Names and stacks are as in
  // method_layout. Throws Error(kUnsupported) naming the matrix for other sizes.
  std::vector<WrittenTensor> tensors(std::string_view matrix, int64_t rows, int64_t cols) const;
  // The bytes of one of them that is no plane.
  std::vector<std::byte> encode(const WrittenTensor& tensor, int64_t rows, int64_t cols,
                                const MatrixPlanes& planes) const;

 private:
  struct Impl;
  std::unique_ptr<const Impl> impl_;
};

}  // namespace conclave::inline v0
