// Names that every family accepts after its own: models are saved again by other tools, and
// quantised or converted exports use the names of some other family.
#pragma once

#include "checkpoint/architecture.h"

namespace conclave::inline v0::checkpoint {

std::span<const ExpertForm> generic_forms();
std::span<const NamePattern> generic_once();
// Names of tensors that only one router reads, as the rows of routers say.
std::span<const NamePattern> router_tensor_names();

// Calls take(form) for the family's own forms, then the generic ones.
template <class Take>
void for_each_form(const Architecture& architecture, Take take) {
  for (const ExpertForm& form : architecture.expert_forms) take(form);
  for (const ExpertForm& form : generic_forms()) take(form);
}
template <class Take>
void for_each_once(const Architecture& architecture, Take take) {
  for (const NamePattern& pattern : architecture.once) take(pattern);
  for (const NamePattern& pattern : generic_once()) take(pattern);
  for (const NamePattern& pattern : router_tensor_names()) take(pattern);
}

}  // namespace conclave::inline v0::checkpoint
