// A communicator of the application's own: two ranks, threads that exchange bytes by this program's
// functions, run one layer expert-parallel. The result has the bits of one rank alone.
#define _POSIX_C_SOURCE 200809L

#include "../example.h"
#include "transport.h"

#include <pthread.h>

enum { RANKS = 2, EXPERTS = 6, HIDDEN = 64, WIDTH = 32, TOKENS = 20, OF_RANK = TOKENS / RANKS };

static const char kSpec[] =
    "{\"num_experts\": 6, \"top_k\": 2, \"hidden_size\": 64, \"intermediate_size\": 32,"
    " \"weight_dtype\": \"F32\"}";

static float gate_up[EXPERTS * 2 * WIDTH * HIDDEN], down[EXPERTS * HIDDEN * WIDTH];
static float router[EXPERTS * HIDDEN], hidden[TOKENS * HIDDEN];
static float alone[TOKENS * HIDDEN], together[TOKENS * HIDDEN];

// Every rank is given the whole layer and packs the experts that it holds.
static conclave_layer* make_layer(const conclave_context* context,
                                  const conclave_parallel* parallel) {
  const conclave_tensor gate_up_view =
      tensor3(gate_up, CONCLAVE_DTYPE_F32, EXPERTS, 2 * WIDTH, HIDDEN);
  const conclave_tensor down_view = tensor3(down, CONCLAVE_DTYPE_F32, EXPERTS, HIDDEN, WIDTH);
  const conclave_tensor router_view = matrix(router, CONCLAVE_DTYPE_F32, EXPERTS, HIDDEN);
  const conclave_named_tensor tensors[] = {
      {"gate_up", &gate_up_view}, {"down", &down_view}, {"router", &router_view}};
  conclave_source* source = NULL;
  conclave_spec* spec = NULL;
  conclave_layer* layer = NULL;
  require(conclave_spec_from_json(kSpec, &spec), "spec");
  require(conclave_source_from_tensors(tensors, 3, NULL, &source), "source");
  require(conclave_layer_create(context, spec, source, NULL, parallel, &layer), "layer");
  conclave_source_destroy(source);
  conclave_spec_destroy(spec);
  return layer;
}

// Runs tokens [first, first + count) into the same rows of `to`. Without a communicator this is all
// that there is; with one every rank calls it at the same time.
static void run(conclave_communicator* communicator, int32_t rank, int64_t first, int64_t count,
                float* to) {
  const conclave_tensor in = matrix(hidden + first * HIDDEN, CONCLAVE_DTYPE_F32, count, HIDDEN);
  const conclave_tensor written = matrix(to + first * HIDDEN, CONCLAVE_DTYPE_F32, count, HIDDEN);
  conclave_context_options options = {0};
  conclave_parallel parallel = {0};
  conclave_forward_args args = {0};
  conclave_context* context = NULL;
  conclave_layer* layer;
  options.struct_size = sizeof options;
  options.num_threads = 1;
  options.communicator = communicator;
  parallel.struct_size = sizeof parallel;
  parallel.ep_size = communicator == NULL ? 1 : RANKS;
  parallel.ep_rank = rank;
  args.struct_size = sizeof args;
  args.hidden = &in;
  args.out = &written;
  require(conclave_context_create(&options, &context), "context");
  layer = make_layer(context, &parallel);
  require(conclave_layer_forward(layer, &args), "forward");
  conclave_layer_destroy(layer);
  conclave_context_destroy(context);
}

typedef struct seat {
  struct thread_group* group;
  int32_t rank;
} seat;

static void* run_rank(void* of) {
  const seat* const mine = of;
  const conclave_own_communicator table = thread_group_rank(mine->group, mine->rank, 0);
  conclave_communicator* communicator = NULL;
  require(conclave_communicator_from_own(&table, &communicator), "communicator");
  run(communicator, mine->rank, mine->rank * OF_RANK, OF_RANK, together);
  // Ending it tells peers that wait for this rank: it comes when all of them are done.
  require(conclave_communicator_barrier(communicator, "good-bye"), "good-bye");
  conclave_communicator_destroy(communicator);
  return NULL;
}

static void run_together(void) {
  struct thread_group* const group = thread_group_create(RANKS);
  pthread_t threads[RANKS];
  seat seats[RANKS];
  int32_t rank;
  expect(group != NULL, "there is memory");
  for (rank = 0; rank < RANKS; ++rank) {
    seats[rank].group = group;
    seats[rank].rank = rank;
    expect(pthread_create(&threads[rank], NULL, run_rank, &seats[rank]) == 0, "a thread begins");
  }
  for (rank = 0; rank < RANKS; ++rank) pthread_join(threads[rank], NULL);
  thread_group_destroy(group);
}

// The deadline is the transport's: rank 1 never comes, and rank 0 is told of it by name.
static void wait_in_vain(void) {
  struct thread_group* const group = thread_group_create(RANKS);
  conclave_communicator* communicator = NULL;
  conclave_error error = {0};
  error.struct_size = sizeof error;
  conclave_own_communicator table;
  expect(group != NULL, "there is memory");
  table = thread_group_rank(group, 0, 20);
  require(conclave_communicator_from_own(&table, &communicator), "communicator");
  expect_error(conclave_communicator_barrier(communicator, "in vain"), CONCLAVE_ERROR_COMM_TIMEOUT);
  require(conclave_last_error(&error), "error");
  expect(error.peer == 1 && strcmp(error.phase, "in vain") == 0, "the error says who and where");
  conclave_communicator_destroy(communicator);
  thread_group_destroy(group);
}

int main(void) {
  fill(gate_up, EXPERTS * 2 * WIDTH * HIDDEN, 0.2F, 1);
  fill(down, EXPERTS * HIDDEN * WIDTH, 0.2F, 2);
  fill(router, EXPERTS * HIDDEN, 0.5F, 3);
  fill(hidden, TOKENS * HIDDEN, 1.0F, 4);
  run(NULL, 0, 0, TOKENS, alone);
  run_together();
  expect(same_bits(alone, together, TOKENS * HIDDEN), "two ranks have the bits of one");
  wait_in_vain();
  printf("%d tokens over %d ranks have the bits of one rank\n", TOKENS, RANKS);
  return 0;
}
