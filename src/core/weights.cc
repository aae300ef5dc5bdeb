#include "conclave/weights.h"

#include "conclave/error.h"

#include <array>
#include <cstring>
#include <string>

namespace conclave::inline v0 {
namespace {

constexpr std::array kRoleNames = {"gate",
                                   "up",
                                   "down",
                                   "router",
                                   "shared_gate",
                                   "shared_up",
                                   "shared_down",
                                   "shared_expert_gate",
                                   "gate_bias",
                                   "up_bias",
                                   "down_bias",
                                   "shared_gate_bias",
                                   "shared_up_bias",
                                   "shared_down_bias",
                                   "router_bias",
                                   "selection_bias",
                                   "expert_scale",
                                   "global_scale",
                                   "router_input_scale",
                                   "hash_table",
                                   "mix_gate",
                                   "mix_gate_bias",
                                   "latent_down",
                                   "latent_norm",
                                   "latent_up",
                                   "output_bias",
                                   "residual_gate",
                                   "residual_up",
                                   "residual_down"};
static_assert(kRoleNames.size() == kNumWeightRoles);

// One role inside a caller's tensor: `count` matrices, `matrix_stride` elements apart.
struct RoleView {
  const std::byte* data = nullptr;
  WeightInfo info;
  int64_t matrix_stride = 0;
};

const std::byte* offset_by(const void* data, int64_t elements, DType dtype) {
  return static_cast<const std::byte*>(data) + elements * byte_size(dtype);
}

class PointerSource final : public WeightSource {
 public:
  explicit PointerSource(const ExpertWeights& weights) {
    add_experts(weights.gate_up, weights.down);
    add_matrix(WeightRole::kRouter, "router", weights.router);
    add_shared(weights.shared_gate_up, weights.shared_down);
    add_matrix(WeightRole::kSharedExpertGate, "shared_expert_gate", weights.shared_expert_gate);
  }

  WeightInfo describe(WeightRole role) const override { return at(role).info; }

  ConstTensorView view(WeightRole role, int64_t expert) const override {
    const RoleView& matrix = checked_at(role, expert);
    return {.data = offset_by(matrix.data, expert * matrix.matrix_stride, matrix.info.dtype),
            .dtype = matrix.info.dtype,
            .shape = {matrix.info.rows, matrix.info.cols}};
  }

  void read(WeightRole role, int64_t expert, const WeightBlock& block,
            std::span<std::byte> destination) const override {
    const ConstTensorView matrix = view(role, expert);
    const int64_t cols = matrix.shape[1];
    const auto row_bytes =
        static_cast<size_t>((block.col_end - block.col_begin) * byte_size(matrix.dtype));
    for (int64_t row = block.row_begin; row < block.row_end; ++row) {
      const auto index = static_cast<size_t>(row - block.row_begin);
      std::memcpy(destination.data() + index * row_bytes,
                  offset_by(matrix.data, row * cols + block.col_begin, matrix.dtype), row_bytes);
    }
  }

 private:
  const RoleView& at(WeightRole role) const { return roles_[static_cast<size_t>(role)]; }

  const RoleView& checked_at(WeightRole role, int64_t expert) const {
    const RoleView& matrix = at(role);
    if (expert >= 0 && expert < matrix.info.count) return matrix;
    throw Error(ErrorCode::kInvalidArgument, {.what = "no such weight matrix",
                                              .tensor = locate(role, expert),
                                              .found = std::to_string(expert),
                                              .limit = std::to_string(matrix.info.count - 1)});
  }

  static void check(const char* name, const ConstTensorView& tensor, int rank) {
    if (tensor.data == nullptr) {
      throw Error(ErrorCode::kNullPointer, {.what = "null weights", .tensor = name});
    }
    if (tensor.shape.rank() != rank || tensor.row_stride != 0) {
      throw Error(ErrorCode::kShape, {.what = "weights must be dense",
                                      .tensor = name,
                                      .expected = "rank " + std::to_string(rank) + ", row_stride 0",
                                      .found = tensor.shape.to_string() + ", row_stride " +
                                               std::to_string(tensor.row_stride)});
    }
    const auto address = reinterpret_cast<uintptr_t>(tensor.data);
    const auto alignment = static_cast<uintptr_t>(byte_size(tensor.dtype));
    if (alignment == 0 || address % alignment != 0) {
      throw Error(ErrorCode::kMisaligned,
                  {.what = "weights are not aligned to their element",
                   .tensor = name,
                   .expected = "a multiple of " + std::to_string(alignment)});
    }
    static_cast<void>(dense_bytes(tensor.dtype, tensor.shape));
  }

  void set(WeightRole role, const RoleView& view) { roles_[static_cast<size_t>(role)] = view; }

  void add_matrix(WeightRole role, const char* name, const ConstTensorView& tensor) {
    if (tensor.empty()) return;
    check(name, tensor, 2);
    set(role, {static_cast<const std::byte*>(tensor.data),
               {1, tensor.shape[0], tensor.shape[1], tensor.dtype},
               0});
  }

  void add_halves(WeightRole gate, WeightRole up, const void* data, const WeightInfo& half) {
    const int64_t elements = half.rows * half.cols;
    set(gate, {static_cast<const std::byte*>(data), half, 2 * elements});
    set(up, {offset_by(data, elements, half.dtype), half, 2 * elements});
  }

  static void check_pair(const char* name, int64_t gate_up_rows, int64_t gate_up_cols,
                         DType gate_up_dtype, int64_t down_rows, int64_t down_cols,
                         DType down_dtype) {
    if (gate_up_rows != 2 * down_cols || gate_up_cols != down_rows) {
      throw Error(ErrorCode::kShape, {.what = "gate_up and down do not fit each other",
                                      .tensor = name,
                                      .expected = "gate_up [.., 2*I, H] and down [.., H, I]",
                                      .found = Shape{gate_up_rows, gate_up_cols}.to_string() +
                                               " and " + Shape{down_rows, down_cols}.to_string()});
    }
    if (gate_up_dtype != down_dtype) {
      throw Error(ErrorCode::kDType, {.what = "gate_up and down differ in type",
                                      .tensor = name,
                                      .expected = std::string(to_string(gate_up_dtype)),
                                      .found = std::string(to_string(down_dtype))});
    }
  }

  void add_experts(const ConstTensorView& gate_up, const ConstTensorView& down) {
    check("gate_up", gate_up, 3);
    check("down", down, 3);
    if (gate_up.shape[0] != down.shape[0]) {
      throw Error(ErrorCode::kShape, {.what = "gate_up and down hold different numbers of experts",
                                      .tensor = "down",
                                      .expected = std::to_string(gate_up.shape[0]),
                                      .found = std::to_string(down.shape[0])});
    }
    check_pair("down", gate_up.shape[1], gate_up.shape[2], gate_up.dtype, down.shape[1],
               down.shape[2], down.dtype);
    const int64_t experts = down.shape[0];
    const int64_t hidden = down.shape[1];
    const int64_t intermediate = down.shape[2];
    add_halves(WeightRole::kGate, WeightRole::kUp, gate_up.data,
               {experts, intermediate, hidden, gate_up.dtype});
    set(WeightRole::kDown, {static_cast<const std::byte*>(down.data),
                            {experts, hidden, intermediate, down.dtype},
                            hidden * intermediate});
  }

  void add_shared(const ConstTensorView& gate_up, const ConstTensorView& down) {
    if (gate_up.empty() && down.empty()) return;
    check("shared_gate_up", gate_up, 2);
    check("shared_down", down, 2);
    check_pair("shared_down", gate_up.shape[0], gate_up.shape[1], gate_up.dtype, down.shape[0],
               down.shape[1], down.dtype);
    add_halves(WeightRole::kSharedGate, WeightRole::kSharedUp, gate_up.data,
               {1, down.shape[1], down.shape[0], gate_up.dtype});
    add_matrix(WeightRole::kSharedDown, "shared_down", down);
  }

  std::array<RoleView, kRoleNames.size()> roles_;
};

}  // namespace

std::string_view to_string(WeightRole role) noexcept {
  const auto index = static_cast<size_t>(role);
  return index < kRoleNames.size() ? kRoleNames[index] : "unknown";
}

ConstTensorView WeightSource::view(WeightRole, int64_t) const { return {}; }

std::string WeightSource::locate(WeightRole role, int64_t expert) const {
  return std::string(to_string(role)) + " of expert " + std::to_string(expert);
}

std::unique_ptr<WeightSource> make_pointer_source(const ExpertWeights& weights) {
  return std::make_unique<PointerSource>(weights);
}

}  // namespace conclave::inline v0
