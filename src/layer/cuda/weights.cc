#include "layer/cuda/weights.h"

#include "core/checked.h"
#include "core/layer_roles.h"
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

// Kernels may read, never use, this many rows beyond the last expert.
constexpr int64_t kSlackRows = 64;
// Gate and up rows are interleaved in groups of 8 by the tensor map: a partial group at the very
// end would reach beyond memory that is not ours.
constexpr int64_t kRowGroup = 8;

// Experts of one kind: what they are called, and which of them and which columns are here.
struct MlpSource {
  const experts::DeviceExpertsProblem& problem;
  const MlpRoles& roles;
  std::span<const int32_t> experts;  // source expert of each local one
  TensorSlice inner;
  bool adds_down_bias = true;

  int64_t halves() const { return problem.activation.gated ? 2 : 1; }
  int64_t gate_up_rows() const { return halves() * problem.intermediate_size; }
};

MlpSource routed_source(const CudaPlan& plan) {
  return {.problem = plan.routed,
          .roles = kRoutedRoles,
          .experts = plan.part.local_experts,
          .inner = plan.part.inner,
          .adds_down_bias = plan.part.adds_down_bias};
}

MlpSource shared_source(const CudaPlan& plan) {
  static constexpr int32_t kOnly = 0;
  return {.problem = *plan.shared,
          .roles = kSharedRoles,
          .experts = {&kOnly, 1},
          .inner = plan.part.shared_inner,
          .adds_down_bias = plan.part.adds_down_bias};
}

// Where each matrix must lie for the whole to be one tensor.
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
  const experts::DeviceExpertsProblem& problem = mlp.problem;
  if (mlp.inner.size() != source.describe(mlp.roles.down).cols) {
    return Support::no("only a slice of the columns is used");
  }
  if (problem.intermediate_size % kRowGroup != 0) {
    return Support::no("the intermediate size is no multiple of 8");
  }
  const int64_t element = byte_size(problem.weight_dtype);
  const WeightRole first_role = problem.activation.gated ? mlp.roles.gate : mlp.roles.up;
  const ConstTensorView first = source.view(first_role, mlp.experts.front());
  const ConstTensorView down = source.view(mlp.roles.down, mlp.experts.front());
  if (first.empty() || down.empty()) return Support::no("a matrix has no view");
  layout = {.gate_up = static_cast<const std::byte*>(first.data),
            .gate_up_stride = stride_of(first),
            .down = static_cast<const std::byte*>(down.data),
            .down_stride = stride_of(down)};
  const auto is_aligned = [&](const std::byte* data, int64_t stride) {
    return reinterpret_cast<uintptr_t>(data) % kRowAlignmentBytes == 0 &&
           stride * element % kRowAlignmentBytes == 0;
  };
  if (!is_aligned(layout.gate_up, layout.gate_up_stride) ||
      !is_aligned(layout.down, layout.down_stride)) {
    return Support::no("rows do not begin at multiples of 16 bytes");
  }
  const int64_t half_bytes = problem.intermediate_size * layout.gate_up_stride * element;
  const int64_t down_bytes = problem.hidden_size * layout.down_stride * element;
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    const std::byte* const place = layout.gate_up + index * mlp.halves() * half_bytes;
    const bool good =
        lies_at(source.view(first_role, mlp.experts[i]), place, layout.gate_up_stride) &&
        lies_at(source.view(mlp.roles.up, mlp.experts[i]), place + (mlp.halves() - 1) * half_bytes,
                layout.gate_up_stride) &&
        lies_at(source.view(mlp.roles.down, mlp.experts[i]), layout.down + index * down_bytes,
                layout.down_stride);
    if (!good) return Support::no("gate, up and experts do not follow each other");
  }
  return Support::yes();
}

// A kernel that read a host pointer would take the whole device context down with it.
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

  // Cleared: what kernels read beyond matrices is then a number.
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
  const experts::DeviceExpertsProblem& problem = mlp.problem;
  const auto count = static_cast<int64_t>(mlp.experts.size());
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
    const int64_t element = byte_size(dtype);
    weights.gate_up = allocator.make(
        (count * mlp.gate_up_rows() + kSlackRows) * gate_up_stride * element, "gate_up");
    weights.down =
        allocator.make((count * problem.hidden_size + kSlackRows) * down_stride * element, "down");
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

// Of one matrix [rows, cols].
int64_t scale_count(const QuantSpec& quant, int64_t rows, int64_t cols) {
  if (quant.weights != WeightScale::kBlock) return rows;
  return ceil_div(rows, quant.block_rows) * ceil_div(cols, quant.block_cols);
}

void allocate_scales(const Allocator& allocator, const MlpSource& mlp, CudaMlpWeights& weights) {
  const experts::DeviceExpertsProblem& problem = mlp.problem;
  if (problem.weight_dtype != DType::kF8E4M3) return;
  const auto count = static_cast<int64_t>(mlp.experts.size());
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
  const experts::DeviceExpertsProblem& problem = mlp.problem;
  const int64_t element = byte_size(problem.weight_dtype);
  const int64_t hidden = problem.hidden_size;
  const int64_t inner = problem.intermediate_size;
  const int64_t gate_up_pitch = weights.view.gate_up_stride * element;
  const int64_t down_pitch = weights.view.down_stride * element;
  const WeightBlock rows{mlp.inner.begin, mlp.inner.end, 0, hidden};
  const WeightBlock columns{0, hidden, mlp.inner.begin, mlp.inner.end};
  const auto count = static_cast<int64_t>(mlp.experts.size());
  const int64_t expert_bytes = (mlp.gate_up_rows() * hidden + hidden * inner) * element;
  for (int64_t local = 0; local < count; ++local) {
    const int32_t expert = mlp.experts[static_cast<size_t>(local)];
    std::byte* const gate_up = weights.gate_up.as() + local * mlp.gate_up_rows() * gate_up_pitch;
    std::byte* const up = gate_up + (mlp.halves() - 1) * inner * gate_up_pitch;
    if (problem.activation.gated) {
      upload.copy({.role = mlp.roles.gate, .expert = expert, .block = rows},
                  {.data = gate_up, .stride_bytes = gate_up_pitch});
    }
    upload.copy({.role = mlp.roles.up, .expert = expert, .block = rows},
                {.data = up, .stride_bytes = gate_up_pitch});
    upload.copy(
        {.role = mlp.roles.down, .expert = expert, .block = columns},
        {.data = weights.down.as() + local * hidden * down_pitch, .stride_bytes = down_pitch});
    context.progress("uploading experts", (local + 1) * expert_bytes, count * expert_bytes);
  }
}

void fill_biases(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights) {
  const experts::DeviceExpertsProblem& problem = mlp.problem;
  if (!problem.has_bias) return;
  const int64_t inner = problem.intermediate_size;
  const WeightBlock slice{0, 1, mlp.inner.begin, mlp.inner.end};
  for (size_t i = 0; i < mlp.experts.size(); ++i) {
    const int32_t expert = mlp.experts[i];
    float* const gate_up =
        weights.gate_up_bias.as<float>() + static_cast<int64_t>(i) * mlp.gate_up_rows();
    if (problem.activation.gated) {
      upload.copy_floats(
          upload.read_floats({.role = mlp.roles.gate_bias, .expert = expert, .block = slice}),
          gate_up);
    }
    upload.copy_floats(
        upload.read_floats({.role = mlp.roles.up_bias, .expert = expert, .block = slice}),
        gate_up + (mlp.halves() - 1) * inner);
    if (!mlp.adds_down_bias) continue;
    upload.copy_floats(
        upload.read_floats(mlp.roles.down_bias, expert),
        weights.down_bias.as<float>() + static_cast<int64_t>(i) * problem.hidden_size);
  }
}

// Scales of e4m3 matrices as kernels read them: of blocks as stored, else one a row.
class ScaleReader {
 public:
  // `source` in host memory.
  ScaleReader(const MlpSource& mlp, const WeightSource& source) : mlp_(mlp), source_(source) {}

  // Of the rows and columns of a matrix that this rank holds.
  std::vector<float> read(WeightRole matrix, int32_t expert, const WeightBlock& block) const {
    const QuantSpec& quant = mlp_.problem.quant;
    const WeightRole role = quant_roles(matrix).scale;
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

  StaticScales read_static() const { return load_static_scales(source_, mlp_.roles); }

 private:
  std::vector<float> load(WeightRole role, int32_t expert, const WeightBlock& block) const {
    return load_scales(source_, role, expert, block);
  }

  const MlpSource& mlp_;
  const WeightSource& source_;
};

void fill_scales(const MlpSource& mlp, WeightUpload& upload, CudaMlpWeights& weights) {
  if (mlp.problem.weight_dtype != DType::kF8E4M3) return;
  const ScaleReader reader(mlp, upload.on_host());
  const int64_t hidden = mlp.problem.hidden_size;
  const WeightBlock rows{mlp.inner.begin, mlp.inner.end, 0, hidden};
  const WeightBlock columns{0, hidden, mlp.inner.begin, mlp.inner.end};
  float* gate_up = weights.gate_up_scale.as<float>();
  float* down = weights.down_scale.as<float>();
  const auto append = [&](const std::vector<float>& scales, float*& place) {
    upload.copy_floats(scales, place);
    place += scales.size();
  };
  for (const int32_t expert : mlp.experts) {
    if (mlp.problem.activation.gated) append(reader.read(mlp.roles.gate, expert, rows), gate_up);
    append(reader.read(mlp.roles.up, expert, rows), gate_up);
    append(reader.read(mlp.roles.down, expert, columns), down);
  }
  if (mlp.problem.quant.activations == ActivationScale::kTensorStatic) {
    const StaticScales steps = reader.read_static();
    upload.copy_floats({steps.input, steps.intermediate}, weights.static_scales.as<float>());
  }
}

void fill_mlp(const MlpSource& mlp, const WeightSource& source, WeightUpload& upload,
              CudaMlpWeights& weights, const Context& context) {
  if (weights.in_place) {
    // Nothing is copied into memory that is not ours: a reload must bring the same tensors.
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

bool is_identity(const CudaPlan& plan) {
  const std::vector<int32_t>& local = plan.part.local_experts;
  if (static_cast<int64_t>(local.size()) != plan.spec.num_experts) return false;
  for (size_t i = 0; i < local.size(); ++i) {
    if (local[i] != static_cast<int32_t>(i)) return false;
  }
  return true;
}

// Local expert of each logical one; -1 where it is not here.
std::vector<int32_t> local_expert_map(const CudaPlan& plan) {
  std::vector<int32_t> map(static_cast<size_t>(plan.spec.num_experts), -1);
  for (size_t i = 0; i < plan.part.local_experts.size(); ++i) {
    map[static_cast<size_t>(plan.part.local_experts[i])] = static_cast<int32_t>(i);
  }
  return map;
}

void allocate_rest(const Allocator& allocator, const CudaPlan& plan, const WeightSource& source,
                   CudaWeights& weights) {
  const MoeSpec& spec = plan.spec;
  const int64_t hidden = spec.hidden_size;
  const auto dense = [&](WeightRole role, int64_t rows, DType& dtype) {
    dtype = source.describe(role).dtype;
    return allocator.make(rows * padded_row(hidden, dtype) * byte_size(dtype), "gate");
  };
  if (spec.has_gate) {
    weights.gate = dense(WeightRole::kRouter, num_logits(spec), weights.gate_dtype);
    if (spec.router.has_logit_bias) {
      weights.router_bias = allocator.floats(num_logits(spec), "router_bias");
    }
    if (spec.router.input_norm.enabled) {
      weights.router_input_scale = allocator.floats(hidden, "router_input_scale");
    }
  }
  if (spec.router.has_selection_bias) {
    weights.selection_bias =
        allocator.floats(spec.num_experts + spec.num_zero_experts, "selection_bias");
  }
  if (spec.router.has_expert_scale) {
    weights.expert_scale = allocator.floats(spec.num_experts, "expert_scale");
  }
  if (spec.router.has_global_scale) weights.global_scale = allocator.floats(1, "global_scale");
  if (plan.shared && spec.shared.mode == SharedMode::kSigmoidGate) {
    weights.shared_gate = dense(WeightRole::kSharedExpertGate, 1, weights.shared_gate_dtype);
  }
  if (spec.has_output_bias) weights.output_bias = allocator.floats(hidden, "output_bias");
  if (!is_identity(plan)) {
    weights.local_expert =
        allocator.make(spec.num_experts * int64_t{sizeof(int32_t)}, "local_expert");
  }
  if (plan.shared) {
    weights.zero_ids =
        allocator.make(plan.options.max_tokens * int64_t{sizeof(int32_t)}, "shared ids");
  }
}

void fill_rest(const CudaPlan& plan, const WeightSource& source, WeightUpload& upload,
               CudaWeights& weights, cudaStream_t stream) {
  const MoeSpec& spec = plan.spec;
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
  vector(weights.router_bias, WeightRole::kRouterBias);
  vector(weights.router_input_scale, WeightRole::kRouterInputScale);
  vector(weights.expert_scale, WeightRole::kExpertScale);
  vector(weights.global_scale, WeightRole::kGlobalScale);
  vector(weights.output_bias, WeightRole::kOutputBias);
  if (spec.router.has_selection_bias) {
    const std::vector<float> bias = upload.read_floats(WeightRole::kSelectionBias);
    check_selection_bias(source, bias);
    upload.copy_floats(bias, weights.selection_bias.as<float>());
  }
  if (!weights.local_expert.empty()) {
    const std::vector<int32_t> map = local_expert_map(plan);
    cuda::check(cudaMemcpyAsync(weights.local_expert.as(), map.data(), map.size() * sizeof(int32_t),
                                cudaMemcpyHostToDevice, stream),
                "cudaMemcpyAsync");
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
  weights.routed = allocate_mlp(allocator, routed_source(plan), source);
  allocate_scales(allocator, routed_source(plan), weights.routed);
  if (plan.shared) {
    weights.shared = allocate_mlp(allocator, shared_source(plan), source);
    allocate_scales(allocator, shared_source(plan), weights.shared);
  }
  allocate_rest(allocator, plan, source, weights);
  return weights;
}

void fill_cuda_weights(const Context& context, const CudaPlan& plan, const WeightSource& source,
                       Stream stream, CudaWeights& weights) {
  WeightUpload upload(source, to_cuda(stream));
  fill_rest(plan, source, upload, weights, to_cuda(stream));
  fill_mlp(routed_source(plan), source, upload, weights.routed, context);
  if (plan.shared) fill_mlp(shared_source(plan), source, upload, weights.shared, context);
  upload.finish();
}

}  // namespace conclave::inline v0
