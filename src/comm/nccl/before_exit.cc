#include "comm/nccl/before_exit.h"

#include <cstdlib>
#include <mutex>
#include <unistd.h>
#include <utility>
#include <vector>

namespace conclave::inline v0::comm {

class Endings {
 public:
  void add(BeforeExit* ending) {
    const std::lock_guard lock(mutex_);
    // Handlers run in reverse: behind NCCL and CUDA, which are loaded, this one comes before
    // theirs.
    if (!std::exchange(is_registered_, true)) std::atexit([] { all().run(); });
    endings_.push_back(ending);
  }
  void remove(BeforeExit* ending) {
    const std::lock_guard lock(mutex_);
    std::erase(endings_, ending);
  }

  static Endings& all() {
    // Never destroyed: what is static elsewhere may outlive it.
    static Endings& endings = *new Endings();
    return endings;
  }

 private:
  void run() {
    // A child of a fork has none of the threads.
    if (::getpid() != process_) return;
    const std::lock_guard lock(mutex_);
    for (BeforeExit* const ending : endings_) ending->end_();
    endings_.clear();
  }

  const pid_t process_ = ::getpid();
  std::mutex mutex_;
  std::vector<BeforeExit*> endings_;
  bool is_registered_ = false;
};

BeforeExit::BeforeExit(std::function<void()> end) : end_(std::move(end)) {
  Endings::all().add(this);
}
BeforeExit::~BeforeExit() { Endings::all().remove(this); }

}  // namespace conclave::inline v0::comm
