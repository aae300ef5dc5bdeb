# conclave_isa_source(<target> <isa> <file>...)
#
# Adds sources compiled for one x86 instruction set: avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16,
# avx512_vbmi, amx or amx_int8. Only these files may hold such instructions; the caller reaches them after a run-time check
# of the CPU.
set(CONCLAVE_ISA_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(CONCLAVE_ISA_FLAGS_avx_vnni ${CONCLAVE_ISA_FLAGS_avx2} -mavxvnni)
set(CONCLAVE_ISA_FLAGS_avx512 ${CONCLAVE_ISA_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl
                              -mavx512dq)
set(CONCLAVE_ISA_FLAGS_avx512_vnni ${CONCLAVE_ISA_FLAGS_avx512} -mavx512vnni)
set(CONCLAVE_ISA_FLAGS_avx512_bf16 ${CONCLAVE_ISA_FLAGS_avx512_vnni} -mavx512bf16)
set(CONCLAVE_ISA_FLAGS_avx512_vbmi ${CONCLAVE_ISA_FLAGS_avx512_bf16} -mavx512vbmi)
set(CONCLAVE_ISA_FLAGS_amx ${CONCLAVE_ISA_FLAGS_avx512_vbmi} -mamx-tile -mamx-bf16)
set(CONCLAVE_ISA_FLAGS_amx_int8 ${CONCLAVE_ISA_FLAGS_amx} -mamx-int8)

# GCC 12 and 13 warn of the deliberately undefined operands inside their own AVX-512 headers.
set(CONCLAVE_ISA_WARNING_FLAGS
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized;-Wno-uninitialized>)

# Checks of sums of pointers are half of clang's time on unrolled kernels, and guard pages and AddressSanitizer see what
# such a sum reaches. Each access that AddressSanitizer checks in line is a branch of its own, which took 40 % of the rest:
# the same checks as calls are found alike.
set(CONCLAVE_KERNEL_SANITIZER_FLAGS "")
if(CONCLAVE_SANITIZE MATCHES "undefined")
  list(APPEND CONCLAVE_KERNEL_SANITIZER_FLAGS -fno-sanitize=pointer-overflow)
endif()
if(CONCLAVE_SANITIZE MATCHES "address")
  list(APPEND CONCLAVE_KERNEL_SANITIZER_FLAGS
       $<$<CXX_COMPILER_ID:Clang>:-fsanitize-address-outline-instrumentation>)
endif()

function(conclave_isa_source target isa)
  if(NOT DEFINED CONCLAVE_ISA_FLAGS_${isa})
    message(FATAL_ERROR "conclave_isa_source: unknown instruction set '${isa}'")
  endif()
  foreach(file IN LISTS ARGN)
    cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} NORMALIZE)
    target_sources(${target} PRIVATE ${file})
    get_target_property(directory ${target} SOURCE_DIR)
    # The target is defined in another directory; its own scope is where the flags must be set.
    set_property(
      SOURCE ${file}
      DIRECTORY ${directory}
      APPEND
      PROPERTY COMPILE_OPTIONS ${CONCLAVE_ISA_FLAGS_${isa}} ${CONCLAVE_ISA_WARNING_FLAGS}
               ${CONCLAVE_KERNEL_SANITIZER_FLAGS})
    set_property(SOURCE ${file} DIRECTORY ${directory} PROPERTY SKIP_PRECOMPILE_HEADERS ON)
  endforeach()
endfunction()
