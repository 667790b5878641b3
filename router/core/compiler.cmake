# Where neither the caller nor the system has a C++ compiler: the one that PyPI carries as `ziglang`,
# if it is installed for this Python. Included before project(), which looks for one.
if(DEFINED ENV{CXX} AND NOT IS_ABSOLUTE "$ENV{CXX}")
  # scikit-build-core names the one that Python was built with, whether it is there or not.
  string(REGEX MATCH "^[^ ]+" KVROUTE_NAMED_CXX "$ENV{CXX}")
  find_program(KVROUTE_NAMED_CXX_PATH NAMES ${KVROUTE_NAMED_CXX})
  if(NOT KVROUTE_NAMED_CXX_PATH)
    unset(ENV{CXX})
  endif()
endif()
if(NOT CMAKE_CXX_COMPILER AND NOT DEFINED ENV{CXX})
  find_program(KVROUTE_SYSTEM_CXX NAMES c++ g++ clang++)
  if(NOT KVROUTE_SYSTEM_CXX)
    find_program(KVROUTE_PYTHON NAMES python3 python)
    if(Python_EXECUTABLE)
      set(KVROUTE_PYTHON ${Python_EXECUTABLE})
    endif()
    execute_process(COMMAND ${KVROUTE_PYTHON} -m ziglang version
      RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(failed)
      message(FATAL_ERROR "no C++ compiler: install g++ or clang, or ziglang from PyPI")
    endif()
    # By itself it compiles for this very processor, and what is built may run on others.
    foreach(command "c++ -mcpu=baseline" ar ranlib)
      string(REGEX MATCH "^[^ ]+" name "${command}")
      file(WRITE ${CMAKE_BINARY_DIR}/zig/${name}
        "#!/bin/sh\nexec '${KVROUTE_PYTHON}' -m ziglang ${command} \"$@\"\n")
      file(CHMOD ${CMAKE_BINARY_DIR}/zig/${name}
        PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE)
    endforeach()
    set(CMAKE_CXX_COMPILER ${CMAKE_BINARY_DIR}/zig/c++)
    set(CMAKE_AR ${CMAKE_BINARY_DIR}/zig/ar CACHE FILEPATH "")
    set(CMAKE_RANLIB ${CMAKE_BINARY_DIR}/zig/ranlib CACHE FILEPATH "")
    set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
    set(CMAKE_HAVE_LIBC_PTHREAD 1)  # the test for it costs a minute and says the same
  endif()
endif()
