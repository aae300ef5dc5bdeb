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
  Handle<conclave_lora_checkpoint> adapters = make<conclave_lora_checkpoint>(
      &conclave_lora_checkpoint_open, "testdata/adapters/mixtral-tiny");
  Handle<conclave_slots> slots = make<conclave_slots>(&conclave_layer_slots, layer.get());
  // Another layer, as the first one is still to move.
  Handle<conclave_layer> refitted =
      make<conclave_layer>(&conclave_layer_create_from_checkpoint, context.get(), checkpoint.get(),
                           int64_t{0}, nullptr, nullptr);
  Handle<conclave_refit> refit =
      make<conclave_refit>(&conclave_refit_create, refitted.get(), nullptr);
  conclave_balancer_options balancing = sized<conclave_balancer_options>();
  conclave_layer* balanced[2] = {layer.get(), nullptr};
  size_t count = 0;
  int64_t* rows_of_experts = nullptr;
  Handle<conclave_balancer> balancer = balance();
  const conclave_spec* specs[1] = {spec.get()};
  Handle<conclave_recorder> recorder =
      make<conclave_recorder>(&conclave_recorder_create, &number, specs, size_t{1}, nullptr);
  Handle<conclave_replay> replay =
      make<conclave_replay>(&conclave_replay_from_recorder, recorder.get());
  conclave_lora_adapter adapter = sized<conclave_lora_adapter>();
  conclave_own_router own_router = sized<conclave_own_router>();
  conclave_own_communicator own_ranks = sized<conclave_own_communicator>();
  conclave_regroup_options regrouping = sized<conclave_regroup_options>();
  conclave_tensor rows = ids();
  double load[60] = {};
  int32_t int32 = 0;
  uint64_t hash = 0;

  Handle<conclave_balancer> balance() {
    balancing.communicator = communicator.get();
    return make<conclave_balancer>(&conclave_balancer_create, context.get(), balanced, size_t{1},
                                   &balancing);
  }

  static conclave_tensor ids() {
    auto tensor = sized<conclave_tensor>();
    tensor.dtype = CONCLAVE_DTYPE_I32;
    tensor.rank = 2;
    return tensor;
  }

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
  conclave_lora_checkpoint* adapters = nullptr;
  conclave_slots* slots = nullptr;
  conclave_migration* migration = nullptr;
  conclave_balancer* balancer = nullptr;
  conclave_refit* refit = nullptr;
  conclave_recorder* recorder = nullptr;
  conclave_replay* replay = nullptr;
  conclave_shared_writer* writer = nullptr;
  conclave_device_recorder* rings = nullptr;
  char* text = nullptr;
  const char* device = nullptr;

  bool is_untouched() const {
    return context == nullptr && communicator == nullptr && spec == nullptr && source == nullptr &&
           feed == nullptr && checkpoint == nullptr && layer == nullptr && workspace == nullptr &&
           router == nullptr && adapters == nullptr && slots == nullptr && migration == nullptr &&
           balancer == nullptr && refit == nullptr && recorder == nullptr && replay == nullptr &&
           writer == nullptr && rings == nullptr && text == nullptr && device == nullptr;
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
      CALL(conclave_communicator_from_own, nullptr, &o.communicator),
      CALL(conclave_communicator_from_own, &v.own_ranks, nullptr),
      CALL(conclave_communicator_from_own, &v.own_ranks, &o.communicator),
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
      CALL(conclave_source_from_shared, nullptr, 0, &o.source),
      CALL(conclave_source_from_shared, "/dev/shm/none", 0, nullptr),
      CALL(conclave_source_get_shared_info, nullptr, nullptr),
      CALL(conclave_source_shared_tensors_json, nullptr, &o.text),
      CALL(conclave_source_check_unchanged, nullptr),
      CALL(conclave_shared_writer_create, nullptr, v.source.get(), nullptr, &o.writer),
      CALL(conclave_shared_writer_create, "/dev/shm/none", nullptr, nullptr, &o.writer),
      CALL(conclave_shared_writer_create, "/dev/shm/none", v.source.get(), nullptr, nullptr),
      CALL(conclave_shared_writer_begin, nullptr),
      CALL(conclave_shared_writer_memory, nullptr, "gate", 0, nullptr, nullptr),
      CALL(conclave_shared_writer_publish, nullptr, 0, &v.hash),
      CALL(conclave_shared_writer_publish_source, nullptr, v.source.get(), 0, &v.hash),
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
      CALL(conclave_context_add_router, nullptr, &v.own_router),
      CALL(conclave_context_add_router, v.context.get(), nullptr),
      CALL(conclave_context_add_router, v.context.get(), &v.own_router),
      CALL(conclave_layer_add_adapter, nullptr, &v.adapter, &v.int32),
      CALL(conclave_layer_add_adapter, v.layer.get(), nullptr, &v.int32),
      CALL(conclave_layer_add_adapter, v.layer.get(), &v.adapter, nullptr),
      CALL(conclave_layer_remove_adapter, nullptr, 0),
      CALL(conclave_layer_forget_graphs, nullptr, nullptr),
      CALL(conclave_layer_adapters_json, nullptr, &o.text),
      CALL(conclave_layer_adapters_json, v.layer.get(), nullptr),
      CALL(conclave_lora_checkpoint_open, nullptr, &o.adapters),
      CALL(conclave_lora_checkpoint_open, "testdata/adapters/mixtral-tiny", nullptr),
      CALL(conclave_lora_checkpoint_get_info, nullptr, nullptr),
      CALL(conclave_lora_checkpoint_get_info, v.adapters.get(), nullptr),
      CALL(conclave_lora_checkpoint_other_at, nullptr, 0, &o.device),
      CALL(conclave_lora_checkpoint_other_at, v.adapters.get(), 0, nullptr),
      CALL(conclave_layer_add_adapter_from_checkpoint, nullptr, v.adapters.get(), 0, nullptr, 0,
           &v.int32),
      CALL(conclave_layer_add_adapter_from_checkpoint, v.layer.get(), nullptr, 0, nullptr, 0,
           &v.int32),
      CALL(conclave_layer_add_adapter_from_checkpoint, v.layer.get(), v.adapters.get(), 0, nullptr,
           0, nullptr),
      CALL(conclave_slots_create, 1, nullptr, 1, &v.int32, 1, &o.slots),
      CALL(conclave_slots_create, 1, &v.int32, 1, nullptr, 1, &o.slots),
      CALL(conclave_slots_create, 1, &v.int32, 1, &v.int32, 1, nullptr),
      CALL(conclave_slots_from_parallel, 4, nullptr, nullptr),
      CALL(conclave_layer_slots, nullptr, &o.slots),
      CALL(conclave_layer_slots, v.layer.get(), nullptr),
      CALL(conclave_slots_balance, nullptr, 60, nullptr, &o.slots),
      CALL(conclave_slots_balance, v.load, 60, nullptr, nullptr),
      CALL(conclave_slots_get_info, nullptr, nullptr),
      CALL(conclave_slots_get_info, v.slots.get(), nullptr),
      CALL(conclave_slots_balancedness, nullptr, v.load, 60, v.load),
      CALL(conclave_slots_balancedness, v.slots.get(), nullptr, 60, v.load),
      CALL(conclave_slots_balancedness, v.slots.get(), v.load, 60, nullptr),
      CALL(conclave_slots_moved, nullptr, v.slots.get(), &v.number),
      CALL(conclave_slots_moved, v.slots.get(), nullptr, &v.number),
      CALL(conclave_slots_moved, v.slots.get(), v.slots.get(), nullptr),
      CALL(conclave_layer_update_placement, nullptr, v.slots.get(), nullptr),
      CALL(conclave_layer_update_placement, v.layer.get(), nullptr, nullptr),
      CALL(conclave_slots_spread, nullptr, &v.int32, 1, &o.slots),
      CALL(conclave_slots_spread, v.slots.get(), nullptr, 1, &o.slots),
      CALL(conclave_slots_spread, v.slots.get(), &v.int32, 1, nullptr),
      CALL(conclave_layer_regroup, nullptr, v.context.get(), &v.regrouping, &o.layer),
      CALL(conclave_layer_regroup, v.layer.get(), nullptr, &v.regrouping, &o.layer),
      CALL(conclave_layer_regroup, v.layer.get(), v.context.get(), nullptr, &o.layer),
      CALL(conclave_layer_regroup, v.layer.get(), v.context.get(), &v.regrouping, &o.layer),
      CALL(conclave_layer_regroup, v.layer.get(), v.context.get(), &v.regrouping, nullptr),
      CALL(conclave_layer_hand_over, nullptr, &v.regrouping),
      CALL(conclave_layer_hand_over, v.layer.get(), nullptr),
      CALL(conclave_layer_hand_over, v.layer.get(), &v.regrouping),
      CALL(conclave_layer_join, nullptr, v.spec.get(), nullptr, &v.regrouping, &o.layer),
      CALL(conclave_layer_join, v.context.get(), nullptr, nullptr, &v.regrouping, &o.layer),
      CALL(conclave_layer_join, v.context.get(), v.spec.get(), nullptr, nullptr, &o.layer),
      CALL(conclave_layer_join, v.context.get(), v.spec.get(), nullptr, &v.regrouping, &o.layer),
      CALL(conclave_layer_join, v.context.get(), v.spec.get(), nullptr, &v.regrouping, nullptr),
      CALL(conclave_migration_create, nullptr, v.slots.get(), nullptr, &o.migration),
      CALL(conclave_migration_create, v.layer.get(), nullptr, nullptr, &o.migration),
      CALL(conclave_migration_create, v.layer.get(), v.slots.get(), nullptr, nullptr),
      CALL(conclave_migration_get_status, nullptr, nullptr),
      CALL(conclave_migration_check, nullptr),
      CALL(conclave_migration_finish, nullptr),
      CALL(conclave_balancer_create, nullptr, v.balanced, 1, &v.balancing, &o.balancer),
      CALL(conclave_balancer_create, v.context.get(), nullptr, 1, &v.balancing, &o.balancer),
      CALL(conclave_balancer_create, v.context.get(), v.balanced, 2, &v.balancing, &o.balancer),
      CALL(conclave_balancer_create, v.context.get(), v.balanced, 1, nullptr, &o.balancer),
      CALL(conclave_balancer_create, v.context.get(), v.balanced, 1, &v.balancing, nullptr),
      CALL(conclave_balancer_load, nullptr, 0, &v.rows_of_experts, &v.count),
      CALL(conclave_balancer_load, v.balancer.get(), 0, nullptr, &v.count),
      CALL(conclave_balancer_load, v.balancer.get(), 0, &v.rows_of_experts, nullptr),
      CALL(conclave_balancer_step, nullptr),
      CALL(conclave_balancer_rebalance, nullptr),
      CALL(conclave_balancer_get_status, nullptr, nullptr),
      CALL(conclave_balancer_get_status, v.balancer.get(), nullptr),
      CALL(conclave_refit_create, nullptr, nullptr, &o.refit),
      CALL(conclave_refit_create, v.layer.get(), nullptr, nullptr),
      CALL(conclave_refit_stage, nullptr, v.source.get(), nullptr),
      CALL(conclave_refit_stage, v.refit.get(), nullptr, nullptr),
      CALL(conclave_refit_stage_from_checkpoint, nullptr, v.checkpoint.get(), 0, nullptr),
      CALL(conclave_refit_stage_from_checkpoint, v.refit.get(), nullptr, 0, nullptr),
      CALL(conclave_refit_is_staged, nullptr, &v.int32),
      CALL(conclave_refit_is_staged, v.refit.get(), nullptr),
      CALL(conclave_refit_commit, nullptr),
      CALL(conclave_refit_rollback, nullptr),
      CALL(conclave_refit_withdraw, nullptr),
      CALL(conclave_layer_withdraw_refit, nullptr),
      CALL(conclave_refit_stage_broadcast, nullptr, v.communicator.get(), v.source.get(), nullptr),
      CALL(conclave_refit_stage_broadcast, v.refit.get(), nullptr, v.source.get(), nullptr),
      CALL(conclave_refit_refuse_broadcast, nullptr, v.communicator.get(), "reason"),
      CALL(conclave_refit_refuse_broadcast, v.refit.get(), nullptr, "reason"),
      CALL(conclave_refit_withdraw_because, nullptr, "reason"),
      CALL(conclave_layer_withdraw_refit_because, nullptr, nullptr, "reason"),
      CALL(conclave_convert_model, nullptr, "testdata/mixtral-tiny", "unmade", "bf16", nullptr,
           nullptr),
      CALL(conclave_convert_model, v.context.get(), nullptr, "unmade", "bf16", nullptr, nullptr),
      CALL(conclave_convert_model, v.context.get(), "testdata/mixtral-tiny", nullptr, "bf16",
           nullptr, nullptr),
      CALL(conclave_convert_model, v.context.get(), "testdata/mixtral-tiny", "unmade", nullptr,
           nullptr, nullptr),
      CALL(conclave_conversion_get_info, nullptr, nullptr),
      CALL(conclave_conversion_json, nullptr, &o.text),
      CALL(conclave_convert_formats_json, nullptr),
      CALL(conclave_layer_content_hash, nullptr, &v.hash),
      CALL(conclave_layer_content_hash, v.layer.get(), nullptr),
      CALL(conclave_recorder_create, nullptr, v.specs, 1, nullptr, &o.recorder),
      CALL(conclave_recorder_create, &v.number, nullptr, 1, nullptr, &o.recorder),
      CALL(conclave_recorder_create, &v.number, v.specs, 1, nullptr, nullptr),
      CALL(conclave_recorder_record, nullptr, 0, &v.rows, &v.rows, nullptr, 0),
      CALL(conclave_recorder_record, v.recorder.get(), 0, nullptr, &v.rows, nullptr, 0),
      CALL(conclave_recorder_record, v.recorder.get(), 0, &v.rows, nullptr, nullptr, 0),
      CALL(conclave_recorder_counts, nullptr, 0, nullptr, nullptr),
      CALL(conclave_recorder_write, nullptr, "record.safetensors"),
      CALL(conclave_recorder_write, v.recorder.get(), nullptr),
      CALL(conclave_recorder_clear, nullptr),
      CALL(conclave_device_recorder_create, nullptr, &v.number, v.specs, 1, nullptr, &o.rings),
      CALL(conclave_device_recorder_create, v.context.get(), nullptr, v.specs, 1, nullptr,
           &o.rings),
      CALL(conclave_device_recorder_create, v.context.get(), &v.number, nullptr, 1, nullptr,
           &o.rings),
      CALL(conclave_device_recorder_create, v.context.get(), &v.number, v.specs, 1, nullptr,
           nullptr),
      CALL(conclave_device_recorder_record, nullptr, nullptr),
      CALL(conclave_device_recorder_counts, nullptr, 0, nullptr, nullptr),
      CALL(conclave_device_recorder_write, nullptr, "record.safetensors"),
      CALL(conclave_device_recorder_clear, nullptr),
      CALL(conclave_replay_from_device_recorder, nullptr, &o.replay),
      CALL(conclave_replay_open, nullptr, &o.replay),
      CALL(conclave_replay_open, "record.safetensors", nullptr),
      CALL(conclave_replay_from_recorder, nullptr, &o.replay),
      CALL(conclave_replay_from_recorder, v.recorder.get(), nullptr),
      CALL(conclave_replay_get_info, nullptr, nullptr),
      CALL(conclave_replay_get_info, v.replay.get(), nullptr),
      CALL(conclave_replay_get_layer, nullptr, 0, nullptr),
      CALL(conclave_replay_get_layer, v.replay.get(), 0, nullptr),
      CALL(conclave_replay_find, nullptr, 0, nullptr, 0, nullptr, nullptr),
      CALL(conclave_replay_find, v.replay.get(), 0, nullptr, 1, nullptr, nullptr),
      CALL(conclave_replay_compare_json, nullptr, v.replay.get(), 0, &o.text),
      CALL(conclave_replay_compare_json, v.replay.get(), nullptr, 0, &o.text),
      CALL(conclave_replay_compare_json, v.replay.get(), v.replay.get(), 0, nullptr),
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
  conclave_lora_checkpoint_destroy(nullptr);
  conclave_slots_destroy(nullptr);
  conclave_migration_destroy(nullptr);
  conclave_balancer_destroy(nullptr);
  conclave_refit_destroy(nullptr);
  conclave_recorder_destroy(nullptr);
  conclave_replay_destroy(nullptr);
  conclave_shared_writer_destroy(nullptr);
  conclave_device_recorder_destroy(nullptr);
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
  conclave_lora_checkpoint_info adapters = {};
  testing::expect_error(conclave_lora_checkpoint_get_info(valid.adapters.get(), &adapters),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  conclave_slots_info slots = {};
  testing::expect_error(conclave_slots_get_info(valid.slots.get(), &slots),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  conclave_replay_info replay = {};
  testing::expect_error(conclave_replay_get_info(valid.replay.get(), &replay),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
  conclave_route_args route = {};
  testing::expect_error(conclave_router_route(valid.router.get(), &route),
                        CONCLAVE_ERROR_INVALID_ARGUMENT, "struct_size");
}

}  // namespace
}  // namespace conclave
