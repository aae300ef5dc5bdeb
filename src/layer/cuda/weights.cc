#include "layer/cuda/weights.h"

#include "core/checked.h"
#include "core/layer_roles.h"
#include "core/weight_id.h"
#include "core/weight_types.h"
#include "cuda/check.h"
#include "layer/cuda/memory_place.h"
#include "layer/cuda/row_format.h"
#include "layer/cuda/weight_upload.h"
#include "layer/mlp_roles.h"
#include "layer/quant_scales.h"
#include "layer/router_vectors.h"

#include "conclave/error.h"
#include "conclave/interop/cuda.h"

#include <algorithm>
#include <cuda_runtime_api.h>
#include <numeric>
#include <span>

namespace conclave::inline v0 {
namespace {

// Kernels may read this many rows beyond the last expert, but never use them.
constexpr int64_t kSlackRows = 64;
// The tensor map interleaves gate and up rows in groups of 8: a partial group at the very end would
// reach beyond the caller's memory.
constexpr int64_t kRowGroup = 8;

// An expert of a kernel: its place in the source, and the columns of it that this rank holds.
struct LocalExpert {
  const MlpRoles* roles = nullptr;
  int32_t expert = 0;
  TensorSlice inner;
  bool has_bias = false;
  bool has_down_bias = false;  // only the first of an expert's slices, which are added up
};

// Experts that one kernel runs.
struct MlpSource {
  const experts::ExpertsProblem& problem;
  std::vector<LocalExpert> experts;
  bool adds_down_bias = true;

  int64_t halves() const { return problem.activation.gated ? 2 : 1; }
  int64_t gate_up_rows() const { return halves() * problem.intermediate_size; }
  int64_t count() const { return static_cast<int64_t>(experts.size()); }
};

MlpSource routed_source(const CudaPlan& plan) {
  MlpSource mlp{
      .problem = plan.routed.problem, .experts = {}, .adds_down_bias = plan.part.adds_down_bias};
  for (const int32_t expert : plan.part.local_experts) {
    mlp.experts.push_back({.roles = &kRoutedRoles,
                           .expert = expert,
                           .inner = plan.part.inner,
                           .has_bias = plan.spec.has_bias,
                           .has_down_bias = plan.spec.has_bias});
  }
  const int64_t width = plan.part.inner.size();
  for (int32_t slot = 0; slot < plan.fused.slots(); ++slot) {
    const int32_t slice = slot % plan.fused.slices;
    const int64_t begin = plan.part.shared_inner.begin + slice * width;
    mlp.experts.push_back({.roles = &kSharedRoles,
                           .expert = slot / plan.fused.slices,
                           .inner = {.begin = begin, .end = begin + width},
                           .has_bias = plan.spec.shared.has_bias,
                           .has_down_bias = plan.spec.shared.has_bias && slice == 0});
  }
  return mlp;
}

MlpSource every_row_source(const CudaPlan& plan, const CudaMlpPlan& part, const MlpRoles& roles,
                           const TensorSlice& inner) {
  MlpSource mlp{.problem = part.problem, .experts = {}, .adds_down_bias = plan.part.adds_down_bias};
  for (int64_t expert = 0; expert < part.problem.num_local_experts; ++expert) {
    mlp.experts.push_back({.roles = &roles,
                           .expert = static_cast<int32_t>(expert),
                           .inner = inner,
                           .has_bias = part.problem.has_bias,
                           .has_down_bias = part.problem.has_bias});
  }
  return mlp;
}
MlpSource shared_source(const CudaPlan& plan) {
  return every_row_source(plan, *plan.shared, kSharedRoles, plan.part.shared_inner);
}
MlpSource residual_source(const CudaPlan& plan) {
  return every_row_source(plan, *plan.residual, kResidualRoles, plan.part.residual_inner);
}

// The addresses at which matrices must lie to form one tensor.
struct InPlaceLayout {
  const std::byte* gate_up = nullptr;
  int64_t gate_up_stride = 0;
  const std::byte* down = nullptr;
  int64_t down_stride = 0;
};

bool lies_at(const ConstTensorView& view, const std::byte* place, int64_t stride) {
  const int64_t own = view.row_stride != 0 ? view.row_stride : view.shape[1];
  return view.data == place && own == stride;
}

int64_t stride_of(const ConstTensorView& view) {
  return view.row_stride != 0 ? view.row_stride : view.shape[1];
}

Support find_layout(const MlpSource& mlp, const WeightSource& source, InPlaceLayout& layout) {
  if (source.memory() == MemoryKind::kHost) return Support::no("the weights are in host memory");
  if (mlp.experts.empty()) return Support::no("there are no experts");
  const experts::ExpertsProblem& problem = mlp.problem;
  const MlpRoles& roles = *mlp.experts.front().roles;
  for (const LocalExpert& local : mlp.experts) {
    if (local.roles != &roles) return Support::no("shared experts run with the routed ones");
    if (local.inner.size() != source.describe(roles.down).cols) {
      return Support::no("only a slice of the columns is used");
    }
  }
  if (problem.intermediate_size % kRowGroup != 0) {
    return Support::no("the intermediate size is no multiple of 8");
  }
  const DType dtype = problem.weight_dtype;
  const WeightRole first_role = problem.activation.gated ? roles.gate : roles.up;
  const ConstTensorView first = source.view(first_role, mlp.experts.front().expert);
  const ConstTensorView down = source.view(roles.down, mlp.experts.front().expert);
  if (first.empty() || down.empty()) return Support::no("a matrix has no view");
  layout = {.gate_up = static_cast<const std::byte*>(first.data),
            .gate_up_stride = stride_of(first),
            .down = static_cast<const std::byte*>(down.data),
            .down_stride = stride_of(down)};
  const auto is_aligned = [&](const std::byte* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % kRowAlignmentBytes == 0 &&
           packed_bytes(dtype, stride) % kRowAlignmentBytes == 0;
  };
  if (!is_aligned(layout.gate_up, layout.gate_up_stride) ||
      !is_aligned(layout.down, layout.down_stride)) {
    return Support::no("rows do not begin at multiples of 16 bytes");
  }
  const int64_t half_bytes = packed_bytes(dtype, problem.intermediate_size * layout.gate_up_stride);
  const int64_t down_bytes = packed_bytes(dtype, problem.hidden_size * layout.down_stride);
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const std::byte* const place = layout.gate_up + index * mlp.halves() * half_bytes;
    const int32_t expert = mlp.experts[i].expert;
    const bool good = lies_at(source.view(first_role, expert), place, layout.gate_up_stride) &&
                      lies_at(source.view(roles.up, expert),
                              place + (mlp.halves() - 1) * half_bytes, layout.gate_up_stride) &&
                      lies_at(source.view(roles.down, expert), layout.down + index * down_bytes,
                              layout.down_stride);
    if (!good) return Support::no("gate, up and experts do not follow each other");
  }
  return Support::yes();
}

// A kernel that reads a host pointer would destroy the whole device context.
void check_source_place(const WeightSource& source, int32_t ordinal) {
  if (source.memory() == MemoryKind::kHost) return;
  for (size_t i = 0; i < kNumWeightRoles; ++i) {
    const auto role = static_cast<WeightRole>(i);
    const int64_t count = source.describe(role).count;
    for (int64_t expert = 0; expert < count; ++expert) {
      const ConstTensorView view = source.view(role, expert);
      if (!view.empty()) check_place(source.locate(role, expert), view.data, ordinal);
    }
  }
}

class Allocator {
 public:
  Allocator(const Context& context, Stream stream)
      : allocator_(*context.device_allocator()), stream_(stream) {}

  // Memory is cleared, so that reads beyond a matrix yield numbers.
  DeviceMemory make(int64_t bytes, const char* what) const {
    DeviceMemory memory(allocator_, static_cast<size_t>(bytes), stream_, what);
    if (!memory.empty()) {
      cuda::check(cudaMemsetAsync(memory.as(), 0, memory.bytes(), to_cuda(stream_)),
                  "cudaMemsetAsync");
    }
    return memory;
  }
  DeviceMemory floats(int64_t count, const char* what) const {
    return make(count * int64_t{sizeof(float)}, what);
  }

 private:
  DeviceAllocator& allocator_;
  Stream stream_;
};

CudaMlpWeights allocate_mlp(const Allocator& allocator, const MlpSource& mlp,
                            const WeightSource& source) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const int64_t count = mlp.count();
  CudaMlpWeights weights;
  InPlaceLayout layout;
  weights.in_place = static_cast<bool>(find_layout(mlp, source, layout));
  if (weights.in_place) {
    weights.view.gate_up = layout.gate_up;
    weights.view.gate_up_stride = layout.gate_up_stride;
    weights.view.down = layout.down;
    weights.view.down_stride = layout.down_stride;
  } else {
    const DType dtype = problem.weight_dtype;
    const int64_t gate_up_stride = padded_row(problem.hidden_size, dtype);
    const int64_t down_stride = padded_row(problem.intermediate_size, dtype);
    weights.gate_up = allocator.make(
        (count * mlp.gate_up_rows() + kSlackRows) * packed_bytes(dtype, gate_up_stride), "gate_up");
    weights.down = allocator.make(
        (count * problem.hidden_size + kSlackRows) * packed_bytes(dtype, down_stride), "down");
    weights.view.gate_up = weights.gate_up.as();
    weights.view.gate_up_stride = gate_up_stride;
    weights.view.down = weights.down.as();
    weights.view.down_stride = down_stride;
  }
  if (problem.has_bias) {
    weights.gate_up_bias = allocator.floats(count * mlp.gate_up_rows(), "gate_up_bias");
    weights.view.gate_up_bias = weights.gate_up_bias.as<float>();
    if (mlp.adds_down_bias) {
      weights.down_bias = allocator.floats(count * problem.hidden_size, "down_bias");
      weights.view.down_bias = weights.down_bias.as<float>();
    }
  }
  return weights;
}

// Scales of one matrix [rows, cols].
int64_t scale_count(const QuantSpec& quant, int64_t rows, int64_t cols) {
  if (quant.weights != WeightScale::kBlock) return rows;
  return ceil_div(rows, quant.block_rows) * ceil_div(cols, quant.block_cols);
}

void allocate_scales(const Allocator& allocator, const MlpSource& mlp, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (is_plain(problem.weight_dtype)) return;
  const int64_t count = mlp.count();
  const int64_t hidden = problem.hidden_size;
  const int64_t inner = problem.intermediate_size;
  weights.gate_up_scale = allocator.floats(
      count * mlp.halves() * scale_count(problem.quant, inner, hidden), "gate_up_scale");
  weights.down_scale =
      allocator.floats(count * scale_count(problem.quant, hidden, inner), "down_scale");
  weights.view.gate_up_scale = weights.gate_up_scale.as<float>();
  weights.view.down_scale = weights.down_scale.as<float>();
  if (problem.quant.activations != ActivationScale::kTensorStatic) return;
  weights.static_scales = allocator.floats(2, "static scales");
  weights.view.input_scale = weights.static_scales.as<float>();
  weights.view.intermediate_scale = weights.static_scales.as<float>() + 1;
}

void fill_matrices(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights,
                   const Context& context) {
  const experts::ExpertsProblem& problem = mlp.problem;
  const DType dtype = problem.weight_dtype;
  const int64_t hidden = problem.hidden_size;
  const int64_t inner = problem.intermediate_size;
  const int64_t gate_up_pitch = packed_bytes(dtype, weights.view.gate_up_stride);
  const int64_t down_pitch = packed_bytes(dtype, weights.view.down_stride);
  const int64_t count = mlp.count();
  const int64_t expert_bytes =
      mlp.gate_up_rows() * packed_bytes(dtype, hidden) + hidden * packed_bytes(dtype, inner);
  for (int64_t local = 0; local < count; ++local) {
    const LocalExpert& placed = mlp.experts[static_cast<size_t>(local)];
    const MlpRoles* const roles = placed.roles;
    const int32_t expert = placed.expert;
    const TensorSlice& slice = placed.inner;
    const WeightBlock rows{slice.begin, slice.end, 0, hidden};
    const WeightBlock columns{0, hidden, slice.begin, slice.end};
    std::byte* const gate_up = weights.gate_up.as() + local * mlp.gate_up_rows() * gate_up_pitch;
    std::byte* const up = gate_up + (mlp.halves() - 1) * inner * gate_up_pitch;
    if (problem.activation.gated) {
      upload.copy({.role = roles->gate, .expert = expert, .block = rows},
                  {.data = gate_up, .stride_bytes = gate_up_pitch});
    }
    upload.copy({.role = roles->up, .expert = expert, .block = rows},
                {.data = up, .stride_bytes = gate_up_pitch});
    upload.copy(
        {.role = roles->down, .expert = expert, .block = columns},
        {.data = weights.down.as() + local * hidden * down_pitch, .stride_bytes = down_pitch});
    context.progress("uploading experts", (local + 1) * expert_bytes, count * expert_bytes);
  }
}

void fill_biases(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights) {
  const experts::ExpertsProblem& problem = mlp.problem;
  if (!problem.has_bias) return;
  const int64_t inner = problem.intermediate_size;
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const auto& [roles, expert, columns, has_bias, has_down_bias] = mlp.experts[i];
    if (!has_bias) continue;
    const WeightBlock slice{0, 1, columns.begin, columns.end};
    float* const gate_up =
        weights.gate_up_bias.as<float>() + static_cast<int64_t>(i) * mlp.gate_up_rows();
    if (problem.activation.gated) {
      upload.copy_floats(
          upload.read_floats({.role = roles->gate_bias, .expert = expert, .block = slice}),
          gate_up);
    }
    upload.copy_floats(
        upload.read_floats({.role = roles->up_bias, .expert = expert, .block = slice}),
        gate_up + (mlp.halves() - 1) * inner);
    if (!mlp.adds_down_bias || !has_down_bias) continue;
    upload.copy_floats(
        upload.read_floats(roles->down_bias, expert),
        weights.down_bias.as<float>() + static_cast<int64_t>(i) * problem.hidden_size);
  }
}

// Scales of codes as kernels read them: of blocks as stored, otherwise one per row.
class ScaleReader {
 public:
  // `source` must be in host memory.
  ScaleReader(const MlpSource& mlp, const WeightSource& source) : mlp_(mlp), source_(source) {}

  // Scales for the rows and columns of a matrix that this rank holds.
  std::vector<float> read(WeightRole matrix, int32_t expert, const WeightBlock& block) const {
    const QuantSpec& quant = mlp_.problem.quant;
    const WeightRole role = plane_of(matrix, Plane::kScale);
    if (quant.weights == WeightScale::kBlock) {
      return load(role, expert,
                  {block.row_begin / quant.block_rows, ceil_div(block.row_end, quant.block_rows),
                   block.col_begin / quant.block_cols, ceil_div(block.col_end, quant.block_cols)});
    }
    if (quant.weights == WeightScale::kChannel) {
      return load(role, expert, {block.row_begin, block.row_end, 0, 1});
    }
    const float one = load(role, expert, {0, 1, 0, 1}).front();
    return std::vector<float>(static_cast<size_t>(block.row_end - block.row_begin), one);
  }

  StaticScales read_static() const {
    return load_static_scales(source_, *mlp_.experts.front().roles);
  }

 private:
  std::vector<float> load(WeightRole role, int32_t expert, const WeightBlock& block) const {
    return load_scales(source_, role, expert, block);
  }

  const MlpSource& mlp_;
  const WeightSource& source_;
};

void fill_scales(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights) {
  if (is_plain(mlp.problem.weight_dtype)) return;
  const ScaleReader reader(mlp, upload.on_host());
  const int64_t hidden = mlp.problem.hidden_size;
  float* gate_up = weights.gate_up_scale.as<float>();
  float* down = weights.down_scale.as<float>();
  const auto append = [&](const std::vector<float>& scales, float*& place) {
    upload.copy_floats(scales, place);
    place += scales.size();
  };
  for (const LocalExpert& placed : mlp.experts) {
    const MlpRoles* const roles = placed.roles;
    const int32_t expert = placed.expert;
    const TensorSlice& slice = placed.inner;
    const WeightBlock rows{slice.begin, slice.end, 0, hidden};
    const WeightBlock columns{0, hidden, slice.begin, slice.end};
    if (mlp.problem.activation.gated) append(reader.read(roles->gate, expert, rows), gate_up);
    append(reader.read(roles->up, expert, rows), gate_up);
    append(reader.read(roles->down, expert, columns), down);
  }
  if (!mlp.experts.empty() && mlp.problem.quant.activations == ActivationScale::kTensorStatic) {
    const StaticScales steps = reader.read_static();
    upload.copy_floats({steps.input, steps.intermediate}, weights.static_scales.as<float>());
  }
}

void fill_mlp(const MlpSource& mlp, const WeightSource& source, WeightUpload& upload,
              CudaMlpWeights& weights, const Context& context) {
  if (weights.in_place) {
    // Nothing is copied into the caller's memory: a reload must bring the same tensors.
    InPlaceLayout layout;
    const bool same = find_layout(mlp, source, layout) && layout.gate_up == weights.view.gate_up &&
                      layout.down == weights.view.down;
    if (!same) {
      throw Error(ErrorCode::kState,
                  {.what = "this layer reads its weights where the caller keeps them: an in-place "
                           "reload cannot bring others",
                   .hint = "write them there, or reload with ReloadMode::kStaged"});
    }
  } else {
    fill_matrices(mlp, upload, weights, context);
  }
  fill_biases(mlp, upload, weights);
  fill_scales(mlp, upload, weights);
}

// Local expert of each id: physical experts, then fused shared ones; -1 if it is not on this rank.
std::vector<int32_t> local_expert_map(const CudaPlan& plan) {
  const std::vector<int32_t> routed = plan.part.placement().expert_map(plan.parallel.ep_rank);
  std::vector<int32_t> map(routed.begin(), routed.end());
  const auto local = static_cast<int32_t>(plan.part.local_experts.size());
  for (int32_t slot = 0; slot < plan.fused.slots(); ++slot) map.push_back(local + slot);
  return map;
}

bool is_identity(const std::vector<int32_t>& map) {
  for (size_t i = 0; i < map.size(); ++i) {
    if (map[i] != static_cast<int32_t>(i)) return false;
  }
  return true;
}

class RestAllocator {
 public:
  RestAllocator(const Allocator& allocator, const WeightSource& source)
      : allocator_(allocator), source_(source) {}

  // Allocates rows at multiples of 16 bytes in the role's own type, which is stored in `dtype`.
  DeviceMemory dense(WeightRole role, DType& dtype) const {
    const WeightInfo info = source_.describe(role);
    dtype = info.dtype;
    return allocator_.make(info.rows * padded_row(info.cols, dtype) * byte_size(dtype), "gate");
  }
  DeviceMemory floats(bool wanted, int64_t count, const char* what) const {
    return wanted ? allocator_.floats(count, what) : DeviceMemory();
  }
  DeviceMemory ints(size_t count, const char* what) const {
    return allocator_.make(static_cast<int64_t>(count * sizeof(int32_t)), what);
  }

 private:
  const Allocator& allocator_;
  const WeightSource& source_;
};

void allocate_router(const RestAllocator& allocator, const MoeSpec& spec, CudaWeights& weights) {
  const RouterSpec& router = spec.router;
  if (spec.has_gate) {
    weights.gate = allocator.dense(WeightRole::kRouter, weights.gate_dtype);
    weights.router_bias = allocator.floats(router.has_logit_bias, num_logits(spec), "router_bias");
    weights.router_input_scale =
        allocator.floats(router.input_norm.enabled, spec.hidden_size, "router_input_scale");
  }
  weights.selection_bias = allocator.floats(
      router.has_selection_bias, spec.num_experts + spec.num_zero_experts, "selection_bias");
  weights.expert_scale =
      allocator.floats(router.has_expert_scale, spec.num_experts, "expert_scale");
  weights.global_scale = allocator.floats(router.has_global_scale, 1, "global_scale");
  if (router.vocab_size > 0) {
    weights.hash_table =
        allocator.ints(static_cast<size_t>(router.vocab_size * spec.top_k), "hash_table");
  }
  weights.replay_ids = allocator.ints(router.simulated.replay_ids.size(), "replay ids");
  weights.replay_weights = allocator.ints(router.simulated.replay_weights.size(), "replay weights");
}

void allocate_rest(const RestAllocator& allocator, const CudaPlan& plan,
                   const std::vector<int32_t>& map, CudaWeights& weights) {
  const MoeSpec& spec = plan.spec;
  allocate_router(allocator, spec, weights);
  const bool shared_here = plan.shared || plan.fused.slots() > 0;
  if (shared_here && spec.shared.mode == SharedMode::kSigmoidGate) {
    weights.shared_gate = allocator.dense(WeightRole::kSharedExpertGate, weights.shared_gate_dtype);
  }
  if (spec.shared.mode == SharedMode::kSoftmaxMix) {
    weights.mix_gate = allocator.dense(WeightRole::kMixGate, weights.mix_gate_dtype);
    weights.mix_gate_bias = allocator.floats(true, 2, "mix_gate_bias");
  }
  if (spec.latent.size != 0) {
    weights.latent_down = allocator.dense(WeightRole::kLatentDown, weights.latent_down_dtype);
    weights.latent_norm = allocator.floats(spec.latent.has_norm, spec.latent.size, "latent_norm");
    weights.latent_up = allocator.dense(WeightRole::kLatentUp, weights.latent_up_dtype);
  }
  weights.output_bias = allocator.floats(spec.has_output_bias, spec.hidden_size, "output_bias");
  if (!is_identity(map)) weights.local_expert = allocator.ints(map.size(), "local_expert");
  if (plan.part.has_replicas()) {
    weights.replica_first = allocator.ints(plan.part.replicas().first.size(), "replicas");
    weights.replicas = allocator.ints(plan.part.replicas().physical.size(), "replicas");
  }
}

// Refuses a NaN in the selection bias, which has no order, and ids of a table that are no experts.
void fill_checked_router(const CudaPlan& plan, const WeightSource& source, WeightUpload& upload,
                         CudaWeights& weights) {
  const RouterSpec& router = plan.spec.router;
  if (router.has_selection_bias) {
    const std::vector<float> bias = upload.read_floats(WeightRole::kSelectionBias);
    check_selection_bias(source, bias);
    upload.copy_floats(bias, weights.selection_bias.as<float>());
  }
  if (router.vocab_size > 0) {
    const std::vector<int32_t> table =
        check_hash_table(plan.spec, source, upload.read_matrix(WeightRole::kHashTable));
    upload.copy_ints(table, weights.hash_table.as<int32_t>());
  }
  upload.copy_ints(router.simulated.replay_ids, weights.replay_ids.as<int32_t>());
  upload.copy_floats(router.simulated.replay_weights, weights.replay_weights.as<float>());
}

void fill_rest(const CudaPlan& plan, const WeightSource& source, WeightUpload& upload,
               CudaWeights& weights) {
  const auto dense = [&](const DeviceMemory& memory, WeightRole role, DType dtype) {
    if (memory.empty()) return;
    const WeightInfo info = source.describe(role);
    upload.copy(
        {.role = role, .block = {0, info.rows, 0, info.cols}},
        {.data = memory.as(), .stride_bytes = padded_row(info.cols, dtype) * byte_size(dtype)});
  };
  const auto vector = [&](const DeviceMemory& memory, WeightRole role) {
    if (!memory.empty()) upload.copy_floats(upload.read_floats(role), memory.as<float>());
  };
  dense(weights.gate, WeightRole::kRouter, weights.gate_dtype);
  dense(weights.shared_gate, WeightRole::kSharedExpertGate, weights.shared_gate_dtype);
  dense(weights.mix_gate, WeightRole::kMixGate, weights.mix_gate_dtype);
  dense(weights.latent_down, WeightRole::kLatentDown, weights.latent_down_dtype);
  dense(weights.latent_up, WeightRole::kLatentUp, weights.latent_up_dtype);
  vector(weights.router_bias, WeightRole::kRouterBias);
  vector(weights.router_input_scale, WeightRole::kRouterInputScale);
  vector(weights.expert_scale, WeightRole::kExpertScale);
  vector(weights.global_scale, WeightRole::kGlobalScale);
  vector(weights.latent_norm, WeightRole::kLatentNorm);
  vector(weights.output_bias, WeightRole::kOutputBias);
  // This bias is optional; without it the memory stays cleared.
  if (source.describe(WeightRole::kMixGateBias).count > 0) {
    vector(weights.mix_gate_bias, WeightRole::kMixGateBias);
  }
  fill_checked_router(plan, source, upload, weights);
  if (!weights.local_expert.empty()) {
    upload.copy_ints(local_expert_map(plan), weights.local_expert.as<int32_t>());
  }
  if (plan.part.has_replicas()) {
    upload.copy_ints(plan.part.replicas().first, weights.replica_first.as<int32_t>());
    upload.copy_ints(plan.part.replicas().physical, weights.replicas.as<int32_t>());
  }
}

}  // namespace

Support usable_in_place(const CudaPlan& plan, const WeightSource& source) {
  InPlaceLayout layout;
  return find_layout(routed_source(plan), source, layout);
}

CudaWeights allocate_cuda_weights(const Context& context, const CudaPlan& plan,
                                  const WeightSource& source, Stream stream) {
  check_source_place(source, plan.device.ordinal);
  const Allocator allocator(context, stream);
  CudaWeights weights;
  const auto allocate = [&](const MlpSource& mlp, CudaMlpWeights& part) {
    part = allocate_mlp(allocator, mlp, source);
    allocate_scales(allocator, mlp, part);
  };
  allocate(routed_source(plan), weights.routed);
  if (plan.shared) allocate(shared_source(plan), weights.shared);
  if (plan.residual) allocate(residual_source(plan), weights.residual);
  allocate_rest(RestAllocator(allocator, source), plan, local_expert_map(plan), weights);
  return weights;
}

void fill_cuda_weights(const Context& context, const CudaPlan& plan, const WeightSource& source,
                       Stream stream, CudaWeights& weights) {
  WeightUpload upload(source, to_cuda(stream));
  fill_rest(plan, source, upload, weights);
  fill_mlp(routed_source(plan), source, upload, weights.routed, context);
  if (plan.shared) fill_mlp(shared_source(plan), source, upload, weights.shared, context);
  if (plan.residual) fill_mlp(residual_source(plan), source, upload, weights.residual, context);
  upload.finish();
}

}  // namespace conclave::inline v0
