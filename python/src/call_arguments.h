// The arguments of a forward call from Python, each listed once: the module's signature, the views
// that a call makes, and what Python is told of them are made from this table.
#pragma once

#include "conclave/layer.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace conclave::python {

// A call treats an argument in one of these ways.
enum class ArgumentUse : uint8_t {
  kRead,     // an array that is viewed by the member `read`
  kWritten,  // an array that is viewed by the member `written`
  kFlags,    // an array that is viewed by `read`, a vector or a matrix
  kAdapter,  // an array that is viewed by `read`, or an integer for all tokens
  kNumber,   // an integer
  kCount,    // a number, or an array of one element on the layer's device
  kCounts,   // a number for each rank, in a list or in an array of host memory
  kScratch,  // an array of bytes that the call may overwrite
};

// Whether a caller of the module has to name an argument; it may be None all the same.
enum class ArgumentNeed : uint8_t { kOptional, kNamed };

struct CallArgument {
  const char* name;
  const char* shape;                  // as errors spell it
  std::span<const DType> types = {};  // that the library takes; empty: any
  ArgumentUse use = ArgumentUse::kRead;
  ArgumentNeed need = ArgumentNeed::kOptional;
  ConstTensorView ForwardArgs::*read = nullptr;
  TensorView ForwardArgs::*written = nullptr;
  int64_t ForwardArgs::*number = nullptr;

  constexpr bool is_vector() const {
    return std::string_view(shape).find(',') == std::string_view::npos;
  }
};

inline constexpr std::array kRowTypes = {DType::kF32, DType::kF16, DType::kBF16};
inline constexpr std::array kIdTypes = {DType::kI32, DType::kI64};
inline constexpr std::array kMaskTypes = {DType::kBool};
inline constexpr std::array kCountTypes = {DType::kI64};
inline constexpr std::array kCapturedTypes = {DType::kF32};
inline constexpr std::array kCapturedIdTypes = {DType::kI32};

// In the order of the module's signature.
inline constexpr std::array kCallArguments = {
    CallArgument{.name = "hidden",
                 .shape = "[T, hidden_size]",
                 .types = kRowTypes,
                 .need = ArgumentNeed::kNamed,
                 .read = &ForwardArgs::hidden},
    CallArgument{.name = "out",
                 .shape = "[T, hidden_size]",
                 .types = kRowTypes,
                 .use = ArgumentUse::kWritten,
                 .need = ArgumentNeed::kNamed,
                 .written = &ForwardArgs::out},
    CallArgument{.name = "router_logits",
                 .shape = "[T, num_experts]",
                 .types = kRowTypes,
                 .read = &ForwardArgs::router_logits},
    CallArgument{.name = "topk_ids",
                 .shape = "[T, top_k]",
                 .types = kIdTypes,
                 .read = &ForwardArgs::topk_ids},
    CallArgument{.name = "topk_weights",
                 .shape = "[T, top_k]",
                 .types = kRowTypes,
                 .read = &ForwardArgs::topk_weights},
    CallArgument{.name = "router_input",
                 .shape = "[T, hidden_size]",
                 .types = kRowTypes,
                 .read = &ForwardArgs::router_input},
    CallArgument{.name = "residual_input",
                 .shape = "[T, hidden_size]",
                 .types = kRowTypes,
                 .read = &ForwardArgs::residual_input},
    CallArgument{
        .name = "token_ids", .shape = "[T]", .types = kIdTypes, .read = &ForwardArgs::token_ids},
    CallArgument{.name = "padding_mask",
                 .shape = "[T]",
                 .types = kMaskTypes,
                 .read = &ForwardArgs::padding_mask},
    CallArgument{.name = "adapter_ids",
                 .shape = "[T]",
                 .types = kIdTypes,
                 .use = ArgumentUse::kAdapter,
                 .read = &ForwardArgs::adapter_ids},
    CallArgument{
        .name = "num_tokens", .shape = "[1]", .types = kCountTypes, .use = ArgumentUse::kCount},
    CallArgument{.name = "top_k",
                 .shape = "an integer",
                 .use = ArgumentUse::kNumber,
                 .number = &ForwardArgs::top_k},
    CallArgument{.name = "banned_experts",
                 .shape = "[T, num_experts]",
                 .types = kMaskTypes,
                 .use = ArgumentUse::kFlags,
                 .read = &ForwardArgs::banned_experts},
    CallArgument{.name = "expert_budget",
                 .shape = "an integer",
                 .use = ArgumentUse::kNumber,
                 .number = &ForwardArgs::expert_budget},
    CallArgument{.name = "rank_tokens", .shape = "[ranks]", .use = ArgumentUse::kCounts},
    CallArgument{.name = "shared_out",
                 .shape = "[T, hidden_size]",
                 .types = kRowTypes,
                 .use = ArgumentUse::kWritten,
                 .written = &ForwardArgs::shared_out},
    CallArgument{.name = "captured_logits",
                 .shape = "[T, num_experts]",
                 .types = kCapturedTypes,
                 .use = ArgumentUse::kWritten,
                 .written = &ForwardArgs::captured_logits},
    CallArgument{.name = "captured_ids",
                 .shape = "[T, top_k]",
                 .types = kCapturedIdTypes,
                 .use = ArgumentUse::kWritten,
                 .written = &ForwardArgs::captured_ids},
    CallArgument{.name = "captured_weights",
                 .shape = "[T, top_k]",
                 .types = kCapturedTypes,
                 .use = ArgumentUse::kWritten,
                 .written = &ForwardArgs::captured_weights},
    CallArgument{.name = "workspace", .shape = "[bytes]", .use = ArgumentUse::kScratch},
};

}  // namespace conclave::python
