# conclave_add_test(<name> SOURCES <file>... [LABELS <label>...] [TIMEOUT <seconds>] [SERIAL])
#
# One GoogleTest executable, its cases registered one by one with ctest. Labels: the given ones or
# "cpu". The timeout is per case. SERIAL keeps other tests from running at the same time.
include(GoogleTest)
set(CONCLAVE_TEST_LABELS ${CMAKE_CURRENT_LIST_DIR}/ConclaveTestLabels.cmake)

# Sets the options that every test is compiled with. Cases run once, so that an optimised build spends little on them;
# the loops of oracles that take long are the library's own.
function(conclave_test_options target)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/src)
  target_compile_options(
    ${target} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release,RelWithDebInfo>>:-O1>)
  target_link_libraries(${target} PRIVATE conclave::conclave conclave_test_support conclave_warnings
                                          conclave_scalar_rounding conclave_format
                                          nlohmann_json::nlohmann_json GTest::gtest)
endfunction()

function(conclave_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SERIAL" "TIMEOUT" "SOURCES;LABELS;LIBRARIES")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "conclave_add_test(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_SOURCES)
    message(FATAL_ERROR "conclave_add_test(${name}): SOURCES is missing")
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS cpu)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()

  add_executable(${name} ${arg_SOURCES} $<TARGET_OBJECTS:conclave_test_main>)
  conclave_test_options(${name})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES} GTest::gtest_main)
  conclave_precompile_as(${name} conclave_test_main)
  set_property(GLOBAL APPEND PROPERTY CONCLAVE_TEST_TARGETS ${name})

  set(properties TIMEOUT ${arg_TIMEOUT})
  if(arg_SERIAL)
    list(APPEND properties RUN_SERIAL ON)
  endif()
  gtest_discover_tests(
    ${name}
    DISCOVERY_MODE PRE_TEST
    DISCOVERY_TIMEOUT 300
    NO_PRETTY_VALUES
    PROPERTIES ${properties})
  # gtest_discover_tests cannot carry a list as a property value, so the labels follow in a file of
  # their own that ctest reads after the discovered tests.
  set(labels_file ${CMAKE_CURRENT_BINARY_DIR}/${name}_labels.cmake)
  file(
    CONFIGURE
    OUTPUT ${labels_file}
    CONTENT [[
include("@CONCLAVE_TEST_LABELS@")
conclave_label_cases("@arg_LABELS@" "@CONCLAVE_SANITIZE@" ${@name@_TESTS})
]]
    @ONLY)
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels_file})
endfunction()
