# conclave_add_fuzzer(<name> SOURCES <file>...)
#
# One libFuzzer executable, <name>_fuzz, seeded from corpus/<name> beside the caller's
# CMakeLists.txt; scripts/test runs each for a while. With ctest it replays its corpus once.
function(conclave_add_fuzzer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "The fuzz harnesses need clang: use the preset fuzz")
  endif()
  add_executable(${name}_fuzz ${arg_SOURCES})
  target_include_directories(${name}_fuzz PRIVATE ${PROJECT_SOURCE_DIR}/tests
                                                  ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(${name}_fuzz PRIVATE conclave::conclave conclave_warnings
                                             conclave_format nlohmann_json::nlohmann_json)
  target_link_options(${name}_fuzz PRIVATE -fsanitize=fuzzer)
  add_test(NAME Fuzz.${name}_Corpus
           COMMAND ${name}_fuzz -runs=0 ${CMAKE_CURRENT_SOURCE_DIR}/corpus/${name})
  set_tests_properties(Fuzz.${name}_Corpus PROPERTIES LABELS fuzz TIMEOUT 120)
endfunction()
