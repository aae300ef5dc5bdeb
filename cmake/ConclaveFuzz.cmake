# conclave_fuzz_coverage(<target> <folder>...)
#
# The fuzzers see which paths of the sources in these folders an input takes. Kernels would run several
# times slower. The flags are what -fsanitize=fuzzer-no-link stands for, with which clang takes no header that was
# precompiled without it.
set(CONCLAVE_FUZZ_FLAGS -fsanitize-coverage=inline-8bit-counters,indirect-calls,trace-cmp,pc-table,stack-depth)
foreach(name bcmp memcmp memmem strcasecmp strcasestr strcmp strncasecmp strncmp strstr)
  list(APPEND CONCLAVE_FUZZ_FLAGS -fno-builtin-${name})
endforeach()

function(conclave_fuzz_coverage target)
  get_target_property(sources ${target} SOURCES)
  get_target_property(directory ${target} SOURCE_DIR)
  foreach(file IN LISTS sources)
    cmake_path(ABSOLUTE_PATH file BASE_DIRECTORY ${directory} NORMALIZE OUTPUT_VARIABLE path)
    foreach(folder IN LISTS ARGN)
      cmake_path(IS_PREFIX folder ${path} NORMALIZE is_within)
      if(is_within)
        set_property(
          SOURCE ${path}
          DIRECTORY ${directory}
          APPEND
          PROPERTY COMPILE_OPTIONS ${CONCLAVE_FUZZ_FLAGS})
      endif()
    endforeach()
  endforeach()
endfunction()

# conclave_add_fuzzer(<name> SOURCES <file>...)
#
# One libFuzzer executable, <name>_fuzz, seeded from corpus/<name> beside the caller's
# CMakeLists.txt; scripts/test runs each for a while. With ctest it replays its corpus once.
function(conclave_add_fuzzer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "The fuzz harnesses need clang: use the preset dev")
  endif()
  add_executable(${name}_fuzz ${arg_SOURCES})
  target_include_directories(${name}_fuzz PRIVATE ${PROJECT_SOURCE_DIR}/tests
                                                  ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name}_fuzz PRIVATE conclave::conclave conclave_warnings
                                             conclave_format nlohmann_json::nlohmann_json)
  target_compile_options(${name}_fuzz PRIVATE -fsanitize=fuzzer-no-link)
  target_link_options(${name}_fuzz PRIVATE -fsanitize=fuzzer)
  add_test(NAME Fuzz.${name}_Corpus
           COMMAND ${name}_fuzz -runs=0 ${CMAKE_CURRENT_SOURCE_DIR}/corpus/${name})
  set_tests_properties(Fuzz.${name}_Corpus PROPERTIES LABELS fuzz TIMEOUT 300)
endfunction()
