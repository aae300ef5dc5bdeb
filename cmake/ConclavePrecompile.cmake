# conclave_precompile(<target> <header>...)
#
# Precompiles headers of other projects for the target's sources, except those with an instruction set
# of their own (conclave_isa_source), which could not use them. None of our own headers: a file includes
# what it uses, and a build without this option, which every other compiler gets, would fail where one
# does not. tools/check_includes.py finds that without a build.
option(CONCLAVE_PRECOMPILE "Precompile headers of other projects (GCC up to 12; clang with sanitizers)"
       ${PROJECT_IS_TOP_LEVEL})
set(CONCLAVE_STANDARD_HEADERS
    <algorithm> <array> <charconv> <cmath> <cstdint> <cstring> <filesystem> <functional> <map>
    <memory> <optional> <set> <span> <string> <string_view> <unordered_map> <utility> <vector>)

# GCC 13 does not take at -O1 what it precompiled at -O3. With clang it is the flags of presets that are tried,
# and those of a subproject that asks for it, as tests/install does.
set(CONCLAVE_PRECOMPILES OFF)
set(CONCLAVE_PRECOMPILED_FLAGS)
if(CONCLAVE_PRECOMPILE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set(CONCLAVE_PRECOMPILES ON)
  # ccache needs it to see which precompiled header a file was compiled with.
  set(CONCLAVE_PRECOMPILED_FLAGS $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
elseif(CONCLAVE_PRECOMPILE AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang"
       AND (CONCLAVE_SANITIZE OR NOT PROJECT_IS_TOP_LEVEL))
  set(CONCLAVE_PRECOMPILES ON)
  # The same headers make the same file, which ccache then knows again.
  list(APPEND CMAKE_CXX_COMPILE_OPTIONS_CREATE_PCH -Xclang -fno-pch-timestamp)
endif()

function(conclave_precompile target)
  if(NOT CONCLAVE_PRECOMPILES)
    return()
  endif()
  target_precompile_headers(${target} PRIVATE ${ARGN})
  target_compile_options(${target} PRIVATE ${CONCLAVE_PRECOMPILED_FLAGS})
endfunction()

# conclave_precompile_as(<target> <other>): the headers that are precompiled for the other target, which
# is compiled with the same options. Clang takes none that were compiled without optimisation where a target
# has it.
function(conclave_precompile_as target other)
  get_target_property(headers ${other} PRECOMPILE_HEADERS)
  get_target_property(is_hot ${target} CONCLAVE_HOT)
  if(headers AND NOT (is_hot AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang"))
    target_precompile_headers(${target} REUSE_FROM ${other})
    target_compile_options(${target} PRIVATE ${CONCLAVE_PRECOMPILED_FLAGS})
  endif()
endfunction()
