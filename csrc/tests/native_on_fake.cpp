// _fake_cuda: the stand-in for the CUDA runtime for Python tests that drive hidden_cache._native on
// it. Both modules are in the one file _native_on_fake, since both mean the same runtime.
#include <cuda_runtime_api.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "tests/fake_cuda.h"

namespace py = pybind11;
namespace fake = hscache::fake;

namespace {

// Where in device memory, and what.
using Write = std::pair<std::uintptr_t, py::bytes>;

std::uintptr_t allocate(std::size_t bytes) {
  void* data = nullptr;
  if (cudaMalloc(&data, bytes) != cudaSuccess) throw std::bad_alloc();
  return reinterpret_cast<std::uintptr_t>(data);
}

// One kernel: `per_piece` writes run together, and other streams may come between two pieces.
void write_late(std::uintptr_t stream, const std::vector<Write>& writes, std::size_t per_piece) {
  std::vector<std::function<void()>> pieces;
  for (std::size_t first = 0; first < writes.size(); first += per_piece) {
    std::vector<std::pair<std::byte*, std::string>> piece;
    for (std::size_t i = first; i < std::min(first + per_piece, writes.size()); ++i) {
      piece.emplace_back(reinterpret_cast<std::byte*>(writes[i].first), writes[i].second);
    }
    pieces.push_back([piece = std::move(piece)] {
      for (const auto& [to, bytes] : piece) std::memcpy(to, bytes.data(), bytes.size());
    });
  }
  fake::enqueue(reinterpret_cast<cudaStream_t>(stream), std::move(pieces));
}

py::bytes read_now(std::uintptr_t address, std::size_t bytes) {
  const fake::DeviceAccess open;
  return {reinterpret_cast<const char*>(address), bytes};
}

}  // namespace

PYBIND11_MODULE(_fake_cuda, module) {
  module.doc() = "A CUDA device that runs everything late and in hostile order. One thread only.";

  module.def(
      "reset",
      [](std::uint64_t seed) {
        fake::reset(seed);
        fake::count_misuse();
      },
      py::arg("seed"));
  module.def("allocate", &allocate, py::arg("bytes"));
  module.def(
      "free", [](std::uintptr_t data) { cudaFree(reinterpret_cast<void*>(data)); },
      py::arg("address"));
  module.def("make_stream", [] { return reinterpret_cast<std::uintptr_t>(fake::make_stream()); });
  module.def("write", &write_late, py::arg("stream"), py::arg("writes"), py::arg("per_piece"));
  module.def(
      "synchronize",
      [](std::uintptr_t stream) { cudaStreamSynchronize(reinterpret_cast<cudaStream_t>(stream)); },
      py::arg("stream"));
  module.def("progress", &fake::progress);
  module.def("finish", &fake::finish);
  module.def("read", &read_now, py::arg("address"), py::arg("bytes"));

  py::class_<fake::Counters>(module, "Counters")
      .def_readonly("blocking_calls", &fake::Counters::blocking_calls)
      .def_readonly("pageable_copies", &fake::Counters::pageable_copies)
      .def_readonly("misuses", &fake::Counters::misuses);
  module.def("counters", &fake::counters);
}
