// Weights of one rank for all through the C interface, and ranks that say why they give up.
#include "capi/arrays.h"
#include "capi/layers.h"
#include "capi/local_ranks.h"

#include <cstdint>
#include <string>
#include <vector>

namespace conclave {
namespace {

using testing::Arrays;
using testing::expect_error;
using testing::Handle;
using testing::kArraysSpec;
using testing::kExperts;
using testing::last_error;
using testing::make;
using testing::on_threads;
using testing::scope_of;
using testing::sized;

constexpr size_t kRanks = 2;

void expect_ok(conclave_status status) {
  EXPECT_EQ(status, CONCLAVE_OK) << conclave_last_error_message();
}

// Each rank has a whole layer of its own; the group is for weights alone.
class Broadcasts : public ::testing::Test {
 protected:
  struct Replica {
    Handle<conclave_context> context = {};
    Handle<conclave_layer> layer = {};
    conclave_communicator* ranks = nullptr;

    uint64_t hash() const {
      uint64_t found = 0;
      expect_ok(conclave_layer_content_hash(layer.get(), &found));
      return found;
    }
    Handle<conclave_refit> refit(const conclave_refit_options* options = nullptr) const {
      return make<conclave_refit>(&conclave_refit_create, layer.get(), options);
    }
  };

  template <class Body>
  void on_replicas(const Body& body, const conclave_layer_options* options = nullptr) {
    auto group = testing::local_group(kRanks, 20000);
    on_threads(kRanks, [&](size_t rank) {
      Replica replica{.context = testing::make_context(), .ranks = group[rank].get()};
      replica.layer = make<conclave_layer>(&conclave_layer_create, replica.context.get(),
                                           spec_.get(), old_.source.get(), options, nullptr);
      body(rank, replica);
      group[rank].reset();
    });
  }

  Handle<conclave_spec> spec_ = make<conclave_spec>(&conclave_spec_from_json, kArraysSpec);
  Arrays old_{1};
  Arrays new_{7};
};

TEST_F(Broadcasts, AllRanks_HaveTheRootsWeights) {
  uint64_t of_root = 0;
  {
    const auto context = testing::make_context();
    const auto layer = make<conclave_layer>(&conclave_layer_create, context.get(), spec_.get(),
                                            new_.source.get(), nullptr, nullptr);
    expect_ok(conclave_layer_content_hash(layer.get(), &of_root));
  }
  on_replicas([&](size_t rank, const Replica& replica) {
    const auto refit = replica.refit();
    auto options = sized<conclave_broadcast_options>();
    options.root = 1;
    options.memory = CONCLAVE_MEMORY_HOST;
    options.flags = CONCLAVE_BROADCAST_HAS_MEMORY;
    options.exchange_bytes = 1000;
    expect_ok(conclave_refit_stage_broadcast(refit.get(), replica.ranks,
                                             rank == 1 ? new_.source.get() : nullptr, &options));
    int32_t staged = 0;
    expect_ok(conclave_refit_is_staged(refit.get(), &staged));
    EXPECT_EQ(staged, 1);
    expect_ok(conclave_refit_commit(refit.get()));
    EXPECT_EQ(replica.hash(), of_root);
  });
}

// Some experts first, then the rest: options and scopes are those of other refits.
TEST_F(Broadcasts, Parts_ComeOneAfterAnother) {
  on_replicas([&](size_t rank, const Replica& replica) {
    const auto refit = replica.refit();
    const conclave_source* const source = rank == 0 ? new_.source.get() : nullptr;
    const std::vector<int32_t> first = {0, 1, 2};
    const std::vector<int32_t> second = {3, 4, 5};
    const std::vector<const char*> gate = {"router"};
    const conclave_refit_scope parts[] = {scope_of(first), scope_of(second), scope_of({}, gate)};
    for (const conclave_refit_scope& part : parts) {
      EXPECT_EQ(conclave_refit_commit(refit.get()) == CONCLAVE_OK, false) << "not all is staged";
      auto options = sized<conclave_broadcast_options>();
      options.part = &part;
      expect_ok(conclave_refit_stage_broadcast(refit.get(), replica.ranks, source, &options));
    }
    expect_ok(conclave_refit_commit(refit.get()));
    const auto direct = make<conclave_layer>(&conclave_layer_create, replica.context.get(),
                                             spec_.get(), new_.source.get(), nullptr, nullptr);
    uint64_t expected = 0;
    expect_ok(conclave_layer_content_hash(direct.get(), &expected));
    EXPECT_EQ(replica.hash(), expected);
  });
}

// The communicator's handle may be ended while a refit goes on.
TEST_F(Broadcasts, TheRefit_HoldsTheCommunicator) {
  auto group = testing::local_group(kRanks, 20000);
  on_threads(kRanks, [&](size_t rank) {
    const auto context = testing::make_context();
    const auto layer = make<conclave_layer>(&conclave_layer_create, context.get(), spec_.get(),
                                            old_.source.get(), nullptr, nullptr);
    const auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), nullptr);
    expect_ok(conclave_refit_stage_broadcast(refit.get(), group[rank].get(),
                                             rank == 0 ? new_.source.get() : nullptr, nullptr));
    group[rank].reset();
    expect_ok(conclave_refit_commit(refit.get()));
  });
}

void expect_refusal(conclave_status found, const std::string& reason) {
  expect_error(found, CONCLAVE_ERROR_COMM_MISMATCH, reason);
  EXPECT_EQ(last_error().peer, 1);
}

TEST_F(Broadcasts, ARefusal_IsHeardWithItsReason) {
  on_replicas([&](size_t rank, const Replica& replica) {
    const auto refit = replica.refit();
    const uint64_t before = replica.hash();
    const conclave_source* const source = rank == 0 ? new_.source.get() : nullptr;
    if (rank == 1) {
      expect_ok(conclave_refit_refuse_broadcast(refit.get(), replica.ranks, "the disk is gone"));
    } else {
      expect_refusal(conclave_refit_stage_broadcast(refit.get(), replica.ranks, source, nullptr),
                     "the disk is gone");
    }
    EXPECT_EQ(replica.hash(), before);
    expect_ok(conclave_refit_stage_broadcast(refit.get(), replica.ranks, source, nullptr));
    expect_ok(conclave_refit_commit(refit.get()));
    EXPECT_NE(replica.hash(), before);
  });
}

TEST_F(Broadcasts, AWithdrawal_EndsAllWithItsReason) {
  on_replicas([&](size_t rank, const Replica& replica) {
    const uint64_t before = replica.hash();
    auto options = sized<conclave_refit_options>();
    options.communicator = replica.ranks;
    const auto refit = replica.refit(&options);
    if (rank == 1) {
      expect_ok(conclave_refit_withdraw_because(refit.get(), "the trainer has stopped"));
    } else {
      expect_refusal(
          conclave_refit_stage_broadcast(refit.get(), replica.ranks, new_.source.get(), nullptr),
          "the trainer has stopped");
    }
    EXPECT_EQ(conclave_refit_commit(refit.get()), CONCLAVE_ERROR_STATE);
    EXPECT_EQ(replica.hash(), before);
  });
}

TEST_F(Broadcasts, ARankWithoutARefit_SaysWhy) {
  on_replicas([&](size_t rank, const Replica& replica) {
    if (rank == 1) {
      expect_ok(conclave_layer_withdraw_refit_because(replica.layer.get(), replica.ranks,
                                                      "no such checkpoint"));
      return;
    }
    const auto refit = replica.refit();
    expect_refusal(
        conclave_refit_stage_broadcast(refit.get(), replica.ranks, new_.source.get(), nullptr),
        "no such checkpoint");
  });
}

// Whoever is refused where a refit begins tells those that wait for weights, with the error.
TEST_F(Broadcasts, ARefusedRefit_IsHeardWithItsError) {
  const std::vector<const char*> none = {"gait"};
  const conclave_refit_scope no_tensor = scope_of({}, none);
  on_replicas([&](size_t rank, const Replica& replica) {
    auto options = sized<conclave_refit_options>();
    options.communicator = replica.ranks;
    if (rank == 1) {
      options.scope = &no_tensor;
      conclave_refit* never = nullptr;
      expect_error(conclave_refit_create(replica.layer.get(), &options, &never),
                   CONCLAVE_ERROR_INVALID_ARGUMENT, "gait");
      return;
    }
    const auto refit = replica.refit(&options);
    expect_refusal(
        conclave_refit_stage_broadcast(refit.get(), replica.ranks, new_.source.get(), nullptr),
        "gait");
  });
}

// A call of this interface that is refused by its own checks is heard as well.
TEST_F(Broadcasts, BadOptions_AreErrorsHereAndReasonsElsewhere) {
  on_replicas([&](size_t rank, const Replica& replica) {
    const auto refit = replica.refit();
    const std::vector<int32_t> beyond = {kExperts};
    const conclave_refit_scope no_expert = scope_of(beyond);
    auto from_here = sized<conclave_broadcast_options>();
    from_here.root = 1;
    std::vector<conclave_broadcast_options> wrong(5, from_here);
    wrong[0].struct_size = 3;
    wrong[1].flags = 2;
    wrong[2].reserved = 1;
    wrong[3].memory = 2;
    wrong[4].part = &no_expert;
    for (const conclave_broadcast_options& options : wrong) {
      if (rank == 1) {
        expect_error(
            conclave_refit_stage_broadcast(refit.get(), replica.ranks, new_.source.get(), &options),
            CONCLAVE_ERROR_INVALID_ARGUMENT, "");
        continue;
      }
      expect_error(conclave_refit_stage_broadcast(refit.get(), replica.ranks, nullptr, &from_here),
                   CONCLAVE_ERROR_COMM_MISMATCH, "");
      EXPECT_EQ(last_error().peer, 1);
    }
  });
}

TEST_F(Broadcasts, NullPointers_AreNamed) {
  const auto context = testing::make_context();
  const auto layer = make<conclave_layer>(&conclave_layer_create, context.get(), spec_.get(),
                                          old_.source.get(), nullptr, nullptr);
  const auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), nullptr);
  const auto group = testing::local_group(1);
  const auto null = CONCLAVE_ERROR_NULL_POINTER;
  expect_error(conclave_refit_stage_broadcast(nullptr, group[0].get(), nullptr, nullptr), null,
               "refit");
  expect_error(conclave_refit_stage_broadcast(refit.get(), nullptr, nullptr, nullptr), null,
               "communicator");
  expect_error(conclave_refit_refuse_broadcast(nullptr, group[0].get(), "x"), null, "refit");
  expect_error(conclave_refit_refuse_broadcast(refit.get(), nullptr, "x"), null, "communicator");
  expect_error(conclave_refit_withdraw_because(nullptr, "x"), null, "refit");
  expect_error(conclave_layer_withdraw_refit_because(nullptr, nullptr, "x"), null, "layer");
  expect_ok(conclave_layer_withdraw_refit_because(layer.get(), nullptr, nullptr));
  expect_error(conclave_refit_stage_broadcast(refit.get(), group[0].get(), nullptr, nullptr), null,
               "source");
  expect_ok(
      conclave_refit_stage_broadcast(refit.get(), group[0].get(), new_.source.get(), nullptr));
  expect_ok(conclave_refit_withdraw_because(refit.get(), nullptr));
}

// Experts that are read where their source has them cannot come from a source that is gone.
TEST_F(Broadcasts, LayersThatReadInPlace_RefuseAndSayWhy) {
  auto options = sized<conclave_layer_options>();
  options.weights = CONCLAVE_WEIGHT_USE_IN_PLACE;
  on_replicas(
      [&](size_t, const Replica& replica) {
        const auto refit = replica.refit();
        const uint64_t before = replica.hash();
        expect_error(
            conclave_refit_stage_broadcast(refit.get(), replica.ranks, new_.source.get(), nullptr),
            CONCLAVE_ERROR_UNSUPPORTED, "packed weights");
        EXPECT_EQ(replica.hash(), before);
        expect_ok(conclave_refit_stage(refit.get(), new_.source.get(), nullptr));
        expect_ok(conclave_refit_commit(refit.get()));
      },
      &options);
}

// Ranks that share a layer hear the reason in their commit.
TEST_F(Broadcasts, RanksOfALayer_HearWhyOneWithdraws) {
  auto group = testing::local_group(kRanks, 20000);
  on_threads(kRanks, [&](size_t rank) {
    const auto context = testing::context_of(group[rank].get());
    const auto parallel = testing::split_over(kRanks, rank);
    auto layer = make<conclave_layer>(&conclave_layer_create, context.get(), spec_.get(),
                                      old_.source.get(), nullptr, &parallel);
    auto refit = make<conclave_refit>(&conclave_refit_create, layer.get(), nullptr);
    expect_ok(conclave_refit_stage(refit.get(), new_.source.get(), nullptr));
    if (rank == 1) {
      expect_ok(conclave_refit_withdraw_because(refit.get(), "out of disk"));
    } else {
      expect_refusal(conclave_refit_commit(refit.get()), "out of disk");
    }
    refit.reset();
    layer.reset();
  });
}

}  // namespace
}  // namespace conclave
