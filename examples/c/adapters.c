// LoRA adapters: one as PEFT saved it, one of arrays, and tokens that choose among them and none.
#include "example.h"

enum { TOKENS = 12, RANK = 2 };

// Low-rank factors for the down product of every expert, W x + 0.5 b (a x). The library copies
// them.
static int32_t add_arrays(conclave_layer* layer, const conclave_spec_info* sizes) {
  const int64_t width = sizes->intermediate_size;
  float* const a = allocate(RANK * width, sizeof *a);
  float* const b = allocate(sizes->hidden_size * RANK, sizeof *b);
  conclave_lora_factors* const factors = allocate(sizes->num_experts, sizeof *factors);
  const conclave_tensor a_view = matrix(a, CONCLAVE_DTYPE_F32, RANK, width);
  const conclave_tensor b_view = matrix(b, CONCLAVE_DTYPE_F32, sizes->hidden_size, RANK);
  conclave_lora_adapter adapter = {0};
  int32_t id = -1;
  int64_t expert;
  fill(a, RANK * width, 0.5F, 1);
  fill(b, sizes->hidden_size * RANK, 0.5F, 2);
  for (expert = 0; expert < sizes->num_experts; ++expert) {
    factors[expert].struct_size = sizeof *factors;
    factors[expert].mlp = CONCLAVE_WEIGHT_MLP_ROUTED;
    factors[expert].matrix = CONCLAVE_WEIGHT_MATRIX_DOWN;
    factors[expert].expert = expert;
    factors[expert].a = &a_view;
    factors[expert].b = &b_view;
    factors[expert].scale = 0.5;
  }
  adapter.struct_size = sizeof adapter;
  adapter.name = "arrays";
  adapter.factors = factors;
  adapter.num_factors = (size_t)sizes->num_experts;
  require(conclave_layer_add_adapter(layer, &adapter, &id), "adding arrays");
  free(factors);
  free(b);
  free(a);
  return id;
}

// `all` is the adapter of every token, `ids` [TOKENS] says one for each; both NULL: none has any.
static conclave_status forward(const conclave_layer* layer, float* hidden, int64_t hidden_size,
                               const int32_t* all, int32_t* ids, float* out) {
  const conclave_tensor in = matrix(hidden, CONCLAVE_DTYPE_F32, TOKENS, hidden_size);
  const conclave_tensor written = matrix(out, CONCLAVE_DTYPE_F32, TOKENS, hidden_size);
  const conclave_tensor by_token = vector(ids, CONCLAVE_DTYPE_I32, TOKENS);
  conclave_forward_args args = {0};
  args.struct_size = sizeof args;
  args.hidden = &in;
  args.out = &written;
  args.adapter = all;
  if (ids != NULL) args.adapter_ids = &by_token;
  return conclave_layer_forward(layer, &args);
}

static void print_adapters(const conclave_layer* layer) {
  char* json = NULL;
  require(conclave_layer_adapters_json(layer, &json), "listing adapters");
  printf("adapters: %s\n", json);
  conclave_text_free(json);
}

// Each row has the bits that it has where every token has that adapter.
static void use(conclave_layer* layer, const conclave_spec_info* sizes, int32_t peft,
                int32_t arrays) {
  const int64_t width = sizes->hidden_size;
  const int32_t choices[] = {-1, peft, arrays};
  int32_t ids[TOKENS];
  float* const hidden = allocate(TOKENS * width, sizeof *hidden);
  float* const mixed = allocate(TOKENS * width, sizeof *mixed);
  float* each[3];
  int64_t t;
  int i;
  fill(hidden, TOKENS * width, 1.0F, 3);
  for (t = 0; t < TOKENS; ++t) ids[t] = choices[t % 3];
  for (i = 0; i < 3; ++i) {
    each[i] = allocate(TOKENS * width, sizeof *each[i]);
    require(forward(layer, hidden, width, i == 0 ? NULL : &choices[i], NULL, each[i]), "forward");
  }
  require(forward(layer, hidden, width, NULL, ids, mixed), "forward by token");
  for (t = 0; t < TOKENS; ++t) {
    expect(same_bits(mixed + t * width, each[t % 3] + t * width, width), "a token has its adapter");
  }
  expect(!same_bits(each[0], each[1], TOKENS * width), "PEFT's adapter changes rows");
  expect(!same_bits(each[1], each[2], TOKENS * width), "the two adapters differ");

  // An adapter that is gone is an error, before anything is written.
  require(conclave_layer_remove_adapter(layer, peft), "removing an adapter");
  fill(each[1], TOKENS * width, 1.0F, 4);
  memcpy(each[2], each[1], (size_t)(TOKENS * width) * sizeof *each[1]);
  expect_error(forward(layer, hidden, width, NULL, ids, each[1]), CONCLAVE_ERROR_INVALID_ARGUMENT);
  expect(same_bits(each[1], each[2], TOKENS * width), "an error writes nothing");
  for (i = 0; i < 3; ++i) free(each[i]);
  free(mixed);
  free(hidden);
}

int main(int argc, char** argv) {
  conclave_context* context = NULL;
  conclave_checkpoint* model = NULL;
  conclave_lora_checkpoint* saved = NULL;
  conclave_lora_checkpoint_info info = {0};
  conclave_layer_options options = {0};
  conclave_spec_info sizes = {0};
  conclave_layer* layer = NULL;
  conclave_spec* spec = NULL;
  int32_t peft = -1;
  int32_t arrays;
  if (argc != 3) {
    fprintf(stderr, "usage: adapters MODEL ADAPTER\n");
    return 2;
  }
  info.struct_size = sizeof info;
  options.struct_size = sizeof options;
  sizes.struct_size = sizeof sizes;
  require(conclave_context_create(NULL, &context), "context");
  require(conclave_checkpoint_open(argv[1], NULL, &model), "model");
  require(conclave_lora_checkpoint_open(argv[2], &saved), "adapter");
  require(conclave_lora_checkpoint_get_info(saved, &info), "adapter");
  expect(info.num_layers > 0, "the adapter is of MoE layers");
  printf("%zu layers have factors, of rank up to %lld; %zu other modules are the model's own\n",
         info.num_layers, (long long)info.max_rank, info.num_others);
  options.max_tokens = TOKENS;
  options.max_adapter_rank = info.max_rank > RANK ? info.max_rank : RANK;
  require(
      conclave_layer_create_from_checkpoint(context, model, info.layers[0], &options, NULL, &layer),
      "layer");
  require(conclave_layer_spec(layer, &spec), "spec");
  require(conclave_spec_get_info(spec, &sizes), "spec");
  require(conclave_layer_add_adapter_from_checkpoint(layer, saved, info.layers[0], model, 0, &peft),
          "adding PEFT's adapter");
  arrays = add_arrays(layer, &sizes);
  print_adapters(layer);
  use(layer, &sizes, peft, arrays);
  conclave_spec_destroy(spec);
  conclave_layer_destroy(layer);
  conclave_lora_checkpoint_destroy(saved);
  conclave_checkpoint_destroy(model);
  conclave_context_destroy(context);
  printf("each of %d tokens had the adapter that it chose, or none\n", TOKENS);
  return 0;
}
