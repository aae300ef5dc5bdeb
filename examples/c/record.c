// Recorded routing: an engine records which experts its tokens went to, a trainer whose router has
// moved on replays them, in other batches, from a file, with the same bits.
#include "example.h"

enum { EXPERTS = 16, TOP_K = 4, HIDDEN = 32, WIDTH = 16, TOKENS = 24, BATCH = 8, LAYER = 3 };

static const char kSpec[] =
    "{\"num_experts\": 16, \"top_k\": 4, \"hidden_size\": 32, \"intermediate_size\": 16,"
    " \"weight_dtype\": \"F32\"}";

static float gate_up[EXPERTS * 2 * WIDTH * HIDDEN], down[EXPERTS * HIDDEN * WIDTH];
static float hidden[TOKENS * HIDDEN];
static float rolled_out[TOKENS * HIDDEN], routed_anew[TOKENS * HIDDEN], replayed[TOKENS * HIDDEN];
static int32_t ids[TOKENS * TOP_K];
static float weights[TOKENS * TOP_K];

static conclave_layer* make_layer(const conclave_context* context, const conclave_spec* spec,
                                  float* router) {
  const conclave_tensor gate_up_view =
      tensor3(gate_up, CONCLAVE_DTYPE_F32, EXPERTS, 2 * WIDTH, HIDDEN);
  const conclave_tensor down_view = tensor3(down, CONCLAVE_DTYPE_F32, EXPERTS, HIDDEN, WIDTH);
  const conclave_tensor router_view = matrix(router, CONCLAVE_DTYPE_F32, EXPERTS, HIDDEN);
  const conclave_named_tensor tensors[] = {
      {"gate_up", &gate_up_view}, {"down", &down_view}, {"router", &router_view}};
  conclave_source* source = NULL;
  conclave_layer* layer = NULL;
  require(conclave_source_from_tensors(tensors, 3, NULL, &source), "source");
  require(conclave_layer_create(context, spec, source, NULL, NULL, &layer), "layer");
  conclave_source_destroy(source);
  return layer;
}

typedef enum use { CAPTURE, REPLAY, PLAIN } use;

// Tokens [first, first + count) of the sequence. Ids and weights of the routing are written where
// they are captured, and read where they are replayed.
static void forward(const conclave_layer* layer, int64_t first, int64_t count, use routing,
                    float* to) {
  const conclave_tensor in = matrix(hidden + first * HIDDEN, CONCLAVE_DTYPE_F32, count, HIDDEN);
  const conclave_tensor written = matrix(to + first * HIDDEN, CONCLAVE_DTYPE_F32, count, HIDDEN);
  const conclave_tensor chosen = matrix(ids + first * TOP_K, CONCLAVE_DTYPE_I32, count, TOP_K);
  const conclave_tensor weighed = matrix(weights + first * TOP_K, CONCLAVE_DTYPE_F32, count, TOP_K);
  conclave_forward_args args = {0};
  args.struct_size = sizeof args;
  args.hidden = &in;
  args.out = &written;
  if (routing == CAPTURE) {
    args.captured_ids = &chosen;
    args.captured_weights = &weighed;
  } else if (routing == REPLAY) {
    args.topk_ids = &chosen;
    args.topk_weights = &weighed;
  }
  require(conclave_layer_forward(layer, &args), "forward");
}

// The engine's side: batches of tokens, each named by its sequence and position.
static void roll_out(const conclave_layer* layer, const conclave_spec* spec, const char* path) {
  static const int64_t layers[] = {LAYER};
  conclave_recorder_options options = {0};
  conclave_recorder* recorder = NULL;
  int64_t first;
  int64_t recorded = 0, dropped = 0;
  options.struct_size = sizeof options;
  options.capacity = TOKENS;
  options.when_full = CONCLAVE_WHEN_FULL_ERROR;
  options.model = "example";
  require(conclave_recorder_create(layers, &spec, 1, &options, &recorder), "recorder");
  for (first = 0; first < TOKENS; first += BATCH) {
    conclave_token_key tokens[BATCH];
    const conclave_tensor chosen = matrix(ids + first * TOP_K, CONCLAVE_DTYPE_I32, BATCH, TOP_K);
    const conclave_tensor weighed =
        matrix(weights + first * TOP_K, CONCLAVE_DTYPE_F32, BATCH, TOP_K);
    int64_t i;
    forward(layer, first, BATCH, CAPTURE, rolled_out);
    for (i = 0; i < BATCH; ++i) {
      tokens[i].sequence = 7;
      tokens[i].position = first + i;
    }
    require(conclave_recorder_record(recorder, LAYER, &chosen, &weighed, tokens, BATCH), "record");
  }
  require(conclave_recorder_counts(recorder, LAYER, &recorded, &dropped), "counts");
  expect(recorded == TOKENS && dropped == 0, "all tokens are recorded");
  require(conclave_recorder_write(recorder, path), "write");
  conclave_recorder_destroy(recorder);
}

// The trainer's side: all tokens at once, in an order of its own that the keys say.
static void replay(const conclave_layer* layer, const char* path) {
  conclave_replay* record = NULL;
  conclave_replay_layer about = {0};
  conclave_token_key tokens[TOKENS];
  const conclave_tensor chosen = matrix(ids, CONCLAVE_DTYPE_I32, TOKENS, TOP_K);
  const conclave_tensor weighed = matrix(weights, CONCLAVE_DTYPE_F32, TOKENS, TOP_K);
  int64_t i;
  memset(ids, 0, sizeof ids);
  memset(weights, 0, sizeof weights);
  about.struct_size = sizeof about;
  require(conclave_replay_open(path, &record), "open");
  require(conclave_replay_get_layer(record, 0, &about), "layer of the record");
  expect(about.layer == LAYER && about.num_slots == TOP_K && about.num_tokens == TOKENS,
         "the file says what it has");
  for (i = 0; i < TOKENS; ++i) {
    tokens[i].sequence = 7;
    tokens[i].position = i;
  }
  require(conclave_replay_find(record, LAYER, tokens, TOKENS, &chosen, &weighed), "find");
  forward(layer, 0, TOKENS, REPLAY, replayed);
  // A token that nobody recorded is an error, not a row of zeros.
  tokens[5].position = TOKENS;
  expect_error(conclave_replay_find(record, LAYER, tokens, TOKENS, &chosen, &weighed),
               CONCLAVE_ERROR_INVALID_ARGUMENT);
  conclave_replay_destroy(record);
}

int main(int argc, char** argv) {
  static float router[EXPERTS * HIDDEN], moved[EXPERTS * HIDDEN];
  conclave_context* context = NULL;
  conclave_spec* spec = NULL;
  conclave_layer* engine;
  conclave_layer* trainer;
  int64_t i;
  int others = 0;
  if (argc != 2) {
    fprintf(stderr, "usage: record FILE\n");
    return 2;
  }
  fill(gate_up, EXPERTS * 2 * WIDTH * HIDDEN, 0.3F, 1);
  fill(down, EXPERTS * HIDDEN * WIDTH, 0.3F, 2);
  fill(hidden, TOKENS * HIDDEN, 1.0F, 3);
  fill(router, EXPERTS * HIDDEN, 0.5F, 4);
  fill(moved, EXPERTS * HIDDEN, 0.1F, 5);
  for (i = 0; i < EXPERTS * HIDDEN; ++i) moved[i] += router[i];
  require(conclave_context_create(NULL, &context), "context");
  require(conclave_spec_from_json(kSpec, &spec), "spec");
  engine = make_layer(context, spec, router);
  trainer = make_layer(context, spec, moved);
  roll_out(engine, spec, argv[1]);
  forward(trainer, 0, TOKENS, PLAIN, routed_anew);
  replay(trainer, argv[1]);
  for (i = 0; i < TOKENS; ++i) {
    others += !same_bits(routed_anew + i * HIDDEN, rolled_out + i * HIDDEN, HIDDEN);
  }
  expect(others > 0, "the trainer's router goes elsewhere");
  expect(same_bits(replayed, rolled_out, TOKENS * HIDDEN), "replayed rows have the same bits");
  printf("%d of %d tokens have other rows by the trainer's router, and none by the record\n",
         others, TOKENS);
  conclave_layer_destroy(trainer);
  conclave_layer_destroy(engine);
  conclave_spec_destroy(spec);
  conclave_context_destroy(context);
  return 0;
}
