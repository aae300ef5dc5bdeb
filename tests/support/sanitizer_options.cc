// Out of memory must reach our own code as a null pointer or bad_alloc, as without a sanitizer: the
// tests of that path request absurd sizes.
extern "C" {
const char* __asan_default_options();
const char* __asan_default_options() { return "allocator_may_return_null=1"; }
const char* __tsan_default_options();
const char* __tsan_default_options() { return "allocator_may_return_null=1"; }
}
