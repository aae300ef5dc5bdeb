# Uses ccache where it is found and the caller has not chosen a launcher.
if(PROJECT_IS_TOP_LEVEL AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(CONCLAVE_CCACHE ccache)
  mark_as_advanced(CONCLAVE_CCACHE)
  if(CONCLAVE_CCACHE)
    # Paths within the tree count relative to it, so that a second clone finds what the first one
    # compiled. Without the sloppiness ccache takes no file that uses a precompiled header. The language of
    # messages counts as well: with one for all, a build by hand and one of scripts/test share what they have.
    set(cached ${CMAKE_COMMAND} -E env LC_ALL=C.UTF-8 CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1
               CCACHE_SLOPPINESS=pch_defines,time_macros ${CONCLAVE_CCACHE})
    set(CMAKE_CXX_COMPILER_LAUNCHER ${cached})
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${cached})
  endif()
endif()
