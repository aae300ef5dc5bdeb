#include "layer/regroup/rest_bytes.h"

#include "gemm/gate_product.h"
#include "routing/router_tensors.h"

#include "conclave/error.h"
#include "conclave/weights.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

namespace conclave::inline v0 {
namespace {

constexpr std::array kSlabs = {&PackedWeights::shared_gate_up, &PackedWeights::shared_down,
                               &PackedWeights::residual_gate_up, &PackedWeights::residual_down};
constexpr std::array kProducts = {&PackedWeights::gate, &PackedWeights::shared_gate,
                                  &PackedWeights::mix_gate, &PackedWeights::latent_down,
                                  &PackedWeights::latent_up};
constexpr std::array kVectors = {&PackedWeights::mix_gate_bias, &PackedWeights::latent_norm,
                                 &PackedWeights::output_bias};
constexpr std::array kRouterVectors = {&RouterVectors::logit_bias, &RouterVectors::input_scale,
                                       &RouterVectors::selection_bias, &RouterVectors::expert_scale,
                                       &RouterVectors::global_scale};

[[noreturn]] void refuse(const char* what, const std::string& found) {
  throw Error(
      ErrorCode::kTensorShape,
      {.what = "a rank sent other weights than this layer has", .tensor = what, .found = found});
}

class Writer {
 public:
  void number(int64_t value) { bytes(std::as_bytes(std::span(&value, 1))); }
  void block(std::span<const std::byte> data) {
    number(static_cast<int64_t>(data.size()));
    bytes(data);
  }
  std::vector<std::byte> take() { return std::move(out_); }

 private:
  void bytes(std::span<const std::byte> data) { out_.insert(out_.end(), data.begin(), data.end()); }

  std::vector<std::byte> out_;
};

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : left_(bytes) {}

  int64_t number() {
    int64_t value = 0;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::span<const std::byte> block() {
    const int64_t size = number();
    if (size < 0) refuse("bytes", std::to_string(size));
    return take(static_cast<size_t>(size));
  }
  bool is_done() const { return left_.empty(); }

 private:
  std::span<const std::byte> take(size_t size) {
    if (size > left_.size()) refuse("bytes", "an end too early");
    const std::span<const std::byte> taken = left_.first(size);
    left_ = left_.subspan(size);
    return taken;
  }

  std::span<const std::byte> left_;
};

template <class Value>
std::vector<Value> values_of(std::span<const std::byte> bytes) {
  std::vector<Value> values(bytes.size() / sizeof(Value));
  if (values.size() * sizeof(Value) != bytes.size()) refuse("a vector", "half a number");
  if (!bytes.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

void write_slabs(const ExpertSlabs& slabs, Writer& writer) {
  writer.number(static_cast<int64_t>(slabs.each().size()));
  for (const std::byte* slab : slabs.each()) writer.block({slab, slabs.slab_bytes()});
}

void read_slabs(Reader& reader, const ExpertSlabs& slabs) {
  const int64_t count = reader.number();
  if (count != static_cast<int64_t>(slabs.each().size())) {
    refuse("shared experts", std::to_string(count));
  }
  for (std::byte* slab : slabs.each()) {
    const std::span<const std::byte> bytes = reader.block();
    if (bytes.size() != slabs.slab_bytes()) refuse("a slab", std::to_string(bytes.size()));
    std::ranges::copy(bytes, slab);
  }
}

void write_product(const gemm::DenseProduct* product, Writer& writer) {
  const gemm::PackedMatrix matrix = product == nullptr ? gemm::PackedMatrix{} : product->packed();
  writer.number(static_cast<int64_t>(matrix.dtype));
  writer.number(matrix.columns);
  writer.number(matrix.k);
  writer.block(matrix.panels);
}

std::unique_ptr<gemm::DenseProduct> read_product(Reader& reader, const Context& context,
                                                 const LayerPlan& plan) {
  gemm::PackedMatrix matrix;
  matrix.dtype = static_cast<DType>(reader.number());
  matrix.columns = reader.number();
  matrix.k = reader.number();
  matrix.panels = reader.block();
  if (matrix.panels.empty()) return nullptr;
  return gemm::make_packed_product(matrix, plan.isa, context.host_allocator());
}

// Counts all routers' tensors: ranks compare their versions, so that it means the same on each.
int64_t index_of(const routing::RouterTensor* tensor) {
  const auto all = routing::all_router_tensors();
  return std::ranges::find(all, tensor) - all.begin();
}

void write_router(const RouterVectors& router, Writer& writer) {
  for (const auto vector : kRouterVectors) writer.block(std::as_bytes(std::span(router.*vector)));
  writer.number(static_cast<int64_t>(router.own.size()));
  for (const RouterVectors::Own& own : router.own) {
    writer.number(index_of(own.tensor.tensor));
    writer.block({own.values.as<std::byte>(), own.values.size_bytes()});
  }
}

RouterVectors::Own read_router_tensor(Reader& reader, const MoeSpec& spec) {
  const int64_t index = reader.number();
  const std::span<const std::byte> bytes = reader.block();
  for (const routing::SizedRouterTensor& sized : routing::router_tensors_of(spec)) {
    if (!sized.tensor->id || index_of(sized.tensor) != index) continue;
    const bool is_index = sized.tensor->element == routing::RouterElement::kIndex;
    Tensor values(is_index ? DType::kI32 : DType::kF32, {sized.size.rows, sized.size.cols});
    if (values.size_bytes() != bytes.size()) {
      refuse("a tensor of the router", std::to_string(bytes.size()));
    }
    std::ranges::copy(bytes, values.as<std::byte>());
    return {.tensor = sized, .values = std::move(values)};
  }
  refuse("a tensor of the router", std::to_string(index));
}

RouterVectors read_router(Reader& reader, const MoeSpec& spec) {
  RouterVectors router;
  for (const auto vector : kRouterVectors) router.*vector = values_of<float>(reader.block());
  const int64_t count = reader.number();
  for (int64_t i = 0; i < count; ++i) router.own.push_back(read_router_tensor(reader, spec));
  return router;
}

// A rank that joins may compute logits though the others have theirs from elsewhere, or not.
void match_gate(const MoeSpec& spec, PackedWeights& weights) {
  if (!spec.has_gate) {
    weights.gate = nullptr;
    weights.stored_hashes[weights::kRouter] = 0;
    weights.gate_rows_with_nan = 0;
    weights.router.logit_bias.clear();
    weights.router.input_scale.clear();
    return;
  }
  if (weights.gate != nullptr) return;
  throw Error(ErrorCode::kTensorMissing,
              {.what = "the other ranks of the layer have no gate matrix to give",
               .tensor = "gate",
               .hint = "join with MoeSpec.has_gate = false, or read the layer from its source"});
}

}  // namespace

std::vector<std::byte> bytes_of_rest(const PackedWeights& weights) {
  Writer writer;
  for (const auto slabs : kSlabs) write_slabs(weights.*slabs, writer);
  for (const auto product : kProducts) write_product((weights.*product).get(), writer);
  for (const WeightId id : weights::kAll) {
    writer.number(static_cast<int64_t>(weights.stored_hashes[id]));
  }
  writer.number(weights.gate_rows_with_nan.get());
  for (const auto vector : kVectors) writer.block(std::as_bytes(std::span(weights.*vector)));
  write_router(weights.router, writer);
  for (const StaticScales& scales : {weights.static_scales, weights.shared_static_scales}) {
    writer.block(std::as_bytes(std::span(&scales, 1)));
  }
  return writer.take();
}

void read_rest(std::span<const std::byte> bytes, const Context& context, const LayerPlan& plan,
               PackedWeights& weights) {
  Reader reader(bytes);
  for (const auto slabs : kSlabs) read_slabs(reader, weights.*slabs);
  for (const auto product : kProducts) weights.*product = read_product(reader, context, plan);
  for (const WeightId id : weights::kAll) {
    weights.stored_hashes[id] = static_cast<uint64_t>(reader.number());
  }
  weights.gate_rows_with_nan = reader.number();
  for (const auto vector : kVectors) weights.*vector = values_of<float>(reader.block());
  weights.router = read_router(reader, plan.spec);
  for (StaticScales* scales : {&weights.static_scales, &weights.shared_static_scales}) {
    const std::vector<StaticScales> sent = values_of<StaticScales>(reader.block());
    if (sent.size() != 1) refuse("static scales", std::to_string(sent.size()));
    *scales = sent.front();
  }
  if (!reader.is_done()) refuse("bytes", "more than were due");
  match_gate(plan.spec, weights);
}

}  // namespace conclave::inline v0
