// Matches the names of a family against a name in a file.
#pragma once

#include "checkpoint/architecture.h"

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

namespace conclave::inline v0::checkpoint {

// A tensor name after "layers.N." that a pattern knows.
struct NameMatch {
  const NamePattern* pattern = nullptr;
  const ExpertForm* form = nullptr;  // null for parts that exist once
  int32_t base = 0;                  // index into Architecture::bases
  int64_t expert = 0;
};

// The first pattern that fits and that `wanted` accepts, since one name may have two meanings.
std::optional<NameMatch> match_name(const Architecture& architecture, std::string_view rest,
                                    const std::function<bool(const NamePattern&)>& wanted);

// The name with both placeholders filled in.
std::string render_name(const NamePattern& pattern, std::string_view base, int64_t expert);

// Whether `rest` starts like an expert tensor of the family, whatever its ending.
bool looks_like_expert(const Architecture& architecture, std::string_view rest);
// Whether `rest` is the router of a MoE layer.
bool is_router(const Architecture& architecture, std::string_view rest);
// Whether `rest` lies in a part of the layer in which every name must be known.
bool in_moe_block(const Architecture& architecture, std::string_view rest);

}  // namespace conclave::inline v0::checkpoint
