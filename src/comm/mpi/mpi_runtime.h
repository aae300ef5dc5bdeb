// MPI in this process: initialised once, by the application or by the first communicator.
#pragma once

#include "comm/message/message_port.h"

#include "conclave/error.h"

#include <cstdint>
#include <memory>
#include <mpi.h>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace conclave::inline v0::comm {

// Throws PortFailure with the call and MPI's text unless `status` is MPI_SUCCESS.
void check_mpi(int status, const char* call, int32_t peer = -1);

class MpiRuntime {
 public:
  // Initialises MPI, unless the application has. Throws PortFailure; Error: kState after
  // MPI_Finalize, kForked.
  static MpiRuntime& start();
  MpiRuntime(const MpiRuntime&) = delete;
  MpiRuntime& operator=(const MpiRuntime&) = delete;

  // Held around each call of MPI: one thread at a time is what MPI_THREAD_SERIALIZED allows.
  std::mutex& mutex() { return mutex_; }
  // Whether the calling thread may call MPI at all.
  bool may_call() const;
  // Whether a thread may call MPI beside the application's own calls.
  Support takes_background() const;
  // True in a child of the process that initialised MPI.
  bool is_inherited() const;

  enum class Sweep : uint8_t { kNow, kLast };
  // Remains of a communicator that its rank has destroyed. Its number must not be used again
  // before all messages to it have been read: a late one would reach the next communicator.
  class Remains {
   public:
    virtual ~Remains() = default;
    // Whether it is over; called again until then, the last time by MPI_Finalize.
    virtual bool end(Sweep when) = 0;
    // Whether a peer may still say that it goes on without this rank, and will not finalise MPI.
    virtual bool awaits_peers() = 0;
  };
  void retire(std::unique_ptr<Remains> remains);
  void sweep(Sweep when = Sweep::kNow);
  // Keeps what MPI may still write until the process ends.
  void keep(std::shared_ptr<void> memory) { kept_.push_back(std::move(memory)); }
  // A rank is missing: MPI_Finalize would wait for it, and is left out.
  void leave_open() { closes_ = false; }
  bool closes() const { return closes_; }

 private:
  MpiRuntime();
  ~MpiRuntime();
  void wait_for_peers();

  std::mutex mutex_;
  int level_ = MPI_THREAD_SINGLE;
  bool owner_ = false;  // initialised here, so that it is finalised here
  bool closes_ = true;
  int64_t pid_ = 0;
  std::vector<std::unique_ptr<Remains>> retired_;
  std::vector<std::shared_ptr<void>> kept_;
};

// Yes, or that this process has finalised MPI.
Support mpi_is_open();
// "Open MPI v4.1.4, MPI 3.1", and once MPI is initialised the level: ", MPI_THREAD_MULTIPLE".
std::string mpi_description();

}  // namespace conclave::inline v0::comm
