#include "conclave/refit.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/sources.h"
#include "capi/structs.h"
#include "capi/values.h"
#include "core/shared_facts.h"

#include "conclave/broadcast_weights.h"

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace conclave::inline v0::capi {
namespace {

static_assert(CONCLAVE_REFIT_MODE_STAGED == static_cast<int32_t>(RefitMode::kStaged) &&
              CONCLAVE_REFIT_MODE_STAGED_COPY == static_cast<int32_t>(RefitMode::kStagedCopy) &&
              CONCLAVE_REFIT_MODE_IN_PLACE == static_cast<int32_t>(RefitMode::kInPlace));

// Threads that pack live as long as the transaction that uses them.
struct PackingThreads {
  std::optional<CExecutor> given;
  std::unique_ptr<Executor> made;

  Executor* executor() { return given ? &*given : made.get(); }
};

RefitScope scope_of(const conclave_refit_scope* scope, const std::string& name) {
  constexpr size_t kMostTensors = 65536;
  const conclave_refit_scope given = take_optional(scope, name.c_str());
  const auto field = [&](const char* member) { return name + "." + member; };
  const auto experts = array_of(given.experts, given.experts_count, field("experts").c_str(),
                                field("experts_count").c_str(), kMostExperts);
  const auto tensors = array_of(given.tensors, given.tensors_count, field("tensors").c_str(),
                                field("tensors_count").c_str(), kMostTensors);
  RefitScope result{.experts = {experts.begin(), experts.end()}};
  for (size_t i = 0; i < tensors.size(); ++i) {
    const std::string place = field("tensors[") + std::to_string(i) + "]";
    result.tensors.push_back(refit_tensor(&required(tensors[i], place.c_str())));
  }
  return result;
}

PackingThreads threads_of(const conclave_refit_options& options) {
  constexpr int32_t kMostThreads = 1024;
  check_choice("options.num_threads", options.num_threads, kMostThreads);
  PackingThreads threads;
  if (options.executor != nullptr) {
    threads.given.emplace(take(options.executor, "options.executor"));
  } else if (options.num_threads > 1) {
    threads.made = make_thread_pool({.num_threads = options.num_threads});
  }
  return threads;
}

RefitOptions request_of(const conclave_refit_options& given) {
  check_flags("options.flags", given.flags,
              CONCLAVE_REFIT_KEEPS_MEMORY | CONCLAVE_REFIT_SILENT_REFUSAL);
  check_choice("options.reserved", given.reserved, 0);
  return {.mode = choice_of("options.mode", given.mode, RefitMode::kInPlace),
          .scope = scope_of(given.scope, "options.scope"),
          .epoch = given.epoch,
          .keeps_memory = (given.flags & CONCLAVE_REFIT_KEEPS_MEMORY) != 0,
          .refusal = RefitRefusal::kSilent};  // conclave_refit_create tells, of its own checks too
}

BroadcastOptions broadcast_of(const conclave_broadcast_options* options) {
  const conclave_broadcast_options given = take_optional(options, "options");
  check_flags("options.flags", given.flags, CONCLAVE_BROADCAST_HAS_MEMORY);
  check_flags("options.reserved", given.reserved, 0);
  BroadcastOptions result{.root = given.root, .part = scope_of(given.part, "options.part")};
  const MemoryKind memory = choice_of("options.memory", given.memory, MemoryKind::kDevice);
  if ((given.flags & CONCLAVE_BROADCAST_HAS_MEMORY) != 0) result.memory = memory;
  if (given.exchange_bytes != 0) result.exchange_bytes = given.exchange_bytes;
  return result;
}

// The text by which other ranks hear of the exception that is being handled.
std::string reason_of_current() {
  try {
    throw;
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "an exception of the application";
  }
}

std::shared_ptr<Communicator> held_ranks_of(const conclave_communicator* handle) {
  if (handle == nullptr) return nullptr;
  return required(handle, "communicator").communicator;
}

constexpr uint32_t bit_of(WeightMlp mlp) { return uint32_t{1} << static_cast<uint32_t>(mlp); }

// The MLPs of which the scope names weights. Where they are read in place, all that they have is
// named then.
uint32_t mlps_of(const RefitScope& scope) {
  if (scope.tensors.empty())
    return scope.experts.empty() ? ~uint32_t{0} : bit_of(WeightMlp::kRouted);
  uint32_t mlps = 0;
  for (const WeightId id : scope.tensors) {
    if (id.mlp()) mlps |= bit_of(*id.mlp());
  }
  return mlps;
}

uint32_t mlps_of(const MoeSpec& spec) {
  uint32_t mlps = bit_of(WeightMlp::kRouted);
  if (shared_facts(spec).is_there) mlps |= bit_of(WeightMlp::kShared);
  if (spec.residual.intermediate_size > 0) mlps |= bit_of(WeightMlp::kResidual);
  return mlps;
}

}  // namespace
}  // namespace conclave::inline v0::capi

// Members are ended from the last to the first: the transaction before what it uses.
struct conclave_refit {
  std::shared_ptr<conclave::capi::ContextState> context;
  std::shared_ptr<conclave::capi::KeptSources> kept;
  std::shared_ptr<conclave::Communicator> givers;  // broadcasts come over them
  bool reads_sources;  // experts of the layer are read where a source has them
  uint32_t mlps_of_layer;
  conclave::RefitScope scope;
  std::vector<conclave::capi::KeptSource> staged;
  conclave::capi::PackingThreads threads;
  conclave::Refit refit;

  conclave_refit(conclave_layer& layer, conclave::capi::PackingThreads packing,
                 std::shared_ptr<conclave::Communicator> over,
                 const conclave::RefitOptions& options)
      : context(layer.context),
        kept(layer.kept),
        givers(std::move(over)),
        reads_sources(layer.layer.plan().in_place_bytes > 0),
        mlps_of_layer(conclave::capi::mlps_of(layer.layer.spec())),
        scope(options.scope),
        threads(std::move(packing)),
        refit(layer.layer, resolved(options)) {}

  void stage(const conclave::capi::SharedSource& source, const conclave_refit_scope* part) {
    const conclave::RefitScope given = conclave::capi::scope_of(part, "part");
    const bool is_all = given.experts.empty() && given.tensors.empty();
    const uint32_t mlps = conclave::capi::mlps_of(is_all ? scope : given);
    if (reads_sources && mlps != 0) staged.push_back({source, mlps});
    refit.stage(*source, given);
  }

  // The refit keeps the first communicator that it is given, and refuses others.
  void stage_broadcast(const std::shared_ptr<conclave::Communicator>& over,
                       const conclave::WeightSource* source,
                       const conclave::BroadcastOptions& options) {
    if (givers == nullptr) givers = over;
    refit.stage_broadcast(*over, source, options);
  }

  // Sources of which the layer reads nothing any more are let go.
  void commit() {
    std::vector<conclave::capi::KeptSource> next = kept->sources;
    const uint32_t stay = mlps_of_layer & ~conclave::capi::mlps_of(scope);
    for (auto& before : next) before.mlps &= stay;
    next.insert(next.end(), staged.begin(), staged.end());
    std::erase_if(next, [](const auto& one) { return one.mlps == 0; });
    refit.commit();
    kept->sources = std::move(next);
    staged.clear();
  }

  void rollback() {
    refit.rollback();
    staged.clear();
  }
  void withdraw(std::string_view reason) {
    refit.withdraw(reason);
    staged.clear();
  }

 private:
  conclave::RefitOptions resolved(conclave::RefitOptions options) {
    options.executor = threads.executor();
    options.communicator = givers.get();
    return options;
  }
};

namespace capi = conclave::capi;

conclave_status conclave_refit_create(conclave_layer* layer, const conclave_refit_options* options,
                                      conclave_refit** out) noexcept {
  return capi::guarded([&] {
    conclave_layer& of = capi::required(layer, "layer");
    bool tells_ranks = true;
    std::shared_ptr<conclave::Communicator> givers;
    try {
      capi::required(out, "out");
      const conclave_refit_options given = capi::take_optional(options, "options");
      tells_ranks = (given.flags & CONCLAVE_REFIT_SILENT_REFUSAL) == 0;
      givers = capi::held_ranks_of(given.communicator);
      *out = new conclave_refit(of, capi::threads_of(given), givers, capi::request_of(given));
    } catch (...) {
      if (tells_ranks) {
        conclave::Refit::withdraw(of.layer, givers.get(), capi::reason_of_current());
      }
      throw;
    }
  });
}

void conclave_refit_destroy(conclave_refit* refit) noexcept { delete refit; }

conclave_status conclave_refit_stage(conclave_refit* refit, const conclave_source* source,
                                     const conclave_refit_scope* part) noexcept {
  return capi::guarded([&] {
    conclave_refit& to = capi::required(refit, "refit");
    to.stage(capi::required(source, "source").source, part);
  });
}

conclave_status conclave_refit_stage_from_checkpoint(conclave_refit* refit,
                                                     const conclave_checkpoint* checkpoint,
                                                     int64_t index,
                                                     const conclave_refit_scope* part) noexcept {
  return capi::guarded([&] {
    conclave_refit& to = capi::required(refit, "refit");
    const auto& from = capi::required(checkpoint, "checkpoint").checkpoint;
    to.stage(capi::source_of(from, index), part);
  });
}

conclave_status conclave_refit_stage_broadcast(conclave_refit* refit,
                                               conclave_communicator* communicator,
                                               const conclave_source* source,
                                               const conclave_broadcast_options* options) noexcept {
  return capi::guarded([&] {
    conclave_refit& to = capi::required(refit, "refit");
    const auto& over = capi::required(communicator, "communicator").communicator;
    const conclave::WeightSource* from = nullptr;
    conclave::BroadcastOptions given;
    try {
      if (source != nullptr) from = capi::required(source, "source").source.get();
      given = capi::broadcast_of(options);
    } catch (...) {
      to.refit.refuse_broadcast(*over, capi::reason_of_current());
      throw;
    }
    to.stage_broadcast(over, from, given);
  });
}

conclave_status conclave_refit_refuse_broadcast(conclave_refit* refit,
                                                conclave_communicator* communicator,
                                                const char* reason) noexcept {
  return capi::guarded([&] {
    conclave::Refit& of = capi::required(refit, "refit").refit;
    conclave::Communicator& over = *capi::required(communicator, "communicator").communicator;
    of.refuse_broadcast(over, capi::text_of(reason));
  });
}

conclave_status conclave_refit_is_staged(const conclave_refit* refit, int32_t* staged) noexcept {
  return capi::guarded([&] {
    const conclave::Refit& of = capi::required(refit, "refit").refit;
    capi::required(staged, "staged") = of.is_staged() ? 1 : 0;
  });
}

conclave_status conclave_refit_commit(conclave_refit* refit) noexcept {
  return capi::guarded([&] { capi::required(refit, "refit").commit(); });
}

conclave_status conclave_refit_rollback(conclave_refit* refit) noexcept {
  return capi::guarded([&] { capi::required(refit, "refit").rollback(); });
}

conclave_status conclave_refit_withdraw(conclave_refit* refit) noexcept {
  return conclave_refit_withdraw_because(refit, nullptr);
}

conclave_status conclave_refit_withdraw_because(conclave_refit* refit,
                                                const char* reason) noexcept {
  return capi::guarded(
      [&] { capi::required(refit, "refit").withdraw(reason == nullptr ? "" : reason); });
}

conclave_status conclave_layer_withdraw_refit(const conclave_layer* layer) noexcept {
  return conclave_layer_withdraw_refit_because(layer, nullptr, nullptr);
}

conclave_status conclave_layer_withdraw_refit_because(const conclave_layer* layer,
                                                      conclave_communicator* communicator,
                                                      const char* reason) noexcept {
  return capi::guarded([&] {
    const conclave::MoeLayer& of = capi::required(layer, "layer").layer;
    const auto over = capi::held_ranks_of(communicator);
    conclave::Refit::withdraw(of, over.get(), reason == nullptr ? "" : reason);
  });
}

conclave_status conclave_layer_content_hash(const conclave_layer* layer,
                                            uint64_t* content_hash) noexcept {
  return capi::guarded([&] {
    const conclave::MoeLayer& of = capi::required(layer, "layer").layer;
    uint64_t& to = capi::required(content_hash, "content_hash");
    to = conclave::Refit::content_hash(of);
  });
}
