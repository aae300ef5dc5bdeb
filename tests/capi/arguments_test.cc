// Every function that returns a status, with each pointer that it needs left out.
#include "capi/handles.h"

#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>

namespace conclave {
namespace {

using testing::Handle;
using testing::make;
using testing::sized;

// Valid objects, so that one pointer at a time is what is wrong.
struct Valid {
  int64_t number = 0;
  Handle<conclave_context> context = testing::make_context();
  Handle<conclave_checkpoint> checkpoint = testing::open_model();
  Handle<conclave_layer> layer =
      make<conclave_layer>(&conclave_layer_create_from_checkpoint, context.get(), checkpoint.get(),
                           int64_t{0}, nullptr, nullptr);
  Handle<conclave_spec> spec = make<conclave_spec>(&conclave_layer_spec, layer.get());
  Handle<conclave_source> source =
      make<conclave_source>(&conclave_checkpoint_source, checkpoint.get(), int64_t{0});
  Handle<conclave_feed> feed = make<conclave_feed>(&conclave_feed_from_spec, spec.get(),
                                                   "qwen3_moe", &number, size_t{1}, nullptr);
  Handle<conclave_router> router =
      make<conclave_router>(&conclave_router_create, context.get(), spec.get());
  Handle<conclave_communicator> communicator = alone();

  static Handle<conclave_communicator> alone() {
    conclave_communicator* handle = nullptr;
    EXPECT_EQ(conclave_local_group(1, 0, &handle), CONCLAVE_OK);
    return Handle<conclave_communicator>(handle);
  }
};

// Wherever a call would write.
struct Out {
  conclave_context* context = nullptr;
  conclave_communicator* communicator = nullptr;
  conclave_spec* spec = nullptr;
  conclave_source* source = nullptr;
  conclave_feed* feed = nullptr;
  conclave_checkpoint* checkpoint = nullptr;
  conclave_layer* layer = nullptr;
  conclave_workspace* workspace = nullptr;
  conclave_router* router = nullptr;
  char* text = nullptr;
  const char* device = nullptr;

  bool is_untouched() const {
    return context == nullptr && communicator == nullptr && spec == nullptr && source == nullptr &&
           feed == nullptr && checkpoint == nullptr && layer == nullptr && workspace == nullptr &&
           router == nullptr && text == nullptr && device == nullptr;
  }
};

using Call = std::function<conclave_status(Valid&, Out&)>;

#define CALL(function, ...)                              \
  {                                                      \
    #function, [](Valid& v, Out& o) -> conclave_status { \
      (void)v;                                           \
      (void)o;                                           \
      return function(__VA_ARGS__);                      \
    }                                                    \
  }

const std::multimap<std::string, Call>& calls() {
  static const std::multimap<std::string, Call> all = {
      CALL(conclave_get_build, nullptr),
      CALL(conclave_last_error, nullptr),
      CALL(conclave_dtype_bits, CONCLAVE_DTYPE_F32, nullptr),
      CALL(conclave_context_create, nullptr, nullptr),
      CALL(conclave_context_device, nullptr, &o.device),
      CALL(conclave_context_device, v.context.get(), nullptr),
      CALL(conclave_backends_json, nullptr),
      CALL(conclave_transports_json, nullptr),
      CALL(conclave_local_group, 1, 0, nullptr),
      CALL(conclave_connect, nullptr, nullptr, &o.communicator),
      CALL(conclave_connect, "local", nullptr, nullptr),
      CALL(conclave_communicator_from_mpi, nullptr, 0, &o.communicator),
      CALL(conclave_communicator_from_mpi, &o, 0, nullptr),
      CALL(conclave_communicator_from_nccl, nullptr, v.communicator.get(), 0, &o.communicator),
      CALL(conclave_communicator_from_nccl, &o, nullptr, 0, &o.communicator),
      CALL(conclave_communicator_from_nccl, &o, v.communicator.get(), 0, nullptr),
      CALL(conclave_communicator_get_info, v.communicator.get(), nullptr),
      CALL(conclave_communicator_get_info, nullptr, nullptr),
      CALL(conclave_communicator_barrier, nullptr, "phase"),
      CALL(conclave_communicator_all_gather, nullptr, &o, &o, 1, nullptr),
      CALL(conclave_communicator_all_reduce, nullptr, &o, &o, 1, CONCLAVE_DTYPE_F32, nullptr),
      CALL(conclave_communicator_abort, nullptr, nullptr),
      CALL(conclave_communicator_check, nullptr),
      CALL(conclave_survivors, nullptr, 0, &o.communicator, nullptr),
      CALL(conclave_survivors, v.communicator.get(), 0, nullptr, nullptr),
      CALL(conclave_spec_from_json, nullptr, &o.spec),
      CALL(conclave_spec_from_json, "{}", nullptr),
      CALL(conclave_spec_to_json, nullptr, &o.text),
      CALL(conclave_spec_to_json, v.spec.get(), nullptr),
      CALL(conclave_spec_with_rows, nullptr, CONCLAVE_ROWS_PLAIN, &o.spec),
      CALL(conclave_spec_with_rows, v.spec.get(), CONCLAVE_ROWS_PLAIN, nullptr),
      CALL(conclave_spec_get_info, nullptr, nullptr),
      CALL(conclave_spec_get_info, v.spec.get(), nullptr),
      CALL(conclave_source_from_tensors, nullptr, 1, nullptr, &o.source),
      CALL(conclave_source_from_tensors, nullptr, 0, nullptr, nullptr),
      CALL(conclave_feed_from_config, nullptr, &o.feed),
      CALL(conclave_feed_from_config, "{}", nullptr),
      CALL(conclave_feed_from_spec, nullptr, "qwen3_moe", nullptr, 0, nullptr, &o.feed),
      CALL(conclave_feed_from_spec, v.spec.get(), nullptr, nullptr, 0, nullptr, &o.feed),
      CALL(conclave_feed_from_spec, v.spec.get(), "qwen3_moe", nullptr, 1, nullptr, &o.feed),
      CALL(conclave_feed_from_spec, v.spec.get(), "qwen3_moe", &v.number, 1, nullptr, nullptr),
      CALL(conclave_feed_from_gguf, nullptr, 8, &o.feed),
      CALL(conclave_feed_from_gguf, "GGUF", 4, nullptr),
      CALL(conclave_feed_put, nullptr, "name", nullptr, 0, nullptr),
      CALL(conclave_feed_put, v.feed.get(), nullptr, nullptr, 0, nullptr),
      CALL(conclave_feed_put, v.feed.get(), "name", nullptr, 0, nullptr),
      CALL(conclave_feed_put_gguf, nullptr, "name", 0, &v.number, 1, &o, 1, 0, nullptr),
      CALL(conclave_feed_put_gguf, v.feed.get(), nullptr, 0, &v.number, 1, &o, 1, 0, nullptr),
      CALL(conclave_feed_put_gguf, v.feed.get(), "name", 0, nullptr, 1, &o, 1, 0, nullptr),
      CALL(conclave_feed_put_gguf, v.feed.get(), "name", 0, &v.number, 1, nullptr, 1, 0, nullptr),
      CALL(conclave_feed_num_layers, nullptr, nullptr),
      CALL(conclave_feed_num_layers, v.feed.get(), nullptr),
      CALL(conclave_feed_layer_at, nullptr, 0, &v.number),
      CALL(conclave_feed_layer_at, v.feed.get(), 0, nullptr),
      CALL(conclave_feed_is_complete, nullptr, 0, nullptr),
      CALL(conclave_feed_is_complete, v.feed.get(), 0, nullptr),
      CALL(conclave_feed_missing, nullptr, 1, &o.text),
      CALL(conclave_feed_missing, v.feed.get(), 1, nullptr),
      CALL(conclave_feed_spec, nullptr, 0, &o.spec),
      CALL(conclave_feed_spec, v.feed.get(), 0, nullptr),
      CALL(conclave_feed_source, nullptr, 0, &o.source),
      CALL(conclave_feed_source, v.feed.get(), 0, nullptr),
      CALL(conclave_feed_release, nullptr, 0),
      CALL(conclave_checkpoint_open, nullptr, nullptr, &o.checkpoint),
      CALL(conclave_checkpoint_open, testing::kModel, nullptr, nullptr),
      CALL(conclave_checkpoint_get_info, nullptr, nullptr),
      CALL(conclave_checkpoint_get_info, v.checkpoint.get(), nullptr),
      CALL(conclave_checkpoint_get_layer, nullptr, 0, nullptr),
      CALL(conclave_checkpoint_get_layer, v.checkpoint.get(), 0, nullptr),
      CALL(conclave_checkpoint_spec, nullptr, 0, &o.spec),
      CALL(conclave_checkpoint_spec, v.checkpoint.get(), 0, nullptr),
      CALL(conclave_checkpoint_source, nullptr, 0, &o.source),
      CALL(conclave_checkpoint_source, v.checkpoint.get(), 0, nullptr),
      CALL(conclave_layer_create, nullptr, v.spec.get(), v.source.get(), nullptr, nullptr,
           &o.layer),
      CALL(conclave_layer_create, v.context.get(), nullptr, v.source.get(), nullptr, nullptr,
           &o.layer),
      CALL(conclave_layer_create, v.context.get(), v.spec.get(), nullptr, nullptr, nullptr,
           &o.layer),
      CALL(conclave_layer_create, v.context.get(), v.spec.get(), v.source.get(), nullptr, nullptr,
           nullptr),
      CALL(conclave_layer_create_from_checkpoint, nullptr, v.checkpoint.get(), 0, nullptr, nullptr,
           &o.layer),
      CALL(conclave_layer_create_from_checkpoint, v.context.get(), nullptr, 0, nullptr, nullptr,
           &o.layer),
      CALL(conclave_layer_create_from_checkpoint, v.context.get(), v.checkpoint.get(), 0, nullptr,
           nullptr, nullptr),
      CALL(conclave_layer_with_max_tokens, nullptr, 8, &o.layer),
      CALL(conclave_layer_with_max_tokens, v.layer.get(), 8, nullptr),
      CALL(conclave_layer_on_ranks, nullptr, v.context.get(), nullptr, nullptr, &o.layer),
      CALL(conclave_layer_on_ranks, v.layer.get(), nullptr, nullptr, nullptr, &o.layer),
      CALL(conclave_layer_on_ranks, v.layer.get(), v.context.get(), nullptr, nullptr, nullptr),
      CALL(conclave_layer_forward, nullptr, nullptr),
      CALL(conclave_layer_forward, v.layer.get(), nullptr),
      CALL(conclave_workspace_create, nullptr, 64, nullptr, &o.workspace),
      CALL(conclave_workspace_create, v.context.get(), 64, nullptr, nullptr),
      CALL(conclave_workspace_borrow, nullptr, &o, 64, nullptr, &o.workspace),
      CALL(conclave_workspace_borrow, v.context.get(), nullptr, 64, nullptr, &o.workspace),
      CALL(conclave_workspace_borrow, v.context.get(), &o, 64, nullptr, nullptr),
      CALL(conclave_layer_workspace_bytes, nullptr, 1, nullptr),
      CALL(conclave_layer_workspace_bytes, v.layer.get(), 1, nullptr),
      CALL(conclave_layer_reload, nullptr, v.source.get(), 0),
      CALL(conclave_layer_reload, v.layer.get(), nullptr, 0),
      CALL(conclave_layer_reload_from_checkpoint, nullptr, v.checkpoint.get(), 0, 0),
      CALL(conclave_layer_reload_from_checkpoint, v.layer.get(), nullptr, 0, 0),
      CALL(conclave_layer_get_stats, nullptr, nullptr),
      CALL(conclave_layer_get_stats, v.layer.get(), nullptr),
      CALL(conclave_layer_spec, nullptr, &o.spec),
      CALL(conclave_layer_spec, v.layer.get(), nullptr),
      CALL(conclave_layer_explain, nullptr, &o.text),
      CALL(conclave_layer_explain, v.layer.get(), nullptr),
      CALL(conclave_layer_plan_json, nullptr, &o.text),
      CALL(conclave_layer_plan_json, v.layer.get(), nullptr),
      CALL(conclave_plan_explain, nullptr, v.spec.get(), nullptr, nullptr, nullptr, &o.text),
      CALL(conclave_plan_explain, v.context.get(), nullptr, nullptr, nullptr, nullptr, &o.text),
      CALL(conclave_plan_explain, v.context.get(), v.spec.get(), nullptr, nullptr, nullptr,
           nullptr),
      CALL(conclave_plan_json, nullptr, v.spec.get(), nullptr, nullptr, nullptr, &o.text),
      CALL(conclave_plan_json, v.context.get(), nullptr, nullptr, nullptr, nullptr, &o.text),
      CALL(conclave_plan_json, v.context.get(), v.spec.get(), nullptr, nullptr, nullptr, nullptr),
      CALL(conclave_router_create, nullptr, v.spec.get(), &o.router),
      CALL(conclave_router_create, v.context.get(), nullptr, &o.router),
      CALL(conclave_router_create, v.context.get(), v.spec.get(), nullptr),
      CALL(conclave_router_route, nullptr, nullptr),
      CALL(conclave_router_route, v.router.get(), nullptr),
  };
  return all;
}
#undef CALL

TEST(Arguments, AMissingPointer_IsATypedError) {
  Valid valid;
  for (const auto& [name, call] : calls()) {
    SCOPED_TRACE(name);
    Out out;
    EXPECT_EQ(call(valid, out), CONCLAVE_ERROR_NULL_POINTER) << conclave_last_error_message();
    EXPECT_TRUE(out.is_untouched());
  }
}

TEST(Arguments, TheTableHasEveryFunction) {
  std::ostringstream stream;
  stream << std::ifstream("src/capi/abi.txt").rdbuf();
  const std::string text = stream.str();
  size_t count = 0;
  const std::string mark = "function conclave_status ";
  for (size_t at = 0; (at = text.find(mark, at)) != std::string::npos; at += mark.size()) {
    const size_t begin = at + mark.size();
    const std::string name = text.substr(begin, text.find('(', begin) - begin);
    EXPECT_TRUE(calls().contains(name)) << name;
    ++count;
  }
  EXPECT_GT(count, 50U);
}

TEST(Arguments, EndingNothing_IsNothing) {
  conclave_context_destroy(nullptr);
  conclave_communicator_destroy(nullptr);
  conclave_spec_destroy(nullptr);
  conclave_source_destroy(nullptr);
  conclave_feed_destroy(nullptr);
  conclave_checkpoint_destroy(nullptr);
  conclave_layer_destroy(nullptr);
  conclave_workspace_destroy(nullptr);
  conclave_router_destroy(nullptr);
  conclave_text_free(nullptr);
}

// Structs that a call fills have a size of their own to check.
TEST(Arguments, AStructWithoutASize_IsATypedError) {
  Valid valid;
  conclave_build build = {};
  testing::expect_error(conclave_get_build(&build), CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  conclave_layer_stats stats = {};
  testing::expect_error(conclave_layer_get_stats(valid.layer.get(), &stats),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  conclave_spec_info spec = {};
  testing::expect_error(conclave_spec_get_info(valid.spec.get(), &spec),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  conclave_checkpoint_info checkpoint = {};
  testing::expect_error(conclave_checkpoint_get_info(valid.checkpoint.get(), &checkpoint),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  conclave_layer_info layer = {};
  testing::expect_error(conclave_checkpoint_get_layer(valid.checkpoint.get(), 0, &layer),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  conclave_communicator_info info = {};
  testing::expect_error(conclave_communicator_get_info(valid.communicator.get(), &info),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  conclave_forward_args args = {};
  testing::expect_error(conclave_layer_forward(valid.layer.get(), &args),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  conclave_route_args route = {};
  testing::expect_error(conclave_router_route(valid.router.get(), &route),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
}

}  // namespace
}  // namespace conclave
