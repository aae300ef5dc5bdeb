// Views of arrays from other libraries, without a copy. A refusal names the argument, with what was
// expected and what was found.
#pragma once

#include "binding.h"

#include "conclave/tensor.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace conclave::python {

// The device of an array: "cpu", or CUDA device `ordinal`.
struct ArrayDevice {
  bool is_cuda = false;
  int32_t ordinal = 0;
  friend bool operator==(const ArrayDevice&, const ArrayDevice&) = default;
};
std::string to_string(const ArrayDevice& device);
// Parses "cpu" and "cuda:1", as Context::device() spells them.
ArrayDevice parse_array_device(std::string_view name);

// Holds what an argument refers to: its memory stays valid while this lives, whatever happens to
// the Python object meanwhile. Created and destroyed with the GIL held.
class Array {
 public:
  // Accepts anything that supports DLPack, PyTorch's tensors in particular, or else the buffer
  // protocol. `stream` is where the memory will be used, for producers with work under way; 0 is
  // none. Throws Error naming `name`: kDType if it is not an array.
  Array(nb::handle object, const char* name, uintptr_t stream = 0);

  const char* name() const noexcept { return name_; }
  const void* data() const noexcept { return data_; }
  DType dtype() const noexcept { return dtype_; }
  const ArrayDevice& device() const noexcept { return device_; }
  bool is_read_only() const noexcept { return read_only_; }
  int rank() const noexcept { return static_cast<int>(shape_.size()); }
  const std::vector<int64_t>& shape() const noexcept { return shape_; }
  const std::vector<int64_t>& strides() const noexcept { return strides_; }  // elements
  std::string shape_text() const;

  // Throws Error(kDevice) if the array lies on another device.
  void require_device(const ArrayDevice& expected) const;
  // The array has rank 2 with dense rows, or rank 1 and is dense. `shape` is for the error: "[T,
  // 64]".
  ConstTensorView matrix(const char* shape) const;
  ConstTensorView vector(const char* shape) const;
  // The same for arrays that are written: read-only arrays and rows that share memory are refused.
  TensorView writable_matrix(const char* shape) const;
  TensorView writable_vector(const char* shape) const;

 private:
  bool take_torch(nb::handle object);
  void refuse_negated(nb::handle object) const;
  bool take_dlpack(nb::handle object, uintptr_t stream);
  bool take_relabelled(nb::handle object, uintptr_t stream);
  bool take_buffer(nb::handle object);
  void take_capsule(const nb::object& capsule);
  void require_writable() const;

  const char* name_;
  const void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  ArrayDevice device_;
  bool read_only_ = false;
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
  // Keeps the memory alive: a managed tensor or a buffer, and for torch also the tensor's storage.
  nb::object storage_;
  std::unique_ptr<void, void (*)(void*)> keeper_{nullptr, nullptr};
};

// Returns nothing for None.
std::optional<Array> optional_array(nb::handle object, const char* name, uintptr_t stream = 0);

// Accepts "float32", "torch.bfloat16", numpy.dtype and "F8_E4M3"; Error(kDType) for others.
DType dtype_from_python(nb::handle object, const char* name);
// Returns "bfloat16", as numpy, torch and config.json spell it.
std::string_view dtype_to_python(DType dtype);

}  // namespace conclave::python
