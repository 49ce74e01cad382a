#include <pybind11/chrono.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/module.h"
#include "bindings/slots.h"
#include "core/arena.h"
#include "core/background_registration.h"
#include "core/transfer_engine.h"
#include "host/host_runtime.h"

#if defined(HSCACHE_WITH_CUDA)
#include "cuda/cuda_runtime.h"
#endif

namespace py = pybind11;

namespace hscache {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

PagedView make_view(std::uintptr_t address,
                    const std::tuple<std::int64_t, std::int64_t, std::int64_t>& shape,
                    std::int64_t row_bytes,
                    const std::tuple<std::int64_t, std::int64_t, std::int64_t>& strides) {
  const auto [num_blocks, num_layers, block_size] = shape;
  const auto [block_stride, layer_stride, token_stride] = strides;
  return {reinterpret_cast<std::byte*>(address),
          num_blocks,
          num_layers,
          block_size,
          row_bytes,
          block_stride,
          layer_stride,
          token_stride};
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

// Layer, first token, number of tokens, slot, first row in the slot.
using Piece = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

// What the rows are on their two sides.
struct Elements {
  Element paged = Element::kAny;
  Element stored = Element::kAny;
  bool count_non_finite = false;
};

void check_place(const PagedView& paged, const PagedView& slots, const Piece& piece) {
  const auto [layer, start, length, slot, row] = piece;
  if (layer < 0 || layer >= paged.num_layers) {
    throw std::out_of_range("layer " + std::to_string(layer) + " is outside the paged memory's " +
                            std::to_string(paged.num_layers) + " layers");
  }
  if (slot < 0 || slot >= slots.num_blocks) {
    throw std::out_of_range("slot " + std::to_string(slot) + " is outside the pool's " +
                            std::to_string(slots.num_blocks) + " slots");
  }
  if (row < 0 || length > slots.block_size - row) {
    throw std::invalid_argument("a piece of " + std::to_string(length) + " rows from row " +
                                std::to_string(row) + " on does not fit a slot of " +
                                std::to_string(slots.block_size) + " rows");
  }
}

// Between paged memory and slots. Neighbouring pieces of the same tokens travel together.
std::shared_ptr<Ticket> submit(TransferEngine& engine, Direction direction, const PagedView& paged,
                               std::vector<std::int64_t> block_ids,
                               const std::vector<Piece>& pieces, const SlotPool& pool,
                               std::uintptr_t after_stream, bool wait, const Elements& elements) {
  const std::int64_t row_bytes =
      paged.row_bytes / element_bytes(elements.paged) * element_bytes(elements.stored);
  const SlotLayout slots = slot_layout(pool, row_bytes, elements.stored);
  TransferRequest request{.direction = direction,
                          .paged = paged,
                          .block_ids = std::move(block_ids),
                          .pieces = {},
                          .after_stream = after_stream,
                          .paged_element = elements.paged,
                          .rows_element = elements.stored,
                          .count_non_finite = elements.count_non_finite};
  const auto layers = static_cast<std::size_t>(paged.num_layers);
  for (const Piece& piece : pieces) {
    check_place(paged, slots.rows, piece);
    const auto [layer, start, length, slot, row] = piece;
    const auto place = static_cast<std::size_t>(layer);
    const bool joins = !request.pieces.empty() && request.pieces.back().start == start &&
                       request.pieces.back().length == length &&
                       request.pieces.back().layers[place] == nullptr;
    if (!joins) {
      request.pieces.push_back({.start = start, .length = length});
      request.pieces.back().layers.resize(layers, nullptr);
      if (slots.scales_offset > 0) request.pieces.back().scales.resize(layers, nullptr);
    }
    RowsPiece& last = request.pieces.back();
    last.layers[place] = slots.rows.data + slots.rows.offset(slot, 0, row);
    if (slots.scales_offset > 0) last.scales[place] = slots.scale(slot, row);
  }
  return engine.submit(std::move(request), wait ? Backpressure::kWait : Backpressure::kRefuse);
}

template <Direction kDirection>
std::shared_ptr<Ticket> move(TransferEngine& engine, const PagedView& paged,
                             std::vector<std::int64_t> block_ids, const std::vector<Piece>& pieces,
                             const SlotPool& pool, std::uintptr_t after_stream, bool wait,
                             Element paged_element, Element stored, bool count_non_finite) {
  return submit(engine, kDirection, paged, std::move(block_ids), pieces, pool, after_stream, wait,
                {paged_element, stored, count_non_finite});
}

// Rows in token order are paged memory of one block.
std::shared_ptr<Ticket> copy_rows(TransferEngine& engine, const PagedView& rows,
                                  const std::vector<Piece>& pieces, const SlotPool& pool,
                                  std::uintptr_t after_stream, bool wait, Element rows_element,
                                  Element stored, bool count_non_finite) {
  if (rows.num_blocks != 1) {
    throw std::invalid_argument("rows in token order are a view of 1 block, not of " +
                                std::to_string(rows.num_blocks) +
                                ": pass shape (1, layers, tokens)");
  }
  return submit(engine, Direction::kGather, rows, {0}, pieces, pool, after_stream, wait,
                {rows_element, stored, count_non_finite});
}

}  // namespace

void bind_transfers(py::module_& module) {
  module.def("why_no_cuda", &why_no_cuda);

  py::class_<PagedView>(module, "PagedView")
      .def(py::init(&make_view), py::arg("address"), py::arg("shape"), py::arg("row_bytes"),
           py::arg("strides"));

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
      .def_property_readonly("non_finite_rows", &Ticket::non_finite_rows)
      .def(
          "wait",
          [](const Ticket& ticket, std::optional<double> timeout_s) {
            if (!timeout_s) return ticket.wait(std::nullopt);
            return ticket.wait(std::chrono::duration<double>(*timeout_s));
          },
          py::arg("timeout_s") = py::none(), NoGil())
      .def("cancel", &Ticket::cancel, NoGil());

  py::class_<BackgroundRegistration, WithoutGil<BackgroundRegistration>>(module, "Registration")
      .def_property_readonly("bytes", &BackgroundRegistration::bytes)
      .def_property_readonly("refusal", &BackgroundRegistration::refusal)
      .def_property_readonly("at_work", &BackgroundRegistration::at_work)
      .def("wait", &BackgroundRegistration::wait, NoGil())
      .def("stop", &BackgroundRegistration::stop, NoGil());

  const TransferOptions defaults;
  py::class_<TransferEngine, WithoutGil<TransferEngine>>(module, "TransferEngine")
      // The factory's object is made known to pybind11 under the GIL: no call guard here.
      .def(py::init([](int lanes, std::int64_t max_pending, std::int64_t staging_bytes,
                       bool threaded, std::optional<int> cuda_device, std::int64_t dma_span_bytes,
                       bool zero_copy) {
             const py::gil_scoped_release others_run;
             return WithoutGil<TransferEngine>(new TransferEngine(
                 make_runtime(cuda_device),
                 TransferOptions{lanes, max_pending, staging_bytes, dma_span_bytes, zero_copy},
                 threaded));
           }),
           py::arg("lanes") = defaults.lanes, py::arg("max_pending") = defaults.max_pending,
           py::arg("staging_bytes") = defaults.staging_bytes, py::arg("threaded") = true,
           py::arg("cuda_device") = py::none(), py::kw_only(),
           py::arg("dma_span_bytes") = defaults.dma_span_bytes,
           py::arg("zero_copy") = defaults.zero_copy)
      .def(
          "register_arena",
          [](TransferEngine& engine, const Arena& arena) {
            return WithoutGil<BackgroundRegistration>(
                new BackgroundRegistration(engine.register_host(arena.data(), arena.bytes())));
          },
          py::arg("arena"), py::keep_alive<0, 1>(), py::keep_alive<0, 2>(), NoGil())
      .def("gather", &move<Direction::kGather>, py::arg("source"), py::arg("block_ids"),
           py::arg("pieces"), py::arg("pool"), py::arg("producer_stream") = 0,
           py::arg("wait") = true, py::kw_only(), py::arg("source_element") = Element::kAny,
           py::arg("stored") = Element::kAny, py::arg("count_non_finite") = false, NoGil())
      .def("scatter", &move<Direction::kScatter>, py::arg("target"), py::arg("block_ids"),
           py::arg("pieces"), py::arg("pool"), py::arg("reader_stream") = 0, py::arg("wait") = true,
           py::kw_only(), py::arg("target_element") = Element::kAny,
           py::arg("stored") = Element::kAny, py::arg("count_non_finite") = false, NoGil())
      .def("copy_rows", &copy_rows, py::arg("rows"), py::arg("pieces"), py::arg("pool"),
           py::arg("producer_stream") = 0, py::arg("wait") = true, py::kw_only(),
           py::arg("rows_element") = Element::kAny, py::arg("stored") = Element::kAny,
           py::arg("count_non_finite") = false, NoGil())
      .def("poll", &TransferEngine::poll, NoGil())
      .def("drain", &TransferEngine::drain, NoGil())
      .def("close", &TransferEngine::close, NoGil())
      .def_property_readonly("pending", [](const TransferEngine& engine) {
        const py::gil_scoped_release others_run;
        return engine.pending();
      });
}

}  // namespace hscache
