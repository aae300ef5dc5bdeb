// D1 and D2 of whole layers on a GPU: the same bits in every run beside other work and, if
// promised, in any batch. Also runs every tile that a table may name in a whole layer.

#include "device_layer.h"
#include "support/cuda/routings.h"

#include "conclave/tuning.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace conclave {
namespace {

using testing::DeviceForward;
using testing::DeviceLayer;
using testing::gather_rows;
using testing::make_spec;
using testing::NumberForm;
using testing::random_tensor;
using testing::same_bits;

class CudaDeterminism : public testing::CudaLayerTest {};

// Runs another layer on a stream of its own in ever-changing sizes, which takes multiprocessors,
// caches and memory away at random moments.
class Rival {
 public:
  Rival() : owned_(make_spec(16, 4, 512, 256, DType::kBF16), {.max_tokens = 512}, {}, 77) {
    for (const int64_t tokens : {1, 3, 8, 33, 120, 512}) {
      const Tensor hidden = random_tensor(DType::kBF16, tokens, 512, 5);
      forwards_.push_back(std::make_unique<DeviceForward>(owned_, hidden.view(), DType::kBF16));
    }
  }
  void enqueue() { forwards_[random_() % forwards_.size()]->enqueue(); }

 private:
  DeviceLayer owned_;
  std::vector<std::unique_ptr<DeviceForward>> forwards_;
  std::mt19937 random_{3};
};

// Counts how many of 1000 runs differ.
int differing_runs(DeviceForward& forward, DeviceLayer& owned, Rival& rival) {
  owned.queue.fill(forward.args.out, 0xFF);
  forward.enqueue();
  const Tensor first = forward.out();
  int differing = 0;
  for (int run = 1; run < 1000; ++run) {
    for (int i = run % 3; i > 0; --i) rival.enqueue();
    owned.queue.fill(forward.args.out, 0xFF);
    forward.enqueue();
    differing += same_bits(first, forward.out()) ? 0 : 1;
  }
  return differing;
}

TEST_F(CudaDeterminism, ThousandRunsBesideARival_SameBits) {
  Rival rival;
  for (const NumberForm& form : testing::number_forms()) {
    SCOPED_TRACE(form.name);
    const MoeSpec spec = testing::with_form(make_spec(12, 3, 264, 136, form.dtype), form);
    DeviceLayer owned(spec, {.max_tokens = 700});
    for (const int64_t tokens : {4, 60, 700}) {
      const Tensor hidden = random_tensor(testing::row_dtype(form), tokens, spec.hidden_size, 5);
      DeviceForward forward(owned, hidden.view(), testing::row_dtype(form));
      EXPECT_EQ(differing_runs(forward, owned, rival), 0) << tokens << " tokens";
    }
  }
}

// Covers the rows for many and for few tokens, whatever the cost model would choose at these sizes.
TEST_F(CudaDeterminism, ThousandRunsOfEachKernelBesideARival_SameBits) {
  Rival rival;
  for (const NumberForm& form : testing::number_forms()) {
    SCOPED_TRACE(form.name);
    const MoeSpec spec = testing::with_form(make_spec(6, 2, 264, 136, form.dtype), form);
    const Tensor hidden = random_tensor(testing::row_dtype(form), 150, spec.hidden_size, 5);
    for (const char* kernel :
         {"cuda.stream_sm90", "cuda.tile_sm90", "cuda.stream_fp8_sm90", "cuda.tile_fp8_sm90"}) {
      SCOPED_TRACE(kernel);
      std::unique_ptr<DeviceLayer> owned;
      try {
        owned =
            std::make_unique<DeviceLayer>(spec, LayerOptions{.max_tokens = 150, .kernel = kernel});
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::kUnsupported) << error.what();
        continue;
      }
      DeviceForward forward(*owned, hidden.view(), testing::row_dtype(form));
      EXPECT_EQ(differing_runs(forward, *owned, rival), 0);
    }
  }
}

std::vector<int64_t> shuffled(int64_t count, uint32_t seed) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  return order;
}

Tensor outputs(DeviceLayer& owned, const Tensor& hidden, DType dtype) {
  DeviceForward forward(owned, hidden.view(), dtype);
  forward.enqueue();
  return forward.out();
}

struct Invariance {
  int64_t compared = 0;
  int64_t differing = 0;
};

// Compares a needle, a few rows and a shuffled whole with the rows of one call of 2000, in one
// chunk and in chunks of 77. The plan is the layer's own, so layers are not compared with each
// other. With one expert per token, no sum may follow the down product.
Invariance compare_batches(const NumberForm& form, Determinism determinism, int64_t max_tokens,
                           int64_t top_k) {
  MoeSpec spec = testing::with_form(make_spec(12, top_k, 264, 136, form.dtype), form);
  spec.router.renormalize = Renormalize::kNone;
  spec.shared = {.mode = SharedMode::kAdd, .intermediate_size = 128};
  // The single launch takes no shared experts, and it must be among what is compared.
  if (determinism == Determinism::kRepeatable || top_k == 1) spec.shared = {};
  const DType dtype = testing::row_dtype(form);
  const int64_t most = 2000;
  DeviceLayer owned(spec, {.max_tokens = max_tokens, .determinism = determinism});
  const Tensor hidden = random_tensor(dtype, most, spec.hidden_size, 5);
  const Tensor whole = outputs(owned, hidden, dtype);
  Invariance result;
  const auto compare = [&](const std::vector<int64_t>& rows) {
    const Tensor some = outputs(owned, gather_rows(hidden, rows), dtype);
    for (size_t i = 0; i < rows.size(); ++i) {
      const auto row = static_cast<int64_t>(i);
      ++result.compared;
      result.differing += testing::row_bytes(some, row) != testing::row_bytes(whole, rows[i]);
    }
  };
  const std::vector<int64_t> order = shuffled(most, 7);
  compare(order);
  for (const int64_t count : {1, 2, 8, 9, 16, 17, 31, 64, 65, 128, 250, 512, 1000, 1999}) {
    const int64_t first = (most - count) / 2;
    compare({order.begin() + first, order.begin() + first + count});
  }
  for (int64_t needle = 0; needle < 40; ++needle) compare({needle * 49});
  return result;
}

TEST_F(CudaDeterminism, BatchInvariant_NoRowChangesWithItsBatch) {
  for (const NumberForm& form : testing::number_forms()) {
    for (const auto& [top_k, max_tokens] :
         {std::pair<int64_t, int64_t>{3, 2000}, {3, 77}, {1, 2000}}) {
      const Invariance result =
          compare_batches(form, Determinism::kBatchInvariant, max_tokens, top_k);
      EXPECT_EQ(result.differing, 0)
          << form.name << " k" << top_k << ", of " << result.compared << " in " << max_tokens;
    }
  }
}

// The comparison can fail: without the promise, some row of some format differs.
TEST_F(CudaDeterminism, Repeatable_SomeRowChangesWithItsBatch) {
  int64_t differing = 0;
  for (const NumberForm& form : testing::number_forms()) {
    differing += compare_batches(form, Determinism::kRepeatable, 2000, 3).differing;
  }
  EXPECT_GT(differing, 0);
}

// Runs every kernel and tile that a tuning table may name in a whole layer: nothing falls back.
TEST_F(CudaDeterminism, EveryCandidateOfTheTuner_IsWithinTheBar) {
  int candidates = 0;
  for (const NumberForm& form : testing::number_forms()) {
    MoeSpec spec = testing::with_form(make_spec(10, 3, 264, 136, form.dtype), form);
    spec.has_bias = true;
    const DType dtype = testing::row_dtype(form);
    const Context context({.device = "cuda:0", .num_threads = 1});
    for (const int64_t tokens : {8, 90}) {
      const Tensor hidden = random_tensor(dtype, tokens, spec.hidden_size, 5);
      const auto routing = testing::random_routing(tokens, 10, 3, 9);
      for (const TuningEntry& entry :
           tuning_candidates(context, spec, {.max_tokens = tokens}, {}, tokens)) {
        SCOPED_TRACE(form.name + " " + entry.kernel + " " + entry.tile);
        auto table = std::make_shared<TuningTable>();
        table->set(entry);
        DeviceLayer owned(spec, {.max_tokens = tokens, .tuning = table});
        ASSERT_EQ(owned.layer.plan().ladder.back().kernel, entry.kernel);
        ASSERT_EQ(owned.layer.plan().ladder.back().tile, entry.tile);
        DeviceForward forward(owned, hidden.view(), dtype);
        forward.route_by(routing.ids, routing.weights);
        forward.enqueue();
        EXPECT_LE(testing::worst_error(owned, hidden, routing, forward.out()), 6e-3);
        ++candidates;
      }
    }
  }
  RecordProperty("candidates", candidates);
  EXPECT_GT(candidates, 50);
}

struct Skew {
  const char* name;
  testing::RoutingKind kind;
};

testing::GivenRouting skewed_routing(const Skew& skew, int64_t tokens) {
  const testing::HostRouting host = testing::make_routing(
      {.num_tokens = tokens, .num_experts = 60, .top_k = 4, .kind = skew.kind, .seed = 5});
  testing::GivenRouting routing{.ids = Tensor(DType::kI32, {tokens, 4}),
                                .weights = Tensor(DType::kF32, {tokens, 4})};
  std::copy(host.ids.begin(), host.ids.end(), routing.ids.as<int32_t>());
  std::copy(host.weights.begin(), host.weights.end(), routing.weights.as<float>());
  return routing;
}

// Covers one hot expert, Zipf and idle experts; then every slot of every token on one expert, and
// all tokens equal.
TEST_F(CudaDeterminism, SkewedRoutings_AreWithinTheBar) {
  for (const NumberForm& form : testing::number_forms()) {
    const MoeSpec spec = testing::with_form(make_spec(60, 4, 264, 136, form.dtype), form);
    const DType dtype = testing::row_dtype(form);
    DeviceLayer owned(spec, {.max_tokens = 520});
    for (const int64_t tokens : {1, 7, 64, 127, 129, 520}) {
      SCOPED_TRACE(::testing::Message() << form.name << " T" << tokens);
      const Tensor hidden = random_tensor(dtype, tokens, spec.hidden_size, 5);
      // `same` is an equivalent routing.
      const auto check_as = [&](const char* name, const Tensor& rows,
                                const testing::GivenRouting& routing,
                                const testing::GivenRouting& same) {
        DeviceForward forward(owned, rows.view(), dtype);
        forward.route_by(routing.ids, routing.weights);
        forward.enqueue();
        EXPECT_LE(testing::worst_error(owned, rows, same, forward.out()), 6e-3) << name;
      };
      const auto check = [&](const char* name, const Tensor& rows,
                             const testing::GivenRouting& routing) {
        check_as(name, rows, routing, routing);
      };
      for (const Skew& skew : {Skew{"one hot", testing::RoutingKind::kOneHot},
                               Skew{"Zipf", testing::RoutingKind::kZipf},
                               Skew{"holes", testing::RoutingKind::kHoles}}) {
        check(skew.name, hidden, skewed_routing(skew, tokens));
      }
      testing::GivenRouting one = skewed_routing({"", testing::RoutingKind::kUniform}, tokens);
      std::fill_n(one.ids.as<int32_t>(), tokens * 4, 59);
      // float64 sees the expert once with weight 1, because ambiguous codes have the same effect in
      // all four slots.
      testing::GivenRouting once = skewed_routing({"", testing::RoutingKind::kUniform}, tokens);
      std::fill_n(once.ids.as<int32_t>(), tokens * 4, -1);
      for (int64_t token = 0; token < tokens; ++token) {
        once.ids.as<int32_t>()[token * 4] = 59;
        once.weights.as<float>()[token * 4] = 1;
      }
      check_as("every slot on one expert", hidden, one, once);
      std::fill_n(one.ids.as<int32_t>(), tokens * 4, -1);
      check("no expert at all", hidden, one);
      const Tensor same = gather_rows(hidden, std::vector<int64_t>(static_cast<size_t>(tokens), 0));
      check("identical tokens", same, skewed_routing({"", testing::RoutingKind::kUniform}, tokens));
    }
  }
}

}  // namespace
}  // namespace conclave
