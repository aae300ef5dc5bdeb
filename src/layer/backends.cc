#include "cpu/backends.h"

#include "experts/catalog.h"
#include "layer/engine.h"

#include "conclave/comm.h"

#include <span>
#include <string>

namespace conclave::inline v0 {
namespace {

// Names kernels that this build leaves out, with what it lacks for them; those with one reason
// together.
std::string left_out_text(std::span<const experts::KernelRow> rows) {
  std::string text;
  std::string last_reason;
  for (const experts::KernelRow& row : rows) {
    const std::string reason = row.supports({}).reason();
    text += reason == last_reason ? ", " : "; " + reason + ": ";
    text += row.name;
    last_reason = reason;
  }
  return text;
}

void ask_transport(BackendInfo& info) {
  for (const TransportInfo& transport : transports()) {
    if (transport.name != info.name) continue;
    info.usable = transport.usable;
    info.reason = transport.reason;
  }
}

}  // namespace

// System files describe every backend; if this build has an engine for one, its driver decides, and
// if there is a transport of its name, that does: a library may be found where no folder of the
// system has it, and one that is there may not do.
std::vector<BackendInfo> backends() {
  std::vector<BackendInfo> infos = cpu::describe_backends("/");
  for (BackendInfo& info : infos) {
    ask_transport(info);
    const EngineRow* const row = find_engine_row(info.name);
    if (row == nullptr) continue;
    const Support support = row->usable(0);
    info.usable = static_cast<bool>(support);
    info.reason = support ? row->describe() : support.reason();
    if (row->left_out != nullptr) info.reason += left_out_text(row->left_out());
  }
  return infos;
}

}  // namespace conclave::inline v0
