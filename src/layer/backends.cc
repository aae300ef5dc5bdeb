#include "cpu/backends.h"

#include "layer/engine.h"

#include <string>

namespace conclave::inline v0 {

// System files describe every backend; if this build has an engine for one, its driver decides.
std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> infos = cpu::describe_backends("/");
  for (BackendInfo& info : infos) {
    const EngineRow* const row = find_engine_row(info.name);
    if (row == nullptr) continue;
    const Support support = row->usable(0);
    info.usable = static_cast<bool>(support);
    info.reason = support ? row->describe() : support.reason();
  }
  return infos;
}

}  // namespace conclave::inline v0
