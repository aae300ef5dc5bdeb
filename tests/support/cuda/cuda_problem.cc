#include "support/cuda/cuda_problem.h"

#include "cuda/check.h"
#include "support/cuda/device_fill.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <utility>

namespace conclave::testing {

namespace {

constexpr int64_t kBlock = 128;
// Rows behind the last weight row that a kernel may read but not use.
constexpr int64_t kSlackRows = 64;
// Codes are drawn with this deviation, so that they use most of e4m3's range up to 448.
constexpr float kCodeDeviation = 100;

int64_t padded(int64_t elements, DType dtype) {
  const int64_t unit = 16 / byte_size(dtype);
  return (elements + unit - 1) / unit * unit;
}
int64_t blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

cuda::DeviceBuffer floats(int64_t count) {
  return cuda::DeviceBuffer(static_cast<size_t>(count) * sizeof(float));
}

template <class T>
cuda::DeviceBuffer uploaded(const std::vector<T>& values) {
  cuda::DeviceBuffer buffer(std::max<size_t>(values.size(), 1) * sizeof(T));
  cuda::upload(std::span<const T>(values), buffer.data());
  return buffer;
}

cuda::DeviceBuffer normal(NormalMatrix matrix, int64_t slack_rows) {
  const int64_t elements = (matrix.rows + slack_rows) * matrix.stride;
  cuda::DeviceBuffer buffer(static_cast<size_t>(elements * byte_size(matrix.dtype)));
  const auto used = static_cast<size_t>(matrix.rows * matrix.stride * byte_size(matrix.dtype));
  cuda::check(cudaMemset(buffer.data() + used, 0xff, buffer.bytes() - used), "cudaMemset");
  matrix.data = buffer.data();
  fill_normal(matrix, nullptr);
  return buffer;
}

}  // namespace

QuantSpec fp8_block_quant() {
  return {.weights = WeightScale::kBlock, .activations = ActivationScale::kGroup};
}
QuantSpec fp8_channel_quant() {
  return {.weights = WeightScale::kChannel, .activations = ActivationScale::kToken};
}
QuantSpec fp8_static_quant() {
  return {.weights = WeightScale::kTensor, .activations = ActivationScale::kTensorStatic};
}

CudaProblem::CudaProblem(const CudaProblemOptions& options)
    : options_(options),
      activation_(activation::parse_activation(options.activation)),
      gate_up_stride_(padded(options.hidden_size, options.weight_dtype)),
      down_stride_(padded(options.intermediate_size, options.weight_dtype)) {
  int ordinal = 0;
  cuda::check(cudaGetDevice(&ordinal), "cudaGetDevice");
  device_ = cuda::device_info(ordinal);
  for (int32_t copy = 0; copy < options_.weight_copies; ++copy) make_weights(copy);
  make_batch();
}

void CudaProblem::set_batch(const Batch& batch) {
  options_.num_tokens = batch.num_tokens;
  options_.routing = batch.routing;
  options_.routings = batch.routings;
  options_.seed = batch.seed;
  make_batch();
}

void CudaProblem::make_batch() {
  groups_.clear();
  routings_.clear();
  make_rows();
  for (int32_t i = 0; i < options_.routings; ++i) make_routing_of(i);
  cuda::check(cudaDeviceSynchronize(), "CudaProblem");
}

int64_t CudaProblem::gate_up_rows() const {
  return (activation_.gated ? 2 : 1) * options_.intermediate_size;
}

// The gate and up products have deviation 1, the outputs are about 1.
void CudaProblem::make_weights(int32_t copy) {
  const CudaProblemOptions& o = options_;
  const bool fp8 = o.weight_dtype == DType::kF8E4M3;
  const uint64_t seed = o.seed * 1000 + static_cast<uint64_t>(copy) * 10;
  const auto up = static_cast<float>(1.0 / std::sqrt(static_cast<double>(o.hidden_size)));
  const auto down = static_cast<float>(2.5 / std::sqrt(static_cast<double>(o.intermediate_size)));
  Weights weights;
  weights.gate_up = normal({.dtype = o.weight_dtype,
                            .rows = o.num_experts * gate_up_rows(),
                            .cols = o.hidden_size,
                            .stride = gate_up_stride_,
                            .deviation = fp8 ? kCodeDeviation : up,
                            .seed = seed + 1},
                           kSlackRows);
  weights.down = normal({.dtype = o.weight_dtype,
                         .rows = o.num_experts * o.hidden_size,
                         .cols = o.intermediate_size,
                         .stride = down_stride_,
                         .deviation = fp8 ? kCodeDeviation : down,
                         .seed = seed + 2},
                        kSlackRows);
  if (o.has_bias) {
    const auto bias = [&](int64_t columns, uint64_t bias_seed) {
      return normal({.dtype = DType::kF32,
                     .rows = o.num_experts,
                     .cols = columns,
                     .stride = columns,
                     .deviation = 0.5F,
                     .seed = bias_seed},
                    0);
    };
    weights.gate_up_bias = bias(gate_up_rows(), seed + 3);
    weights.down_bias = bias(o.hidden_size, seed + 4);
  }
  if (fp8) make_scales(weights, seed);
  weights_.push_back(std::move(weights));
}

void CudaProblem::make_scales(Weights& weights, uint64_t seed) {
  const CudaProblemOptions& o = options_;
  const bool block = o.quant.weights == WeightScale::kBlock;
  const int64_t halves = activation_.gated ? 2 : 1;
  const int64_t up =
      o.num_experts *
      (block ? halves * blocks(o.intermediate_size) * blocks(o.hidden_size) : gate_up_rows());
  const int64_t down =
      o.num_experts * (block ? blocks(o.hidden_size) * blocks(o.intermediate_size) : o.hidden_size);
  weights.gate_up_scale = floats(up);
  weights.down_scale = floats(down);
  const double h = std::sqrt(static_cast<double>(o.hidden_size));
  const double i = std::sqrt(static_cast<double>(o.intermediate_size));
  const float up_scale = static_cast<float>(1.0 / h) / kCodeDeviation;
  const float down_scale = static_cast<float>(2.5 / i) / kCodeDeviation;
  fill_scales(weights.gate_up_scale.as<float>(), up, std::ldexp(up_scale, o.up_exponent), seed + 5,
              nullptr);
  fill_scales(weights.down_scale.as<float>(), down, std::ldexp(down_scale, -2 * o.up_exponent),
              seed + 6, nullptr);
}

void CudaProblem::make_rows() {
  const CudaProblemOptions& o = options_;
  const int64_t stride = row_stride();
  hidden_data_ = normal({.dtype = row_dtype(),
                         .rows = o.num_tokens,
                         .cols = o.hidden_size,
                         .stride = stride,
                         .seed = o.seed * 1000 + 900},
                        1);
  hidden_ = {.data = hidden_data_.data(),
             .num_rows = o.num_tokens,
             .row_stride = stride,
             .dtype = row_dtype()};
  // The steps hold every input (3.5) and nearly every intermediate value (8); the others saturate.
  static_steps_ =
      uploaded(std::vector<float>{3.5F / 448.0F, std::ldexp(8.0F / 448.0F, 2 * o.up_exponent)});
  if (o.quant.activations == ActivationScale::kNone) return;
  const bool grouped = o.quant.activations == ActivationScale::kGroup;
  const int64_t scale_stride = grouped ? blocks(o.hidden_size) : 1;
  const int64_t code_stride = padded(o.hidden_size, DType::kF8E4M3);
  code_data_ = cuda::DeviceBuffer(static_cast<size_t>((o.num_tokens + 1) * code_stride));
  code_scales_ = floats((o.num_tokens + 1) * scale_stride);
  codes_ = {.data = code_data_.data(),
            .num_rows = o.num_tokens,
            .row_stride = code_stride,
            .dtype = DType::kF8E4M3,
            .scales = code_scales_.as<float>(),
            .scale_stride = scale_stride};
  quantize_rows({.rows = hidden_,
                 .cols = o.hidden_size,
                 .codes = codes_,
                 .quant = o.quant,
                 .static_step = static_steps_.as<float>()},
                nullptr);
}

void CudaProblem::spoil_token(int64_t token) {
  const auto bytes = static_cast<size_t>(byte_size(row_dtype()));
  const size_t at = static_cast<size_t>(token * row_stride() + options_.hidden_size / 2) * bytes;
  cuda::check(cudaMemset(hidden_data_.data() + at, 0xff, bytes), "cudaMemset");
}

void CudaProblem::set_up_bias(int64_t expert, int64_t feature, float value) {
  set_bias(expert, (activation_.gated ? options_.intermediate_size : 0) + feature, value);
}

void CudaProblem::set_gate_bias(int64_t expert, int64_t feature, float value) {
  set_bias(expert, feature, value);
}

void CudaProblem::set_bias(int64_t expert, int64_t row, float value) {
  for (Weights& weights : weights_) {
    cuda::upload(std::span<const float>(&value, 1),
                 weights.gate_up_bias.as<float>() + expert * gate_up_rows() + row);
  }
}

void CudaProblem::make_routing_of(int32_t routing) {
  Routing made;
  made.host = make_routing({.num_tokens = options_.num_tokens,
                            .num_experts = options_.num_experts,
                            .top_k = options_.top_k,
                            .kind = options_.routing,
                            .seed = options_.seed * 1000 + static_cast<uint64_t>(routing)});
  made.ids = uploaded(made.host.ids);
  made.weights = uploaded(made.host.weights);
  routings_.push_back(std::move(made));
}

experts::ExpertsProblem CudaProblem::sizes() const {
  return {.num_local_experts = options_.num_experts,
          .hidden_size = options_.hidden_size,
          .intermediate_size = options_.intermediate_size,
          .top_k = options_.top_k,
          .max_tokens = options_.num_tokens,
          .weight_dtype = options_.weight_dtype,
          .quant = options_.quant,
          .activation = activation_,
          .has_bias = options_.has_bias,
          .target = device_};
}

experts::DeviceExperts CudaProblem::weights(int32_t copy) const {
  const Weights& w = weights_[static_cast<size_t>(copy)];
  const bool is_static = options_.quant.activations == ActivationScale::kTensorStatic;
  return {.gate_up = {.data = w.gate_up.data(),
                      .stride = gate_up_stride_,
                      .bias = w.gate_up_bias.as<float>(),
                      .scale = w.gate_up_scale.as<float>()},
          .down = {.data = w.down.data(),
                   .stride = down_stride_,
                   .bias = w.down_bias.as<float>(),
                   .scale = w.down_scale.as<float>()},
          .input_scale = is_static ? static_steps_.as<float>() : nullptr,
          .intermediate_scale = is_static ? static_steps_.as<float>() + 1 : nullptr};
}

std::span<const int32_t> CudaProblem::host_ids(int32_t routing) const {
  return routings_[static_cast<size_t>(routing)].host.ids;
}
std::span<const float> CudaProblem::host_weights(int32_t routing) const {
  return routings_[static_cast<size_t>(routing)].host.weights;
}
const int32_t* CudaProblem::topk_ids(int32_t routing) const {
  return routings_[static_cast<size_t>(routing)].ids.as<int32_t>();
}
const float* CudaProblem::topk_weights(int32_t routing) const {
  return routings_[static_cast<size_t>(routing)].weights.as<float>();
}

const GroupedRows& CudaProblem::groups(int32_t tile_tokens, int32_t routing) {
  const auto [entry, is_new] = groups_.try_emplace({tile_tokens, routing});
  Groups& groups = entry->second;
  if (!is_new) return groups.rows;
  const HostGroups host = group_rows(host_ids(routing), options_.num_experts, tile_tokens);
  groups.expert_begin = uploaded(host.expert_begin);
  groups.row_slot = uploaded(host.row_slot);
  groups.slot_row = uploaded(host.slot_row);
  groups.tiles = uploaded(host.tiles);
  groups.num_tiles = uploaded(std::vector<int32_t>{static_cast<int32_t>(host.tiles.size())});
  const int64_t max_rows = options_.num_tokens * std::min(options_.top_k, options_.num_experts);
  groups.rows = {.expert_begin = groups.expert_begin.as<int32_t>(),
                 .row_slot = groups.row_slot.as<int32_t>(),
                 .slot_row = groups.slot_row.as<int32_t>(),
                 .tiles = groups.tiles.as<TokenTile>(),
                 .num_tiles = groups.num_tiles.as<int32_t>(),
                 .max_rows = max_rows,
                 .max_tiles = max_token_tiles(max_rows, options_.num_experts, tile_tokens),
                 .tile_tokens = tile_tokens,
                 .top_k = static_cast<int32_t>(options_.top_k)};
  return groups.rows;
}

DType CudaProblem::row_dtype() const {
  const DType dtype = options_.weight_dtype;
  return dtype == DType::kF16 || dtype == DType::kF32 ? dtype : DType::kBF16;
}
int64_t CudaProblem::row_stride() const { return padded(options_.hidden_size, row_dtype()); }
int64_t CudaProblem::output_bytes() const {
  return options_.num_tokens * options_.top_k * row_stride() * byte_size(row_dtype());
}

experts::DeviceExpertsCall CudaProblem::call(int32_t tile_tokens, int32_t routing, void* workspace,
                                             void* output) {
  return {.input = input(),
          .groups = groups(tile_tokens, routing),
          .input_weights = options_.weight_on_input ? topk_weights(routing) : nullptr,
          .workspace = workspace,
          .output = output,
          .output_stride = row_stride()};
}

DeviceRows CudaProblem::sorted_input(int32_t tile_tokens, int32_t routing, CUstream_st* stream) {
  const GroupedRows& rows = groups(tile_tokens, routing);
  Groups& own = groups_.at({tile_tokens, routing});
  DeviceRows sorted = input();
  const auto spread = [&](const void* from, int64_t row_bytes, int64_t group_stride,
                          cuda::DeviceBuffer& to) {
    const auto bytes = static_cast<size_t>((rows.max_rows + 4) * row_bytes);
    if (to.bytes() < bytes) to = cuda::DeviceBuffer(bytes);
    gather_rows({.from = from,
                 .row_bytes = row_bytes,
                 .group_stride = group_stride,
                 .row_slot = rows.row_slot,
                 .num_rows = rows.expert_begin + options_.num_experts,
                 .max_rows = rows.max_rows,
                 .top_k = rows.top_k,
                 .to = to.data()},
                stream);
    return to.data();
  };
  sorted.num_rows = rows.max_rows;
  sorted.data = spread(sorted.data, sorted.row_stride * byte_size(sorted.dtype), 0, own.sorted);
  if (sorted.scales != nullptr) {
    const int64_t bytes = sorted.scale_stride * static_cast<int64_t>(sizeof(float));
    sorted.scale_stride = 1;
    sorted.group_stride = (rows.max_rows + 3) / 4 * 4;
    spread(sorted.scales, bytes, sorted.group_stride, own.sorted_scales);
    sorted.scales = own.sorted_scales.as<float>();
  }
  return sorted;
}

OracleProblem CudaProblem::oracle_problem(int32_t routing, int32_t copy) const {
  return {.sizes = sizes(),
          .weights = weights(copy),
          .input = input(),
          .input_weights = options_.weight_on_input ? topk_weights(routing) : nullptr,
          .ambiguity = ambiguity_};
}

// The limits are 2e10 products and a gigabyte of float64 rows.
int64_t CudaProblem::affordable_rows() const {
  const int64_t products = (gate_up_rows() + options_.intermediate_size) * options_.hidden_size;
  const int64_t bytes = 8 * (2 * options_.hidden_size + options_.intermediate_size);
  return std::max<int64_t>(16, std::min(20'000'000'000 / products, 1'000'000'000 / bytes));
}

RowErrors CudaProblem::check_rows(const void* output, int32_t routing, int32_t copy) const {
  const std::span<const int32_t> ids = host_ids(routing);
  const HostGroups groups = group_rows(ids, options_.num_experts, 64);
  std::vector<int32_t> slots = groups.row_slot;
  const auto limit = static_cast<size_t>(affordable_rows());
  if (slots.size() > limit) {
    std::set<int32_t> chosen;
    std::mt19937_64 random(options_.seed);
    for (const TokenTile& tile : groups.tiles) {
      if (chosen.size() >= limit / 2) break;
      chosen.insert(groups.row_slot[static_cast<size_t>(tile.begin + tile.count - 1)]);
    }
    while (chosen.size() < limit) chosen.insert(slots[random() % slots.size()]);
    slots.assign(chosen.begin(), chosen.end());
  }
  std::vector<OracleSlot> wanted;
  for (const int32_t slot : slots) {
    wanted.push_back({.slot = slot,
                      .token = static_cast<int32_t>(slot / options_.top_k),
                      .expert = ids[static_cast<size_t>(slot)]});
  }
  const OutputRows rows{.data = output,
                        .rows = static_cast<int64_t>(ids.size()),
                        .cols = options_.hidden_size,
                        .stride = row_stride(),
                        .dtype = row_dtype()};
  RowErrors errors = compare_slots(oracle_problem(routing, copy), wanted, rows);
  std::vector<uint8_t> may_write(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) may_write[i] = ids[i] >= 0 ? 1 : 0;
  errors.stray = count_stray(rows, may_write);
  return errors;
}

RowErrors CudaProblem::check_tokens(const OutputRows& output, double output_scale, int32_t routing,
                                    int32_t copy) const {
  const int64_t k = options_.top_k;
  const int64_t limit = std::max<int64_t>(1, affordable_rows() / k);
  std::set<int64_t> tokens;
  std::mt19937_64 random(options_.seed);
  if (options_.num_tokens <= limit) {
    for (int64_t token = 0; token < options_.num_tokens; ++token) tokens.insert(token);
  } else {
    tokens = {0, options_.num_tokens - 1};
    while (static_cast<int64_t>(tokens.size()) < limit) {
      tokens.insert(static_cast<int64_t>(random() % static_cast<uint64_t>(options_.num_tokens)));
    }
  }
  RowErrors errors = check_these_tokens(output, std::vector<int64_t>(tokens.begin(), tokens.end()),
                                        output_scale, routing, copy);
  errors.stray =
      count_stray(output, std::vector<uint8_t>(static_cast<size_t>(output.rows), uint8_t{1}));
  return errors;
}

RowErrors CudaProblem::check_these_tokens(const OutputRows& output, std::span<const int64_t> tokens,
                                          double output_scale, int32_t routing,
                                          int32_t copy) const {
  const int64_t k = options_.top_k;
  std::vector<OracleSlot> slots;
  std::vector<float> slot_weights;
  for (const int64_t token : tokens) {
    for (int64_t slot = token * k; slot < (token + 1) * k; ++slot) {
      slots.push_back({.slot = slot,
                       .token = static_cast<int32_t>(token),
                       .expert = host_ids(routing)[static_cast<size_t>(slot)]});
      slot_weights.push_back(
          options_.weight_on_input ? 1.0F : host_weights(routing)[static_cast<size_t>(slot)]);
    }
  }
  return compare_tokens(
      oracle_problem(routing, copy),
      {.slots = slots, .slot_weights = slot_weights, .top_k = k, .scale = output_scale}, output);
}

int64_t CudaProblem::active_experts(int32_t routing) const {
  std::set<int32_t> active(host_ids(routing).begin(), host_ids(routing).end());
  active.erase(-1);
  return static_cast<int64_t>(active.size());
}

int64_t CudaProblem::active_weight_bytes(int32_t routing) const {
  const int64_t elements = (gate_up_rows() + options_.intermediate_size) * options_.hidden_size;
  const auto scales =
      static_cast<int64_t>(weights_[0].gate_up_scale.bytes() + weights_[0].down_scale.bytes()) /
      options_.num_experts;
  return active_experts(routing) * (elements * byte_size(options_.weight_dtype) + scales);
}

double CudaProblem::flops(int32_t routing) const {
  const std::span<const int32_t> ids = host_ids(routing);
  const auto rows = std::count_if(ids.begin(), ids.end(), [](int32_t id) { return id >= 0; });
  const int64_t products = (gate_up_rows() + options_.intermediate_size) * options_.hidden_size;
  return 2.0 * static_cast<double>(rows) * static_cast<double>(products);
}

}  // namespace conclave::testing
