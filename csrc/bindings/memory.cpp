#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/module.h"
#include "bindings/slots.h"
#include "core/arena.h"
#include "core/arena_reader.h"
#include "core/memory.h"
#include "core/move_rows.h"
#include "core/slot_pool.h"

namespace py = pybind11;

namespace hscache {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// Rows `[start, start + length)` of a run of chunks, one slot each, into strided memory.
// `row_bytes` are those of a stored row.
void read_rows(const SlotPool& pool, const std::vector<std::int64_t>& slots, std::int64_t row_bytes,
               std::int64_t start, std::int64_t length, std::uintptr_t destination,
               std::int64_t token_stride, Element stored, Element wanted) {
  const bool converts = stored != Element::kAny;
  if (converts != (wanted != Element::kAny) || wanted == Element::kFloat8) {
    throw std::invalid_argument(
        "rows are read as they are stored (ANY on both sides), or from a known element into "
        "FLOAT32, FLOAT16 or BFLOAT16: name both elements or none");
  }
  if (row_bytes % element_bytes(stored) != 0) {
    throw std::invalid_argument("a row of " + std::to_string(row_bytes) +
                                " bytes is no whole number of elements of " +
                                std::to_string(element_bytes(stored)) + " bytes");
  }
  const SlotLayout layout = slot_layout(pool, row_bytes, stored);
  RowsTask task{.paged = layout.rows};
  task.tokens = {.ids = BlockTable{std::span<const std::int64_t>(slots)}, .start = start};
  task.length = length;
  task.rows = {.data = reinterpret_cast<std::byte*>(destination), .token_stride = token_stride};
  check_tokens(task.paged, task.tokens, length);
  if (stored == wanted) {
    move_rows(Direction::kGather, task);
    return;
  }
  task.conversion = {.paged = stored, .rows = wanted, .scale_token_stride = 1};
  // A slot at a time: scales lie side by side in one slot only.
  for (std::int64_t done = 0; done < length;) {
    const std::int64_t position = start + done;
    const std::int64_t row = position % layout.rows.block_size;
    task.tokens.start = position;
    task.length = std::min(layout.rows.block_size - row, length - done);
    task.rows.data = reinterpret_cast<std::byte*>(destination) + done * token_stride;
    task.conversion.scales =
        layout.scale(slots[static_cast<std::size_t>(position / layout.rows.block_size)], row);
    move_rows(Direction::kGather, task);
    done += task.length;
  }
}

HugePages huge_pages_named(const std::string& name) {
  if (name == "off") return HugePages::kOff;
  if (name == "advise") return HugePages::kAdvise;
  if (name == "hugetlb") return HugePages::kHugetlb;
  throw std::invalid_argument("huge_pages is \"" + name + "\": set off, advise or hugetlb");
}

const char* name_of(HugePages huge_pages) {
  switch (huge_pages) {
    case HugePages::kAdvise:
      return "advise";
    case HugePages::kHugetlb:
      return "hugetlb";
    default:
      return "off";
  }
}

}  // namespace

void bind_memory(py::module_& module) {
  module.def("machine_memory_bytes", [] { return machine_memory_bytes(); });

  py::enum_<Element>(module, "Element")
      .value("ANY", Element::kAny)
      .value("FLOAT32", Element::kFloat32)
      .value("FLOAT16", Element::kFloat16)
      .value("BFLOAT16", Element::kBFloat16)
      .value("FLOAT8", Element::kFloat8);

  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena")
      // The factory's object is made known to pybind11 under the GIL: no call guard here.
      .def(py::init([](std::int64_t bytes, std::int64_t memory_limit, const std::string& pages) {
             const py::gil_scoped_release others_run;
             return std::shared_ptr<Arena>(new Arena(bytes, memory_limit, huge_pages_named(pages)),
                                           EndWithoutGil());
           }),
           py::arg("bytes"), py::arg("memory_limit") = 0, py::arg("huge_pages") = "off")
      .def_property_readonly("bytes", &Arena::bytes)
      .def_property_readonly("fd", &Arena::fd)
      .def("prefer_numa_node", &Arena::prefer_numa_node, py::arg("node"), NoGil())
      .def(
          "touch_in_background",
          [](Arena& arena, double huge_pages_timeout_s) {
            arena.touch_in_background(std::chrono::duration<double>(huge_pages_timeout_s));
          },
          py::arg("huge_pages_timeout_s"), NoGil())
      .def("stats", &Arena::stats, NoGil());

  py::class_<ArenaStats>(module, "ArenaStats")
      .def_readonly("bytes", &ArenaStats::bytes)
      .def_readonly("touched_bytes", &ArenaStats::touched_bytes)
      .def_readonly("touching", &ArenaStats::touching)
      .def_readonly("touch_refusal", &ArenaStats::touch_refusal)
      .def_property_readonly("huge_pages",
                             [](const ArenaStats& stats) { return name_of(stats.huge_pages); })
      .def_readonly("huge_pages_refusal", &ArenaStats::huge_pages_refusal)
      .def_readonly("numa_node", &ArenaStats::numa_node)
      .def_readonly("numa_refusal", &ArenaStats::numa_refusal);

  py::class_<ArenaReader>(module, "ArenaReader", py::buffer_protocol())
      .def(py::init<int, std::int64_t>(), py::arg("fd"), py::arg("bytes"), NoGil())
      .def_property_readonly("bytes", &ArenaReader::bytes)
      .def_buffer([](const ArenaReader& reader) {
        return py::buffer_info(reinterpret_cast<const unsigned char*>(reader.data()),
                               static_cast<py::ssize_t>(reader.bytes()), true);
      });

  py::class_<SlotPool, std::shared_ptr<SlotPool>>(module, "SlotPool")
      .def(py::init<std::shared_ptr<Arena>, std::int64_t>(), py::arg("arena").none(false),
           py::arg("slot_bytes"), NoGil())
      .def("allocate", &SlotPool::allocate, py::arg("count"), NoGil())
      .def("allocate_run", &SlotPool::allocate_run, py::arg("count"), NoGil())
      .def("free", &SlotPool::free, py::arg("slots"), NoGil())
      .def("read_rows", &read_rows, py::arg("slots"), py::arg("row_bytes"), py::arg("start"),
           py::arg("length"), py::arg("destination"), py::arg("token_stride"),
           py::arg("stored") = Element::kAny, py::arg("wanted") = Element::kAny, NoGil())
      .def_property_readonly("slot_bytes", &SlotPool::slot_bytes)
      .def_property_readonly("num_slots", &SlotPool::num_slots)
      .def_property_readonly("num_free", &SlotPool::num_free)
      .def("stats", &SlotPool::stats, NoGil());

  py::class_<SlotPoolStats>(module, "SlotPoolStats")
      .def_readonly("slots", &SlotPoolStats::slots)
      .def_readonly("used", &SlotPoolStats::used)
      .def_readonly("free", &SlotPoolStats::free)
      .def_readonly("largest_free_run", &SlotPoolStats::largest_free_run)
      .def_readonly("extents", &SlotPoolStats::extents)
      .def_readonly("extent_bytes", &SlotPoolStats::extent_bytes)
      .def_property_readonly("fragmentation", &SlotPoolStats::fragmentation);
}

}  // namespace hscache
