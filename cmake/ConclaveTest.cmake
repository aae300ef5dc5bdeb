# conclave_add_test(<name> SOURCES <file>... [LABELS <label>...] [TIMEOUT <seconds>] [PARTS <number>] [COST <seconds>]
#   [SERIAL] [RANKS] [ALONE] [HOT] [VALUES] [TOGETHER [APART <file>...]])
#
# One GoogleTest executable. Labels: the given ones or "cpu". SERIAL keeps other tests from running at the same time.
# RANKS: each case starts groups of ranks and measures their deadlines. These mostly wait, so that other programs fill
# the time, but never two such cases at once: they begin first, since they would be left over one by one at the end.
# COST: about what each part takes, where that is long; ctest knows no times before a first run, and a long part that
# begins last leaves cores idle.
#
# ctest runs the program in PARTS, four where none are given, since a process takes longer to start than most cases to
# run. It starts each case on its own, within the timeout, where one case could spoil the next: in a SERIAL program,
# which measures its process, and in one of RANKS; in an ALONE one, which measures its memory or forks; and in one
# labelled cuda, whose context an error of the device breaks. Sanitizers keep memory and follow no fork: there ALONE
# programs are in parts too.
#
# HOT: the cases compute by themselves. Others are not optimised by clang, which builds them for the sanitizers alone:
# what they inline of GoogleTest and of other libraries was most of its time.
#
# VALUES: tables of cases hold types and sizes, which change what is computed and not where threads meet, so that under
# ThreadSanitizer fewer of them run than under the others (tests/support/main.cc).
#
# TOGETHER: files of the folder named *_test.cc are compiled up to a dozen at a time (ConclaveUnite.cmake), which saves a
# third of it, but those APART: their names in the unnamed namespaces meet those of others. The compiler says so.
#
# Programs labelled production do not run under a sanitizer or for coverage, and are not built there.
option(CONCLAVE_TEST_CASES "ctest lists and starts each test case on its own" OFF)
include(GoogleTest)

# conclave_test_options(<target> [HOT]): the options that every test is compiled with. Cases run once, so that an
# optimised build spends little on them; the loops of oracles that take long are the library's own.
function(conclave_test_options target)
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/tests ${PROJECT_SOURCE_DIR}/src)
  target_compile_options(
    ${target} PRIVATE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release,RelWithDebInfo>>:-O1>)
  if("HOT" IN_LIST ARGN)
    set_target_properties(${target} PROPERTIES CONCLAVE_HOT ON)
  else()
    target_compile_options(${target} PRIVATE $<$<AND:$<COMPILE_LANG_AND_ID:CXX,Clang>,$<CONFIG:Debug>>:-O0>)
  endif()
  target_link_libraries(${target} PRIVATE conclave::conclave conclave_test_support conclave_warnings
                                          conclave_scalar_rounding conclave_format
                                          nlohmann_json::nlohmann_json GTest::gtest)
endfunction()

function(conclave_add_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SERIAL;RANKS;ALONE;HOT;VALUES;TOGETHER" "TIMEOUT;PARTS;COST"
                        "SOURCES;LABELS;LIBRARIES;APART")
  if(arg_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "conclave_add_test(${name}): unknown arguments ${arg_UNPARSED_ARGUMENTS}")
  endif()
  if(NOT arg_SOURCES)
    message(FATAL_ERROR "conclave_add_test(${name}): SOURCES is missing")
  endif()
  if("production" IN_LIST arg_LABELS AND (CONCLAVE_SANITIZE OR CONCLAVE_COVERAGE))
    return()
  endif()
  if(NOT arg_LABELS)
    set(arg_LABELS cpu)
  endif()
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  if(NOT arg_PARTS)
    set(arg_PARTS 4)
  endif()

  add_executable(${name} ${arg_SOURCES} $<TARGET_OBJECTS:conclave_test_main>)
  set(hot)
  if(arg_HOT)
    set(hot HOT)
  endif()
  conclave_test_options(${name} ${hot})
  target_link_libraries(${name} PRIVATE ${arg_LIBRARIES})
  conclave_precompile_as(${name} conclave_test_main)
  if(arg_TOGETHER AND CONCLAVE_UNITE)
    conclave_unite_tests(${name} SOURCES ${arg_SOURCES} APART ${arg_APART})
  endif()
  set_property(GLOBAL APPEND PROPERTY CONCLAVE_TEST_TARGETS ${name})

  if(NOT CONCLAVE_TEST_CASES
     AND NOT arg_SERIAL
     AND NOT arg_RANKS
     AND (CONCLAVE_SANITIZE OR NOT arg_ALONE)
     AND NOT "cuda" IN_LIST arg_LABELS)
    set(variables)
    if(arg_VALUES AND CONCLAVE_SANITIZE MATCHES "thread")
      set(variables CONCLAVE_TEST_SAMPLE_OF=values)
    endif()
    conclave_add_test_in_parts(${name} ${arg_PARTS} "${arg_LABELS}" "${arg_COST}" ${variables})
    return()
  endif()
  set(properties TIMEOUT ${arg_TIMEOUT})
  if(arg_SERIAL)
    list(APPEND properties RUN_SERIAL ON)
  endif()
  if(arg_RANKS)
    list(APPEND properties RESOURCE_LOCK ranks COST 200)
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
if(@name@_TESTS)
  set_tests_properties(${@name@_TESTS} PROPERTIES LABELS "@arg_LABELS@")
endif()
]]
    @ONLY)
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${labels_file})
endfunction()

# Files that several programs share, or that another folder has, are not named *_test.cc or stay on their own.
function(conclave_unite_tests name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;APART")
  cmake_path(RELATIVE_PATH CMAKE_CURRENT_SOURCE_DIR BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/tests OUTPUT_VARIABLE folder)
  set(files)
  foreach(file IN LISTS arg_SOURCES)
    if(file MATCHES "^[a-z0-9_]+_test\\.cc$" AND NOT file IN_LIST arg_APART)
      list(APPEND files ${folder}/${file})
    endif()
  endforeach()
  conclave_unite_files(${name} ${PROJECT_SOURCE_DIR}/tests together FILES ${files})
endfunction()

# A quarter of an hour ends a part that hangs. Behind the cost: variables of the environment.
function(conclave_add_test_in_parts name parts labels cost)
  foreach(part RANGE 1 ${parts})
    math(EXPR index "${part} - 1")
    add_test(NAME ${name}.${part} COMMAND ${name})
    set_tests_properties(
      ${name}.${part} PROPERTIES LABELS "${labels}" TIMEOUT 900
                                 ENVIRONMENT "GTEST_TOTAL_SHARDS=${parts};GTEST_SHARD_INDEX=${index};${ARGN}")
    if(cost)
      set_tests_properties(${name}.${part} PROPERTIES COST ${cost})
    endif()
  endforeach()
endfunction()

# conclave_add_mpi_test(<name> SOURCES <file>... RANKS <number>...)
#
# One GoogleTest executable whose ranks a launcher starts, once for each number: every rank runs every case, and the
# one that fails counts.
function(conclave_add_mpi_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES;RANKS")
  conclave_add_rank_program(${name} SOURCES ${arg_SOURCES} $<TARGET_OBJECTS:conclave_test_main>)
  conclave_precompile_as(${name} conclave_test_main)
  foreach(ranks IN LISTS arg_RANKS)
    add_test(NAME ${name}.${ranks} COMMAND ${MPIEXEC_EXECUTABLE} ${MPIEXEC_NUMPROC_FLAG} ${ranks}
                                           $<TARGET_FILE:${name}>)
    set_tests_properties(${name}.${ranks} PROPERTIES LABELS mpi TIMEOUT 300 PROCESSORS ${ranks} COST 100
                                                     ENVIRONMENT "${CONCLAVE_MPI_ENVIRONMENT}")
  endforeach()
endfunction()

# mpiexec of Open MPI needs these where there are fewer cores than ranks, and in containers; others do
# not look at them.
set(CONCLAVE_MPI_ENVIRONMENT
    OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1
    OMPI_MCA_hwloc_base_binding_policy=none)

# A program of one rank, with a main of its own.
function(conclave_add_rank_program name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "SOURCES")
  add_executable(${name} ${arg_SOURCES})
  conclave_test_options(${name})
  if(CONCLAVE_HAS_MPI)
    target_link_libraries(${name} PRIVATE MPI::MPI_CXX)
  endif()
  set_property(GLOBAL APPEND PROPERTY CONCLAVE_TEST_TARGETS ${name})
endfunction()
