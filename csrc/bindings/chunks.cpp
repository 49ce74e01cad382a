#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/module.h"
#include "core/chunk_tree.h"

namespace py = pybind11;

namespace hscache {
namespace {

using Id = ChunkTree::Id;
using Ids = std::vector<Id>;
using Layers = std::vector<std::int64_t>;

void fill(ChunkTree& tree, Id id, int format,
          const std::vector<std::pair<std::int64_t, std::int64_t>>& layers,
          const ChunkTree::Tickets& tickets) {
  std::vector<ChunkTree::LayerSlot> added;
  added.reserve(layers.size());
  for (const auto& [layer, slot] : layers) added.push_back({layer, slot});
  tree.fill(id, format, added, tickets);
}

std::vector<std::pair<int, std::vector<std::int64_t>>> runs(const ChunkTree& tree, const Ids& ids,
                                                            std::int64_t layer) {
  std::vector<std::pair<int, std::vector<std::int64_t>>> found;
  for (auto& run : tree.runs(ids, layer)) found.emplace_back(run.format, std::move(run.slots));
  return found;
}

}  // namespace

// The store's lock guards it, and all calls are short: the GIL stays.
void bind_chunks(py::module_& module) {
  py::class_<ChunkTree>(module, "ChunkTree")
      .def(py::init<>())
      .def("__len__", &ChunkTree::size)
      .def("add_format", &ChunkTree::add_format, py::arg("pool").none(false))
      .def("add_absent", &ChunkTree::add_absent)
      .def("add", &ChunkTree::add, py::arg("id"), py::arg("parent"))
      .def("present", &ChunkTree::present, py::arg("id"))
      .def("remove", &ChunkTree::remove, py::arg("id"))
      .def("remove_all", &ChunkTree::remove_all)
      .def("take_changes", &ChunkTree::take_changes)
      .def("fill", &fill, py::arg("id"), py::arg("format"), py::arg("layers"), py::arg("tickets"))
      .def(
          "missing",
          [](const ChunkTree& tree, Id id, const Layers& layers) {
            return tree.missing(id, layers);
          },
          py::arg("id"), py::arg("layers"))
      .def("holds", &ChunkTree::holds, py::arg("id"), py::arg("layer"))
      .def(
          "pin_prefix",
          [](ChunkTree& tree, const Ids& ids, const Layers& layers) {
            return tree.pin_prefix(ids, layers);
          },
          py::arg("ids"), py::arg("layers"))
      .def("pin", &ChunkTree::pin, py::arg("id"))
      .def(
          "unpin", [](ChunkTree& tree, const Ids& ids) { tree.unpin(ids); }, py::arg("ids"))
      .def("runs", &runs, py::arg("ids"), py::arg("layer"))
      .def(
          "tickets",
          [](const ChunkTree& tree, const Ids& ids, const Layers& layers) {
            return tree.tickets(ids, layers);
          },
          py::arg("ids"), py::arg("layers"))
      .def("settle", &ChunkTree::settle)
      .def("evict", &ChunkTree::evict)
      .def("allocate", &ChunkTree::allocate, py::arg("format"), py::arg("count"))
      .def("retire", &ChunkTree::retire, py::arg("format"), py::arg("slots"), py::arg("tickets"))
      .def_property_readonly("num_evicted", &ChunkTree::num_evicted);
}

}  // namespace hscache
