# Interface targets with the compile flags of the project's own code.

add_library(conclave_warnings INTERFACE)
set(warnings
    -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor -Woverloaded-virtual
    -Wcast-align -Wimplicit-fallthrough -Wextra-semi
    $<$<BOOL:${CONCLAVE_WARNINGS_AS_ERRORS}>:-Werror>)
# nvcc's host half is full of code of its own: it gets the few that do not fire on that.
target_compile_options(
  conclave_warnings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${warnings}>"
                              "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>")
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC 12 reports false positives of these three from inlined standard containers.
  set(false_positives -Wno-array-bounds -Wno-stringop-overflow -Wno-restrict)
  target_compile_options(conclave_warnings
                         INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${false_positives}>")
endif()

# Scalar code rounds alike on every instruction set: no silent fusing of a product and a sum.
# Kernels that want a fused multiply-add say so with an intrinsic or std::fma.
add_library(conclave_scalar_rounding INTERFACE)
target_compile_options(conclave_scalar_rounding
                       INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>")

# Instrumentation has to cover everything that is linked together, so it is directory-wide.
if(CONCLAVE_SANITIZE)
  add_compile_options(-fsanitize=${CONCLAVE_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${CONCLAVE_SANITIZE})
  if(NOT CONCLAVE_SANITIZE MATCHES "thread")
    add_compile_options(-fno-sanitize-recover=all)
  endif()
endif()
if(CONCLAVE_COVERAGE)
  add_compile_options(--coverage -fprofile-update=atomic)
  add_link_options(--coverage)
endif()

# conclave_sanitize_fast(<target>)
#
# Under a sanitizer the target is compiled without optimisation, which takes half the time. For what runs
# once a command, since it runs several times slower.
function(conclave_sanitize_fast target)
  if(CONCLAVE_SANITIZE)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
  endif()
endfunction()

# conclave_cold_folder(<target> [EXCEPT <file>...] [ONLY <file>...])
#
# The folder's sources of the target run once a layer, a model or a command: an optimised build
# compiles them with -O1, which takes half the time. EXCEPT: what touches every row or byte.
function(conclave_cold_folder target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "EXCEPT;ONLY")
  get_target_property(directory ${target} SOURCE_DIR)
  get_target_property(sources ${target} SOURCES)
  foreach(file IN LISTS sources)
    if(file MATCHES "^\\$<")
      continue()
    endif()
    cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY ${directory} NORMALIZE)
    cmake_path(IS_PREFIX CMAKE_CURRENT_SOURCE_DIR ${file} NORMALIZE is_here)
    if(NOT is_here)
      continue()
    endif()
    cmake_path(RELATIVE_PATH file BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR} OUTPUT_VARIABLE name)
    if(name IN_LIST arg_EXCEPT OR (arg_ONLY AND NOT name IN_LIST arg_ONLY))
      continue()
    endif()
    conclave_mark_cold(${target} ${file})
  endforeach()
endfunction()

function(conclave_mark_cold target file)
  get_target_property(directory ${target} SOURCE_DIR)
  set_property(
    SOURCE ${file}
    DIRECTORY ${directory}
    APPEND
    PROPERTY COMPILE_OPTIONS $<$<CONFIG:Release,RelWithDebInfo>:-O1>)
  set_property(TARGET ${target} APPEND PROPERTY CONCLAVE_COLD ${file})
endfunction()
