#include "comm/mpi/mpi_runtime.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <string_view>
#include <thread>
#include <unistd.h>
#include <utility>

namespace conclave::inline v0::comm {
namespace {

std::string_view level_name(int level) {
  switch (level) {
    case MPI_THREAD_SINGLE:
      return "MPI_THREAD_SINGLE";
    case MPI_THREAD_FUNNELED:
      return "MPI_THREAD_FUNNELED";
    case MPI_THREAD_SERIALIZED:
      return "MPI_THREAD_SERIALIZED";
    default:
      return "MPI_THREAD_MULTIPLE";
  }
}

bool is_initialized() {
  int flag = 0;
  MPI_Initialized(&flag);
  return flag != 0;
}

bool is_finalized() {
  int flag = 0;
  MPI_Finalized(&flag);
  return flag != 0;
}

int sweep_at_finalize(MPI_Comm, int, void* runtime, void*) {
  static_cast<MpiRuntime*>(runtime)->sweep(MpiRuntime::Sweep::kLast);
  return MPI_SUCCESS;
}

}  // namespace

void check_mpi(int status, const char* call, int32_t peer) {
  if (status == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(status, text.data(), &length);
  throw PortFailure(fmt::format("{}: {}", call, text.data()), peer);
}

MpiRuntime& MpiRuntime::start() {
  static MpiRuntime runtime;
  if (const Support open = mpi_is_open(); !open) {
    throw Error(ErrorCode::kState, {.what = "MPI cannot be used", .found = open.reason()});
  }
  if (runtime.is_inherited()) {
    throw Error(ErrorCode::kForked, {.what = "MPI does not survive a fork",
                                     .hint = "start the ranks before MPI is initialised"});
  }
  return runtime;
}

MpiRuntime::MpiRuntime() : pid_(::getpid()) {
  if (is_finalized()) return;  // start() says so
  owner_ = !is_initialized();
  if (owner_) {
    check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level_), "MPI_Init_thread");
  } else {
    MPI_Query_thread(&level_);
  }
  // Attributes of MPI_COMM_SELF are deleted first of all, whoever calls MPI_Finalize.
  int key = MPI_KEYVAL_INVALID;
  check_mpi(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, sweep_at_finalize, &key, nullptr),
            "MPI_Comm_create_keyval");
  check_mpi(MPI_Comm_set_attr(MPI_COMM_SELF, key, this), "MPI_Comm_set_attr");
  MPI_Comm_free_keyval(&key);
}

// The last moment at which no communicator uses MPI any more, and the first after which nothing
// will: MPI cannot be initialised twice.
MpiRuntime::~MpiRuntime() {
  if (!owner_ || is_inherited() || is_finalized()) return;
  wait_for_peers();
  sweep(Sweep::kLast);
  if (closes_) MPI_Finalize();
}

// MPI_Finalize waits for every rank, for ever where some go on without this one and leave MPI open.
void MpiRuntime::wait_for_peers() {
  const auto waits = [](const auto& remains) { return remains->awaits_peers(); };
  while (closes_ && std::ranges::any_of(retired_, waits)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool MpiRuntime::may_call() const {
  if (level_ >= MPI_THREAD_SERIALIZED) return true;
  int is_main = 0;
  MPI_Is_thread_main(&is_main);
  return is_main != 0;
}

Support MpiRuntime::takes_background() const {
  if (level_ >= MPI_THREAD_MULTIPLE) return Support::yes();
  return Support::no(fmt::format(
      "the application has initialised MPI with {}: bytes move while a rank calls, since a thread "
      "beside its own calls takes MPI_THREAD_MULTIPLE",
      level_name(level_)));
}

bool MpiRuntime::is_inherited() const { return pid_ != ::getpid(); }

void MpiRuntime::retire(std::unique_ptr<Remains> remains) {
  if (!remains->end(Sweep::kNow)) retired_.push_back(std::move(remains));
}

void MpiRuntime::sweep(Sweep when) {
  std::erase_if(retired_, [when](const auto& remains) { return remains->end(when); });
}

Support mpi_is_open() {
  if (is_finalized()) return Support::no("this process has finalised MPI");
  return Support::yes();
}

std::string mpi_description() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  std::string_view library = text.data();
  library = library.substr(0, library.find_first_of(",\n"));
  int version = 0;
  int subversion = 0;
  MPI_Get_version(&version, &subversion);
  std::string description = fmt::format("{}, MPI {}.{}", library, version, subversion);
  if (is_initialized() && !is_finalized()) {
    int level = 0;
    MPI_Query_thread(&level);
    description += fmt::format(", {}", level_name(level));
  }
  return description;
}

}  // namespace conclave::inline v0::comm
