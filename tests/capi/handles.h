// Handles of the C interface that end themselves, and the few calls that every test needs.
#pragma once

#include "conclave/c.h"
#include "conclave/layer.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

namespace conclave::testing {

struct EndHandle {
  void operator()(conclave_context* handle) const { conclave_context_destroy(handle); }
  void operator()(conclave_communicator* handle) const { conclave_communicator_destroy(handle); }
  void operator()(conclave_spec* handle) const { conclave_spec_destroy(handle); }
  void operator()(conclave_source* handle) const { conclave_source_destroy(handle); }
  void operator()(conclave_feed* handle) const { conclave_feed_destroy(handle); }
  void operator()(conclave_checkpoint* handle) const { conclave_checkpoint_destroy(handle); }
  void operator()(conclave_conversion* handle) const { conclave_conversion_destroy(handle); }
  void operator()(conclave_layer* handle) const { conclave_layer_destroy(handle); }
  void operator()(conclave_workspace* handle) const { conclave_workspace_destroy(handle); }
  void operator()(conclave_router* handle) const { conclave_router_destroy(handle); }
  void operator()(conclave_lora_checkpoint* handle) const {
    conclave_lora_checkpoint_destroy(handle);
  }
  void operator()(conclave_slots* handle) const { conclave_slots_destroy(handle); }
  void operator()(conclave_migration* handle) const { conclave_migration_destroy(handle); }
  void operator()(conclave_balancer* handle) const { conclave_balancer_destroy(handle); }
  void operator()(conclave_refit* handle) const { conclave_refit_destroy(handle); }
  void operator()(conclave_recorder* handle) const { conclave_recorder_destroy(handle); }
  void operator()(conclave_replay* handle) const { conclave_replay_destroy(handle); }
  void operator()(conclave_shared_writer* handle) const { conclave_shared_writer_destroy(handle); }
};
template <class T>
using Handle = std::unique_ptr<T, EndHandle>;

// Calls function(arguments..., &handle), which has to succeed.
template <class T, class... Parameters, class... Arguments>
Handle<T> make(conclave_status (*function)(Parameters...) noexcept, Arguments... arguments) {
  T* handle = nullptr;
  EXPECT_EQ(function(arguments..., &handle), CONCLAVE_OK) << conclave_last_error_message();
  EXPECT_NE(handle, nullptr);
  return Handle<T>(handle);
}

template <class... Parameters, class... Arguments>
std::string text_by(conclave_status (*function)(Parameters...) noexcept, Arguments... arguments) {
  char* text = nullptr;
  EXPECT_EQ(function(arguments..., &text), CONCLAVE_OK) << conclave_last_error_message();
  std::string copy = text == nullptr ? "" : text;
  conclave_text_free(text);
  return copy;
}

template <class Struct>
Struct sized() {
  Struct value = {};
  value.struct_size = sizeof(Struct);
  return value;
}

inline conclave_error last_error() {
  auto error = sized<conclave_error>();
  EXPECT_EQ(conclave_last_error(&error), CONCLAVE_OK);
  return error;
}

// A call that has to fail with this status, and whose error names this.
inline void expect_error(conclave_status found, conclave_status status, const std::string& names) {
  EXPECT_EQ(found, status) << conclave_last_error_message();
  EXPECT_EQ(last_error().status, status);
  EXPECT_NE(std::string(last_error().message).find(names), std::string::npos)
      << "'" << names << "' is not in: " << last_error().message;
}

inline conclave_tensor tensor_of(const ConstTensorView& view) {
  auto tensor = sized<conclave_tensor>();
  tensor.data = const_cast<void*>(view.data);
  tensor.dtype = static_cast<int32_t>(view.dtype) + 1;
  tensor.rank = view.shape.rank();
  for (int axis = 0; axis < view.shape.rank(); ++axis) tensor.shape[axis] = view.shape[axis];
  tensor.row_stride = view.row_stride;
  return tensor;
}

inline Handle<conclave_context> make_context() {
  auto options = sized<conclave_context_options>();
  options.num_threads = 2;
  return make<conclave_context>(&conclave_context_create, &options);
}

inline constexpr const char* kModel = "testdata/qwen3-moe-tiny";

inline Handle<conclave_checkpoint> open_model(const char* path = kModel) {
  return make<conclave_checkpoint>(&conclave_checkpoint_open, path, nullptr);
}

}  // namespace conclave::testing
