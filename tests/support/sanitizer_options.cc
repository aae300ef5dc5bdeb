// Out of memory must reach our own code as a null pointer or bad_alloc, as without a sanitizer: the
// tests of that path request absurd sizes.
extern "C" {
const char* __asan_default_options();
const char* __asan_default_options() { return "allocator_may_return_null=1"; }
// MPI keeps memory until the process ends, in modules that it has unloaded by then: no suppression
// by name finds it. Absent where the program has no MPI.
[[gnu::weak]] int MPI_Initialized(int* flag);
int __lsan_is_turned_off();
int __lsan_is_turned_off() {
  int initialized = 0;
  if (MPI_Initialized != nullptr) MPI_Initialized(&initialized);
  return initialized;
}
const char* __tsan_default_options();
const char* __tsan_default_options() { return "allocator_may_return_null=1"; }
}
