// Each allocation of a life of objects fails in turn: what fails is a status, nothing is lost, and
// the same objects serve when there is memory again.
#include "capi/handles.h"
#include "support/allocation_counter.h"
#include "support/layer_fixture.h"

#include "conclave/lora.h"

#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::sized;
using testing::tensor_of;

// Stops at the first call that fails, with its status.
#define STEP(call)                            \
  do {                                        \
    const conclave_status status = (call);    \
    if (status != CONCLAVE_OK) return status; \
  } while (0)

struct Life {
  testing::Handle<conclave_communicator> ranks;
  testing::Handle<conclave_context> context;
  testing::Handle<conclave_spec> spec;
  testing::Handle<conclave_source> source;
  testing::Handle<conclave_layer> layer;
  testing::Handle<conclave_router> router;
  testing::Handle<conclave_recorder> recorder;
  testing::Handle<conclave_replay> replay;
  testing::Handle<conclave_slots> slots;
  testing::Handle<conclave_refit> refit;
};

conclave_status route(void*, conclave_route_call* call) {
  for (int64_t i = 0; i < call->num_tokens * call->top_k; ++i) {
    call->topk_ids[i] = static_cast<int32_t>(i % call->num_experts);
    call->topk_weights[i] = 1;
  }
  return CONCLAVE_OK;
}

// A rank that is alone: whatever it begins is complete.
conclave_own_communicator alone(int* released) {
  auto own = sized<conclave_own_communicator>();
  own.name = "a transport whose name is longer than what strings keep in themselves";
  own.user = released;
  own.size = 1;
  own.start = [](void*, const conclave_comm_operation*, conclave_comm_failure*) {
    return conclave_status{CONCLAVE_OK};
  };
  own.wait = [](void*, uint64_t, int64_t, const char*, conclave_comm_failure*) {
    return conclave_status{CONCLAVE_OK};
  };
  own.test = [](void*, uint64_t, int32_t* complete, const char*, conclave_comm_failure*) {
    *complete = 1;
    return conclave_status{CONCLAVE_OK};
  };
  own.abort = [](void*, const char*) {};
  own.release = [](void* user) { ++*static_cast<int*>(user); };
  return own;
}

template <class T, class Function, class... Arguments>
conclave_status make_into(testing::Handle<T>& to, Function function, Arguments... arguments) {
  T* made = nullptr;
  const conclave_status status = function(arguments..., &made);
  to.reset(made);
  return status;
}

class Memory {
 public:
  conclave_status live() {
    Life life;
    const conclave_own_communicator transport = alone(&released_ranks_);
    STEP(make_into(life.ranks, conclave_communicator_from_own, &transport));
    ++kept_ranks_;
    STEP(conclave_communicator_barrier(life.ranks.get(),
                                       "a phase that is longer than what strings keep"));
    auto options = sized<conclave_context_options>();
    options.num_threads = 1;
    options.communicator = life.ranks.get();
    STEP(make_into(life.context, conclave_context_create, &options));
    auto own = sized<conclave_own_router>();
    own.name = "counted";
    own.route = &route;
    own.user = &released_;
    own.release = [](void* user) { ++*static_cast<int*>(user); };
    STEP(conclave_context_add_router(life.context.get(), &own));
    STEP(make_into(life.spec, conclave_spec_from_json,
                   R"({"num_experts": 4, "top_k": 2, "hidden_size": 32, "intermediate_size": 32,
                       "weight_dtype": "F32", "router": {"name": "counted"}, "has_gate": false})"));
    const conclave_tensor gate_up =
        tensor_of({gate_up_.const_view().data, DType::kF32, {4, 64, 32}});
    const conclave_tensor down = tensor_of({down_.const_view().data, DType::kF32, {4, 32, 32}});
    const conclave_named_tensor tensors[] = {{"gate_up", &gate_up}, {"down", &down}};
    STEP(make_into(life.source, conclave_source_from_tensors, tensors, size_t{2}, nullptr));
    auto layer_options = sized<conclave_layer_options>();
    layer_options.max_tokens = 8;
    layer_options.max_adapter_rank = 4;
    STEP(make_into(life.layer, conclave_layer_create, life.context.get(), life.spec.get(),
                   life.source.get(), &layer_options, nullptr));
    STEP(add_adapter(life.layer.get()));
    STEP(forward(life.layer.get()));
    STEP(refit(life));
    STEP(record(life));
    STEP(make_into(life.slots, conclave_layer_slots, life.layer.get()));
    STEP(conclave_layer_update_placement(life.layer.get(), life.slots.get(), nullptr) ==
                 CONCLAVE_ERROR_OUT_OF_MEMORY
             ? CONCLAVE_ERROR_OUT_OF_MEMORY
             : CONCLAVE_OK);
    char* text = nullptr;
    STEP(conclave_layer_explain(life.layer.get(), &text));
    conclave_text_free(text);
    return CONCLAVE_OK;
  }

  int released() const { return released_; }
  bool has_released_all_ranks() const { return released_ranks_ == kept_ranks_; }

 private:
  conclave_status add_adapter(conclave_layer* layer) {
    const conclave_tensor a = tensor_of(a_.const_view());
    const conclave_tensor b = tensor_of(b_.const_view());
    auto factors = sized<conclave_lora_factors>();
    factors.matrix = CONCLAVE_WEIGHT_MATRIX_DOWN;
    factors.a = &a;
    factors.b = &b;
    factors.scale = 1;
    auto adapter = sized<conclave_lora_adapter>();
    adapter.factors = &factors;
    adapter.num_factors = 1;
    int32_t id = -1;
    STEP(conclave_layer_add_adapter(layer, &adapter, &id));
    return conclave_layer_remove_adapter(layer, id);
  }

  conclave_status forward(const conclave_layer* layer) {
    const conclave_tensor in = tensor_of(hidden_.const_view());
    const conclave_tensor logits = tensor_of(logits_.const_view());
    const conclave_tensor out = tensor_of(out_.const_view());
    const conclave_tensor ids = tensor_of(ids_.const_view());
    const conclave_tensor weights = tensor_of(weights_.const_view());
    auto args = sized<conclave_forward_args>();
    args.hidden = &in;
    args.router_logits = &logits;
    args.out = &out;
    args.captured_ids = &ids;
    args.captured_weights = &weights;
    args.top_k = 1;
    args.expert_budget = 3;
    return conclave_layer_forward(layer, &args);
  }

  static conclave_status refit(Life& life) {
    const int32_t experts[] = {1, 3};
    const char* const tensors[] = {"gate_up", "down"};
    auto scope = sized<conclave_refit_scope>();
    scope.experts = experts;
    scope.experts_count = 2;
    scope.tensors = tensors;
    scope.tensors_count = 2;
    auto options = sized<conclave_refit_options>();
    options.scope = &scope;
    options.num_threads = 2;
    STEP(make_into(life.refit, conclave_refit_create, life.layer.get(), &options));
    STEP(conclave_refit_stage(life.refit.get(), life.source.get(), &scope));
    STEP(conclave_refit_commit(life.refit.get()));
    uint64_t hash = 0;
    return conclave_layer_content_hash(life.layer.get(), &hash);
  }

  conclave_status record(Life& life) {
    const int64_t layers[] = {3};
    const conclave_spec* const specs[] = {life.spec.get()};
    auto options = sized<conclave_recorder_options>();
    options.capacity = 16;
    STEP(make_into(life.recorder, conclave_recorder_create, layers, specs, size_t{1}, &options));
    const conclave_tensor ids = tensor_of(ids_.const_view());
    const conclave_tensor weights = tensor_of(weights_.const_view());
    STEP(conclave_recorder_record(life.recorder.get(), 3, &ids, &weights, nullptr, 0));
    return make_into(life.replay, conclave_replay_from_recorder, life.recorder.get());
  }

  int released_ = 0;
  int released_ranks_ = 0;
  int kept_ranks_ = 0;
  Tensor gate_up_ = testing::random_tensor(DType::kF32, 256, 32, 1);
  Tensor down_ = testing::random_tensor(DType::kF32, 128, 32, 2);
  Tensor a_ = testing::random_tensor(DType::kF32, 2, 32, 3);
  Tensor b_ = testing::random_tensor(DType::kF32, 32, 2, 4);
  Tensor hidden_ = testing::random_tensor(DType::kF32, 6, 32, 5);
  Tensor logits_ = testing::random_tensor(DType::kF32, 6, 4, 6);
  Tensor out_{DType::kF32, {6, 32}};
  Tensor ids_{DType::kI32, {6, 2}};
  Tensor weights_{DType::kF32, {6, 2}};
};

TEST(Allocations, EachThatFails_IsAStatus_AndNothingElse) {
  Memory memory;
  ASSERT_EQ(memory.live(), CONCLAVE_OK) << conclave_last_error_message();
  int64_t at = 0;
  int lives = 1;
  for (;; ++at) {
    testing::fail_heap_allocation(at);
    const conclave_status status = memory.live();
    const bool failed = testing::heap_allocation_failed();
    testing::fail_heap_allocation(-1);
    if (!failed) {
      EXPECT_EQ(status, CONCLAVE_OK);
      break;
    }
    // What is only for texts, or has another way, may do without.
    EXPECT_TRUE(status == CONCLAVE_OK || status == CONCLAVE_ERROR_OUT_OF_MEMORY)
        << at << ": " << conclave_status_name(status) << ": " << conclave_last_error_message();
    if (status != CONCLAVE_OK) {
      EXPECT_NE(conclave_last_error_message()[0], '\0') << at;
    }
    ++lives;
    ASSERT_LT(at, 20000);
  }
  EXPECT_GT(at, 100);
  EXPECT_LE(memory.released(), lives + 1);
  EXPECT_TRUE(memory.has_released_all_ranks());
  EXPECT_EQ(memory.live(), CONCLAVE_OK);
}

}  // namespace
}  // namespace conclave
