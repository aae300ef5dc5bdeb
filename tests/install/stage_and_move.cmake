# Installs BUILD_DIR into STAGE and moves the tree to PREFIX.
file(REMOVE_RECURSE ${STAGE} ${PREFIX})
execute_process(COMMAND ${CMAKE_COMMAND} --install ${BUILD_DIR} --prefix ${STAGE} --config ${CONFIG}
                        COMMAND_ERROR_IS_FATAL ANY)
file(RENAME ${STAGE} ${PREFIX})
file(GLOB_RECURSE installed RELATIVE ${PREFIX} ${PREFIX}/*)
foreach(file IN LISTS installed)
  if(file MATCHES "\\.(cmake|pc|h)$")
    file(STRINGS ${PREFIX}/${file} found REGEX "${STAGE}|${BUILD_DIR}")
    if(found)
      message(FATAL_ERROR "${file} remembers a path of the build: ${found}")
    endif()
  endif()
endforeach()
