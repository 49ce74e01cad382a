// hidden_cache._native: arena, slot pool and transfer engine for Python. No torch: memory is given
// as addresses, and the Python layer keeps its owner alive.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <tuple>
#include <vector>

#include "core/arena.h"
#include "core/arena_reader.h"
#include "core/copy_plan.h"
#include "core/host_copy.h"
#include "core/slot_pool.h"
#include "core/transfer_engine.h"
#include "host/host_runtime.h"

#if defined(HSCACHE_WITH_CUDA)
#include "cuda/cuda_runtime.h"
#endif

namespace py = pybind11;
using namespace hscache;

namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

std::byte* pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

PagedView make_view(std::uintptr_t address,
                    const std::tuple<std::int64_t, std::int64_t, std::int64_t>& shape,
                    std::int64_t row_bytes,
                    const std::tuple<std::int64_t, std::int64_t, std::int64_t>& strides) {
  const auto [num_blocks, num_layers, block_size] = shape;
  const auto [block_stride, layer_stride, token_stride] = strides;
  return {pointer(address), num_blocks,   num_layers,   block_size,
          row_bytes,        block_stride, layer_stride, token_stride};
}

// Rows `[start, start + length)` of a run of chunks, one slot each, into strided memory.
void read_rows(const SlotPool& pool, const std::vector<std::int64_t>& slots, std::int64_t row_bytes,
               std::int64_t start, std::int64_t length, std::uintptr_t destination,
               std::int64_t token_stride) {
  const PagedView view = pool.view(row_bytes);
  const RowsView rows{.data = pointer(destination), .token_stride = token_stride};
  copy_to_rows(
      view, rows,
      plan_copy(view, BlockTable{std::span<const std::int64_t>(slots)}, start, length, rows));
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

// Why rows in GPU memory cannot be moved; empty where they can.
std::string why_no_cuda() {
#if defined(HSCACHE_WITH_CUDA)
  return cuda::why_no_device();
#else
  return "this build has no CUDA: build again where nvcc is found";
#endif
}

std::unique_ptr<DeviceRuntime> make_runtime(std::optional<int> cuda_device) {
  if (!cuda_device) return std::make_unique<HostRuntime>();
#if defined(HSCACHE_WITH_CUDA)
  return std::make_unique<cuda::CudaRuntime>(*cuda_device);
#else
  throw std::runtime_error(why_no_cuda());
#endif
}

using Piece = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

// Gathers into slots of `pool`: each piece is (layer, start, length, slot). Neighbouring pieces of
// the same tokens travel together.
std::shared_ptr<Ticket> gather(TransferEngine& engine, const PagedView& source,
                               std::vector<std::int64_t> block_ids,
                               const std::vector<Piece>& pieces, const SlotPool& pool,
                               std::uintptr_t producer_stream, bool wait) {
  const PagedView slots = pool.view(source.row_bytes);
  TransferRequest request{.direction = Direction::kGather,
                          .paged = source,
                          .block_ids = std::move(block_ids),
                          .pieces = {},
                          .after_stream = producer_stream};
  for (const auto& [layer, start, length, slot] : pieces) {
    if (layer < 0 || layer >= source.num_layers) {
      throw std::out_of_range("layer " + std::to_string(layer) + " is outside the source's " +
                              std::to_string(source.num_layers) + " layers");
    }
    if (slot < 0 || slot >= slots.num_blocks) {
      throw std::out_of_range("slot " + std::to_string(slot) + " is outside the pool's " +
                              std::to_string(slots.num_blocks) + " slots");
    }
    if (length > slots.block_size) {
      throw std::invalid_argument("a piece of " + std::to_string(length) +
                                  " rows does not fit a slot of " +
                                  std::to_string(slots.block_size) + " rows");
    }
    const auto place = static_cast<std::size_t>(layer);
    const bool joins = !request.pieces.empty() && request.pieces.back().start == start &&
                       request.pieces.back().length == length &&
                       request.pieces.back().layers[place] == nullptr;
    if (!joins) {
      request.pieces.push_back({start, length, {}});
      request.pieces.back().layers.resize(static_cast<std::size_t>(source.num_layers), nullptr);
    }
    request.pieces.back().layers[place] = slots.data + slots.offset(slot, 0, 0);
  }
  return engine.submit(std::move(request), wait ? Backpressure::kWait : Backpressure::kRefuse);
}

}  // namespace

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

  module.def("machine_memory_bytes", [] { return machine_memory_bytes(); });
  module.def("why_no_cuda", &why_no_cuda);

  py::class_<PagedView>(module, "PagedView")
      .def(py::init(&make_view), py::arg("address"), py::arg("shape"), py::arg("row_bytes"),
           py::arg("strides"));

  py::class_<Arena, std::shared_ptr<Arena>>(module, "Arena")
      .def(py::init([](std::int64_t bytes, std::int64_t memory_limit, const std::string& pages) {
             return std::make_shared<Arena>(bytes, memory_limit, huge_pages_named(pages));
           }),
           py::arg("bytes"), py::arg("memory_limit") = 0, py::arg("huge_pages") = "off", NoGil())
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
           py::arg("length"), py::arg("destination"), py::arg("token_stride"), NoGil())
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

  py::class_<Ticket, std::shared_ptr<Ticket>>(module, "Ticket")
      .def_property_readonly(
          "done", [](const Ticket& ticket) { return ticket.state() == Ticket::State::kDone; })
      .def_property_readonly(
          "ended", [](const Ticket& ticket) { return ticket.state() != Ticket::State::kPending; })
      .def_property_readonly("error",
                             [](const Ticket& ticket) -> std::optional<std::string> {
                               if (ticket.state() != Ticket::State::kFailed) return std::nullopt;
                               return ticket.error();
                             })
      .def(
          "wait",
          [](const Ticket& ticket, std::optional<double> timeout_s) {
            if (!timeout_s) return ticket.wait(std::nullopt);
            return ticket.wait(std::chrono::duration<double>(*timeout_s));
          },
          py::arg("timeout_s") = py::none(), NoGil());

  py::class_<Registration>(module, "Registration")
      .def_property_readonly("bytes", &Registration::bytes)
      .def_property_readonly("refusal", &Registration::refusal);

  py::class_<TransferEngine>(module, "TransferEngine")
      .def(py::init([](int lanes, std::int64_t max_pending, std::int64_t staging_bytes,
                       bool threaded, std::optional<int> cuda_device) {
             return std::make_unique<TransferEngine>(
                 make_runtime(cuda_device), TransferOptions{lanes, max_pending, staging_bytes},
                 threaded);
           }),
           py::arg("lanes") = TransferOptions{}.lanes,
           py::arg("max_pending") = TransferOptions{}.max_pending,
           py::arg("staging_bytes") = TransferOptions{}.staging_bytes, py::arg("threaded") = true,
           py::arg("cuda_device") = py::none(), NoGil())
      .def(
          "register_pool",
          [](TransferEngine& engine, const SlotPool& pool) {
            const PagedView slots = pool.view(pool.slot_bytes());
            return engine.register_host(slots.data, slots.num_blocks * slots.block_stride,
                                        pool.slot_bytes());
          },
          py::arg("pool"), py::keep_alive<0, 1>(), py::keep_alive<0, 2>(), NoGil())
      .def("gather", &gather, py::arg("source"), py::arg("block_ids"), py::arg("pieces"),
           py::arg("pool"), py::arg("producer_stream") = 0, py::arg("wait") = true, NoGil())
      .def("poll", &TransferEngine::poll, NoGil())
      .def("drain", &TransferEngine::drain, NoGil())
      .def("close", &TransferEngine::close, NoGil())
      .def_property_readonly("pending", &TransferEngine::pending);
}
