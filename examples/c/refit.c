// New weights for a layer while it serves: a transaction that is staged beside forwards, with an
// epoch and a hash, whole and of some experts; one that fails leaves the old weights.
#include "example.h"

enum {
  EXPERTS = 4,
  HIDDEN = 32,
  WIDTH = 16,
  TOKENS = 6,
  GATE_UP = 2 * WIDTH * HIDDEN,
  DOWN = HIDDEN * WIDTH
};

static const char kSpec[] =
    "{\"num_experts\": 4, \"top_k\": 2, \"hidden_size\": 32, \"intermediate_size\": 16,"
    " \"weight_dtype\": \"F32\", \"has_gate\": false}";

// The weights that a trainer makes in a step.
typedef struct weights {
  float gate_up[EXPERTS * GATE_UP];
  float down[EXPERTS * DOWN];
} weights;

static weights before, after;
static float hidden[TOKENS * HIDDEN], logits[TOKENS * EXPERTS];
static float old_rows[TOKENS * HIDDEN], new_rows[TOKENS * HIDDEN], rows[TOKENS * HIDDEN];

// Experts [first, first + count) of the arrays; all of them are the weights of a whole layer.
static conclave_source* source_of(weights* from, int32_t first, int32_t count) {
  const conclave_tensor gate_up =
      tensor3(from->gate_up + first * GATE_UP, CONCLAVE_DTYPE_F32, count, 2 * WIDTH, HIDDEN);
  const conclave_tensor down =
      tensor3(from->down + first * DOWN, CONCLAVE_DTYPE_F32, count, HIDDEN, WIDTH);
  const conclave_named_tensor tensors[] = {{"gate_up", &gate_up}, {"down", &down}};
  int32_t experts[EXPERTS];
  conclave_source_options options = {0};
  conclave_source* source = NULL;
  int32_t i;
  for (i = 0; i < count; ++i) experts[i] = first + i;
  options.struct_size = sizeof options;
  if (count < EXPERTS) {
    options.num_experts = EXPERTS;
    options.experts = experts;
    options.experts_count = (size_t)count;
  }
  require(conclave_source_from_tensors(tensors, 2, &options, &source), "source");
  return source;
}

static conclave_layer* make_layer(const conclave_context* context, weights* from) {
  conclave_source* const source = source_of(from, 0, EXPERTS);
  conclave_spec* spec = NULL;
  conclave_layer* layer = NULL;
  require(conclave_spec_from_json(kSpec, &spec), "spec");
  require(conclave_layer_create(context, spec, source, NULL, NULL, &layer), "layer");
  conclave_spec_destroy(spec);
  conclave_source_destroy(source);
  return layer;
}

static void forward(const conclave_layer* layer, float* out) {
  const conclave_tensor in = matrix(hidden, CONCLAVE_DTYPE_F32, TOKENS, HIDDEN);
  const conclave_tensor given = matrix(logits, CONCLAVE_DTYPE_F32, TOKENS, EXPERTS);
  const conclave_tensor written = matrix(out, CONCLAVE_DTYPE_F32, TOKENS, HIDDEN);
  conclave_forward_args args = {0};
  args.struct_size = sizeof args;
  args.hidden = &in;
  args.router_logits = &given;
  args.out = &written;
  require(conclave_layer_forward(layer, &args), "forward");
}

static uint64_t hash_of(const conclave_layer* layer) {
  uint64_t hash = 0;
  require(conclave_layer_content_hash(layer, &hash), "hash");
  return hash;
}

static uint64_t epoch_of(const conclave_layer* layer) {
  conclave_layer_stats stats = {0};
  stats.struct_size = sizeof stats;
  require(conclave_layer_get_stats(layer, &stats), "counters");
  return stats.refit_epoch;
}

// `experts` [count] are refitted as a whole; none: all of the layer.
static conclave_status begin(conclave_layer* layer, const int32_t* experts, size_t count,
                             uint64_t epoch, conclave_refit** refit) {
  conclave_refit_scope scope = {0};
  conclave_refit_options options = {0};
  scope.struct_size = sizeof scope;
  scope.experts = experts;
  scope.experts_count = count;
  options.struct_size = sizeof options;
  options.scope = &scope;
  options.epoch = epoch;
  options.mode = CONCLAVE_REFIT_MODE_STAGED;
  return conclave_refit_create(layer, &options, refit);
}

// Experts 1 and 2 first, as their weights arrive first; then everything.
static void replace(conclave_layer* layer, uint64_t expected) {
  static const int32_t some[] = {1, 2};
  conclave_source* const part = source_of(&after, 1, 2);
  conclave_source* const whole = source_of(&after, 0, EXPERTS);
  conclave_refit* refit = NULL;
  int32_t staged = 0;
  require(begin(layer, some, 2, 100, &refit), "refit of experts");
  require(conclave_refit_stage(refit, part, NULL), "staging experts");
  require(conclave_refit_is_staged(refit, &staged), "asking");
  expect(staged == 1, "experts 1 and 2 are all that was named");
  forward(layer, rows);
  expect(same_bits(rows, old_rows, TOKENS * HIDDEN), "until the commit forwards have old weights");
  require(conclave_refit_commit(refit), "commit");
  conclave_refit_destroy(refit);
  expect(epoch_of(layer) == 100 && hash_of(layer) != expected, "a part of the layer is new");

  require(begin(layer, NULL, 0, 101, &refit), "refit");
  require(conclave_refit_stage(refit, whole, NULL), "staging");
  require(conclave_refit_commit(refit), "commit");
  conclave_refit_destroy(refit);
  conclave_source_destroy(whole);
  conclave_source_destroy(part);
  forward(layer, rows);
  expect(same_bits(rows, new_rows, TOKENS * HIDDEN), "forwards have the new weights");
  expect(epoch_of(layer) == 101, "the layer has the trainer's number");
  expect(hash_of(layer) == expected, "the weights are those of a layer that was made of them");
}

// A number that is not larger, and arrays that lack an expert.
static void fail(conclave_layer* layer) {
  const uint64_t hash = hash_of(layer);
  conclave_refit* refit = NULL;
  conclave_source* incomplete;
  expect_error(begin(layer, NULL, 0, 101, &refit), CONCLAVE_ERROR_INVALID_ARGUMENT);
  expect(refit == NULL, "what failed has made nothing");
  require(begin(layer, NULL, 0, 102, &refit), "refit");
  incomplete = source_of(&before, 0, 3);
  expect_error(conclave_refit_stage(refit, incomplete, NULL), CONCLAVE_ERROR_TENSOR_MISSING);
  // A rank whose stage failed commits too, and gets the error that the stage had met.
  expect_error(conclave_refit_commit(refit), CONCLAVE_ERROR_TENSOR_MISSING);
  conclave_refit_destroy(refit);  // rolls back
  conclave_source_destroy(incomplete);
  forward(layer, rows);
  expect(same_bits(rows, new_rows, TOKENS * HIDDEN), "the weights before serve on");
  expect(hash_of(layer) == hash && epoch_of(layer) == 101, "nothing has changed");
}

int main(void) {
  conclave_context* context = NULL;
  conclave_layer* layer;
  conclave_layer* other;
  fill(before.gate_up, EXPERTS * GATE_UP, 0.3F, 1);
  fill(before.down, EXPERTS * DOWN, 0.3F, 2);
  fill(after.gate_up, EXPERTS * GATE_UP, 0.3F, 3);
  fill(after.down, EXPERTS * DOWN, 0.3F, 4);
  fill(hidden, TOKENS * HIDDEN, 1.0F, 5);
  fill(logits, TOKENS * EXPERTS, 2.0F, 6);
  require(conclave_context_create(NULL, &context), "context");
  layer = make_layer(context, &before);
  other = make_layer(context, &after);
  forward(layer, old_rows);
  forward(other, new_rows);
  expect(hash_of(layer) != hash_of(other), "other weights have another hash");
  replace(layer, hash_of(other));
  fail(layer);
  printf("epoch %llu, hash %016llx\n", (unsigned long long)epoch_of(layer),
         (unsigned long long)hash_of(layer));
  conclave_layer_destroy(other);
  conclave_layer_destroy(layer);
  conclave_context_destroy(context);
  return 0;
}
