// The parts of hidden_cache._native.
#pragma once

#include <pybind11/pybind11.h>

namespace hscache {

// Element, Arena, ArenaReader, SlotPool.
void bind_memory(pybind11::module_& module);
// ResultBuffer, ResultPool, PoolRows.
void bind_results(pybind11::module_& module);
// PagedView, Ticket, Registration, TransferEngine.
void bind_transfers(pybind11::module_& module);

}  // namespace hscache
