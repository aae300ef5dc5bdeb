#include "conclave/shared_weights.h"

#include "capi/guard.h"
#include "capi/handles.h"
#include "capi/json_text.h"
#include "capi/structs.h"
#include "capi/values.h"

#include "conclave/c/shared_weights.h"
#include "conclave/error.h"

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0::capi {
namespace {

std::vector<int32_t> numbers_of(const conclave_shared_writer_options& given) {
  const auto experts = array_of(given.experts, given.experts_count, "options.experts",
                                "options.experts_count", kMostExperts);
  return {experts.begin(), experts.end()};
}

// The tensors of a source; those of routed experts hold `experts`, if there are any.
std::vector<SharedTensor> shared_tensors_of(const WeightSource& source,
                                            const std::vector<int32_t>& experts) {
  std::vector<SharedTensor> tensors;
  for (const WeightId id : weights::kAll) {
    const WeightInfo info = source.describe(id);
    if (info.count == 0) continue;
    const bool is_routed = id.mlp() == WeightMlp::kRouted;
    tensors.push_back(
        {.id = id, .info = info, .experts = is_routed ? experts : std::vector<int32_t>()});
  }
  return tensors;
}

WeightId weight_of(const char* name) {
  for (const WeightId id : weights::kAll) {
    if (to_string(id) == name) return id;
  }
  throw Error(ErrorCode::kInvalidArgument,
              {.what = "there are no weights of this name", .tensor = "tensor", .found = name});
}

bool is_same(const SharedTensor& one, const SharedTensor& other) {
  return one.id == other.id && one.info.count == other.info.count &&
         one.info.rows == other.info.rows && one.info.cols == other.info.cols &&
         one.info.dtype == other.info.dtype;
}

const SharedWeights& shared_weights_of(const conclave_source* source) {
  const auto* const shared =
      dynamic_cast<const SharedWeights*>(required(source, "source").source.get());
  if (shared != nullptr) return *shared;
  throw Error(
      ErrorCode::kInvalidArgument,
      {.what = "this source is not one of conclave_source_from_shared", .tensor = "source"});
}

}  // namespace
}  // namespace conclave::inline v0::capi

struct conclave_shared_writer {
  std::vector<int32_t> experts;
  std::vector<conclave::SharedTensor> tensors;
  conclave::SharedWeightsWriter writer;
  bool has_begun = false;

  conclave_shared_writer(const char* path, const conclave::WeightSource& source, uint64_t layer,
                         std::vector<int32_t> of)
      : experts(std::move(of)),
        tensors(conclave::capi::shared_tensors_of(source, experts)),
        writer(path, tensors, layer) {}

  void begin() {
    writer.begin();
    has_begun = true;
  }
  uint64_t publish(uint64_t version) {
    writer.publish(version);
    has_begun = false;
    return writer.version();
  }
  void check_same(const conclave::WeightSource& source) const;
  void copy(const conclave::WeightSource& source);
};

void conclave_shared_writer::check_same(const conclave::WeightSource& source) const {
  if (source.memory() != conclave::MemoryKind::kHost) {
    throw conclave::Error(
        conclave::ErrorCode::kDevice,
        {.what = "shared weights are written from host memory", .tensor = "source"});
  }
  const auto given = conclave::capi::shared_tensors_of(source, experts);
  for (size_t i = 0; i < std::max(given.size(), tensors.size()); ++i) {
    const bool has_both = i < given.size() && i < tensors.size();
    if (has_both && conclave::capi::is_same(given[i], tensors[i])) continue;
    const conclave::SharedTensor& other = i < given.size() ? given[i] : tensors[i];
    throw conclave::Error(conclave::ErrorCode::kInvalidArgument,
                          {.what = "every version of shared weights has the same tensors",
                           .tensor = to_string(other.id),
                           .hint = "make another writer for other names, shapes or types"});
  }
}

void conclave_shared_writer::copy(const conclave::WeightSource& source) {
  for (const conclave::SharedTensor& tensor : tensors) {
    const auto copy_one = [&](int64_t expert) {
      source.read(tensor.id, expert, {0, tensor.info.rows, 0, tensor.info.cols},
                  writer.memory(tensor.id, expert));
    };
    for (const int32_t expert : tensor.experts) copy_one(expert);
    if (!tensor.experts.empty()) continue;
    for (int64_t expert = 0; expert < tensor.info.count; ++expert) copy_one(expert);
  }
  source.check_unchanged();
}

namespace capi = conclave::capi;

conclave_status conclave_shared_writer_create(const char* path, const conclave_source* source,
                                              const conclave_shared_writer_options* options,
                                              conclave_shared_writer** out) noexcept {
  return capi::guarded([&] {
    const char* const at = &capi::required(path, "path");
    const conclave::WeightSource& of = *capi::required(source, "source").source;
    capi::required(out, "out");
    const conclave_shared_writer_options given = capi::take_optional(options, "options");
    *out = new conclave_shared_writer(at, of, given.layer, capi::numbers_of(given));
  });
}

void conclave_shared_writer_destroy(conclave_shared_writer* writer) noexcept { delete writer; }

conclave_status conclave_shared_writer_begin(conclave_shared_writer* writer) noexcept {
  return capi::guarded([&] { capi::required(writer, "writer").begin(); });
}

conclave_status conclave_shared_writer_memory(conclave_shared_writer* writer, const char* tensor,
                                              int64_t expert, void** data, size_t* bytes) noexcept {
  return capi::guarded([&] {
    conclave::SharedWeightsWriter& to = capi::required(writer, "writer").writer;
    const conclave::WeightId id = capi::weight_of(&capi::required(tensor, "tensor"));
    void*& at = capi::required(data, "data");
    size_t& size = capi::required(bytes, "bytes");
    const std::span<std::byte> memory = to.memory(id, expert);
    at = memory.data();
    size = memory.size();
  });
}

conclave_status conclave_shared_writer_publish(conclave_shared_writer* writer, uint64_t version,
                                               uint64_t* published) noexcept {
  return capi::guarded([&] {
    conclave_shared_writer& of = capi::required(writer, "writer");
    capi::check_aligned("published", published, alignof(uint64_t));
    const uint64_t now = of.publish(version);
    if (published != nullptr) *published = now;
  });
}

conclave_status conclave_shared_writer_publish_source(conclave_shared_writer* writer,
                                                      const conclave_source* source,
                                                      uint64_t version,
                                                      uint64_t* published) noexcept {
  return capi::guarded([&] {
    conclave_shared_writer& of = capi::required(writer, "writer");
    const conclave::WeightSource& from = *capi::required(source, "source").source;
    capi::check_aligned("published", published, alignof(uint64_t));
    of.check_same(from);
    if (!of.has_begun) of.begin();
    of.copy(from);
    const uint64_t now = of.publish(version);
    if (published != nullptr) *published = now;
  });
}

conclave_status conclave_source_from_shared(const char* path, uint32_t flags,
                                            conclave_source** out) noexcept {
  return capi::guarded([&] {
    const char* const at = &capi::required(path, "path");
    capi::required(out, "out");
    capi::check_flags("flags", flags, CONCLAVE_SHARED_SKIP_CHECKSUM);
    capi::hand_out(out, std::make_shared<const conclave::SharedWeights>(
                            at, (flags & CONCLAVE_SHARED_SKIP_CHECKSUM) != 0
                                    ? conclave::SharedChecksum::kSkip
                                    : conclave::SharedChecksum::kVerify));
  });
}

conclave_status conclave_source_get_shared_info(const conclave_source* source,
                                                conclave_shared_info* info) noexcept {
  return capi::guarded([&] {
    const conclave::SharedWeights& of = capi::shared_weights_of(source);
    capi::fill(capi::fillable(info, "info"), {.struct_size = 0,
                                              .version = of.version(),
                                              .layer = of.layer(),
                                              .num_tensors = of.tensors().size()});
  });
}

conclave_status conclave_source_shared_tensors_json(const conclave_source* source,
                                                    char** json) noexcept {
  return capi::guarded([&] {
    const conclave::SharedWeights& of = capi::shared_weights_of(source);
    char*& to = capi::required(json, "json");
    capi::Json rows = capi::Json::array();
    for (const conclave::SharedTensor& tensor : of.tensors()) {
      rows.push_back({{"name", conclave::to_string(tensor.id)}, {"experts", tensor.experts}});
    }
    to = capi::copy_json(rows);
  });
}

conclave_status conclave_source_check_unchanged(const conclave_source* source) noexcept {
  return capi::guarded([&] { capi::required(source, "source").source->check_unchanged(); });
}
