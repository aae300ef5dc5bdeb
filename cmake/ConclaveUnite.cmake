# conclave_unite_cold(<target> <root> [EXCEPT <folder>...])
#
# Compiles the target's cold files (conclave_cold_folder) up to a dozen of a folder at a time, in a
# generated source that includes them by their path below the root: reading headers takes most of the
# time of each. So names in the unnamed namespaces of a folder's cold files differ, but in those of the
# folders that are excepted. OFF compiles each file on its own, for the commands that editors and clang-tidy
# take; missing includes are found by tools/check_includes.py.
option(CONCLAVE_UNITE "Compile cold files together" ${PROJECT_IS_TOP_LEVEL})

function(conclave_unite_cold target root)
  cmake_parse_arguments(PARSE_ARGV 2 arg "" "" "EXCEPT")
  get_target_property(cold ${target} CONCLAVE_COLD)
  if(NOT CONCLAVE_UNITE OR NOT cold)
    return()
  endif()
  set(folders)
  foreach(file IN LISTS cold)
    cmake_path(RELATIVE_PATH file BASE_DIRECTORY ${root} OUTPUT_VARIABLE path)
    cmake_path(GET path PARENT_PATH folder)
    if(folder IN_LIST arg_EXCEPT)
      continue()
    endif()
    string(MAKE_C_IDENTIFIER "cold_${folder}" name)
    list(APPEND folders ${name})
    list(APPEND files_of_${name} ${path})
  endforeach()
  list(REMOVE_DUPLICATES folders)
  foreach(name IN LISTS folders)
    conclave_unite_files(${target} ${root} ${name} COLD FILES ${files_of_${name}})
  endforeach()
endfunction()

# conclave_unite_files(<target> <root> <name> [COLD] FILES <path below the root>...)
#
# Batches of equal size, so that none is left with a file of its own. COLD: they run once a layer, a model or a command.
function(conclave_unite_files target root name)
  cmake_parse_arguments(PARSE_ARGV 3 arg "COLD" "" "FILES")
  list(LENGTH arg_FILES count)
  if(count LESS 2)
    return()
  endif()
  math(EXPR batches "(${count} + 11) / 12")
  math(EXPR size "(${count} + ${batches} - 1) / ${batches}")
  get_target_property(directory ${target} SOURCE_DIR)
  foreach(batch RANGE 1 ${batches})
    math(EXPR begin "(${batch} - 1) * ${size}")
    list(SUBLIST arg_FILES ${begin} ${size} files)
    set(content)
    foreach(file IN LISTS files)
      string(APPEND content "#include \"${file}\"\n")
      set_property(SOURCE ${root}/${file} DIRECTORY ${directory} PROPERTY HEADER_FILE_ONLY ON)
    endforeach()
    list(GET files 0 first)
    cmake_path(GET first EXTENSION LAST_ONLY extension)
    set(united ${PROJECT_BINARY_DIR}/united/${target}/${name}_${batch}${extension})
    file(CONFIGURE OUTPUT ${united} CONTENT "${content}" @ONLY)
    target_sources(${target} PRIVATE ${united})
    # The files of a folder have the same options.
    get_property(
      options
      SOURCE ${root}/${first}
      DIRECTORY ${directory}
      PROPERTY COMPILE_OPTIONS)
    if(extension STREQUAL ".cu")
      set_property(SOURCE ${united} DIRECTORY ${directory} PROPERTY LANGUAGE CUDA)
      set_property(SOURCE ${united} DIRECTORY ${directory} PROPERTY COMPILE_OPTIONS ${options})
      continue()
    endif()
    # Clang with sanitizers takes two thirds of the time without optimisation, but has to read the headers, which were
    # precompiled with it: that pays for a batch of some files. Those whose paths a fuzzer counts run hundreds of thousands
    # of times. GCC gains nothing by it.
    if(arg_COLD AND CONCLAVE_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND size GREATER 5
       AND NOT options MATCHES "-fsanitize-coverage")
      list(APPEND options -O0)
      set_property(SOURCE ${united} DIRECTORY ${directory} PROPERTY SKIP_PRECOMPILE_HEADERS ON)
    endif()
    # A class defined in a .cc may hold types of its unnamed namespace; GCC takes the file for a header.
    set_property(
      SOURCE ${united}
      DIRECTORY ${directory}
      PROPERTY COMPILE_OPTIONS ${options} $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
  endforeach()
endfunction()
