#include "layer/balancer/load_window.h"

#include <algorithm>

namespace conclave::inline v0 {

LoadWindow::LoadWindow(size_t counters, int64_t steps)
    : now_(counters, 0),
      sums_(counters, 0),
      steps_(counters * static_cast<size_t>(steps), 0),
      capacity_(static_cast<size_t>(steps)) {}

void LoadWindow::close_step() {
  int64_t* const oldest = steps_.data() + next_ * now_.size();
  for (size_t i = 0; i < now_.size(); ++i) {
    sums_[i] += now_[i] - oldest[i];
    oldest[i] = now_[i];
  }
  std::ranges::fill(now_, 0);
  next_ = (next_ + 1) % capacity_;
}

}  // namespace conclave::inline v0
