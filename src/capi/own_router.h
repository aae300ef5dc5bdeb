// A router of the application's own, given as a function of C.
#pragma once

#include "conclave/c/router.h"
#include "conclave/routing.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace conclave::inline v0::capi {

// The function with what it needs, shared by the context and the routers that are made of it.
class RouterFunction {
 public:
  // Throws Error(kNullPointer, kInvalidArgument).
  explicit RouterFunction(const conclave_own_router& router);
  RouterFunction(const RouterFunction&) = delete;
  RouterFunction& operator=(const RouterFunction&) = delete;
  // Releases the caller's object where it was kept.
  ~RouterFunction();

  // From now on the caller's object is this one's to release.
  void keep() noexcept { is_kept_ = true; }
  const conclave_own_router& given() const noexcept { return given_; }

 private:
  conclave_own_router given_;
  bool is_kept_ = false;
};

class CRouter final : public Router {
 public:
  CRouter(std::shared_ptr<const RouterFunction> function, const MoeSpec& spec);
  size_t scratch_bytes(int32_t workers) const override;
  // Throws Error: what the function returned, kState for elements that it left unwritten.
  RouterStats route(const RouterInput& input, const RouterOutput& output,
                    Executor& executor) const override;

 private:
  std::shared_ptr<const RouterFunction> function_;
  std::string name_;
  int64_t top_k_;
  int64_t num_zero_experts_;
  int64_t num_shared_;  // that the router weighs
};

}  // namespace conclave::inline v0::capi
