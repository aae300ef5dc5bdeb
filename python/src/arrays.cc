#include "arrays.h"

#include "dlpack.h"
#include "frameworks.h"

#include "conclave/error.h"

#include <array>
#include <memory>
#include <utility>

namespace conclave::python {
namespace {

struct TypeRow {
  DType dtype;
  uint8_t code;
  uint8_t bits;
  std::string_view name;
};

constexpr std::array kTypes = {
    TypeRow{DType::kBool, dlpack::kBool, 8, "bool"},
    TypeRow{DType::kU8, dlpack::kUInt, 8, "uint8"},
    TypeRow{DType::kI8, dlpack::kInt, 8, "int8"},
    TypeRow{DType::kU16, dlpack::kUInt, 16, "uint16"},
    TypeRow{DType::kI16, dlpack::kInt, 16, "int16"},
    TypeRow{DType::kU32, dlpack::kUInt, 32, "uint32"},
    TypeRow{DType::kI32, dlpack::kInt, 32, "int32"},
    TypeRow{DType::kU64, dlpack::kUInt, 64, "uint64"},
    TypeRow{DType::kI64, dlpack::kInt, 64, "int64"},
    TypeRow{DType::kF16, dlpack::kFloat, 16, "float16"},
    TypeRow{DType::kBF16, dlpack::kBfloat, 16, "bfloat16"},
    TypeRow{DType::kF32, dlpack::kFloat, 32, "float32"},
    TypeRow{DType::kF64, dlpack::kFloat, 64, "float64"},
    TypeRow{DType::kF8E4M3, dlpack::kFloat8E4m3fn, 8, "float8_e4m3fn"},
    TypeRow{DType::kF8E5M2, dlpack::kFloat8E5m2, 8, "float8_e5m2"},
    TypeRow{DType::kF8E8M0, dlpack::kFloat8E8m0fnu, 8, "float8_e8m0fnu"},
    TypeRow{DType::kF8E4M3Fnuz, dlpack::kFloat8E4m3fnuz, 8, "float8_e4m3fnuz"},
    TypeRow{DType::kF8E5M2Fnuz, dlpack::kFloat8E5m2fnuz, 8, "float8_e5m2fnuz"},
};

[[noreturn]] void refuse(ErrorCode code, const char* name, std::string what, std::string expected,
                         std::string found, std::string hint = {}) {
  throw Error(code, {.what = std::move(what),
                     .tensor = name,
                     .expected = std::move(expected),
                     .found = std::move(found),
                     .hint = std::move(hint)});
}

DType dtype_of(const dlpack::DataType& type, const char* name) {
  for (const TypeRow& row : kTypes) {
    if (row.code == type.code && row.bits == type.bits && type.lanes == 1) return row.dtype;
  }
  refuse(ErrorCode::kDType, name, "an array has an unknown type",
         "float32, float16, bfloat16, an integer or a float8 type",
         "DLPack code " + std::to_string(type.code) + ", " + std::to_string(type.bits) + " bits");
}

ArrayDevice device_of(const dlpack::Device& device, const char* name) {
  switch (device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      return {};
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      return {.is_cuda = true, .ordinal = device.id};
    default:
      refuse(ErrorCode::kDevice, name, "an array lies on an unknown device", "cpu or cuda",
             "DLPack device " + std::to_string(device.type));
  }
}

const TypeRow* row_named(std::string_view name) {
  constexpr std::string_view kTorch = "torch.";
  if (name.starts_with(kTorch)) name.remove_prefix(kTorch.size());
  for (const TypeRow& row : kTypes) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

// The name of an array's dtype attribute: "bfloat16" for ml_dtypes, "torch.float8_e4m3fn".
std::string dtype_name(nb::handle dtype) {
  if (nb::hasattr(dtype, "name")) return nb::cast<std::string>(nb::str(dtype.attr("name")));
  return nb::cast<std::string>(nb::str(dtype));
}

std::vector<int64_t> dense_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  return strides;
}

std::string list_text(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) {
    text += (i > 0 ? ", " : "") + std::to_string(values[i]);
  }
  return text + "]";
}

bool is_empty(const std::vector<int64_t>& shape) {
  for (const int64_t size : shape) {
    if (size == 0) return true;
  }
  return false;
}

// Covers the struct module's letters for numpy's own types; its other types have no buffer.
std::optional<dlpack::DataType> type_of_format(const char* format, int64_t bytes) {
  std::string_view letters = format != nullptr ? format : "B";
  while (!letters.empty() && std::string_view("@=<").find(letters[0]) != std::string_view::npos) {
    letters.remove_prefix(1);
  }
  if (letters.size() != 1) return std::nullopt;
  const auto bits = static_cast<uint8_t>(8 * bytes);
  const auto in = [&](std::string_view set) { return set.find(letters[0]) != set.npos; };
  if (in("bhilqn")) return dlpack::DataType{dlpack::kInt, bits, 1};
  if (in("BHILQNc")) return dlpack::DataType{dlpack::kUInt, bits, 1};
  if (in("efd")) return dlpack::DataType{dlpack::kFloat, bits, 1};
  if (in("?")) return dlpack::DataType{dlpack::kBool, bits, 1};
  return std::nullopt;
}

template <class Managed>
void release(void* kept) {
  auto* self = static_cast<Managed*>(kept);
  if (self->deleter != nullptr) self->deleter(self);
}

// An address for empty views: null would mean that an argument was not given.
const void* somewhere() {
  static const int64_t kNothing = 0;
  return &kNothing;
}

}  // namespace

std::string to_string(const ArrayDevice& device) {
  return device.is_cuda ? "cuda:" + std::to_string(device.ordinal) : "cpu";
}

ArrayDevice parse_array_device(std::string_view name) {
  constexpr std::string_view kCuda = "cuda:";
  if (!name.starts_with(kCuda)) return {};
  return {.is_cuda = true, .ordinal = std::stoi(std::string(name.substr(kCuda.size())))};
}

Array::Array(nb::handle object, const char* name, uintptr_t stream) : name_(name) {
  if (!take_torch(object) && !take_dlpack(object, stream) && !take_relabelled(object, stream) &&
      !take_buffer(object)) {
    const std::string found = nb::cast<std::string>(nb::str(nb::type_name(object.type())));
    refuse(ErrorCode::kDType, name, "an argument is no array",
           "numpy, torch, or anything with __dlpack__", found);
  }
  if (data_ == nullptr) {
    if (!is_empty(shape_)) {
      refuse(
          ErrorCode::kNullPointer, name_, "an array has no memory", "memory that can be read",
          "a null address",
          "the storage was freed; or it is a meta or distributed tensor: hand over the local one");
    }
    data_ = somewhere();
  }
}

// Uses PyTorch's own function: it also accepts tensors that require gradients and is ten times
// faster than Tensor.__dlpack__, whose stream handling is not needed because work goes to the
// current stream.
bool Array::take_torch(nb::handle object) {
  const Torch* torch = loaded_torch();
  if (torch == nullptr || !nb::isinstance(object, torch->tensor_type)) return false;
  try {
    take_capsule(torch->to_dlpack(object));
    refuse_negated(object);
    // The capsule keeps the tensor, but another thread may meanwhile give the tensor other memory.
    storage_ = object.attr("untyped_storage")();
    return true;
  } catch (nb::python_error& error) {
    // Types that this version of PyTorch does not export are tried as bytes.
    if (take_relabelled(object, 0)) return true;
    const std::string reason = error.what();
    refuse(ErrorCode::kDevice, name_, "a tensor cannot be handed over",
           "a strided tensor in memory", reason);
  }
}

// PyTorch hands over the imaginary part of a conjugate as it lies in memory, where each number has
// the other sign. Elements of such rows lie apart, so that usual tensors are not asked.
void Array::refuse_negated(nb::handle object) const {
  if (strides_.empty() || strides_.back() == 1 || !nb::cast<bool>(object.attr("is_neg")())) return;
  refuse(ErrorCode::kStride, name_, "a tensor stands for the negative of its memory",
         "memory with the values themselves", "Tensor.is_neg()", "pass tensor.resolve_neg()");
}

bool Array::take_dlpack(nb::handle object, uintptr_t stream) {
  if (!nb::hasattr(object, "__dlpack__")) return false;
  nb::object wanted_stream = nb::none();
  if (nb::hasattr(object, "__dlpack_device__")) {
    const auto device = nb::cast<nb::tuple>(object.attr("__dlpack_device__")());
    const bool is_cuda = nb::cast<int>(nb::int_(device[0])) == dlpack::kCuda;
    if (is_cuda)
      wanted_stream = stream != 0 ? nb::object(nb::int_(stream)) : nb::object(nb::int_(1));
  }
  const nb::object method = object.attr("__dlpack__");
  try {
    try {
      const nb::tuple newest = nb::make_tuple(1, 1);
      take_capsule(method(nb::arg("stream") = wanted_stream, nb::arg("max_version") = newest));
    } catch (nb::python_error& error) {
      if (!error.matches(PyExc_TypeError)) throw;
      take_capsule(method(nb::arg("stream") = wanted_stream));
    }
    return true;
  } catch (nb::python_error& error) {
    // numpy before 2.1 exports neither read-only arrays nor types of others, so buffers are tried
    // next.
    if (error.matches(PyExc_BufferError) || error.matches(PyExc_TypeError)) return false;
    throw;
  }
}

// Takes types without a letter of their own as unsigned integers of the same size.
bool Array::take_relabelled(nb::handle object, uintptr_t stream) {
  if (!nb::hasattr(object, "dtype") || !nb::hasattr(object, "view")) return false;
  const TypeRow* row = row_named(dtype_name(object.attr("dtype")));
  if (row == nullptr || row->code <= dlpack::kFloat || row->code == dlpack::kBool) return false;
  const char* letters = row->bits == 8 ? "uint8" : "uint16";
  const Torch* torch = loaded_torch();
  const bool is_torch = torch != nullptr && nb::isinstance(object, torch->tensor_type);
  nb::object bytes;
  try {
    bytes = is_torch ? object.attr("detach")().attr("view")(torch->module.attr(letters))
                     : object.attr("view")(letters);
    if (is_torch) {
      take_capsule(torch->to_dlpack(bytes));
      storage_ = bytes.attr("untyped_storage")();
    } else if (!take_dlpack(bytes, stream) && !take_buffer(bytes)) {
      return false;
    }
  } catch (nb::python_error&) {
    return false;
  }
  dtype_ = row->dtype;
  return true;
}

bool Array::take_buffer(nb::handle object) {
  if (!PyObject_CheckBuffer(object.ptr())) return false;
  auto buffer = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(object.ptr(), buffer.get(), PyBUF_FULL_RO) != 0) throw nb::python_error();
  const Py_buffer& view = *buffer;
  keeper_ = {buffer.release(), [](void* kept) {
               const std::unique_ptr<Py_buffer> owned(static_cast<Py_buffer*>(kept));
               PyBuffer_Release(owned.get());
             }};
  const auto type = type_of_format(view.format, view.itemsize);
  if (!type) {
    refuse(ErrorCode::kDType, name_, "an array has an unknown type", "numbers or bool",
           std::string("buffer format ") + view.format);
  }
  dtype_ = dtype_of(*type, name_);
  data_ = view.buf;
  read_only_ = view.readonly != 0;
  shape_.assign(view.shape, view.shape + view.ndim);
  strides_ = dense_strides(shape_);
  for (int axis = 0; view.strides != nullptr && axis < view.ndim; ++axis) {
    if (view.strides[axis] % view.itemsize != 0) {
      refuse(ErrorCode::kStride, name_, "elements of an array lie apart by parts of an element",
             "strides of whole elements", std::to_string(view.strides[axis]) + " bytes");
    }
    strides_[static_cast<size_t>(axis)] = view.strides[axis] / view.itemsize;
  }
  return true;
}

void Array::take_capsule(const nb::object& capsule) {
  const dlpack::Tensor* tensor = nullptr;
  if (void* old = PyCapsule_GetPointer(capsule.ptr(), "dltensor")) {
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");
    keeper_ = {old, release<dlpack::Managed>};
    tensor = &static_cast<dlpack::Managed*>(old)->tensor;
  } else {
    PyErr_Clear();
    void* versioned = PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned");
    if (versioned == nullptr) throw nb::python_error();
    PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
    keeper_ = {versioned, release<dlpack::ManagedVersioned>};
    const auto* self = static_cast<dlpack::ManagedVersioned*>(versioned);
    read_only_ = (self->flags & dlpack::kReadOnly) != 0;
    tensor = &self->tensor;
  }
  dtype_ = dtype_of(tensor->dtype, name_);
  device_ = device_of(tensor->device, name_);
  if (tensor->data != nullptr) {
    data_ = static_cast<const std::byte*>(tensor->data) + tensor->byte_offset;
  }
  shape_.assign(tensor->shape, tensor->shape + tensor->ndim);
  strides_ = tensor->strides != nullptr
                 ? std::vector<int64_t>(tensor->strides, tensor->strides + tensor->ndim)
                 : dense_strides(shape_);
}

std::string Array::shape_text() const { return list_text(shape_); }

void Array::require_device(const ArrayDevice& expected) const {
  if (device_ == expected) return;
  refuse(ErrorCode::kDevice, name_, "an array lies on the wrong device", to_string(expected),
         to_string(device_));
}

ConstTensorView Array::matrix(const char* shape) const {
  if (rank() != 2) {
    refuse(ErrorCode::kShape, name_, "an argument has the wrong shape", shape, shape_text());
  }
  const int64_t rows = shape_[0];
  const int64_t cols = shape_[1];
  if (cols > 1 && strides_[1] != 1 && rows > 0) {
    refuse(ErrorCode::kStride, name_, "the elements of a row lie apart",
           "a stride of 1 along the last axis", list_text(strides_), "pass a contiguous copy");
  }
  if (rows > 1 && cols > 0 && strides_[0] < cols) {
    refuse(ErrorCode::kStride, name_, "rows of an argument overlap each other",
           "a row stride of at least " + std::to_string(cols), list_text(strides_),
           "pass a contiguous copy");
  }
  const bool is_dense = rows <= 1 || strides_[0] == cols;
  return {.data = data_,
          .dtype = dtype_,
          .shape = {rows, cols},
          .row_stride = is_dense ? 0 : strides_[0]};
}

ConstTensorView Array::vector(const char* shape) const {
  if (rank() != 1) {
    refuse(ErrorCode::kShape, name_, "an argument has the wrong shape", shape, shape_text());
  }
  if (shape_[0] > 1 && strides_[0] != 1) {
    refuse(ErrorCode::kStride, name_, "elements of an argument lie apart", "a stride of 1",
           list_text(strides_), "pass a contiguous copy");
  }
  return {.data = data_, .dtype = dtype_, .shape = {shape_[0]}};
}

void Array::require_writable() const {
  if (!read_only_) return;
  refuse(ErrorCode::kInvalidArgument, name_, "an array that is written cannot be read-only",
         "writable memory", "a read-only array");
}

TensorView Array::writable_matrix(const char* shape) const {
  require_writable();
  const ConstTensorView view = matrix(shape);
  return {const_cast<void*>(view.data), view.dtype, view.shape, view.row_stride};
}

TensorView Array::writable_vector(const char* shape) const {
  require_writable();
  const ConstTensorView view = vector(shape);
  return {const_cast<void*>(view.data), view.dtype, view.shape, view.row_stride};
}

std::optional<Array> optional_array(nb::handle object, const char* name, uintptr_t stream) {
  if (object.is_none()) return std::nullopt;
  return std::optional<Array>(std::in_place, object, name, stream);
}

DType dtype_from_python(nb::handle object, const char* name) {
  const std::string text = dtype_name(object);
  if (const TypeRow* row = row_named(text)) return row->dtype;
  if (const auto parsed = parse_dtype(text)) return *parsed;
  refuse(ErrorCode::kDType, name, "unknown type", "float32, float16, bfloat16 or float8_e4m3fn",
         text);
}

std::string_view dtype_to_python(DType dtype) {
  for (const TypeRow& row : kTypes) {
    if (row.dtype == dtype) return row.name;
  }
  // No array has elements of less than a byte.
  using Narrow = std::pair<DType, std::string_view>;
  for (const auto& [narrow, name] :
       {Narrow{DType::kI4, "int4"}, Narrow{DType::kF4, "float4_e2m1fn_x2"},
        Narrow{DType::kNF4, "nf4"}, Narrow{DType::kBnbFP4, "bnb_fp4"}, Narrow{DType::kIQ4, "iq4"},
        Narrow{DType::kU4, "uint4"}, Narrow{DType::kI6, "int6"}, Narrow{DType::kU2, "uint2"}}) {
    if (narrow == dtype) return name;
  }
  return to_string(dtype);
}

}  // namespace conclave::python
