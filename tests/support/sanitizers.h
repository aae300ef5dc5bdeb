// Which sanitizer this program is compiled with: CONCLAVE_TEST_ASAN and CONCLAVE_TEST_TSAN are 0
// or 1.
#pragma once

#if defined(__has_feature)  // clang's words; GCC 12 has macros
#define CONCLAVE_TEST_ASAN __has_feature(address_sanitizer)
#define CONCLAVE_TEST_TSAN __has_feature(thread_sanitizer)
#else
#if defined(__SANITIZE_ADDRESS__)
#define CONCLAVE_TEST_ASAN 1
#else
#define CONCLAVE_TEST_ASAN 0
#endif
#if defined(__SANITIZE_THREAD__)
#define CONCLAVE_TEST_TSAN 1
#else
#define CONCLAVE_TEST_TSAN 0
#endif
#endif
