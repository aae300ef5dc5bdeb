// A model is written anew with its experts in int8: with progress, an end midway that leaves
// nothing, and layers of both models on the same rows.
#include "example.h"

enum { TOKENS = 8 };

// The program that wants to stop says so where it is told how far the conversion is.
typedef struct watcher {
  int calls;
  int stops_at;     // 0: never
  int64_t quarter;  // printed last
} watcher;

static conclave_status watch(void* user, conclave_convert_progress* progress) {
  watcher* const self = user;
  const int64_t quarter = 4 * progress->done / progress->total;
  ++self->calls;
  if (quarter != self->quarter)
    printf("%s: %lld of %lld bytes\n", progress->phase, (long long)progress->done,
           (long long)progress->total);
  self->quarter = quarter;
  if (self->calls != self->stops_at) return CONCLAVE_OK;
  progress->reason = "the user has asked to stop";
  return CONCLAVE_ERROR_CANCELLED;
}

static float* outputs(const conclave_context* context, const char* path, int64_t* count) {
  conclave_checkpoint* model = NULL;
  conclave_layer* layer = NULL;
  conclave_spec* spec = NULL;
  conclave_spec_info sizes = {0};
  conclave_layer_info first = {0};
  conclave_forward_args args = {0};
  conclave_tensor in;
  conclave_tensor written;
  float* hidden;
  float* out;
  sizes.struct_size = sizeof sizes;
  first.struct_size = sizeof first;
  args.struct_size = sizeof args;
  require(conclave_checkpoint_open(path, NULL, &model), "opening");
  require(conclave_checkpoint_get_layer(model, 0, &first), "the first layer");
  require(conclave_layer_create_from_checkpoint(context, model, first.index, NULL, NULL, &layer),
          "creating the layer");
  require(conclave_layer_spec(layer, &spec), "its spec");
  require(conclave_spec_get_info(spec, &sizes), "its sizes");
  *count = TOKENS * sizes.hidden_size;
  hidden = allocate(*count, sizeof *hidden);
  out = allocate(*count, sizeof *out);
  fill(hidden, *count, 1.0F, 1);
  in = matrix(hidden, CONCLAVE_DTYPE_F32, TOKENS, sizes.hidden_size);
  written = matrix(out, CONCLAVE_DTYPE_F32, TOKENS, sizes.hidden_size);
  args.hidden = &in;
  args.out = &written;
  require(conclave_layer_forward(layer, &args), "a forward");
  free(hidden);
  conclave_spec_destroy(spec);
  conclave_layer_destroy(layer);
  conclave_checkpoint_destroy(model);
  return out;
}

static double distance(const float* found, const float* expected, int64_t count) {
  double off = 0;
  double size = 0;
  int64_t i;
  for (i = 0; i < count; ++i) {
    off += ((double)found[i] - expected[i]) * ((double)found[i] - expected[i]);
    size += (double)expected[i] * expected[i];
  }
  return sqrt(off / size);
}

static void compare(const conclave_context* context, const char* source, const char* result) {
  int64_t count = 0;
  int64_t same_count = 0;
  float* const before = outputs(context, source, &count);
  float* const after = outputs(context, result, &same_count);
  double error;
  expect(count == same_count, "both models have the same sizes");
  error = distance(after, before, count);
  printf("outputs of both differ by %.2e\n", error);
  expect(error > 0 && error < 0.05, "8 bits are near, and not the same");
  free(after);
  free(before);
}

int main(int argc, char** argv) {
  conclave_context* context = NULL;
  conclave_conversion* made = NULL;
  conclave_convert_options options = {0};
  conclave_conversion_info info = {0};
  watcher user = {0, 1, 0};
  const char* source;
  const char* destination;
  if (argc != 3) {
    fprintf(stderr, "usage: convert MODEL DESTINATION\n");
    return 2;
  }
  source = argv[1];
  destination = argv[2];
  options.struct_size = sizeof options;
  options.existing = CONCLAVE_EXISTING_MODEL_REPLACE;
  options.tokens = 8;
  options.progress = watch;
  options.progress_user = &user;
  info.struct_size = sizeof info;
  require(conclave_context_create(NULL, &context), "a context");

  expect_error(conclave_convert_model(context, source, destination, "int9", &options, &made),
               CONCLAVE_ERROR_UNKNOWN_NAME);
  expect_error(conclave_convert_model(context, source, source, "int8-channel", &options, &made),
               CONCLAVE_ERROR_FILE_WRITE);
  expect_error(
      conclave_convert_model(context, source, destination, "int8-channel", &options, &made),
      CONCLAVE_ERROR_CANCELLED);
  expect(made == NULL, "what fails makes nothing");

  user.stops_at = 0;
  require(conclave_convert_model(context, source, destination, "int8-channel", &options, &made),
          "converting");
  require(conclave_conversion_get_info(made, &info), "its report");
  printf("%s: %llu bytes in place of %llu, weights off by %.2e, outputs by %.2e at most\n",
         info.model, (unsigned long long)info.bytes_after, (unsigned long long)info.bytes_before,
         info.relative_error, info.worst_error);
  expect(info.bytes_after < info.bytes_before, "codes are smaller");
  compare(context, source, info.model);
  conclave_conversion_destroy(made);
  conclave_context_destroy(context);
  return 0;
}
