#include <bit>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "bindings/module.h"

namespace py = pybind11;

namespace hscache {
namespace {

// Keys are the same on every machine, and they are made of these bytes.
static_assert(std::endian::native == std::endian::little);

// One token that is no plain int: a numpy integer, say.
std::int64_t token_of(PyObject* item, Py_ssize_t place) {
  if (PyIndex_Check(item) == 0) {
    throw py::type_error("token " + std::to_string(place) + " is a " + Py_TYPE(item)->tp_name +
                         ", must be an integer: give the token ids of one prompt");
  }
  const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(item));
  if (!number) throw py::error_already_set();
  const std::int64_t token = PyLong_AsLongLong(number.ptr());
  if (token != -1 || PyErr_Occurred() == nullptr) return token;
  PyErr_Clear();
  throw std::overflow_error("token " + std::to_string(place) + " is " +
                            py::cast<std::string>(py::str(number)) +
                            ", must lie in [-2**63, 2**63): give ids of the model's vocabulary");
}

// Tokens `[start, stop)` as int64, side by side. It keeps the GIL: all the work is on Python's
// objects.
py::bytes pack_tokens(const py::object& tokens, Py_ssize_t start, Py_ssize_t stop) {
  PyObject* const items = tokens.ptr();
  if (PyList_Check(items) == 0 && PyTuple_Check(items) == 0) {
    throw py::type_error(std::string("token ids are a ") + Py_TYPE(items)->tp_name +
                         ", must be a list or tuple: convert them with list()");
  }
  const auto check_length = [&] {
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items);
    if (0 <= start && start <= stop && stop <= count) return;
    throw py::index_error("tokens " + std::to_string(start) + " to " + std::to_string(stop) +
                          " are asked of " + std::to_string(count) +
                          ": do not change the list while it is read");
  };
  check_length();
  const auto packed = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(
      nullptr, (stop - start) * static_cast<Py_ssize_t>(sizeof(std::int64_t))));
  if (!packed) throw py::error_already_set();
  char* place = PyBytes_AS_STRING(packed.ptr());
  for (Py_ssize_t i = start; i < stop; ++i, place += sizeof(std::int64_t)) {
    PyObject* const item = PySequence_Fast_GET_ITEM(items, i);
    std::int64_t token = 0;
    int beyond = 1;
    if (PyLong_Check(item)) token = PyLong_AsLongLongAndOverflow(item, &beyond);
    if (beyond != 0) {
      // Somebody's __index__ may do anything, also to the list.
      const auto held = py::reinterpret_borrow<py::object>(item);
      token = token_of(held.ptr(), i);
      check_length();
    }
    std::memcpy(place, &token, sizeof(token));
  }
  return packed;
}

}  // namespace

void bind_keys(py::module_& module) {
  module.def("pack_tokens", &pack_tokens, py::arg("tokens"), py::arg("start"), py::arg("stop"));
}

}  // namespace hscache
