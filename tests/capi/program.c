// A program of C as its users write them, compiled as C99: layers of a model and of its own memory,
// an error, and structs that a compiler of C has laid out. Exit status 1 where something is wrong.
#include <conclave/c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPECT(condition)                                                              \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      fprintf(stderr, "%s:%d: %s\n  last error: %s\n", __FILE__, __LINE__, #condition, \
              conclave_last_error_message());                                          \
      return 1;                                                                        \
    }                                                                                  \
  } while (0)

static conclave_tensor matrix(void* data, conclave_dtype dtype, int64_t rows, int64_t cols) {
  conclave_tensor tensor = {0};
  tensor.struct_size = sizeof tensor;
  tensor.data = data;
  tensor.dtype = dtype;
  tensor.rank = 2;
  tensor.shape[0] = rows;
  tensor.shape[1] = cols;
  return tensor;
}

enum { EXPERTS = 4, HIDDEN = 8, WIDTH = 4, TOKENS = 3 };

// Every weight is 1/8 and every input 1, so that each expert computes the same known value.
static int layer_of_own_memory(const conclave_context* context) {
  static float gate_up[EXPERTS * 2 * WIDTH * HIDDEN];
  static float down[EXPERTS * HIDDEN * WIDTH];
  float hidden[TOKENS * HIDDEN];
  float logits[TOKENS * EXPERTS] = {0};
  float out[TOKENS * HIDDEN];
  const double expected = WIDTH * (1.0 / (1.0 + exp(-1.0))) / 8.0;
  int i;
  for (i = 0; i < (int)(sizeof gate_up / sizeof *gate_up); ++i) gate_up[i] = 0.125F;
  for (i = 0; i < (int)(sizeof down / sizeof *down); ++i) down[i] = 0.125F;
  for (i = 0; i < TOKENS * HIDDEN; ++i) hidden[i] = 1.0F;

  conclave_tensor gate_up_view = matrix(gate_up, CONCLAVE_DTYPE_F32, EXPERTS, 2 * WIDTH);
  conclave_tensor down_view = matrix(down, CONCLAVE_DTYPE_F32, EXPERTS, HIDDEN);
  gate_up_view.rank = 3;
  gate_up_view.shape[2] = HIDDEN;
  down_view.rank = 3;
  down_view.shape[2] = WIDTH;
  const conclave_named_tensor tensors[] = {{"gate_up", &gate_up_view}, {"down", &down_view}};
  conclave_spec* spec = NULL;
  conclave_source* source = NULL;
  conclave_layer* layer = NULL;
  EXPECT(conclave_spec_from_json("{\"num_experts\": 4, \"top_k\": 2, \"hidden_size\": 8,"
                                 " \"intermediate_size\": 4, \"weight_dtype\": \"F32\","
                                 " \"has_gate\": false}",
                                 &spec) == CONCLAVE_OK);
  EXPECT(conclave_source_from_tensors(tensors, 2, NULL, &source) == CONCLAVE_OK);
  EXPECT(conclave_layer_create(context, spec, source, NULL, NULL, &layer) == CONCLAVE_OK);

  const conclave_tensor in = matrix(hidden, CONCLAVE_DTYPE_F32, TOKENS, HIDDEN);
  const conclave_tensor given = matrix(logits, CONCLAVE_DTYPE_F32, TOKENS, EXPERTS);
  const conclave_tensor written = matrix(out, CONCLAVE_DTYPE_F32, TOKENS, HIDDEN);
  conclave_forward_args args = {0};
  args.struct_size = sizeof args;
  args.hidden = &in;
  args.out = &written;
  args.router_logits = &given;
  EXPECT(conclave_layer_forward(layer, &args) == CONCLAVE_OK);
  for (i = 0; i < TOKENS * HIDDEN; ++i) EXPECT(fabs(out[i] - expected) < 1e-5);

  args.router_logits = NULL;
  EXPECT(conclave_layer_forward(layer, &args) == CONCLAVE_ERROR_INVALID_ARGUMENT);
  EXPECT(strstr(conclave_last_error_message(), "router_logits") != NULL);
  conclave_layer_destroy(layer);
  conclave_source_destroy(source);
  conclave_spec_destroy(spec);
  return 0;
}

static int layers_of_a_model(const conclave_context* context, const char* path) {
  conclave_checkpoint* checkpoint = NULL;
  EXPECT(conclave_checkpoint_open(path, NULL, &checkpoint) == CONCLAVE_OK);
  conclave_checkpoint_info info = {0};
  info.struct_size = sizeof info;
  EXPECT(conclave_checkpoint_get_info(checkpoint, &info) == CONCLAVE_OK);
  EXPECT(info.num_layers > 0);
  size_t i;
  for (i = 0; i < info.num_layers; ++i) {
    conclave_layer_info about = {0};
    conclave_spec_info sizes = {0};
    conclave_layer* layer = NULL;
    conclave_spec* spec = NULL;
    about.struct_size = sizeof about;
    sizes.struct_size = sizeof sizes;
    EXPECT(conclave_checkpoint_get_layer(checkpoint, i, &about) == CONCLAVE_OK);
    EXPECT(conclave_layer_create_from_checkpoint(context, checkpoint, about.index, NULL, NULL,
                                                 &layer) == CONCLAVE_OK);
    EXPECT(conclave_layer_spec(layer, &spec) == CONCLAVE_OK);
    EXPECT(conclave_spec_get_info(spec, &sizes) == CONCLAVE_OK);
    const size_t count = (size_t)(TOKENS * sizes.hidden_size);
    float* hidden = calloc(count, sizeof *hidden);
    float* out = calloc(count, sizeof *out);
    EXPECT(hidden != NULL && out != NULL);
    size_t at;
    for (at = 0; at < count; ++at) hidden[at] = (float)(at % 7) - 3.0F;
    const conclave_tensor in = matrix(hidden, CONCLAVE_DTYPE_F32, TOKENS, sizes.hidden_size);
    const conclave_tensor written = matrix(out, CONCLAVE_DTYPE_F32, TOKENS, sizes.hidden_size);
    conclave_forward_args args = {0};
    args.struct_size = sizeof args;
    args.hidden = &in;
    args.out = &written;
    EXPECT(conclave_layer_forward(layer, &args) == CONCLAVE_OK);
    double sum = 0;
    for (at = 0; at < count; ++at) sum += fabs(out[at]);
    EXPECT(isfinite(sum) && sum > 0);
    free(out);
    free(hidden);
    conclave_spec_destroy(spec);
    conclave_layer_destroy(layer);
  }
  conclave_checkpoint_destroy(checkpoint);
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  EXPECT(conclave_interface() >= CONCLAVE_C_INTERFACE);
  EXPECT(strcmp(conclave_version(), CONCLAVE_C_VERSION) == 0);
  conclave_context* context = NULL;
  EXPECT(conclave_context_create(NULL, &context) == CONCLAVE_OK);
  const int failed = layer_of_own_memory(context) + layers_of_a_model(context, argv[1]);
  conclave_context_destroy(context);
  return failed;
}
