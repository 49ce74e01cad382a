// hidden_cache._native: arena, slot and result pools and transfer engine for Python. No torch:
// memory is given as addresses, and the Python layer keeps its owner alive.
#include "bindings/module.h"

#include <exception>
#include <system_error>

namespace py = pybind11;

PYBIND11_MODULE(_native, module) {
  module.doc() = "Arena, slot pool and transfer engine of hidden_cache.";

  // The kernel's refusals become OSError with errno, as Python's own do.
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const std::system_error& error) {
      const py::tuple arguments = py::make_tuple(error.code().value(), error.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });

  hscache::bind_keys(module);
  hscache::bind_memory(module);
  hscache::bind_results(module);
  hscache::bind_transfers(module);
  hscache::bind_chunks(module);
}
