# Sets CONCLAVE_HAS_CUDA. One library holds both: CPU rows, and kernels for sm_90a with a static CUDA
# runtime, which finds the driver at run time. Nothing links libcuda.
set(CONCLAVE_HAS_CUDA OFF)
if(NOT CONCLAVE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "CONCLAVE_CUDA is '${CONCLAVE_CUDA}': AUTO, ON or OFF")
endif()
if(NOT CONCLAVE_CUDA STREQUAL "OFF")
  # The architecture comes from CONCLAVE_CUDA_FLAGS: this CMake does not know the name 90a.
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    find_package(CUDAToolkit)
  endif()
  if(CMAKE_CUDA_COMPILER AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.4)
    set(why_not "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}: 12.4 or newer is needed")
  elseif(NOT CMAKE_CUDA_COMPILER)
    set(why_not "no nvcc; name it with CMAKE_CUDA_COMPILER or in PATH")
  elseif(NOT TARGET CUDA::cudart_static)
    set(why_not "no static CUDA runtime beside ${CMAKE_CUDA_COMPILER}")
  else()
    set(CONCLAVE_HAS_CUDA ON)
  endif()
  if(CONCLAVE_HAS_CUDA)
    message(STATUS "CUDA: sm_90a, nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
  elseif(CONCLAVE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CONCLAVE_CUDA=ON: ${why_not}")
  else()
    message(STATUS "CUDA: off, ${why_not}")
  endif()
endif()

# wgmma and setmaxnreg exist for 90a only. The standard is a flag for the same reason as there.
set(CONCLAVE_CUDA_FLAGS -std=c++20 -gencode=arch=compute_90a,code=sm_90a --expt-relaxed-constexpr
                        --extended-lambda -lineinfo -Xptxas=--warn-on-spills -Xcudafe=--diag_suppress=186)

# conclave_cuda_sources(<target> <file>...): device code; nothing without CUDA.
function(conclave_cuda_sources target)
  if(NOT CONCLAVE_HAS_CUDA)
    return()
  endif()
  foreach(file IN LISTS ARGN)
    target_sources(${target} PRIVATE ${file})
    set_source_files_properties(${file} TARGET_DIRECTORY ${target}
                                PROPERTIES LANGUAGE CUDA COMPILE_OPTIONS "${CONCLAVE_CUDA_FLAGS}")
  endforeach()
endfunction()

# conclave_cuda_program(<name> <file>...): a program of one file that runs on any machine with a
# driver: nothing of it is shared but libc.
function(conclave_cuda_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE conclave_cuda_test_support conclave_warnings)
  target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc -Wl,--gc-sections -s)
endfunction()
