// Runs the (dp, tp, ep) forms and sizes of vLLM's test_moe_layer.py over thread ranks.

#include "support/layer_fixture.h"
#include "support/rank_grid.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::GridRank;
using testing::make_spec;
using testing::on_grid;
using testing::random_tensor;

struct MatrixCase {
  int64_t tokens, hidden, inner, experts, top_k;
  int32_t dp, tp;
  bool expert_parallel;
  bool replicas;
};

std::vector<MatrixCase> matrix_cases() {
  struct Form {
    int32_t dp, tp;
    bool expert_parallel;
  };
  std::vector<MatrixCase> cases;
  for (const auto& [dp, tp, ep] :
       {Form{1, 2, false}, {1, 4, false}, {2, 1, true}, {4, 1, true}, {2, 2, true}}) {
    for (const bool replicas : {false, true}) {
      if (replicas && !ep) continue;
      cases.push_back({1, 128, 256, 8, 2, dp, tp, ep, replicas});
      cases.push_back({1, 128, 256, 64, 6, dp, tp, ep, replicas});
      cases.push_back({32, 512, 512, 8, 2, dp, tp, ep, replicas});
      cases.push_back({222, 1024, 2048, 8, 6, dp, tp, ep, replicas});
    }
  }
  return cases;
}

std::string name_of(const ::testing::TestParamInfo<MatrixCase>& info) {
  const MatrixCase& c = info.param;
  return "M" + std::to_string(c.tokens) + "K" + std::to_string(c.hidden) + "N" +
         std::to_string(c.inner) + "E" + std::to_string(c.experts) + "Top" +
         std::to_string(c.top_k) + "Dp" + std::to_string(c.dp) + "Tp" + std::to_string(c.tp) +
         (c.expert_parallel ? "Ep" : "") + (c.replicas ? "Eplb" : "");
}

// Fills the experts' matrices once, since the generator is slower than the layer.
class KeptSource final : public WeightSource {
 public:
  explicit KeptSource(const MoeSpec& spec) : source_(make_synthetic_source(spec, 5)) {
    for (const WeightId role : {weights::kGate, weights::kUp, weights::kDown}) {
      const WeightInfo info = source_->describe(role);
      for (int64_t expert = 0; expert < info.count; ++expert) {
        Tensor matrix(info.dtype, {info.rows, info.cols});
        source_->read(role, expert, {0, info.rows, 0, info.cols},
                      {matrix.as<std::byte>(), matrix.size_bytes()});
        matrices_[role].push_back(std::move(matrix));
      }
    }
  }
  WeightInfo describe(WeightId role) const override { return source_->describe(role); }
  void read(WeightId role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    source_->read(role, expert, block, destination);
  }
  ConstTensorView view(WeightId role, int64_t expert) const override {
    const std::vector<Tensor>& matrices = matrices_[role];
    return matrices.empty() ? ConstTensorView{}
                            : matrices[static_cast<size_t>(expert)].const_view();
  }

 private:
  std::unique_ptr<WeightSource> source_;
  WeightTable<std::vector<Tensor>> matrices_;
};

class VllmMatrixMoeLayer : public ::testing::TestWithParam<MatrixCase> {};

TEST_P(VllmMatrixMoeLayer, EveryRank_HasTheWholeResultWithinTheBar) {
  const MatrixCase& c = GetParam();
  const MoeSpec spec = make_spec(c.experts, c.top_k, c.hidden, c.inner, DType::kBF16);
  const KeptSource source(spec);
  const int32_t ranks = c.dp * c.tp;
  const auto hidden_of = [&](int32_t dp_rank) {
    return random_tensor(DType::kBF16, c.tokens, c.hidden, 7 + static_cast<uint64_t>(dp_rank));
  };
  std::vector<Tensor> outputs(static_cast<size_t>(ranks));
  const auto body = [&](const GridRank& rank) {
    const int32_t index = c.expert_parallel ? rank.ep_rank : rank.tp_rank;
    ParallelSpec parallel = ParallelSpec::flatten({.tp_size = c.tp,
                                                   .tp_rank = index % c.tp,
                                                   .dp_size = c.dp,
                                                   .dp_rank = index / c.tp,
                                                   .expert_parallel = c.expert_parallel});
    if (c.replicas) parallel.num_redundant_experts = ranks;
    const Context context(rank.context_options());
    const MoeLayer layer = MoeLayer::create(context, spec, source, {.max_tokens = 64}, parallel);
    const Tensor hidden = hidden_of(index / c.tp);
    Tensor out(DType::kBF16, {c.tokens, c.hidden});
    layer.forward({.hidden = hidden.view(), .out = out.view()});
    outputs[static_cast<size_t>(index)] = std::move(out);
  };
  on_grid(c.expert_parallel ? ranks : 1, c.expert_parallel ? 1 : ranks, body);

  // Tokens do not depend on each other, so a few of each rank are compared with float64.
  const int64_t checked = std::min<int64_t>(c.tokens, 8);
  const Context context({.num_threads = 2});
  const auto first_rows = [&](const Tensor& tensor) {
    ConstTensorView view = tensor.view();
    view.shape = {checked, c.hidden};
    return view;
  };
  for (int32_t rank = 0; rank < ranks; ++rank) {
    const Tensor hidden = hidden_of(rank / c.tp);
    const ReferenceResult reference =
        reference_forward(context, spec, source, {.hidden = first_rows(hidden)});
    EXPECT_LE(worst(token_errors(first_rows(outputs[static_cast<size_t>(rank)]), reference.output)),
              accuracy_bar(DType::kBF16, DType::kBF16))
        << "rank " << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, VllmMatrixMoeLayer, ::testing::ValuesIn(matrix_cases()), name_of);

}  // namespace
}  // namespace conclave
