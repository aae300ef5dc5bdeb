// Times ggml's experts on the CPU, as llama.cpp and ik_llama.cpp run them, at real layer sizes.
//
//     g++ -O2 -std=c++20 bench/peers/ggml_experts.cc -I GGML/include -L LIB -lggml ... -o
//     ggml_experts ggml_experts --experts 128 --top-k 8 --hidden 2048 --intermediate 768 --type
//     q4_0 --tokens 1,512
//
// With -DIK_LLAMA, it is built against ik_llama.cpp: gate, up and SiLU are one fused operation
// there, and --repack turns weights into its interleaved types. Against llama.cpp, --repack puts
// weights into the CPU's repacking buffer, as its tools do by default where the type has such a
// form.
//
// As in `conclave bench`, routing is given and uniform, and the experts that a call hits are
// renamed to the next ones on a ring of at least 1 GiB of weights. A line of JSON is printed for
// each count of tokens: the least, median and mean time of a call.

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>
#ifndef IK_LLAMA
#include <ggml-cpu.h>
#else
extern "C" {
void iqk_repack_tensor(struct ggml_tensor* tensor);
}
#endif

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

struct Options {
  int64_t experts = 128, top_k = 8, hidden = 2048, intermediate = 768;
  std::string type = "q4_0", tokens = "1,512";
  int threads = 2;
  double seconds = 1.0;
  bool repack = false;
};

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "ggml_experts: %s\n", what.c_str());
  std::exit(2);
}

Options parse(int argc, char** argv) {
  Options options;
  const std::map<std::string, int64_t*> sizes = {{"--experts", &options.experts},
                                                 {"--top-k", &options.top_k},
                                                 {"--hidden", &options.hidden},
                                                 {"--intermediate", &options.intermediate}};
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--repack") {
      options.repack = true;
      continue;
    }
    if (++i == argc) fail("no value for " + name);
    if (const auto at = sizes.find(name); at != sizes.end()) {
      *at->second = std::atoll(argv[i]);
    } else if (name == "--type") {
      options.type = argv[i];
    } else if (name == "--tokens") {
      options.tokens = argv[i];
    } else if (name == "--threads") {
      options.threads = std::atoi(argv[i]);
    } else if (name == "--seconds") {
      options.seconds = std::atof(argv[i]);
    } else {
      fail("unknown option " + name);
    }
  }
  return options;
}

ggml_type type_of(const std::string& name) {
  for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
    const char* known = ggml_type_name(static_cast<ggml_type>(i));
    if (known != nullptr && name == known) return static_cast<ggml_type>(i);
  }
  fail("unknown type " + name);
}

struct Layer {
  ggml_tensor *gate, *up, *down;
};

// Random values of the type, the same for every expert: ggml's speed does not depend on them.
void fill(ggml_tensor* tensor, std::mt19937& random) {
  const int64_t row = tensor->ne[0], rows = tensor->ne[1];
  std::vector<float> values(row * rows);
  const float bound = std::sqrt(3.0F / static_cast<float>(row));
  std::uniform_real_distribution<float> uniform(-bound, bound);
  for (float& value : values) value = uniform(random);
  const size_t bytes = ggml_row_size(tensor->type, row) * rows;
  std::vector<char> one(bytes);
  const std::vector<float> importance(row, 1.0F);
#ifdef IK_LLAMA
  ggml_quantize_chunk(tensor->type, values.data(), one.data(), 0, rows, row, importance.data(),
                      nullptr);
#else
  ggml_quantize_chunk(tensor->type, values.data(), one.data(), 0, rows, row, importance.data());
#endif
  std::vector<char> all(bytes * tensor->ne[2]);
  for (int64_t e = 0; e < tensor->ne[2]; ++e)
    std::memcpy(all.data() + e * bytes, one.data(), bytes);
  ggml_backend_tensor_set(tensor, all.data(), 0, all.size());
}

ggml_backend_buffer_type_t weight_buffer(const Options& options) {
#ifndef IK_LLAMA
  if (options.repack) {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    const auto extra =
        reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts"));
    ggml_backend_buffer_type_t* found = extra(device);
    if (found == nullptr || *found == nullptr) fail("no repacking buffer");
    while (found[1] != nullptr) ++found;  // the repacking buffer is the last
    return *found;
  }
#else
  (void)options;
#endif
  return ggml_backend_cpu_buffer_type();
}

ggml_tensor* experts_graph(ggml_context* context, const Layer& layer, ggml_tensor* hidden,
                           ggml_tensor* ids, ggml_tensor* weights) {
  const int64_t width = hidden->ne[0], tokens = hidden->ne[1], top_k = ids->ne[0];
  ggml_tensor* rows = ggml_reshape_3d(context, hidden, width, 1, tokens);
#ifdef IK_LLAMA
  ggml_tensor* middle =
      ggml_moe_up_gate(context, layer.up, layer.gate, rows, ids, GGML_UNARY_OP_SILU);
#else
  ggml_tensor* gate = ggml_mul_mat_id(context, layer.gate, rows, ids);
  ggml_tensor* up = ggml_mul_mat_id(context, layer.up, rows, ids);
  ggml_tensor* middle = ggml_swiglu_split(context, gate, up);
#endif
  ggml_tensor* down = ggml_mul_mat_id(context, layer.down, middle, ids);
#ifdef IK_LLAMA
  return ggml_mul_multi_add(context, down, weights);
#else
  down = ggml_mul(context, down, weights);
  ggml_tensor* sum = nullptr;
  for (int64_t k = 0; k < top_k; ++k) {
    ggml_tensor* one = ggml_view_2d(context, down, width, tokens, down->nb[2], k * down->nb[1]);
    sum = sum == nullptr ? one : ggml_add(context, sum, one);
  }
  return top_k == 1 ? ggml_cont(context, sum) : sum;
#endif
}

struct Call {
  int layer;
  std::vector<int32_t> ids;
};

// Calls of a turn of the ring over the experts of all layers.
std::vector<Call> ring_of(const Options& options, int64_t tokens, int layers,
                          std::mt19937& random) {
  std::vector<Call> calls;
  int64_t next = 0;  // on the ring
  int layer = 0;
  while (layer < layers) {
    std::vector<int32_t> names(options.experts, -1);
    Call call{layer, {}};
    std::vector<int32_t> order(options.experts);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t k = 0; k < options.top_k; ++k) {
        std::swap(order[k], order[k + random() % (options.experts - k)]);
        int32_t& name = names[order[k]];
        if (name < 0) name = static_cast<int32_t>(next++ % options.experts);
        call.ids.push_back(name);
      }
    }
    calls.push_back(std::move(call));
    if (next >= options.experts) {
      next = 0;
      ++layer;
    }
  }
  return calls;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  const ggml_type type = type_of(options.type);
  ggml_backend_t backend = ggml_backend_cpu_init();
  ggml_backend_cpu_set_n_threads(backend, options.threads);
  std::mt19937 random(1);

  const size_t expert_bytes = 2 * ggml_row_size(type, options.hidden) * options.intermediate +
                              ggml_row_size(type, options.intermediate) * options.hidden;
  const int count = static_cast<int>(std::ceil(
      static_cast<double>(1 << 30) / static_cast<double>(expert_bytes * options.experts)));
  ggml_context* context = ggml_init({.mem_size = ggml_tensor_overhead() * (3 * count + 8),
                                     .mem_buffer = nullptr,
                                     .no_alloc = true});
  std::vector<Layer> layers;
  for (int i = 0; i < count; ++i) {
    layers.push_back(
        {ggml_new_tensor_3d(context, type, options.hidden, options.intermediate, options.experts),
         ggml_new_tensor_3d(context, type, options.hidden, options.intermediate, options.experts),
         ggml_new_tensor_3d(context, type, options.intermediate, options.hidden, options.experts)});
  }
  if (ggml_backend_alloc_ctx_tensors_from_buft(context, weight_buffer(options)) == nullptr) {
    fail("no memory for weights");
  }
#ifndef IK_LLAMA
  if (options.repack && layers[0].gate->extra == nullptr)
    fail("no repacked form of " + options.type);
#endif
  for (const Layer& layer : layers) {
    for (ggml_tensor* tensor : {layer.gate, layer.up, layer.down}) {
      fill(tensor, random);
#ifdef IK_LLAMA
      if (options.repack) iqk_repack_tensor(tensor);
#endif
    }
  }

  for (size_t at = 0; at < options.tokens.size();) {
    const int64_t tokens = std::atoll(options.tokens.c_str() + at);
    at = options.tokens.find(',', at);
    at = at == std::string::npos ? options.tokens.size() : at + 1;

    ggml_context* inputs = ggml_init(
        {.mem_size = ggml_tensor_overhead() * 8, .mem_buffer = nullptr, .no_alloc = true});
    ggml_tensor* hidden = ggml_new_tensor_2d(inputs, GGML_TYPE_F32, options.hidden, tokens);
    ggml_tensor* ids = ggml_new_tensor_2d(inputs, GGML_TYPE_I32, options.top_k, tokens);
    ggml_tensor* weights = ggml_new_tensor_3d(inputs, GGML_TYPE_F32, 1, options.top_k, tokens);
    ggml_backend_alloc_ctx_tensors(inputs, backend);
    std::vector<float> values(options.hidden * tokens);
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(random);
    ggml_backend_tensor_set(hidden, values.data(), 0, values.size() * sizeof(float));
    const std::vector<float> equal(options.top_k * tokens,
                                   1.0F / static_cast<float>(options.top_k));
    ggml_backend_tensor_set(weights, equal.data(), 0, equal.size() * sizeof(float));

    std::vector<ggml_context*> graph_contexts;
    std::vector<ggml_cgraph*> graphs;
    std::vector<ggml_gallocr_t> scratch;
    for (const Layer& layer : layers) {
      graph_contexts.push_back(
          ggml_init({.mem_size = ggml_tensor_overhead() * 256 + ggml_graph_overhead(),
                     .mem_buffer = nullptr,
                     .no_alloc = true}));
      graphs.push_back(ggml_new_graph(graph_contexts.back()));
      ggml_build_forward_expand(graphs.back(),
                                experts_graph(graph_contexts.back(), layer, hidden, ids, weights));
      scratch.push_back(ggml_gallocr_new(ggml_backend_get_default_buffer_type(backend)));
      if (!ggml_gallocr_alloc_graph(scratch.back(), graphs.back())) fail("no memory for a graph");
    }

    std::vector<double> times;
    double spent = 0;
    const std::vector<Call> ring = ring_of(options, tokens, count, random);
    for (int turn = 0; turn < 2 || spent < options.seconds; ++turn) {
      for (const Call& call : ring) {
        ggml_backend_tensor_set(ids, call.ids.data(), 0, call.ids.size() * sizeof(int32_t));
        const auto begin = std::chrono::steady_clock::now();
        if (ggml_backend_graph_compute(backend, graphs[call.layer]) != GGML_STATUS_SUCCESS)
          fail("compute");
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (turn == 0) continue;  // a warm-up
        times.push_back(took.count());
        spent += took.count();
      }
    }
    std::sort(times.begin(), times.end());
    const double mean =
        std::accumulate(times.begin(), times.end(), 0.0) / static_cast<double>(times.size());
    std::printf(
        "{\"type\": \"%s\", \"repack\": %s, \"tokens\": %lld, \"threads\": %d, \"calls\": %zu, "
        "\"ms_min\": %.4f, \"ms_median\": %.4f, \"ms_mean\": %.4f}\n",
        options.type.c_str(), options.repack ? "true" : "false", static_cast<long long>(tokens),
        options.threads, times.size(), times.front() * 1e3, times[times.size() / 2] * 1e3,
        mean * 1e3);
    std::fflush(stdout);
    for (ggml_gallocr_t one : scratch) ggml_gallocr_free(one);
    for (ggml_context* one : graph_contexts) ggml_free(one);
    ggml_free(inputs);
  }
}
