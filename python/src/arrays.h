// Arrays of other libraries as views of ours, without a copy. Whatever is refused is named by its
// argument, with what was expected and what was found.
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

// Where an array lies: "cpu", or CUDA device `ordinal`.
struct ArrayDevice {
  bool is_cuda = false;
  int32_t ordinal = 0;
  friend bool operator==(const ArrayDevice&, const ArrayDevice&) = default;
};
std::string to_string(const ArrayDevice& device);
// From "cpu" and "cuda:1", as Context::device() has them.
ArrayDevice parse_array_device(std::string_view name);

// Holds what an argument refers to: memory cannot go away while it lives, whatever happens to the
// Python object meanwhile. Made and destroyed with the GIL held.
class Array {
 public:
  // From anything that speaks DLPack, PyTorch's tensors in the first place, or else the buffer
  // protocol. `stream`: where the memory will be used, for producers with work under way; 0 none.
  // Throws Error naming `name`: kDType for what is no array.
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

  // Throws Error(kDevice) where the array lies elsewhere.
  void require_device(const ArrayDevice& expected) const;
  // Rank 2 with dense rows, or rank 1 and dense. `shape` is for the error: "[T, 64]".
  ConstTensorView matrix(const char* shape) const;
  ConstTensorView vector(const char* shape) const;
  // The same for what is written: refuses read-only arrays and rows that share memory.
  TensorView writable_matrix(const char* shape) const;
  TensorView writable_vector(const char* shape) const;

 private:
  bool take_torch(nb::handle object);
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
  // What keeps the memory: a managed tensor, or a buffer; and of torch the tensor's storage.
  nb::object storage_;
  std::unique_ptr<void, void (*)(void*)> keeper_{nullptr, nullptr};
};

// None: nothing.
std::optional<Array> optional_array(nb::handle object, const char* name, uintptr_t stream = 0);

// "float32", "torch.bfloat16", numpy.dtype, "F8_E4M3": Error(kDType) for others.
DType dtype_from_python(nb::handle object, const char* name);
// "bfloat16", as numpy, torch and config.json call it.
std::string_view dtype_to_python(DType dtype);

}  // namespace conclave::python
