# Sets CONCLAVE_HAS_CUDA. One library holds both: CPU rows, and kernels for GPUs with a static CUDA
# runtime, which finds the driver at run time. Nothing links libcuda.
set(CONCLAVE_HAS_CUDA OFF)
if(NOT CONCLAVE_CUDA MATCHES "^(AUTO|DRIVER|ON|OFF)$")
  message(FATAL_ERROR "CONCLAVE_CUDA is '${CONCLAVE_CUDA}': AUTO, DRIVER, ON or OFF")
endif()
set(wanted ${CONCLAVE_CUDA})
if(wanted STREQUAL "DRIVER")
  find_program(CONCLAVE_NVIDIA_SMI nvidia-smi)
  find_file(CONCLAVE_NVIDIA_DEVICE nvidiactl PATHS /dev NO_DEFAULT_PATH)
  mark_as_advanced(CONCLAVE_NVIDIA_SMI CONCLAVE_NVIDIA_DEVICE)
  if(CONCLAVE_NVIDIA_DEVICE OR CONCLAVE_NVIDIA_SMI)
    set(wanted AUTO)
  else()
    set(wanted OFF)
    message(STATUS "CUDA: off, no NVIDIA driver here; CONCLAVE_CUDA=ON builds device code all the same")
  endif()
endif()
if(NOT wanted STREQUAL "OFF")
  # Architectures come from conclave_cuda_sources: this CMake does not know the name 90a.
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
    string(REPLACE ";" " " architectures "${CONCLAVE_CUDA_ARCHITECTURES}")
    message(STATUS "CUDA: ${architectures}, nvcc ${CMAKE_CUDA_COMPILER_VERSION}")
  elseif(wanted STREQUAL "ON")
    message(FATAL_ERROR "CONCLAVE_CUDA=ON: ${why_not}")
  else()
    message(STATUS "CUDA: off, ${why_not}")
  endif()
endif()

# A folder of kernels for one architecture is compiled where the list has it: CONCLAVE_HAS_SM90 says
# so of sm90 folders, and src/experts/catalog.cc leaves their rows out where it is off.
set(CONCLAVE_HAS_SM90 OFF)
if(CONCLAVE_HAS_CUDA)
  if("90a" IN_LIST CONCLAVE_CUDA_ARCHITECTURES)
    set(CONCLAVE_HAS_SM90 ON)
  elseif(CONCLAVE_CUDA_ARCHITECTURES)
    message(STATUS "CUDA: plain kernels only; CONCLAVE_CUDA_ARCHITECTURES lacks 90a, which those for "
                   "Hopper need")
  else()
    message(FATAL_ERROR "CONCLAVE_CUDA_ARCHITECTURES is empty: name one, such as 90a or 80")
  endif()
endif()

# conclave_cuda_code(<flags> <code> <architecture>...): how nvcc is told, and how the library knows
# it (src/cuda/architecture.h). As in CMake, 80 is both a binary and PTX for later devices, 80-real
# and 80-virtual one of them; 90a is code for that device alone.
function(conclave_cuda_code flags code)
  set(all_flags)
  set(all_code)
  foreach(name IN LISTS ARGN)
    if(NOT name MATCHES "^([0-9]+)([0-9])(a|-real|-virtual|)$" OR CMAKE_MATCH_1 LESS 8)
      message(FATAL_ERROR "CONCLAVE_CUDA_ARCHITECTURES: '${name}' is not 80 or later, with a, -real, "
                          "-virtual or nothing behind it")
    endif()
    set(number ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
    set(capability "{${CMAKE_MATCH_1}, ${CMAKE_MATCH_2}}")
    set(suffix "${CMAKE_MATCH_3}")
    if(suffix STREQUAL "a")
      list(APPEND all_flags -gencode=arch=compute_${name},code=sm_${name})
      list(APPEND all_code "Architecture{${capability}, CodeKind::kExact}")
      continue()
    endif()
    if(NOT suffix STREQUAL "-virtual")
      list(APPEND all_flags -gencode=arch=compute_${number},code=sm_${number})
      list(APPEND all_code "Architecture{${capability}, CodeKind::kBinary}")
    endif()
    if(NOT suffix STREQUAL "-real")
      list(APPEND all_flags -gencode=arch=compute_${number},code=compute_${number})
      list(APPEND all_code "Architecture{${capability}, CodeKind::kPtx}")
    endif()
  endforeach()
  list(JOIN all_code ", " all_code)
  set(${flags} ${all_flags} PARENT_SCOPE)
  set(${code} ${all_code} PARENT_SCOPE)
endfunction()

# conclave_cuda_sources(<target> <file>...)
# conclave_cuda_sources(<target> ARCHITECTURES <architecture>... FILES <file>...): device code;
# nothing without CUDA. A folder of kernels for one architecture names it, as sm90 does 90a, which
# alone has wgmma and setmaxnreg, and is left out where CONCLAVE_CUDA_ARCHITECTURES lacks it; other
# files are compiled for the whole list.
function(conclave_cuda_sources target)
  if(NOT CONCLAVE_HAS_CUDA)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "ARCHITECTURES;FILES")
  set(architectures ${CONCLAVE_CUDA_ARCHITECTURES})
  set(files ${arg_UNPARSED_ARGUMENTS} ${arg_FILES})
  if(arg_ARCHITECTURES)
    set(architectures)
    foreach(name IN LISTS arg_ARCHITECTURES)
      if(name IN_LIST CONCLAVE_CUDA_ARCHITECTURES)
        list(APPEND architectures ${name})
      endif()
    endforeach()
    if(NOT architectures)
      return()
    endif()
  endif()
  conclave_cuda_code(flags code ${architectures})
  # The standard is a flag because CMake has no architecture to try it with. Lines of sources, which only a
  # profiler reads, would take a sixth of nvcc's time and most of the library: CMAKE_CUDA_FLAGS=-lineinfo.
  set(options -std=c++20 ${flags} --expt-relaxed-constexpr --extended-lambda
              -Xptxas=--warn-on-spills -Xcudafe=--diag_suppress=186)
  # The kernels of one library differ in few of their instructions: packed as tightly as nvcc can,
  # they take a fifth of the room. Drivers of CUDA 12.4 and later unpack them as a module is loaded.
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND options --compress-mode=size)
  endif()
  foreach(file IN LISTS files)
    target_sources(${target} PRIVATE ${file})
    set_source_files_properties(${file} TARGET_DIRECTORY ${target}
                                PROPERTIES LANGUAGE CUDA COMPILE_OPTIONS "${options}")
  endforeach()
endfunction()

# conclave_cuda_united(<target> <name> <file>...)
#
# Compiles files of conclave_cuda_sources together, a dozen at most: nvcc reads a file's headers three times, for the
# device, for the host and to part the two, which takes longer than many a file's kernels. Names in their unnamed
# namespaces differ. OFF (CONCLAVE_UNITE) and where they are not compiled at all, this does nothing.
function(conclave_cuda_united target name)
  set(files)
  get_target_property(directory ${target} SOURCE_DIR)
  foreach(file IN LISTS ARGN)
    # conclave_cuda_sources gives options to what it compiles.
    get_property(
      options
      SOURCE ${CMAKE_CURRENT_SOURCE_DIR}/${file}
      DIRECTORY ${directory}
      PROPERTY COMPILE_OPTIONS)
    if(NOT CONCLAVE_UNITE OR NOT options)
      return()
    endif()
    cmake_path(RELATIVE_PATH CMAKE_CURRENT_SOURCE_DIR BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/src OUTPUT_VARIABLE folder)
    list(APPEND files ${folder}/${file})
  endforeach()
  conclave_unite_files(${target} ${PROJECT_SOURCE_DIR}/src cuda_${name} FILES ${files})
endfunction()

# conclave_cuda_program(<name> <file>...): a program of one file that runs on any machine with a
# driver: nothing of it is shared but libc.
function(conclave_cuda_program name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE conclave_cuda_test_support conclave_warnings)
  target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc -Wl,--gc-sections -s)
endfunction()
