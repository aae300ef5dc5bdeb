# Writes core/build_config.h: what this binary was built from. Only src/core/version.cc and the
# catalog.cc files may include it.
set(CONCLAVE_GENERATED_DIR ${CMAKE_CURRENT_BINARY_DIR}/generated)
set(CONCLAVE_GIT_COMMIT "unknown")
find_package(Git QUIET)
if(Git_FOUND AND EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/.git)
  execute_process(
    COMMAND ${GIT_EXECUTABLE} rev-parse --short=12 HEAD
    WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
    OUTPUT_VARIABLE commit
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(commit)
    set(CONCLAVE_GIT_COMMIT ${commit})
  endif()
  # A new commit runs the configure step again.
  execute_process(
    COMMAND ${GIT_EXECUTABLE} rev-parse --git-path logs/HEAD
    WORKING_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}
    OUTPUT_VARIABLE head_log
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(head_log)
    cmake_path(ABSOLUTE_PATH head_log BASE_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR})
    if(EXISTS ${head_log})
      set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${head_log})
    endif()
  endif()
endif()
set(CONCLAVE_BUILD_CUDA 0)
set(CONCLAVE_BUILD_SM90 0)
set(CONCLAVE_FEATURES "cpu,avx2,avx512,avx512_bf16,amx")
if(CONCLAVE_HAS_CUDA)
  set(CONCLAVE_BUILD_CUDA 1)
  if(CONCLAVE_HAS_SM90)
    set(CONCLAVE_BUILD_SM90 1)
  endif()
  conclave_cuda_code(flags CONCLAVE_CUDA_CODE ${CONCLAVE_CUDA_ARCHITECTURES})
  foreach(name IN LISTS CONCLAVE_CUDA_ARCHITECTURES)
    string(APPEND CONCLAVE_FEATURES ",cuda_sm${name}")
  endforeach()
endif()
set(CONCLAVE_BUILD_MPI 0)
if(CONCLAVE_HAS_MPI)
  set(CONCLAVE_BUILD_MPI 1)
  string(APPEND CONCLAVE_FEATURES ",mpi")
endif()
configure_file(${CMAKE_CURRENT_LIST_DIR}/build_config.h.in
               ${CONCLAVE_GENERATED_DIR}/core/build_config.h @ONLY)
