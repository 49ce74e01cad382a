#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/module.h"
#include "core/result_pool.h"
#include "core/slot_pool.h"

namespace py = pybind11;

namespace hscache {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// A pool that dies gives all its idle memory to the system, which takes the kernel a while.
struct DeleteWithoutGil {
  void operator()(ResultPool* pool) const {
    const py::gil_scoped_release released;
    std::default_delete<ResultPool>()(pool);
  }
};

py::buffer_info bytes_at(std::byte* data, std::int64_t bytes) {
  return {reinterpret_cast<unsigned char*>(data), static_cast<py::ssize_t>(bytes)};
}

// Bytes of slots that lie side by side.
class PoolRows {
 public:
  PoolRows(std::shared_ptr<SlotPool> pool, std::int64_t slot, std::int64_t bytes)
      : pool_(std::move(pool)), bytes_(bytes) {
    if (slot < 0 || slot >= pool_->num_slots()) {
      throw std::out_of_range("slot " + std::to_string(slot) + " is not of this pool of " +
                              std::to_string(pool_->num_slots()) + " slots");
    }
    const std::int64_t most = (pool_->num_slots() - slot) * pool_->slot_bytes();
    if (bytes < 1 || bytes > most) {
      throw std::out_of_range("cannot see " + std::to_string(bytes) + " bytes from slot " +
                              std::to_string(slot) + " on: ask for 1 to " + std::to_string(most) +
                              ", where the pool ends");
    }
    const PagedView slots = pool_->view(pool_->slot_bytes());
    data_ = slots.data + slots.offset(slot, 0, 0);
  }

  std::byte* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  const std::shared_ptr<SlotPool> pool_;
  const std::int64_t bytes_;
  std::byte* data_ = nullptr;
};

}  // namespace

void bind_results(py::module_& module) {
  py::class_<ResultBuffer, std::shared_ptr<ResultBuffer>>(module, "ResultBuffer",
                                                          py::buffer_protocol())
      .def_property_readonly("bytes", &ResultBuffer::bytes)
      .def_buffer(
          [](const ResultBuffer& buffer) { return bytes_at(buffer.data(), buffer.bytes()); });

  module.def("fresh_result", &fresh_result, py::arg("bytes"), NoGil());

  py::class_<ResultPool, std::unique_ptr<ResultPool, DeleteWithoutGil>>(module, "ResultPool")
      .def(py::init<std::int64_t>(), py::arg("max_bytes"))
      .def("take", &ResultPool::take, py::arg("bytes"), NoGil())
      .def("stats", &ResultPool::stats, NoGil());

  py::class_<ResultPoolStats>(module, "ResultPoolStats")
      .def_readonly("max_bytes", &ResultPoolStats::max_bytes)
      .def_readonly("in_use_bytes", &ResultPoolStats::in_use_bytes)
      .def_readonly("idle_bytes", &ResultPoolStats::idle_bytes)
      .def_readonly("hits", &ResultPoolStats::hits)
      .def_readonly("misses", &ResultPoolStats::misses)
      .def_readonly("fallbacks", &ResultPoolStats::fallbacks);

  // Exported as writable: torch, which knows no read-only tensors, makes a tensor of a read-only
  // buffer just the same but with a warning, which only a switch for the whole process silences.
  py::class_<PoolRows>(module, "PoolRows", py::buffer_protocol())
      .def(py::init<std::shared_ptr<SlotPool>, std::int64_t, std::int64_t>(),
           py::arg("pool").none(false), py::arg("slot"), py::arg("bytes"))
      .def_property_readonly("bytes", &PoolRows::bytes)
      .def_buffer([](const PoolRows& rows) { return bytes_at(rows.data(), rows.bytes()); });
}

}  // namespace hscache
