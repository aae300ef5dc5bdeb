// A layer of a program's own memory, with a router of its own and an adapter (LoRA) that some
// tokens have and others have not.
#include <conclave/c.h>
#include <math.h>
#include <stdio.h>

enum { EXPERTS = 4, TOP_K = 2, HIDDEN = 16, WIDTH = 8, TOKENS = 6, RANK = 2 };

static float gate_up[EXPERTS * 2 * WIDTH * HIDDEN];
static float down[EXPERTS * HIDDEN * WIDTH];
static float lora_a[RANK * WIDTH];
static float lora_b[HIDDEN * RANK];
static float hidden[TOKENS * HIDDEN];
static float logits[TOKENS * EXPERTS];
static float out[TOKENS * HIDDEN];
static float adapted[TOKENS * HIDDEN];

static void fill(float* values, int count, float size) {
  int i;
  for (i = 0; i < count; ++i) values[i] = size * sinf((float)(i + 1));
}

static conclave_tensor tensor(void* data, conclave_dtype dtype, int32_t rank, int64_t a, int64_t b,
                              int64_t c) {
  conclave_tensor view = {0};
  view.struct_size = sizeof view;
  view.data = data;
  view.dtype = dtype;
  view.rank = rank;
  view.shape[0] = a;
  view.shape[1] = b;
  view.shape[2] = c;
  return view;
}

// Token t goes to experts t, t + 1, ..., each weighed by the sigmoid of its own logit.
static conclave_status rotate(void* user, conclave_route_call* call) {
  int64_t token, slot;
  if (call->logits == NULL) {
    call->reason = "rotate weighs by logits";
    return CONCLAVE_ERROR_UNSUPPORTED;
  }
  for (token = 0; token < call->num_tokens; ++token) {
    for (slot = 0; slot < call->top_k; ++slot) {
      const int64_t expert = (call->first_token + token + slot) % call->num_experts;
      const float logit = call->logits[token * call->num_logits + expert];
      call->topk_ids[token * call->top_k + slot] = (int32_t)expert;
      call->topk_weights[token * call->top_k + slot] = 1.0F / (1.0F + expf(-logit));
    }
  }
  *(int64_t*)user += call->num_tokens;
  return CONCLAVE_OK;
}

static conclave_status make_layer(conclave_context* context, conclave_layer** layer) {
  const conclave_tensor gate_up_view =
      tensor(gate_up, CONCLAVE_DTYPE_F32, 3, EXPERTS, 2 * WIDTH, HIDDEN);
  const conclave_tensor down_view = tensor(down, CONCLAVE_DTYPE_F32, 3, EXPERTS, HIDDEN, WIDTH);
  const conclave_named_tensor tensors[] = {{"gate_up", &gate_up_view}, {"down", &down_view}};
  conclave_layer_options options = {0};
  conclave_spec* spec = NULL;
  conclave_source* source = NULL;
  options.struct_size = sizeof options;
  options.max_tokens = TOKENS;
  options.max_adapter_rank = RANK;
  conclave_status status = conclave_spec_from_json(
      "{\"num_experts\": 4, \"top_k\": 2, \"hidden_size\": 16, \"intermediate_size\": 8,"
      " \"weight_dtype\": \"F32\", \"router\": {\"name\": \"rotate\"}, \"has_gate\": false}",
      &spec);
  if (status == CONCLAVE_OK) status = conclave_source_from_tensors(tensors, 2, NULL, &source);
  if (status == CONCLAVE_OK) {
    status = conclave_layer_create(context, spec, source, &options, NULL, layer);
  }
  conclave_source_destroy(source);
  conclave_spec_destroy(spec);
  return status;
}

// The adapter makes expert 1's down product W x + 0.5 b (a x).
static conclave_status add_adapter(conclave_layer* layer, int32_t* id) {
  const conclave_tensor a = tensor(lora_a, CONCLAVE_DTYPE_F32, 2, RANK, WIDTH, 0);
  const conclave_tensor b = tensor(lora_b, CONCLAVE_DTYPE_F32, 2, HIDDEN, RANK, 0);
  conclave_lora_factors factors = {0};
  conclave_lora_adapter adapter = {0};
  factors.struct_size = sizeof factors;
  factors.matrix = CONCLAVE_WEIGHT_MATRIX_DOWN;
  factors.expert = 1;
  factors.a = &a;
  factors.b = &b;
  factors.scale = 0.5;
  adapter.struct_size = sizeof adapter;
  adapter.name = "example";
  adapter.factors = &factors;
  adapter.num_factors = 1;
  return conclave_layer_add_adapter(layer, &adapter, id);
}

// `ids` [TOKENS] says which adapter each token has; NULL: none has any.
static conclave_status forward(const conclave_layer* layer, int32_t* ids, float* to) {
  const conclave_tensor in = tensor(hidden, CONCLAVE_DTYPE_F32, 2, TOKENS, HIDDEN, 0);
  const conclave_tensor given = tensor(logits, CONCLAVE_DTYPE_F32, 2, TOKENS, EXPERTS, 0);
  const conclave_tensor written = tensor(to, CONCLAVE_DTYPE_F32, 2, TOKENS, HIDDEN, 0);
  const conclave_tensor adapters = tensor(ids, CONCLAVE_DTYPE_I32, 1, TOKENS, 0, 0);
  conclave_forward_args args = {0};
  args.struct_size = sizeof args;
  args.hidden = &in;
  args.router_logits = &given;
  args.out = &written;
  if (ids != NULL) args.adapter_ids = &adapters;
  return conclave_layer_forward(layer, &args);
}

// Rows without the adapter keep every bit; of the others those change that expert 1 serves.
static int changed_as_expected(const int32_t* ids) {
  int token, i;
  for (token = 0; token < TOKENS; ++token) {
    const int has_expert_1 = token % EXPERTS == 0 || token % EXPERTS == 1;
    int changes = 0;
    for (i = token * HIDDEN; i < (token + 1) * HIDDEN; ++i) changes += out[i] != adapted[i];
    if ((changes > 0) != (ids[token] >= 0 && has_expert_1)) return 0;
  }
  return 1;
}

int main(void) {
  int64_t routed = 0;
  int32_t id = -1;
  int32_t ids[TOKENS] = {0};
  int token;
  conclave_context* context = NULL;
  conclave_layer* layer = NULL;
  conclave_own_router router = {0};
  router.struct_size = sizeof router;
  router.name = "rotate";
  router.user = &routed;
  router.route = rotate;
  fill(gate_up, EXPERTS * 2 * WIDTH * HIDDEN, 0.5F);
  fill(down, EXPERTS * HIDDEN * WIDTH, 0.5F);
  fill(lora_a, RANK * WIDTH, 1.0F);
  fill(lora_b, HIDDEN * RANK, 1.0F);
  fill(hidden, TOKENS * HIDDEN, 1.0F);
  fill(logits, TOKENS * EXPERTS, 2.0F);

  conclave_status status = conclave_context_create(NULL, &context);
  if (status == CONCLAVE_OK) status = conclave_context_add_router(context, &router);
  if (status == CONCLAVE_OK) status = make_layer(context, &layer);
  if (status == CONCLAVE_OK) status = add_adapter(layer, &id);
  if (status == CONCLAVE_OK) status = forward(layer, NULL, out);
  for (token = 0; token < TOKENS; ++token) ids[token] = token < TOKENS / 2 ? id : -1;
  if (status == CONCLAVE_OK) status = forward(layer, ids, adapted);
  conclave_layer_destroy(layer);
  conclave_context_destroy(context);
  if (status != CONCLAVE_OK) {
    fprintf(stderr, "%s: %s\n", conclave_status_name(status), conclave_last_error_message());
    return 1;
  }
  printf("the router was asked for %lld rows; the adapter changed the rows that it should\n",
         (long long)routed);
  return routed == 2 * TOKENS && changed_as_expected(ids) ? 0 : 1;
}
