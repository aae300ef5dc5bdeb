// Runs every MoE layer of a model directory or GGUF file from C, and shows how errors are told.
#include <conclave/c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { TOKENS = 8 };

// Prints what went wrong in the fields that the library gives, and returns the status.
static conclave_status report(conclave_status status) {
  conclave_error error = {0};
  error.struct_size = sizeof error;
  if (conclave_last_error(&error) != CONCLAVE_OK) return status;
  fprintf(stderr, "%s (%d): %s\n", conclave_status_name(status), (int)status, error.what);
  if (*error.file) fprintf(stderr, "  file: %s\n", error.file);
  if (*error.tensor) fprintf(stderr, "  of: %s\n", error.tensor);
  if (*error.expected) fprintf(stderr, "  expected: %s\n", error.expected);
  if (*error.found) fprintf(stderr, "  found: %s\n", error.found);
  if (*error.limit) fprintf(stderr, "  limit: %s\n", error.limit);
  if (*error.hint) fprintf(stderr, "  hint: %s\n", error.hint);
  return status;
}

// Random numbers of a small generator, so that every run prints the same.
static void fill(float* values, size_t count) {
  uint64_t state = 88172645463325252u;
  size_t i;
  for (i = 0; i < count; ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    values[i] = (float)(state >> 40) / (float)(1 << 23) - 1.0F;
  }
}

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

// One forward of random rows, whose mean magnitude is printed with the busiest expert.
static conclave_status run(const conclave_layer* layer, int64_t index,
                           const conclave_spec_info* sizes) {
  const size_t count = (size_t)(TOKENS * sizes->hidden_size);
  float* hidden = calloc(count, sizeof *hidden);
  float* out = calloc(count, sizeof *out);
  int64_t* load = calloc((size_t)sizes->num_experts, sizeof *load);
  conclave_status status = CONCLAVE_ERROR_OUT_OF_MEMORY;
  if (hidden != NULL && out != NULL && load != NULL) {
    fill(hidden, count);
    const conclave_tensor in = matrix(hidden, CONCLAVE_DTYPE_F32, TOKENS, sizes->hidden_size);
    const conclave_tensor written = matrix(out, CONCLAVE_DTYPE_F32, TOKENS, sizes->hidden_size);
    conclave_forward_args args = {0};
    args.struct_size = sizeof args;
    args.hidden = &in;
    args.out = &written;
    args.expert_load = load;
    args.expert_load_count = (size_t)sizes->num_experts;
    status = conclave_layer_forward(layer, &args);
  }
  if (status == CONCLAVE_OK) {
    double sum = 0;
    int64_t busiest = 0;
    int64_t expert;
    size_t i;
    for (i = 0; i < count; ++i) sum += fabs(out[i]);
    for (expert = 1; expert < sizes->num_experts; ++expert) {
      if (load[expert] > load[busiest]) busiest = expert;
    }
    printf("layer %lld: %lld experts, mean magnitude %.4f, expert %lld has %lld of %lld rows\n",
           (long long)index, (long long)sizes->num_experts, sum / (double)count, (long long)busiest,
           (long long)load[busiest], (long long)(TOKENS * sizes->top_k));
    if (!isfinite(sum) || sum == 0) status = CONCLAVE_ERROR_INTERNAL;
  }
  free(load);
  free(out);
  free(hidden);
  return status;
}

static conclave_status run_layer(const conclave_context* context,
                                 const conclave_checkpoint* checkpoint, size_t position) {
  conclave_layer_info info = {0};
  conclave_spec_info sizes = {0};
  conclave_layer_options options = {0};
  conclave_layer* layer = NULL;
  conclave_spec* spec = NULL;
  info.struct_size = sizeof info;
  sizes.struct_size = sizeof sizes;
  options.struct_size = sizeof options;
  options.max_tokens = TOKENS;
  conclave_status status = conclave_checkpoint_get_layer(checkpoint, position, &info);
  if (status != CONCLAVE_OK) return status;
  status = conclave_layer_create_from_checkpoint(context, checkpoint, info.index, &options, NULL,
                                                 &layer);
  if (status == CONCLAVE_OK) status = conclave_layer_spec(layer, &spec);
  if (status == CONCLAVE_OK) status = conclave_spec_get_info(spec, &sizes);
  if (status == CONCLAVE_OK) status = run(layer, info.index, &sizes);
  conclave_spec_destroy(spec);
  conclave_layer_destroy(layer);
  return status;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: layer MODEL\n");
    return 2;
  }
  conclave_context* context = NULL;
  conclave_checkpoint* checkpoint = NULL;
  conclave_checkpoint_info info = {0};
  info.struct_size = sizeof info;
  conclave_status status = conclave_context_create(NULL, &context);
  if (status == CONCLAVE_OK) status = conclave_checkpoint_open(argv[1], NULL, &checkpoint);
  if (status == CONCLAVE_OK) status = conclave_checkpoint_get_info(checkpoint, &info);
  if (status == CONCLAVE_OK) {
    printf("conclave %s, interface %d: %s, %zu MoE layers\n", conclave_version(),
           (int)conclave_interface(), info.model_type, info.num_layers);
  }
  size_t i;
  for (i = 0; status == CONCLAVE_OK && i < info.num_layers; ++i) {
    status = run_layer(context, checkpoint, i);
  }
  if (status != CONCLAVE_OK) report(status);
  conclave_checkpoint_destroy(checkpoint);
  conclave_context_destroy(context);
  return status == CONCLAVE_OK ? 0 : 1;
}
