// A random experts problem, its float64 answer, and a way to run any kernel row on it.
#pragma once

#include "core/float_convert.h"
#include "cpu/isa.h"
#include "experts/catalog.h"
#include "experts/emulated_row.h"
#include "experts/kernel.h"
#include "experts/quantize_rows.h"
#include "support/activations.h"
#include "support/executors.h"
#include "support/tolerance.h"

#include "conclave/context.h"
#include "conclave/tensor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace conclave::testing {

struct CaseShape {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  DType weights = DType::kBF16;
  std::vector<int64_t> rows_per_expert;
  uint64_t seed = 1;
  ActivationSpec activation = {};
  bool has_bias = false;
  int64_t distinct_experts = 0;  // expert e has the weights of e % distinct_experts; 0: its own
};

inline std::string describe(const CaseShape& shape) {
  std::string text = std::string(to_string(shape.weights)) +
                     " H=" + std::to_string(shape.hidden_size) +
                     " I=" + std::to_string(shape.intermediate_size) + " rows=";
  for (const int64_t rows : shape.rows_per_expert) text += std::to_string(rows) + ",";
  text += " " + shape.activation.name + (shape.has_bias ? " with biases" : "");
  return text + " seed=" + std::to_string(shape.seed);
}

// A [rows, cols] matrix stored in `dtype`; values normal with the given deviation.
class StoredMatrix {
 public:
  StoredMatrix(int64_t rows, int64_t cols, DType dtype, double deviation, std::mt19937_64& random)
      : rows_(rows), cols_(cols), dtype_(dtype) {
    std::normal_distribution<double> normal(0.0, deviation);
    bytes_.resize(static_cast<size_t>(rows * cols * byte_size(dtype)));
    for (int64_t i = 0; i < rows * cols; ++i) set(i, static_cast<float>(normal(random)));
  }

  void set(int64_t index, float value) {
    if (dtype_ == DType::kF32) {
      std::memcpy(element(index), &value, sizeof(value));
    } else {
      const uint16_t bits = dtype_ == DType::kBF16 ? float_to_bf16(value) : float_to_f16(value);
      std::memcpy(element(index), &bits, sizeof(bits));
    }
  }
  double at(int64_t index) const {
    if (dtype_ == DType::kF32) {
      float value;
      std::memcpy(&value, element(index), sizeof(value));
      return value;
    }
    uint16_t bits;
    std::memcpy(&bits, element(index), sizeof(bits));
    return dtype_ == DType::kBF16 ? bf16_to_float(bits) : f16_to_float(bits);
  }
  ConstTensorView view() const { return {bytes_.data(), dtype_, Shape{rows_, cols_}, 0}; }
  int64_t cols() const { return cols_; }

 private:
  std::byte* element(int64_t index) { return bytes_.data() + index * byte_size(dtype_); }
  const std::byte* element(int64_t index) const {
    return bytes_.data() + index * byte_size(dtype_);
  }

  int64_t rows_;
  int64_t cols_;
  DType dtype_;
  std::vector<std::byte> bytes_;
};

struct StoredExpert {
  StoredMatrix gate;
  StoredMatrix up;
  StoredMatrix down;
  StoredMatrix gate_bias;
  StoredMatrix up_bias;
  StoredMatrix down_bias;
};

// 64-byte aligned bytes, filled with a pattern that is a NaN in every float type.
class AlignedBytes {
 public:
  explicit AlignedBytes(size_t bytes)
      : data_(static_cast<std::byte*>(::operator new(std::max<size_t>(bytes, 1), kAlign))),
        bytes_(bytes) {
    std::memset(data_.get(), 0xff, bytes);
  }
  std::byte* data() const { return data_.get(); }
  std::span<std::byte> span() const { return {data_.get(), bytes_}; }

 private:
  static constexpr std::align_val_t kAlign{64};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlign); }
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t bytes_;
};

class ExpertCase {
 public:
  explicit ExpertCase(CaseShape shape) : shape_(std::move(shape)) {
    std::mt19937_64 random(shape_.seed);
    const int64_t h = shape_.hidden_size;
    const int64_t i = shape_.intermediate_size;
    const DType dtype = shape_.weights;
    const double into = 1.0 / std::sqrt(double(h));
    const double out_of = 1.0 / std::sqrt(std::max(1.0, double(i)));
    const auto num_experts = static_cast<int64_t>(shape_.rows_per_expert.size());
    const int64_t distinct = shape_.distinct_experts != 0 ? shape_.distinct_experts : num_experts;
    for (int64_t e = 0; e < distinct; ++e) {
      experts_.push_back(
          {StoredMatrix(i, h, dtype, into, random), StoredMatrix(i, h, dtype, into, random),
           StoredMatrix(h, i, dtype, out_of, random), StoredMatrix(1, i, dtype, 0.5, random),
           StoredMatrix(1, i, dtype, 0.5, random), StoredMatrix(1, h, dtype, 0.5, random)});
    }
    const int64_t most =
        *std::max_element(shape_.rows_per_expert.begin(), shape_.rows_per_expert.end());
    num_tokens_ = most + 3;
    std::normal_distribution<float> normal(0.0F, 1.0F);
    hidden_.resize(static_cast<size_t>(num_tokens_ * h));
    for (float& value : hidden_) value = bf16_to_float(float_to_bf16(normal(random)));
    // Each expert takes other tokens, in an order that is not ascending.
    for (const int64_t rows : shape_.rows_per_expert) {
      begin_.push_back(static_cast<int64_t>(source_row_.size()));
      const int64_t first = static_cast<int64_t>(random() % static_cast<uint64_t>(num_tokens_));
      for (int64_t r = 0; r < rows; ++r) {
        source_row_.push_back((first + (rows - r) * 1) % num_tokens_);
      }
    }
  }

  const CaseShape& shape() const { return shape_; }
  // Keeps weights and rows but changes the activation, with or without biases.
  void set_activation(const ActivationSpec& activation, bool has_bias) {
    shape_.activation = activation;
    shape_.has_bias = has_bias;
  }
  activation::Activation activation() const {
    return activation::parse_activation(shape_.activation);
  }
  int64_t num_experts() const { return static_cast<int64_t>(shape_.rows_per_expert.size()); }
  const StoredExpert& expert(int64_t e) const {
    return experts_[static_cast<size_t>(e) % experts_.size()];
  }
  experts::ExpertMatrices matrices(int64_t e) const {
    const StoredExpert& stored = expert(e);
    const bool gated = activation().gated;
    experts::ExpertMatrices matrices{
        .gate = {.weights = gated ? stored.gate.view() : ConstTensorView{}},
        .up = {.weights = stored.up.view()},
        .down = {.weights = stored.down.view()}};
    if (!shape_.has_bias) return matrices;
    if (gated) matrices.gate.bias = stored.gate_bias.view();
    matrices.up.bias = stored.up_bias.view();
    matrices.down.bias = stored.down_bias.view();
    return matrices;
  }
  int64_t num_slots() const { return static_cast<int64_t>(source_row_.size()); }
  std::vector<StoredExpert>& experts() { return experts_; }
  std::vector<float>& hidden() { return hidden_; }
  const std::vector<int64_t>& source_row() const { return source_row_; }
  int64_t expert_of_slot(int64_t slot) const {
    size_t e = begin_.size();
    while (begin_[e - 1] > slot || shape_.rows_per_expert[e - 1] == 0) --e;
    return static_cast<int64_t>(e) - 1;
  }

  experts::ExpertsProblem problem(cpu::Isa isa, cpu::Arithmetic arithmetic) const {
    return {.num_local_experts = num_experts(),
            .hidden_size = shape_.hidden_size,
            .intermediate_size = shape_.intermediate_size,
            .weight_dtype = shape_.weights,
            .activation = activation(),
            .has_bias = shape_.has_bias,
            .target = experts::CpuTarget{.isa = isa, .arithmetic = arithmetic}};
  }
  experts::ExpertsProblem problem(cpu::Isa isa, const experts::HostKernelRow& row) const {
    return problem(isa, cpu::parse_arithmetic(row.arithmetic));
  }

  // The float64 output row of a slot.
  std::vector<double> oracle(int64_t slot) const {
    const int64_t h = shape_.hidden_size;
    const int64_t inner = shape_.intermediate_size;
    const StoredExpert& stored = expert(expert_of_slot(slot));
    const activation::Activation formula = activation();
    const double bias = shape_.has_bias ? 1.0 : 0.0;
    const float* x = hidden_.data() + source_row_[static_cast<size_t>(slot)] * h;
    std::vector<double> activated(static_cast<size_t>(inner));
    for (int64_t i = 0; i < inner; ++i) {
      double gate = bias * stored.gate_bias.at(i);
      double up = bias * stored.up_bias.at(i);
      for (int64_t k = 0; k < h; ++k) {
        if (formula.gated) gate += double(x[k]) * stored.gate.at(i * h + k);
        up += double(x[k]) * stored.up.at(i * h + k);
      }
      activated[static_cast<size_t>(i)] = activation::apply_reference(formula, gate, up);
    }
    std::vector<double> out(static_cast<size_t>(h));
    for (int64_t c = 0; c < h; ++c) {
      double sum = bias * stored.down_bias.at(c);
      for (int64_t i = 0; i < inner; ++i) {
        sum += activated[static_cast<size_t>(i)] * stored.down.at(c * inner + i);
      }
      out[static_cast<size_t>(c)] = sum;
    }
    return out;
  }

  // Returns [num_slots, H], dense. Workspace and output start as NaN patterns.
  std::vector<float> run(const experts::ExpertsKernel& kernel, Executor& executor) const {
    const experts::SlabBytes bytes = kernel.slab_bytes();
    AlignedBytes gate_up(bytes.gate_up * static_cast<size_t>(num_experts()));
    AlignedBytes down(bytes.down * static_cast<size_t>(num_experts()));
    for (int64_t e = 0; e < num_experts(); ++e) {
      kernel.pack(matrices(e), gate_up.data() + static_cast<size_t>(e) * bytes.gate_up,
                  down.data() + static_cast<size_t>(e) * bytes.down);
    }
    const experts::BatchRequirements needs = kernel.requirements();
    AlignedBytes rows(static_cast<size_t>(num_tokens_ * needs.row_bytes));
    const ConstTensorView hidden{hidden_.data(), DType::kF32,
                                 Shape{num_tokens_, shape_.hidden_size}, 0};
    const RowBundle bundle =
        experts::quantize_rows(hidden, needs.row_dtype, needs.row_bytes, rows.data(), executor);
    AlignedBytes workspace(kernel.workspace_bytes(num_slots(), executor.concurrency()));
    std::vector<float> out(static_cast<size_t>(num_slots() * shape_.hidden_size), NAN);
    kernel.run({.bundle = bundle,
                .num_local_experts = num_experts(),
                .num_slots = num_slots(),
                .expert_begin = begin_.data(),
                .expert_count = shape_.rows_per_expert.data(),
                .source_row = source_row_.data()},
               {.gate_up = gate_up.data(), .down = down.data()},
               {.rows = out.data(), .row_stride = shape_.hidden_size}, workspace.span(), executor);
    return out;
  }

 private:
  CaseShape shape_;
  std::vector<StoredExpert> experts_;
  int64_t num_tokens_ = 0;
  std::vector<float> hidden_;
  std::vector<int64_t> begin_;
  std::vector<int64_t> source_row_;
};

// A kernel row that this CPU can run on the case, with the isa and arithmetic to ask for.
struct UsableRow {
  const experts::HostKernelRow* row;
  std::unique_ptr<experts::ExpertsKernel> kernel;
};

// Says on stdout, once, that a row was not tested and why.
inline void report_untested(std::string_view row, const std::string& reason) {
  static std::set<std::string, std::less<>> reported;
  if (reported.emplace(row).second) std::cout << "not run here: " << row << " (" << reason << ")\n";
}

// Every row of the catalog that takes the case's weights and that this CPU offers, and the row of
// tiles over emulation.
inline std::vector<UsableRow> usable_rows(const ExpertCase& test_case) {
  std::vector<UsableRow> usable;
  const cpu::Isa best = cpu::best_isa();
  static const auto catalog = experts::host_kernels();
  for (const experts::HostKernelRow& row : catalog.rows()) {
    const auto problem = test_case.problem(best, row);
    const Support here = row.supports(problem);
    if (here) {
      usable.push_back({&row, row.make(problem)});
    } else if (row.supports(test_case.problem(cpu::Isa::kAmx, row))) {
      report_untested(row.name, here.reason());
    }
  }
  const auto tiles = test_case.problem(best, cpu::Arithmetic::kAmxBf16);
  if (emulated_amx_row().supports(tiles)) {
    // It goes in front, because the reference stays last.
    usable.insert(usable.begin(), {&emulated_amx_row(), emulated_amx_row().make(tiles)});
  }
  return usable;
}

inline MlpPrecision precision(const CaseShape& shape, const experts::ExpertsKernel& kernel) {
  return {.hidden_size = shape.hidden_size,
          .intermediate_size = shape.intermediate_size,
          .accumulator = DType::kF32,
          .rows = kernel.requirements().row_dtype,
          .activation_ulp = activation_ulp(activation::parse_activation(shape.activation).id)};
}

}  // namespace conclave::testing
