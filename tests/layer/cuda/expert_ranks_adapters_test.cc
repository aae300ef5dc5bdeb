// Adapters of layers whose experts lie on two GPUs: a token's adapter goes where its row goes, also
// where one rank's call names none.
#include "expert_ranks.h"
#include "layer/random_adapter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace conclave {
namespace {

using std::chrono_literals::operator""s;
using testing::call_of;
using testing::DeviceForward;
using testing::DeviceLayer;
using testing::expert_ranks_spec;
using testing::experts_of_rank;
using testing::first_failure;
using testing::id_tensor;
using testing::kNcclRanks;
using testing::NcclTest;
using testing::random_adapter;
using testing::RankCall;
using testing::run_nccl_ranks;
using testing::same_bits;
using testing::TokensOfRanks;

constexpr double kBar = 6e-3;

struct Case {
  std::string name;
  MoeSpec spec;
  DType rows = DType::kBF16;
  ParallelSpec parallel = {};
};

std::vector<Case> cases() {
  std::vector<Case> all{{"bf16", expert_ranks_spec()}};
  MoeSpec shared = expert_ranks_spec();
  shared.shared = {.mode = SharedMode::kSigmoidGate, .intermediate_size = 192};
  all.push_back({"shared_experts", shared});
  all.push_back({"f16", expert_ranks_spec(DType::kF16), DType::kF16});
  all.push_back({"f32", expert_ranks_spec(DType::kF32), DType::kF32});
  all.push_back({"rows_of_f32", expert_ranks_spec(), DType::kF32});
  all.push_back({"e4m3_in_blocks", expert_ranks_spec(DType::kF8E4M3,
                                                     {.weights = WeightScale::kBlock,
                                                      .activations = ActivationScale::kGroup},
                                                     256)});
  all.push_back({"int8_by_token", expert_ranks_spec(DType::kI8,
                                                    {.weights = WeightScale::kChannel,
                                                     .activations = ActivationScale::kToken},
                                                    256)});
  all.push_back(
      {"int4_in_groups",
       expert_ranks_spec(
           DType::kI4, {.weights = WeightScale::kBlock, .block_rows = 1, .block_cols = 32}, 256)});
  MoeSpec weighs = expert_ranks_spec();
  weighs.weight_on = WeightOn::kInput;
  all.push_back({"weights_on_the_input", weighs});
  MoeSpec latent = expert_ranks_spec();
  latent.latent = {.size = 160, .has_norm = true};
  all.push_back({"a_latent_layer", latent});
  all.push_back(
      {"redundant_experts", expert_ranks_spec(), DType::kBF16, {.num_redundant_experts = 3}});
  MoeSpec few = expert_ranks_spec();
  few.num_experts = 1;
  few.top_k = 1;
  all.push_back({"a_rank_without_experts", few});
  return all;
}

// Who has an adapter in a call: places among the two that the layer has, -1 for none.
struct Wearers {
  const char* name;
  // Each rank has these for its tokens in turn; where there are none, its call names no adapters.
  std::array<std::vector<int32_t>, kNcclRanks> places;
  bool in_one = false;  // named once, for all tokens
};
const std::vector<Wearers> kWearers = {
    {"both", {{{0, -1, 1}, {1, 1, -1, 0}}}},
    {"one rank's", {{{}, {-1, 0}}}},
    {"all of one rank's", {{{1}, {}}}, true},
    {"nobody's", {{{}, {}}}},
};

// Two adapters, the ranks of the second wider.
class AdaptedRank {
 public:
  AdaptedRank(const Case& it, int32_t rank, Communicator& comm)
      : rank_(rank),
        adapters_{random_adapter(it.spec, {.rank = 8, .dtype = DType::kBF16}, 900),
                  random_adapter(it.spec, {.rank = 16, .every = 2}, 9000)},
        owned_(experts_of_rank(it.spec, rank, comm, {.max_tokens = 128, .max_adapter_rank = 16},
                               it.parallel)) {}

  DeviceLayer& owned() { return *owned_; }
  void add() {
    for (const LoraAdapter& adapter : adapters_) ids_.push_back(owned_->layer.add_adapter(adapter));
  }

  Tensor run(const RankCall& call, DType out, const Wearers& wearers,
             std::optional<TokensOfRanks> tokens = {}) {
    const std::vector<int32_t>& places = wearers.places[static_cast<size_t>(rank_)];
    DeviceForward forward(*owned_, call.hidden.view(), out);
    forward.route_by(call.routing.ids, call.routing.weights);
    if (tokens) forward.args.rank_tokens = *tokens;
    DeviceTensor on_device;
    if (wearers.in_one && !places.empty()) {
      forward.args.adapter = ids_[static_cast<size_t>(places[0])];
    } else if (!places.empty()) {
      std::vector<int32_t> ids;
      for (const int32_t place : places) {
        ids.push_back(place < 0 ? -1 : ids_[static_cast<size_t>(place)]);
      }
      on_device = owned_->queue.upload(id_tensor(call.hidden.shape()[0], ids).view());
      forward.args.adapter_ids = on_device.const_view();
    }
    forward.enqueue();
    owned_->queue.synchronize();
    return forward.out();
  }

  double worst_error(const RankCall& call, const Tensor& out, const Wearers& wearers,
                     bool with_adapters = true) {
    std::vector<int32_t> places = wearers.places[static_cast<size_t>(rank_)];
    if (places.empty()) places = {-1};
    const int64_t tokens = call.hidden.shape()[0];
    const Tensor ids = id_tensor(tokens, places);
    LayerResult result{.hidden = call.hidden.const_view(),
                       .topk_ids = call.routing.ids.view(),
                       .topk_weights = call.routing.weights.view(),
                       .output = out.view(),
                       .code_ambiguity = kTensorCoreCodeAmbiguity};
    if (with_adapters) {
      result.adapters = adapters_;
      result.adapter_ids = ids.view();
    }
    return conclave::check_against_reference(owned_->host, owned_->layer.spec(), *owned_->source,
                                             result)
        .worst_token_error;
  }

 private:
  int32_t rank_;
  std::vector<LoraAdapter> adapters_;
  std::vector<AdapterId> ids_;
  std::unique_ptr<DeviceLayer> owned_;
};

// Rows of tokens without an adapter, of both.
bool same_bare_rows(const Tensor& one, const Tensor& other, std::vector<int32_t> places) {
  if (places.empty()) places = {-1};
  const auto row_bytes =
      static_cast<int64_t>(one.size_bytes() / std::max<int64_t>(one.shape()[0], 1));
  for (int64_t row = 0; row < one.shape()[0]; ++row) {
    if (places[static_cast<size_t>(row) % places.size()] >= 0) continue;
    const int64_t at = row * row_bytes;
    if (std::memcmp(one.as<std::byte>() + at, other.as<std::byte>() + at,
                    static_cast<size_t>(row_bytes)) != 0) {
      return false;
    }
  }
  return true;
}

constexpr std::array<TokensOfRanks, 4> kTokens = {{{0, 7}, {1, 1}, {65, 0}, {20, 300}}};

class CudaExpertRankAdapters : public NcclTest, public ::testing::WithParamInterface<Case> {};

TEST_P(CudaExpertRankAdapters, EveryRanksRows_AreWithinTheBar_AndOthersKeepTheirBits) {
  const Case& it = GetParam();
  const auto outcomes = run_nccl_ranks(20s, [&](int32_t rank, Communicator& comm) {
    AdaptedRank own(it, rank, comm);
    std::vector<Tensor> before;
    for (const TokensOfRanks& tokens : kTokens) {
      const RankCall call = call_of(it.spec, rank, tokens[static_cast<size_t>(rank)], it.rows);
      before.push_back(own.run(call, DType::kF32, kWearers.back()));
    }
    own.add();
    for (size_t i = 0; i < kTokens.size(); ++i) {
      const int64_t tokens = kTokens[i][static_cast<size_t>(rank)];
      const RankCall call = call_of(it.spec, rank, tokens, it.rows);
      for (const Wearers& wearers : kWearers) {
        SCOPED_TRACE(std::string(wearers.name) + ", " + std::to_string(tokens) + " tokens");
        const Tensor out = own.run(call, DType::kF32, wearers);
        EXPECT_TRUE(same_bits(out, own.run(call, DType::kF32, wearers, kTokens[i])));
        const std::vector<int32_t>& places = wearers.places[static_cast<size_t>(rank)];
        EXPECT_TRUE(same_bare_rows(out, before[i], places));
        if (tokens == 0) continue;
        EXPECT_LE(own.worst_error(call, out, wearers), kBar);
        if (std::ranges::any_of(places, [](int32_t place) { return place >= 0; }) && tokens > 1) {
          EXPECT_GT(own.worst_error(call, out, wearers, false), 0.04) << "they are not small";
        }
      }
    }
    comm.check("done");
    comm.barrier("done");
  });
  EXPECT_EQ(first_failure(outcomes), "");
}

INSTANTIATE_TEST_SUITE_P(All, CudaExpertRankAdapters, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace conclave
