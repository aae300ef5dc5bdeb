#include "call_views.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <limits>
#include <string>
#include <vector>

namespace conclave::python {
namespace {

[[noreturn]] void refuse_count(const CallArgument& argument, const std::string& found) {
  throw Error(ErrorCode::kDType, {.what = "an argument has the wrong type",
                                  .tensor = argument.name,
                                  .expected = "integers, in a list or an array of the CPU",
                                  .found = found});
}

// Integers of numpy and torch are taken as those of Python are; what 64 bits do not hold is out of
// range for every rank.
int64_t count_from(nb::handle item, const CallArgument& argument) {
  const bool is_flag = nb::isinstance<nb::bool_>(item);
  const nb::object number =
      is_flag ? nb::object() : nb::steal<nb::object>(PyNumber_Index(item.ptr()));
  if (!number.is_valid()) {
    PyErr_Clear();
    refuse_count(argument, nb::cast<std::string>(nb::str(item.type())));
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow == 0) return value;
  return overflow < 0 ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
}

template <class Number>
std::vector<int64_t> counts_in(const ConstTensorView& view) {
  const auto* const first = static_cast<const Number*>(view.data);
  return {first, first + view.shape[0]};
}

}  // namespace

const Array& CallViews::keep(nb::handle object, const CallArgument& argument) {
  const Array& array = kept_.emplace_back(object, argument.name, stream_);
  array.require_device(device_);
  return array;
}

// A limit of 0 is none to the library, so that from Python it is refused as out of range.
int64_t CallViews::limit_of(nb::handle object, const CallArgument& argument) {
  int64_t value = 0;
  const bool is_integer = nb::isinstance<nb::int_>(object) && !nb::isinstance<nb::bool_>(object);
  if (!is_integer || !nb::try_cast<int64_t>(object, value)) {
    throw Error(ErrorCode::kDType, {.what = "an argument has the wrong type",
                                    .tensor = argument.name,
                                    .expected = "an integer of 63 bits, or None",
                                    .found = nb::cast<std::string>(nb::str(object.type()))});
  }
  if (value != 0) return value;
  throw Error(ErrorCode::kInvalidArgument, {.what = "a limit of the call is out of range",
                                            .tensor = argument.name,
                                            .found = "0",
                                            .limit = "1 or more, or None"});
}

// Accepts a number, or int64 [1] on the layer's device.
void CallViews::take_count(nb::handle object, const CallArgument& argument) {
  if (nb::isinstance<nb::int_>(object)) {
    if (!nb::try_cast<int64_t>(object, num_tokens_)) {
      throw Error(ErrorCode::kInvalidArgument, {.what = "a number of tokens is out of range",
                                                .tensor = argument.name,
                                                .expected = "an integer of 63 bits",
                                                .found = nb::cast<std::string>(nb::str(object))});
    }
    if (device_.is_cuda) {
      throw Error(ErrorCode::kDevice, {.what = "a layer on CUDA reads this number on the device",
                                       .tensor = argument.name,
                                       .expected = "an int64 tensor of one element there",
                                       .found = "a Python integer"});
    }
    args.num_tokens = &num_tokens_;
    return;
  }
  const ConstTensorView view = keep(object, argument).vector(argument.shape);
  if (view.dtype != DType::kI64 || view.shape[0] != 1) {
    throw Error(ErrorCode::kDType,
                {.what = "an argument has the wrong type",
                 .tensor = argument.name,
                 .expected = std::string("int64 ") + argument.shape,
                 .found = std::string(dtype_to_python(view.dtype)) + " " + view.shape.to_string()});
  }
  args.num_tokens = static_cast<const int64_t*>(view.data);
}

// On a GPU too they lie in host memory: a call that read them there would wait for the device.
void CallViews::take_rank_counts(nb::handle object, const CallArgument& argument) {
  if (nb::isinstance<nb::list>(object) || nb::isinstance<nb::tuple>(object)) {
    for (const nb::handle item : object) rank_tokens_.push_back(count_from(item, argument));
  } else {
    const Array& array = kept_.emplace_back(object, argument.name, stream_);
    array.require_device({});
    const ConstTensorView view = array.vector(argument.shape);
    if (view.dtype == DType::kI64) {
      rank_tokens_ = counts_in<int64_t>(view);
    } else if (view.dtype == DType::kI32) {
      rank_tokens_ = counts_in<int32_t>(view);
    } else {
      refuse_count(argument, std::string(dtype_to_python(view.dtype)));
    }
  }
  // To the library an empty list is none.
  if (rank_tokens_.empty()) {
    throw Error(ErrorCode::kShape, {.what = "an argument has the wrong shape",
                                    .tensor = argument.name,
                                    .expected = argument.shape,
                                    .found = "[0]"});
  }
  args.rank_tokens = rank_tokens_;
}

// The Python side passes integers of 31 bits only.
void CallViews::take_adapter(nb::handle object, const CallArgument& argument) {
  if (nb::isinstance<nb::int_>(object)) {
    args.adapter = nb::cast<int32_t>(object);
    return;
  }
  args.*argument.read = keep(object, argument).vector(argument.shape);
}

void CallViews::take(nb::handle object, const CallArgument& argument) {
  switch (argument.use) {
    case ArgumentUse::kRead: {
      const Array& array = keep(object, argument);
      args.*argument.read =
          argument.is_vector() ? array.vector(argument.shape) : array.matrix(argument.shape);
      return;
    }
    case ArgumentUse::kWritten:
      args.*argument.written = keep(object, argument).writable_matrix(argument.shape);
      return;
    case ArgumentUse::kFlags: {
      // Those of all tokens may lie in host memory: a call on CUDA reads them before it returns.
      const Array& array = kept_.emplace_back(object, argument.name, stream_);
      if (array.rank() != 1 || array.device().is_cuda) array.require_device(device_);
      args.*argument.read =
          array.rank() == 1 ? array.vector("[num_experts]") : array.matrix(argument.shape);
      return;
    }
    case ArgumentUse::kAdapter:
      return take_adapter(object, argument);
    case ArgumentUse::kNumber:
      args.*argument.number = limit_of(object, argument);
      return;
    case ArgumentUse::kCount:
      return take_count(object, argument);
    case ArgumentUse::kCounts:
      return take_rank_counts(object, argument);
    case ArgumentUse::kScratch: {
      const TensorView view = keep(object, argument).writable_vector(argument.shape);
      const auto bytes = static_cast<size_t>(view.shape[0] * byte_size(view.dtype));
      workspace = {static_cast<std::byte*>(view.data), bytes};
      return;
    }
  }
}

CallViews::CallViews(const CallObjects& call, const ArrayDevice& device, uintptr_t stream)
    : device_(device), stream_(stream) {
  kept_.reserve(call.size());
  for (size_t i = 0; i < call.size(); ++i) {
    if (!call[i].is_none()) take(call[i], kCallArguments[i]);
  }
  if (device_.is_cuda) args.stream = to_stream(reinterpret_cast<CUstream_st*>(stream));
}

}  // namespace conclave::python
